"""The run folder: what the run is made of, a line per evaluated round, its weights, its whole state. Never a pickle."""

import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, FailFast, Field, SkipValidation
from safetensors import SafetensorError
from safetensors.torch import save_file

from pfedla import __version__
from pfedla.algorithms import short_name
from pfedla.core.codecs import init_links
from pfedla.core.contracts import Algorithm, Params, ServerState
from pfedla.core.errors import InUseError, PfedlaError
from pfedla.core.files import read_object, read_tensors, refuse_links, safe_name, sha256, write_text, write_whole
from pfedla.core.objectives import CLASSIFICATION, Objective
from pfedla.core.rounds import Traffic, Trend
from pfedla.core.trees import leaves, map_tree
from pfedla.data.federation import Federation, Outline
from pfedla.data.partition import split_statistics
from pfedla.report.reading import Count, flatten, read_result, round_of, split_lines
from pfedla.runs.build import Built
from pfedla.runs.experiment import Experiment, read_toml, upgrade
from pfedla.runs.prediction import find_client
from pfedla.runs.trackers import IDS

RUNS = Path("runs")
EXPERIMENT, RESULT, FEDERATION, ENVIRONMENT = ("experiment.toml", "result.json", "federation.json", "environment.json")
FORMAT = 3  # of run folders; format 1 stored the whole experiment in place of its identity, 2 accuracy for score
CONTINUED = "continued_on"  # in environment.json: every other environment in which the run was resumed
LINES, ALPHA, CURVE = "rounds.jsonl", "alpha.safetensors", "learning_curve.png"
SNAPSHOTS, SNAPSHOT_NUMBERS = 100, 2**26  # of alpha, at most; in all of them (256 MiB)
SHOWN_NUMBERS = 2**20  # that are written again at every snapshot, for `pfedla watch`; more wait for the end


def new_folder(path: Path, hint: str = "choose another folder with --out, or resume it with --resume") -> None:
    """Make a folder that was not there before, or is empty: nothing is ever overwritten."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError
    except FileExistsError:
        raise PfedlaError(f"{path} exists already and is never overwritten; {hint}") from None
    except OSError as error:
        raise PfedlaError(f"{path} cannot be made: {error.strerror}") from None


class RunFolder:
    """A run's place on disk, locked while it is entered."""

    def __init__(self, path: Path, *, resume: bool = False, from_round: int | None = None) -> None:
        """`from_round`: resume after this round, or the newest one before it that is kept; drop what came later."""
        self.path, self.reopened, self.from_round = path, resume and path.is_dir(), from_round
        self.excluded: dict[str, int | Literal["auto"]] = {}  # as `Experiment.exclude`, when it was reopened
        self.warnings: list[str] = []  # of what may have changed the numbers; result.json keeps them
        if not self.reopened and from_round is not None:
            raise PfedlaError(f"there is no run in {path} that could go back to round {from_round}: name it, --resume")
        if not self.reopened:
            new_folder(path)
        self._lock = FileLock(path / ".lock")

    def __enter__(self) -> Self:
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise InUseError(f"{self.path} is in use by another process; wait, or choose another folder") from None
        if not self.reopened and any(self.path.glob("[!.]*")):
            self._lock.release()
            raise InUseError(f"{self.path} was written to by another process; choose another folder with --out")
        try:
            refuse_links(self.path)
        except PfedlaError:
            self._lock.release()
            raise
        for place in ("", "models", "checkpoints"):
            for part in (self.path / place).glob(".*.part"):  # of a process that was killed
                part.unlink(missing_ok=True)
        self._is_new = self._is_unused()
        return self

    def _is_unused(self) -> bool:
        """Return whether no run has begun here: the experiment is the first file of a run."""
        return {path.name for path in self.path.glob("[!.]*")} <= {FEDERATION, ENVIRONMENT}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave nothing of a run that failed before anything was learned; say after a full disk what is safe."""
        rounds = self.checkpoints.rounds()
        if error is not None and self._is_new and not rounds and not (self.path / LINES).exists():
            if self.reopened:  # the folder was there before
                self._remove(EXPERIMENT, FEDERATION, ENVIRONMENT)
            else:
                shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()
        if isinstance(error, (OSError, SafetensorError)):
            safe = f"the checkpoint after round {rounds[-1]} is whole: use --resume" if rounds else "nothing was saved"
            free = shutil.disk_usage(self.path.parent).free >> 20
            raise OSError(f"{self.path}: {error} ({free:,} MiB are free there); {safe}") from error

    def begin(self, built: Built, say: Callable[[str], None]) -> dict[str, Any] | None:
        """Write what the run is, is made of and runs on, or check it; return the result of a finished run."""
        experiment = self.experiment = built.experiment
        self._say = say
        self.checkpoints = Checkpoints(self.path, experiment, self.warn)
        if self._is_new:
            self._remove(FEDERATION, ENVIRONMENT)  # left by an older version that was killed between them
            write_text(self.path / EXPERIMENT, experiment.to_toml())
        elif (self.path / EXPERIMENT).exists():
            before = Experiment.parse(read_toml(self.path / EXPERIMENT))
            check_same(self.path, before, experiment)
            if experiment.rounds < before.rounds:
                raise PfedlaError(f"{self.path} has {before.rounds} rounds: it can be extended, not shortened")
            self.excluded = before.exclude
            if (self.path / RESULT).exists():
                result = read_result(self.path / RESULT)
                if result["rounds"] >= experiment.rounds and self.from_round is None:
                    names = built.federation.names
                    if late := {names[find_client(names, one)] for one in experiment.exclude} - self.excluded.keys():
                        raise PfedlaError(
                            f"{self.path} is finished: to leave out {', '.join(late)}, go back with --from"
                        )
                    return result
                if not self.checkpoints.rounds():
                    raise PfedlaError(f"{self.path} is finished and has no checkpoint to resume; start in a new folder")
        else:
            raise PfedlaError(f"{self.path} is not a run folder: it has no {EXPERIMENT}; choose another with --out")
        made_of = describe_federation(built.federation, built.algorithm.task.objective)
        made_of |= {"unseen": built.unseen.names} if built.unseen else {}
        runs_on = describe_environment()
        for name, content in ((FEDERATION, made_of), (ENVIRONMENT, runs_on)):
            if not (self.path / name).exists():
                self.write_json(name, content)
        if self.reopened:
            kept, now = read_object(self.path / FEDERATION), made_of["fingerprint"]
            if kept.get("fingerprint") and now and kept["fingerprint"] != now:  # a server may not know it
                raise PfedlaError(f"the data have changed since {self.path} was started; start in a new folder")
            if kept != json.loads(json.dumps(made_of)):  # damaged, or of an older version
                self.write_json(FEDERATION, made_of)
            self._compare_environment(runs_on)
        return None

    def _compare_environment(self, runs_on: dict[str, Any]) -> None:
        """Warn of another environment than the run was started in, and keep it beside the first."""
        kept = read_object(self.path / ENVIRONMENT)
        started_on = runs_on | {
            key: value for key, value in kept.items() if key != CONTINUED
        }  # an older one knows less
        if changed := "; ".join(differences(started_on, runs_on)):
            self.warn(f"another environment than the run was started in ({changed}): the last bits may differ")
            others = list(kept.get(CONTINUED) or [])
            if runs_on not in others:
                self.write_json(ENVIRONMENT, kept | {CONTINUED: [*others, runs_on]})

    def warn(self, line: str) -> None:
        self._say(line)
        self.warnings.append(line)

    def _remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)

    def prepare_resume(self, state: "RunState", experiment: Experiment) -> None:
        """Make the folder ready for the rounds after those of `state`. Nothing can be refused any more."""
        self.experiment, round = experiment, state.round
        path, every, rounds = self.path / LINES, experiment.evaluate_every, experiment.rounds
        lines = {round_of(line): line.decode(errors="replace") for line in split_lines(path)}  # may be refused
        self._remove(RESULT, ALPHA, CURVE)  # a folder with a result is complete, so it goes first
        for model in (self.path / "models").glob("client-*"):
            model.unlink()
        if self.from_round is not None:
            self.checkpoints.drop_after(round)  # before experiment.toml says who is left out from the next round on
            self._remove(IDS)  # those runs have later rounds, and forget nothing
        write_text(self.path / EXPERIMENT, experiment.to_toml())
        self.checkpoints.prune(state, keep_newer=True)
        # Drop a line that was cut off, those of rounds that are run again, and that of a shorter run's last round.
        planned = [number for number in range(1, round + 1) if number % every == 0 or number == rounds]
        write_text(path, "".join(f"{lines[number]}\n" for number in planned if number in lines))
        if missing := ", ".join(str(number) for number in planned if number not in lines):
            self.warn(f"{path}: the lines of these rounds are damaged or missing, curves leave them out: {missing}")

    def add_line(self, line: dict[str, Any]) -> None:
        with (self.path / LINES).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.path / name, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def describe_environment() -> dict[str, Any]:
    """Return versions and machine. BLAS picks kernels by CPU model, so the last bits can differ between CPUs."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""  # only Linux has it
    known = dict(re.findall(r"^([\w ]+\w)\s*: (.*)$", text, re.MULTILINE))
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")  # x86's, then ARM's
    cpu_model = " ".join(f"{name} {known[name]}" for name in names if name in known)
    versions = {"format": FORMAT, "pfedla": __version__, "python": platform.python_version()}
    versions |= {"torch": str(torch.__version__), "numpy": np.__version__}
    machine = {"system": f"{platform.system()} {platform.machine()}", "cpu": torch.backends.cpu.get_cpu_capability()}
    return versions | machine | {"cpu_model": cpu_model or platform.processor(), "cores": os.cpu_count()}


def describe_federation(federation: Outline, objective: Objective = CLASSIFICATION) -> dict[str, Any]:
    """Return what federation.json holds: the split, and how heterogeneous the clients are, as far as it is known."""
    known: dict[str, Any] = {"task": objective.describe()}
    known |= {key: getattr(federation, key) for key in ("shape", "classes", "mean", "std", "subset")}
    known |= {"clients": federation.names, "leaked_test_share": federation.leaked_share}
    known |= federation.describe_inputs()
    if isinstance(federation, Federation):
        kinds = map_tree(lambda part: str(part.dtype).removeprefix("torch."), federation.train[0].x)
        known |= {"dtype": kinds} if {*leaves(kinds)} - {"float32", "uint8"} else {}
    known["fingerprint"], counts = federation.fingerprint(), federation.class_counts()
    if counts is None:
        return known | {"train": [], "test": [], "statistics": {}}
    train, test = counts.swapaxes(0, 1).tolist()
    return known | {"train": train, "test": test, "statistics": split_statistics(counts)}


def folder_name(experiment: Experiment) -> str:
    """Return <algorithm>-<dataset>-<partition>-s<seed>."""
    data, name = experiment.data, short_name(experiment.algorithm.name)
    return f"{name}-{safe_name(Path(data.dataset).stem)}-{data.split_name}-s{experiment.seed}"


def number_folder(path: Path, *, resume: bool = False) -> Path:
    """Return the first of path, path-2, path-3, … that is free; with `resume` the last that is there, if one is."""
    candidates = [path]
    while candidates[-1].exists():
        candidates.append(path.with_name(f"{path.name}-{len(candidates) + 1}"))
    return candidates[-2] if resume and len(candidates) > 1 else candidates[-1]


class RunState(BaseModel):
    """A run after a round. With the clients' private state it is all that the next round depends on."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    server: Annotated[ServerState, SkipValidation, Field(exclude=True)]
    alphas: Annotated[list[torch.Tensor], SkipValidation, Field(exclude=True)] = []
    alpha_rounds: Annotated[list[Count], FailFast()] = []  # the round after which each was taken; 0 is the start
    after_training: Annotated[list[float | None], FailFast()]  # score by client; None: never trained, or undefined
    round: Count = 0
    traffic: Traffic = Traffic()
    failures: dict[int, dict[str, Count]] = {}  # client -> reason -> how often
    failed_rounds: Count = 0  # in a row, up to now
    trend: Trend = Trend()
    asked: dict[int, Count] = {}  # client -> rounds in which it was asked to train, with [privacy]
    evaluations: Count = 0  # of the personal models, with [privacy]
    lengths: dict[int, list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]] = {}  # by client: of its last updates
    norm_bounds: dict[int, float | Literal["off"]] = {}  # uploads.norm_bound by the first round that it is for
    seconds: dict[str, Annotated[float, Field(ge=0)]] = {}  # by phase, all rounds
    warnings: list[str] = []  # of resuming: another environment, a damaged checkpoint, missing lines

    def note_bound(self, experiment: Experiment) -> str:
        """Record the bound of the next rounds; return what changed, if anything did."""
        now, before = experiment.uploads.norm_bound, next(reversed(self.norm_bounds.values()), None)
        if now == before or self.round >= experiment.rounds:
            return ""
        self.norm_bounds[self.round + 1] = now
        return f"uploads.norm_bound: {before} -> {now} from round {self.round + 1} on" if before is not None else ""

    def take_snapshot(self, algorithm: Algorithm, planned: set[int]) -> None:
        """Keep alpha after a planned round. Leave out what was taken before the run was extended and is not planned."""
        alpha = algorithm.alpha(self.server)
        if alpha is not None and self.round in planned:
            taken = dict(zip(self.alpha_rounds, self.alphas, strict=True)) | {self.round: alpha}
            self.alpha_rounds = [round for round in taken if round in planned]
            self.alphas = [taken[round] for round in self.alpha_rounds]


def fresh_state(algorithm: Algorithm, num_clients: int, seed: int) -> RunState:
    server = {**algorithm.init_server(num_clients, seed), **init_links(algorithm, num_clients)}
    state = RunState(server=server, after_training=[None] * num_clients)
    state.take_snapshot(algorithm, plan_snapshots(algorithm, num_clients))
    return state


class Checkpoints:
    """The last two checkpoints of a run, and the last from before its score fell: tensors, then the rest in JSON.

    The JSON has the SHA-256 of both files.
    """

    def __init__(self, run: Path, experiment: Experiment, say: Callable[[str], None] = lambda line: None) -> None:
        self.run, self.folder, self.experiment, self.say = run, run / "checkpoints", experiment, say
        self._identity, self._saved_at, self._saved_round = experiment.identity(), time.monotonic(), 0

    def rounds(self) -> list[int]:
        """Return after which rounds there is a checkpoint, ascending; the tensors without their JSON do not count."""
        names = (path.stem.removeprefix("round-") for path in self.folder.glob("round-*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def is_due(self, round: int) -> bool:
        every, minutes = self.experiment.checkpoint.rounds, self.experiment.checkpoint.minutes
        by_time = minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (every > 0 and round % every == 0)

    def save(self, state: RunState, clients: Params) -> None:
        """Write a checkpoint, unless there is one of this round; the lines up to here are on disk before it is."""
        if state.round == self._saved_round:
            return
        with (self.run / LINES).open("ab") as lines:
            os.fsync(lines.fileno())
        self.folder.mkdir(exist_ok=True)
        tensors = _flatten(state.server, clients, torch.stack(state.alphas) if state.alphas else None)
        path = self.folder / f"round-{state.round}.safetensors"
        try:
            write_whole(path, lambda part: save_file(tensors, part))
            stored = {"format": FORMAT, "experiment": self._identity, "tensors_sha256": sha256(path)}
            stored |= state.model_dump(mode="json")
            text = json.dumps({"sha256": _digest(stored), "state": stored}, indent=1, allow_nan=False)
            write_text(path.with_suffix(".json"), text + "\n")
        finally:  # newer ones could not be used, or the run would not have come here again; no part of a file is left
            self.prune(state)
        self._saved_at, self._saved_round = time.monotonic(), state.round

    def prune(self, state: RunState, *, keep_newer: bool = False) -> None:
        """Remove all but the last two checkpoints up to the state's, and the last one of which the score was good."""
        there = [round for round in self.rounds() if round <= state.round]
        kept = {*there[-2:], *[round for round in there if round <= state.trend.good_round][-1:]}
        kept |= {round for round in self.rounds() if keep_newer and round > state.round}
        whole = {self.folder / f"round-{round}.{ending}" for round in kept for ending in ("json", "safetensors")}
        for other in {*self.folder.glob("round-*"), *self.folder.glob(".round-*.part")} - whole:
            other.unlink(missing_ok=True)

    def drop_after(self, last: int) -> None:
        for round in [round for round in reversed(self.rounds()) if round > last]:
            for ending in ("json", "safetensors"):  # without its JSON it does not count
                (self.folder / f"round-{round}.{ending}").unlink(missing_ok=True)

    def load_newest(self, fresh: RunState, clients: Params, last: int | None = None) -> tuple[RunState, Params] | None:
        """Return the newest whole checkpoint, in the form of a fresh run's state and clients; None if there is none.

        `last`: the newest that is not after this round, which must exist.
        """
        problem, there = None, self.rounds()
        if last is not None and not any(round <= last for round in there):
            kept = f"kept are rounds {', '.join(map(str, there))}" if there else "none is kept"
            raise PfedlaError(f"{self.run} has no checkpoint to go back to at or before round {last}: {kept}")
        for round in reversed([round for round in there if last is None or round <= last]):
            try:
                return self._load(round, fresh, clients)
            except PfedlaError as error:
                problem = f"the checkpoint after round {round} cannot be used: {error}"
                self.say(problem)
        if problem is not None:
            raise PfedlaError(f"{problem}; no other can be used either: start again in a new folder")
        return None

    def _load(self, round: int, fresh: RunState, clients: Params) -> tuple[RunState, Params]:
        path = self.folder / f"round-{round}.json"
        content = read_object(path)
        try:
            stored = content["state"]
            if content["sha256"] != _digest(stored) or stored.pop("format") not in range(1, FORMAT + 1):
                raise ValueError("its content does not match its checksum")
            experiment, tensors_sha256 = stored.pop("experiment"), stored.pop("tensors_sha256")
            stored["traffic"].pop("evaluation_bytes", None)  # of an older version
            if "norm_bounds" not in stored:  # older versions had it off by default, and as a part of the identity
                stored["norm_bounds"] = {1: experiment.get("uploads", {}).get("norm_bound", "off")}
            state = RunState.model_validate({**stored, "server": {}})
            if (state.round, len(state.after_training)) != (round, len(fresh.after_training)):
                raise ValueError(f"it is of round {state.round} and of {len(state.after_training)} clients")
        except (TypeError, KeyError, AttributeError, ValueError) as error:  # also pydantic's ValidationError
            raise PfedlaError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
        check_same(self.run, Experiment.parse(upgrade(experiment)), self.experiment)
        tensors_path = path.with_suffix(".safetensors")
        alphas = torch.stack(fresh.alphas).expand(len(state.alpha_rounds), -1, -1, -1) if fresh.alphas else None
        # What a method's server did not keep yet in an older version starts fresh.
        tensors = read_tensors(tensors_path, _flatten(fresh.server, clients, alphas), optional="server/")
        if sha256(tensors_path) != tensors_sha256:
            raise PfedlaError(f"{tensors_path} is damaged: its content does not match its checksum")
        # Clones: what was read may lie anywhere in memory, and kernels may round by how a tensor is aligned.
        tensors = {name: value.clone() for name, value in tensors.items()}
        state.alphas = list(tensors.get("alphas", ()))
        for group, part in fresh.server.items():
            state.server[group] = {name: tensors.get(f"server/{group}/{name}", value) for name, value in part.items()}
        self._saved_round = round
        return state, {name: tensors[f"clients/{name}"] for name in clients}


def check_same(run: Path, before: Experiment, now: Experiment) -> None:
    """Refuse to resume a run whose identity differs, but for what guards it: the norm bound, and who is left out."""
    if what := "; ".join(differences(_without_guards(before), _without_guards(now))):
        raise PfedlaError(f"Cannot resume {run}: settings differ ({what}). Use the original settings, or another --out")


def _without_guards(experiment: Experiment) -> dict[str, Any]:
    identity = experiment.identity()
    uploads = {key: value for key, value in identity.pop("uploads", {}).items() if key != "norm_bound"}
    return {key: value for key, value in identity.items() if key != "exclude"} | {"uploads": uploads}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return one phrase per key that differs, with both values as JSON: 1 and 1.0 differ too."""
    old, new = ({key: json.dumps(v, ensure_ascii=False) for key, v in flatten(one).items()} for one in (before, now))
    changed = [key for key in old | new if old.get(key) != new.get(key)]
    return [f"{key}: {old.get(key, 'unset')} -> {new.get(key, 'unset')}" for key in changed]


def plan_snapshots(algorithm: Algorithm, num_clients: int, rounds: int = 1) -> set[int]:
    """Return after which rounds a run keeps alpha: a hundred at most, as far as memory allows, and the last."""
    affordable = min(SNAPSHOTS, SNAPSHOT_NUMBERS // (num_clients * len(algorithm.task.layers) * num_clients))
    # A power of two: a run that is extended has taken all the snapshots that the longer one needs.
    interval = 1 << (-(-rounds // max(1, affordable)) - 1).bit_length()
    return {*range(0, rounds, interval), rounds} if affordable else set()


def write_alpha(run: Path, state: RunState, layers: Sequence[str], *, at_end: bool = True) -> None:
    """Write alpha.safetensors: at the end, and before it for `pfedla watch` while it is small."""
    if not at_end and sum(alpha.numel() for alpha in state.alphas) > SHOWN_NUMBERS:
        (run / ALPHA).unlink(missing_ok=True)  # old weights must not be taken for those of now
    elif state.alphas:
        tensors = {"alpha": torch.stack(state.alphas).contiguous(), "rounds": torch.tensor(state.alpha_rounds)}
        metadata = {"layers": json.dumps(layers)}  # one entry only: several are written in a random order
        write_whole(run / ALPHA, lambda file: save_file(tensors, file, metadata), to_disk=at_end)


def _flatten(server: ServerState, clients: Params, alphas: torch.Tensor | None) -> Params:
    named = {f"server/{group}/{n}": v.contiguous() for group, part in server.items() for n, v in part.items()}
    named |= {f"clients/{name}": value.contiguous() for name, value in clients.items()}
    return named if alphas is None else named | {"alphas": alphas}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
