"""A client that joins after the run: it gets its personal model from the server's state and changes nobody else's.

It gets a row in a copy of the state (`Algorithm.admit`) and runs a few rounds there as a cohort of its own. Its row and
its private state are learned; everything else stays as it was, bit for bit.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pfedla.algorithms import check_joining
from pfedla.algorithms.local import Local
from pfedla.core.contracts import Algorithm, ClientState, Cohort, Params, Payload, ServerState
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.files import safe_name, write_text, write_whole
from pfedla.core.layers import copies
from pfedla.core.rounds import Traffic, answer_bytes, payload_bytes, summarise
from pfedla.core.tasks import DirectTask
from pfedla.core.tensor_files import write_tensors
from pfedla.core.uploads import accept
from pfedla.data.federation import Federation, Outline, digest_of
from pfedla.engines.client import TRAINED, Client, attempt, move, one_thread, usable_device
from pfedla.runs.build import build_around
from pfedla.runs.checkpoint import Checkpoints, RunState
from pfedla.runs.experiment import SITES, Experiment
from pfedla.runs.folder import RESULT, new_folder
from pfedla.runs.personal import JOINED, load_unseen, read_run

if TYPE_CHECKING:
    from pfedla.runs.run import Run

ROUNDS = 10
LARGEST_ALPHA = 2**26
RESULT_KEYS = {  # attribute of Joined -> its name in a result
    "after": "accuracy",
    "before": "accuracy_before",
    "after_training": "accuracy_after_training",
    "alone": "accuracy_alone",
}


@dataclass(frozen=True, kw_only=True)
class Joined:
    """How an unseen client fared. Accuracies are fractions, on its own test data."""

    rounds: int  # that it ran: none where there is nothing to learn
    before: float  # of the personal model that it gets to begin with
    after: float  # of the one it has at the end
    after_training: float | None  # right after its last local training; None if it never trained
    alone: float  # of a model trained for all the rounds that were asked for on its own data alone
    traffic: Traffic
    alphas: Tensor | None  # [rounds + 1, layers, clients + 1]: its own row of alpha; it is the last sender
    model: Params  # personal

    def accuracies(self) -> dict[str, float | None]:
        return {key: getattr(self, key) for key in ("before", "after", "after_training", "alone")}


@dataclass
class _Unseen:
    """An unseen client, its private state, and its copy of the server's state."""

    method: Algorithm
    client: Client
    num_examples: Tensor
    server: ServerState
    shared: ServerState  # what does not belong to one client: it is put back after every round
    state: ClientState
    seed: int

    def cohort(self, round: int) -> Cohort:
        return Cohort(round, self.seed, torch.tensor([self.client.number]), self.num_examples)

    def download(self, cohort: Cohort) -> tuple[Payload, Payload]:
        """Return the download stacked, and the client's own row on its device."""
        downloads = self.method.download(self.server, cohort)
        return downloads, move(downloads.rows(0), self.client.device)

    def personalize(self, round: int, *, has_trained: bool) -> tuple[Params, float]:
        cohort = self.cohort(round)
        model = self.client.personalize(self.state, self.download(cohort)[1], cohort, has_trained=has_trained)
        accuracy, _ = self.client.metrics(self.client.evaluate(model))
        return {name: value.cpu() for name, value in model.items()}, accuracy

    def run_round(self, round: int, *, has_trained: bool) -> tuple[float, int, int]:
        """Run one round; return the accuracy after training and the bytes down and up."""
        cohort = self.cohort(round)
        downloads, own = self.download(cohort)
        outcome = attempt(lambda: self.client.update(self.state, own, cohort, has_trained=has_trained))
        if isinstance(outcome, Exception):
            text = f"the client cannot train: {type(outcome).__name__}: {outcome}"
            raise PfedlaError(text.splitlines()[0]) from outcome
        accepted, failures = accept(self.method, self.server, cohort, downloads, [outcome[1]])
        for failure in failures.values():
            hint = "; are its examples in the scale of the run's?" if failure.reason == "not finite" else ""
            raise PfedlaError(
                f"the client's upload cannot be used: {failure.reason} {failure.detail}".strip() + hint
            )
        self.state, answer = outcome
        after = self.method.aggregate(self.server, cohort, accepted.downloads, accepted.uploads)
        self.server = _restore(after, self.shared)
        layers = self.method.task.layers
        return answer.accuracy, int(payload_bytes(downloads, layers).sum()), answer_bytes(answer, layers)

    def alpha(self) -> list[Tensor]:
        """Return the client's row, in a list; nothing if the method has no alpha, or too large a one."""
        place = self.client.number
        if (place + 1) * len(self.method.task.layers) * (place + 1) > LARGEST_ALPHA:
            return []
        alpha = self.method.alpha(self.server)
        return [] if alpha is None else [alpha[place].clone()]


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
    """Take one client into a run of `num_clients` that ended after round `after`; `server` is left as it is."""
    check_joining(method)
    local = Local(task=method.task, training=method.training)
    one_thread.acquire()
    try:
        joined = _run(method, server, unseen, num_clients, experiment, after=after, rounds=rounds)
        alone = _run(local, {}, unseen, num_clients, experiment, after=after, rounds=rounds)
    finally:
        one_thread.release()
    return replace(joined, alone=alone.after)


def _admit(
    method: Algorithm, before: ServerState, unseen: Federation, place: int, experiment: Experiment
) -> _Unseen:
    device = usable_device(experiment.engine.device)
    example = unseen.normalise(unseen.train[0].x[:1].to(device))[0]
    running = method.model_copy(update={"task": DirectTask(method.task.to(device).module, example)})
    client = Client(
        number=place,
        train=unseen.train[0],
        test=unseen.test[0],
        mean=unseen.mean,
        std=unseen.std,
        algorithm=running,
        device=device,
        recalibrate=experiment.recalibrate,
    )
    admitted = method.admit(before, experiment.seed)
    shared = {
        group: {name: value for name, value in part.items() if value.shape == before[group][name].shape}
        for group, part in admitted.items()
    }
    server = _restore(admitted, shared)
    # Where a client retains layers, it starts with the server's row for it.
    models = server.get("models", {})
    own = {name: value[-1] for name, value in models.items()}
    state = {name: own.get(name, value).to(device) for name, value in running.init_client().items()}
    return _Unseen(method, client, unseen.num_examples, server, shared, state, experiment.seed)


def _run(
    method: Algorithm,
    before: ServerState,
    unseen: Federation,
    place: int,
    experiment: Experiment,
    *,
    after: int,
    rounds: int,
) -> Joined:
    one = _admit(method, before, unseen, place, experiment)
    learns = bool(one.state) or any(
        part.keys() != one.shared[group].keys() for group, part in one.server.items()
    )
    traffic, alphas, after_training = Traffic(), one.alpha(), None
    _, at_first = one.personalize(after + 1, has_trained=False)
    numbers = range(after + 1, after + 1 + (rounds if learns else 0))
    for number in numbers:
        after_training, down, up = one.run_round(number, has_trained=number > numbers.start)
        traffic = traffic.plus(down=down, up=up)
        alphas += one.alpha()
    _check_untouched(method, before, one.server)
    model, at_last = one.personalize(numbers.stop, has_trained=len(numbers) > 0)
    return Joined(
        rounds=len(numbers),
        before=at_first,
        after=at_last,
        after_training=after_training,
        alone=at_last,
        traffic=traffic,
        alphas=torch.stack(alphas) if alphas else None,
        model=model,
    )


def _restore(server: ServerState, shared: ServerState) -> ServerState:
    """Put the shared tensors back; copies, because a round may write into what it is given."""
    return {
        group: part | {name: value.clone() for name, value in shared[group].items()}
        for group, part in server.items()
    }


def _check_untouched(method: Algorithm, before: ServerState, after: ServerState) -> None:
    for group, part in before.items():
        for name, value in part.items():
            now = after[group][name][tuple(map(slice, value.shape))]
            if after[group][name].shape != value.shape and not torch.equal(now, value):
                raise PfedlaError(
                    f"{method.name} has changed another client's {name} ({group}); nothing is written"
                )


def load_last_state(checkpoints: Checkpoints, method: Algorithm, num_clients: int, seed: int) -> RunState:
    """Return the state a run ended with, from its newest checkpoint."""
    from pfedla.runs.run import SNAPSHOT_NUMBERS, fresh_state

    keeps_alpha = num_clients * len(method.task.layers) * num_clients <= SNAPSHOT_NUMBERS
    fresh = fresh_state(method, num_clients, seed, keeps_alpha=keeps_alpha)
    clients = copies(method.init_client(), num_clients) | {
        TRAINED: torch.zeros(num_clients, dtype=torch.bool)
    }
    found = checkpoints.load_newest(fresh, clients)
    if found is None:
        raise PfedlaError(
            f"{checkpoints.folder} holds no checkpoint, and the server's state that a client joins is gone with it; "
            "run the experiment again and keep the folder"
        )
    return found[0]


def join_unseen(run: "Run") -> dict[str, Any]:
    """Let the unseen clients of an experiment join its finished run, each alone; leave their models.

    Returns what result.json holds of them; accuracies are null for a client that cannot join.
    """
    built, folder = run.built, run.folder
    assert built.unseen is not None and folder is not None
    num_clients = len(built.federation)
    accuracies = torch.full((len(built.unseen), len(RESULT_KEYS)), torch.nan, dtype=torch.float64)
    state = load_last_state(folder.checkpoints, built.algorithm, num_clients, built.experiment.seed)
    models, rounds = folder.path / "models", 0
    for number, name in enumerate(built.unseen.names):
        if run.stopping():
            raise Stopped
        target = models / f"unseen-{number}.safetensors"
        target.unlink(missing_ok=True)
        try:
            joined = join(
                built.algorithm,
                state.server,
                built.unseen.only([number]),
                num_clients,
                built.experiment,
                after=state.round,
            )
        except PfedlaError as error:  # the others are worth having all the same
            run.say(f"unseen client {name}: {error}")
            continue
        write_tensors(target, joined.model)
        rounds, found = joined.rounds, joined.accuracies()
        values = [math.nan if (value := found[key]) is None else value for key in RESULT_KEYS]
        accuracies[number] = torch.tensor(values, dtype=torch.float64)
        run.say(
            f"unseen client {name}: accuracy {100 * joined.before:.1f} % at first, {100 * joined.after:.1f} % at last"
        )
    summaries = {
        key: summarise(values) for key, values in zip(RESULT_KEYS.values(), accuracies.T, strict=True)
    }
    return {"clients": built.unseen.names, "rounds": rounds, **summaries}


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
    if experiment.data.dataset == SITES or (run / "site.json").exists() or (run / "deployment.json").exists():
        raise PfedlaError(
            f"{run} is of a deployment: the clients' data never come to the server, nobody can join here"
        )
    outline = Outline(
        shape=known.shape,
        classes=known.classes,
        num_examples=torch.zeros(len(known.clients), dtype=torch.int64),
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
    checkpoints = Checkpoints(run, experiment.identity(), say=say)
    state = load_last_state(checkpoints, method, len(known.clients), experiment.seed)
    joined = join(
        method, state.server, unseen, len(known.clients), experiment, after=state.round, rounds=rounds
    )
    result = {
        "algorithm": method.name,
        "data": str(data.resolve()),
        "name": folder.name,
        "clients": len(known.clients),
        "after_round": state.round,
        "rounds": joined.rounds,
        "rounds_alone": rounds,
        "seed": experiment.seed,
        "examples": {"train": len(unseen.train[0].y), "test": len(unseen.test[0].y), "split": split},
        "digest": digest_of(unseen.train[0], unseen.test[0]),
        "accuracy": joined.accuracies(),
        "traffic": asdict(joined.traffic),
    }
    layers = method.task.layers.names
    if joined.alphas is not None:
        result["alpha"] = dict(zip(layers, joined.alphas[-1].tolist(), strict=True))
    new_folder(folder, "give another --name")
    write_tensors(folder / "model.safetensors", joined.model)
    if (alphas := joined.alphas) is not None:
        metadata = {"layers": json.dumps(layers)}
        write_whole(folder / "alpha.safetensors", lambda file: save_file({"alpha": alphas}, file, metadata))
    write_text(
        folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    )  # last
    return folder, result
