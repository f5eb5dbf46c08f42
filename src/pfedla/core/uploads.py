"""What clients send is checked here, for every algorithm and every engine, before anything uses it."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, Cohort, Failure, Payload, ServerState
from pfedla.core.layers import Params, is_finite, stack, take

NO_ANSWER = Failure("no answer")


class Accepted(NamedTuple):
    """The clients whose uploads count, in the order of the cohort, everything stacked."""

    cohort: Cohort
    downloads: Payload  # what these clients were sent
    uploads: Payload
    training_loss: Tensor
    after_training: ClientMetrics


def accept(
    algorithm: Algorithm,
    server: ServerState,
    cohort: Cohort,
    downloads: Payload,
    answers: Sequence[Answer | Failure],
    norm_bound: float | None = None,
) -> tuple[Accepted, dict[int, Failure]]:
    """Return the answers that can be used, and for every other client of the cohort why its answer cannot."""
    sound: dict[int, Answer] = {}  # by row
    failures: dict[int, Failure] = {}
    for row, answer in enumerate(answers):
        expected = algorithm.upload_like(downloads.rows(row))
        fault = answer if isinstance(answer, Failure) else find_fault(answer, expected)
        if fault is not None:
            failures[row] = fault
        elif isinstance(answer, Answer):
            # In the server's order of names: sums over tensors must not depend on the order a client sends.
            sound[row] = answer._replace(upload=_in_order(answer.upload, expected))
    if norm_bound is not None:
        starts = algorithm.starts(server, cohort, downloads)
        norms = {row: update_norm(answer.upload, take(starts, row)) for row, answer in sound.items()}
        for row, times in find_too_long(norms, norm_bound).items():
            del sound[row]
            failures[row] = Failure("norm too large", f"{times:.3g} times the median of the round")
    rows = torch.tensor(sorted(sound), dtype=torch.int64)
    downloads = downloads.rows(rows) if failures else downloads  # a copy only if needed: they may be large
    accepted = _stack_answers(cohort.only(rows), downloads, [sound[row] for row in rows.tolist()])
    ids = cohort.ids.tolist()
    return accepted, {ids[row]: failures[row] for row in sorted(failures)}


def _stack_answers(cohort: Cohort, downloads: Payload, answers: Sequence[Answer]) -> Accepted:
    uploads = Payload(
        stack([answer.upload.tensors for answer in answers]),
        torch.stack([answer.upload.sent for answer in answers]) if answers else downloads.sent,
        extras=stack([answer.upload.extras for answer in answers]),
    )
    metrics = ([answer.accuracy for answer in answers], [answer.loss for answer in answers])
    return Accepted(
        cohort=cohort,
        downloads=downloads,
        uploads=uploads,
        training_loss=torch.stack([answer.training_loss for answer in answers]) if answers else torch.empty(0),
        after_training=ClientMetrics(*(torch.tensor(column, dtype=torch.float64) for column in metrics)),
    )


def find_fault(answer: Answer, expected: Payload) -> Failure | None:
    """Return what is wrong with an upload, or None. It is untrusted: it may be anything at all."""
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
            names = [*(f"no {name}" for name in sorted(missing))]
            names += sorted(f"unknown {name!r:.60}" for name in unknown)
            return Failure("wrong names", ", ".join(names[:3]))
        for name, value in wanted.items():
            if (fault := _find_fault_of_tensor(name, found[name], value)) is not None:
                return fault
    training = answer.training_loss
    if not isinstance(training, Tensor) or training.shape != () or not training.is_floating_point():
        return Failure("not an upload", "its training loss is no number")
    numbers = isinstance(answer.accuracy, float) and isinstance(answer.loss, float)
    if not numbers or not 0 <= answer.accuracy <= 1:
        return Failure("not an upload", f"its accuracy is {answer.accuracy!r:.40}, its loss {answer.loss!r:.40}")
    if (fault := _find_fault_of_tensor("the mask of sent layers", upload.sent, expected.sent)) is not None:
        return fault
    if not torch.equal(upload.sent, expected.sent):
        sent, due = (mask.int().tolist() for mask in (upload.sent, expected.sent))
        return Failure("wrong layers", f"sent {sent}, expected {due}")
    if not answer.finite or not is_finite(upload.tensors) or not is_finite(upload.extras):
        return Failure("not finite")
    return None


def _find_fault_of_tensor(name: str, found: object, wanted: Tensor) -> Failure | None:
    if not isinstance(found, Tensor) or found.layout != torch.strided or found.device.type != "cpu":
        return Failure("not an upload", f"{name} is no plain tensor")
    if found.shape != wanted.shape:
        return Failure("wrong shape", f"{name} is {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if found.dtype != wanted.dtype:
        return Failure("wrong dtype", f"{name} is {found.dtype}, not {wanted.dtype}")
    return None


def _in_order(upload: Payload, expected: Payload) -> Payload:
    tensors = {name: upload.tensors[name].detach() for name in expected.tensors}
    return Payload(tensors, upload.sent, extras={name: upload.extras[name].detach() for name in expected.extras})


def update_norm(upload: Payload, start: Params) -> float:
    """Return how far a client moved from its start; of tensors whose start is not known, their norm."""
    squares = 0.0
    for name, value in upload.tensors.items():
        if value.is_floating_point():
            moved = value.double()  # double: a difference of large numbers may not overflow
            if name in start:
                moved = moved - start[name]
            squares += float(moved.square().sum())
    return math.sqrt(squares)


def find_too_long(norms: Mapping[int, float], bound: float) -> dict[int, float]:
    """Return the norms longer than `bound` medians, as multiples of the median.

    The longest is removed first and the median computed again: the result does not depend on the outliers.
    """
    left = sorted(norms, key=lambda row: (norms[row], row))
    too_long: dict[int, float] = {}
    while len(left) > 1:
        median = float(torch.tensor([norms[row] for row in left], dtype=torch.float64).quantile(0.5))
        if not norms[left[-1]] > bound * median > 0:  # a median of zero measures nothing
            break
        row = left.pop()
        too_long[row] = norms[row] / median
    return too_long
