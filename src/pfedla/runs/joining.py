"""A client that joins after the run gets a personal model from the server's state and changes nobody else's.

It gets a row in a copy of the state (`Algorithm.admit`) and runs a few rounds there as a cohort of its own.
Its row and its private state are learned; everything else stays as it was, bit for bit.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pfedla.algorithms import check_joining
from pfedla.algorithms.local import Local
from pfedla.core.contracts import Algorithm, Cohort, Failure, Params, Payload, ServerState
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.files import safe_name, write_tensors, write_text, write_whole
from pfedla.core.layers import stack
from pfedla.core.rounds import Traffic, summarise
from pfedla.core.settings import EngineSettings
from pfedla.core.uploads import accept, payload_bytes
from pfedla.data.federation import Federation, Outline, digest_of
from pfedla.engines.client import make_client, one_thread
from pfedla.engines.simulated import TRAINED, attempt
from pfedla.runs.build import build_around
from pfedla.runs.experiment import SITES, Experiment
from pfedla.runs.folder import ALPHA, RESULT, Checkpoints, RunState, fresh_state, new_folder, plan_snapshots
from pfedla.runs.personal import JOINED, load_unseen, read_run
from pfedla.runs.run import Run

ROUNDS = 10


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How an unseen client fared. Accuracies are fractions, on its own test data."""

    rounds: int  # that it ran: none where there is nothing to learn
    before: float  # of the personal model that it gets at first
    after: float  # of the one that it has at the end
    after_training: float | None  # right after its last local training; None if it never trained
    alone: float  # of a model trained on its own data alone, for all the rounds that were asked for
    traffic: Traffic
    alphas: Tensor | None  # [rounds + 1, layers, clients + 1]: its own row of alpha; it is the last sender
    model: Params  # personal

    def accuracies(self) -> dict[str, float | None]:
        return {key: getattr(self, key) for key in ("before", "after", "after_training", "alone")}


class _UnseenClient:
    """An unseen client, its private state, and its copy of the server's state."""

    def __init__(
        self,
        method: Algorithm,
        before: ServerState,
        *,
        federation: Federation,  # of this client alone
        number: int,
        experiment: Experiment,
    ) -> None:
        self.method, self.before = method, before
        self.seed, self.num_examples = experiment.seed, federation.num_examples
        admitted = method.admit(before, experiment.seed)
        self.shared = {  # what does not belong to one client
            group: {name: value for name, value in part.items() if value.shape == before[group][name].shape}
            for group, part in admitted.items()
        }
        self.server = self._restore(admitted)
        examples = (federation.train[0], federation.test[0])
        engine = EngineSettings(name="threaded", device=experiment.engine.device)
        client = make_client(method, federation, examples, engine, number=number, recalibrate=experiment.recalibrate)
        state = client.algorithm.init_unseen(self.server, client.state)
        self.client = replace(client, state={name: value.to(client.device) for name, value in state.items()})

    def run(self, rounds: range) -> Joined:
        """Run these rounds, or none where there is nothing to learn."""
        has_row = any(part.keys() != self.shared[group].keys() for group, part in self.server.items())
        rounds = rounds if self.client.state or has_row else rounds[:0]
        traffic, alphas, after_training = Traffic(), self._alpha(), None
        _, before = self._personalize(rounds.start)
        for number in rounds:
            after_training, down, up = self._run_round(number)
            traffic = traffic.plus(down=down, up=up)
            alphas += self._alpha()
        self._check_untouched()
        model, after = self._personalize(rounds.stop)
        return Joined(
            rounds=len(rounds),
            before=before,
            after=after,
            after_training=after_training,
            alone=after,
            traffic=traffic,
            alphas=torch.stack(alphas) if alphas else None,
            model=model,
        )

    def _download(self, round: int) -> tuple[Cohort, Payload, Payload]:
        """Return the cohort of this client, its download stacked, and the same on its device, not stacked."""
        cohort = Cohort(
            round=round, seed=self.seed, ids=torch.tensor([self.client.number]), num_examples=self.num_examples
        )
        downloads = self.method.download(self.server, cohort)
        return cohort, downloads, downloads.rows(0).to(self.client.device)

    def _personalize(self, round: int) -> tuple[Params, float]:
        """Return the personal model and its accuracy."""
        cohort, _, download = self._download(round)
        model = self.client.personalize(download, cohort)
        accuracy, _ = self.client.evaluate(model)
        return {name: value.cpu() for name, value in model.items()}, accuracy

    def _run_round(self, round: int) -> tuple[float, int, int]:
        """Return the accuracy after training and the bytes down and up."""
        cohort, downloads, download = self._download(round)
        outcome = attempt("raised", self.client.update, download, cohort)
        if isinstance(outcome, Failure):
            raise PfedlaError(f"the client cannot train: {outcome.detail}") from outcome.error
        accepted, failures = accept(self.method, self.server, cohort, downloads, [outcome[1]])
        for failure in failures.values():
            hint = "; are its examples in the scale of the run's?" if failure.reason == "not finite" else ""
            what = f"the client's upload cannot be used: {failure.reason} {failure.detail}".strip()
            raise PfedlaError(what + hint)
        state, answer = outcome
        self.client = replace(self.client, state=state, has_trained=True)
        self.server = self._restore(self.method.aggregate(self.server, cohort, accepted.downloads, accepted.uploads))
        down = int(payload_bytes(downloads, self.method.task.layers).sum())
        return answer.accuracy, down, accepted.num_bytes

    def _alpha(self) -> list[Tensor]:
        """Return the client's row of alpha in a list; an empty one if there is none, or it is too large."""
        place = self.client.number
        if not plan_snapshots(self.method, place + 1):
            return []
        alpha = self.method.alpha(self.server)
        return [] if alpha is None else [alpha[place].clone()]

    def _restore(self, server: ServerState) -> ServerState:
        """Put the shared tensors back; copies, because a round may write into what it is given."""
        return {
            group: part | {name: value.clone() for name, value in self.shared[group].items()}
            for group, part in server.items()
        }

    def _check_untouched(self) -> None:
        for group, part in self.before.items():
            for name, value in part.items():
                now = self.server[group][name]
                others = now[tuple(map(slice, value.shape))]
                if now.shape != value.shape and not torch.equal(others, value):
                    what = f"{self.method.name} has changed another client's {name} ({group})"
                    raise PfedlaError(f"{what}; nothing is written")


def join(
    method: Algorithm,
    server: ServerState,
    unseen: Federation,
    num_clients: int,
    experiment: Experiment,
    *,
    after: int,
    rounds: int = ROUNDS,
) -> Joined:
    """Take one client into a run of `num_clients` that ended after round `after`; leave `server` as it is."""
    check_joining(method)

    def run(algorithm: Algorithm, before: ServerState) -> Joined:
        client = _UnseenClient(algorithm, before, federation=unseen, number=num_clients, experiment=experiment)
        return client.run(range(after + 1, after + 1 + rounds))

    with one_thread:
        joined = run(method, server)
        alone = run(Local(task=method.task, training=method.training), {"model": {}})
    return replace(joined, alone=alone.after)


def join_unseen(run: Run) -> dict[str, Any]:
    """Let the unseen clients of an experiment join its finished run, each alone; write their models.

    Return what result.json holds of them. Accuracies are null for a client that cannot join.
    """
    built, state = run.built, run.state
    assert built.unseen is not None
    assert run.folder is not None
    rows: list[dict[str, float | None]] = []
    rounds = 0
    for number, name in enumerate(built.unseen.names):
        if run.stopping():
            raise Stopped
        target = run.folder.path / "models" / f"unseen-{number}.safetensors"
        target.unlink(missing_ok=True)
        one, count = built.unseen.only([number]), len(built.federation)
        try:
            joined = join(built.algorithm, state.server, one, count, built.experiment, after=state.round)
        except PfedlaError as error:  # the others can join all the same
            run.say(f"unseen client {name}: {error}")
            rows.append({})
            continue
        write_tensors(target, joined.model)
        rounds = joined.rounds
        rows.append(joined.accuracies())
        first, last = 100 * joined.before, 100 * joined.after
        run.say(f"unseen client {name}: accuracy {first:.1f} % at first, {last:.1f} % at the end")
    result = {"clients": built.unseen.names, "rounds": rounds}
    for key in ("after", "before", "after_training", "alone"):
        values = [math.nan if (value := row.get(key)) is None else value for row in rows]
        name = "accuracy" if key == "after" else f"accuracy_{key}"
        result[name] = summarise(torch.tensor(values, dtype=torch.float64))
    return result


def join_run(
    run: Path,
    data: Path,
    *,
    rounds: int = ROUNDS,
    name: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, dict[str, Any]]:
    """Take the client whose examples are in `data` into a finished run; return its folder and its result."""
    experiment, known = read_run(run)
    deployed = any((run / name).exists() for name in ("site.json", "deployment.json"))
    if deployed or experiment.data.dataset == SITES:
        raise PfedlaError(f"{run} is a deployment's: clients' data never reach the server, so none can join")
    count = len(known.clients)
    outline = Outline(
        known.shape,
        known.classes,
        torch.zeros(count, dtype=torch.int64),
        mean=known.mean,
        std=known.std,
        names=known.clients,
    )
    method = build_around(experiment, outline).algorithm
    check_joining(method)
    unseen, split = load_unseen(data, experiment, known)
    folder = run / JOINED / safe_name(name or unseen.names[0])
    if folder.exists():
        raise PfedlaError(f"{folder} exists already and is never overwritten; give another --name")
    state = _load_last(Checkpoints(run, experiment, say), method, count, experiment.seed)
    joined = join(method, state.server, unseen, count, experiment, after=state.round, rounds=rounds)
    result = {
        "algorithm": method.name,
        "data": str(data.resolve()),
        "name": folder.name,
        "clients": count,
        "after_round": state.round,
        "rounds": joined.rounds,
        "rounds_alone": rounds,
        "seed": experiment.seed,
        "examples": {"train": len(unseen.train[0].y), "test": len(unseen.test[0].y), "split": split},
        "digest": digest_of(unseen.train[0], unseen.test[0]),
        "accuracy": joined.accuracies(),
        "traffic": asdict(joined.traffic),
    }
    new_folder(folder, "give another --name")
    write_tensors(folder / "model.safetensors", joined.model)
    if joined.alphas is not None:
        layers = method.task.layers.names
        result["alpha"] = dict(zip(layers, joined.alphas[-1].tolist(), strict=True))
        tensors, metadata = {"alpha": joined.alphas}, {"layers": json.dumps(layers)}
        write_whole(folder / ALPHA, lambda file: save_file(tensors, file, metadata))
    write_text(folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")  # last
    return folder, result


def _load_last(checkpoints: Checkpoints, method: Algorithm, num_clients: int, seed: int) -> RunState:
    """Return the state that a run ended with, from its newest checkpoint."""
    fresh = fresh_state(method, num_clients, seed)
    clients = stack([method.init_client()] * num_clients)
    clients[TRAINED] = torch.zeros(num_clients, dtype=torch.bool)
    found = checkpoints.load_newest(fresh, clients)
    if found is None:
        lost = f"{checkpoints.folder} holds no checkpoint with the state that a client joins"
        raise PfedlaError(f"{lost}; run the experiment again and keep the folder")
    return found[0]
