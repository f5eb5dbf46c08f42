"""Data sets as plain arrays: embedded digits, IDX files, the user's own .npz. Nothing is ever unpickled."""

import gzip
import os
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pfedla.errors import PfedlaError, unknown

Array = npt.NDArray[Any]


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


@dataclass(frozen=True)
class Known:
    """What is known of a data set before any file is read, and the paper's settings for it."""

    shape: tuple[int, ...]
    num_classes: int
    lr: float
    samples_per_client: int | None  # None: as many as the partition allows
    load: Callable[[], Dataset] | None  # None: only its shape is known (accounting)
    summary: str


def data_directory() -> Path:
    """PFEDLA_DATA_DIR, or the user's cache."""
    import platformdirs

    return Path(os.environ.get("PFEDLA_DATA_DIR") or platformdirs.user_cache_dir("pfedla"))


def load_digits() -> Dataset:
    """scikit-learn's digits: 1,797 images of 8x8 with values 0..16, embedded in the package."""
    from sklearn.datasets import load_digits as read

    bunch = read()
    x = bunch.images.astype(np.uint8)[:, None]
    # Mean and standard deviation over all 1,797 images, in the units of the file.
    return Dataset("digits", x, bunch.target.astype(np.int64), tuple("0123456789"), mean=(4.884,), std=(6.017,))


# The .gz files as published by the authors (github.com/zalandoresearch/fashion-mnist, MD5 in its README).
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FASHION_FILES = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def fashion_mnist_folder() -> Path | None:
    """The first place that holds all four files; None if there is none."""
    places = [data_directory() / "fashion-mnist", Path("/usr/share/datasets/fashion-mnist")]
    return next((place for place in places if all((place / name).exists() for name in FASHION_FILES)), None)


def load_fashion_mnist() -> Dataset:
    """Fashion-MNIST: 70,000 images of 28x28, train and test pooled as the paper pools them."""
    folder = fashion_mnist_folder() or _download("fashion-mnist", FASHION_URL, FASHION_FILES)
    parts = [
        (read_idx(folder / f"{part}-images-idx3-ubyte.gz"), read_idx(folder / f"{part}-labels-idx1-ubyte.gz"))
        for part in ("train", "t10k")
    ]
    for images, labels in parts:
        if images.shape[1:] != (28, 28) or labels.shape != (len(images),) or not len(images) or labels.max() > 9:
            shapes = f"images {images.shape} and labels {labels.shape}"
            raise PfedlaError(f"{folder}: {shapes} are not Fashion-MNIST's; fetch the files anew")
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    x, y = x[:, None], y.astype(np.int64)
    # Mean and standard deviation of the 60,000 training images: 0.2860 and 0.3530 of 255.
    return Dataset("fashion-mnist", x, y, FASHION_CLASSES, mean=(0.2860 * 255,), std=(0.3530 * 255,))


def _download(name: str, url: str, files: dict[str, str]) -> Path:
    import pooch

    target = data_directory() / name
    for file, checksum in files.items():
        try:
            pooch.retrieve(url + file, known_hash=checksum, fname=file, path=target, progressbar=True)
        except Exception as error:  # pooch passes on whatever the network raised
            raise PfedlaError(
                f"{name} is not here and could not be downloaded ({type(error).__name__}): put "
                f"{', '.join(files)} into {target}, or on Debian install dataset-{name}"
            ) from error
    return target


def read_idx(path: Path) -> Array:
    """An IDX file of unsigned bytes, gzipped or not; damage is named."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros != 0 or kind != 8 or not 1 <= dimensions <= 4:
                raise PfedlaError(f"{path}: not an IDX file of unsigned bytes; fetch it anew")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            expected = int(np.prod(shape, dtype=object))
            if expected > 2**31:
                raise PfedlaError(f"{path}: claims {expected} bytes; fetch it anew")
            content = file.read(expected + 1)
    except (struct.error, EOFError, OSError, zlib.error) as error:
        raise PfedlaError(f"{path}: damaged or incomplete ({error}); fetch it anew") from error
    if len(content) != expected:
        raise PfedlaError(f"{path}: {len(content)} bytes of data where its head says {expected}; fetch it anew")
    return np.frombuffer(content, np.uint8).reshape(shape)


def load_npz(path: Path) -> Dataset:
    """The user's own arrays: x, y, and optionally client (whose example) and test (a ready test split)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = list(file.files)
            arrays = {name: np.asarray(file[name]) for name in ("x", "y", "client", "test") if name in found}
    except FileNotFoundError:
        raise PfedlaError(f"{path}: no such file") from None
    except (OSError, ValueError, TypeError, EOFError, MemoryError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise PfedlaError(f"{path}: cannot be read as .npz of plain arrays ({error})") from error
    if missing := {"x", "y"} - arrays.keys():
        raise PfedlaError(f"{path}: no array {' and '.join(sorted(missing))}; it holds: {', '.join(found) or 'nothing'}")
    return dataset_of(path.stem, **arrays)


def dataset_of(name: str, x: Array, y: Array, client: Array | None = None, test: Array | None = None) -> Dataset:
    """Check and lay out a user's arrays. Floats are used as given; uint8 images are normalised by their mean and standard
    deviation over the training part of a ready split, else over all examples."""
    x = np.asarray(x)
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "biuf" or 0 in x.shape:
        raise PfedlaError(f"{name}: x is {x.dtype} of shape {x.shape}; give [n, features] or [n, (channels,) h, w] numbers")
    for what, array in (("y", y), ("client", client), ("test", test)):
        if array is not None and np.shape(array) != (len(x),):
            raise PfedlaError(f"{name}: {what} has shape {np.shape(array)}, x has {len(x)} examples")
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3):
        x = x.transpose(0, 3, 1, 2)  # channels last
    ready = None if test is None else np.asarray(test)
    if ready is not None and ready.dtype != bool:
        raise PfedlaError(f"{name}: test must be a boolean mask, it is {ready.dtype}")
    classes, targets = _numbered(name, "y", y)
    client_names, owner = ((), None) if client is None else _numbered(name, "client", client)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if x.dtype == np.uint8 and x.ndim == 4:
        training = x if ready is None or ready.all() else x[~ready]
        mean = tuple(float(v) for v in training.mean((0, 2, 3), dtype=np.float64))
        std = tuple(float(v) or 1.0 for v in training.std((0, 2, 3), dtype=np.float64))
    else:
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise PfedlaError(f"{name}: x holds numbers that are not finite")
    return Dataset(name, np.ascontiguousarray(x), targets, classes, mean, std, owner, client_names, ready)


def _numbered(name: str, what: str, values: Array) -> tuple[tuple[str, ...], Array]:
    """The distinct values as names, and for each example the number of its own."""
    values = np.asarray(values)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind not in "iubU":
        raise PfedlaError(f"{name}: {what} must hold whole numbers or names, it is {values.dtype}")
    names, numbers = np.unique(values, return_inverse=True)
    return tuple(map(str, names)), numbers.astype(np.int64)


KNOWN: dict[str, Known] = {
    "digits": Known((1, 8, 8), 10, 0.05, None, load_digits, "1,797 digits of 8x8, embedded"),
    "fashion-mnist": Known((1, 28, 28), 10, 0.005, 600, load_fashion_mnist, "70,000 pieces of clothing, 28x28"),
    "emnist": Known((1, 28, 28), 10, 0.005, 600, None, "10 classes as in the paper, 28x28"),
    "cifar10": Known((3, 32, 32), 10, 0.01, 600, None, "10 classes of colour photographs, 32x32"),
    "cifar100": Known((3, 32, 32), 100, 0.01, 600, None, "100 classes of colour photographs, 32x32"),
}


def known(name: str) -> Known:
    if name not in KNOWN:
        raise unknown("data set", name, KNOWN)
    return KNOWN[name]


def load(name: str) -> Dataset:
    """A data set by its name, or a file that ends in .npz."""
    if name.endswith(".npz"):
        return load_npz(Path(name))
    ready = [other for other, entry in KNOWN.items() if entry.load]
    load_it = KNOWN[name].load if name in KNOWN else None
    if load_it is None:
        kind = "data set (it has no loader in this version)" if name in KNOWN else "data set"
        raise unknown(kind, name, [*ready, "a file.npz"])
    return load_it()
