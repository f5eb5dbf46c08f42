"""A run's whole state on disk: tensors in safetensors, counters in JSON, each file whole or not there. Never a pickle.

checkpoints/round-<r>.safetensors holds the server's state, every client's, and the snapshots of alpha;
checkpoints/round-<r>.json, written after it, the rest and both files' SHA-256. Together they are what the run would have in
memory after round r.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from safetensors.torch import save_file
from torch import Tensor

from pfedla.core.rounds import Traffic
from pfedla.core.contracts import Params, ServerState
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_json, read_tensors, sha256, write_text, write_whole

FORMAT = 1
KEPT = 2
Count = Annotated[int, Field(ge=0, le=2**62)]


@dataclass
class Progress:
    """Where a run stands after a round. With the clients' private state it is all that the next round depends on."""

    server: ServerState
    after_training: Tensor  # [clients], accuracy; nan for a client that never trained
    round: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    alphas: list[Tensor] = field(default_factory=list)
    alpha_rounds: list[int] = field(default_factory=list)
    failures: dict[int, dict[str, int]] = field(default_factory=dict)  # client -> reason -> how often
    failed_rounds: int = 0  # in a row, up to now
    seconds: dict[str, float] = field(default_factory=dict)  # by phase, all rounds


class _State(BaseModel):
    """The part of a checkpoint that is JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: int
    experiment: dict[str, Any]  # what the numbers depend on; a run goes on with the same only
    round: Annotated[int, Field(ge=1)]
    traffic: dict[str, Count]
    # FailFast: else a strange file could be answered by gigabytes of error messages.
    after_training: Annotated[list[float | None], FailFast()]
    alpha_rounds: Annotated[list[Count], FailFast()]
    failures: dict[str, dict[str, Annotated[int, Field(ge=1)]]]
    failed_rounds: Count
    seconds: dict[str, Annotated[float, Field(ge=0)]]
    tensors_sha256: str


class Checkpoints:
    """The last two checkpoints of a run."""

    def __init__(self, folder: Path, experiment: Mapping[str, Any], say: Callable[[str], None] = lambda line: None) -> None:
        self.folder, self.experiment, self.say = folder, experiment, say

    def rounds(self) -> list[int]:
        """After which rounds there is a checkpoint, ascending; the tensors without their JSON are none."""
        names = (path.stem.removeprefix("round-") for path in self.folder.glob("round-*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, round: int, ending: str) -> Path:
        return self.folder / f"round-{round}.{ending}"

    def save(self, progress: Progress, clients: Params) -> None:
        self.folder.mkdir(exist_ok=True)
        tensors = _flat(progress.server, clients, torch.stack(progress.alphas) if progress.alphas else None)
        tensors_path = self.path(progress.round, "safetensors")
        try:
            write_whole(tensors_path, lambda path: save_file({n: v.contiguous() for n, v in tensors.items()}, path))
            state = _State(
                format=FORMAT, experiment=dict(self.experiment), round=progress.round, traffic=asdict(progress.traffic),
                after_training=[None if math.isnan(value) else value for value in progress.after_training.tolist()],
                alpha_rounds=progress.alpha_rounds, failures={str(who): why for who, why in progress.failures.items()},
                failed_rounds=progress.failed_rounds, seconds=progress.seconds, tensors_sha256=sha256(tensors_path),
            )  # fmt: skip
            content = state.model_dump()
            text = json.dumps({"sha256": _digest(content), "state": content}, indent=1, ensure_ascii=False, allow_nan=False)
            write_text(self.path(progress.round, "json"), text + "\n")
        except BaseException:  # a full disk, perhaps: what is half-written is of no use
            self._remove_all_but(self.rounds())
            raise
        # Newer ones could not be used, or the run would not have come to this round again.
        self._remove_all_but([round for round in self.rounds() if round <= progress.round][-KEPT:])

    def _remove_all_but(self, kept: list[int]) -> None:
        whole = {self.path(round, ending) for round in kept for ending in ("json", "safetensors")}
        for path in [*self.folder.glob("round-*"), *self.folder.glob(".round-*.part")]:
            if path not in whole:
                path.unlink(missing_ok=True)

    def newest(self, fresh: Progress, clients: Params) -> tuple[Progress, Params] | None:
        """The newest checkpoint that is whole, in the form of a fresh run's progress and clients; None if there is none."""
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                loaded = self._load(round, fresh, clients)
            except ChangedExperimentError:
                raise
            except PfedlaError as error:
                self.say(f"the checkpoint after round {round} cannot be used: {error}")
            else:
                return loaded
        if rounds:
            raise PfedlaError(f"no checkpoint in {self.folder} can be used; start again in a new folder")
        return None

    def _load(self, round: int, fresh: Progress, clients: Params) -> tuple[Progress, Params]:
        path = self.path(round, "json")
        content = read_json(path)
        try:
            state = _State.model_validate(content["state"])
            sound = content["sha256"] == _digest(content["state"]) and state.format == FORMAT and state.round == round
            sound = sound and len(state.after_training) == len(fresh.after_training)
            traffic = Traffic(**state.traffic)
            failures = {int(who): why for who, why in state.failures.items()}
        except (ValidationError, TypeError, KeyError, ValueError) as error:
            raise PfedlaError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
        if not sound:
            raise PfedlaError(f"{path} is damaged: it is not what was written")
        if changed := differing(state.experiment, self.experiment):
            raise ChangedExperimentError(self.folder.parent, changed)
        tensors_path = self.path(round, "safetensors")
        alphas = None
        if fresh.alphas:
            alphas = fresh.alphas[0].new_empty(len(state.alpha_rounds), *fresh.alphas[0].shape, device="meta")
        tensors = read_tensors(tensors_path, _flat(fresh.server, clients, alphas))
        if sha256(tensors_path) != state.tensors_sha256:
            raise PfedlaError(f"{tensors_path} is damaged: it is not what was written")
        # Copies: what was read may lie anywhere in memory, and small products round differently by where their numbers lie.
        tensors = {name: value.clone() for name, value in tensors.items()}
        return Progress(
            server={group: {name: tensors[f"server/{group}/{name}"] for name in part} for group, part in fresh.server.items()},
            after_training=torch.tensor([math.nan if a is None else a for a in state.after_training], dtype=torch.float64),
            round=state.round, traffic=traffic, alphas=list(tensors.get("alphas", ())), alpha_rounds=state.alpha_rounds,
            failures=failures, failed_rounds=state.failed_rounds, seconds=state.seconds,
        ), {name: tensors[f"clients/{name}"] for name in clients}  # fmt: skip


class ChangedExperimentError(PfedlaError):
    """The run was made with other values than those it should go on with."""

    def __init__(self, folder: Path, changed: list[str]) -> None:
        super().__init__(
            f"{folder} was made with another experiment: {'; '.join(changed)}. Go on with the same, or start in a new folder"
        )


def differing(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One phrase per key that differs, with both values."""
    found = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += differing(old, new, f"{prefix}{key}.")
        elif old != new or type(old) is not type(new):
            was, is_now = ("left out" if value is None else json.dumps(value, ensure_ascii=False) for value in (old, new))
            found.append(f"{prefix}{key} was {was}, is now {is_now}")
    return found


def _flat(server: ServerState, clients: Params, alphas: Tensor | None) -> Params:
    named = {f"server/{group}/{name}": value for group, part in server.items() for name, value in part.items()}
    return named | {f"clients/{n}": v for n, v in clients.items()} | ({} if alphas is None else {"alphas": alphas})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Cadence:
    """When the next checkpoint is due: every so many rounds (0: never) or minutes (0: never), whichever comes first."""

    def __init__(self, rounds: int, minutes: float) -> None:
        self.rounds, self.minutes = rounds, minutes
        self.last = time.monotonic()

    def due(self, round: int) -> bool:
        by_time = self.minutes > 0 and time.monotonic() - self.last >= 60 * self.minutes
        return by_time or (self.rounds > 0 and round % self.rounds == 0)

    def saved(self) -> None:
        self.last = time.monotonic()
