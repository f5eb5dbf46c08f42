"""APFL: one step by hand, a round by a slow twin, and the methods it contains."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, engine_for, play, toy_federation
from torch import nn
from torch.func import functional_call

from pfedla.algorithms.apfl import APFL, MIXING, PERSONAL
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.local import Local
from pfedla.core.contracts import LocalData, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.rounds import everyone
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation

NORMS = pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
TRAINING = budget(0.1, 2, 5)


def apfl(batch_norm: bool = False, **options: object) -> APFL:
    return APFL(task=task_of(TinyNet(batch_norm)), training=TRAINING, **options)


def models(algorithm, federation: Federation, **how) -> list[dict]:
    """Everybody's personal model after a few rounds."""
    played, clients = play(algorithm, federation, **how)
    with engine_for(algorithm, federation, threads=1, recalibrate="never") as engine:
        engine.load(clients)
        cohort = everyone(federation.num_examples, 4, 0)
        return engine.personal_models(cohort, algorithm.download(played[-1].server, cohort))


def test_one_step_by_hand() -> None:
    """A bias of two classes, one example of class 0: the gradient is (p0 - 1, p1)."""
    algorithm = APFL(task=task_of(nn.Linear(1, 2)), training=budget(0.5, 1, 1), mixing=0.25)
    own, received = torch.tensor([4.0, 0.0]), torch.tensor([0.0, 0.0])
    zero = torch.zeros(2, 1)
    client = {PERSONAL + "weight": zero, PERSONAL + "bias": own, MIXING: torch.tensor(0.25)}
    data = LocalData(torch.zeros(1, 1), torch.tensor([0]), torch.tensor([[0]]))
    result = algorithm.local_update(
        client, Payload({"weight": zero, "bias": received}, torch.ones(1).bool()), data
    )
    p1 = 1 / (1 + torch.e)  # at the mix (1, 0)
    at_mixed = torch.tensor([-p1, p1])
    torch.testing.assert_close(
        result.upload.tensors["bias"], torch.tensor([0.25, -0.25])
    )  # w - 0.5 (-1/2, 1/2)
    torch.testing.assert_close(result.client[PERSONAL + "bias"], own - 0.5 * 0.25 * at_mixed)
    share = 0.25 - 0.5 * 4.0 * -p1
    assert result.client[MIXING].item() == pytest.approx(share)
    expected = share * (own - 0.125 * at_mixed) + (1 - share) * torch.tensor([0.25, -0.25])
    torch.testing.assert_close(result.model["bias"], expected)


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_round_equals_a_slow_twin(adaptive: bool) -> None:
    task = task_of(TinyNet(dtype=torch.float64))
    algorithm = APFL(task=task, training=TRAINING, mixing=0.4, adaptive=adaptive, mixing_lr=0.05)
    noise = torch.Generator().manual_seed(2)
    v = {n: p + 0.3 * torch.randn(p.shape, generator=noise, dtype=p.dtype) for n, p in task.initial().items()}
    w, a = task.initial(), torch.tensor(0.4, dtype=torch.float64)
    example = toy_federation((13,)).train[0]
    order = torch.stack([torch.randperm(13, generator=noise) for _ in range(2)])
    result = algorithm.local_update(
        {**{PERSONAL + n: p for n, p in v.items()}, MIXING: a}, Payload(w, torch.ones(2).bool()),
        LocalData(example.x.double(), example.y, order),
    )  # fmt: skip

    def loss(model: dict, rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            functional_call(task.module, model, (example.x[rows].double(),)), example.y[rows]
        )

    for step, rows in enumerate(rows for epoch in order for rows in (epoch[:5], epoch[5:10], epoch[10:])):
        leaves = {
            f"{part}{n}": p.clone().requires_grad_()
            for part, model in (("v", v), ("w", w))
            for n, p in model.items()
        }
        share = a.clone().requires_grad_()
        # The mixed loss is differentiated with respect to v and a, w being a constant of it; and w's own loss.
        mixed = {n: share * leaves["v" + n] + (1 - share) * w[n] for n in v}
        names = list(v)
        gradients = torch.autograd.grad(loss(mixed, rows), [leaves["v" + n] for n in names] + [share])
        shared = torch.autograd.grad(
            loss({n: leaves["w" + n] for n in names}, rows), [leaves["w" + n] for n in names]
        )
        v = {n: v[n] - 0.1 * g for n, g in zip(names, gradients[:-1], strict=True)}
        w = {n: w[n] - 0.1 * g for n, g in zip(names, shared, strict=True)}
        if adaptive and step == 0:
            a = (a - 0.05 * gradients[-1]).clamp(0, 1)
    assert_same({n: result.client[PERSONAL + n] for n in v}, v, tolerance=1e-12)
    assert_same(result.upload.tensors, w, tolerance=1e-12)
    torch.testing.assert_close(result.client[MIXING], a, rtol=1e-12, atol=1e-12)
    assert (a != 0.4) == adaptive


def test_the_share_stays_between_zero_and_one(federation: Federation) -> None:
    _, clients = play(apfl(mixing_lr=1e4), federation)
    assert ((clients[MIXING] >= 0) & (clients[MIXING] <= 1)).all()
    assert (clients[MIXING] != 0.5).any()


def test_in_the_first_round_the_share_does_not_move(federation: Federation) -> None:
    """v and w are still the same model, so the slope is zero."""
    _, clients = play(apfl(), federation, rounds=range(1, 2))
    assert (clients[MIXING] == 0.5).all()


@NORMS
def test_no_share_of_its_own_is_fedavg_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = apfl(batch_norm, mixing=0.0, adaptive=False)
    fedavg = FedAvg(task=algorithm.task, training=TRAINING)
    pairs = zip(*(models(a, federation, participation=0.5) for a in (algorithm, fedavg)), strict=True)
    for mine, theirs in pairs:
        assert_same(*(algorithm.task.layers.parameters(model) for model in (mine, theirs)))


@NORMS
def test_nothing_but_its_own_is_local_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = apfl(batch_norm, mixing=1.0, adaptive=False)
    local = Local(task=algorithm.task, training=TRAINING)
    for mine, theirs in zip(
        *(models(a, federation, participation=0.5) for a in (algorithm, local)), strict=True
    ):
        assert_same(mine, theirs)


def test_the_personal_model_mixes_with_the_downloaded_model() -> None:
    algorithm = apfl(mixing=0.25)
    client = algorithm.init_client()
    received = {name: value + 1 for name, value in algorithm.task.initial().items()}
    mixed = algorithm.personalize(client, Payload(received, torch.ones(2).bool()), None)
    expected = {name: value + 0.75 for name, value in algorithm.task.initial().items()}
    assert_same(mixed, expected, tolerance=1e-6)


def test_more_epochs_than_the_budget_are_refused() -> None:
    apfl(joint_epochs=2).check(6)
    with pytest.raises(PfedlaError, match="joint_epochs"):
        apfl(joint_epochs=3).check(6)
