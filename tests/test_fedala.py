"""FedALA: its weights by hand and by a slow twin, and FedAvg as its limit."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, play, toy_federation
from torch import nn
from torch.func import functional_call

from pfedla.algorithms.fedala import WEIGHT, FedALA
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.partial import strip_prefix
from pfedla.core.contracts import LocalData, Payload
from pfedla.core.errors import NotApplicableError
from pfedla.core.layers import take
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation

NORMS = pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
TRAINING = budget(0.1, 2, 5)
BOTH = torch.ones(2).bool()
TRUE = torch.tensor(True)


def fedala(batch_norm: bool = False, **options: object) -> FedALA:
    return FedALA(task=task_of(TinyNet(batch_norm)), training=TRAINING, **options)


def test_one_weight_step_by_hand() -> None:
    """A bias of two classes, two examples of class 0: the gradient is (p0 - 1, p1), times global - local per element."""
    algorithm = FedALA(
        task=task_of(nn.Linear(1, 2)), training=budget(0.1, 1, 2), weight_lr=0.5, sample_share=1.0
    )
    zero, ones = torch.zeros(2, 1), torch.ones(2, 1)
    client = {
        "weight": zero,
        "bias": torch.tensor([2.0, 1.0]),
        WEIGHT + "weight": ones,
        WEIGHT + "bias": torch.tensor([0.5, 1.0]),
    }
    download = Payload({"weight": zero, "bias": torch.tensor([0.0, 1.5])}, torch.ones(1).bool())
    data = LocalData(torch.zeros(2, 1), torch.zeros(2).long(), torch.tensor([[0, 1]]), has_trained=TRUE)
    weights = algorithm._fit(client, download, data)
    p1 = 1 / (1 + torch.exp(torch.tensor(1.0 - 1.5)))  # at the mix (1, 1.5)
    expected = torch.stack([0.5 - 0.5 * (-p1 * (0.0 - 2.0)), 1.0 - 0.5 * (p1 * 0.5)]).clamp(0, 1)
    torch.testing.assert_close(weights["bias"], expected)
    assert torch.equal(weights["weight"], ones)


def test_weights_are_cut_to_zero_and_one_and_only_the_last_layer_has_them(federation: Federation) -> None:
    _, clients = play(fedala(weight_lr=1e3), federation)
    weights = {name: value for name, value in clients.items() if name.startswith(WEIGHT)}
    assert weights.keys() == {"weight/fc2.weight", "weight/fc2.bias"}
    assert all(((value >= 0) & (value <= 1)).all() for value in weights.values())
    assert any((value == 0).any() for value in weights.values())
    assert "fc1.weight" not in clients  # the lower layers are the global ones: none is kept


def test_the_client_equals_a_slow_twin() -> None:
    task = task_of(TinyNet(dtype=torch.float64))
    algorithm = FedALA(task=task, training=TRAINING, sample_share=0.7, weight_epochs=2)
    noise = torch.Generator().manual_seed(2)
    mine, received = (
        {n: v + 0.4 * torch.randn(v.shape, generator=noise, dtype=v.dtype) for n, v in task.initial().items()}
        for _ in range(2)
    )
    weights = {
        n: torch.rand(mine[n].shape, generator=noise, dtype=torch.float64) for n in ("fc2.weight", "fc2.bias")
    }
    example = toy_federation((13,)).train[0]
    order = torch.stack([torch.randperm(13, generator=noise) for _ in range(2)])
    client = {**{n: mine[n] for n in weights}, **{WEIGHT + n: w for n, w in weights.items()}}
    data = LocalData(example.x.double(), example.y, order, has_trained=TRUE)
    result = algorithm.local_update(client, Payload(received, BOTH), data)

    def loss(model: dict, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            functional_call(task.module, model, (example.x[rows].double(),)), example.y[rows]
        )

    def start(weights: dict) -> dict:
        return {n: mine[n] + (v - mine[n]) * weights[n] if n in weights else v for n, v in received.items()}

    for rows in [order[0][:5], order[0][5:9]] * 2:  # 9 of 13 are sampled
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        gradients = torch.autograd.grad(loss(start(leaves), rows), list(leaves.values()))
        weights = {n: (w - g).clamp(0, 1) for (n, w), g in zip(weights.items(), gradients, strict=True)}
    model = start(weights)
    for rows in (rows for epoch in order for rows in (epoch[:5], epoch[5:10], epoch[10:])):
        leaves = {n: v.clone().requires_grad_() for n, v in model.items()}
        gradients = torch.autograd.grad(loss(leaves, rows), list(leaves.values()))
        model = {n: v - 0.1 * g for (n, v), g in zip(model.items(), gradients, strict=True)}
    assert_same({n: result.client[WEIGHT + n] for n in weights}, weights, tolerance=1e-12)
    assert_same(result.model, model, tolerance=1e-12)
    assert_same({n: result.client[n] for n in weights}, {n: model[n] for n in weights}, tolerance=1e-12)


def test_a_client_that_never_trained_takes_the_global_model(federation: Federation) -> None:
    algorithm = fedala()
    fedavg = FedAvg(task=algorithm.task, training=TRAINING)
    client, example = algorithm.init_client(), federation.train[0]
    received = {name: value + 0.5 for name, value in algorithm.task.initial().items()}
    data = LocalData(example.x, example.y, torch.stack([torch.arange(9)] * 2))
    assert_same(algorithm.personalize(client, Payload(received, BOTH), data), received)
    mine = algorithm.local_update(client, Payload(received, BOTH), data)
    assert_same(mine.model, fedavg.local_update({}, Payload(received, BOTH), data).model)
    assert (mine.client[WEIGHT + "fc2.weight"] == 1).all()


@NORMS
@pytest.mark.parametrize(
    "options", [{"adaptive_layers": 0}, {"weight_epochs": 0}], ids=["no layer", "no step"]
)
def test_without_adaptive_layers_or_steps_it_is_fedavg_bit_for_bit(
    federation: Federation, batch_norm: bool, options: dict
) -> None:
    algorithm = fedala(batch_norm, **options)
    played, _ = play(algorithm, federation, participation=0.5)
    theirs, _ = play(FedAvg(task=algorithm.task, training=TRAINING), federation, participation=0.5)
    # In training mode BatchNorm does not read its statistics, so the parameters are FedAvg's with BatchNorm too.
    assert_same(played[-1].server["model"], algorithm.task.layers.parameters(theirs[-1].server["model"]))
    if not batch_norm:
        assert torch.equal(played[-1].evaluation.loss, theirs[-1].evaluation.loss)


def test_the_weights_lower_the_loss_they_are_learned_on(federation: Federation) -> None:
    """Full batch and a small rate: a descent of f(Θ̂)."""
    training = budget(0.1, 2, 1000)
    algorithm = FedALA(task=task_of(TinyNet()), training=training, sample_share=1.0, weight_lr=0.1)
    played, clients = play(algorithm, federation)
    client, example = take({n: clients[n] for n in algorithm.init_client()}, 3), federation.train[3]
    download = Payload(played[-1].server["model"], BOTH)
    weights = algorithm._fit(
        client, download, LocalData(example.x, example.y, torch.arange(20)[None], has_trained=TRUE)
    )
    before, after = (
        F.cross_entropy(algorithm.task.logits(algorithm._start(client, w, download), example.x), example.y)
        for w in (strip_prefix(WEIGHT, client), weights)
    )
    assert after < before


def test_more_layers_than_there_are_are_refused() -> None:
    fedala(adaptive_layers=2).check(6)
    with pytest.raises(NotApplicableError, match="fc1, fc2"):
        fedala(adaptive_layers=3).check(6)
