"""Hand-worked numbers and the calculus of pFedLA and FedAvg; those of the other methods stand in test_<method>.py."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import PAPER, TinyNet, assert_same, budget, make, toy_federation
from torch import nn
from torch.func import functional_call, vmap

from pfedla.algorithms import create
from pfedla.algorithms.hypernetworks import LayerWeightHypernetwork, layer_gradient
from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.core.layers import Layers, choose, mix, repeat, stack, take, weighted_mean
from pfedla.core.tasks import task_of

LINE = Layers.of(nn.Linear(1, 1))
COMPACT = {"hypernetwork": "compact"}


def test_layers_group_weight_and_bias_and_leave_statistics_apart() -> None:
    layers = Layers.of(TinyNet(batch_norm=True))
    assert layers.names == ("fc1", "bn", "fc2")
    assert layers.num_parameters == (35, 10, 18)
    assert layers.statistics == {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert layers.index["bn.running_mean"] == layers.index["bn.weight"] == 1


def test_a_frozen_parameter_does_not_train_and_a_tied_one_counts_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(3, 3, bias=False)
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.out = nn.Linear(3, 3, bias=False)
            self.out.weight = self.embed.weight

    layers = Layers.of(Tied())
    assert layers.names == ("embed",)
    assert layers.num_parameters == (9,)
    assert layers.statistics == {"frozen.weight", "frozen.bias"}


def test_mix_by_hand() -> None:
    models = {"weight": torch.tensor([[[1.0]], [[3.0]], [[8.0]]]), "bias": torch.tensor([[0.0], [2.0], [4.0]])}
    alpha = torch.tensor([[[0.5, 0.25, 0.25]], [[0.0, 0.0, 1.0]]])
    mixed = mix(alpha, models, LINE)
    assert mixed["weight"].flatten().tolist() == [0.5 + 0.75 + 2.0, 8.0]
    assert mixed["bias"].flatten().tolist() == [1.5, 4.0]


def test_choose_takes_the_own_layer_where_none_was_sent() -> None:
    layers = Layers.of(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    received = {name: torch.ones(1) for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    own = {name: torch.zeros(1) for name in received}
    chosen = choose(torch.tensor([True, False]), received, own, layers)
    assert {name: value.item() for name, value in chosen.items()} == {"0.weight": 1, "0.bias": 1, "1.weight": 0, "1.bias": 0}


def test_weighted_mean_by_hand_counts_are_never_averaged() -> None:
    stacked = {"w": torch.tensor([[2.0], [6.0]]), "count": torch.tensor([3, 7])}
    mean = weighted_mean(stacked, torch.tensor([3, 1]))
    assert mean["w"].item() == 3.0
    assert mean["count"].item() == 7
    assert mean["count"].dtype == torch.int64


def test_fedavg_weighs_by_examples_of_the_participants_only() -> None:
    algorithm = create("fedavg", task_of(nn.Linear(1, 2)), budget(0.1, 1, 1))
    server = algorithm.init_server(5, seed=0)
    cohort = Cohort(1, 0, torch.tensor([1, 4]), torch.tensor([10, 30]))
    uploads = Payload(
        {"weight": torch.tensor([[[1.0], [0.0]], [[5.0], [4.0]]]), "bias": torch.zeros(2, 2)}, torch.ones(2, 1).bool()
    )
    after = algorithm.aggregate(server, cohort, algorithm.download(server, cohort), uploads)
    assert after["model"]["weight"].flatten().tolist() == [4.0, 3.0]


def test_layer_gradient_by_hand() -> None:
    delta = {"weight": torch.tensor([[[2.0]]]), "bias": torch.tensor([[-1.0]])}
    models = {"weight": torch.tensor([[[1.0]], [[3.0]]]), "bias": torch.tensor([[4.0], [0.0]])}
    assert layer_gradient(delta, models, LINE).tolist() == [[[2.0 - 4.0, 6.0]]]


def test_softmax_starts_exactly_uniform_and_moves_where_the_wish_points() -> None:
    network = LayerWeightHypernetwork(num_senders=4, num_layers=2)
    own = torch.arange(4)
    tensors = network.init(4, torch.Generator().manual_seed(0))
    assert (network.alpha(tensors, own) == 0.25).all()
    wish = torch.zeros(4, 2, 4)
    wish[:, 1, 2] = 1.0
    alpha = network.alpha(network.step(tensors, own, wish, 0.1), own)
    assert (alpha[:, 0] == 0.25).all()  # no wish, no move
    assert (alpha[:, 1].argmax(-1) == 2).all()
    torch.testing.assert_close(alpha.sum(-1), torch.ones(4, 2))


def test_relu_weights_start_uniform_and_a_dead_row_is_the_own_model() -> None:
    network = LayerWeightHypernetwork(num_senders=3, num_layers=1, normalise="relu")
    own = torch.arange(3)
    tensors = network.init(3, torch.Generator().manual_seed(0))
    torch.testing.assert_close(network.alpha(tensors, own), torch.full((3, 1, 3), 1 / 3))
    dead = {**tensors, "heads.bias": -torch.ones_like(tensors["heads.bias"])}
    assert torch.equal(network.alpha(dead, own)[:, 0], torch.eye(3))
    stepped = network.step(dead, own, torch.ones(3, 1, 3), 1.0)
    assert all(value.isfinite().all() for value in stepped.values())


FORMS = pytest.mark.parametrize("options", [{}, {"normalise": "relu"}, COMPACT, COMPACT | {"normalise": "relu"}], ids=str)


def _double_server(num_clients: int = 4, **options: object) -> tuple:
    """A pFedLA server in float64 with unlike models and moved hypernetworks."""
    algorithm = create("pfedla", task_of(TinyNet(dtype=torch.float64)), budget(0.05, 1, 10_000), PAPER | options)
    server = algorithm.init_server(num_clients, seed=0)
    noise = torch.Generator().manual_seed(3)
    server = {
        group: {
            name: v.double() + 0.1 * torch.randn(v.shape, generator=noise, dtype=torch.float64) for name, v in tensors.items()
        }
        for group, tensors in server.items()
        if group != "progress"
    } | {"progress": server["progress"]}
    return algorithm, server, Cohort(1, 0, torch.arange(num_clients), torch.full((num_clients,), 20))


@FORMS
def test_closed_form_equals_autograd_through_the_stacked_models(options: dict) -> None:
    algorithm, server, cohort = _double_server(**options)
    downloads = algorithm.download(server, cohort)
    delta = {name: torch.randn_like(value) for name, value in downloads.tensors.items()}
    uploads = Payload({name: value + delta[name] for name, value in downloads.tensors.items()}, downloads.sent)
    after = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, uploads)["hypernetworks"]

    # The slow twin: build every mixed model from its own hypernetwork and differentiate <mixed, delta> with autograd.
    network = algorithm._hypernetwork(4)
    leaves = {name: value.clone().requires_grad_() for name, value in server["hypernetworks"].items()}
    objective = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        alpha = network.alpha({name: value[i : i + 1] for name, value in leaves.items()}, torch.tensor([i]))[0]
        for name, models in server["models"].items():
            layer = algorithm.task.layers.index[name]
            mixed = sum(alpha[layer, j] * models[j] for j in range(4))
            objective = objective + (mixed * delta[name][i]).sum()
    objective.backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(after[name], leaf.detach() + algorithm.hypernetwork_lr * leaf.grad, rtol=1e-9, atol=1e-9)


@FORMS
def test_one_hypernetwork_step_descends_the_clients_loss(options: dict) -> None:
    """After one full-batch local step Δθ = -lr ∇L, so the step is -lr times the loss gradient: checked by differences."""
    algorithm, server, cohort = _double_server(**options)
    federation = toy_federation((20, 20, 20, 20))
    data = [LocalData(e.x.double(), e.y, torch.arange(20)[None]) for e in federation.train]
    network, layers, own = algorithm._hypernetwork(4), algorithm.task.layers, torch.arange(4)
    module = TinyNet(dtype=torch.float64)

    def losses(hypernetworks: dict) -> torch.Tensor:
        mixed = mix(network.alpha(hypernetworks, own), server["models"], layers)
        return torch.stack(
            [F.cross_entropy(functional_call(module, take(mixed, i), (data[i].x,)), data[i].y) for i in range(4)]
        )

    downloads = algorithm.download(server, cohort)
    results = [algorithm.local_update({}, downloads.rows(i), data[i]) for i in range(4)]
    uploads = Payload(stack([result.upload.tensors for result in results]), downloads.sent)
    before = server["hypernetworks"]
    small = dataclasses.replace(algorithm, hypernetwork_lr=1e-2)
    after = small.aggregate(copy.deepcopy(server), cohort, downloads, uploads)["hypernetworks"]
    assert (losses(after) < losses(before)).all()

    epsilon, draws = 1e-5, torch.Generator().manual_seed(5)
    for _ in range(5):
        direction = {name: torch.randn(v.shape, generator=draws, dtype=torch.float64) for name, v in before.items()}
        moved = [losses({n: v + s * epsilon * direction[n] for n, v in before.items()}) for s in (1, -1)]
        slope = (moved[0] - moved[1]) / (2 * epsilon)
        step = {name: (after[name] - before[name]) / 1e-2 for name in before}
        along = sum((step[name] * direction[name]).flatten(1).sum(1) for name in before)
        torch.testing.assert_close(along, -algorithm.training.learning_rate * slope, rtol=1e-4, atol=1e-10)


def test_the_step_is_taken_at_the_snapshot_the_mix_was_made_of() -> None:
    """With the new θ_i in place of the old the self-weight would grow by |Δθ_i|² even where Δθ is orthogonal to all."""
    algorithm = create("pfedla", task_of(nn.Linear(1, 2, bias=False)), budget(0.1, 1, 1), PAPER)
    cohort = Cohort(1, 0, torch.tensor([0, 1]), torch.tensor([5, 5]))
    server = algorithm.init_server(2, seed=0)
    server["models"] = {"weight": torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]]])}
    downloads = algorithm.download(server, cohort)
    assert downloads.tensors["weight"].flatten(1).tolist() == [[2.0, 0.0], [2.0, 0.0]]
    orthogonal = Payload({"weight": downloads.tensors["weight"] + torch.tensor([[0.0], [1.0]])}, downloads.sent)
    after = algorithm.aggregate(server, cohort, downloads, orthogonal)
    assert (algorithm.alpha(after) == 0.5).all()
    assert after["models"]["weight"].flatten(1).tolist() == [[2.0, 1.0], [2.0, 1.0]]


def _server_with_logits(algorithm: object, logits: torch.Tensor) -> dict:
    server = algorithm.init_server(len(logits), seed=0)
    server["hypernetworks"]["heads.bias"] = logits
    return server


def test_retained_layers_are_those_of_largest_self_weight_ties_to_the_output() -> None:
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    logits = torch.zeros(3, 3, 3)
    logits[1, 0, 1] = 5.0  # client 1 trusts its own first layer most
    logits[2, 1, 0] = 5.0  # client 2 trusts client 0's second layer: its own weight there is smallest
    for k, expected in {
        1: [[1, 1, 0], [0, 1, 1], [1, 1, 0]],
        2: [[1, 0, 0], [0, 1, 0], [0, 1, 0]],
    }.items():
        algorithm = make("heurpfedla", batch_norm=True, retained_layers=k)
        sent = algorithm.download(_server_with_logits(algorithm, logits), cohort).sent
        assert sent.int().tolist() == expected


def test_a_retained_layer_takes_no_part_in_the_step() -> None:
    """Its mix was not used, so its weights stay; those of the sent layers move."""
    algorithm = make("heurpfedla", retained_layers=1, hypernetwork_lr=0.01)
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    server = algorithm.init_server(3, seed=0)
    noise = torch.Generator().manual_seed(0)
    server["models"] = {name: torch.randn(value.shape, generator=noise) for name, value in server["models"].items()}
    downloads = algorithm.download(server, cohort)
    assert downloads.sent.tolist() == [[True, False]] * 3
    uploads = {name: torch.randn(value.shape, generator=noise) for name, value in server["models"].items()}
    after = algorithm.aggregate(server, cohort, downloads, Payload(uploads, torch.ones(3, 2).bool()))
    alpha = algorithm.alpha(after)
    assert (alpha[:, 1] == 1 / 3).all()
    assert (alpha[:, 0] != 1 / 3).any()
    assert_same(after["models"], uploads)  # the upload is full: the server's copy is current


@pytest.mark.parametrize("options", [{}, COMPACT], ids=str)
def test_a_step_that_overflows_is_not_taken(options: dict) -> None:
    algorithm = make("pfedla", **options)
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    server = algorithm.init_server(3, seed=0)
    server["models"] = {name: torch.full_like(value, 1e30) for name, value in server["models"].items()}
    downloads = algorithm.download(server, cohort)
    uploads = {name: value.clone() for name, value in downloads.tensors.items()}
    uploads["fc1.weight"][1] = -1e30
    after = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, Payload(uploads, downloads.sent))
    assert algorithm.alpha(after).isfinite().all()
    assert_same(take(after["hypernetworks"], 1), take(server["hypernetworks"], 1))


def _cut(algorithm: object, alpha: torch.Tensor, cohort: Cohort) -> torch.Tensor:
    """alpha as it is mixed: the weights of the neighbours where they belong, zero elsewhere."""
    weights, senders = algorithm._neighbours(alpha, cohort, algorithm.neighbours)
    return torch.zeros_like(alpha).scatter_(-1, senders, weights)


def test_relu_weights_cut_to_neighbours_fall_back_to_the_own_model() -> None:
    algorithm = make("pfedla", neighbours=2, normalise="relu")
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    alpha = torch.tensor([[[0.0, 0.0, 1.0]], [[0.0, 0.0, 1.0]], [[0.5, 0.5, 0.0]]])
    cut = _cut(algorithm, alpha, cohort)[:, 0]
    torch.testing.assert_close(cut.sum(-1), torch.ones(3))
    assert cut[0].tolist() == [0.0, 0.0, 1.0]
    dead = _cut(algorithm, torch.zeros(3, 1, 3), cohort)[:, 0]
    assert torch.equal(dead, torch.eye(3))


def test_neighbours_cut_renormalise_and_always_hold_the_client_itself() -> None:
    algorithm = make("pfedla", neighbours=2)
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    alpha = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.4, 0.35, 0.25]]).unsqueeze(1).repeat(1, 2, 1)
    cut = _cut(algorithm, alpha, cohort)[:, 0]
    expected = torch.tensor([[1 / 7, 6 / 7, 0], [5 / 7, 2 / 7, 0], [0.4 / 0.65, 0, 0.25 / 0.65]])
    torch.testing.assert_close(cut, expected)


def test_equal_weights_are_cut_in_a_seeded_order_that_differs_by_client_layer_and_round() -> None:
    algorithm = make("pfedla", neighbours=3)
    uniform = torch.full((20, 2, 20), 1 / 20)

    def kept(round: int) -> torch.Tensor:
        return _cut(algorithm, uniform, Cohort(round, 0, torch.arange(20), torch.ones(20))) > 0

    first = kept(1)
    assert (first.sum(-1) == 3).all()
    assert first.diagonal(dim1=0, dim2=2).all()
    assert torch.equal(first, kept(1))
    assert not torch.equal(first, kept(2))
    assert not torch.equal(first[:, 0], first[:, 1])
    assert (first.any(0).sum(-1) > 10).all()  # not always the same few


def test_a_client_left_out_of_the_mix_can_come_back() -> None:
    """The step uses the uncut weights and all senders, so a cut sender's weight still moves."""
    algorithm = make("pfedla", neighbours=1)
    cohort = Cohort(1, 0, torch.arange(3), torch.tensor([1, 1, 1]))
    server = algorithm.init_server(3, seed=0)
    noise = torch.Generator().manual_seed(0)
    server["models"] = {name: torch.randn(value.shape, generator=noise) for name, value in server["models"].items()}
    downloads = algorithm.download(server, cohort)
    assert_same(downloads.tensors, server["models"])  # each mixes itself only
    towards = {name: value[torch.tensor([1, 2, 0])] for name, value in server["models"].items()}
    after = algorithm.alpha(algorithm.aggregate(server, cohort, downloads, Payload(towards, downloads.sent)))
    assert (after[torch.arange(3), :, [1, 2, 0]] > 1 / 3).all()


@pytest.mark.parametrize("normalise", ["softmax", "relu"])
def test_stacked_hypernetworks_equal_one_at_a_time(normalise: str) -> None:
    network = LayerWeightHypernetwork(3, 2, embedding_size=7, hidden_size=5, normalise=normalise)
    noise = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(v.shape, generator=noise) for n, v in network.init(3, torch.Generator().manual_seed(1)).items()}
    together = network.alpha(tensors, torch.arange(3))
    logits = [network._logits_of_one(take(tensors, i)) for i in range(3)]
    alone = torch.stack([network._free()._alpha_of_one(one, torch.tensor(i)) for i, one in enumerate(logits)])
    torch.testing.assert_close(together, alone)


def test_repeat_and_vmap_see_the_same_rows() -> None:
    tree = {"w": torch.arange(3.0)}
    assert torch.equal(vmap(lambda one: one["w"] * 2)(repeat(tree, 2)), torch.stack([tree["w"] * 2] * 2))
