"""What every data set is: plain arrays, checked."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pfedla.core.errors import PfedlaError, unknown

Array = npt.NDArray[Any]
MOST_NUMBERS = 2**31
MOST_DIFFERENT = {"y": 10_000, "client": 100_000}


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Pooled examples [n, channels, height, width] or [n, features], and their labels 0..classes-1.

    Images are uint8 or float32; vectors are float32, or int32 or int64 (token ids).
    """

    name: str
    x: Array
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
        for name in self.classes:
            if name not in classes:
                raise unknown("class", name, classes)
        number = np.array([classes.index(name) for name in self.classes])
        return replace(self, y=number[self.y], classes=classes)


def dataset_of(name: str, x: Any, y: Any, *, client: Any = None, test: Any = None) -> Dataset:
    """Check and arrange a user's arrays.

    uint8 images keep their type and get the mean and standard deviation of the training part of a ready split
    (else of all examples). Vectors of int32 or int64 (token ids) keep theirs. Other numbers become float32.
    """
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
    x = _arrange(name, x)
    seen = x if test is None or test.all() else x[~test]
    mean, std = pixel_statistics(seen) if x.dtype == np.uint8 else ((), ())
    classes, y = _number(name, "y", y)
    names, client = ((), None) if client is None else _number(name, "client", client)
    dataset = Dataset(name=name, x=x, y=y, classes=classes, mean=mean, std=std, test=test)
    return replace(dataset, client=client, client_names=names)


def _arrange(name: str, x: Array) -> Array:
    """Return [n, features] of float32 or integers, or [n, channels, height, width] of uint8 or float32."""
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
