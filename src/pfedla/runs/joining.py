"""A client that comes when the run is over: it gets its personal model from the server's state, and changes nobody else's.

The newcomer gets a place in a copy of the state (Algorithm.admitted) and plays a few rounds there as a cohort of its own:
what the server keeps of it, and what it keeps itself, is learned; everything else stays as it was, bit for bit.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pfedla.algorithms import check_joining
from pfedla.algorithms.local import Local
from pfedla.runs.checkpoint import Checkpoints, Progress
from pfedla.core.rounds import Traffic, answer_bytes, payload_bytes
from pfedla.core.contracts import Algorithm, ClientState, Cohort, Params, Recalibrate, ServerState
from pfedla.data.federation import Federation, Outline, digest_of
from pfedla.engines.client import Client, moved
from pfedla.engines.simulated import TRAINED, attempt, own_row, usable_device
from pfedla.engines.threaded import for_one
from pfedla.core.errors import PfedlaError
from pfedla.runs.experiment import SITES, Experiment, assembled
from pfedla.core.files import safe_name, write_tensors, write_text, write_whole
from pfedla.runs.personal import JOINED, newcomer_of, read_run
from pfedla.runs.folder import CHECKPOINTS, RESULT, new_folder
from pfedla.runs.simulation import SNAPSHOT_NUMBERS, snapshot
from pfedla.core.layers import copies
from pfedla.core.uploads import accept

ROUNDS = 10


@dataclass(frozen=True)
class Joined:
    """What became of a newcomer. Accuracies are fractions, on its own test data."""

    rounds: int  # that it played: none where there is nothing to learn
    before: float  # of the personal model that it gets to begin with
    after: float  # of the one it has at the end
    after_training: float | None  # of the model right after its last local training; None if it never trained
    alone: float  # of a model trained for all the rounds that were asked for on its own data alone
    traffic: Traffic
    alphas: Tensor | None  # [rounds + 1, layers, clients + 1]: its own row of alpha; it is the last sender
    model: Params  # personal

    def accuracies(self) -> dict[str, float | None]:
        return {key: getattr(self, key) for key in ("before", "after", "after_training", "alone")}


@dataclass(frozen=True)
class Terms:
    """How a newcomer's rounds are played: as the run's were."""

    after: int  # the run's last round
    seed: int
    rounds: int = ROUNDS
    device: str = "cpu"
    recalibrate: Recalibrate = "unsampled"

    @classmethod
    def of(cls, experiment: Experiment, progress: Progress, rounds: int = ROUNDS) -> "Terms":
        return cls(progress.round, experiment.seed, rounds, experiment.engine.device, experiment.recalibrate)


def join(method: Algorithm, server: ServerState, newcomer: Federation, num_clients: int, terms: Terms) -> Joined:
    """Take one client into a run of `num_clients`; `server` is the run's state and stays as it is."""
    check_joining(method)
    with _one_thread():
        found = _played(method, server, newcomer, num_clients, terms)
        local = Local(task=method.task, training=method.training)
        return replace(found, alone=_played(local, {}, newcomer, num_clients, terms).after)


def _played(method: Algorithm, before: ServerState, newcomer: Federation, place: int, terms: Terms) -> Joined:
    device = usable_device(terms.device)
    task = for_one(method.task.to(device), newcomer.shape, method.training, compile=False)
    running = replace(method, task=task)
    client = Client(place, newcomer.train[0], newcomer.test[0], newcomer, running, device, terms.recalibrate)
    ids, num_examples = torch.tensor([place]), newcomer.num_examples
    admitted = method.admitted(before, terms.seed)
    shared = {
        group: {name: value for name, value in part.items() if value.shape == before[group][name].shape}
        for group, part in admitted.items()
    }
    server = _restored(admitted, shared)
    state: ClientState = {name: value.to(device) for name, value in running.init_newcomer(server).items()}
    learns = bool(state) or any(part.keys() != shared[group].keys() for group, part in server.items())

    def personal(number: int, trained: bool) -> tuple[Params, float]:
        cohort = Cohort(number, terms.seed, ids, num_examples)
        download = moved(own_row(method.download(server, cohort), 0), device)
        model = client.personal(state, trained, download, cohort)
        return {name: value.cpu() for name, value in model.items()}, client.metrics(client.tested(model))[0]

    traffic, alphas, after_training = Traffic(), _alpha(method, server, place), None
    _, at_first = personal(terms.after + 1, trained=False)
    rounds = range(terms.after + 1, terms.after + 1 + (terms.rounds if learns else 0))
    for number in rounds:
        cohort = Cohort(number, terms.seed, ids, num_examples)
        downloads = method.download(server, cohort)
        outcome = attempt(client.update, state, moved(own_row(downloads, 0), device), cohort)
        if isinstance(outcome, Exception):
            raise PfedlaError(f"the newcomer cannot train: {type(outcome).__name__}: {outcome}".splitlines()[0]) from outcome
        accepted, failures = accept(method, server, cohort, downloads, [outcome[1]])
        for failure in failures.values():
            hint = "; are its examples in the scale of the run's?" if failure.reason == "not finite" else ""
            raise PfedlaError(f"the newcomer's upload cannot be used: {failure.reason} {failure.detail}".strip() + hint)
        state, answer = outcome
        server = _restored(method.aggregate(server, cohort, accepted.downloads, accepted.uploads), shared)
        after_training = answer.accuracy
        traffic = traffic.plus(down=int(payload_bytes(downloads, method.task.layers).sum()), up=answer_bytes(answer))
        alphas += _alpha(method, server, place)
    _check_untouched(method, before, server)
    model, at_last = personal(rounds.stop, trained=len(rounds) > 0)
    return Joined(
        len(rounds), at_first, at_last, after_training, at_last, traffic, torch.stack(alphas) if alphas else None, model
    )


def _restored(server: ServerState, shared: ServerState) -> ServerState:
    """`server` with what belongs to all as it was; copies, because a round may write into what it is given."""
    return {group: part | {name: value.clone() for name, value in shared[group].items()} for group, part in server.items()}


def _alpha(method: Algorithm, server: ServerState, place: int) -> list[Tensor]:
    """The newcomer's row, in a list; nothing if the method has no alpha, or too large a one."""
    if (place + 1) * len(method.task.layers) * (place + 1) > SNAPSHOT_NUMBERS:
        return []
    alpha = method.alpha(server)
    return [] if alpha is None else [alpha[place].clone()]


def _check_untouched(method: Algorithm, before: ServerState, after: ServerState) -> None:
    for group, part in before.items():
        for name, value in part.items():
            now = after[group][name][tuple(map(slice, value.shape))]
            # What belongs to all was put back after every round, to what it was when the newcomer was admitted.
            if after[group][name].shape != value.shape and not torch.equal(now, value):
                raise PfedlaError(f"{method.name} has changed what is another client's ({group}, {name}); the join is dropped")


@contextmanager
def _one_thread() -> Iterator[None]:
    """As in the engines: sums must not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def last_state(checkpoints: Checkpoints, method: Algorithm, num_clients: int, seed: int) -> Progress:
    """Where a run ended, from its newest checkpoint."""
    fresh = Progress(method.init_server(num_clients, seed), torch.full((num_clients,), torch.nan, dtype=torch.float64))
    snapshot(fresh, method)
    clients = copies(method.init_client(), num_clients) | {TRAINED: torch.zeros(num_clients, dtype=torch.bool)}
    found = checkpoints.newest(fresh, clients)
    if found is None:
        raise PfedlaError(
            f"{checkpoints.folder} holds no checkpoint any more, and with it the server's state that a newcomer joins is gone; "
            "play the run again, and keep the folder"
        )
    return found[0]


def join_run(
    run: Path, data: Path, *, rounds: int = ROUNDS, name: str | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[Path, dict[str, Any]]:
    """Take the client whose examples are in `data` into a finished run; returns its folder, and what its result.json holds."""
    experiment, known = read_run(run)
    if experiment.data.dataset == SITES or (run / "site.json").exists() or (run / "deployment.json").exists():
        raise PfedlaError(f"{run} is of a deployment, whose clients' data never come to the server: nobody can join it here")
    outline = Outline(
        known.shape, known.classes, torch.zeros(len(known.clients), dtype=torch.int64), known.mean, known.std, known.clients
    )
    method = assembled(experiment, outline).algorithm
    check_joining(method)
    newcomer, split = newcomer_of(data, experiment, known)
    folder = run / JOINED / safe_name(name or newcomer.names[0])
    if folder.exists():
        raise PfedlaError(f"{folder} exists already and is never overwritten; give another --name")
    checkpoints = Checkpoints(run / CHECKPOINTS, experiment.numbers(), say)
    progress = last_state(checkpoints, method, len(known.clients), experiment.seed)
    terms = Terms.of(experiment, progress, rounds)
    joined = join(method, progress.server, newcomer, len(known.clients), terms)
    result = {
        "algorithm": method.name, "data": str(data.resolve()), "name": folder.name, "clients": len(known.clients),
        "after_round": terms.after, "rounds": joined.rounds, "rounds_alone": rounds, "seed": terms.seed,
        "examples": {"train": len(newcomer.train[0].y), "test": len(newcomer.test[0].y), "split": split},
        "digest": digest_of(newcomer.train[0], newcomer.test[0]),
        "accuracy": joined.accuracies(), "traffic": asdict(joined.traffic),
    }  # fmt: skip
    if joined.alphas is not None:
        result["alpha"] = dict(zip(method.task.layers.names, joined.alphas[-1].tolist(), strict=True))
    _write(new_folder(folder, "give another --name"), result, joined, method.task.layers.names)
    return folder, result


def _write(folder: Path, result: dict[str, Any], joined: Joined, layers: tuple[str, ...]) -> None:
    write_tensors(folder / "model.safetensors", joined.model)
    if (alphas := joined.alphas) is not None:
        metadata = {"layers": json.dumps(layers)}
        write_whole(folder / "alpha.safetensors", lambda file: save_file({"alpha": alphas}, file, metadata))
    write_text(folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")  # last
