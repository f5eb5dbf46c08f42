"""Data sets are plain arrays, checked. Of their files nothing is unpickled, and no more is allocated than they hold."""

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import check_size, read_plain_array, sha256

Array = npt.NDArray[Any]
MOST_NUMBERS = 2**31
MOST_DIFFERENT = {"y": 10_000, "client": 100_000}
LARGEST_ARRAY = 2**33  # bytes
LARGE, DENSEST = 2**28, 200  # an array of more than LARGE bytes may be at most DENSEST times its packed size
LARGEST_FILE = 2**30  # bytes, of the published formats; the largest set has 0.6e9
INFLATION = 1032  # gzip cannot unpack a byte to more
CIFAR_IMAGE = (3, 32, 32)
CIFAR_BATCH = 10_000  # images in a published batch or test file
CIFAR_PARTS = {10: ((1,) * 6, (10,)), 100: ((5, 1), (20, 100))}  # batches in each file, and labels of each kind


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Pooled examples [n, channels, height, width] or [n, features], and their labels 0..classes-1."""

    name: str
    x: Array  # images are uint8 or float32; vectors are float32, or int32 or int64 (token ids)
    y: Array
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # per channel, in the units of x; empty: x is used as it is
    std: tuple[float, ...] = ()
    client: Array | None = None  # the owner of each example, if the data come partitioned: 0..clients-1
    client_names: tuple[str, ...] = ()
    test: Array | None = None  # True where the example belongs to a ready test split
    subset: str = ""  # the user's .npz that is read in place of the official files of this name, if one is

    def keep_classes(self, num_classes: int) -> "Dataset":
        """Return the examples of the first classes only."""
        if num_classes > len(self.classes):
            raise PfedlaError(f"classes_limit = {num_classes}, {self.name} has only {len(self.classes)} classes")
        if num_classes == len(self.classes):
            return self
        arrays = {"x": self.x, "y": self.y, "client": self.client, "test": self.test}
        kept: dict[str, Any] = {key: a[self.y < num_classes] for key, a in arrays.items() if a is not None}
        return replace(self, **kept, classes=self.classes[:num_classes])

    def match(self, shape: tuple[int, ...], classes: tuple[str, ...], *, pixels: bool, whose: str) -> "Dataset":
        """Number the labels as in `classes`; refuse examples that `whose` model does not take."""
        if self.x.shape[1:] != shape or (self.x.dtype == np.uint8) != pixels:
            takes = f"{'uint8 images' if pixels else 'numbers in their own scale'} of shape {shape}"
            raise PfedlaError(f"{self.name}: x is {self.x.dtype} of shape {self.x.shape[1:]}, {whose} takes {takes}")
        if strange := [name for name in self.classes if name not in classes]:
            raise unknown("class", strange[0], classes)
        return replace(self, y=np.array([classes.index(name) for name in self.classes])[self.y], classes=classes)


def dataset_of(name: str, x: Any, y: Any, *, client: Any = None, test: Any = None) -> Dataset:
    """Check and arrange a user's arrays; uint8 images are normalised by the training part of a ready split, or all."""
    x = np.asarray(x)
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "biuf" or 0 in x.shape or x.size > MOST_NUMBERS:
        shapes = f"[n, features] or [n, (channels,) height, width], at most {MOST_NUMBERS:,} numbers"
        raise PfedlaError(f"{name}: x is {x.dtype} of shape {x.shape}; give {shapes}")
    for what, array in (("y", y), ("client", client), ("test", test)):
        if array is not None and np.shape(array) != (len(x),):
            raise PfedlaError(f"{name}: {what} has shape {np.shape(array)}, x has {len(x)} examples")
    test = None if test is None else np.asarray(test)
    if test is not None and test.dtype != bool:
        raise PfedlaError(f"{name}: test must be a boolean mask, it is {test.dtype}")
    x, (classes, y) = _arrange(name, x), _number(name, "y", y)
    seen = x if test is None or test.all() else x[~test]
    mean, std = pixel_statistics(seen) if x.dtype == np.uint8 else ((), ())
    dataset = Dataset(name=name, x=x, y=y, classes=classes, mean=mean, std=std, test=test)
    if client is None:
        return dataset
    names, client = _number(name, "client", client)
    return replace(dataset, client=client, client_names=names)


def _arrange(name: str, x: Array) -> Array:
    """Return vectors of int32, int64 (token ids) and images of uint8 in their type, others as float32."""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)  # channels last
    if x.ndim == 2 and x.dtype.kind == "i" and x.dtype.itemsize >= 4:
        return np.ascontiguousarray(x, f"i{x.dtype.itemsize}")  # in this machine's byte order
    if x.ndim == 4 and x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):  # the overflow is reported below
        x = np.ascontiguousarray(x, np.float32)
    if not (finite := np.isfinite(x).reshape(len(x), -1).all(1)).all():
        raise PfedlaError(f"{name}: x[{finite.argmin()}] is not finite, or too large for float32")
    return x


def pixel_statistics(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 images, from counts of the 256 values."""
    values = np.arange(256, dtype=np.float64)
    mean, std = [], []
    for channel in x.swapaxes(0, 1):
        # In pieces: counting takes eight bytes a pixel, and the largest sets have half a billion pixels.
        pieces = np.array_split(channel, len(x) // 4096 + 1)
        counts = sum(np.bincount(piece.reshape(-1), minlength=256) for piece in pieces)
        shares = counts / np.sum(counts)
        mean.append(float(shares @ values))
        std.append(float(np.sqrt(shares @ (values - mean[-1]) ** 2)) or 1.0)  # a constant image is left alone
    return tuple(mean), tuple(std)


def _number(name: str, what: str, values: Any) -> tuple[tuple[str, ...], Array]:
    """Return the distinct values as names, and for each example the number of its own."""
    values = np.asarray(values)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "iubU":
        raise PfedlaError(f"{name}: {what} must hold whole numbers or names, it is {values.dtype}")
    found, numbers = np.unique(values, return_inverse=True)
    if len(found) > (most := MOST_DIFFERENT[what]):
        raise PfedlaError(f"{name}: {what} has {len(found)} different values, at most {most} are possible")
    try:
        names = tuple(map(str, found))
        "".join(names).encode()
    except (SystemError, ValueError):  # code points beyond Unicode, or half of a surrogate pair
        raise PfedlaError(f"{name}: {what} holds names that are not valid Unicode") from None
    return names, numbers.astype(np.int64)


def load_arrays(path: Path) -> Dataset:
    """Read x, y, and optionally client (the owner of each example) and test (a mask): a .npz, or a folder of .npy."""
    if not path.is_dir():
        check_size(path)
    try:
        arrays = _read_arrays(path)
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        advice = "save plain arrays with numpy.savez (names as y.astype(str))"
        raise PfedlaError(f"{path}: cannot be read ({error}); {advice}") from None
    if missing := sorted({"x", "y"} - arrays.keys()):
        raise PfedlaError(f"{path}: no array {' and '.join(missing)}; give x, y and optionally client and test")
    return replace(dataset_of(path.name, **arrays), name=path.stem)  # errors name the file


def _read_arrays(path: Path) -> dict[str, Array]:
    arrays = {}
    if path.is_dir():  # of a site, which is one client
        for member in (path / f"{name}.npy" for name in ("x", "y", "test") if (path / f"{name}.npy").is_file()):
            with member.open("rb") as file:
                arrays[member.stem] = read_plain_array(file, member.stat().st_size, member.name)
        return arrays
    with zipfile.ZipFile(path) as archive:
        for name in sorted({"x.npy", "y.npy", "client.npy", "test.npy"}.intersection(archive.namelist())):
            packed = archive.getinfo(name)
            if packed.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may unpack to any size
                raise ValueError(f"{name} is packed in a way that numpy never does")
            if (size := packed.file_size) > min(LARGEST_ARRAY, max(LARGE, DENSEST * packed.compress_size)):
                raise ValueError(f"{name} would unpack to {size} bytes; save it unpacked, or save less")
            with archive.open(packed) as file:
                arrays[name.removesuffix(".npy")] = read_plain_array(file, size, name)
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


def read_cifar(files: Sequence[Path], num_classes: int, digests: Mapping[str, str]) -> tuple[Array, Array]:
    """Read images [n, 3, 32, 32] and their labels (of CIFAR-100 the fine ones) from CIFAR's binary files."""
    # The format has no header: the files' sizes are compared, and for files of the published size the SHA-256.
    parts, num_labels = CIFAR_PARTS[num_classes]
    kinds, record = len(num_labels), len(num_labels) + math.prod(CIFAR_IMAGE)
    sizes, pieces = [path.stat().st_size for path in files], []
    unit = max(size // record // part for size, part in zip(sizes, parts, strict=True))  # damage makes a file shorter
    for path, size, part in zip(files, sizes, parts, strict=True):
        whole = 0 < size <= LARGEST_FILE and size == part * unit * record
        _check(path, whole, f"{size} bytes are not {part * unit} records of CIFAR's binary version")
        _check(path, unit != CIFAR_BATCH or sha256(path) == digests[path.name], "its checksum is not the published one")
        pieces.append(np.fromfile(path, np.uint8).reshape(-1, record))
        _check(path, bool((pieces[-1][:, :kinds] < num_labels).all()), "labels out of range")
    records = np.concatenate(pieces)
    return records[:, kinds:].reshape(-1, *CIFAR_IMAGE), records[:, kinds - 1].astype(np.int64)
