"""The published file formats: IDX (MNIST and others) and CIFAR's binary records."""

import gzip
import hashlib
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.dataset import Array

LARGEST = 2**30  # bytes; the largest set has 0.6e9
INFLATION = 1032  # gzip cannot unpack a byte to more
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCH = 10_000  # images in a published batch or test file


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes, gzipped or not."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros != 0 or kind != 8 or not 1 <= dimensions <= 4:
                raise PfedlaError(f"{path}: not an IDX file of unsigned bytes; fetch it again")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            expected = math.prod(shape)
            possible = path.stat().st_size * (INFLATION if path.suffix == ".gz" else 1)
            if expected > min(possible, LARGEST):
                raise PfedlaError(f"{path}: claims {expected} bytes, more than there can be; fetch it again")
            content = file.read(expected + 1)
    except (struct.error, EOFError, OSError, zlib.error) as error:
        raise PfedlaError(f"{path}: damaged or incomplete ({error}); fetch it again") from error
    if len(content) != expected:
        raise PfedlaError(f"{path}: {len(content)} bytes, its header says {expected}; fetch it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_idx_pair(images: Path, labels: Path, num_classes: int, first: int = 0) -> tuple[Array, Array]:
    """Read images of 28x28 and their labels, numbered from 0 (`first` is the first class in the file)."""
    x, y = read_idx(images), read_idx(labels)
    if x.shape[1:] != (28, 28) or not len(x):
        raise PfedlaError(f"{images}: an array of shape {x.shape}, not images of 28x28; fetch it again")
    if y.shape != (len(x),):
        raise PfedlaError(f"{labels}: an array of shape {y.shape} for {len(x)} images; fetch both again")
    last = first + num_classes - 1
    if y.min() < first or y.max() > last:
        raise PfedlaError(f"{labels}: labels {y.min()}..{y.max()}, not {first}..{last}; fetch it again")
    return x, y.astype(np.int64) - first


def read_cifar(
    files: Sequence[Path], parts: Sequence[int], num_labels: Sequence[int], digests: Mapping[str, str]
) -> tuple[Array, Array]:
    """Read labels [n, kinds of label] and images [n, 3, 32, 32] from CIFAR's binary files.

    The format has no header, so this checks whole records, labels in range, the sizes of the files to one
    another (`parts`), and for files of the published size the SHA-256.
    """
    record = len(num_labels) + math.prod(CIFAR_IMAGE)
    counts = [_count_records(path, record) for path in files]
    unit = max(count // part for count, part in zip(counts, parts, strict=True))  # damage makes a file shorter
    labels = np.empty((sum(counts), len(num_labels)), np.int64)
    images = np.empty((sum(counts), *CIFAR_IMAGE), np.uint8)
    start = 0
    for path, count, part in zip(files, counts, parts, strict=True):
        if count != part * unit:
            raise PfedlaError(f"{path}: incomplete, {count} images instead of {part * unit}; fetch it again")
        records = np.fromfile(path, np.uint8)
        if unit == CIFAR_BATCH and hashlib.sha256(records.data).hexdigest() != digests[path.name]:
            raise PfedlaError(f"{path}: damaged, its checksum is not the published one; fetch it again")
        records = records.reshape(-1, record)
        labels[start : start + count] = records[:, : len(num_labels)]
        images[start : start + count] = records[:, len(num_labels) :].reshape(-1, *CIFAR_IMAGE)
        start += count
        if (records[:, : len(num_labels)] >= num_labels).any():
            raise PfedlaError(f"{path}: labels out of range; not CIFAR's binary version, fetch it again")
    return labels, images


def _count_records(path: Path, record: int) -> int:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(2)
    except OSError as error:
        raise PfedlaError(f"{path}: cannot be read ({error.strerror})") from None
    if start[:1] == b"\x80" and start[1:] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # no label is 128
        raise PfedlaError(f"{path}: a pickle, which is never opened; use CIFAR's binary version")
    if not size or size % record or size > LARGEST:
        raise PfedlaError(f"{path}: damaged, {size} bytes are not whole records of {record}; fetch it again")
    return size // record
