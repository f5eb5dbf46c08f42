"""The run folder on disk: one process at a time, its lines and checkpoints, and how a run goes on in it."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from pfedla.runs.checkpoint import Cadence, ChangedExperimentError, Checkpoints, Progress, differing
from pfedla.core.contracts import Params
from pfedla.core.errors import PfedlaError
from pfedla.runs.experiment import Experiment, read_toml
from pfedla.core.files import write_text, write_whole
from pfedla.runs.result_file import read_result, round_of

EXPERIMENT, LINES, RESULT, CHECKPOINTS = "experiment.toml", "rounds.jsonl", "result.json", "checkpoints"
ALPHA = "alpha.safetensors"
SHOWN_NUMBERS = 2**20  # of alpha that are written again at every snapshot for whoever watches; more wait for the end

GO_ON = "choose another folder with --out, or go on in it with --resume"


def new_folder(path: Path, instead: str = GO_ON) -> Path:
    """A folder that was not there before: nothing is ever overwritten."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PfedlaError(f"{path} exists already and is never overwritten; {instead}") from None
    except OSError as error:
        raise PfedlaError(f"{path} cannot be made: {error.strerror}") from None
    return path


class RunFolder:
    """A run's place on disk, locked while it is entered; keeps the run's progress (simulation.Keeper)."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.reopened = resume and path.is_dir()
        if not self.reopened:
            new_folder(path)
        self.say: Callable[[str], None] = lambda line: None
        self.on_restored: Callable[[Progress], None] = lambda progress: None
        self.stopping: Callable[[], bool] = lambda: False
        self._lock = FileLock(path / ".lock")
        self._played = self._saved = 0  # rounds: that there are, and up to the last checkpoint

    def __enter__(self) -> Self:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise PfedlaError(
                f"{self.path}: another process is at work in this folder; wait, or choose another folder"
            ) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not self.reopened and not self._played:
            shutil.rmtree(self.path, ignore_errors=True)  # it failed before anything was learned: leave nothing behind
        self._lock.release()

    def begin(self, experiment: Experiment) -> dict[str, Any] | None:
        """Write the experiment down, or check that it is the one that was. The result, if there is nothing left to do."""
        self.experiment = experiment
        cadence = experiment.checkpoint
        self.cadence = Cadence(cadence.rounds, cadence.minutes)
        self.checkpoints = Checkpoints(self.path / CHECKPOINTS, experiment.numbers(), self.say)
        result = None
        if self.reopened and (self.path / EXPERIMENT).exists():
            before = Experiment.parse(read_toml(self.path / EXPERIMENT))
            if changed := differing(before.numbers(), experiment.numbers()):
                raise ChangedExperimentError(self.path, changed)
            if experiment.rounds < before.rounds:
                raise PfedlaError(f"{self.path} was begun with {before.rounds} rounds: it can be extended, not shortened")
            result = read_result(self.path / RESULT) if (self.path / RESULT).exists() else None
        elif self.reopened and any(self.path.glob("[!.]*")):
            raise PfedlaError(f"{self.path} is no run folder: it has no {EXPERIMENT}; choose another with --out")
        if result is not None and result["rounds"] < experiment.rounds:
            if not self.checkpoints.rounds():
                raise PfedlaError(f"{self.path} is finished and has no checkpoint left to go on from; start in a new folder")
            return None
        if not self.reopened:
            self.write(EXPERIMENT, experiment.to_toml())
        return result

    def restore(self, fresh: Progress, clients: Params) -> tuple[Progress, Params] | None:
        """Where the run stands: the newest whole checkpoint; None for a run that starts."""
        if not self.reopened:
            return None
        found = self.checkpoints.newest(fresh, clients)
        progress = fresh if found is None else found[0]
        self._played = self._saved = progress.round
        # Nothing can be refused any more. A folder with a result is complete, so it goes first.
        (self.path / RESULT).unlink(missing_ok=True)
        self.hide_alpha()
        self.write(EXPERIMENT, self.experiment.to_toml())
        self.say(
            f"{self.path}: going on after round {progress.round}" if found else f"{self.path}: no checkpoint yet, starting"
        )
        self._keep_lines(progress.round)
        self.on_restored(progress)
        return found

    def save_if_due(self, progress: Progress, clients: Callable[[], Params], *, anyway: bool) -> None:
        self._played = progress.round
        if progress.round == self._saved or not (anyway or self.cadence.due(progress.round)):
            return
        lines = self.path / LINES
        if lines.exists():
            with lines.open("rb") as file:
                os.fsync(file.fileno())  # the lines up to here must be there if the checkpoint is
        self.checkpoints.save(progress, clients())
        self.cadence.saved()
        self._saved = progress.round

    def show(self, progress: Progress, layers: Sequence[str]) -> None:
        """The weights so far, for whoever watches the run."""
        if progress.alphas and len(progress.alphas) * progress.alphas[0].numel() <= SHOWN_NUMBERS:
            self.write_alpha(torch.stack(progress.alphas), progress.alpha_rounds, layers, to_disk=False)
        else:
            self.hide_alpha()

    def hide_alpha(self) -> None:
        """Old weights must not be taken for those of now."""
        (self.path / ALPHA).unlink(missing_ok=True)

    def write_alpha(self, alphas: Tensor, rounds: Sequence[int], layers: Sequence[str], *, to_disk: bool = True) -> None:
        """alpha.safetensors. One entry of metadata only: several are written in a random order, and equal runs would differ."""
        tensors = {"alpha": alphas.contiguous(), "rounds": torch.tensor(rounds)}
        named = {"layers": json.dumps(layers)}
        write_whole(self.path / ALPHA, lambda file: save_file(tensors, file, named), to_disk=to_disk)

    def add_line(self, line: dict[str, Any]) -> None:
        with (self.path / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _keep_lines(self, played: int) -> None:
        """Leave out the lines of rounds that are played again, and of one that was evaluated only as a shorter run's last."""
        if not (self.path / LINES).exists():
            return
        kept = []
        for line in (self.path / LINES).read_text(encoding="utf-8", errors="replace").splitlines():
            if (number := round_of(line)) is not None:  # else it was cut off while it was written
                wanted = number % self.experiment.evaluate_every == 0 or number == self.experiment.rounds
                kept += [line] if number <= played and wanted else []
        self.write(LINES, "".join(f"{line}\n" for line in kept))

    def write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
