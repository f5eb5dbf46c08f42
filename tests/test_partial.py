"""FedBN, FedPer, FedRep, FedBABU, LG-FedAvg, FedProx, fine-tuned FedAvg: what is shared and trained."""

import pytest
import torch
import torch.nn.functional as F
from conftest import NORMS, TinyNet, assert_same, budget, engine_for, make, play
from torch import nn

from pfedla.algorithms import create
from pfedla.core.contracts import Algorithm, Cohort, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.models import PaperCNN
from pfedla.core.rounds import payload_bytes
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation

COHORT = Cohort(1, 0, torch.arange(2), torch.tensor([1, 3]))
HEAD = {"fc2.weight", "fc2.bias"}
STATISTICS = {"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}


def local_data(count: int = 12, epochs: int = 3, seed: int = 0) -> LocalData:
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 6, generator=draws), torch.randint(3, (count,), generator=draws)
    return LocalData(x, y, torch.stack([torch.randperm(count, generator=draws) for _ in range(epochs)]))


def by_hand(module: nn.Module, data: LocalData, *phases: tuple[range, str], pull: float = 0.0) -> Params:
    """The slow twin: torch.optim on "head", "body" or "all", epoch by epoch, with lr 0.1 and batches of 5.

    While the head is trained alone, BatchNorm's statistics are put back after every step.
    """
    start = [parameter.detach().clone() for parameter in module.parameters()]
    module.train()
    for epochs, which in phases:
        moving = [p for n, p in module.named_parameters() if which == "all" or (n in HEAD) == (which == "head")]
        optimizer = torch.optim.SGD(moving, lr=0.1)
        for rows in (data.order[e][slice(*bounds)] for e in epochs for bounds in batch_bounds(len(data.y), 5)):
            before = {name: value.clone() for name, value in module.named_buffers()}
            module.zero_grad()
            distance = sum((p - s).square().sum() for p, s in zip(module.parameters(), start, strict=True))
            (F.cross_entropy(module(data.x[rows]), data.y[rows]) + pull / 2 * distance).backward()
            optimizer.step()
            for name, value in module.named_buffers():
                value.copy_(before[name] if which == "head" else value)
    return {name: value.detach() for name, value in module.state_dict().items()}


def train(algorithm: Algorithm, data: LocalData) -> LocalResult:
    """One client's first round."""
    download = algorithm.download(algorithm.init_server(2, seed=0), COHORT).rows(0)
    return algorithm.local_update(algorithm.init_client(), download, data)


@pytest.mark.parametrize(
    ("name", "private", "sent"),
    [
        ("fedbn", {"bn.weight", "bn.bias"}, [True, False, True]),
        ("fedper", HEAD, [True, True, False]),
        ("fedrep", HEAD, [True, True, False]),
        ("fedbabu", HEAD, [True, True, False]),
        ("lg-fedavg", {"fc1.weight", "fc1.bias", "bn.weight", "bn.bias"}, [False, False, True]),
    ],
)
def test_what_stays_on_the_client_and_what_travels(name: str, private: set[str], sent: list[bool]) -> None:
    algorithm = make(name, batch_norm=True)
    server, everything = algorithm.init_server(2, seed=0), algorithm.task.initial()
    assert algorithm.init_client().keys() == private | STATISTICS
    assert server["model"].keys() == everything.keys() - private - STATISTICS
    downloads = algorithm.download(server, COHORT)
    assert downloads.sent.tolist() == [sent, sent]
    shared = sum(everything[n].numel() for n in server["model"])
    assert payload_bytes(downloads, algorithm.task.layers).tolist() == [4 * shared] * 2
    result = train(algorithm, local_data(epochs=2))
    assert result.upload.tensors.keys() == server["model"].keys()
    assert result.upload.sent.tolist() == sent
    two = {n: torch.stack([torch.zeros_like(v), 4 * torch.ones_like(v)]) for n, v in server["model"].items()}
    after = algorithm.aggregate(server, COHORT, downloads, Payload(two, downloads.sent))
    assert all((value == 3.0).all() for value in after["model"].values())  # of one and three examples


@NORMS
@pytest.mark.parametrize(
    ("name", "options", "phases"),
    [
        ("fedavg", {}, [(range(3), "all")]),
        ("fedper", {}, [(range(3), "all")]),
        ("lg-fedavg", {}, [(range(3), "all")]),
        ("fedrep", {"head_epochs": 2}, [(range(2), "head"), (range(2, 3), "body")]),
        ("fedrep", {"head_epochs": 3}, [(range(3), "head")]),
        ("fedbabu", {}, [(range(3), "body")]),
        ("fedprox", {"penalty": 0.5}, [(range(3), "all")]),
    ],
)
def test_a_round_equals_a_textbook_loop(name: str, options: dict, phases: list, batch_norm: bool) -> None:
    data = local_data()
    result = train(make(name, batch_norm=batch_norm, epochs=3, **options), data)
    twin = by_hand(TinyNet(batch_norm), data, *phases, pull=options.get("penalty", 0.0))
    assert_same(result.model, twin, tolerance=1e-6)


@NORMS
@pytest.mark.parametrize(
    ("name", "options"),
    [("fedrep", {"private": "", "head_epochs": 0}), ("fedper", {"private": ""}), ("fedbabu", {"private": ""})],
)
def test_with_nothing_private_it_is_fedavg(federation: Federation, name: str, options: dict, batch_norm: bool) -> None:
    """Up to the statistics, which do not travel; in training mode BatchNorm does not read them."""
    algorithms = (make(name, batch_norm=batch_norm, **options), make("fedavg", batch_norm=batch_norm))
    shared, model = (play(algorithm, federation)[0][-1].server["model"] for algorithm in algorithms)
    assert_same(shared, {name: model[name] for name in shared})


@pytest.mark.parametrize(
    ("name", "works", "refused", "error"),
    [
        ("ditto", {"penalty": 9.0, "personal_epochs": 2}, {"penalty": 10.0}, PfedlaError),
        ("ditto", {}, {"personal_epochs": 3}, PfedlaError),
        ("fedprox", {}, {"penalty": 10.0}, PfedlaError),
        ("fedamp", {"penalty": 0.9, "step_size": 0.1}, {"penalty": 1.0, "step_size": 0.1}, PfedlaError),
        ("pfedme", {}, {"penalty": 10.0, "eta": 0.1}, PfedlaError),
        ("pfedme", {}, {"personal_lr": 0.25, "eta": 0.01, "penalty": 8.0}, PfedlaError),
        ("fedavg-ft", {"fine_tuning_epochs": 2}, {"fine_tuning_epochs": 3}, PfedlaError),
        ("fedbabu", {"fine_tuning_epochs": 2}, {"fine_tuning_epochs": 3}, PfedlaError),
        ("fedala", {"adaptive_layers": 2}, {"adaptive_layers": 3}, NotApplicableError),
        ("lg-fedavg", {"shared_layers": 1}, {"shared_layers": 2}, NotApplicableError),
    ],
)
def test_options_that_cannot_work_are_refused(name: str, works: dict, refused: dict, error: type) -> None:
    make(name, **works).check(6)
    with pytest.raises(error, match=next(iter(refused))):
        make(name, **refused).check(6)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu"])
def test_private_names_layers(name: str) -> None:
    assert make(name, private="fc1").private_layers() == [0]
    for private in ("fc1, fc2", "fc3"):
        with pytest.raises(PfedlaError):
            make(name, private=private).check(3)
    paper = create(name, task_of(PaperCNN((1, 28, 28), 10, batch_norm=False)), budget(0.1, 5, 32))
    assert [paper.task.layers.names[layer] for layer in paper.private_layers()] == ["fc3"]
    with pytest.raises(NotApplicableError, match="private"):
        make(name, module=nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten())).check(3)


# FedBN


def test_batchnorm_is_known_by_its_type_not_by_its_name() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3), nn.BatchNorm1d(3))
    assert make("fedbn", module=module).private_layers() == [1, 3]
    with pytest.raises(NotApplicableError):
        make("fedbn").check(3)
    without_parameters = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    algorithm = make("fedbn", module=without_parameters)
    algorithm.check(3)
    assert algorithm.init_client().keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


# FedRep


def test_fedreps_epochs_share_the_local_budget() -> None:
    assert make("fedrep", epochs=5)._count_head_epochs() == 2
    make("fedrep", epochs=5, head_epochs=4).check(3)
    make("fedrep", epochs=1, private="", head_epochs=0).check(3)
    for options in ({"head_epochs": 6}, {"private": ""}):
        with pytest.raises(PfedlaError, match="head_epochs"):
            make("fedrep", epochs=5, **options).check(3)
    with pytest.raises(NotApplicableError):
        make("fedrep", epochs=1).check(3)


# FedProx


@NORMS
def test_fedprox_without_a_penalty_is_fedavg_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    runs = [
        play(make(name, batch_norm=batch_norm, **options), federation)[0][-1]
        for name, options in (("fedprox", {"penalty": 0.0}), ("fedavg", {}))
    ]
    assert_same(runs[0].server["model"], runs[1].server["model"])
    assert torch.equal(runs[0].evaluation.loss, runs[1].evaluation.loss)


# Fine-tuning


def test_the_head_of_fedbabu_stays_at_its_start(federation: Federation) -> None:
    _, clients = play(make("fedbabu", batch_norm=True), federation)
    initial = make("fedbabu").task.initial()
    assert all(torch.equal(clients[name], initial[name].expand_as(clients[name])) for name in HEAD)


@NORMS
@pytest.mark.parametrize("epochs", ["auto", 1])
@pytest.mark.parametrize("name", ["fedavg-ft", "fedbabu"])
def test_the_personal_model_is_fine_tuned(
    federation: Federation, name: str, epochs: int | str, batch_norm: bool
) -> None:
    """On all layers, with the client's data; the training itself does not depend on it."""
    tuned = make(name, batch_norm=batch_norm, fine_tuning_epochs=epochs)
    rounds, clients = play(tuned, federation)
    if name == "fedavg-ft":
        plain = play(make("fedavg", batch_norm=batch_norm), federation)[0]
        assert_same(rounds[-1].server["model"], plain[-1].server["model"])
    with engine_for(tuned, federation) as engine:
        engine.load(clients)
        cohort = Cohort.everyone(federation.num_examples, 4, 0)
        downloads = tuned.download(rounds[-1].server, cohort)
        model = engine.personal_models(cohort, downloads)[3]
        data = engine.clients[3].local_data(cohort, downloads)
    module = TinyNet(batch_norm)
    private = {name: clients[name][3] for name in tuned.init_client()}
    module.load_state_dict(rounds[-1].server["model"] | private)
    twin = by_hand(module, data, (range(2 if epochs == "auto" else epochs), "all"))
    assert_same(model, twin, tolerance=1e-6)


@pytest.mark.parametrize("name", ["fedper", "fedrep", "fedbabu", "lg-fedavg"])
def test_a_model_of_one_layer_is_refused(name: str) -> None:
    with pytest.raises(NotApplicableError):
        make(name, module=nn.Linear(6, 3)).check(3)
