"""What a run writes while it goes: a line per evaluated round, its weights, and its whole state. Never a pickle.

checkpoints/round-<r>.safetensors holds the server's state, every client's, and the snapshots of alpha;
checkpoints/round-<r>.json, written after it, holds the rest and the SHA-256 of both files. Together they are what the
run has in memory after round r.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, FailFast, Field, SkipValidation
from safetensors.torch import save_file
from torch import Tensor

from pfedla.core.contracts import Params, ServerState
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_json, read_tensors, sha256, write_text, write_whole
from pfedla.core.rounds import Round, Traffic, finite_mean, summarise
from pfedla.core.settings import CheckpointSettings
from pfedla.runs.experiment import Experiment, upgrade

FORMAT = 2  # of run folders; format 1 stored the whole experiment where format 2 stores its identity
KEPT = 2
LINES, ALPHA, CHECKPOINTS = "rounds.jsonl", "alpha.safetensors", "checkpoints"
SHOWN_NUMBERS = 2**20  # of alpha that are written again at every snapshot, for `pfedla watch`; more wait for the end
Count = Annotated[int, Field(ge=0, le=2**62)]


class RunState(BaseModel):
    """A run after a round. With the clients' private state it is all that the next round depends on."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    server: Annotated[ServerState, SkipValidation, Field(exclude=True)]
    alphas: Annotated[list[Tensor], SkipValidation, Field(exclude=True)] = []
    alpha_rounds: Annotated[list[Count], FailFast()] = []  # the round after which each was taken; 0 is the start
    after_training: Annotated[list[float | None], FailFast()]  # accuracy by client; None: it has never trained
    round: Count = 0
    traffic: Traffic = Traffic()
    failures: dict[int, dict[str, Count]] = {}  # client -> reason -> how often
    failed_rounds: Count = 0  # in a row, up to now
    seconds: dict[str, Annotated[float, Field(ge=0)]] = {}  # by phase, all rounds


class Checkpoints:
    """The last two checkpoints of a run, and when the next is due."""

    def __init__(
        self,
        run: Path,
        identity: Mapping[str, Any],
        settings: CheckpointSettings | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.run, self.folder = run, run / CHECKPOINTS
        self.identity, self.settings, self.say = identity, settings or CheckpointSettings(), say
        self._saved_at, self._saved_round = time.monotonic(), 0

    def rounds(self) -> list[int]:
        """Return after which rounds there is a checkpoint, ascending; the tensors without their JSON do not count."""
        names = (path.stem.removeprefix("round-") for path in self.folder.glob("round-*.json"))
        return sorted(int(name) for name in names if name.isdecimal())

    def path(self, round: int, ending: str) -> Path:
        return self.folder / f"round-{round}.{ending}"

    def is_due(self, round: int) -> bool:
        every, minutes = self.settings.rounds, self.settings.minutes
        by_time = minutes > 0 and time.monotonic() - self._saved_at >= 60 * minutes
        return by_time or (every > 0 and round % every == 0)

    def save(self, state: RunState, clients: Params) -> None:
        """Write a checkpoint, unless there is one of this round; the lines up to here are on disk before it is."""
        if state.round == self._saved_round:
            return
        lines = self.run / LINES
        if lines.exists():
            with lines.open("rb") as file:
                os.fsync(file.fileno())
        self.folder.mkdir(exist_ok=True)
        tensors = _flatten(state.server, clients, torch.stack(state.alphas) if state.alphas else None)
        tensors_path = self.path(state.round, "safetensors")
        try:
            write_whole(tensors_path, lambda path: save_file({n: v.contiguous() for n, v in tensors.items()}, path))
            content = {"format": FORMAT, "experiment": self.identity, "tensors_sha256": sha256(tensors_path)}
            content |= state.model_dump(mode="json")
            text = json.dumps(
                {"sha256": _digest(content), "state": content}, indent=1, ensure_ascii=False, allow_nan=False
            )
            write_text(self.path(state.round, "json"), text + "\n")
        except BaseException:  # a full disk, perhaps: what is half-written is of no use
            self._remove_all_but(self.rounds())
            raise
        # Newer ones could not be used, or the run would not have come to this round again.
        self._remove_all_but([round for round in self.rounds() if round <= state.round][-KEPT:])
        self._saved_at, self._saved_round = time.monotonic(), state.round

    def _remove_all_but(self, kept: list[int]) -> None:
        whole = {self.path(round, ending) for round in kept for ending in ("json", "safetensors")}
        for path in [*self.folder.glob("round-*"), *self.folder.glob(".round-*.part")]:
            if path not in whole:
                path.unlink(missing_ok=True)

    def load_newest(self, fresh: RunState, clients: Params) -> tuple[RunState, Params] | None:
        """Return the newest whole checkpoint, in the form of a fresh run's state and clients; None if there is none."""
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                loaded = self._load(round, fresh, clients)
            except ChangedExperimentError:
                raise
            except PfedlaError as error:
                self.say(f"the checkpoint after round {round} cannot be used: {error}")
            else:
                self._saved_round = round
                return loaded
        if rounds:
            raise PfedlaError(f"no checkpoint in {self.folder} can be used; start again in a new folder")
        return None

    def _load(self, round: int, fresh: RunState, clients: Params) -> tuple[RunState, Params]:
        path = self.path(round, "json")
        content = read_json(path)
        try:
            stored = content["state"]
            if content["sha256"] != _digest(stored) or stored.pop("format") not in (1, FORMAT):
                raise ValueError("its content does not match its checksum")
            experiment, tensors_sha256 = stored.pop("experiment"), stored.pop("tensors_sha256")
            state = RunState.model_validate({**stored, "server": {}})
            if (state.round, len(state.after_training)) != (round, len(fresh.after_training)):
                raise ValueError(f"it is of round {state.round} and of {len(state.after_training)} clients")
        except (TypeError, KeyError, AttributeError, ValueError) as error:  # also pydantic's ValidationError
            raise PfedlaError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
        check_same(self.run, Experiment.parse(upgrade(experiment)).identity(), self.identity)
        tensors_path = self.path(round, "safetensors")
        alphas = None
        if fresh.alphas:
            alphas = fresh.alphas[0].new_empty(len(state.alpha_rounds), *fresh.alphas[0].shape, device="meta")
        tensors = read_tensors(tensors_path, _flatten(fresh.server, clients, alphas))
        if sha256(tensors_path) != tensors_sha256:
            raise PfedlaError(f"{tensors_path} is damaged: its content does not match its checksum")
        # Clones: what was read may lie anywhere in memory, and kernels may round by how a tensor is aligned.
        tensors = {name: value.clone() for name, value in tensors.items()}
        state.alphas = list(tensors.get("alphas", ()))
        for group, part in fresh.server.items():
            state.server[group] = {name: tensors[f"server/{group}/{name}"] for name in part}
        return state, {name: tensors[f"clients/{name}"] for name in clients}


class ChangedExperimentError(PfedlaError):
    """The settings differ from those that the run was made with."""


def check_same(run: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to resume a run whose identity differs."""
    if changed := differences(before, now):
        raise ChangedExperimentError(
            f"Cannot resume {run}: settings differ ({'; '.join(changed)}). Use the original settings, or another --out"
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one phrase per key that differs, with both values."""
    found = []
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) or isinstance(new, Mapping):
            found += differences(old or {}, new or {}, f"{prefix}{key}.")
        elif old != new or type(old) is not type(new):
            was, is_now = ("unset" if v is None else json.dumps(v, ensure_ascii=False) for v in (old, new))
            found.append(f"{prefix}{key}: {was} -> {is_now}")
    return found


def describe_round(
    round: Round, layers: Sequence[str], honest: Tensor, failures: dict[int, dict[str, int]]
) -> dict[str, Any]:
    """Return what rounds.jsonl holds of an evaluated round; `failures` are all so far."""
    assert round.evaluation is not None
    retained = zip(layers, (~round.sent).sum(0).tolist(), strict=True)

    def short(accuracies: Tensor) -> dict[str, Any]:
        return {key: value for key, value in summarise(accuracies).items() if key != "per_client"}

    line = {
        "round": round.round,
        "accuracy": short(round.evaluation.accuracy),
        "loss": finite_mean(round.evaluation.loss),
        "accuracy_after_training": finite_mean(round.after_training.accuracy),
        "training_loss": finite_mean(round.training_loss),
        "seconds": {phase: float(f"{value:.4f}") for phase, value in round.seconds.items()},
        **asdict(round.traffic),
        "cohort": round.cohort.ids.tolist(),
        "retained": {layer: count for layer, count in retained if count},
        "failures": failures,
    }
    if not honest.all():
        line["honest"] = {"accuracy": short(round.evaluation.accuracy[honest])}
    return line


def add_line(run: Path, line: dict[str, Any]) -> None:
    """Append an evaluated round to rounds.jsonl."""
    with (run / LINES).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def show_alpha(run: Path, state: RunState, layers: Sequence[str]) -> None:
    """Write the weights so far, for `pfedla watch`; too many wait for the end."""
    if state.alphas and len(state.alphas) * state.alphas[0].numel() <= SHOWN_NUMBERS:
        write_alpha(run, state, layers, to_disk=False)
    else:
        (run / ALPHA).unlink(missing_ok=True)  # old weights must not be taken for those of now


def write_alpha(run: Path, state: RunState, layers: Sequence[str], *, to_disk: bool = True) -> None:
    """Write alpha.safetensors. One entry of metadata only: several are written in a random order."""
    tensors = {"alpha": torch.stack(state.alphas).contiguous(), "rounds": torch.tensor(state.alpha_rounds)}
    metadata = {"layers": json.dumps(layers)}
    write_whole(run / ALPHA, lambda file: save_file(tensors, file, metadata), to_disk=to_disk)


def _flatten(server: ServerState, clients: Params, alphas: Tensor | None) -> Params:
    named = {f"server/{group}/{name}": value for group, part in server.items() for name, value in part.items()}
    return named | {f"clients/{n}": v for n, v in clients.items()} | ({} if alphas is None else {"alphas": alphas})


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
