"""Payloads as Flower's records: the tensors of the sent layers only. What comes is checked before it is used.

Flower sends an array in numpy's own format: its numbers behind a header of HEADER_BYTES.
"""

import io
import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from pfedla.core.contracts import Answer, Failure, Params, Payload
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_plain_array
from pfedla.core.layers import Layers, is_finite

HEADER_BYTES = 128
SLACK, MORE = (2**16, 16)  # bytes and arrays beyond the expected that are still read, to name what is wrong with them
TENSORS, EXTRAS, CONFIG, METRICS = "tensors", "extras", "config", "metrics"


def encode_tensors(tensors: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().contiguous().numpy()) for name, value in tensors.items()})


def encode_payload(payload: Payload, layers: Layers) -> RecordDict:
    """Encode one client's payload, with the mask of the sent layers and the names of the other tensors."""
    sent = {name: value for name, value in payload.tensors.items() if payload.sent[layers.index[name]]}
    unsent = [name for name in payload.tensors if name not in sent]
    about = ConfigRecord({"sent": payload.sent.int().tolist(), "unsent": unsent})
    return RecordDict({TENSORS: encode_tensors(sent), EXTRAS: encode_tensors(payload.extras), CONFIG: about})


def measure(content: RecordDict) -> tuple[int, int]:
    """Return bytes (with headers) and number of arrays of a checked message."""
    arrays = [array for key in (TENSORS, EXTRAS) for array in content.array_records[key].values()]
    return sum(len(array.data) for array in arrays), len(arrays)


def decode_tensors(record: object, max_bytes: int, max_arrays: int) -> Params:
    """Return the tensors of an untrusted record; refuse too many, too large, or damaged arrays."""
    if not isinstance(record, ArrayRecord):
        raise PfedlaError(f"expected arrays, got {shown(record)}")
    num_bytes = sum(len(array.data) for array in record.values())
    if len(record) > max_arrays or num_bytes > max_bytes + HEADER_BYTES * len(record):
        raise PfedlaError(f"{len(record)} arrays of {num_bytes} bytes are more than expected")
    tensors = {}
    for name, array in record.items():
        try:
            plain = read_plain_array(io.BytesIO(array.data), len(array.data), repr(name)[:60])
            tensors[name] = torch.from_numpy(plain)
        except (ValueError, TypeError, OverflowError, MemoryError) as error:  # not a plain array, or unknown to torch
            raise PfedlaError(str(error)) from None
    return tensors


def read_config(content: RecordDict) -> dict[str, Any]:
    """Return the plain values of an untrusted record; empty if it has none."""
    config = content.get(CONFIG)
    return dict(config) if isinstance(config, ConfigRecord) else {}


def read_number(content: Mapping[str, object], key: str, default: float | None = None) -> float:
    """Return one of the metrics of an untrusted record."""
    metrics = content.get(METRICS)
    value = metrics.get(key, default) if isinstance(metrics, MetricRecord) else default
    if isinstance(value, list) or value is None:
        raise PfedlaError(f"{key} is {shown(value)}, not a number")
    return float(value)


def read_mask(content: RecordDict, layers: Layers) -> Tensor:
    mask = read_config(content).get("sent")
    if not isinstance(mask, list) or len(mask) != len(layers) or not all(one in (0, 1) for one in mask):
        raise PfedlaError(f"the mask of sent layers is {shown(mask)}, not {len(layers)} zeros and ones")
    return torch.tensor(mask, dtype=torch.bool)


def decode_download(content: RecordDict, model: Params, layers: Layers, num_clients: int) -> Payload:
    """Return what the server sent, checked against the site's model. Tensors that were not sent become NaN."""
    size = _count_bytes(model)
    sent, unsent = read_mask(content, layers), read_config(content).get("unsent")
    tensors = decode_tensors(content.get(TENSORS), size + SLACK, len(model) + MORE)
    # Extras hold at most every other client's model.
    extras = decode_tensors(content.get(EXTRAS), num_clients * size + SLACK, num_clients * len(model) + MORE)
    if not isinstance(unsent, list) or not all(name in model and not sent[layers.index[name]] for name in unsent):
        raise PfedlaError(f"the server sent an invalid list of tensors that are not sent: {shown(unsent)}")
    for name, value in tensors.items():
        if name not in model or not sent[layers.index[name]]:
            why = "whose layer is not sent" if name in model else "which is not in the model"
            raise PfedlaError(f"the server sent {shown(name)}, {why}")
        own = model[name]
        if value.shape != own.shape or value.dtype != own.dtype:
            came, wanted = (f"{one.dtype} {tuple(one.shape)}" for one in (value, own))
            raise PfedlaError(f"the server sent {name} as {came}, not {wanted}")
    due = [name for name in layers.parameters(model) if sent[layers.index[name]]]
    if tensors and (missing := [name for name in due if name not in tensors]):
        raise PfedlaError(f"the server did not send {', '.join(missing[:3])}, though the layer is sent")
    if not is_finite(tensors) or not is_finite(extras):
        raise PfedlaError("the server sent numbers that are not finite")
    return Payload(tensors | {name: torch.full_like(model[name], torch.nan) for name in unsent}, sent, extras)


def encode_answer(answer: Answer, layers: Layers) -> RecordDict:
    content = encode_payload(answer.upload, layers)
    numbers = {"training_loss": answer.training_loss.item(), "accuracy": answer.accuracy, "loss": answer.loss}
    content[METRICS] = MetricRecord({**numbers, "finite": int(answer.finite)})
    return content


def decode_answer(content: RecordDict, expected: Payload, layers: Layers) -> Answer | Failure:
    """Return what a client sent, as far as it can be read; `uploads.accept` compares it with the expected."""
    try:
        sent = read_mask(content, layers)
        found, extras = (
            decode_tensors(content.get(key), _count_bytes(part) + SLACK, len(part) + MORE)
            for key, part in ((TENSORS, expected.tensors), (EXTRAS, expected.extras))
        )
        training_loss = read_number(content, "training_loss")
        accuracy, loss = (read_number(content, key, math.nan) for key in ("accuracy", "loss"))
        finite = read_number(content, "finite", 0.0) == 1
    except PfedlaError as error:
        return Failure("not an upload", str(error))
    # Zeros stand for tensors of layers that are not sent. They are not counted as bytes: the mask excludes them.
    for name, value in expected.tensors.items():
        if not sent[layers.index[name]]:
            if name in found:
                return Failure("wrong layers", f"{name} came, though its layer is not sent")
            found[name] = torch.zeros_like(value)
    # The training loss becomes the client's own float32 again: the record holds doubles.
    return Answer(Payload(found, sent, extras), torch.tensor(training_loss), accuracy, loss, finite)


def _count_bytes(tensors: Params) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())
