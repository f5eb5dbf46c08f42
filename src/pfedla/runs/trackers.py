"""Experiment trackers: TensorBoard, MLflow or Weights & Biases get what the run folder holds.

A tracker is opened when a run starts or resumes. It gets the lines of rounds.jsonl that are there, then each
as it is written; nothing is sent twice. The trackers' packages are extras, imported only when asked for.
"""

import json
import logging
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from pfedla.core.errors import PfedlaError, Stopped, unknown
from pfedla.core.files import read_object, write_text
from pfedla.runs.folder import EXPERIMENT, LINES

IDS = "trackers.json"  # in the run folder: tracker -> its id of the run
MEASURES = (  # keys of rounds.jsonl and result.json that are metrics
    *("accuracy", "accuracy_after_training", "loss", "training_loss", "honest", "unseen", "seconds"),
    *("traffic", "down_bytes", "up_bytes", "evaluation_bytes", "refused_uploads"),
)
Status = Literal["FINISHED", "KILLED", "FAILED"]


def select_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of rounds.jsonl, or of result.json, as accuracy/mean, seconds/train, …"""
    measured = flatten({key: value for key, value in line.items() if key in MEASURES}, "/")
    return {name: value for name, value in measured.items() if isinstance(value, (int, float))}


def flatten(values: Mapping[str, Any], separator: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{key}{separator}{name}": leaf for name, leaf in flatten(value, separator).items()}
        else:
            found[key] = value
    return found


class Tracker(Protocol):
    """One run in one tracker; `where` says where to find it."""

    where: str

    def __init__(self, folder: Path, config: dict[str, Any]) -> None: ...
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self, status: Status, summary: dict[str, float]) -> None: ...


class TensorBoard:
    """RUN/tensorboard, written anew each time: it holds nothing that the run folder does not."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        target = folder / "tensorboard"
        for old in target.glob("events.out.tfevents.*"):
            old.unlink()
        self.where = f"tensorboard --logdir {target}"
        settings = flatten(config, ".").items()
        values = {key: value if isinstance(value, (int, float)) else str(value) for key, value in settings}
        shown = dict.fromkeys(("accuracy/mean", "accuracy/worst", "accuracy_after_training", "loss"), 0)
        about, begun, self._ended = import_module("torch.utils.tensorboard.summary").hparams(values, shown)
        # purge_step: a TensorBoard that is open forgets what it has read in the files that are gone.
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(target), purge_step=0)
        self._writer.file_writer.add_summary(about)
        self._writer.file_writer.add_summary(begun)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: Status, summary: dict[str, float]) -> None:
        if status == "FINISHED":
            self._writer.file_writer.add_summary(self._ended)
        self._writer.close()


class MLflow:
    """The store that MLFLOW_TRACKING_URI names, or a file beside the run folder. Values cannot change."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        mlflow, self._entities = import_module("mlflow"), import_module("mlflow.entities")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it reports how it makes its tables
        beside = f"sqlite:///{(folder.resolve().parent / 'mlflow.db').as_posix()}"
        self.where = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else beside
        self._client, self._rounds = mlflow.MlflowClient(self.where), config["rounds"]
        run = self._find(folder)
        self._run_id = run.info.run_id
        _remember_id(folder, "mlflow", self._run_id)
        self._client.update_run(self._run_id, status="RUNNING")
        histories = {key: self._client.get_metric_history(self._run_id, key) for key in run.data.metrics}
        self._known = {key: {point.step for point in history} for key, history in histories.items()}
        self._log_config({key: str(value) for key, value in flatten(config, ".").items()}, run.data.params)

    def _find(self, folder: Path) -> Any:
        name, known = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pfedla"), _read_ids(folder).get("mlflow")
        experiment = self._client.get_experiment_by_name(name)
        home = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([home], f"attributes.run_id = '{known}'") if known else []
        return found[0] if found else self._client.create_run(home, run_name=folder.name)

    def _log_config(self, values: dict[str, str], before: dict[str, str]) -> None:
        """Log new values as params. A param cannot change: another value (more rounds) becomes a tag."""
        new = [self._entities.Param(key, value) for key, value in values.items() if key not in before]
        changed = {key: value for key, value in values.items() if before.get(key, value) != value}
        tags = [self._entities.RunTag(key, value) for key, value in changed.items()]
        self._client.log_batch(self._run_id, params=new, tags=tags)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now, new = int(1000 * time.time()), [key for key in metrics if step not in self._known.get(key, ())]
        points = [self._entities.Metric(key, float(metrics[key]), now, step) for key in new]
        self._client.log_batch(self._run_id, points)

    def close(self, status: Status, summary: dict[str, float]) -> None:
        self.log(self._rounds, summary)
        self._client.set_terminated(self._run_id, status)


class WeightsAndBiases:
    """Online, or as WANDB_MODE says; files are in RUN/wandb. Of those made offline, the last is complete."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb = import_module("wandb")
        # Without a limit it waits forever for a server that is down.
        limit = {"finish_timeout": wandb.setup().settings.finish_timeout or 300, "finish_timeout_raises": True}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pfedla"),
            name=folder.name,
            dir=folder.resolve(),
            id=_read_ids(folder).get("wandb"),
            resume="allow",
            reinit="create_new",
            config=config,
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, **limit),
        )
        _remember_id(folder, "wandb", self._run.id)
        self.where = str(folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._run.step:  # it has those before
            self._run.log(metrics, step=step, commit=True)

    def close(self, status: Status, summary: dict[str, float]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
# The modules that an extra must bring.
NEEDED = {
    "tensorboard": ("torch.utils.tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names if these trackers exist and are installed; call it before anything is trained."""
    for name in (names := tuple(names)):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            first, *_ = [import_module(module) for module in NEEDED[name]]
        except ImportError as error:
            fix = f"pip install 'pfedla[{name}]'"
            raise PfedlaError(f"tracker {name} cannot be loaded ({error}): {fix}") from None
        online = name == "wandb" and first.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if online and not first.login(prompt=False, verify=False):  # it would ask under the progress bar
            raise PfedlaError("wandb has no API key: use `wandb login` once, or set WANDB_MODE=offline")
    return names


class Tracking:
    """A run's trackers. One that fails is reported and left out: it can catch up from the folder later."""

    def __init__(self, names: Iterable[str], folder: Path, say: Callable[[str], None]) -> None:
        self.names, self.folder, self.say = names, folder, say
        self.result: Mapping[str, Any] = {}  # what result.json holds, once there is one
        self._open: dict[str, Tracker] = {}

    def begin(self) -> None:
        """Open the trackers, and log what the run folder holds already."""
        lines = self.folder / LINES
        text = lines.read_text(encoding="utf-8") if lines.exists() else ""
        config = tomllib.loads((self.folder / EXPERIMENT).read_text(encoding="utf-8"))
        for name in self.names:
            with self._leave_out_if_it_fails(name):
                self._open[name] = tracker = TRACKERS[name](self.folder, config)
                self.say(f"{name}: {tracker.where}")
                for line in map(json.loads, text.splitlines()):
                    tracker.log(line["round"], select_metrics(line))

    def log(self, line: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(line["round"], select_metrics(line)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        status: Status = "KILLED" if stopped else "FAILED" if error else "FINISHED"
        summary = {f"result/{name}": value for name, value in select_metrics(self.result).items()}
        self._each(lambda tracker: tracker.close(status, summary))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._leave_out_if_it_fails(name):
                act(tracker)

    @contextmanager
    def _leave_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server that is down, a full disk: training does not depend on it
            self._open.pop(name, None)
            later = f"--resume --track {name} catches up"
            self.say(f"{name} is left out from here on: {error!r:.300}; {later}")


def _read_ids(folder: Path) -> dict[str, Any]:
    return read_object(folder / IDS) if (folder / IDS).exists() else {}


def _remember_id(folder: Path, tracker: str, run_id: str) -> None:
    write_text(folder / IDS, json.dumps(_read_ids(folder) | {tracker: run_id}) + "\n")
