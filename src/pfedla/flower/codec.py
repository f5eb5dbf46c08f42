"""Payloads as Flower's records: the tensors of the sent layers, nothing for the others; what comes is checked before use.

A tensor travels as Flower sends every array, in numpy's own format: its numbers and a header of HEADER_BYTES.
"""

import io
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from pfedla.core.contracts import Answer, Failure, Params, Payload
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_plain_array
from pfedla.core.layers import Layers, is_finite

HEADER_BYTES = 128
SLACK, MORE = 2**16, 16  # bytes and arrays beyond what is expected that are still read, to say what is wrong with them
TENSORS, EXTRAS, CONFIG, METRICS = "tensors", "extras", "config", "metrics"


class Wire(NamedTuple):
    """What has crossed the wire: the bytes of arrays with their headers, and how many arrays."""

    num_bytes: int = 0
    num_arrays: int = 0


def encoded(tensors: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().contiguous().numpy()) for name, value in tensors.items()})


def encoded_payload(payload: Payload, layers: Layers) -> RecordDict:
    """One client's payload; the mask of the sent layers goes along."""
    sent = {name: value for name, value in payload.tensors.items() if payload.sent[layers.index[name]]}
    mask = ConfigRecord({"sent": [int(one) for one in payload.sent.tolist()]})
    return RecordDict({TENSORS: encoded(sent), EXTRAS: encoded(payload.extras), CONFIG: mask})


def wire_of(content: RecordDict) -> Wire:
    """Of what has been checked: a small message may refer to one array under a million names."""
    arrays = [array for key in (TENSORS, EXTRAS) for array in content.array_records[key].values()]
    return Wire(sum(len(array.data) for array in arrays), len(arrays))


def decoded(record: object, limit: int, most: int) -> Params:
    """The tensors of a record that a stranger made: at most so many bytes and arrays, each what its head says."""
    if not isinstance(record, ArrayRecord):
        raise PfedlaError(f"there are no arrays but {shown(record)}")
    if len(record) > most or sum(len(array.data) for array in record.values()) > limit + HEADER_BYTES * len(record):
        raise PfedlaError(f"{len(record)} arrays of {sum(len(a.data) for a in record.values())} bytes: more than can be right")
    tensors = {}
    for name, array in record.items():
        try:
            plain = read_plain_array(io.BytesIO(array.data), len(array.data), repr(name)[:60])
            tensors[name] = torch.from_numpy(plain)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:  # no plain array; of a kind torch does not have
            raise PfedlaError(str(error)) from None
    return tensors


def config_of(content: RecordDict) -> dict[str, Any]:
    """The plain values of a stranger's record; empty if it has none."""
    config = content.get(CONFIG)
    return dict(config) if isinstance(config, ConfigRecord) else {}


def mask_of(content: RecordDict, layers: Layers) -> Tensor:
    """The mask of the sent layers."""
    mask = config_of(content).get("sent")
    if not isinstance(mask, list) or len(mask) != len(layers) or not all(one in (0, 1) for one in mask):
        raise PfedlaError(f"the mask of sent layers is {shown(mask)}: it should have {len(layers)} zeros and ones")
    return torch.tensor(mask, dtype=torch.bool)


def decoded_download(content: RecordDict, model: Params, layers: Layers, num_clients: int) -> Payload:
    """What a client was sent, checked against its own model's tensors. What did not travel is NaN: nobody may read it."""
    size = _bytes_of(model)
    sent = mask_of(content, layers)
    tensors = decoded(content.get(TENSORS), size + SLACK, len(model) + MORE)
    # What is beside the model: at most every other client's.
    extras = decoded(content.get(EXTRAS), num_clients * size + SLACK, num_clients * len(model) + MORE)
    for name, value in tensors.items():
        if name not in model or not sent[layers.index[name]]:
            raise PfedlaError(
                f"the server sent {shown(name)}, which {'stays here' if name in model else 'is not in the model'}"
            )
        own = model[name]
        if value.shape != own.shape or value.dtype != own.dtype:
            came, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (value, own))
            raise PfedlaError(f"the server sent {name} as {came}, not {wanted}")
    if tensors:
        due = {name for name in layers.parameters(model) if sent[layers.index[name]]}
        if missing := sorted(due - tensors.keys()):
            raise PfedlaError(f"the server sent no {', '.join(missing[:3])}, though its layer is sent")
    if not is_finite(tensors) or not is_finite(extras):
        raise PfedlaError("the server sent numbers that are not finite")
    at_home = {
        name: torch.full_like(value, torch.nan)
        for name, value in layers.parameters(model).items()
        if not sent[layers.index[name]]
    }
    return Payload({**tensors, **at_home}, sent, extras)


def encoded_answer(answer: Answer, layers: Layers) -> RecordDict:
    content = encoded_payload(answer.upload, layers)
    numbers = {"training_loss": answer.training_loss.item(), "accuracy": answer.accuracy, "loss": answer.loss}
    content[METRICS] = MetricRecord({**numbers, "finite": int(answer.finite)})
    return content


def decoded_answer(content: RecordDict, expected: Payload, layers: Layers) -> Answer | Failure:
    """What a client sent, as far as it can be read: `uploads.accept` compares it with what is expected."""
    try:
        sent = mask_of(content, layers)
        found, extras = (
            decoded(content.get(key), _bytes_of(part) + SLACK, len(part) + MORE)
            for key, part in ((TENSORS, expected.tensors), (EXTRAS, expected.extras))
        )
        numbers = [number_of(content, "training_loss"), *(number_of(content, key, math.nan) for key in ("accuracy", "loss"))]
        finite = number_of(content, "finite", 0.0) == 1
    except PfedlaError as error:
        return Failure("not an upload", str(error))
    for name, value in expected.tensors.items():
        if not expected.sent[layers.index[name]]:
            if name in found:
                return Failure("wrong layers", f"{name} should stay at home")
            found[name] = torch.zeros_like(value)
    # As the client's own float32: the record holds doubles.
    return Answer(Payload(found, sent, extras), torch.tensor(numbers[0]), numbers[1], numbers[2], finite)


def number_of(content: Mapping[str, object], key: str, default: float | None = None) -> float:
    """A number among the metrics of a stranger's record."""
    metrics = content.get(METRICS)
    value = metrics.get(key, default) if isinstance(metrics, MetricRecord) else default
    if isinstance(value, list) or value is None:
        raise PfedlaError(f"{key} is {shown(value)}, not a number")
    return float(value)


def _bytes_of(tensors: Params) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())
