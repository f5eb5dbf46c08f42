"""The file formats: a user's npz, IDX (MNIST and others), CIFAR's binary records.

Nothing is unpickled, and nothing is allocated that the file does not hold.
"""

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, read_plain_array, sha256
from pfedla.data.dataset import Array, Dataset, dataset_of

LARGEST_ARRAY = 2**33  # bytes
LARGE, DENSEST = 2**28, 200  # an array of more than LARGE bytes may be at most DENSEST times its packed size
# What numpy and zipfile raise on damaged files
UNREADABLE = (OSError, ValueError, TypeError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error)
LARGEST_FILE = 2**30  # bytes, of the published formats; the largest set has 0.6e9
INFLATION = 1032  # gzip cannot unpack a byte to more
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCH = 10_000  # images in a published batch or test file


def load_arrays(path: Path) -> Dataset:
    """Read x, y, and optionally client (the owner of each example) and test (a mask): a .npz, or a folder of .npy."""
    if not path.is_dir():
        check_size(path)
    try:
        arrays = _read_folder(path) if path.is_dir() else _read_npz(path)
    except UNREADABLE as error:
        advice = "save plain arrays with numpy.savez (names as y.astype(str))"
        raise PfedlaError(f"{path}: cannot be read ({error}); {advice}") from None
    if missing := sorted({"x", "y"} - arrays.keys()):
        raise PfedlaError(f"{path}: no array {' and '.join(missing)}; give x, y and optionally client and test")
    return replace(dataset_of(path.name, **arrays), name=path.stem)  # errors name the file


def _read_folder(path: Path) -> dict[str, Array]:
    arrays = {}
    for file in (path / f"{name}.npy" for name in ("x", "y", "test")):
        if file.is_file():
            with file.open("rb") as opened:
                arrays[file.stem] = read_plain_array(opened, file.stat().st_size, file.name)
    return arrays


def _read_npz(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive:
        found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        for name in [name for name in ("x", "y", "client", "test") if name in found]:
            member, size = found[name], found[name].file_size
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may unpack to any size
                raise ValueError(f"{member.filename} is packed in a way that numpy never does")
            if size > LARGEST_ARRAY or (size > LARGE and size > DENSEST * member.compress_size):
                raise ValueError(f"{member.filename} would unpack to {size} bytes; save it unpacked, or save less")
            with archive.open(member) as file:
                arrays[name] = read_plain_array(file, size, member.filename)
    return arrays


def _check(path: Path, whole: bool, problem: str) -> None:
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
    _check(path, zeros == 0 and kind == 8 and 1 <= dimensions <= 4, "not an IDX file of unsigned bytes")
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    _check(path, len(values) == math.prod(shape), f"{len(values)} bytes, its header says {shape}")
    return values.reshape(shape)


def read_idx_pair(images: Path, labels: Path, num_classes: int, first: int = 0) -> tuple[Array, Array]:
    """Read images of 28x28 and their labels, numbered from 0 (`first` is the first class in the file)."""
    x, y = read_idx(images), read_idx(labels)
    _check(images, x.shape[1:] == (28, 28) and len(x) > 0, f"an array of shape {x.shape}, not images of 28x28")
    _check(labels, y.shape == (len(x),), f"an array of shape {y.shape} for {len(x)} images")
    y = y.astype(np.int64) - first
    _check(labels, y.min() >= 0 and y.max() < num_classes, f"labels {y.min()}..{y.max()} of {num_classes} classes")
    return x, y


def read_cifar(
    files: Sequence[Path], parts: Sequence[int], num_labels: Sequence[int], digests: Mapping[str, str]
) -> tuple[Array, Array]:
    """Read labels [n, kinds of label] and images [n, 3, 32, 32] from CIFAR's binary files.

    The format has no header, so this checks whole records, labels in range, the sizes of the files to one
    another (`parts`), and for files of the published size the SHA-256.
    """
    kinds, pieces = len(num_labels), []
    for path in files:
        size, record = path.stat().st_size, kinds + math.prod(CIFAR_IMAGE)
        whole = 0 < size <= LARGEST_FILE and size % record == 0
        _check(path, whole, f"{size} bytes are not whole records of CIFAR's binary version")
        pieces.append(np.fromfile(path, np.uint8).reshape(-1, record))
    unit = max(len(piece) // part for piece, part in zip(pieces, parts, strict=True))  # damage makes a file shorter
    for path, part, piece in zip(files, parts, pieces, strict=True):
        _check(path, len(piece) == part * unit, f"{len(piece)} images instead of {part * unit}")
        published = unit != CIFAR_BATCH or sha256(path) == digests[path.name]
        _check(path, published, "its checksum is not the published one")
        _check(path, bool((piece[:, :kinds] < num_labels).all()), "labels out of range")
    records = np.concatenate(pieces)
    return records[:, :kinds].astype(np.int64), records[:, kinds:].reshape(-1, *CIFAR_IMAGE)
