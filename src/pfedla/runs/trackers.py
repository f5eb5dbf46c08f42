"""Experiment trackers: TensorBoard, MLflow, Weights & Biases. Their packages are imported only when asked for."""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from pfedla.core.errors import PfedlaError, Stopped, unknown
from pfedla.core.files import read_object, write_text
from pfedla.report.reading import flatten, read_experiment, read_rounds, task_of_run

IDS = "trackers.json"  # in the run folder: tracker -> its id of the run
MEASURES = ["score", "score_after_training", "loss", "training_loss", "metrics", "baseline", "honest", "unseen"]
MEASURES += ["seconds", "traffic", "down_bytes", "up_bytes", "refused_uploads"]  # in rounds.jsonl and result.json


def select_metrics(line: Mapping[str, Any], metric: str) -> dict[str, float]:
    """Return the numbers of a line of rounds.jsonl, or of result.json, as accuracy/mean, seconds/train, …

    The headline metric has its own name where the files say score.
    """
    measured = flatten(flatten({key: value for key, value in line.items() if key in MEASURES}))
    numbers = {name: value for name, value in measured.items() if isinstance(value, (int, float))}
    return {re.sub(r"(^|\.)score", rf"\g<1>{metric}", name).replace(".", "/"): numbers[name] for name in numbers}


class TensorBoard:
    """RUN/tensorboard, written anew each time: it holds nothing that the run folder does not."""

    def __init__(self, folder: Path, config: dict[str, Any], known_id: str | None = None) -> None:
        target = folder / "tensorboard"
        for old in target.glob("events.out.tfevents.*"):
            old.unlink()
        self.id, self.where = "", f"tensorboard --logdir {target}"
        values = {key: value if isinstance(value, (int, float)) else str(value) for key, value in config.items()}
        metric = task_of_run(folder)["metric"]
        shown = dict.fromkeys((f"{metric}/mean", f"{metric}/worst", f"{metric}_after_training", "loss"), 0)
        about, begun, self._ended = import_module("torch.utils.tensorboard.summary").hparams(values, shown)
        # purge_step: a TensorBoard that is open forgets what it has read in the files that are gone.
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(target), purge_step=0)
        self._writer.file_writer.add_summary(about)
        self._writer.file_writer.add_summary(begun)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str, summary: dict[str, float]) -> None:
        if status == "FINISHED":
            self._writer.file_writer.add_summary(self._ended)
        self._writer.close()


class MLflow:
    """The store that MLFLOW_TRACKING_URI names, or a file beside the run folder. Values cannot change."""

    def __init__(self, folder: Path, config: dict[str, Any], known_id: str | None = None) -> None:
        mlflow, self._entities = import_module("mlflow"), import_module("mlflow.entities")
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # else it reports how it makes its tables
        beside = f"sqlite:///{(folder.resolve().parent / 'mlflow.db').as_posix()}"
        self.where = os.environ.get("MLFLOW_TRACKING_URI", beside)
        self._client, self._rounds = mlflow.MlflowClient(self.where), config["rounds"]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pfedla")
        experiment = self._client.get_experiment_by_name(name)
        home = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([home], f"attributes.run_id = '{known_id}'")
        run = found[0] if found else self._client.create_run(home, run_name=folder.name)
        self.id, before = run.info.run_id, run.data.params
        self._client.update_run(self.id, status="RUNNING")
        histories = [self._client.get_metric_history(self.id, key) for key in run.data.metrics]
        self._known = {(point.key, point.step) for history in histories for point in history}
        # A param cannot change: another value (more rounds) becomes a tag.
        values = {key: str(value) for key, value in config.items()}
        new = [self._entities.Param(key, value) for key, value in values.items() if key not in before]
        other = [self._entities.RunTag(key, value) for key, value in values.items() if before.get(key, value) != value]
        self._client.log_batch(self.id, params=new, tags=other)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now, new = int(1000 * time.time()), {key: v for key, v in metrics.items() if (key, step) not in self._known}
        self._client.log_batch(self.id, [self._entities.Metric(key, float(v), now, step) for key, v in new.items()])

    def close(self, status: str, summary: dict[str, float]) -> None:
        self.log(self._rounds, summary)
        self._client.set_terminated(self.id, status)


class WeightsAndBiases:
    """Online, or as WANDB_MODE says; files are in RUN/wandb. Of those made offline, the last is complete."""

    def __init__(self, folder: Path, config: dict[str, Any], known_id: str | None = None) -> None:
        wandb = import_module("wandb")
        # Without a limit it waits forever for a server that is down.
        limit = {"finish_timeout": wandb.setup().settings.finish_timeout or 300, "finish_timeout_raises": True}
        how = {"config": config, "settings": wandb.Settings(console="off", silent=True, **limit)}
        how |= {"project": os.environ.get("WANDB_PROJECT", "pfedla"), "name": folder.name, "dir": folder.resolve()}
        how |= {"id": known_id, "resume": "allow", "allow_val_change": True}
        self._run = wandb.init(reinit="create_new", **how)
        self.id = self._run.id
        self.where = str(folder / "wandb") if self._run.offline else str(self._run.url)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step >= self._run.step:  # it has those before
            self._run.log(metrics, step=step, commit=True)

    def close(self, status: str, summary: dict[str, float]) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


Tracker = TensorBoard | MLflow | WeightsAndBiases
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
NEEDS = {"tensorboard": ["torch.utils.tensorboard"], "mlflow": ["mlflow", "sqlalchemy", "alembic"], "wandb": ["wandb"]}


def check_trackers(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names if these trackers exist and are installed; call it before anything is trained."""
    for name in (names := tuple(names)):
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        try:
            first, *_ = [import_module(module) for module in NEEDS[name]]
        except ImportError as error:
            raise PfedlaError(f"tracker {name} cannot be loaded ({error}): pip install 'pfedla[{name}]'") from None
        online = name == "wandb" and first.setup().settings.mode not in ("offline", "dryrun", "disabled")
        if online and not first.login(prompt=False, verify=False):  # it would ask under the progress bar
            raise PfedlaError("wandb has no API key: use `wandb login` once, or set WANDB_MODE=offline")
    return names


class Tracking(AbstractContextManager["Tracking"]):
    """A run's trackers: they get each line of rounds.jsonl once. One that fails is left out and can catch up later."""

    def __init__(self, names: Iterable[str], folder: Path, say: Callable[[str], None]) -> None:
        self.names, self.folder, self.say = names, folder, say
        self.result: Mapping[str, Any] = {}  # what result.json holds, once there is one
        self._open: dict[str, Tracker] = {}

    @cached_property
    def metric(self) -> str:
        """The name of the headline metric."""
        return str(task_of_run(self.folder)["metric"])

    def begin(self) -> None:
        for name in self.names:
            self._attempt(name, self._start, name)

    def _start(self, name: str) -> None:
        """Open a tracker, and log what the run folder holds already."""
        ids = read_object(self.folder / IDS) if (self.folder / IDS).exists() else {}
        self._open[name] = tracker = TRACKERS[name](self.folder, flatten(read_experiment(self.folder)), ids.get(name))
        if tracker.id:
            write_text(self.folder / IDS, json.dumps(ids | {name: tracker.id}) + "\n")
        self.say(f"{name}: {tracker.where}")
        for line in read_rounds(self.folder):
            tracker.log(line["round"], select_metrics(line, self.metric))

    def log(self, line: Mapping[str, Any]) -> None:
        for name, tracker in list(self._open.items()):
            self._attempt(name, tracker.log, line["round"], select_metrics(line, self.metric))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stopped = isinstance(error, (Stopped, KeyboardInterrupt))
        status = "KILLED" if stopped else "FAILED" if error else "FINISHED"
        summary = {f"result/{name}": value for name, value in select_metrics(self.result, self.metric).items()}
        for name, tracker in list(self._open.items()):
            self._attempt(name, tracker.close, status, summary)

    def _attempt(self, name: str, act: Callable[..., None], *args: Any) -> None:
        try:
            act(*args)
        except Exception as error:  # a server that is down, a full disk: training does not depend on it
            self._open.pop(name, None)
            self.say(f"{name} is left out from here on: {error!r:.300}; --resume --track {name} catches up")
