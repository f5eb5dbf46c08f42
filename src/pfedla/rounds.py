"""The round loop: the same for every algorithm and every engine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.communication import Traffic, payload_bytes
from pfedla.contracts import Algorithm, ClientMetrics, Cohort, Engine, Payload, ServerState, Trained
from pfedla.seeds import generator
from pfedla.tree import finite_rows

EVALUATION_CHUNK = 64  # clients whose personal models are made at once


class Round(NamedTuple):
    """What happened in a round, and the server's state after it."""

    round: int  # 1 is the first
    cohort: Cohort  # who took part and was accepted
    sent: Tensor  # [cohort, layers]: what each of them was sent
    refused: Tensor  # ids that came back with numbers that are not finite
    training_loss: Tensor
    after_training: ClientMetrics
    evaluation: ClientMetrics | None  # the personal models of all clients, if this round was evaluated
    traffic: Traffic  # so far
    seconds: dict[str, float]  # by phase, this round
    server: ServerState


def sample_cohort(num_examples: Tensor, round: int, participation: float, seed: int) -> Cohort:
    """A random share of the clients, at least one, ascending."""
    count = participants(len(num_examples), participation)
    ids = torch.randperm(len(num_examples), generator=generator(seed, "cohort", round))[:count].sort().values
    return Cohort(round, seed, ids, num_examples[ids])


def participants(num_clients: int, participation: float) -> int:
    return max(1, int(participation * num_clients + 0.5))


def everyone(num_examples: Tensor, round: int, seed: int) -> Cohort:
    return Cohort(round, seed, torch.arange(len(num_examples)), num_examples)


@dataclass
class Stopwatch:
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("train", "server", "evaluate"), 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


def run_rounds(
    algorithm: Algorithm, engine: Engine, num_examples: Tensor, server: ServerState, *, rounds: range,
    participation: float, evaluate_every: int, seed: int, traffic: Traffic | None = None,
) -> Iterator[Round]:  # fmt: skip
    """Play `rounds` (of which the last is always evaluated) from a server state, one at a time."""
    traffic = traffic or Traffic()
    layers = algorithm.task.layers
    for number in rounds:
        watch = Stopwatch()
        with watch.phase("server"):
            cohort = sample_cohort(num_examples, number, participation, seed)
            downloads = algorithm.download(server, cohort)
        with watch.phase("train"):
            trained = engine.train(cohort, downloads)
        with watch.phase("server"):
            traffic = traffic.plus(
                down=int(payload_bytes(downloads, layers).sum()), up=int(payload_bytes(trained.uploads, layers).sum())
            )
            refused, trained, downloads = refuse_bad(trained, downloads)
            if len(trained.cohort.ids):
                server = algorithm.aggregate(server, trained.cohort, downloads, trained.uploads)
            engine.commit(trained.cohort.ids)
        evaluation = None
        if number % evaluate_every == 0 or number == rounds.stop - 1:
            with watch.phase("evaluate"):
                evaluation, sent_bytes = evaluate_all(algorithm, engine, server, everyone(num_examples, number + 1, seed))
                traffic = traffic.plus(evaluation=sent_bytes)
        yield Round(
            number, trained.cohort, downloads.sent, refused, trained.training_loss, trained.after_training, evaluation, traffic,
            watch.seconds, server,
        )  # fmt: skip


def refuse_bad(trained: Trained, downloads: Payload) -> tuple[Tensor, Trained, Payload]:
    """Leave out the clients that came back with numbers that are not finite: (their ids, the others, their downloads)."""
    finite = trained.finite
    for tensors in (trained.uploads.tensors, trained.uploads.extras):
        finite = finite & finite_rows(tensors, len(finite))
    if finite.all():
        return trained.cohort.ids[:0], trained, downloads
    accepted = Trained(
        trained.cohort.only(finite), trained.uploads.rows(finite), trained.training_loss[finite],
        ClientMetrics(*(metric[finite] for metric in trained.after_training)), trained.finite[finite],
    )  # fmt: skip
    return trained.cohort.ids[~finite], accepted, downloads.rows(finite)


def in_chunks(algorithm: Algorithm, server: ServerState, cohort: Cohort) -> Iterator[tuple[Cohort, Payload]]:
    """What the cohort would be sent now, a few clients at a time: not everybody's model need be in memory twice."""
    for rows in torch.split(torch.arange(len(cohort.ids)), EVALUATION_CHUNK):
        chunk = cohort.only(rows)
        yield chunk, algorithm.download(server, chunk)


def evaluate_all(algorithm: Algorithm, engine: Engine, server: ServerState, cohort: Cohort) -> tuple[ClientMetrics, int]:
    """The personal models that the cohort would get now, and the bytes it takes to send them."""
    parts, sent_bytes = [], 0
    for chunk, downloads in in_chunks(algorithm, server, cohort):
        sent_bytes += int(payload_bytes(downloads, algorithm.task.layers).sum())
        parts.append(engine.evaluate(chunk, downloads))
    return ClientMetrics(*(torch.cat(values) for values in zip(*parts, strict=True))), sent_bytes
