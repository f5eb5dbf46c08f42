"""Fewer bytes for the trained tensors of a message, in both directions and for every method.

A message encodes the difference to what both ends expect, which they compute from the messages before. A download is
expected to be the one before it; an upload, to move from its download as the one before it moved from its own. So what
a message leaves out is still in the difference of the next: the error is fed back (EF21: Richtárik et al., NeurIPS
2021). What both ends keep advances only with an accepted upload: it is two groups of the server's state, and a part of
each client's private state. An encoded tensor is a row of bytes whose number follows from the tensor's size alone.
"""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedla.core.contracts import Algorithm, ClientState, Cohort, Payload, ServerState, generator
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Layers, Params, is_finite, stack, take
from pfedla.core.settings import CodecName

Way = Literal["download", "upload"]
PREFIX = "wire/"  # of groups in the server's state and names in a client's: what was decoded last, by way
DOWNLOAD, UPLOAD = PREFIX + "download", PREFIX + "upload"  # the groups
BLOCK = 256  # numbers of int8 that share a scale
LEVELS = 127  # of int8, on each side of zero
ESCAPE = 255  # in the gaps between indices: so many numbers are passed, and none is kept
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


# One tensor


def encoded_size(codec: CodecName, count: int, share: float) -> int:
    """Return the bytes of a tensor of `count` numbers."""
    kept = count_kept(count, share)
    sizes = {"float16": 2 * count, "bfloat16": 2 * count, "int8": count + 4 * -(-count // BLOCK), "randk": 2 * kept}
    return {**sizes, "topk": 3 * kept + count // ESCAPE}[codec]


def count_kept(count: int, share: float) -> int:
    return min(count, max(1, round(share * count)))


def encode(codec: CodecName, value: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Return a tensor's bytes."""
    flat, kept = value.flatten().float(), count_kept(value.numel(), share)
    if codec in HALVES:
        return as_bytes(flat.to(HALVES[codec]))
    if codec == "int8":
        blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1) / LEVELS
        steps = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(1)
        rounded = (steps + torch.rand(steps.shape, generator=draws)).floor()  # up with the chance of the remainder
        codes = rounded.nan_to_num(0).clamp(-LEVELS, LEVELS).to(torch.int8)
        return torch.cat([as_bytes(scales), as_bytes(codes.flatten()[: len(flat)])])
    if codec == "topk":
        chosen = flat.abs().topk(kept).indices.sort().values
        return torch.cat([as_bytes(flat[chosen].half()), encode_gaps(chosen, len(flat))])
    return as_bytes(flat[draw_indices(len(flat), kept, draws)].half())


def decode(codec: CodecName, data: Tensor, like: Tensor, share: float, draws: torch.Generator) -> Tensor:
    """Return the tensor of untrusted bytes of the right number; the numbers may be infinite or nan."""
    count, kept = like.numel(), count_kept(like.numel(), share)
    if codec in HALVES:
        flat = from_bytes(data, HALVES[codec]).float()
    elif codec == "int8":
        cut = 4 * -(-count // BLOCK)
        scales, codes = from_bytes(data[:cut], torch.float32), from_bytes(data[cut:], torch.int8).float()
        flat = (F.pad(codes, (0, -count % BLOCK)).view(-1, BLOCK) * scales.unsqueeze(1)).flatten()[:count]
    else:
        values = from_bytes(data[: 2 * kept], torch.float16).float()
        is_top = codec == "topk"
        chosen = decode_gaps(data[2 * kept :], count, kept) if is_top else draw_indices(count, kept, draws)
        flat = torch.zeros(count).index_put((chosen,), values)
    return flat.view(like.shape).to(like.dtype)


def draw_indices(count: int, kept: int, draws: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=draws)[:kept]


def encode_gaps(chosen: Tensor, count: int) -> Tensor:
    """Return ascending indices below `count` as bytes: how many numbers are passed before each, ESCAPE for so many."""
    passed = torch.diff(chosen, prepend=torch.tensor([-1])) - 1
    places = (passed // ESCAPE + 1).cumsum(0) - 1
    gaps = torch.full((len(chosen) + count // ESCAPE,), ESCAPE, dtype=torch.uint8)  # what is left over are escapes
    gaps[places] = (passed % ESCAPE).to(torch.uint8)
    return gaps


def decode_gaps(gaps: Tensor, count: int, kept: int) -> Tensor:
    is_kept = gaps != ESCAPE
    indices = (gaps.long() + is_kept).cumsum(0)[is_kept] - 1
    if len(indices) != kept or (indices >= count).any():
        raise PfedlaError(f"{len(indices)} indices that should be {kept}, each below {count}")
    return indices


def as_bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # a clone is aligned


# One message. `due`: the coded tensors as both ends expect them; none where the way is not coded.


def pack(algorithm: Algorithm, way: Way, payload: Payload, due: Params, cohort: Cohort, client: int) -> Payload:
    """Return one client's payload with its coded tensors as bytes; those of layers that are not sent are zeros."""
    codec, share, layers = getattr(algorithm.wire, way), algorithm.wire.share, algorithm.task.layers
    packed = dict(payload.tensors)
    for name in packed.keys() & due.keys():
        packed[name] = torch.zeros(encoded_size(codec, due[name].numel(), share), dtype=torch.uint8)
        if payload.sent[layers.index[name]]:
            packed[name] = encode(codec, payload.tensors[name] - due[name], share, draw(way, name, cohort, client))
    return payload._replace(tensors=packed)


def unpack(algorithm: Algorithm, way: Way, message: Payload, due: Params, cohort: Cohort, client: int) -> Payload:
    """Return what a packed payload of the expected form holds; what is not sent is as expected."""
    codec, share, layers = getattr(algorithm.wire, way), algorithm.wire.share, algorithm.task.layers
    found = dict(message.tensors)
    for name in found.keys() & due.keys():
        found[name] = due[name]
        if message.sent[layers.index[name]]:
            draws = draw(way, name, cohort, client)
            found[name] = due[name] + decode(codec, message.tensors[name], due[name], share, draws)
    return message._replace(tensors=found)


def draw(way: Way, name: str, cohort: Cohort, client: int) -> torch.Generator:
    return generator(cohort.seed, f"{way} {name}", cohort.round, client)


def packed_like(algorithm: Algorithm, way: Way, tensors: Params) -> Params:
    """Return tensors of the names, shapes and dtypes that these have in a packed payload."""
    codec, share = getattr(algorithm.wire, way), algorithm.wire.share
    coded = algorithm.task.layers.parameters(tensors) if codec != "none" else {}  # statistics travel as they are
    sizes = {name: encoded_size(codec, value.numel(), share) for name, value in coded.items()}
    return tensors | {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}


def measure_layers(layers: Layers, tensors: Params, codec: CodecName, share: float) -> list[int]:
    """Return the bytes of each layer's parameters in a message."""
    sizes = [0] * len(layers)
    for name, value in layers.parameters(tensors).items():
        if name in layers.index:  # it is trained
            sizes[layers.index[name]] += value.nbytes if codec == "none" else encoded_size(codec, value.numel(), share)
    return sizes


# What both ends keep of a client: what it has received, and sent, last. They advance alike, bit for bit.


def init_kept(algorithm: Algorithm) -> dict[str, Params]:
    """Return what is kept of a client before its first round, by way: the initial model, where it is needed."""
    initial, wire = algorithm.task.layers.parameters(algorithm.task.initial()), algorithm.wire
    kept = {} if wire.upload == wire.download == "none" else {DOWNLOAD: initial}
    return kept if wire.upload == "none" else {**kept, UPLOAD: initial}


def expect(kept: Mapping[str, Params], download: Payload, layers: Layers) -> Params:
    """Return what the upload after a download is expected to hold: the last one, moved as far as the downloads have."""
    due = dict(kept.get(UPLOAD, {}))
    for name in due.keys() & download.tensors.keys():
        if download.sent[layers.index[name]]:
            due[name] = due[name] + (download.tensors[name] - kept[DOWNLOAD][name])
    return due


def advance(kept: Mapping[str, Params], download: Payload, upload: Payload, layers: Layers) -> tuple[Params, Params]:
    """Return what is kept after a round: received (a layer that was not: as it was uploaded), and sent."""
    received, sent = dict(kept[DOWNLOAD]), expect(kept, download, layers)
    for payload, targets in ((upload, (received, sent)), (download, (received,))):
        for target in targets:
            for name in target.keys() & payload.tensors.keys():
                if payload.sent[layers.index[name]]:
                    target[name] = payload.tensors[name]
    return received, sent


# The server


def init_links(algorithm: Algorithm, num_clients: int) -> ServerState:
    """Return what is kept of all clients, as groups of the server's state."""
    return {group: stack([part] * num_clients) for group, part in init_kept(algorithm).items()}


def split_links(server: ServerState) -> tuple[ServerState, ServerState]:
    """Return the method's own part of a server's state, and what `init_links` added."""
    own = {group: part for group, part in server.items() if not group.startswith(PREFIX)}
    return own, {group: part for group, part in server.items() if group not in own}


def kept_of(server: ServerState, client: int) -> dict[str, Params]:
    return {group: take(part, client) for group, part in server.items() if group.startswith(PREFIX)}


def pack_downloads(
    algorithm: Algorithm, server: ServerState, cohort: Cohort, downloads: Payload
) -> tuple[Payload, Payload]:
    """Return the messages to the clients of a cohort, and what they will decode, both stacked."""
    messages, decoded = [], []
    for row, client in enumerate(cohort.ids.tolist()):
        due = take(server[DOWNLOAD], client)
        messages.append(pack(algorithm, "download", downloads.rows(row), due, cohort, client))
        decoded.append(unpack(algorithm, "download", messages[-1], due, cohort, client))
    coded, arrived = (stack([one.tensors for one in some]) for some in (messages, decoded))
    return downloads._replace(tensors=coded), downloads._replace(tensors=arrived)


def unpack_upload(
    algorithm: Algorithm, server: ServerState, download: Payload, upload: Payload, cohort: Cohort, client: int
) -> Payload:
    """Return a client's upload of the expected form, decoded; `download` is decoded too."""
    due = expect(kept_of(server, client), download, algorithm.task.layers)
    return unpack(algorithm, "upload", upload, due, cohort, client)


def pack_form(algorithm: Algorithm, upload: Payload) -> Payload:
    """Return an upload with the names, shapes and dtypes that it has as it is sent."""
    return upload._replace(tensors=packed_like(algorithm, "upload", upload.tensors))


def expect_upload(algorithm: Algorithm, message: Payload) -> Payload:
    """Return the form of the upload that answers a message, which may be packed."""
    if algorithm.wire.download != "none":
        initial = algorithm.task.initial()
        message = message._replace(tensors={name: initial[name] for name in message.tensors})
    return pack_form(algorithm, algorithm.upload_like(message))


def advance_links_(
    algorithm: Algorithm, links: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload
) -> None:
    """Note, in place, what the accepted clients have received and sent, both decoded and stacked."""
    for row, client in enumerate(cohort.ids.tolist()):
        kept = kept_of(links, client)
        now = advance(kept, downloads.rows(row), uploads.rows(row), algorithm.task.layers)
        for group, tensors in zip((DOWNLOAD, UPLOAD), now, strict=True):
            for name, value in tensors.items():
                links[group][name][client] = value


# A client


def init_private(algorithm: Algorithm) -> ClientState:
    """Return what a client keeps of both ways before its first round."""
    return {f"{group}/{name}": value for group, part in init_kept(algorithm).items() for name, value in part.items()}


def drop_private(state: ClientState) -> ClientState:
    """Return a client's state without what `init_private` added."""
    return {name: value for name, value in state.items() if not name.startswith(PREFIX)}


def kept_by(state: ClientState) -> dict[str, Params]:
    """Return what a client keeps, as the server does."""
    kept: dict[str, Params] = {}
    for group in (DOWNLOAD, UPLOAD):
        own = {name.removeprefix(f"{group}/"): v.cpu() for name, v in state.items() if name.startswith(f"{group}/")}
        kept |= {group: own} if own else {}
    return kept


def unpack_download(algorithm: Algorithm, state: ClientState, message: Payload, cohort: Cohort, client: int) -> Payload:
    """Return what the server sent, on the device of the message."""
    due = kept_by(state)[DOWNLOAD]
    found = unpack(algorithm, "download", message.to("cpu"), due, cohort, client)
    if not is_finite({name: found.tensors[name] for name in found.tensors.keys() & due.keys()}):
        raise PfedlaError("what the server sent cannot be used: it is not finite")
    return found.to(message.sent.device)


def pack_upload(
    algorithm: Algorithm, state: ClientState, download: Payload, upload: Payload, cohort: Cohort, client: int
) -> tuple[ClientState, Payload]:
    """Return what a client keeps if its upload is accepted, and the upload as it is sent; `download` is decoded."""
    kept, download, layers = kept_by(state), download.to("cpu"), algorithm.task.layers
    due = expect(kept, download, layers)
    message = pack(algorithm, "upload", upload, due, cohort, client)
    decoded = unpack(algorithm, "upload", message, due, cohort, client)
    now = zip((DOWNLOAD, UPLOAD), advance(kept, download, decoded, layers), strict=True)
    return {f"{group}/{name}": value for group, tensors in now for name, value in tensors.items()}, message
