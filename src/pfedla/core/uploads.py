"""What clients send is checked here, for every algorithm and every engine, before anything uses it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.core.contracts import (
    Algorithm,
    Answer,
    ClientMetrics,
    Cohort,
    Failure,
    Params,
    Payload,
    ServerState,
)
from pfedla.core.layers import is_finite, stack, take

NO_ANSWER = Failure("no answer")


class Accepted(NamedTuple):
    """Those whose uploads count, in the order of the cohort, all stacked alike."""

    cohort: Cohort
    downloads: Payload  # what these clients were sent
    uploads: Payload
    training_loss: Tensor
    after_training: ClientMetrics


def accept(
    algorithm: Algorithm, server: ServerState, cohort: Cohort, downloads: Payload, answers: Sequence[Answer | Failure],
    norm_bound: float | None = None,
) -> tuple[Accepted, dict[int, Failure]]:  # fmt: skip
    """The answers that can be used, and for every other client of the cohort why its own cannot."""
    sound: dict[int, Answer] = {}  # by row
    failures: dict[int, Failure] = {}
    for row, answer in enumerate(answers):
        expected = algorithm.upload_like(downloads.rows(row))
        if isinstance(answer, Failure):
            failures[row] = answer
        elif (fault := fault_of(answer, expected)) is not None:
            failures[row] = fault
        else:
            # In the server's order of names, not the client's: sums over tensors must not depend on what a client sends.
            sound[row] = answer._replace(upload=_in_order(answer.upload, expected))
    if norm_bound is not None:
        starts = algorithm.starts(server, cohort, downloads)
        norms = {row: update_norm(answer.upload, take(starts, row)) for row, answer in sound.items()}
        for row, times in too_long(norms, norm_bound).items():
            del sound[row]
            failures[row] = Failure("norm too large", f"{times:.3g} times the median of the round")
    rows = torch.tensor(sorted(sound), dtype=torch.int64)
    kept = [sound[row] for row in rows.tolist()]
    accepted = Accepted(
        cohort.only(rows),
        downloads if len(kept) == len(answers) else downloads.rows(rows),
        Payload(
            stack([answer.upload.tensors for answer in kept]),
            torch.stack([answer.upload.sent for answer in kept]) if kept else downloads.sent[:0],
            stack([answer.upload.extras for answer in kept]),
        ),
        torch.stack([answer.training_loss for answer in kept]) if kept else torch.empty(0),
        ClientMetrics(*(torch.tensor(column, dtype=torch.float64) for column in _metrics(kept))),
    )
    ids = cohort.ids.tolist()
    return accepted, {ids[row]: failures[row] for row in sorted(failures)}


def fault_of(answer: Answer, expected: Payload) -> Failure | None:
    """What is wrong with an upload, or None. It may be anything at all: it came from outside."""
    if not isinstance(answer, Answer):
        return Failure("not an upload", f"it is a {type(answer).__name__}")
    upload = answer.upload
    if not isinstance(upload, Payload) or not isinstance(upload.sent, Tensor):
        return Failure("not an upload", f"it is a {type(upload).__name__}")
    for found, wanted in ((upload.tensors, expected.tensors), (upload.extras, expected.extras)):
        if not isinstance(found, Mapping):
            return Failure("not an upload", f"its tensors are a {type(found).__name__}")
        if found.keys() != wanted.keys():
            missing, unknown = wanted.keys() - found.keys(), found.keys() - wanted.keys()
            names = [*(f"no {name}" for name in sorted(missing)), *sorted(f"unknown {name!r:.60}" for name in unknown)]
            return Failure("wrong names", ", ".join(names[:3]))
        for name, value in wanted.items():
            if (fault := _fault_of_tensor(name, found[name], value)) is not None:
                return fault
    training = answer.training_loss
    if not isinstance(training, Tensor) or training.shape != () or not training.is_floating_point():
        return Failure("not an upload", "its training loss is no number")
    if not isinstance(answer.accuracy, float) or not 0 <= answer.accuracy <= 1 or not isinstance(answer.loss, float):
        return Failure("not an upload", f"its accuracy is {answer.accuracy!r:.40}, its loss {answer.loss!r:.40}")
    if (fault := _fault_of_tensor("the mask of sent layers", upload.sent, expected.sent)) is not None:
        return fault
    if not torch.equal(upload.sent, expected.sent):
        return Failure("wrong layers", f"sent {upload.sent.int().tolist()}, expected {expected.sent.int().tolist()}")
    if not answer.finite or not is_finite(upload.tensors) or not is_finite(upload.extras):
        return Failure("not finite")
    return None


def _fault_of_tensor(name: str, found: object, wanted: Tensor) -> Failure | None:
    if not isinstance(found, Tensor) or found.layout != torch.strided or found.device.type != "cpu":
        return Failure("not an upload", f"{name} is no plain tensor")
    if found.shape != wanted.shape:
        return Failure("wrong shape", f"{name} is {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if found.dtype != wanted.dtype:
        return Failure("wrong dtype", f"{name} is {found.dtype}, not {wanted.dtype}")
    return None


def _in_order(upload: Payload, expected: Payload) -> Payload:
    tensors, extras = (
        {name: found[name].detach() for name in wanted}
        for found, wanted in ((upload.tensors, expected.tensors), (upload.extras, expected.extras))
    )
    return Payload(tensors, upload.sent, extras)


def _metrics(kept: Sequence[Answer]) -> tuple[list[float], list[float]]:
    return [answer.accuracy for answer in kept], [answer.loss for answer in kept]


def update_norm(upload: Payload, start: Params) -> float:
    """How far a client moved from its start; where that is not known, how long its upload is."""
    squares = 0.0
    for name, value in upload.tensors.items():
        if value.is_floating_point():
            moved = value.double()  # double: a difference of large numbers may not overflow
            if name in start:
                moved = moved - start[name]
            squares += float(moved.square().sum())
    return math.sqrt(squares)


def too_long(norms: Mapping[int, float], bound: float) -> dict[int, float]:
    """Those longer than `bound` medians, and by how much. The longest goes first and the median is taken anew, so that those
    who stay are those who would stay if those who go had not been there at all."""
    left = sorted(norms, key=lambda row: (norms[row], row))
    gone: dict[int, float] = {}
    while len(left) > 1:
        median = float(torch.tensor([norms[row] for row in left], dtype=torch.float64).quantile(0.5))
        if not norms[left[-1]] > bound * median > 0:  # nobody can be measured against those who do not move at all
            break
        row = left.pop()
        gone[row] = norms[row] / median
    return gone


def count_failures(counts: dict[int, dict[str, int]], failures: Mapping[int, Failure]) -> None:
    """Add a round's failures to `counts`: client -> reason -> how often."""
    for client, failure in failures.items():
        reasons = counts.setdefault(client, {})
        reasons[failure.reason] = reasons.get(failure.reason, 0) + 1
