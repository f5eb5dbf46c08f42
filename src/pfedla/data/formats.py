"""The published file formats: IDX (MNIST and its kin) and CIFAR's binary records. Damage is named."""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.own import Array

LARGEST = 2**30  # bytes; the largest set of images that is read has 0.6 of 10^9
INFLATION = 1032  # a byte of gzip cannot become more
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCH = 10_000  # images in a published batch or test file


def read_idx(path: Path) -> Array:
    """An IDX file of unsigned bytes, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros != 0 or kind != 8 or not 1 <= dimensions <= 4:
                raise PfedlaError(f"{path}: not an IDX file of unsigned bytes; fetch it anew")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            expected = math.prod(shape)
            possible = path.stat().st_size * (INFLATION if path.suffix == ".gz" else 1)
            if expected > min(possible, LARGEST):
                raise PfedlaError(f"{path}: claims {expected} bytes, which are not there; fetch it anew")
            content = file.read(expected + 1)
    except (struct.error, EOFError, OSError, zlib.error) as error:
        raise PfedlaError(f"{path}: damaged or incomplete ({error}); fetch it anew") from error
    if len(content) != expected:
        raise PfedlaError(f"{path}: {len(content)} bytes of data where its head says {expected}; fetch it anew")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_pair(images: Path, labels: Path, num_classes: int, first: int = 0) -> tuple[Array, Array]:
    """Images of 28x28 and their labels, counted from 0 (`first` is the number of the first class in the file)."""
    x, y = read_idx(images), read_idx(labels)
    if x.shape[1:] != (28, 28) or not len(x):
        raise PfedlaError(f"{images}: holds an array of shape {x.shape}, not images of 28x28; fetch it anew")
    if y.shape != (len(x),):
        raise PfedlaError(f"{labels}: holds an array of shape {y.shape}, {images.name} has {len(x)} images; fetch both anew")
    if y.min() < first or y.max() >= first + num_classes:
        raise PfedlaError(
            f"{labels}: labels {y.min()}..{y.max()} where {first}..{first + num_classes - 1} belong; fetch it anew"
        )
    return x, y.astype(np.int64) - first


def read_cifar(
    files: Sequence[Path], parts: Sequence[int], num_labels: Sequence[int], digests: Mapping[str, str]
) -> tuple[Array, Array]:
    """Labels [n, kinds of label] and images [n, 3, 32, 32] of CIFAR's binary files.

    The format has no head. What can be known is checked: whole records, labels in range, the sizes of the files to one
    another (`parts`), and where they are the published ones, the SHA-256 digests.
    """
    record = len(num_labels) + int(np.prod(CIFAR_IMAGE))
    counts = [_num_records(path, record) for path in files]
    unit = max(count // part for count, part in zip(counts, parts, strict=True))  # a damaged file is short, not long
    for path, count, part in zip(files, counts, parts, strict=True):
        if count != part * unit:
            raise PfedlaError(
                f"{path}: {count} images where the other files let expect {part * unit}; a file is incomplete, fetch them anew"
            )
    labels = np.empty((sum(counts), len(num_labels)), np.int64)
    images = np.empty((sum(counts), record - len(num_labels)), np.uint8)
    end = np.cumsum(counts)
    for path, start, stop in zip(files, end - counts, end, strict=True):
        records = np.fromfile(path, np.uint8)
        if unit == CIFAR_BATCH and hashlib.sha256(records.data).hexdigest() != digests[path.name]:
            raise PfedlaError(f"{path}: its checksum is not the published one; the file is damaged, fetch it anew")
        records = records.reshape(-1, record)
        labels[start:stop] = records[:, : len(num_labels)]
        images[start:stop] = records[:, len(num_labels) :]
        if (labels[start:stop] >= num_labels).any():
            raise PfedlaError(f"{path}: labels out of range; not CIFAR's binary version, fetch it anew")
    return labels, images.reshape(-1, *CIFAR_IMAGE)


def _num_records(path: Path, record: int) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise PfedlaError(f"{path}: cannot be read ({error.strerror})") from None
    if start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # also: no label is 128
        raise PfedlaError(f"{path}: a pickle, which is never opened; take CIFAR's binary version instead of the Python one")
    if not size or size % record or size > LARGEST:
        raise PfedlaError(f"{path}: {size} bytes are not whole records of {record}; it is damaged or incomplete, fetch it anew")
    return size // record
