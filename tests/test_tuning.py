"""`pfedla tune`: equal trials on validation examples, the same after any kill, and a file that `compare` takes."""

import json
import random
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyNet, assert_same, flat, make, methods, play, toy_federation

from pfedla.algorithms import ALGORITHMS, create, options_model
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.errors import GaveUpError, NotApplicableError, PfedlaError, Stopped
from pfedla.core.search import Choice, Epochs, Range
from pfedla.data.federation import Examples, Federation
from pfedla.report.reading import Metric, read_result
from pfedla.runs.build import Built, build, build_around
from pfedla.runs.comparison import plan_comparison
from pfedla.runs.experiment import Experiment, read_toml
from pfedla.runs.progress import Display
from pfedla.runs.run import Run
from pfedla.runs.trials import JOURNAL, Trial, Tuned
from pfedla.runs.tuning import TUNED, TUNING, read_value, search_space, trial_experiment, tune

QUICK = ("-d", "digits", "--clients", 4, "--samples", 40, "--model", "mlp", "--rounds", 2, "--local-epochs", 2)
SIZES, ONE_THREAD = (9, 14, 9), {"name": "threaded", "threads": 1}
NAMES = ("fedavg", "fedrep", "ditto")


def build_toy(experiment: Experiment, federation: Federation | None = None) -> Built:
    return build_around(experiment, (federation or toy_federation(SIZES)).for_validation(experiment.seed), TinyNet())


def experiments(*names: str, **values: Any) -> list[tuple[str, Experiment]]:
    common = {"rounds": 2, "training": {"lr": 0.05, "local_epochs": 3}, "engine": ONE_THREAD, **values}
    return [(name, Experiment.parse({"algorithm": {"name": name}, **common})) for name in names]


def journal(folder: Path) -> list[dict[str, Any]]:
    """What a tuning has decided, without how long it took."""
    lines = [json.loads(line) for line in (folder / JOURNAL).read_text().splitlines()]
    return sorted(
        ({key: value for key, value in line.items() if key != "seconds"} for line in lines if "asked" not in line),
        key=lambda line: (line["method"], line["number"]),
    )


# What is searched


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_search_names_options_and_its_bounds_are_accepted(name: str) -> None:
    kind = ALGORITHMS[name]
    assert set(kind.search) <= set(options_model(name).model_fields)
    for epochs in (1, 2, 5):
        for option, search in kind.search.items():
            found = search.within(epochs) if isinstance(search, Epochs) else search
            if isinstance(found, Range) and found.low >= found.high:
                continue
            for bound in found.values if isinstance(found, Choice) else found[:2]:
                method = make(name, epochs=epochs, lr=0.01, batch_norm=None)
                create(name, method.task, method.training, {option: bound}).check(6)  # as it is for most clients


@pytest.mark.parametrize("name", methods("fedavg", "pfedme"))
def test_the_learning_rate_matters_where_a_method_says_so(name: str) -> None:
    one, other = (play(make(name, batch_norm=None, lr=lr), toy_federation(), rounds=range(1, 2)) for lr in (0.1, 0.05))
    same = one[0][-1].evaluation.loss.equal(other[0][-1].evaluation.loss)
    same = same and one[0][-1].training_loss.equal(other[0][-1].training_loss)
    assert same != ALGORITHMS[name].uses_lr
    if same:
        assert_same(flat(one[0][-1].server), flat(other[0][-1].server))


def test_the_space_is_around_the_default_learning_rate() -> None:
    (asked,), (short,) = experiments("fedrep"), experiments("fedrep", training={"lr": 0.05, "local_epochs": 2})
    assert search_space(build_toy(asked[1])) == {
        "training.lr": Range(0.015, 1.5),
        "algorithm.head_epochs": Range(1, 2, whole=True),
    }
    assert set(search_space(build_toy(short[1]))) == {"training.lr"}  # two epochs: one for the head, one for the body


class Mine(FedAvg):
    search = {"strength": Range(0.1, 10)}  # noqa: RUF012
    strength: float = 1.0


class Misspelled(FedAvg):
    search = {"strenght": Range(0.1, 10)}  # noqa: RUF012
    strength: float = 1.0


class Backwards(FedAvg):
    search = {"strength": Range(10, 0.1)}  # noqa: RUF012
    strength: float = 1.0


class NotARange(FedAvg):
    search = {"strength": (0.1, 10)}  # type: ignore[assignment]  # noqa: RUF012
    strength: float = 1.0


class TooWide(FedAvg):
    search = {"count": Choice((1, "many"))}  # noqa: RUF012
    count: int = 1


def test_an_own_method_declares_its_search(tmp_path: Path) -> None:
    found = tune(experiments(f"{__name__}:Mine"), 3, tmp_path / "t", build_one=build_toy)
    assert set(found[f"{__name__}:Mine"].space) == {"training.lr", "algorithm.strength"}
    for kind in (Misspelled, Backwards, NotARange, TooWide):
        (asked,) = experiments(f"{__name__}:{kind.__name__}")
        with pytest.raises(PfedlaError, match=r"strength|count"):
            search_space(build_toy(asked[1]))


# Trials


def test_every_method_gets_the_same_trials_and_its_defaults_first(tmp_path: Path) -> None:
    found = tune(experiments(*NAMES), 7, tmp_path / "t", build_one=build_toy, seeds=(0, 1))
    for name, one in found.items():
        assert [trial.number for trial in one.trials] == list(range(7))
        assert one.trials[0].options["training.lr"] == 0.05
        for trial in one.trials:
            assert set(trial.per_seed) == {"0", "1"}
            assert trial.value == pytest.approx(sum(trial.per_seed.values()) / 2)
        assert len({json.dumps(trial.options) for trial in one.trials}) == 7
        assert one.best.value == max(trial.value for trial in one.trials)
        assert one.overrides["tuned_trials"] == 7
        assert one.overrides["training"]["lr"] == one.best.options["training.lr"], name
    described = json.loads((tmp_path / "t" / TUNING).read_text())
    assert len(described["trials"]) == 7 * len(NAMES)
    assert (tmp_path / "t" / "tuning.png").stat().st_size > 5000


def test_the_best_is_the_first_of_the_best_by_the_metric() -> None:
    def best(values: list[float | None], **metric: Any) -> int | None:
        trials = [
            Trial(method="x", number=n, options={}, value=value, per_seed={}, reason="", seconds=0.0)
            for n, value in enumerate(values)
        ]
        one = Tuned("x", Experiment(), {}, {}, Metric("m", **metric, percent=False), {}, trials)
        return one.best.number if one.best else None

    values = [0.0, -2.0, None, 3.0, -2.0, 3.0]
    assert best(values, higher_is_better=True) == 3
    assert best(values, higher_is_better=False) == 1
    assert best([None, None], higher_is_better=True) is None


class Exploding(FedAvg):
    search = {"explodes": Choice((False, True))}  # noqa: RUF012
    explodes: bool = False

    def local_update(self, client: Any, download: Any, data: Any) -> Any:
        result = super().local_update(client, download, data)
        factor = torch.nan if self.explodes else 1.0
        tensors = {key: value * factor for key, value in result.upload.tensors.items()}
        return result._replace(upload=result.upload._replace(tensors=tensors))


EXPLODING = f"{__name__}:Exploding"


def test_a_trial_that_diverges_counts_and_is_never_the_best(tmp_path: Path) -> None:
    """In two rounds the run does not give up: clients whose uploads are refused go on with an older model."""
    found = tune(experiments(EXPLODING), 8, tmp_path / "t", build_one=build_toy)[EXPLODING]
    diverged = [trial for trial in found.trials if trial.options["algorithm.explodes"]]
    assert len(found.trials) == 8
    assert diverged
    assert all(trial.value is None and trial.reason for trial in diverged)
    assert all(trial.value is not None for trial in found.trials if trial not in diverged)
    assert found.overrides["algorithm"] == {"explodes": False}


def test_a_client_whose_model_breaks_does_not_raise_the_mean() -> None:
    """Without its score, the mean of the others could win."""
    (_, experiment), federation = experiments("local", metric="auroc")[0], toy_federation()
    x, y = federation.train[0]
    broken = Federation([Examples(x * 1e38, y), *federation.train[1:]], federation.test, federation.classes)
    with Run(build_toy(experiment, broken)) as run:
        for _ in run:
            pass
        with pytest.raises(GaveUpError):
            read_value(run)


def test_options_that_do_not_go_together_count_as_a_trial(tmp_path: Path) -> None:
    def space_of(built: Built) -> dict[str, Choice]:
        return {"training.lr": Choice((0.05, 2.0))}  # Ditto refuses a penalty of one over the learning rate

    one = tune(experiments("ditto"), 8, tmp_path / "t", space_of=space_of, build_one=build_toy)["ditto"]
    refused = [trial for trial in one.trials if trial.value is None]
    assert refused
    assert all("penalty" in trial.reason for trial in refused)
    assert one.overrides["training"] == {"lr": 0.05}


def test_a_tuning_without_any_value_gives_up(tmp_path: Path) -> None:
    def space_of(built: Built) -> dict[str, Choice]:
        return {"algorithm.explodes": Choice((True,))}

    (asked,) = experiments(EXPLODING, algorithm={"name": EXPLODING, "explodes": True})
    with pytest.raises(GaveUpError, match="no trial"):
        tune([asked], 2, tmp_path / "t", space_of=space_of, build_one=build_toy)


def test_no_trial_depends_on_test_examples(tmp_path: Path) -> None:
    federation = toy_federation()
    other = [Examples(test.x * 100, test.y.roll(1)) for test in federation.test]
    changed = Federation(federation.train, other, federation.classes)
    for name, one in {"one": federation, "other": changed}.items():
        tune(experiments("fedrep"), 4, tmp_path / name, build_one=partial(build_toy, federation=one))
    assert journal(tmp_path / "one") == journal(tmp_path / "other")


# Stops


class StopAfter:
    """Asks to stop at the n-th question, which a run asks before each round and while it trains."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_stopped_and_resumed_it_ends_as_any_other(tmp_path: Path) -> None:
    asked = experiments("fedrep", "ditto")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    tune(asked, 7, whole, build_one=build_toy)
    stops, draws = 0, random.Random(3)
    for _ in range(300):
        try:
            tune(asked, 7, cut, build_one=build_toy, stopping=StopAfter(draws.randrange(1, 30)), resume=True)
            break
        except Stopped:
            stops += 1
            with (cut / JOURNAL).open("a") as file:
                file.write('{"method": "fedrep", "numb' * (stops % 2))  # as if it had been killed while it wrote
    assert stops > 3
    assert journal(cut) == journal(whole)
    assert {line["number"] for line in journal(cut)} == set(range(7))


@pytest.mark.slow
def test_more_trials_and_more_methods_extend_a_tuning(tmp_path: Path) -> None:
    tune(experiments("fedrep"), 3, tmp_path / "t", build_one=build_toy)
    tune(experiments("fedrep", "ditto"), 6, tmp_path / "t", build_one=build_toy, resume=True)
    tune(experiments("ditto", "fedrep"), 6, tmp_path / "at once", build_one=build_toy)
    assert journal(tmp_path / "t") == journal(tmp_path / "at once")
    fewer = tune(experiments("fedrep"), 2, tmp_path / "t", build_one=build_toy, resume=True)
    assert len(fewer["fedrep"].trials) == fewer["fedrep"].overrides["tuned_trials"] == 2


def test_the_folder_of_another_tuning_is_refused(tmp_path: Path) -> None:
    other_data = partial(build_toy, federation=toy_federation(SIZES, seed=5))
    again: Callable[..., Any] = partial(tune, folder=tmp_path / "t", build_one=build_toy)
    again(experiments("fedavg"), 2)
    with pytest.raises(PfedlaError, match="overwritten"):
        again(experiments("fedavg"), 2)
    for other, what in (
        (partial(again, experiments("fedavg", rounds=3)), "rounds"),
        (partial(again, experiments("fedavg"), seeds=(1,)), "seeds"),
        (partial(again, experiments("fedavg"), build_one=other_data), "examples"),
        (partial(again, experiments("fedavg"), space_of=lambda built: {"training.lr": Range(1, 2)}), "search"),
    ):
        with pytest.raises(PfedlaError, match=what):
            other(trials=3, resume=True)
    assert len(journal(tmp_path / "t")) == 2
    (tmp_path / "t" / JOURNAL).write_text("damaged\n")
    with pytest.raises(PfedlaError, match="damaged"):
        again(experiments("fedavg"), 2, resume=True)


COMMAND = [sys.executable, "-m", "pfedla", "tune", "-a", "fedrep,pfedla", *map(str, QUICK), "--trials", "7"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_killed_again_and_again_it_ends_as_any_other(number: signal.Signals, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run([*COMMAND, "--out", str(whole), "-q"], check=True)
    draws, reached = random.Random(7), [0]
    for _ in range(4):
        words = [*COMMAND, "--out", str(cut), "--resume"]
        with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
            while len(journal(cut) if (cut / JOURNAL).exists() else ()) <= reached[-1] and process.poll() is None:
                time.sleep(0.005)
            time.sleep(draws.uniform(0, 0.2))
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        if process.returncode == 0:
            break
        assert process.returncode in (-number, 130)
        assert number == signal.SIGKILL or f"--resume --out {cut}" in said
        reached.append(len(journal(cut)))
    assert len(reached) > 2
    subprocess.run([*COMMAND, "--out", str(cut), "--resume", "-q"], check=True)
    assert journal(cut) == journal(whole)
    assert (cut / TUNED).read_bytes() == (whole / TUNED).read_bytes()


# The command, and what comes of it


def test_the_file_reproduces_the_values_and_can_be_compared(pfedla, tmp_path: Path) -> None:
    own = ("--set", "ditto.personal_epochs=1", "--set", "fedprox.training={momentum=0.5}")
    code, out, err = pfedla(
        "tune", "-a", "fedrep,ditto,fedbn,fedprox", *QUICK, "--local-epochs", 3, *own, "--trials", 4, "--out", "t"
    )
    assert code == 0, err
    assert "head_epochs" in out
    assert "FedBN" in out  # why it was not tuned
    tuned, values = json.loads((tmp_path / "t" / TUNING).read_text()), read_toml(tmp_path / "t" / TUNED)
    names, seeds = values.pop("methods"), values.pop("seeds")
    assert (names, seeds) == (["fedrep", "ditto", "fedbn", "fedprox"], [0])
    plan = plan_comparison(values, names, [0], tmp_path / "unused", tuning=True)
    for (label, _), experiment in plan.experiments.items():
        assert experiment.tuned_trials == 4
        with Run(plan.build(experiment)) as run:
            for _ in run:
                pass
            best = tuned["methods"][label]["best"]
            (value,) = [one["value"] for one in tuned["trials"] if (one["method"], one["number"]) == (label, best)]
            assert read_value(run) == value
    assert plan.experiments["fedprox", 0].training.momentum == 0.5
    assert plan.experiments["fedrep", 0].training.momentum == 0

    code, _, err = pfedla("compare", "t/tuned.toml", "--out", "c")
    assert code == 0, err
    rates = {}
    for label in ("fedrep", "ditto", "fedprox"):
        found = tomllib.loads((tmp_path / "c" / f"{label}-s0" / "experiment.toml").read_text())
        rates[label] = found["training"]["lr"]
        assert rates[label] == values[label]["training"]["lr"]
        path = tmp_path / "c" / f"{label}-s0" / "result.json"
        assert read_result(path)["tuned_trials"] == 4
    old = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in old.items() if key != "tuned_trials"}))
    assert read_result(path)["tuned_trials"] == 0  # of an older version


@pytest.mark.slow
def test_other_methods_can_join_the_comparison_of_a_tuned_file(pfedla, tmp_path: Path) -> None:
    assert pfedla("tune", "-a", "fedrep,ditto", *QUICK, "--trials", 2, "--out", "t", "-q")[0] == 0
    assert pfedla("compare", "t/tuned.toml", "-a", "fedrep", "--out", "c", "-q")[0] == 0
    code, _, err = pfedla("compare", "t/tuned.toml", "-a", "ditto,local", "--out", "c", "--resume", "-q")
    assert code == 0, err
    table = json.loads((tmp_path / "c" / "comparison.json").read_text())
    trials = {name: results[0]["tuned_trials"] for name, results in table.items()}
    assert trials == {"fedrep": 2, "ditto": 2, "local": 0}  # methods with learning rates of their own are one table
    code, _, err = pfedla("compare", "t/tuned.toml", "--lr", 0.1, "--out", "d")
    assert code == 2
    assert "training" in err
    assert pfedla("compare", "t/tuned.toml", "--rounds", 1, "--out", "d", "-q")[0] == 0


def test_the_rows_of_a_ready_test_split_are_not_looked_at(pfedla, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, test = draws.normal(size=(120, 5)).astype(np.float32), np.arange(120) % 4 == 0
    y, client = (x[:, 0] > 0).astype(np.int64), np.repeat([0, 1, 2], 40)
    for name in ("one", "other"):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, test=test, client=client)
        x[test], y[test] = 50 - x[test], 1 - y[test]
    for name in ("one", "other"):
        words = ("-a", "fedavg,pfedla", "-d", f"{name}.npz", "--rounds", 2, "--trials", 3, "--out", name, "-q")
        assert pfedla("tune", *words)[0] == 0
    assert journal(tmp_path / "one") == journal(tmp_path / "other")


def test_unseen_clients_take_no_part() -> None:
    values = {"data": {"clients": 5, "samples_per_client": 40}, "unseen_clients": 0.4, "rounds": 1, "model": "mlp"}
    experiment = Experiment.parse({**values, "algorithm": {"name": "fedavg"}})
    whole, tuned = build(experiment), build(experiment, validation=True)
    assert tuned.unseen is None
    assert tuned.federation.names == whole.federation.names
    assert len(whole.unseen) == 2


def test_the_error_without_optuna_names_the_extra(pfedla, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, err = pfedla("tune", "-a", "fedavg", *QUICK)
    assert code == 2
    assert "pfedla[tune]" in err


def test_trials_are_those_of_the_options_that_are_written_down() -> None:
    """What a trial is run with is exactly what its line says, also where the experiment had other options."""
    (_, experiment), options = experiments("ditto")[0], {"training.lr": 0.02, "algorithm.penalty": 0.3}
    found = trial_experiment(experiment, options, seed=4)
    assert (found.training.lr, found.algorithm.options["penalty"], found.seed) == (0.02, 0.3, 4)
    assert found.training.local_epochs == experiment.training.local_epochs


def test_the_display_counts_every_round(tmp_path: Path) -> None:
    with Display(2 * 3 * 2, quiet=True) as display:
        tune(experiments("fedavg", "local"), 3, tmp_path / "t", build_one=build_toy, display=display)
        assert display.bar.tasks[0].completed == 12


def test_what_does_not_apply_is_the_callers_to_leave_out(tmp_path: Path) -> None:
    with pytest.raises(NotApplicableError):
        tune(experiments("fedbn"), 1, tmp_path / "t", build_one=build_toy)
    assert not (tmp_path / "t").exists()
