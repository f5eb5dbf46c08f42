"""The user's own arrays, and what every data set is: plain arrays. Nothing is ever unpickled."""

import zipfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import read_plain_array

Array = npt.NDArray[Any]
PLAIN = "save plain arrays with numpy.savez (names as y.astype(str))"
LARGEST = 2**33  # bytes of an array in a file
LARGE, DENSEST = 2**28, 200  # an array of more bytes may not unpack to more times its packed size
MOST_NUMBERS, MOST_EXAMPLES, MOST_CHANNELS = 2**31, 2**27, 1024
MOST_DIFFERENT = {"y": 10_000, "client": 100_000}
LONGEST_NAME = 1000  # characters
UNREADABLE = (  # what numpy and zipfile raise on damaged files
    OSError, ValueError, TypeError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True)
class Dataset:
    """Pooled examples. Images are uint8 [n, channels, height, width], vectors float32 [n, features]; labels 0..classes-1."""

    name: str
    x: Array
    y: Array
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, in the units of x; empty: x is used as it is
    std: tuple[float, ...]
    client: Array | None = None  # whose example each is, if the data come partitioned: 0..clients-1
    client_names: tuple[str, ...] = ()
    test: Array | None = None  # True where the example belongs to a ready test split
    coarse: Array | None = None  # the superclass of each example, if the data have them (CIFAR-100)
    coarse_classes: tuple[str, ...] = ()
    subset: str = ""  # the user's .npz that stands in for the official files of this name, if one does

    def limited(self, num_classes: int) -> "Dataset":
        """The examples of the first classes alone."""
        if num_classes > len(self.classes):
            raise PfedlaError(f"classes_limit = {num_classes}, but {self.name} has only {len(self.classes)} classes")
        if num_classes == len(self.classes):
            return self
        rows = self.y < num_classes
        client, test, coarse = (None if array is None else array[rows] for array in (self.client, self.test, self.coarse))
        classes = self.classes[:num_classes]
        return replace(self, x=self.x[rows], y=self.y[rows], classes=classes, client=client, test=test, coarse=coarse)

    def fitted(self, shape: tuple[int, ...], classes: tuple[str, ...], *, pixels: bool, whose: str) -> "Dataset":
        """The same with its labels numbered as in `classes`; refused if the examples are not what a model takes."""
        if self.x.shape[1:] != shape:
            raise PfedlaError(f"{self.name}: examples of shape {self.x.shape[1:]}, {whose} takes {shape}")
        if (self.x.dtype == np.uint8) != pixels:
            kind = "uint8 images" if pixels else "floats"
            raise PfedlaError(f"{self.name}: x is {self.x.dtype}, but {whose} takes {kind} in their own scale")
        for name in self.classes:
            if name not in classes:
                raise unknown("class", name, classes)
        number = np.array([classes.index(name) for name in self.classes])
        return replace(self, y=number[self.y], classes=classes)


def load_arrays(path: Path) -> Dataset:
    """The same arrays from a .npz, or from a folder that holds each as a .npy."""
    return _load_folder(path) if path.is_dir() else load_npz(path)


def _load_folder(path: Path) -> Dataset:
    arrays: dict[str, Any] = {}
    for name in ("x", "y", "test"):
        file = path / f"{name}.npy"
        if file.is_file():
            try:
                with file.open("rb") as opened:
                    arrays[name] = read_plain_array(opened, file.stat().st_size, str(file))
            except (OSError, ValueError) as error:
                raise PfedlaError(f"{file}: cannot be read ({error})") from None
        elif name != "test":
            raise PfedlaError(f"{path}: no {name}.npy; a folder of data holds x.npy, y.npy and perhaps test.npy")
    return dataset_of(path.name, **arrays)


def load_npz(path: Path) -> Dataset:
    """A file with x, y, and optionally client (whose example) and test (a ready test split)."""
    try:
        if not path.is_file():  # a pipe or a device would never end
            raise FileNotFoundError
        with zipfile.ZipFile(path) as archive:
            found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            arrays = {name: _read_array(archive, found[name]) for name in ("x", "y", "client", "test") if name in found}
    except FileNotFoundError:
        raise PfedlaError(f"{path}: no such file") from None
    except zipfile.BadZipFile as error:
        why = f"{error}; if it is a pickle, which is never opened: {PLAIN}"
        raise PfedlaError(f"{path}: cannot be read as .npz of plain arrays ({why})") from None
    except UNREADABLE as error:
        if "pickle" in str(error):  # numpy would advise to allow it
            raise PfedlaError(f"{path}: holds Python objects, which are never opened; {PLAIN}") from None
        raise PfedlaError(f"{path}: cannot be read as .npz of plain arrays ({error})") from error
    if missing := {"x", "y"} - arrays.keys():
        holds = ", ".join(found)[:200] or "nothing"
        raise PfedlaError(f"{path}: no array {' and '.join(sorted(missing))}; it holds: {holds}")
    return dataset_of(path.stem, **arrays)


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """An array of the archive, once the size that its head claims is known to be there; numpy would allocate it unseen."""
    size = member.file_size
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # of others, any amount may come at once
        raise ValueError(f"{member.filename} is packed in a way that numpy never does")
    if size > LARGEST or (size > LARGE and size > DENSEST * member.compress_size):
        raise ValueError(f"{member.filename} would unpack to {size} bytes; if that is right, save it unpacked or save less")
    with archive.open(member) as file:
        return read_plain_array(file, size, member.filename)


def dataset_of(name: str, x: Array, y: Array, client: Array | None = None, test: Array | None = None) -> Dataset:
    """Check and lay out a user's arrays. Floats are used as given; uint8 images are normalised by their mean and standard
    deviation over the training part of a ready split, else over all examples."""
    x = np.asarray(x)
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "biuf" or 0 in x.shape:
        raise PfedlaError(f"{name}: x is {x.dtype} of shape {x.shape}; give [n, features] or [n, (channels,) h, w] numbers")
    if x.size > MOST_NUMBERS or len(x) > MOST_EXAMPLES:
        raise PfedlaError(f"{name}: x has shape {x.shape}; at most {MOST_EXAMPLES:,} examples, {MOST_NUMBERS:,} numbers in all")
    for what, array in (("y", y), ("client", client), ("test", test)):
        if array is not None and np.shape(array) != (len(x),):
            raise PfedlaError(f"{name}: {what} has shape {np.shape(array)}, x has {len(x)} examples")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)  # channels last
    if x.ndim == 4 and x.shape[1] > MOST_CHANNELS:
        raise PfedlaError(f"{name}: the images have {x.shape[1]} channels, at most {MOST_CHANNELS} are possible")
    ready = None if test is None else np.asarray(test)
    if ready is not None and ready.dtype != bool:
        raise PfedlaError(f"{name}: test must be a boolean mask, it is {ready.dtype}")
    classes, targets = _numbered(name, "y", y)
    client_names, owner = ((), None) if client is None else _numbered(name, "client", client)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if x.dtype == np.uint8 and x.ndim == 4:
        mean, std = pixel_statistics(x if ready is None or ready.all() else x[~ready])
    else:
        with np.errstate(over="ignore"):  # is said below
            x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise PfedlaError(f"{name}: x holds numbers that are not finite, or too large for float32")
    return Dataset(name, np.ascontiguousarray(x), targets, classes, mean, std, owner, client_names, ready)


def pixel_statistics(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, from exact counts of the 256 values."""
    values = np.arange(256, dtype=np.float64)
    mean, std = [], []
    for channel in range(x.shape[1]):
        # In pieces: counting takes eight bytes a pixel, and the largest sets have half a billion of them.
        pieces = (x[start : start + 4096, channel] for start in range(0, len(x), 4096))
        counts = sum(np.bincount(piece.reshape(-1), minlength=256) for piece in pieces)
        shares = counts / np.sum(counts)
        center = float(shares @ values)
        mean.append(center)
        std.append(float(np.sqrt(shares @ (values - center) ** 2)) or 1.0)  # a constant image is left alone
    return tuple(mean), tuple(std)


def _numbered(name: str, what: str, values: Array) -> tuple[tuple[str, ...], Array]:
    """The distinct values as names, and for each example the number of its own."""
    values = np.asarray(values)
    if values.dtype.kind in "SU" and values.dtype.itemsize > 4 * LONGEST_NAME:
        raise PfedlaError(f"{name}: {what} is {values.dtype}; a name may have at most {LONGEST_NAME} characters")
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "iubU":
        raise PfedlaError(f"{name}: {what} must hold whole numbers or names, it is {values.dtype}")
    names, numbers = np.unique(values, return_inverse=True)
    if len(names) > MOST_DIFFERENT[what]:
        raise PfedlaError(f"{name}: {what} has {len(names)} different values, at most {MOST_DIFFERENT[what]} are possible")
    return tuple(map(str, names)), numbers.astype(np.int64)
