"""pFedLA and HeurpFedLA: plain twins of Algorithms 1 and 2, numbers by hand, the calculus of the step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, make, play, toy_federation
from torch import Tensor, nn

from pfedla.algorithms import create
from pfedla.algorithms.pfedla import nearest
from pfedla.core.contracts import Algorithm, Cohort, LocalData, Params, Payload, ServerState, generator
from pfedla.core.layers import Layers, mix, mix_few, stack, take, weighted_mean
from pfedla.core.settings import Training
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds

LINE = Layers.of(nn.Linear(1, 1))
COMPACT = {"hypernetwork": "compact"}
FORMS = pytest.mark.parametrize("options", [{}, COMPACT], ids=["network", "compact"])
THREE = Cohort(1, 0, torch.arange(3), torch.ones(3))


# The whole method, beside a plain implementation


class PlainHypernetwork(nn.Module):
    """HN_i(v_i; ψ_i): one client's, of plain modules."""

    def __init__(self, start: Params) -> None:
        super().__init__()
        self.v = nn.Parameter(start["embedding"].clone())
        self.trunk = nn.Sequential(*(part for _ in range(3) for part in (nn.Linear(100, 100), nn.ReLU())))
        self.heads = nn.ModuleList(nn.Linear(100, len(bias)) for bias in start["heads.bias"])
        pairs = {f"trunk.{2 * depth}": f"trunk{depth}" for depth in range(3)}
        loaded = {
            f"{ours}.{part}": start[f"{theirs}.{part}"] for ours, theirs in pairs.items() for part in ("weight", "bias")
        }
        self.load_state_dict(loaded, strict=False)
        for head in self.heads:
            nn.init.zeros_(head.weight)
            nn.init.zeros_(head.bias)

    def forward(self) -> Tensor:
        hidden = self.trunk(self.v)
        return torch.stack([head(hidden).softmax(0) for head in self.heads])


def plain_algorithm(
    data: list[tuple[Tensor, Tensor]], method: Algorithm, start: ServerState, rounds: int, k: int
) -> tuple[list[Params], Tensor]:
    """Algorithm 1, and with k > 0 Algorithm 2: autograd through the stacked models, client after client."""
    clients, layers, training = range(len(data)), method.task.layers, method.training
    modules = [
        copy.deepcopy(method.task.module).train() for _ in clients
    ]  # a client's own statistics stay in its module
    thetas = [{name: p.detach().clone() for name, p in one.named_parameters()} for one in modules]
    networks = [PlainHypernetwork(take(start["hypernetworks"], i)).double() for i in clients]
    for round in range(1, rounds + 1):
        trained = []
        for i in clients:
            alpha = networks[i]()
            mixed = {n: sum(alpha[layers.index[n], j] * thetas[j][n] for j in clients) for n in thetas[i]}
            own = [(-alpha[layer, i].item(), -layer) for layer in range(len(layers))]
            retained = [-layer for _, layer in sorted(own)[:k]]
            begin = {n: thetas[i][n] if layers.index[n] in retained else v.detach() for n, v in mixed.items()}
            theta = plain_sgd(modules[i], begin, *data[i], generator(0, "batches", round, i), training)
            sent = [n for n in mixed if layers.index[n] not in retained]
            objective = sum((mixed[n] * (theta[n] - begin[n])).sum() for n in sent)
            parameters = list(networks[i].parameters())
            ascent = torch.autograd.grad(objective, parameters, allow_unused=True, materialize_grads=True)
            with torch.no_grad():
                for parameter, part in zip(parameters, ascent, strict=True):
                    parameter += method.hypernetwork_lr * part
            trained.append(theta)
        thetas = trained  # all clients were mixed from the same snapshot
    return thetas, torch.stack([network().detach() for network in networks])


def plain_sgd(
    module: nn.Module, begin: Params, x: Tensor, y: Tensor, draws: torch.Generator, training: Training
) -> Params:
    module.load_state_dict(begin, strict=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=training.learning_rate)
    for order in [torch.randperm(len(y), generator=draws) for _ in range(training.local_epochs)]:
        for first, last in batch_bounds(len(y), training.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(module(x[order[first:last]]), y[order[first:last]]).backward()
            optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def as_double(tensors: Params) -> Params:
    return {name: value.double() if value.is_floating_point() else value for name, value in tensors.items()}


def run_in_double(
    method: Algorithm, data: list[tuple[Tensor, Tensor]], server: ServerState, rounds: int
) -> ServerState:
    """Run rounds without an engine, which would make the examples float32."""
    states, cohort = (
        [method.init_client() for _ in data],
        Cohort(0, 0, torch.arange(len(data)), torch.ones(len(data))),
    )
    for round in range(1, rounds + 1):
        downloads, uploads = method.download(server, cohort._replace(round=round)), []
        for i, (x, y) in enumerate(data):
            draws = generator(0, "batches", round, i)
            order = torch.stack([torch.randperm(len(y), generator=draws) for _ in range(method.training.local_epochs)])
            result = method.local_update(states[i], downloads.rows(i), LocalData(x, y, order))
            states[i] = result.client
            uploads.append(result.upload.tensors)
        server = method.aggregate(server, cohort, downloads, Payload(stack(uploads), torch.ones_like(downloads.sent)))
    return server


@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
@pytest.mark.parametrize(("name", "k"), [("pfedla", 0), ("heurpfedla", 1)])
def test_five_rounds_equal_a_plain_implementation(name: str, k: int, batch_norm: bool) -> None:
    """In float64: BatchNorm amplifies the rounding of float32."""
    data = [(examples.x.double(), examples.y) for examples in toy_federation().train]
    options = {"hypernetwork_lr": 5.0} | ({"retained_layers": k} if k else {})
    method = create(name, task_of(TinyNet(batch_norm, torch.float64)), budget(0.1, 2, 5), options)
    start = {group: as_double(part) for group, part in method.init_server(len(data), seed=0).items()}
    thetas, alpha = plain_algorithm(data, method, start, rounds=5, k=k)
    after = run_in_double(method, data, start, rounds=5)
    assert alpha.max() > 0.25  # they moved from 1/6
    torch.testing.assert_close(method.alpha(after), alpha, rtol=1e-6, atol=1e-6)
    assert_same(after["models"], stack(thetas), tolerance=1e-6)


# Numbers by hand


def test_weighted_mean_by_hand_counts_are_never_averaged() -> None:
    stacked = {"w": torch.tensor([[2.0], [6.0]]), "count": torch.tensor([3, 7])}
    mean = weighted_mean(stacked, torch.tensor([3, 1]))
    assert mean["w"].item() == 3.0
    assert mean["count"].item() == 7
    assert mean["count"].dtype == torch.int64


# The hypernetwork's step


def double_server(**options: object) -> tuple[Algorithm, ServerState, Cohort]:
    """A pFedLA server of four clients in float64, with models and hypernetworks that differ."""
    algorithm = create("pfedla", task_of(TinyNet(dtype=torch.float64)), budget(0.05, 1, 10_000), options)
    server, noise = algorithm.init_server(4, seed=0), torch.Generator().manual_seed(3)
    for group in ("models", "hypernetworks"):
        for name, value in server[group].items():
            server[group][name] = value + 0.1 * torch.randn(value.shape, generator=noise, dtype=torch.float64)
    return algorithm, server, Cohort(1, 0, torch.arange(4), torch.full((4,), 20))


@FORMS
def test_closed_form_equals_autograd_through_the_stacked_models(options: dict) -> None:
    algorithm, server, cohort = double_server(**options)
    downloads = algorithm.download(server, cohort)
    delta = {name: torch.randn_like(value) for name, value in downloads.tensors.items()}
    uploads = Payload({name: value + delta[name] for name, value in downloads.tensors.items()}, downloads.sent)
    after = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, uploads)["hypernetworks"]
    leaves = {name: value.clone().requires_grad_() for name, value in server["hypernetworks"].items()}
    alpha, objective = algorithm._network(4).alpha(leaves), torch.zeros(())
    for name, models in server["models"].items():
        mixed = torch.einsum("ij,j...->i...", alpha[:, algorithm.task.layers.index[name]], models)
        objective = objective + (mixed * delta[name]).sum()
    objective.backward()
    for name, leaf in leaves.items():
        expected = leaf.detach() + algorithm.hypernetwork_lr * leaf.grad
        torch.testing.assert_close(after[name], expected, rtol=1e-9, atol=1e-9)


def test_the_step_is_taken_at_the_snapshot_the_mix_was_made_of() -> None:
    """With the new θ_i the self-weight would grow by |Δθ_i|² even where Δθ is orthogonal to all models."""
    algorithm = create("pfedla", task_of(nn.Linear(1, 2, bias=False)), budget(0.1, 1, 1))
    cohort = Cohort(1, 0, torch.tensor([0, 1]), torch.tensor([5, 5]))
    server = algorithm.init_server(2, seed=0)
    server["models"] = {"weight": torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])}
    downloads = algorithm.download(server, cohort)
    assert downloads.tensors["weight"].flatten(1).tolist() == [[2.0, 0.0], [2.0, 0.0]]
    orthogonal = Payload({"weight": downloads.tensors["weight"] + torch.tensor([[0.0], [1.0]])}, downloads.sent)
    after = algorithm.aggregate(server, cohort, downloads, orthogonal)
    assert (algorithm.alpha(after) == 0.5).all()
    assert after["models"]["weight"].flatten(1).tolist() == [[2.0, 1.0], [2.0, 1.0]]


@FORMS
def test_a_step_that_overflows_is_not_taken(options: dict) -> None:
    algorithm = make("pfedla", **options)
    server = algorithm.init_server(3, seed=0)
    server["models"] = {name: torch.full_like(value, 1e30) for name, value in server["models"].items()}
    downloads = algorithm.download(server, THREE)
    uploads = {name: value.clone() for name, value in downloads.tensors.items()}
    uploads["fc1.weight"][1] = -1e30
    after = algorithm.aggregate(copy.deepcopy(server), THREE, downloads, Payload(uploads, downloads.sent))
    assert algorithm.alpha(after).isfinite().all()
    assert_same(take(after["hypernetworks"], 1), take(server["hypernetworks"], 1))


# Retained layers


def test_retained_layers_are_those_of_largest_self_weight_ties_to_the_output() -> None:
    logits = torch.zeros(3, 3, 3)
    logits[1, 0, 1] = 5.0  # client 1 trusts its own first layer most
    logits[2, 1, 0] = 5.0  # client 2 trusts client 0's second layer: its own weight there is smallest
    for k, expected in {1: [[1, 1, 0], [0, 1, 1], [1, 1, 0]], 2: [[1, 0, 0], [0, 1, 0], [0, 1, 0]]}.items():
        algorithm = make("heurpfedla", batch_norm=True, retained_layers=k)
        server = algorithm.init_server(3, seed=0)
        server["hypernetworks"]["heads.bias"] = logits
        assert algorithm.download(server, THREE).sent.int().tolist() == expected


def with_noise(algorithm: Algorithm) -> ServerState:
    server, noise = algorithm.init_server(3, seed=0), torch.Generator().manual_seed(0)
    server["models"] = {name: torch.randn(value.shape, generator=noise) for name, value in server["models"].items()}
    return server


def test_a_retained_layer_takes_no_part_in_the_step() -> None:
    """Its mix was not used, so its weights stay; those of the sent layers move."""
    algorithm = make("heurpfedla", retained_layers=1, hypernetwork_lr=0.01)
    server = with_noise(algorithm)
    downloads = algorithm.download(server, THREE)
    assert downloads.sent.tolist() == [[True, False]] * 3
    uploads = {name: value.flip(0) for name, value in server["models"].items()}
    after = algorithm.aggregate(server, THREE, downloads, Payload(uploads, torch.ones(3, 2).bool()))
    alpha = algorithm.alpha(after)
    assert (alpha[:, 1] == 1 / 3).all()
    assert (alpha[:, 0] != 1 / 3).any()
    assert_same(after["models"], uploads)  # the upload is full: the server's copy is current


# Neighbours


def cut(alpha: Tensor, cohort: Cohort, count: int) -> Tensor:
    """alpha as it is mixed: the weights of the neighbours at their places, zero elsewhere."""
    weights, senders = nearest(alpha, cohort, count)
    return torch.zeros_like(alpha).scatter_(-1, senders, weights)


def test_neighbours_cut_renormalise_and_always_include_the_client_itself() -> None:
    alpha = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.4, 0.35, 0.25]]).unsqueeze(1).repeat(1, 2, 1)
    expected = torch.tensor([[1 / 7, 6 / 7, 0], [5 / 7, 2 / 7, 0], [0.4 / 0.65, 0, 0.25 / 0.65]])
    torch.testing.assert_close(cut(alpha, THREE, 2)[:, 0], expected)
    vanished = torch.tensor([[[0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]]])
    assert torch.equal(cut(vanished, THREE, 1)[:, 0], torch.eye(3))


def test_equal_weights_are_cut_in_a_seeded_order_that_differs_by_client_layer_and_round() -> None:
    uniform = torch.full((20, 2, 20), 1 / 20)
    first, again, second = (cut(uniform, Cohort(r, 0, torch.arange(20), torch.ones(20)), 3) > 0 for r in (1, 1, 2))
    assert (first.sum(-1) == 3).all()
    assert first.diagonal(dim1=0, dim2=2).all()
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:, 0], first[:, 1])
    assert (first.any(0).sum(-1) > 10).all()  # not always the same few


def test_mixing_the_neighbours_equals_mixing_all_with_the_others_set_to_zero_and_reads_only_theirs() -> None:
    layers, draws = Layers.of(nn.Linear(2, 1)), torch.Generator().manual_seed(0)
    models = {"weight": torch.randn(5, 1, 2, generator=draws), "bias": torch.randn(5, 1, generator=draws)}
    alpha, cohort = (torch.rand(5, 1, 5, generator=draws).softmax(-1), Cohort(1, 0, torch.arange(5), torch.ones(5)))
    few = mix_few(*nearest(alpha, cohort, 2), models, layers)
    assert_same(few, mix(cut(alpha, cohort, 2), models, layers), tolerance=1e-6)
    for value in models.values():
        value[[0, 2, 4]] = torch.nan  # in a product with zero weights it would spoil the mix
    mixed = mix_few(torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[3, 1]]]), models, layers)
    for name, value in models.items():
        torch.testing.assert_close(mixed[name][0], 0.25 * value[3] + 0.75 * value[1])


def test_a_client_left_out_of_the_mix_can_come_back() -> None:
    """The step uses the uncut weights and all senders, so the weight of a sender that was cut still moves."""
    algorithm = make("pfedla", neighbours=1)
    server = with_noise(algorithm)
    downloads = algorithm.download(server, THREE)
    assert_same(downloads.tensors, server["models"])  # each mixes itself only
    towards = {name: value[torch.tensor([1, 2, 0])] for name, value in server["models"].items()}
    after = algorithm.alpha(algorithm.aggregate(server, THREE, downloads, Payload(towards, downloads.sent)))
    assert (after[torch.arange(3), :, [1, 2, 0]] > 1 / 3).all()


# One weight for the whole model


@pytest.mark.parametrize("name", ["pfedla", "pfedla-heldout"])
def test_one_weight_for_the_whole_model_is_the_same_for_all_layers(name: str) -> None:
    algorithm = make(name, weights="model")
    alpha = algorithm.alpha(play(algorithm, toy_federation())[0][-1].server)
    torch.testing.assert_close(alpha[:, 0], alpha[:, 1])
    assert not torch.allclose(alpha, torch.full_like(alpha, 1 / 6), atol=1e-4)
