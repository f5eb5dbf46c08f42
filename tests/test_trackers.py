"""Trackers hold what rounds.jsonl holds, whatever happens to the run. Their own readers read them."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_resume import numbers

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.report.reading import flatten, read_experiment, read_rounds
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunFolder
from pfedla.runs.progress import Display
from pfedla.runs.run import Run, run
from pfedla.runs.trackers import TRACKERS, WeightsAndBiases, select_metrics

WANDB = importlib.util.find_spec("wandb") is not None
needs_wandb = pytest.mark.skipif(not WANDB, reason="wandb is not installed")
INSTALLED = [name for name in TRACKERS if name != "wandb" or WANDB]
DATA = {"clients": 4, "samples_per_client": 20}
METHOD = {"training": {"local_epochs": 1}, "algorithm": {"name": "fedavg"}}
TINY = {"rounds": 4, "model": "mlp", "data": DATA, **METHOD, "checkpoint": {"rounds": 2}}
QUICK = ("-a", "fedavg", "--model", "mlp", "--local-epochs", 1, "--samples", 20, "--clients", 4)
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
DIES = """
import sys
from test_trackers import *

with Run(build(Experiment.parse(TINY)), RunFolder(Path(sys.argv[1])), track=INSTALLED) as run:
    for round in run:
        if round.round == 3:
            os._exit(9)
"""
Points = dict[str, dict[int, float]]  # metric -> step -> value


@pytest.fixture(scope="module", autouse=True)
def nothing_leaves_the_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """wandb reads its variables once in a process."""
    home = str(tmp_path_factory.mktemp("home"))
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
            patch.delenv(name)
        places = {f"WANDB_{kind}_DIR": home for kind in ("CACHE", "CONFIG", "DATA")}
        for name, value in (OFFLINE | places | {"NETRC": f"{home}/none"}).items():
            patch.setenv(name, value)
        yield
        if WANDB:
            import wandb

            wandb.teardown()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables, which take seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def python(*words: str, without: str = "WANDB_SERVICE", **more: str) -> subprocess.CompletedProcess[str]:
    """Without WANDB_SERVICE, else a process started here would use this one's service, which outlives it."""
    left = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB_SERVICE", without))}
    left |= {"PYTHONPATH": str(Path(__file__).parent)} | more
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=left)


def expected_points(run: Path) -> Points:
    found: Points = {}
    for line in read_rounds(run):
        for name, value in select_metrics(line, "accuracy").items():
            found.setdefault(name, {})[line["round"]] = value
    return found


def test_the_headline_has_its_own_name() -> None:
    spread = {"mean": 1.5, "worst": None, "per_client": [1.5]}
    line = {"score": spread, "score_after_training": 2.0, "honest": {"score": spread}, "metrics": {"mae": spread}}
    line |= {"round": 1, "task": {"percent": False}, "unseen": {"score_before": spread, "clients": ["a"], "rounds": 3}}
    expected = {"rmse/mean": 1.5, "rmse_after_training": 2.0, "honest/rmse/mean": 1.5, "metrics/mae/mean": 1.5}
    assert select_metrics(line, "rmse") == expected | {"unseen/rmse_before/mean": 1.5, "unseen/rounds": 3}


def by_step(name: str, pairs: list[tuple[int, float]]) -> dict[int, float]:
    assert len(dict(pairs)) == len(pairs), f"{name} has a step twice: {pairs}"
    return dict(pairs)


def read_tensorboard(run: Path) -> tuple[Points, dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    pairs = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    config = {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}
    return {tag: by_step(tag, found) for tag, found in pairs.items()}, config


def read_mlflow(store: Path) -> dict[str, tuple[Any, Points]]:
    from mlflow import MlflowClient

    client, found = MlflowClient(f"sqlite:///{store}"), {}
    for one in client.search_runs([client.get_experiment_by_name("pfedla").experiment_id]):
        histories = {key: client.get_metric_history(one.info.run_id, key) for key in one.data.metrics}
        pairs = {key: [(point.step, point.value) for point in history] for key, history in histories.items()}
        assert one.info.run_name not in found
        found[one.info.run_name] = one, {key: by_step(key, values) for key, values in pairs.items()}
    return found


def of_rounds(found: Points, *left_out: str) -> Points:
    return {name: values for name, values in found.items() if not name.startswith(("result/", *left_out))}


def as_float32(found: Points) -> Points:
    return {name: {step: float(np.float32(v)) for step, v in values.items()} for name, values in found.items()}


@pytest.mark.slow
def test_every_tracker_holds_what_the_folder_holds(pfedla: Callable[..., Any], tmp_path: Path) -> None:
    faults = ("--set", "faults.attack=noise", "--set", "faults.attackers=0.25")
    tested = (*QUICK, "--rounds", 3, "--set", "evaluate_every=2", *faults)
    code, out, err = pfedla("run", *tested, "--track", ",".join(INSTALLED), "--out", "r", "--json")
    assert code == 0, err
    assert json.loads(out)["run"] == "r"
    assert pfedla("run", *tested, "--out", "plain", "-q")[0] == 0
    run, plain = tmp_path / "r", tmp_path / "plain"
    assert numbers(run) == numbers(plain)
    expected = expected_points(run)
    assert {tuple(values) for values in expected.values()} == {(2, 3)}
    assert {"accuracy/mean", "honest/accuracy/worst", "loss", "seconds/train", "down_bytes"} <= expected.keys()
    config = flatten(read_experiment(run))
    metrics = select_metrics(json.loads((run / "result.json").read_text()), "accuracy")
    result = {f"result/{name}": value for name, value in metrics.items()}
    assert {"result/accuracy/mean", "result/metrics/auroc/mean", "result/traffic/up_bytes"} <= result.keys()
    assert read_tensorboard(run) == (as_float32(expected), config)
    found, stored = read_mlflow(tmp_path / "mlflow.db")["r"]
    assert of_rounds(stored) == expected
    assert {key: stored[key] for key in result} == {key: {3: value} for key, value in result.items()}
    assert found.data.params == {key: str(value) for key, value in config.items()}
    assert found.info.status == "FINISHED"
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.slow
def test_killed_and_resumed_it_is_one_run_without_gaps(tmp_path: Path, empty_store: Path) -> None:
    """Killed in round 3, with a checkpoint after 2: round 3 is run again, and was logged before."""
    store, place = tmp_path / "mlflow.db", tmp_path / "r"
    shutil.copy(empty_store, store)
    died = python("-c", DIES, str(place))
    assert died.returncode == 9, died.stderr
    before, stored = read_mlflow(store)["r"]
    assert before.info.status == "RUNNING"
    assert stored["loss"].keys() == read_tensorboard(place)[0]["loss"].keys() == {1, 2, 3}

    run(Experiment.parse(TINY), place, resume=True, track=INSTALLED)
    expected = expected_points(place)
    assert expected["loss"].keys() == {1, 2, 3, 4}
    assert read_tensorboard(place)[0] == as_float32(expected)
    found, stored = read_mlflow(store)["r"]
    assert (found.info.run_id, found.info.status) == (before.info.run_id, "FINISHED")
    assert of_rounds(stored, "seconds/") == of_rounds(expected, "seconds/")
    assert stored["seconds/train"].keys() == {1, 2, 3, 4}  # of round 3 the first: MLflow takes nothing back


@pytest.mark.slow
def test_logged_later_stopped_and_extended(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, place = tmp_path / "elsewhere.db", tmp_path / "r"
    shutil.copy(empty_store, store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    run(Experiment.parse(TINY), place)
    for _ in range(2):  # the second time changes nothing
        run(Experiment.parse(TINY), place, resume=True, track=["tensorboard", "mlflow"])
        assert of_rounds(read_mlflow(store)["r"][1]) == expected_points(place)
        assert read_tensorboard(place)[0] == as_float32(expected_points(place))
    longer = build(Experiment.parse(TINY | {"rounds": 8}))
    stopping, folder = lambda: len(read_rounds(place)) == 6, RunFolder(place, resume=True)
    with pytest.raises(Stopped):
        Run(longer, folder, stopping=stopping, track=["mlflow"]).complete()
    assert read_mlflow(store)["r"][0].info.status == "KILLED"
    run(longer.experiment, place, resume=True, track=["mlflow"])
    found, stored = read_mlflow(store)["r"]
    assert found.info.status == "FINISHED"
    assert of_rounds(stored) == expected_points(place)
    assert stored["result/loss"].keys() == {4, 8}
    assert (found.data.params["rounds"], found.data.tags["rounds"]) == ("4", "8")


@needs_wandb
@pytest.mark.slow
def test_wandb_is_one_run_and_does_not_get_a_step_that_it_has(tmp_path: Path) -> None:
    place = run(Experiment.parse(TINY | {"rounds": 2}), tmp_path / "r", track=["wandb"])
    known = json.loads((place / "trackers.json").read_text())
    run(Experiment.parse(TINY), place, resume=True, track=["wandb"])
    assert json.loads((place / "trackers.json").read_text()) == known
    assert len(list(place.glob("wandb/offline-run-*/*.wandb"))) == 2
    tracker, losses = WeightsAndBiases(place, {"rounds": 4}), []
    for step in (1, 2, 1, 2, 3):  # as when a run resumes online, where the server says which was the last
        tracker.log(step, {"loss": float(step)})
        losses.append(tracker._run.summary["loss"])
    tracker.close("FAILED", {})
    assert losses == [1, 2, 2, 2, 3]


@pytest.mark.slow
def test_a_comparison_is_tracked_run_by_run(pfedla: Callable[..., Any], tmp_path: Path) -> None:
    tested = ("-a", "local,fedavg", *QUICK[2:], "--rounds", 1, "--track", "mlflow", "--out", "c")
    assert pfedla("compare", *tested)[0] == 0
    found = {name: of_rounds(stored) for name, (_, stored) in read_mlflow(tmp_path / "c" / "mlflow.db").items()}
    assert found == {name: expected_points(tmp_path / "c" / name) for name in ("local-s0", "fedavg-s0")}


def test_a_tracker_that_breaks_is_reported_once_and_the_run_continues(tmp_path: Path, empty_store: Path) -> None:
    store, place, said = tmp_path / "mlflow.db", tmp_path / "r", []
    shutil.copy(empty_store, store)
    built, display = build(Experiment.parse(TINY)), Display(4)
    display.say = said.append  # type: ignore[method-assign]
    with Run(built, RunFolder(place), display=display, track=["mlflow", "tensorboard"]) as running:
        for round in running:
            if round.round == 2:
                store.write_bytes(b"no data base any more" * 1000)
        running.finish()
    assert sum("--track mlflow" in line for line in said) == 1
    run(Experiment.parse(TINY), tmp_path / "plain")
    assert numbers(place) == numbers(tmp_path / "plain")
    assert read_tensorboard(place)[0] == as_float32(expected_points(place))
    shutil.copy(empty_store, store)  # the store works again, and has lost the run
    run(Experiment.parse(TINY), place, resume=True, track=["mlflow"])
    assert of_rounds(read_mlflow(store)["r"][1]) == expected_points(place)


def test_an_unknown_tracker_is_refused_at_once(pfedla: Any, tmp_path: Path) -> None:
    for command in ("run", "compare"):
        code, _, err = pfedla(command, *QUICK, "--track", "tensorboard,wanda")
        assert (code, "'wanda'" in err) == (2, True)
    assert not (tmp_path / "runs").exists()
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert TRACKERS.keys() <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("missing", ["tensorboard", "mlflow", "alembic", "wandb"])
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, missing: str) -> None:
    tracker = "mlflow" if missing == "alembic" else missing
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, missing, None)
        with pytest.raises(PfedlaError, match=rf"pfedla\[{tracker}\]"):
            run(Experiment.parse(TINY), tmp_path / "r", track=[tracker])
    assert not (tmp_path / "r").exists()


@needs_wandb
@pytest.mark.slow
def test_wandb_without_a_key_is_refused_at_once(tmp_path: Path) -> None:
    words = ("-m", "pfedla", "run", "--track", "wandb", "--out", str(tmp_path / "r"))
    done = python(*words, without="WANDB_MODE", HOME=str(tmp_path))
    assert (done.returncode, "WANDB_MODE" in done.stderr) == (2, True), done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_packages_are_loaded_only_when_asked_for(tmp_path: Path) -> None:
    code = """
import sys
from pfedla.cli import app
app(["run", "--help"], standalone_mode=False)
assert "torch" not in sys.modules
app(sys.argv[1:], standalone_mode=False)
assert not {"tensorboard", "mlflow", "wandb", "torch.utils.tensorboard"} & sys.modules.keys()
"""
    done = python("-c", code, "run", *map(str, QUICK), "--rounds", "1", "-q", "--out", str(tmp_path / "r"))
    assert done.returncode == 0, done.stderr
