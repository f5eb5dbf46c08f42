"""Read the files of published data sets: IDX and CIFAR's binary version. Headers, sizes and labels are checked."""

import gzip
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.files import sha256
from pfedla.data.dataset import Array

LARGEST_FILE = 2**30  # bytes, of the published formats; the largest set has 0.6e9
INFLATION = 1032  # gzip cannot unpack a byte to more
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCH = 10_000  # images in a published batch or test file
CIFAR_PARTS = {10: ((1,) * 6, (10,)), 100: ((5, 1), (20, 100))}  # batches in each file, and labels of each kind


def check_file(path: Path, whole: bool, problem: str) -> None:
    """Raise an error that names the file and its problem, unless `whole`."""
    if not whole:
        raise PfedlaError(f"{path}: damaged, {problem}; fetch it again")


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes, gzipped or not."""
    opened, inflation = (gzip.open, INFLATION) if path.suffix == ".gz" else (open, 1)
    try:
        with opened(path, "rb") as file:
            content = file.read(min(path.stat().st_size * inflation, LARGEST_FILE) + 1)
        zeros, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except (struct.error, EOFError, OSError, zlib.error) as error:
        raise PfedlaError(f"{path}: damaged or incomplete ({error}); fetch it again") from error
    check_file(path, zeros == 0 and kind == 8 and 1 <= dimensions <= 4, "not an IDX file of unsigned bytes")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    check_file(path, len(values) == math.prod(shape), f"{len(values)} bytes, its header says {shape}")
    return values.reshape(shape)


def read_idx_pair(images: Path, labels: Path, num_classes: int, first: int = 0) -> tuple[Array, Array]:
    """Read images of 28x28 and their labels, numbered from 0 (`first` is the first class in the file)."""
    x, y = read_idx(images), read_idx(labels)
    check_file(images, x.shape[1:] == (28, 28) and len(x) > 0, f"an array of shape {x.shape}, not images of 28x28")
    check_file(labels, y.shape == (len(x),), f"an array of shape {y.shape} for {len(x)} images")
    y = y.astype(np.int64) - first
    check_file(labels, y.min() >= 0 and y.max() < num_classes, f"labels {y.min()}..{y.max()} of {num_classes} classes")
    return x, y


def read_cifar(files: Sequence[Path], num_classes: int, digests: Mapping[str, str]) -> tuple[Array, Array]:
    """Read images [n, 3, 32, 32] and their labels (of CIFAR-100 the fine ones) from CIFAR's binary files."""
    # The format has no header: the files' sizes are compared, and for files of the published size the SHA-256.
    parts, num_labels = CIFAR_PARTS[num_classes]
    kinds, record = len(num_labels), len(num_labels) + math.prod(CIFAR_IMAGE)
    sizes, pieces = [path.stat().st_size for path in files], []
    unit = max(size // record // part for size, part in zip(sizes, parts, strict=True))  # damage makes a file shorter
    for path, size, part in zip(files, sizes, parts, strict=True):
        whole = 0 < size <= LARGEST_FILE and size == part * unit * record
        check_file(path, whole, f"{size} bytes are not {part * unit} records of CIFAR's binary version")
        check_file(
            path, unit != CIFAR_BATCH or sha256(path) == digests[path.name], "its checksum is not the published one"
        )
        pieces.append(np.fromfile(path, np.uint8).reshape(-1, record))
        check_file(path, bool((pieces[-1][:, :kinds] < num_labels).all()), "labels out of range")
    records = np.concatenate(pieces)
    return records[:, kinds:].reshape(-1, *CIFAR_IMAGE), records[:, kinds - 1].astype(np.int64)
