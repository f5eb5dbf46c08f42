"""Experiment trackers: what the run folder holds, told to TensorBoard, MLflow or Weights & Biases as well.

A tracker is opened when a run begins or goes on, and hears the lines of rounds.jsonl that are there, then each as it is
written. What it knows from before it is not told twice. The trackers' packages are extras, loaded only when asked for.
"""

import json
import logging
import os
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from pfedla.core.errors import PfedlaError, Stopped, unknown
from pfedla.core.files import read_object, write_text
from pfedla.runs.checkpoint import LINES
from pfedla.runs.folder import EXPERIMENT

IDS = "trackers.json"  # in the run folder: tracker -> the id by which it knows the run
MEASURES = {  # of a line of rounds.jsonl and of result.json; the rest is configuration, or who took part
    "accuracy", "accuracy_after_training", "loss", "training_loss", "honest", "seconds", "traffic", "down_bytes", "up_bytes",
    "evaluation_bytes", "refused_uploads", "unseen",
}  # fmt: skip
Status = Literal["FINISHED", "KILLED", "FAILED"]


def metrics_of(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of rounds.jsonl (or of result.json), named as in every tracker: accuracy/mean, seconds/train, …"""
    measured = flat({key: value for key, value in line.items() if key in MEASURES}, "/")
    return {name: value for name, value in measured.items() if isinstance(value, (int, float))}


def flat(values: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in values.items():
        leaves |= (
            flat(value, separator, f"{prefix}{key}{separator}")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return leaves


class Tracker(Protocol):
    """One run in one tracker, found at `where`."""

    where: str

    def __init__(self, folder: Path, config: dict[str, Any]) -> None: ...
    def log(self, step: int, metrics: dict[str, float]) -> None: ...
    def close(self, status: Status, summary: dict[str, float]) -> None: ...


class TensorBoard:
    """RUN/tensorboard: written anew each time, as it holds nothing that the run folder does not."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        for old in (folder / "tensorboard").glob("events.out.tfevents.*"):
            old.unlink()
        self.where = f"tensorboard --logdir {folder / 'tensorboard'}"
        values = {
            key: value if isinstance(value, (int, float)) else str(value)
            for key, value in flat(config, ".").items()
        }
        shown = dict.fromkeys(("accuracy/mean", "accuracy/worst", "accuracy_after_training", "loss"), 0)
        about, begun, self._ended = import_module("torch.utils.tensorboard.summary").hparams(values, shown)
        # purge_step: a TensorBoard that is looking on forgets what it has read in the files that are gone.
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(
            str(folder / "tensorboard"), purge_step=0
        )
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
    """The store that MLFLOW_TRACKING_URI names, or a file beside the run folder. It takes nothing back."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        mlflow, self._entities, self._rounds = (
            import_module("mlflow"),
            import_module("mlflow.entities"),
            config["rounds"],
        )
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it tells how it makes its tables
        beside = f"sqlite:///{(folder.resolve().parent / 'mlflow.db').as_posix()}"
        self.where = mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else beside
        self._client = mlflow.MlflowClient(self.where)
        name, known = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pfedla"), _ids(folder).get("mlflow")
        experiment = self._client.get_experiment_by_name(name)
        home = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([home], f"attributes.run_id = '{known}'") if known else []
        run = found[0] if found else self._client.create_run(home, run_name=folder.name)
        self._run_id = _ids(folder, mlflow=run.info.run_id)["mlflow"]
        self._client.update_run(self._run_id, status="RUNNING")
        histories = {key: self._client.get_metric_history(self._run_id, key) for key in run.data.metrics}
        self._known = {key: {point.step for point in history} for key, history in histories.items()}
        values, before = {key: str(value) for key, value in flat(config, ".").items()}, run.data.params
        params = [self._entities.Param(key, value) for key, value in values.items() if key not in before]
        # A param cannot be changed: what a run goes on with instead (more rounds) stands in a tag.
        tags = [
            self._entities.RunTag(key, value)
            for key, value in values.items()
            if before.get(key, value) != value
        ]
        self._client.log_batch(self._run_id, params=params, tags=tags)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now, new = int(1000 * time.time()), [key for key in metrics if step not in self._known.get(key, ())]
        self._client.log_batch(
            self._run_id, [self._entities.Metric(key, float(metrics[key]), now, step) for key in new]
        )

    def close(self, status: Status, summary: dict[str, float]) -> None:
        self.log(self._rounds, summary)
        self._client.set_terminated(self._run_id, status)


class WeightsAndBiases:
    """Online, or as WANDB_MODE says; its files are in RUN/wandb. Of those written offline, the last holds the whole run."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        wandb = import_module("wandb")
        patience = (
            wandb.setup().settings.finish_timeout or 300
        )  # seconds; else a server that is down is waited for for ever
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pfedla"), name=folder.name, dir=folder.resolve(),
            id=_ids(folder).get("wandb"), resume="allow", reinit="create_new", config=config, allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True, finish_timeout=patience, finish_timeout_raises=True),
        )  # fmt: skip
        _ids(folder, wandb=self._run.id)
        self.where = str(folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._run.step:  # it knows those before
            self._run.log(metrics, step=step, commit=True)

    def close(self, status: Status, summary: dict[str, float]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
NEEDED = {
    "tensorboard": ("torch.utils.tensorboard",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "wandb": ("wandb",),
}


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """The trackers of these names, if all are installed (each is an extra): asked before anything is trained."""
    for name in (names := tuple(names)):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            first, *_ = [import_module(module) for module in NEEDED[name]]
        except ImportError as error:
            raise PfedlaError(
                f"tracker {name} cannot be loaded ({error}): pip install 'pfedla[{name}]'"
            ) from None
        online = name == "wandb" and first.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if online and not first.login(
            prompt=False, verify=False
        ):  # it would ask for the key under the progress bar
            raise PfedlaError("wandb has no API key: use `wandb login` once, or set WANDB_MODE=offline")
    return names


class Tracking(AbstractContextManager["Tracking"]):
    """A run's trackers. One that fails says so and is left out: the run folder has everything, and can be told later."""

    def __init__(self, names: Iterable[str], folder: Path, say: Callable[[str], None]) -> None:
        self.names, self.folder, self.say = names, folder, say
        self.result: Mapping[str, Any] = {}  # what result.json holds, once there is one
        self._open: dict[str, Tracker] = {}

    def begin(self) -> None:
        """Open them, and tell what the run folder holds already."""
        experiment, lines = self.folder / EXPERIMENT, self.folder / LINES
        for name in self.names:
            with self._left_out_if_it_fails(name):
                self._open[name] = tracker = TRACKERS[name](
                    self.folder, tomllib.loads(experiment.read_text(encoding="utf-8"))
                )
                self.say(f"{name}: {tracker.where}")
                for line in map(
                    json.loads, lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ()
                ):
                    tracker.log(line["round"], metrics_of(line))

    def tell(self, line: Mapping[str, Any]) -> None:
        self._each(lambda tracker: tracker.log(line["round"], metrics_of(line)))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended: Status = (
            "KILLED" if isinstance(error, (Stopped, KeyboardInterrupt)) else "FAILED" if error else "FINISHED"
        )
        summary = {f"result/{name}": value for name, value in metrics_of(self.result).items()}
        self._each(lambda tracker: tracker.close(ended, summary))

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._left_out_if_it_fails(name):
                act(tracker)

    @contextmanager
    def _left_out_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server that is down, a full disk: nothing that the training depends on
            self._open.pop(name, None)
            self.say(
                f"{name} is left out from here on: {error!r:.300}; --resume --track {name} tells it what it has missed"
            )


def _ids(folder: Path, **new: str) -> dict[str, Any]:
    """By which ids the trackers know the run; new ones are kept."""
    ids = (read_object(folder / IDS) if (folder / IDS).exists() else {}) | new
    if new:
        write_text(folder / IDS, json.dumps(ids) + "\n")
    return ids
