"""Sample-level differential privacy: what is clipped, what is drawn, what it costs, and that nothing gets past it."""

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import NOTHING, TinyNet, assert_same, make, methods, tiny, toy_federation
from torch import Tensor, nn

import pfedla
from pfedla import simulate
from pfedla.algorithms import ALGORITHMS, PRIVATE
from pfedla.core import training
from pfedla.core.accounting import Release, design, measure_epsilon, spent
from pfedla.core.contracts import Cohort, LocalData, Params
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.models import build_model
from pfedla.core.privacy import Mechanism, check_private, example_gradients, private_gradient, sample_batches
from pfedla.core.randomness import draw_from, draw_normal, draw_uniform
from pfedla.core.settings import Privacy
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation
from pfedla.engines.simulated import SimulatedEngine
from pfedla.runs.experiment import Experiment
from pfedla.runs.releases import plan_epochs

opacus = pytest.importorskip("opacus")
NOISY = {"noise_multiplier": 1.0, "max_grad_norm": 0.5}
DIGITS: dict[str, Any] = {
    "rounds": 3,
    "model": "mlp",
    "data": {"dataset": "digits", "clients": 4, "samples_per_client": 60},
    "training": {"local_epochs": 2},
    "privacy": {"epsilon": 3.0},
}


class GroupNet(nn.Module):
    """A convolution, a GroupNorm and a Linear layer, as private training can have them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.conv, self.norm, self.fc = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).relu().flatten(1))


def test_gradients_of_single_examples_are_those_of_opacus() -> None:
    draws = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 1, 8, 8, generator=draws), torch.randint(3, (7,), generator=draws)
    task, theirs = task_of(GroupNet()), opacus.GradSampleModule(GroupNet(), loss_reduction="mean")
    F.cross_entropy(theirs(x), y).backward()
    found = example_gradients(task, task.initial(), x, y)
    for name, parameter in theirs._module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad_sample, rtol=1e-5, atol=1e-5)


def test_epsilon_is_that_of_opacus_accountant_step_by_step() -> None:
    accountant = opacus.accountants.RDPAccountant()
    for _ in range(120):
        accountant.step(noise_multiplier=1.3, sample_rate=0.05)
    parts = [Release(1.3, 0.05, 70), Release(1.3, 0.05, 50)]
    assert measure_epsilon(1e-4, *parts) == pytest.approx(accountant.get_epsilon(delta=1e-4))
    assert measure_epsilon(1e-4, Release(1.3, 0.05, 120)) == accountant.get_epsilon(delta=1e-4)
    assert measure_epsilon(1e-4, Release(0.0, 0.05, 120)) == math.inf
    assert measure_epsilon(1e-4, Release(1.3, 0.05, 0)) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_the_noise_keeps_the_epsilon_and_is_hardly_more_than_needed(epsilon: float) -> None:
    mechanism = design(Privacy(epsilon=epsilon), 140, 32, 50)
    assert mechanism.steps == 5
    assert mechanism.rate == 32 / 140
    assert mechanism.delta == 0.1 / 140
    assert 0.97 * epsilon < spent(mechanism, 50) <= epsilon


def test_a_delta_that_protects_nobody_and_an_epsilon_out_of_reach_are_refused() -> None:
    with pytest.raises(PfedlaError, match=r"privacy\.delta"):
        design(Privacy(epsilon=1.0, delta=0.01), 100, 32, 5)
    with pytest.raises(PfedlaError, match=r"privacy\.epsilon"):
        design(Privacy(epsilon=0.001), 100, 32, 500)


def plain_twin(module: nn.Module, model: Params, data: LocalData, batch: float, optimizer: Any) -> Params:
    """Autograd and torch.optim on the drawn examples alone; the sum of their losses over the expected size."""
    module.load_state_dict(model)
    steps = optimizer(module.parameters())
    for order, is_drawn in zip(data.order.flatten(0, 1), data.is_drawn.flatten(0, 1), strict=True):
        rows = order[is_drawn]
        steps.zero_grad()
        (F.cross_entropy(module(data.x[rows]), data.y[rows], reduction="sum") / batch).backward()
        steps.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


OPTIMIZERS = {
    "sgd": ({}, partial(torch.optim.SGD, lr=0.1)),
    "momentum": ({"momentum": 0.9, "nesterov": True}, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "adamw": ({"optimizer": "adamw", "weight_decay": 0.1}, partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_noise_and_clipping_it_is_plain_training_on_poisson_batches(name: str) -> None:
    """Not bit for bit: gradients of single examples are summed in another order than a batch's."""
    recipe, optimizer = OPTIMIZERS[name]
    method, mechanism = make("fedavg", recipe=recipe), Mechanism(1e6, 0.0, rate=5 / 13, steps=3, delta=0.01)
    with SimulatedEngine(method, toy_federation((13,)), settings(), mechanisms=[mechanism]) as engine:
        client = engine.clients[0]
        cohort = Cohort(1, 0, ids=torch.tensor([0]), num_examples=torch.tensor([13]))
        data = client.local_data(cohort, NOTHING)
        download = method.download(method.init_server(1, 0), cohort).rows(0)
        _, answer = client.update(download, cohort)
    twin = plain_twin(TinyNet(), method.task.initial(), data, 5.0, optimizer)
    assert_same(answer.upload.tensors, twin, 1e-5)
    assert answer.training_loss.isnan()  # it would be a number about the examples, without noise


def settings(name: str = "threaded", threads: int = 1) -> Any:
    return pfedla.core.settings.EngineSettings(name=name, threads=threads)


def test_every_example_is_drawn_with_the_rate_and_independently() -> None:
    mechanism = Mechanism(1.0, 1.0, rate=0.2, steps=50, delta=0.01)
    for stream in (torch.Generator().manual_seed(0), None):
        order, is_drawn = sample_batches(mechanism, 40, 20, stream)
        sizes = is_drawn.sum(-1).double()
        assert abs(sizes.mean() - 8) < 0.5  # of 1000 steps; the standard error is 0.08
        assert 4.5 < sizes.var() < 8.5  # that of a binomial is 6.4, of fixed batches 0
        counts = torch.bincount(order[is_drawn], minlength=40)
        assert ((counts - 200).abs() < 80).all()  # six standard deviations
        for rows, kept in zip(order.flatten(0, 1), is_drawn.flatten(0, 1), strict=True):
            assert len(rows[kept].unique()) == kept.sum()


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    order, is_drawn = sample_batches(Mechanism(1.0, 1.0, rate=0.0, steps=2, delta=0.1), 9, 1, torch.Generator())
    assert order.shape == is_drawn.shape == (1, 2, 1)
    assert not is_drawn.any()


def one_gradient(noise: float, bound: float, rows: list[int], x: Tensor, **how: Any) -> Tensor:
    task, y = task_of(TinyNet()), torch.zeros(len(x)).long()
    is_drawn = torch.zeros(len(x), dtype=torch.bool).index_fill(0, torch.tensor(rows), True)
    mechanism = torch.tensor([bound, noise, 1.0])
    with draw_from(torch.Generator().manual_seed(3), **how):
        found = private_gradient(task, task.initial(), x, y, is_drawn=is_drawn, mechanism=mechanism)
    return torch.cat([value.flatten() for value in found.values()])


def test_no_example_moves_the_sum_by_more_than_the_bound() -> None:
    """Also with a huge gradient, and none with one that is not finite."""
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)) * 100
    x[5, 0] = torch.inf
    for bound in (1e-3, 0.7):
        whole = one_gradient(0.0, bound, [*range(6)], x)
        for one in range(6):
            moved = (whole - one_gradient(0.0, bound, [i for i in range(6) if i != one], x)).norm()
            assert moved <= bound * (1 + 1e-5)
            assert (moved > 0) == (one != 5)


@pytest.mark.parametrize("secret", [False, True])
def test_the_noise_has_the_stated_deviation(secret: bool) -> None:
    """Of 53 numbers 200 times: within five standard errors, independent of the examples, and normal."""
    x, draws = torch.zeros(4, 6), []
    quiet = one_gradient(0.0, 0.5, [0, 1], x)
    task, y = task_of(TinyNet()), torch.zeros(4).long()
    is_drawn, mechanism = torch.tensor([True, True, False, False]), torch.tensor([0.5, 3.0, 1.0])
    with draw_from(torch.Generator().manual_seed(3), secret=secret):
        for _ in range(200):
            found = private_gradient(task, task.initial(), x, y, is_drawn=is_drawn, mechanism=mechanism)
            draws.append(torch.cat([value.flatten() for value in found.values()]) - quiet)
    noise = torch.cat(draws).double() / (3.0 * 0.5)
    count = len(noise)
    assert abs(noise.mean()) < 5 / count**0.5
    assert abs(noise.std() - 1) < 5 / (2 * count) ** 0.5
    assert abs((noise.abs() < 1).double().mean() - 0.6827) < 5 * (0.22 / count) ** 0.5
    assert abs((noise[1:] * noise[:-1]).mean()) < 5 / count**0.5


def test_noise_of_the_system_is_new_each_time_and_that_of_the_seed_is_not() -> None:
    x = torch.zeros(4, 6)
    assert torch.equal(one_gradient(1.0, 1.0, [0], x), one_gradient(1.0, 1.0, [0], x))
    drawn = [one_gradient(1.0, 1.0, [0], x, secret=True) for _ in range(2)]
    assert not torch.equal(*drawn)
    assert not torch.equal(draw_uniform(9, None), draw_uniform(9, None))
    with pytest.raises(PfedlaError, match="source of noise"):
        draw_normal(torch.zeros(3))


PLAYED = {"rounds": 2, "lr": 0.1, "local_epochs": 2, "batch_size": 5}
OWN = {"fedrep": {"head_epochs": 1}, "ditto": {"personal_epochs": 1}, "fedbabu": {"fine_tuning_epochs": 1}}


def simulated(name: str, federation: Federation, **more: Any) -> pfedla.Simulation:
    how = {**PLAYED, **OWN.get(name, {}), "privacy": NOISY, **more}
    return simulate(federation, tiny(name, False), name, **how)


@pytest.mark.parametrize("name", [one for one in methods("fedavg-ft", "ditto") if one.id in PRIVATE.split()])
def test_stacked_clients_draw_and_learn_as_threads_do(name: str, federation: Federation) -> None:
    threads, one, stacked = (
        simulated(name, federation, **engine)
        for engine in (
            {"engine": "threaded", "threads": 2},
            {"engine": "threaded", "threads": 1},
            {"engine": "vectorized"},
        )
    )
    for left, right, alone in zip(threads.models, stacked.models, one.models, strict=True):
        assert_same(left, alone)
        assert_same(left, right, 1e-4)
    plain = simulated(name, federation, privacy={})
    assert not torch.equal(plain.models[0]["fc2.bias"], threads.models[0]["fc2.bias"])


@pytest.mark.parametrize("name", PRIVATE.split())
def test_every_gradient_is_counted(name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that are taken, of one client, are those that it pays for; no plain gradient is taken."""
    steps: list[int] = []

    def count(*given: Any, **how: Any) -> Params:
        steps.append(len(given[3]))
        return private_gradient(*given, **how)

    def forbid(*given: Any, **how: Any) -> None:
        raise AssertionError("a gradient without noise")

    monkeypatch.setattr(training, "private_gradient", count)
    monkeypatch.setattr(training, "batches", forbid)
    monkeypatch.setattr("pfedla.core.tasks.DirectTask.gradient", forbid)
    monkeypatch.setattr("pfedla.core.tasks.Task.step", forbid)
    alone = toy_federation((20,))
    simulated(name, alone, engine="threaded", threads=1)
    method = make(name, epochs=2, **OWN.get(name, {}))
    (epochs,) = plan_epochs(Experiment.parse({"rounds": 2}), method, 1)
    # After the last round the personal model is made twice, for the test and to be kept: the same draws, one release.
    again = method.count_epochs()[1]
    assert len(steps) == 4 * (epochs + again)


def test_what_private_training_does_not_cover_is_refused(federation: Federation) -> None:
    for name in ALGORITHMS.keys() - {*PRIVATE.split(), "fedbn"}:
        with pytest.raises(NotApplicableError, match=r"it covers .*pfedla"):
            simulated(name, federation)
    with pytest.raises(NotApplicableError, match="resnet20-gn"):
        simulate(federation, TinyNet(batch_norm=True), "fedavg", **PLAYED, privacy=NOISY)
    with pytest.raises(PfedlaError, match="not both"):
        simulated("fedavg", federation, privacy={"epsilon": 1.0, "noise_multiplier": 1.0})
    with pytest.raises(PfedlaError, match="single examples"):
        check_private(task_of(Recurrent()), (torch.zeros(2, 3, 4), torch.zeros(2).long()))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 100:  # decides by the data, as vmap cannot
            return self.fc(x[:, 0])
        return self.fc(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("model", ["resnet20-gn", "vit-tiny", "cnn", "small-cnn"])
def test_models_of_the_registry_can_train_privately(model: str) -> None:
    module = build_model(model, (1, 16, 16), 3, torch.Generator())
    check_private(task_of(module), (torch.zeros(2, 1, 16, 16), torch.zeros(2).long()))


def run(tmp_path: Path, name: str, **more: Any) -> tuple[dict[str, Any], list[dict[str, Any]], Path]:
    values = {**DIGITS, **{key: value for key, value in more.items() if key not in ("resume", "out")}}
    values["algorithm"] = {"name": name}
    out = pfedla.run(Experiment.parse(values), tmp_path / more.get("out", "run"), resume=more.get("resume", False))
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return json.loads((out / "result.json").read_text()), lines, out


def test_a_run_says_what_each_client_has_spent_and_keeps_its_epsilon(tmp_path: Path) -> None:
    """With half of the clients in a round and some answers lost: an answer that is lost counts."""
    more = {"participation": 0.5, "rounds": 6, "faults": {"dropout": 0.3}, "evaluate_every": 2}
    result, lines, _ = run(tmp_path, "fedavg", **more)
    about = result["privacy"]
    per_client = about["epsilon"]["per_client"]
    assert about["epsilon"]["max"] == max(per_client) <= 3.0
    assert min(per_client) > 2.9  # each has the noise for the rounds that it takes part in
    assert len(set(about["noise_multiplier"])) > 1
    spendings = [line["epsilon"]["per_client"] for line in lines]
    assert [line["round"] for line in lines] == [2, 4, 6]
    assert all(one <= other for pair in pairwise(spendings) for one, other in zip(*pair, strict=True))
    assert spendings[-1] == per_client
    assert sum(failure["no answer"] for failure in result["failures"].values()) > 0


@pytest.mark.slow
def test_a_run_that_is_extended_goes_on_counting_and_one_with_an_epsilon_is_not(tmp_path: Path) -> None:
    noisy = {"privacy": {"noise_multiplier": 1.5}}
    run(tmp_path, "pfedla", **noisy, rounds=2, out="cut")
    cut, _, _ = run(tmp_path, "pfedla", **noisy, rounds=4, out="cut", resume=True)
    whole, _, _ = run(tmp_path, "pfedla", **noisy, rounds=4, out="whole")
    assert cut["privacy"] == whole["privacy"]
    assert cut["score"] == whole["score"]
    run(tmp_path, "pfedla", rounds=2, out="planned")
    with pytest.raises(PfedlaError, match="rounds: 2 -> 4"):
        run(tmp_path, "pfedla", rounds=4, out="planned", resume=True)


def test_a_client_that_joins_pays_for_its_own_rounds(tmp_path: Path) -> None:
    result, *_ = run(tmp_path, "fedrep", data={**DIGITS["data"], "clients": 5}, unseen_clients=0.2)
    assert len(result["privacy"]["epsilon"]["per_client"]) == 4
    (epsilon,) = result["unseen"]["epsilon"].values()
    assert 2.9 < epsilon <= 3.0


def test_off_it_is_no_part_of_a_run(tmp_path: Path) -> None:
    experiment = Experiment.parse({})
    assert "privacy" not in experiment.identity()
    result, lines, _ = run(tmp_path, "fedavg", privacy={}, rounds=1)
    assert "privacy" not in result
    assert "epsilon" not in lines[0]
    assert lines[0]["training_loss"] is not None
