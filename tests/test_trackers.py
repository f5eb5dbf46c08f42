"""Trackers hold what rounds.jsonl holds, whatever happens to the run; real packages, read back by their own readers."""

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.runs.experiment import Experiment, build
from pfedla.runs.folder import RunFolder
from pfedla.runs.progress import Reporter
from pfedla.runs.result import run, run_built
from pfedla.runs.trackers import NEEDED, TRACKERS, WeightsAndBiases, flat, metrics_of

ALL = ",".join(TRACKERS)
TINY = {
    "rounds": 4, "model": "mlp", "data": {"clients": 4, "samples_per_client": 20}, "training": {"local_epochs": 1},
    "algorithm": {"name": "fedavg"}, "checkpoint": {"rounds": 2},
}  # fmt: skip
QUICK = ("-a", "fedavg", "--model", "mlp", "--local-epochs", 1, "--samples", 20, "--clients", 4)
OFFLINE = {"WANDB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
DIES = """
import json, os, sys
from pathlib import Path
from pfedla.runs.progress import Reporter
from pfedla.runs.experiment import Experiment, build
from pfedla.runs.result import run_built
from pfedla.runs.folder import RunFolder

class Dies(Reporter):
    def on_round(self, played):
        if played.round == 3:
            os._exit(9)

experiment = Experiment.parse(json.loads(sys.argv[1]))
run_built(build(experiment), RunFolder(Path(sys.argv[2])), Dies(4, quiet=True), track=sys.argv[3].split(","))
"""
Points = dict[str, dict[int, float]]  # metric -> step -> value


@pytest.fixture(scope="module", autouse=True)
def nothing_leaves_the_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """wandb reads its variables once in a process. Its service ends with the tests."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
            patch.delenv(name)
        places = {f"WANDB_{kind}_DIR": str(home) for kind in ("CACHE", "CONFIG", "DATA")} | {"NETRC": str(home / "none")}
        for name, value in (OFFLINE | places).items():
            patch.setenv(name, value)
        yield
        import wandb

        wandb.teardown()


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store with its tables, which take seconds to make."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


def environment_without(*names: str) -> dict[str, str]:
    """WANDB_SERVICE: a process that is started here would otherwise use this one's service, which outlives it."""
    return {key: value for key, value in os.environ.items() if not key.startswith(names)}


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]


def points(run: Path) -> Points:
    """What every tracker should hold of the rounds."""
    found: Points = {}
    for line in lines(run):
        for name, value in metrics_of(line).items():
            found.setdefault(name, {})[line["round"]] = value
    return found


def by_step(name: str, pairs: list[tuple[int, float]]) -> dict[int, float]:
    steps = [step for step, _ in pairs]
    assert len(set(steps)) == len(steps), f"{name} has a step twice: {steps}"
    return dict(pairs)


def tensorboard_points(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = events.Tags()["scalars"]
    return {tag: by_step(tag, [(event.step, event.value) for event in events.Scalars(tag)]) for tag in tags}


def tensorboard_config(run: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}


def mlflow_runs(store: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{store}")
    experiment = client.get_experiment_by_name("pfedla")
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def mlflow_points(store: Path, found: Any) -> Points:
    from mlflow import MlflowClient

    client, run_id = MlflowClient(f"sqlite:///{store}"), found.info.run_id
    histories = {key: client.get_metric_history(run_id, key) for key in found.data.metrics}
    return {key: by_step(key, [(point.step, point.value) for point in history]) for key, history in histories.items()}


def of_rounds(found: Points) -> Points:
    return {name: values for name, values in found.items() if not name.startswith("result/")}


def without_seconds(found: Points) -> Points:
    return {name: values for name, values in found.items() if not name.startswith("seconds/")}


def wandb_records(run: Path) -> list[Any]:
    """Of the newest .wandb file, once its end is in it: wandb's service writes the file a moment after the run is finished."""
    path = max(run.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    for _ in range(600):
        records = records_of(path.read_bytes())
        if any(record.HasField("exit") for record in records):
            return records
        time.sleep(0.1)
    raise AssertionError(f"{path} has no end")


def records_of(data: bytes) -> list[Any]:
    """A LevelDB log after a head of 7 bytes: blocks of 32 KiB, in them records with heads of 7 bytes, some in several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    position, whole, records = 7, b"", []
    while position < len(data):
        room = 2**15 - position % 2**15
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def wandb_points(run: Path) -> Points:
    pairs: dict[str, list[tuple[int, float]]] = {}
    for record in wandb_records(run):
        values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for name in values.keys() - {"_step", "_timestamp", "_runtime"}:
            pairs.setdefault(name, []).append((values["_step"], values[name]))
    return {name: by_step(name, found) for name, found in pairs.items()}


def wandb_summary(run: Path) -> dict[str, Any]:
    items = [item for record in wandb_records(run) for item in record.summary.update]
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def rounded(found: Points) -> Points:
    """As TensorBoard keeps numbers."""
    return {name: {step: float(np.float32(value)) for step, value in values.items()} for name, values in found.items()}


def numbers(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    rounds = lines(run)
    for timed in (result, *rounds):
        del timed["seconds"]
    return {"result": result, "lines": rounds, **{path.name: path.read_bytes() for path in run.glob("models/*")}}


def test_the_names_of_the_metrics() -> None:
    line = {
        "round": 3, "accuracy": {"mean": 0.5, "std": 0.1, "p10": 0.2, "worst": 0.0}, "loss": None, "training_loss": 1.25,
        "accuracy_after_training": 0.75, "seconds": {"train": 2.0}, "down_bytes": 10, "up_bytes": 20, "evaluation_bytes": 0,
        "cohort": [0, 2], "retained": {"fc2": 2}, "failures": {"1": {"raised": 1}},
        "honest": {"accuracy": {"mean": 0.6, "std": None, "p10": None, "worst": None}},
    }  # fmt: skip
    assert metrics_of(line) == {
        "accuracy/mean": 0.5, "accuracy/std": 0.1, "accuracy/p10": 0.2, "accuracy/worst": 0.0, "training_loss": 1.25,
        "accuracy_after_training": 0.75, "seconds/train": 2.0, "down_bytes": 10, "up_bytes": 20, "evaluation_bytes": 0,
        "honest/accuracy/mean": 0.6,
    }  # fmt: skip


def test_every_tracker_holds_what_the_folder_holds(pfedla: Callable[..., Any], tmp_path: Path) -> None:
    tested = (
        *QUICK,
        "--rounds",
        3,
        "--set",
        "evaluate_every=2",
        "--set",
        "faults.attack=noise",
        "--set",
        "faults.attackers=0.25",
    )
    code, out, err = pfedla("run", *tested, "--track", ALL, "--out", "r", "--json")
    assert code == 0, err
    assert json.loads(out)["run"] == "r"
    assert pfedla("run", *tested, "--out", "plain", "-q")[0] == 0
    assert numbers(tmp_path / "r") == numbers(tmp_path / "plain")
    assert (tmp_path / "r" / "experiment.toml").read_bytes() == (tmp_path / "plain" / "experiment.toml").read_bytes()

    run, expected = tmp_path / "r", points(tmp_path / "r")
    assert {tuple(values) for values in expected.values()} == {(2, 3)}
    assert {"accuracy/mean", "honest/accuracy/worst", "loss", "seconds/train", "down_bytes"} <= expected.keys()
    config = flat(tomllib.loads((run / "experiment.toml").read_text()), ".")
    result = {f"result/{name}": value for name, value in metrics_of(json.loads((run / "result.json").read_text())).items()}
    assert {"result/accuracy/mean", "result/accuracy_after_training/worst", "result/traffic/up_bytes"} <= result.keys()

    assert tensorboard_points(run) == rounded(expected)
    assert tensorboard_config(run) == config

    (found,) = mlflow_runs(tmp_path / "mlflow.db")
    stored = mlflow_points(tmp_path / "mlflow.db", found)
    assert of_rounds(stored) == expected
    assert {name: values for name, values in stored.items() if name in result} == {k: {3: v} for k, v in result.items()}
    assert found.data.params == {key: str(value) for key, value in config.items()}
    assert (found.info.run_name, found.info.status) == ("r", "FINISHED")

    assert wandb_points(run) == expected
    assert result.items() <= wandb_summary(run).items()
    (begun,) = [record.run for record in wandb_records(run) if record.WhichOneof("record_type") == "run"]
    assert (begun.project, begun.display_name) == ("pfedla", "r")
    values = {item.key: json.loads(item.value_json) for item in begun.config.update if item.key != "_wandb"}
    assert flat(values, ".") == config
    assert not (tmp_path / "mlruns").exists()
    assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
def test_killed_and_resumed_it_is_one_run_without_gaps(pfedla: Callable[..., Any], tmp_path: Path, empty_store: Path) -> None:
    """Killed in round 3, with a checkpoint after 2: round 3 is played again, and has been told before."""
    store = tmp_path / "mlflow.db"
    shutil.copy(empty_store, store)
    command = [sys.executable, "-c", DIES, json.dumps(TINY), str(tmp_path / "r"), ALL]
    died = subprocess.run(command, capture_output=True, text=True, check=False, env=environment_without("WANDB_SERVICE"))
    assert died.returncode == 9, died.stderr
    (before,) = mlflow_runs(store)
    assert before.info.status == "RUNNING"
    assert mlflow_points(store, before)["loss"].keys() == tensorboard_points(tmp_path / "r")["loss"].keys() == {1, 2, 3}

    code, _, err = pfedla("run", "r", "--resume", "--track", ALL)
    assert code == 0, err
    assert "going on after round 2" in err
    expected = points(tmp_path / "r")
    assert expected["loss"].keys() == {1, 2, 3, 4}
    assert tensorboard_points(tmp_path / "r") == rounded(expected)
    assert wandb_points(tmp_path / "r") == expected
    (found,) = mlflow_runs(store)
    assert (found.info.run_id, found.info.status) == (before.info.run_id, "FINISHED")
    stored = of_rounds(mlflow_points(store, found))
    assert without_seconds(stored) == without_seconds(expected)
    assert stored["seconds/train"].keys() == {1, 2, 3, 4}  # of round 3 those of the first time: MLflow takes nothing back
    ids = {record.run.run_id for record in wandb_records(tmp_path / "r") if record.WhichOneof("record_type") == "run"}
    assert ids == {json.loads((tmp_path / "r" / "trackers.json").read_text())["wandb"]}


@pytest.mark.slow
def test_told_later_stopped_and_extended(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that nobody tracked is told when it is finished, and goes on in the same place; in the store that is named."""
    store, place = tmp_path / "elsewhere.db", tmp_path / "r"
    shutil.copy(empty_store, store)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store}")
    run(Experiment.parse(TINY), place)
    for _ in range(2):  # to be told twice changes nothing
        run(Experiment.parse(TINY), place, resume=True, track=["tensorboard", "mlflow"])
        (found,) = mlflow_runs(store)
        assert of_rounds(mlflow_points(store, found)) == points(place)
        assert tensorboard_points(place) == rounded(points(place))
    assert found.data.metrics["result/accuracy/mean"] == json.loads((place / "result.json").read_text())["accuracy"]["mean"]

    longer = build(Experiment.parse(TINY | {"rounds": 8}))
    folder = RunFolder(place, resume=True)
    folder.stopping = lambda: len(lines(place)) == 6
    with pytest.raises(Stopped):
        run_built(longer, folder, track=["mlflow"])
    (found,) = mlflow_runs(store)
    assert found.info.status == "KILLED"
    run(longer.experiment, place, resume=True, track=["mlflow"])
    (found,) = mlflow_runs(store)
    assert found.info.status == "FINISHED"
    assert of_rounds(mlflow_points(store, found)) == points(place)
    assert mlflow_points(store, found)["result/loss"].keys() == {4, 8}
    assert (found.data.params["rounds"], found.data.tags["rounds"]) == ("4", "8")
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.slow
def test_wandb_is_not_told_a_step_that_it_knows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As when a run goes on online, where the server says which was the last."""
    tracker = WeightsAndBiases(tmp_path, {"rounds": 3})
    for step in (1, 2, 1, 2, 3):
        tracker.log(step, {"loss": float(step)})
    tracker.close("FAILED", {})
    assert wandb_points(tmp_path) == {"loss": {1: 1.0, 2: 2.0, 3: 3.0}}
    assert [record.exit.exit_code for record in wandb_records(tmp_path) if record.WhichOneof("record_type") == "exit"] == [1]
    assert "Tried to log to step" not in capsys.readouterr().err  # as wandb would say of each that it drops


@pytest.mark.slow
def test_a_comparison_is_tracked_run_by_run(pfedla: Callable[..., Any], tmp_path: Path) -> None:
    code, _, err = pfedla(
        "compare", "-a", "local,fedavg", *QUICK[2:], "--rounds", 1, "--track", "tensorboard,mlflow", "--out", "c"
    )
    assert code == 0, err
    found = {run.info.run_name: run for run in mlflow_runs(tmp_path / "c" / "mlflow.db")}
    assert found.keys() == {"local-s0", "fedavg-s0"}
    for name, one in found.items():
        expected = points(tmp_path / "c" / name)
        assert of_rounds(mlflow_points(tmp_path / "c" / "mlflow.db", one)) == expected
        assert tensorboard_points(tmp_path / "c" / name) == rounded(expected)


def test_a_tracker_that_breaks_says_so_once_and_the_run_goes_on(tmp_path: Path, empty_store: Path) -> None:
    store, place, said = tmp_path / "mlflow.db", tmp_path / "r", []
    shutil.copy(empty_store, store)

    class Breaks(Reporter):
        def on_round(self, played: Any) -> None:
            if played.round == 2:
                store.write_bytes(b"no data base any more" * 1000)

        def say(self, line: str) -> None:
            said.append(line)

    run_built(build(Experiment.parse(TINY)), RunFolder(place), Breaks(4, quiet=True), track=["mlflow", "tensorboard"])
    (failed,) = [line for line in said if "left out" in line]
    assert failed.startswith("mlflow is left out from here on")
    assert "--resume --track mlflow" in failed
    run(Experiment.parse(TINY), tmp_path / "plain")
    assert numbers(place) == numbers(tmp_path / "plain")
    assert tensorboard_points(place) == rounded(points(place))
    shutil.copy(empty_store, store)  # the store is put right, and has lost the run
    run(Experiment.parse(TINY), place, resume=True, track=["mlflow"])
    (found,) = mlflow_runs(store)
    assert of_rounds(mlflow_points(store, found)) == points(place)


@pytest.mark.slow
def test_a_server_that_is_down_stops_nothing(pfedla: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, _, err = pfedla("run", *QUICK, "--rounds", 2, "--track", "mlflow")
    assert code == 0
    assert err.count("left out") == 1
    assert "round 2" in err


@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_unknown_tracker_is_refused_before_anything_is_done(
    pfedla: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    code, _, err = pfedla(command, *QUICK, "--track", "tensorboard,wanda")
    assert code == 2
    assert "unknown tracker 'wanda' (did you mean 'wandb'?); choose one of: tensorboard, mlflow, wandb" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tracker", "missing"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("mlflow", "alembic"), ("wandb", "wandb")]
)
def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, tracker: str, missing: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
            patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, missing, None)
        with pytest.raises(PfedlaError, match=rf"pip install 'pfedla\[{tracker}\]'"):
            run(Experiment.parse(TINY), tmp_path / "r", track=[tracker])
    assert not (tmp_path / "r").exists()


def test_the_extras_are_what_is_needed() -> None:
    extras = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert NEEDED.keys() == TRACKERS.keys() <= extras.keys()
    (own,) = (entry for entry in extras["dev"] if entry.startswith("pfedla["))
    assert TRACKERS.keys() <= set(own.removeprefix("pfedla[").removesuffix("]").split(","))


def in_a_process_of_its_own(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """wandb reads its variables once in a process."""
    code = "import sys; from pfedla.cli import main; sys.argv = ['pfedla', *sys.argv[1:]]; main()"
    online = environment_without("WANDB_MODE", "WANDB_SERVICE") | variables
    command = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=online, stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_wandb_without_a_key_is_refused_at_once(tmp_path: Path) -> None:
    done = in_a_process_of_its_own("run", "--track", "wandb", "--out", tmp_path / "r", HOME=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert "wandb has no API key: use `wandb login` once, or set WANDB_MODE=offline" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_a_wandb_server_that_is_down_stops_nothing(tmp_path: Path) -> None:
    down = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "0", "WANDB_INIT_TIMEOUT": "2"}
    done = in_a_process_of_its_own("run", *QUICK, "--rounds", 2, "--track", "wandb", "--out", tmp_path / "r", **down)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb is left out") == 1
    assert len(lines(tmp_path / "r")) == 2


@pytest.mark.slow
def test_packages_are_loaded_only_when_asked_for(tmp_path: Path) -> None:
    code = """
import sys
from pfedla.cli import app
app(["run", "--help"], standalone_mode=False)
assert not {"torch", "pfedla.runs.trackers"} & sys.modules.keys()
app(sys.argv[1:], standalone_mode=False)
assert not {"tensorboard", "mlflow", "wandb", "torch.utils.tensorboard"} & sys.modules.keys()
"""
    words = ["run", *map(str, QUICK), "--rounds", "1", "-q", "--out", str(tmp_path / "r")]
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
    assert (tmp_path / "r" / "result.json").exists()
