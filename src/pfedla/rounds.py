"""The round loop: the same for every algorithm and every engine."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.communication import Traffic, answer_bytes, payload_bytes
from pfedla.contracts import Algorithm, ClientMetrics, Cohort, Engine, Failure, Payload, ServerState
from pfedla.seeds import generator
from pfedla.uploads import accept

EVALUATION_CHUNK = 64  # clients whose personal models are made at once


class Round(NamedTuple):
    """What happened in a round, and the server's state after it."""

    round: int  # 1 is the first
    cohort: Cohort  # who took part and was accepted
    sent: Tensor  # [cohort, layers]: what each of them was sent
    failures: dict[int, Failure]  # by client: those of the cohort drawn who did not answer, or not with what can be used
    training_loss: Tensor
    after_training: ClientMetrics
    evaluation: ClientMetrics | None  # the personal models of all clients, if this round was evaluated
    traffic: Traffic  # so far
    evaluation_bytes: int  # of the traffic, what evaluating this round took
    seconds: dict[str, float]  # by phase, this round
    server: ServerState  # until the next round is asked for, which may write into it


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
    seconds: dict[str, float]  # by phase; added to

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def run_rounds(
    algorithm: Algorithm, engine: Engine, num_examples: Tensor, server: ServerState, *, rounds: range,
    participation: float, evaluate_every: int, seed: int, traffic: Traffic | None = None, norm_bound: float | None = None,
) -> Iterator[Round]:  # fmt: skip
    """Play `rounds` (of which the last is always evaluated) from a server state, one at a time."""
    traffic = traffic or Traffic()
    layers = algorithm.task.layers
    for number in rounds:
        watch = Stopwatch(dict.fromkeys(("train", "server", "evaluate"), 0.0))
        with watch.phase("server"):
            cohort = sample_cohort(num_examples, number, participation, seed)
            downloads = algorithm.download(server, cohort)
        with watch.phase("train"):
            answers = engine.train(cohort, downloads)
        with watch.phase("server"):
            accepted, failures = accept(algorithm, server, cohort, downloads, answers, norm_bound)
            traffic = traffic.plus(down=int(payload_bytes(downloads, layers).sum()), up=sum(map(answer_bytes, answers)))
            if len(accepted.cohort.ids):
                server = algorithm.aggregate(server, accepted.cohort, accepted.downloads, accepted.uploads)
            engine.commit(accepted.cohort.ids)
        evaluation, evaluation_bytes = None, 0
        if number % evaluate_every == 0 or number == rounds.stop - 1:
            with watch.phase("evaluate"):
                following = everyone(num_examples, number + 1, seed)
                evaluation, evaluation_bytes = evaluate_all(algorithm, engine, server, following)
                traffic = traffic.plus(evaluation=evaluation_bytes)
        yield Round(
            number, accepted.cohort, accepted.downloads.sent, failures, accepted.training_loss, accepted.after_training,
            evaluation, traffic, evaluation_bytes, watch.seconds, server,
        )  # fmt: skip


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
