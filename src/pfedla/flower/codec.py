"""Payloads as Flower's records: the tensors of the sent layers only. What comes is checked before it is used."""

import io
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from pfedla.core.codecs import packed_like
from pfedla.core.contracts import Algorithm, Answer, Failure, Params, Payload
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_plain_array
from pfedla.core.layers import Layers
from pfedla.core.rounds import check_answer

HEADER_BYTES = 128  # of an array: Flower sends it in numpy's own format
SLACK, MORE = (2**16, 16)  # bytes and arrays beyond the expected that are still read, to name what is wrong with them
TENSORS, EXTRAS, CONFIG, METRICS = "tensors", "extras", "config", "metrics"


def encode_tensors(tensors: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(value.detach().contiguous().numpy()) for name, value in tensors.items()})


def encode_payload(payload: Payload, layers: Layers, **more: Any) -> RecordDict:
    """Encode one client's payload, with the mask of the sent layers and the names of all tensors, sent or not."""
    sent = {name: value for name, value in payload.tensors.items() if payload.sent[layers.index[name]]}
    about = ConfigRecord({"sent": payload.sent.int().tolist(), "names": list(payload.tensors), **more})
    return RecordDict({TENSORS: encode_tensors(sent), EXTRAS: encode_tensors(payload.extras), CONFIG: about})


def measure(content: RecordDict) -> Tensor:
    """Return bytes (with headers) and number of the arrays of a message."""
    sizes = [len(array.data) for record in content.array_records.values() for array in record.values()]
    return torch.tensor([sum(sizes), len(sizes)])


def decode_tensors(record: object, expected: Params, times: int = 1) -> Params:
    """Return the tensors of an untrusted record; refuse too many, too large (`times` the expected), or damaged ones."""
    if not isinstance(record, ArrayRecord):
        raise PfedlaError(f"expected arrays, got {shown(record)}")
    num_bytes = sum(len(array.data) for array in record.values())
    max_bytes = times * sum(value.nbytes for value in expected.values()) + HEADER_BYTES * len(record) + SLACK
    if len(record) > times * len(expected) + MORE or num_bytes > max_bytes:
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


def read_numbers(content: RecordDict, *keys: str) -> list[float]:
    """Return metrics of an untrusted record."""
    metrics = content.get(METRICS)
    found = [metrics.get(key) if isinstance(metrics, MetricRecord) else None for key in keys]
    numbers = [float(value) for value in found if isinstance(value, int | float)]
    if len(numbers) < len(keys):
        raise PfedlaError(f"{', '.join(keys)}: {shown(found)} are not numbers")
    return numbers


def decode_download(content: RecordDict, algorithm: Algorithm, num_clients: int) -> Payload:
    """Return what the server sent, checked against the site's model. Tensors that were not sent become NaN.

    Encoded tensors stay encoded.
    """
    plain, layers = algorithm.task.initial(), algorithm.task.layers
    model = packed_like(algorithm, "download", plain)
    mask, names = (read_config(content).get(key) for key in ("sent", "names"))
    is_mask = isinstance(mask, list) and len(mask) == len(layers) and set(mask) <= {0, 1}
    if not is_mask or not isinstance(names, list) or not set(names) <= model.keys():
        raise PfedlaError(f"the server sent an invalid mask {shown(mask)} or names {shown(names)}")
    sent = torch.tensor(mask, dtype=torch.bool)
    tensors = decode_tensors(content.get(TENSORS), model)
    extras = decode_tensors(content.get(EXTRAS), plain, times=num_clients)  # at most every other client's model
    due = {name: model[name] for name in names if sent[layers.index[name]]}
    if due:  # all parameters of the sent layers
        due |= {name: value for name, value in layers.parameters(model).items() if sent[layers.index[name]]}
    came = Answer(Payload(tensors, sent, extras), torch.tensor(0.0), score=0.0, loss=0.0, finite=True)
    checked = check_answer(came, Payload(due, sent, extras))
    if isinstance(checked, Failure):
        raise PfedlaError(f"what the server sent cannot be used: {checked.reason}: {checked.detail}")
    missing = {name: model[name] for name in names if name not in due}
    unsent = {n: torch.full_like(v, torch.nan if v.is_floating_point() else 0) for n, v in missing.items()}
    return Payload(tensors | unsent, sent, extras)


def encode_answer(answer: Answer, layers: Layers) -> RecordDict:
    content = encode_payload(answer.upload, layers)
    numbers = {"training_loss": answer.training_loss.item(), "score": answer.score, "loss": answer.loss}
    content[METRICS] = MetricRecord({**numbers, "finite": int(answer.finite)})
    return content


def decode_answer(content: RecordDict, expected: Payload, layers: Layers) -> Answer | Failure:
    """Return what a client sent, as far as it can be read; `uploads.accept` compares it with the expected."""
    try:
        found = decode_tensors(content.get(TENSORS), expected.tensors)
        extras = decode_tensors(content.get(EXTRAS), expected.extras)
        training_loss, score, loss, finite = read_numbers(content, "training_loss", "score", "loss", "finite")
    except PfedlaError as error:
        return Failure("not an upload", str(error))
    # Zeros stand for tensors of layers that are not sent. They are not counted as bytes: the mask excludes them.
    for name, value in expected.tensors.items():
        if not expected.sent[layers.index[name]]:
            if name in found:
                return Failure("wrong layers", f"{name} came, though its layer is not sent")
            found[name] = torch.zeros_like(value)
    # The training loss becomes the client's own float32 again: the record holds doubles.
    return Answer(Payload(found, expected.sent, extras), torch.tensor(training_loss), score, loss, finite == 1)
