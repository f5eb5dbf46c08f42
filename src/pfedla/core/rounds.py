"""The round loop, the same for every algorithm and every engine, and the bytes it sends."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.core.contracts import Algorithm, ClientMetrics, Cohort, Engine, Failure, Payload, ServerState, generator
from pfedla.core.layers import Layers
from pfedla.core.uploads import accept, payload_bytes

EVALUATION_CHUNK = 64  # clients whose personal models are in memory at once
MIB = 2**20
Evaluated = tuple[ClientMetrics, dict[int, Failure], int]  # metrics, failures by client, bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes so far: the tensors of the sent layers, and the extras. Evaluation is counted apart."""

    down_bytes: int = 0
    up_bytes: int = 0
    evaluation_bytes: int = 0

    def plus(self, *, down: int = 0, up: int = 0, evaluation: int = 0) -> "Traffic":
        return Traffic(self.down_bytes + down, self.up_bytes + up, self.evaluation_bytes + evaluation)


class Round(NamedTuple):
    round: int  # 1 is the first
    cohort: Cohort  # the clients whose uploads were accepted
    sent: Tensor  # [cohort, layers]: what each of them was sent
    failures: dict[int, Failure]  # by client: no answer, or an answer that cannot be used
    training_loss: Tensor
    after_training: ClientMetrics
    evaluation: ClientMetrics | None  # the personal models of all clients, if this round was evaluated
    evaluation_failures: dict[int, Failure]  # by client
    traffic: Traffic  # so far
    evaluation_bytes: int  # of the traffic, what evaluating this round took
    seconds: dict[str, float]  # by phase, this round
    server: ServerState  # valid until the next round, which may write into it


def sample_cohort(num_examples: Tensor, round: int, participation: float, seed: int) -> Cohort:
    """Draw a random share of the clients, at least one, in ascending order."""
    order = torch.randperm(len(num_examples), generator=generator(seed, "cohort", round))
    ids = order[: num_participants(len(num_examples), participation)].sort().values
    return everyone(num_examples, round, seed).only(ids)


def num_participants(num_clients: int, participation: float) -> int:
    return max(1, int(participation * num_clients + 0.5))


def everyone(num_examples: Tensor, round: int, seed: int) -> Cohort:
    return Cohort(round=round, seed=seed, ids=torch.arange(len(num_examples)), num_examples=num_examples)


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def run_rounds(
    algorithm: Algorithm,
    engine: Engine,
    num_examples: Tensor,
    server: ServerState,
    *,
    rounds: range,
    participation: float,
    evaluate_every: int,
    seed: int,
    traffic: Traffic | None = None,
    norm_bound: float | None = None,
) -> Iterator[Round]:
    """Run `rounds` from a server state, one at a time. The last is always evaluated."""
    traffic = traffic or Traffic()
    for number in rounds:
        seconds = dict.fromkeys(("train", "server", "evaluate"), 0.0)
        with timed(seconds, "server"):
            cohort = sample_cohort(num_examples, number, participation, seed)
            downloads = algorithm.download(server, cohort)
        with timed(seconds, "train"):
            answers = engine.train(cohort, downloads)
        with timed(seconds, "server"):
            accepted, failures = accept(algorithm, server, cohort, downloads, answers, norm_bound)
            down = int(payload_bytes(downloads, algorithm.task.layers).sum())
            if len(accepted.cohort.ids):
                server = algorithm.aggregate(server, accepted.cohort, accepted.downloads, accepted.uploads)
            engine.commit(accepted.cohort.ids)
        evaluation, evaluation_failures, evaluation_bytes = None, dict[int, Failure](), 0
        if number % evaluate_every == 0 or number == rounds.stop - 1:
            with timed(seconds, "evaluate"):
                following = everyone(num_examples, number + 1, seed)
                evaluation, evaluation_failures, evaluation_bytes = evaluate_all(algorithm, engine, server, following)
        traffic = traffic.plus(down=down, up=accepted.num_bytes, evaluation=evaluation_bytes)
        yield Round(
            round=number,
            cohort=accepted.cohort,
            sent=accepted.downloads.sent,
            failures=failures,
            training_loss=accepted.training_loss,
            after_training=accepted.after_training,
            evaluation=evaluation,
            evaluation_failures=evaluation_failures,
            traffic=traffic,
            evaluation_bytes=evaluation_bytes,
            seconds=seconds,
            server=server,
        )


def in_chunks(algorithm: Algorithm, server: ServerState, cohort: Cohort) -> Iterator[tuple[Cohort, Payload]]:
    """Yield what the cohort would be sent now, a few clients at a time, to bound the memory."""
    for rows in torch.split(torch.arange(len(cohort.ids)), EVALUATION_CHUNK):
        chunk = cohort.only(rows)
        yield chunk, algorithm.download(server, chunk)


def evaluate_all(algorithm: Algorithm, engine: Engine, server: ServerState, cohort: Cohort) -> Evaluated:
    """Test the personal models that the cohort would get now."""
    parts, failures, num_bytes = list[ClientMetrics](), dict[int, Failure](), 0
    for chunk, downloads in in_chunks(algorithm, server, cohort):
        num_bytes += int(payload_bytes(downloads, algorithm.task.layers).sum())
        metrics, failed = engine.evaluate(chunk, downloads)
        parts.append(metrics)
        failures |= failed
    return ClientMetrics(*map(torch.cat, zip(*parts, strict=True))), failures, num_bytes


def summarise(accuracies: Tensor) -> dict[str, Any]:
    """Return mean, standard deviation, 10th percentile and worst over the clients that have a value."""
    per_client = [None if math.isnan(value) else value for value in accuracies.tolist()]
    numbers: dict[str, Any] = dict.fromkeys(("mean", "std", "p10", "worst"))
    if known := [value for value in per_client if value is not None]:
        values = (np.mean(known), np.std(known), np.quantile(known, 0.1), np.min(known))
        numbers = dict(zip(numbers, map(float, values), strict=True))
    return {**numbers, "per_client": per_client}


def finite_mean(values: Tensor) -> float | None:
    """Average over the clients that have a value, as `summarise` does; None where there is nothing finite."""
    mean = values.nanmean().item() if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def plan_traffic(layers: Layers, participants: int, rounds: int, retained: list[int]) -> Traffic:
    """Return the traffic of a run that always retains the same layers (Table 3): only downloads shrink."""
    messages, model = participants * rounds, sum(layers.num_parameters)
    kept = sum(layers.num_parameters[layer] for layer in set(retained))
    return Traffic(down_bytes=4 * messages * (model - kept), up_bytes=4 * messages * model)  # float32
