"""APFL: a round by a slow twin, and the methods it contains."""

import pytest
import torch
from conftest import NORMS, TinyNet, add_noise, assert_same, make, one_client, personal_models, plain_loss, play

from pfedla.algorithms.apfl import MIXING, PERSONAL
from pfedla.algorithms.partial import add_prefix, strip_prefix
from pfedla.core.contracts import Payload
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_round_equals_a_slow_twin(adaptive: bool) -> None:
    """The mixed loss is differentiated by v and a, with w constant; beside it w's own loss."""
    module, data = TinyNet(dtype=torch.float64), one_client()
    algorithm = make("apfl", module=module, mixing=0.4, adaptive=adaptive, mixing_lr=0.05)
    w, a = algorithm.task.initial(), torch.tensor(0.4, dtype=torch.float64)
    v = add_noise(w, seed=2)
    client = {**add_prefix(PERSONAL, v), MIXING: a}
    result = algorithm.local_update(client, Payload(w, torch.ones(2).bool()), data)
    names = list(v)
    for step, rows in enumerate(order[slice(*ends)] for order in data.order for ends in batch_bounds(13, 5)):
        mine, theirs = ([part[n].clone().requires_grad_() for n in names] for part in (v, w))
        share = a.clone().requires_grad_()
        mixed = {n: share * p + (1 - share) * w[n] for n, p in zip(names, mine, strict=True)}
        *gradients, slope = torch.autograd.grad(plain_loss(module, mixed, data, rows), [*mine, share])
        shared = plain_loss(module, dict(zip(names, theirs, strict=True)), data, rows)
        v = {n: v[n] - 0.1 * g for n, g in zip(names, gradients, strict=True)}
        w = {n: w[n] - 0.1 * g for n, g in zip(names, torch.autograd.grad(shared, theirs), strict=True)}
        if adaptive and step == 0:
            a = (a - 0.05 * slope).clamp(0, 1)
    assert_same(strip_prefix(PERSONAL, result.client), v, tolerance=1e-12)
    assert_same(result.upload.tensors, w, tolerance=1e-12)
    torch.testing.assert_close(result.client[MIXING], a, rtol=1e-12, atol=1e-12)
    assert_same(result.model, {n: a * v[n] + (1 - a) * w[n] for n in names}, tolerance=1e-12)
    assert (a != 0.4) == adaptive


def test_the_share_stays_between_zero_and_one_and_begins_to_move_in_the_second_round(federation: Federation) -> None:
    algorithm = make("apfl", mixing_lr=1e4)
    _, clients = play(algorithm, federation)
    assert ((clients[MIXING] >= 0) & (clients[MIXING] <= 1)).all()
    assert (clients[MIXING] != 0.5).any()
    _, clients = play(algorithm, federation, rounds=range(1, 2))  # v and w are the same: the slope is zero
    assert (clients[MIXING] == 0.5).all()


@NORMS
@pytest.mark.parametrize(("mixing", "other"), [(0.0, "fedavg"), (1.0, "local")])
def test_at_both_ends_it_is_fedavg_or_local_bit_for_bit(
    federation: Federation, batch_norm: bool, mixing: float, other: str
) -> None:
    """Of FedAvg the parameters only: its statistics travel."""
    algorithm = make("apfl", batch_norm=batch_norm, mixing=mixing, adaptive=False)
    mine, theirs = (
        personal_models(one, federation, *play(one, federation, participation=0.5))
        for one in (algorithm, make(other, batch_norm=batch_norm))
    )
    kept = algorithm.task.layers.parameters if other == "fedavg" else dict
    for left, right in zip(mine, theirs, strict=True):
        assert_same(kept(left), kept(right))
