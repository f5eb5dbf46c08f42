"""Robust means: equal to plain loops, and bounded by the honest clients whatever a few others send."""

import statistics
from typing import Any, get_args

import pytest
import torch
from conftest import add_noise, assert_same, make, play, toy_federation
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pfedla.algorithms import ALGORITHMS
from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.averaging import Averaging, robust_mean
from pfedla.core.contracts import Cohort
from pfedla.core.errors import PfedlaError
from pfedla.core.faults import NO_FAULTS
from pfedla.core.layers import Params, stack, take, weighted_mean
from pfedla.core.settings import Faults

ROBUST = tuple(kind for kind in get_args(Averaging) if kind != "mean")
KINDS = pytest.mark.parametrize("kind", ROBUST)


def make_models(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    shapes = {"weight": (3, 2), "bias": (3,), "scale": ()}
    draws = torch.Generator().manual_seed(seed)
    models = {n: 5 + torch.randn(count, *shape, generator=draws).to(dtype) for n, shape in shapes.items()}
    return {**models, "steps": torch.randint(1, 50, (count,), generator=draws)}


def plain(stacked: Params, kind: str) -> Params:
    """The slow twin: Python's numbers, one coordinate after the other."""
    count = len(stacked["steps"])
    wrong = min(next(k for k in range(count + 1) if k >= count / 4), (count - 1) // 2)
    if kind == "krum":
        flat = [torch.cat([v[i].flatten() for n, v in stacked.items() if n != "steps"]).tolist() for i in range(count)]
        scores = []
        for i in range(count):
            others = sorted(
                sum((a - b) ** 2 for a, b in zip(flat[i], flat[j], strict=True)) for j in range(count) if j != i
            )
            scores.append(sum(others[: max(1, count - wrong - 2)]))
        chosen = [i for i, score in enumerate(scores) if score <= min(scores) * (1 + 1e-9)]
        stacked, wrong = take(stacked, torch.tensor(chosen)), 0

    def one(column: Tensor) -> float:
        values = sorted(column.tolist())
        if column.dtype == torch.int64:
            return values[(len(values) - 1) // 2 + (len(values) - 1) % 2 if kind == "median" else -1 - wrong]
        return statistics.median(values) if kind == "median" else statistics.mean(values[wrong : len(values) - wrong])

    return {
        name: torch.tensor([one(column) for column in value.reshape(len(value), -1).T]).view(value.shape[1:])
        for name, value in stacked.items()
    }


@KINDS
@pytest.mark.parametrize("count", range(1, 14))
def test_it_equals_a_plain_loop(kind: Any, count: int) -> None:
    stacked = make_models(count, seed=count)
    fast, slow = robust_mean(stacked, kind), plain(stacked, kind)
    for name, value in slow.items():
        torch.testing.assert_close(fast[name], value.to(fast[name].dtype), rtol=1e-6, atol=1e-6)


@KINDS
@given(st.data())
def test_a_quarter_of_absurd_senders_moves_nothing_beyond_the_honest(kind: Any, data: st.DataObject) -> None:
    """And half less one in the median."""
    count = data.draw(st.integers(3, 13))
    bad = (count - 1) // 2 if kind == "median" else count // 4 or 1
    ids = data.draw(st.permutations(range(count)))[:bad]
    absurd = data.draw(st.sampled_from([1e30, -3e38, 1e4, 0.0]))
    honest, attacked = make_models(count), make_models(count)
    for name, value in attacked.items():
        value[ids] = value[ids].new_full((), absurd) if name != "steps" else 2**62
    kept = take(honest, torch.tensor([client for client in range(count) if client not in ids]))
    for name, value in robust_mean(attacked, kind).items():
        assert (value >= kept[name].amin(0) - 1e-5).all(), name
        assert (value <= kept[name].amax(0) + 1e-5).all(), name


@KINDS
def test_the_order_of_the_clients_changes_nothing(kind: Any) -> None:
    for count in (3, 4, 9, 10):
        stacked, order = make_models(count), torch.randperm(count, generator=torch.Generator().manual_seed(count))
        assert_same(robust_mean(take(stacked, order), kind), robust_mean(stacked, kind), tolerance=1e-6)


@KINDS
def test_of_one_client_it_is_the_model_and_of_two_the_mean(kind: Any) -> None:
    one, two = make_models(1), make_models(2)
    assert_same(robust_mean(one, kind), take(one, 0))
    assert_same(robust_mean(two, kind), weighted_mean(two, torch.ones(2)), tolerance=1e-6)


@KINDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_kind_of_numbers_stays(kind: Any, dtype: torch.dtype) -> None:
    stacked = make_models(7, dtype=dtype)
    for name, value in robust_mean(stacked, kind).items():
        assert (value.dtype, value.shape) == (stacked[name].dtype, stacked[name].shape[1:])


def test_every_method_that_averages_has_the_option_and_uses_it() -> None:
    """With one client of six at 1e30 the mean is lost, a median is not."""
    able = [name for name, kind in ALGORITHMS.items() if issubclass(kind, PartialFedAvg)]
    assert {"fedavg", "fedbn", "per-fedavg", "pfedme", "ditto", "apfl", "fedala", "lg-fedavg", "fedrep"} <= {*able}
    assert not {"local", "pfedhn", "fedfomo", "fedamp"} & {*able}
    for name in able:
        for kind, lost in (("mean", True), *((kind, False) for kind in ROBUST)):
            algorithm = make(name, batch_norm=True, averaging=kind)
            cohort = Cohort.everyone(torch.full((6,), 9), 1, 0)
            server = algorithm.init_server(6, 0)
            downloads = algorithm.download(server, cohort)
            came = {name: value.clone() for name, value in downloads.tensors.items()}
            next(iter(came.values()))[2] = 1e30
            after = algorithm.aggregate(server, cohort, downloads, downloads._replace(tensors=came))["model"]
            assert (max(float(value.abs().max()) for value in after.values()) > 1e3) == lost, (name, kind)


def test_a_client_cannot_gain_weight_by_naming_many_examples() -> None:
    algorithm, one = make("fedavg", averaging="trimmed"), Cohort.everyone(torch.tensor([9] * 6), 1, 0)
    server = algorithm.init_server(6, 0)
    downloads = algorithm.download(server, one)
    came = downloads._replace(tensors=stack([add_noise(server["model"], client) for client in range(6)]))
    boasting = one._replace(num_examples=torch.tensor([9, 9, 2**40, 9, 9, 9]))
    assert_same(*(algorithm.aggregate(server, who, downloads, came)["model"] for who in (one, boasting)))


def test_the_warm_up_of_held_out_weights_can_be_robust() -> None:
    """Everybody gets the median of all models, until the weights are learned."""
    algorithm = make("pfedla-heldout", warm_up=1, averaging="median")
    server, cohort = algorithm.init_server(6, 0), Cohort.everyone(torch.full((6,), 9), 1, 0)
    server["models"] = add_noise(server["models"], 1)
    sent = algorithm.download(server, cohort).tensors
    for name, value in server["models"].items():
        torch.testing.assert_close(sent[name], value.quantile(0.5, dim=0).expand_as(value))
    server["progress"]["uploads"] += 6
    assert_same(algorithm.download(server, cohort).tensors, make("pfedla-heldout").download(server, cohort).tensors)


def test_fedavg_with_a_robust_mean_survives_what_ruins_the_mean() -> None:
    """Of six clients one sends a hundred times its update, in every round."""
    faults = Faults(attack="scale", attack_scale=100.0, attackers=0.17)

    def train(kind: Any, faults: Faults = NO_FAULTS) -> float:
        played, _ = play(make("fedavg", averaging=kind), toy_federation(), rounds=range(1, 6), faults=faults)
        return float(played[-1].evaluation.loss.mean())

    clean = train("mean")
    assert train("mean", faults) > 3 * clean
    assert all(train(kind, faults) < 1.5 * clean for kind in ROBUST)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(PfedlaError, match="averaging"):
        make("fedavg", averaging="mode")
