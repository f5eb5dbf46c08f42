"""What clients send is checked here, for every algorithm and every engine, before anything uses it."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, Cohort, Failure, Payload, ServerState
from pfedla.core.layers import Layers, Params, is_finite, stack, take

NO_ANSWER, NOT_FINITE = Failure("no answer"), Failure("not finite")
MASK = "the mask of sent layers"


class Accepted(NamedTuple):
    """The clients whose uploads count, in the order of the cohort, everything stacked."""

    cohort: Cohort
    downloads: Payload  # what these clients were sent
    uploads: Payload
    training_loss: Tensor
    after_training: ClientMetrics
    num_bytes: int  # of all uploads that are well-formed, used or not


def accept(
    algorithm: Algorithm,
    server: ServerState,
    cohort: Cohort,
    downloads: Payload,
    answers: Sequence[object],
    norm_bound: float | None = None,
) -> tuple[Accepted, dict[int, Failure]]:
    """Return the answers that can be used, and for every other client of the cohort why its answer cannot."""
    sound, failures, num_bytes = dict[int, Answer](), dict[int, Failure](), 0  # both by row
    for row, answer in enumerate(answers):
        expected = algorithm.upload_like(downloads.rows(row))
        checked = answer if isinstance(answer, Failure) else check_answer(answer, expected)
        if isinstance(checked, Failure):
            failures[row] = checked
        else:
            sound[row] = checked
        if row in sound or checked == NOT_FINITE:
            num_bytes += int(payload_bytes(expected, algorithm.task.layers))
    if norm_bound is not None:
        starts = algorithm.starts(server, cohort, downloads)
        norms = {row: update_norm(answer.upload, take(starts, row)) for row, answer in sound.items()}
        for row, times in find_too_long(norms, norm_bound).items():
            del sound[row]
            failures[row] = Failure("norm too large", f"{times:.3g} times the median of the round")
    rows, used = torch.tensor(list(sound), dtype=torch.int64), list(sound.values())
    downloads = downloads.rows(rows) if failures else downloads  # a copy only if needed: they may be large
    came = [answer.upload for answer in used]
    sent = torch.stack([upload.sent for upload in came]) if used else downloads.sent
    uploads = Payload(stack([one.tensors for one in came]), sent, extras=stack([one.extras for one in came]))
    losses = torch.stack([answer.training_loss for answer in used]) if used else torch.empty(0)
    metrics = torch.tensor([(answer.accuracy, answer.loss) for answer in used], dtype=torch.float64).view(-1, 2)
    tests = ClientMetrics(*metrics.T)
    accepted = Accepted(
        cohort.only(rows), downloads, uploads=uploads, training_loss=losses, after_training=tests, num_bytes=num_bytes
    )
    return accepted, {int(cohort.ids[row]): failures[row] for row in sorted(failures)}


def check_answer(answer: object, expected: Payload) -> Answer | Failure:
    """Return the answer, or what is wrong with it. It is untrusted: it may be anything at all."""
    if not isinstance(answer, Answer) or not isinstance(answer.upload, Payload):
        return Failure("not an upload", f"it is a {type(getattr(answer, 'upload', answer)).__name__}")
    tensors, sent, extras = answer.upload
    pairs = ((tensors, expected.tensors), (extras, expected.extras), ({MASK: sent}, {MASK: expected.sent}))
    for found, wanted in pairs:
        if not isinstance(found, Mapping):
            return Failure("not an upload", f"its tensors are a {type(found).__name__}")
        if found.keys() != wanted.keys():
            names = [f"no {name}" for name in sorted(wanted.keys() - found.keys())]
            names += sorted(f"unknown {name!r:.60}" for name in found.keys() - wanted.keys())
            return Failure("wrong names", ", ".join(names[:3]))
        for name, due in wanted.items():
            came = found[name]
            if not isinstance(came, Tensor) or came.layout != torch.strided or came.device.type != "cpu":
                return Failure("not an upload", f"{name} is no plain tensor")
            for what in ("shape", "dtype"):
                if getattr(came, what) != getattr(due, what):
                    return Failure(f"wrong {what}", f"{name}: {getattr(came, what)}, not {getattr(due, what)}")
    if not torch.equal(sent, expected.sent):
        return Failure("wrong layers", f"sent {sent.int().tolist()}, expected {expected.sent.int().tolist()}")
    training, accuracy, loss = answer.training_loss, answer.accuracy, answer.loss
    if not isinstance(training, Tensor) or training.shape != () or not training.is_floating_point():
        return Failure("not an upload", "its training loss is no number")
    if not isinstance(accuracy, float) or not isinstance(loss, float) or not 0 <= accuracy <= 1:
        return Failure("not an upload", f"its accuracy is {accuracy!r:.40}, its loss {loss!r:.40}")
    if not (answer.finite and is_finite(tensors) and is_finite(extras)):
        return NOT_FINITE
    # In the server's order of names: sums over tensors must not depend on the order a client sends.
    upload = Payload({n: tensors[n] for n in expected.tensors}, sent, extras={n: extras[n] for n in expected.extras})
    return answer._replace(upload=upload.map(Tensor.detach))


def payload_bytes(payload: Payload, layers: Layers) -> Tensor:
    """Return the bytes that travel: of one client's payload, or of each client's if it is stacked."""
    clients = payload.sent.shape[:-1]
    total = torch.zeros(clients, dtype=torch.int64)
    for name, value in payload.tensors.items():
        total += payload.sent[..., layers.index[name]] * (math.prod(value.shape[len(clients) :]) * value.element_size())
    for value in payload.extras.values():
        total += math.prod(value.shape[len(clients) :]) * value.element_size()
    return total


def update_norm(upload: Payload, start: Params) -> float:
    """Return how far a client moved from its start; of tensors whose start is not known, their norm."""
    moving = {name: value.double() for name, value in upload.tensors.items() if value.is_floating_point()}
    return math.sqrt(sum(float((value - start.get(name, 0)).square().sum()) for name, value in moving.items()))


def find_too_long(norms: Mapping[int, float], bound: float) -> dict[int, float]:
    """Return the norms longer than `bound` medians, as multiples of the median."""
    left, too_long = sorted(norms, key=lambda row: (norms[row], row)), dict[int, float]()
    while len(left) > 1:
        # Without the longest, again and again: so the median does not depend on the outliers.
        median = statistics.median(norms[row] for row in left)
        if not norms[left[-1]] > bound * median > 0:  # a median of zero measures nothing
            break
        row = left.pop()
        too_long[row] = norms[row] / median
    return too_long
