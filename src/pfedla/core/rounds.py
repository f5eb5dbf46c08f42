"""The round loop, the same for every algorithm and engine, and the checks of what clients send."""

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, TypeGuard

import numpy as np
import torch
from torch import Tensor

from pfedla.core import codecs
from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, Cohort, Engine, Failure, Payload, ServerState
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.layers import Layers, Params, is_finite, stack, take
from pfedla.core.settings import UploadSettings

NO_ANSWER, NOT_FINITE, TOO_LARGE, TOO_LONG = map(
    Failure, ("no answer", "not finite", "values too large", "norm too large")
)
DIVERGED = {NOT_FINITE.reason, TOO_LARGE.reason, TOO_LONG.reason}  # what an honest client is refused for
LARGEST = 65504.0  # float16's: no trained parameter is honestly beyond it; nor a statistic (a variance) its square
REMEMBERED = 5  # accepted updates per client whose lengths are kept
MASK = "the mask of sent layers"
EVALUATION_CHUNK = 64  # clients whose personal models are in memory at once
MIB = 2**20
LOST = 0.1  # of what the score has gained since its first value: with more lost, a round is no longer good
UNUSUAL = 10.0  # usual lengths: a longer update is suspect, and so are others of at least a tenth of the longest
Evaluated = tuple[ClientMetrics, dict[int, Failure]]  # metrics, and failures by client
Lengths = dict[int, list[float]]  # by client: of its last accepted updates
DEFAULTS = UploadSettings()


@dataclass(frozen=True)
class Traffic:
    """Bytes that training has sent so far: the tensors of the sent layers, and the extras."""

    down_bytes: int = 0
    up_bytes: int = 0

    def plus(self, *, down: int, up: int) -> "Traffic":
        return Traffic(self.down_bytes + down, self.up_bytes + up)


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
    seconds: dict[str, float]  # by phase, this round
    server: ServerState  # valid until the next round, which may write into it
    lengths: Lengths  # after it
    moved: dict[int, float]  # by client: the length of its update in this round


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
    uploads: UploadSettings = DEFAULTS,
    lengths: Lengths | None = None,
    excluded: Mapping[int, int] | None = None,
) -> Iterator[Round]:
    """Run `rounds` from a server state, one at a time. The last is always evaluated.

    `excluded`: clients that are not asked to train, and the first round without each.
    """
    traffic, lengths = traffic or Traffic(), lengths or {}
    for number in rounds:
        seconds = dict.fromkeys(("train", "server", "evaluate"), 0.0)
        with timed(seconds, "server"):
            counted = num_examples if uploads.max_examples == "off" else num_examples.clamp(max=uploads.max_examples)
            cohort = Cohort.sample(counted, number, participation, seed)
            cohort, downloads = leave_out(excluded or {}, cohort, algorithm.download(server, cohort))
            messages, downloads = pack(algorithm, server, cohort, downloads)
        with timed(seconds, "train"):
            answers = engine.train(cohort, messages) if len(cohort.ids) else []
        with timed(seconds, "server"):
            given = (algorithm, server, cohort, downloads, answers)
            accepted, failures = accept(*given, norm_bound=uploads.norm_bound, lengths=lengths)
            lengths = accepted.lengths
            down = int(payload_bytes(messages, algorithm.task.layers).sum())
            if len(accepted.cohort.ids):
                server = aggregate(algorithm, server, accepted)
            engine.commit(accepted.cohort.ids)
        evaluation, evaluation_failures = None, dict[int, Failure]()
        is_last = number == rounds.stop - 1
        if number % evaluate_every == 0 or is_last:
            with timed(seconds, "evaluate"):
                following = Cohort.everyone(num_examples, number + 1, seed)
                evaluation, evaluation_failures = evaluate_all(algorithm, engine, server, following, whole=is_last)
        traffic = traffic.plus(down=down, up=accepted.num_bytes)
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
            seconds=seconds,
            server=server,
            lengths=lengths,
            moved=accepted.moved,
        )


def pack(algorithm: Algorithm, server: ServerState, cohort: Cohort, downloads: Payload) -> tuple[Payload, Payload]:
    """Return the messages to a cohort, and what the clients will decode; the same where nothing is encoded."""
    if algorithm.wire.download == "none" or not len(cohort.ids):
        return downloads, downloads
    return codecs.pack_downloads(algorithm, server, cohort, downloads)


def aggregate(algorithm: Algorithm, server: ServerState, accepted: "Accepted") -> ServerState:
    """Return the next server state; the tensors of `server` may be written into."""
    given, links = (accepted.cohort, accepted.downloads, accepted.uploads), ServerState()
    if algorithm.wire.upload != "none" or algorithm.wire.download != "none":
        server, links = codecs.split_links(server)
    kinds = describe_state(server)
    server = algorithm.aggregate(server, *given)
    check_state(algorithm.name, kinds, describe_state(server))
    if links:
        codecs.advance_links_(algorithm, links, *given)
    return {**server, **links} if links else server


def leave_out(excluded: Mapping[int, int], cohort: Cohort, downloads: Payload) -> tuple[Cohort, Payload]:
    """Return the cohort and its downloads without the clients that are excluded from this round on or before.

    They are left out of what was drawn and computed for all: for the others it is as if they did not answer.
    """
    takes_part = [excluded.get(client, cohort.round + 1) > cohort.round for client in cohort.ids.tolist()]
    if all(takes_part):
        return cohort, downloads
    rows = torch.tensor(takes_part).nonzero().flatten()
    return cohort.only(rows), downloads.rows(rows)


def describe_state(server: object) -> dict[str, str]:
    """Return the kind of every tensor of a server state; a round may not change them."""
    if not isinstance(server, Mapping) or not all(isinstance(part, Mapping) for part in server.values()):
        raise PfedlaError(f"a server state should be groups of named tensors, not {shown(server)}")
    tensors = {f"{group}.{name}": value for group, part in server.items() for name, value in part.items()}
    return {
        name: f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        for name, value in tensors.items()
    }


def check_state(method: str, before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for name in [*before, *after]:
        if before.get(name) != after.get(name):
            found, due = after.get(name, "nothing"), before.get(name, "nothing")
            raise PfedlaError(f"{method}: aggregate should return {name} as {due}, as init_server does, not {found}")


def in_chunks(algorithm: Algorithm, server: ServerState, cohort: Cohort) -> Iterator[tuple[Cohort, Payload]]:
    """Yield what the cohort would be sent now, a few clients at a time, to bound the memory."""
    for rows in torch.split(torch.arange(len(cohort.ids)), EVALUATION_CHUNK):
        chunk = cohort.only(rows)
        yield chunk, pack(algorithm, server, chunk, algorithm.download(server, chunk))[0]


def evaluate_all(
    algorithm: Algorithm, engine: Engine, server: ServerState, cohort: Cohort, *, whole: bool = False
) -> Evaluated:
    """Test the personal models that the cohort would get now; `whole`: by every metric."""
    parts, failures = list[ClientMetrics](), dict[int, Failure]()
    for chunk, downloads in in_chunks(algorithm, server, cohort):
        metrics, failed = engine.evaluate(chunk, downloads, whole=whole)
        parts.append(metrics)
        failures |= failed
    score, loss = (torch.cat([getattr(part, key) for part in parts]) for key in ("score", "loss"))
    others = {name: torch.cat([part.others[name] for part in parts]) for name in parts[0].others}
    return ClientMetrics(score, loss, others), failures


def summarise(values: Tensor, *, higher_is_better: bool = True) -> dict[str, Any]:
    """Return mean, standard deviation, 10th percentile and worst over the clients that have a value.

    Where lower is better, the worst is the largest and the percentile the 90th. Infinity is no value.
    """
    per_client = [value if math.isfinite(value) else None for value in values.tolist()]
    numbers: dict[str, Any] = dict.fromkeys(("mean", "std", "p10", "worst"))
    if known := [value for value in per_client if value is not None]:
        share, worst = (0.1, min) if higher_is_better else (0.9, max)
        found = (np.mean(known), np.std(known), np.quantile(known, share), worst(known))
        numbers = dict(zip(numbers, map(float, found), strict=True))
    return {**numbers, "per_client": per_client}


def finite_mean(values: Tensor) -> float | None:
    """Average over the clients that have a finite value, as `summarise` does; None where none has."""
    mean = values.where(values.isfinite(), torch.nan).nanmean().item()
    return mean if math.isfinite(mean) else None


def plan_traffic(
    layers: Layers,
    participants: int,
    rounds: int,
    retained: list[int],
    *,
    down: Sequence[int] | None = None,
    up: Sequence[int] | None = None,
) -> Traffic:
    """Return the traffic of a run that always retains the same layers (Table 3): only downloads shrink.

    `down`, `up`: the bytes of each layer in a message, by default those of float32; see `codecs.measure_layers`.
    """
    plain = [4 * count for count in layers.num_parameters]
    messages, kept = participants * rounds, {*retained}
    sent = sum(size for layer, size in enumerate(down or plain) if layer not in kept)
    return Traffic(down_bytes=messages * sent, up_bytes=messages * sum(up or plain))


@dataclass(frozen=True)
class Trend:
    """Up to which round the score was good, and who sent unusually long updates since then."""

    first: float | None = None  # score, mean over clients; the sign is such that higher is better
    best: float | None = None
    good_round: int = 0  # the last evaluated round that was good; 0: none is known
    has_fallen: bool = False  # since the good round
    usual_length: float = 0.0  # median length of the updates that were accepted in the good round; 0: not known
    suspects: tuple[int, ...] = ()  # clients

    def follow(self, round: Round, *, higher_is_better: bool) -> "Trend":
        """Return the trend after one more round."""
        median = statistics.median(round.moved.values()) if round.moved else 0.0
        suspects = self.suspects or find_unusual(
            round.moved, self.usual_length or median
        )  # later ones may follow a first
        score = None if round.evaluation is None else finite_mean(round.evaluation.score)
        if score is None:
            infinite = round.evaluation is not None and bool(round.evaluation.score.isinf().any())
            fallen = self.has_fallen or infinite or bool(round.evaluation_failures)
            return replace(self, suspects=suspects, has_fallen=fallen)
        score = score if higher_is_better else -score
        first = score if self.first is None else self.first
        best = score if self.best is None else max(score, self.best)
        if score < best - LOST * (best - first):
            return replace(self, suspects=suspects, has_fallen=True)
        return Trend(first, best, good_round=round.round, usual_length=median or self.usual_length)


def find_unusual(lengths: Mapping[int, float], usual: float) -> tuple[int, ...]:
    """Return whose updates are unusually long: the longest, and others of nearly its length."""
    bound = max(UNUSUAL * usual, max(lengths.values(), default=0.0) / UNUSUAL)
    return tuple(client for client, length in lengths.items() if length > bound and usual > 0)


# Checks of uploads


class Accepted(NamedTuple):
    """The clients whose uploads count, in the order of the cohort, everything stacked."""

    cohort: Cohort
    downloads: Payload  # what these clients were sent
    uploads: Payload
    training_loss: Tensor
    after_training: ClientMetrics
    num_bytes: int  # of all uploads that are well-formed, used or not
    lengths: Lengths  # the given ones, and those of these updates
    moved: dict[int, float]  # by client: the lengths of these updates, without those of zero


def accept(
    algorithm: Algorithm,
    server: ServerState,
    cohort: Cohort,
    downloads: Payload,
    answers: Sequence[object],
    *,
    norm_bound: float | Literal["off"] = "off",
    lengths: Lengths | None = None,
) -> tuple[Accepted, dict[int, Failure]]:
    """Return the answers that can be used, and for every other client of the cohort why its answer cannot."""
    sound, failures, num_bytes = dict[int, Answer](), dict[int, Failure](), 0  # both by row
    layers, is_share, ids = algorithm.task.layers, algorithm.task.objective.metric.percent, cohort.ids.tolist()
    moves, lengths, is_coded = dict[int, Move](), lengths or {}, algorithm.wire.upload != "none"
    for row, answer in enumerate(answers):
        expected = algorithm.upload_like(downloads.rows(row))
        if is_coded:
            expected = codecs.pack_form(algorithm, expected)
        checked = answer if isinstance(answer, Failure) else check_answer(answer, expected, is_share=is_share)
        if is_coded and isinstance(checked, Answer):
            checked = unpack_answer(algorithm, server, downloads.rows(row), checked, cohort, ids[row])
        if isinstance(checked, Answer) and norm_bound != "off":
            checked = find_too_large(checked.upload.tensors, layers) or checked
        if isinstance(checked, Failure):
            failures[row] = checked
        else:
            sound[row] = checked
        if row in sound or failures[row].reason in DIVERGED:
            num_bytes += int(payload_bytes(expected, layers))
    for row, answer in sound.items():
        only = torch.tensor([row])  # one by one: all at once would be a copy of every model
        start = take(algorithm.starts(server, cohort.only(only), downloads.rows(only)), 0)
        sound[row] = answer = answer._replace(upload=fill_unsent(answer.upload, start, layers))
        moves[ids[row]] = Move.measure(answer.upload, start)
    too_long = {} if norm_bound == "off" else find_too_long(moves, lengths, norm_bound)
    failures |= {row: too_long[client] for row, client in enumerate(ids) if client in too_long}
    sound = {row: answer for row, answer in sound.items() if row not in failures}
    kept = {client: move.length for client, move in moves.items() if client not in too_long and move.counts}
    lengths = lengths | {one: [*lengths.get(one, ()), kept[one]][-REMEMBERED:] for one in kept}
    rows, used = torch.tensor(list(sound), dtype=torch.int64), list(sound.values())
    downloads = downloads.rows(rows) if failures else downloads  # a copy only if needed: they may be large
    came = [answer.upload for answer in used]
    sent = torch.stack([upload.sent for upload in came]) if used else downloads.sent
    uploads = Payload(stack([one.tensors for one in came]), sent, extras=stack([one.extras for one in came]))
    losses = torch.stack([answer.training_loss for answer in used]) if used else torch.empty(0)
    metrics = torch.tensor([(answer.score, answer.loss) for answer in used], dtype=torch.float64).view(-1, 2)
    found = (cohort.only(rows), downloads, uploads, losses, ClientMetrics(*metrics.T))
    return Accepted(*found, num_bytes=num_bytes, lengths=lengths, moved=kept), {
        ids[row]: failures[row] for row in sorted(failures)
    }


def check_answer(answer: object, expected: Payload, *, is_share: bool = True) -> Answer | Failure:
    """Return the answer, or what is wrong with it. It is untrusted: it may be anything at all.

    `is_share`: its score must be a share, from 0 to 1.
    """
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
            if not is_plain(came):
                return Failure("not an upload", f"{name} is no plain tensor")
            for what in ("shape", "dtype"):
                if getattr(came, what) != getattr(due, what):
                    return Failure(f"wrong {what}", f"{name}: {getattr(came, what)}, not {getattr(due, what)}")
    if not torch.equal(sent, expected.sent):
        return Failure("wrong layers", f"sent {sent.int().tolist()}, expected {expected.sent.int().tolist()}")
    training, score, loss = answer.training_loss, answer.score, answer.loss
    if not is_plain(training) or training.shape != () or not training.is_floating_point():
        return Failure("not an upload", "its training loss is no number")
    if type(score) is not float or type(loss) is not float or (is_share and not (math.isnan(score) or 0 <= score <= 1)):
        return Failure("not an upload", f"its score is {shown(score)}, its loss {shown(loss)}")
    if not (answer.finite and is_finite(tensors) and is_finite(extras)):
        return NOT_FINITE
    # In the server's order of names: sums over tensors must not depend on the order a client sends.
    upload = Payload({n: tensors[n] for n in expected.tensors}, sent, extras={n: extras[n] for n in expected.extras})
    return answer._replace(upload=upload.map(Tensor.detach))


def fill_unsent(upload: Payload, start: Params, layers: Layers) -> Payload:
    """Return an upload in which a layer that did not travel is as if training had not moved it."""
    unsent = {name for name in upload.tensors.keys() & start.keys() if not upload.sent[layers.index[name]]}
    return upload._replace(tensors={n: start[n] if n in unsent else v for n, v in upload.tensors.items()})


def unpack_answer(
    algorithm: Algorithm, server: ServerState, download: Payload, answer: Answer, cohort: Cohort, client: int
) -> Answer | Failure:
    """Return a checked answer with its upload decoded, or why it cannot be."""
    try:
        upload = codecs.unpack_upload(algorithm, server, download, answer.upload, cohort, client)
    except PfedlaError as error:
        return Failure("not an upload", str(error))
    return answer._replace(upload=upload) if is_finite(upload.tensors) else NOT_FINITE


def payload_bytes(payload: Payload, layers: Layers) -> Tensor:
    """Return the bytes that travel: of one client's payload, or of each client's if it is stacked."""
    clients = payload.sent.shape[:-1]
    total = torch.zeros(clients, dtype=torch.int64)
    for name, value in payload.tensors.items():
        total += payload.sent[..., layers.index[name]] * (math.prod(value.shape[len(clients) :]) * value.element_size())
    for value in payload.extras.values():
        total += math.prod(value.shape[len(clients) :]) * value.element_size()
    return total


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Return whether this is a tensor in the CPU's memory; a sparse, nested or "meta" one is not."""
    if not isinstance(value, Tensor) or value.is_nested:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def find_too_large(tensors: Params, layers: Layers) -> Failure | None:
    """Return the failure of an upload with a value that no training brings about, whatever the others send."""
    for name, value in tensors.items():
        largest = LARGEST**2 if name in layers.statistics else LARGEST
        found = float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 0.0
        if found > largest:
            return TOO_LARGE._replace(detail=f"{name}: {found:.3g}, more than {largest:g}")
    return None


class Move(NamedTuple):
    """How far a client moved in a round."""

    length: float  # of its update
    start: float  # of the model that it started from

    @property
    def counts(self) -> bool:
        """Whether others can be measured by it: a client that sends nothing new must not be what is usual."""
        return 0 < self.length < math.inf

    @classmethod
    def measure(cls, upload: Payload, start: Params) -> Self:
        """Measure an upload; tensors whose start is not known count from zero."""
        moving = {name: value.double() for name, value in upload.tensors.items() if value.is_floating_point()}
        before = {name: start[name].double() for name in moving if name in start}
        return cls(length(value - before.get(name, 0) for name, value in moving.items()), length(before.values()))


def length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(value.square().sum()) for value in tensors))


def find_too_long(moves: Mapping[int, Move], past: Lengths, bound: float) -> dict[int, Failure]:
    """Return the clients whose update is too long, by the last accepted lengths of all; at first by the round's own.

    A client that has always moved far is measured by itself, as if it had moved up to `bound` times as far as others. A
    first update may be as long as the model that it started from.
    """
    known = [one for lengths in past.values() for one in lengths]
    known = known or [move.length for move in moves.values() if move.counts]
    common, found = statistics.median(known or [0.0]), dict[int, Failure]()
    for client, move in moves.items():
        own = past.get(client)
        usual = max(common, min(statistics.median(own), bound * common)) if own else common
        if move.length > (bound * usual if own else max(bound * usual, move.start)):
            found[client] = TOO_LONG._replace(detail=f"{move.length / usual:.3g} times the median")
    return found
