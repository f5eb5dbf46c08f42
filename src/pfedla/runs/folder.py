"""The run folder on disk: one process at a time, what the run is made of, and whether it can be resumed."""

import errno
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError

from pfedla import __version__
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, safe_name, write_text
from pfedla.data.federation import Outline
from pfedla.data.partition import split_statistics
from pfedla.report.reading import read_result, round_of
from pfedla.runs.checkpoint import ALPHA, FORMAT, LINES, Checkpoints, RunState, check_same, differences
from pfedla.runs.experiment import Experiment, read_toml

RUNS = Path("runs")
EXPERIMENT, RESULT, FEDERATION, ENVIRONMENT = ("experiment.toml", "result.json", "federation.json", "environment.json")
RESUME = "choose another folder with --out, or resume it with --resume"
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}
MIB = 2**20


def new_folder(path: Path, hint: str = RESUME) -> Path:
    """Make a folder that was not there before: nothing is ever overwritten."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PfedlaError(f"{path} exists already and is never overwritten; {hint}") from None
    except OSError as error:
        raise PfedlaError(f"{path} cannot be made: {error.strerror}") from None
    return path


class RunFolder:
    """A run's place on disk, locked while it is entered."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self.reopened = resume and path.is_dir()
        if not self.reopened:
            new_folder(path)
        self._lock = FileLock(path / ".lock")
        self.has_rounds = False  # whether there is anything worth keeping

    def __enter__(self) -> Self:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise PfedlaError(f"{self.path} is in use by another process; wait, or choose another folder") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self.reopened and not self.has_rounds:
            shutil.rmtree(self.path, ignore_errors=True)  # it failed before anything was learned: leave nothing behind
        self._lock.release()

    def begin(self, experiment: Experiment, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Write the experiment, or check that it is the same as before; return the result of a finished run."""
        self.experiment = experiment
        self.checkpoints = Checkpoints(self.path, experiment.identity(), experiment.checkpoint, say)
        result = None
        if self.reopened and (self.path / EXPERIMENT).exists():
            before = Experiment.parse(read_toml(self.path / EXPERIMENT))
            check_same(self.path, before.identity(), experiment.identity())
            if experiment.rounds < before.rounds:
                raise PfedlaError(f"{self.path} has {before.rounds} rounds: it can be extended, not shortened")
            result = read_result(self.path / RESULT) if (self.path / RESULT).exists() else None
        elif self.reopened and any(self.path.glob("[!.]*")):
            raise PfedlaError(f"{self.path} is not a run folder: it has no {EXPERIMENT}; choose another with --out")
        if result is not None and result["rounds"] < experiment.rounds:
            if not self.checkpoints.rounds():
                raise PfedlaError(f"{self.path} is finished and has no checkpoint to resume; start in a new folder")
            return None
        if not self.reopened:
            self.write(EXPERIMENT, experiment.to_toml())
        return result

    def prepare_resume(self, state: RunState) -> None:
        """Make the folder ready for the rounds after `state`. Nothing can be refused any more."""
        self.has_rounds = state.round > 0
        (self.path / RESULT).unlink(missing_ok=True)  # a folder with a result is complete, so it goes first
        (self.path / ALPHA).unlink(missing_ok=True)
        self.write(EXPERIMENT, self.experiment.to_toml())
        if not (self.path / LINES).exists():
            return
        # Drop the lines of rounds that are run again, and of one that was evaluated only as a shorter run's last.
        kept = []
        for line in (self.path / LINES).read_text(encoding="utf-8", errors="replace").splitlines():
            if (number := round_of(line)) is not None:  # else it was cut off while it was written
                wanted = number % self.experiment.evaluate_every == 0 or number == self.experiment.rounds
                kept += [line] if number <= state.round and wanted else []
        self.write(LINES, "".join(f"{line}\n" for line in kept))

    def describe(self, federation: Outline, unseen: Outline | None, say: Callable[[str], None]) -> None:
        """Write what the run is made of and runs on; of a resumed one, refuse other data and name another machine."""
        made_of, runs_on = describe_federation(federation), describe_environment()
        if unseen is not None:
            made_of["unseen"] = unseen.names
        if self.reopened and (self.path / FEDERATION).exists():
            before = read_object(self.path / FEDERATION).get("fingerprint")
            if before and made_of["fingerprint"] and before != made_of["fingerprint"]:  # a server may not know it
                raise PfedlaError(f"the data have changed since {self.path} was started; start in a new folder")
        else:
            self.write_json(FEDERATION, made_of)
        if self.reopened and (self.path / ENVIRONMENT).exists():
            started_on = runs_on | read_object(self.path / ENVIRONMENT)  # an older one knows less
            if changed := differences(started_on, runs_on):
                say(f"another environment than the run was started in ({'; '.join(changed)}): the last bits may differ")
        else:
            self.write_json(ENVIRONMENT, runs_on)

    def write(self, name: str, text: str) -> None:
        write_text(self.path / name, text)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write(name, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    @contextmanager
    def name_disk_errors(self) -> Iterator[None]:
        """Say of a file that could not be written: the folder, the free space, and what is safe."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if error.errno not in DISK_ERRORS if isinstance(error, OSError) else "I/O error" not in str(error):
                raise
            usage = shutil.disk_usage(self.path if self.path.exists() else self.path.parent)
            space = f"{usage.free / MIB:.0f} of {usage.total / MIB:.0f} MiB are free"
            rounds = self.checkpoints.rounds()
            safe = f"the checkpoint after round {rounds[-1]} is whole: use --resume" if rounds else "nothing was saved"
            raise OSError(f"{self.path} cannot be written: {error}; {space}; {safe}") from error


def describe_environment() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pfedla": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": read_cpu_model(),
        "cores": os.cpu_count(),
    }


def read_cpu_model() -> str:
    """Return CPU vendor and model. BLAS picks kernels by model, so the last bits can differ between CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")  # x86's, then ARM's
    return " ".join(f"{name} {known[name]}" for name in names if name in known)


def describe_federation(federation: Outline) -> dict[str, Any]:
    """Return what federation.json holds: the split, and how heterogeneous the clients are, as far as it is known."""
    counts = federation.class_counts()
    by_class: dict[str, Any] = {"train": [], "test": [], "statistics": {}}
    if counts is not None:
        statistics = split_statistics(counts)
        by_class = {"train": counts[:, 0].tolist(), "test": counts[:, 1].tolist(), "statistics": statistics}
    return {
        "shape": federation.shape,
        "classes": federation.classes,
        "mean": federation.mean,
        "std": federation.std,
        "clients": federation.names,
        "subset": federation.subset,
        "leaked_test_share": federation.leaked_share,
        "fingerprint": federation.fingerprint(),
        **by_class,
    }


def folder_name(experiment: Experiment) -> str:
    """Return <algorithm>-<dataset>-<partition>-s<seed>."""
    data = experiment.data
    return f"{experiment.algorithm.name}-{safe_name(Path(data.dataset).stem)}-{data.split_name}-s{experiment.seed}"


def next_numbered(path: Path) -> Path:
    """Return the first of path, path-2, path-3, … that is free."""
    return next(candidate for candidate in _candidates(path) if not candidate.exists())


def last_numbered(path: Path) -> Path:
    """Return the last of path, path-2, … that exists; `path` if none does."""
    there = list(takewhile(Path.exists, _candidates(path)))
    return there[-1] if there else path


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))
