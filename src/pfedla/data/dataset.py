"""Data sets are plain arrays, checked."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.trees import Tree, leaves, length, map_tree, take_rows

Array = npt.NDArray[Any]
MOST_NUMBERS = 2**31
MOST_DIFFERENT = {"y": 10_000, "client": 100_000}
MOST_INPUTS = 16  # leaves of a tree of inputs
FEW = 20  # floats that are whole numbers with at most so many different values are class labels
TASKS = ("classification", "multilabel", "regression", "survival")
STRATA = {"survival": ("censored", "event")}  # names of what the examples are split by, where they have no classes


class Column(NamedTuple):
    """A column of a table: a number, a category (one-hot), or text (token ids and mask)."""

    name: str
    kind: str  # number, category, text
    categories: tuple[str, ...] = ()
    tokenizer: str = ""  # text: the path of a tokenizer.json
    length: int = 0  # text: number of tokens


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Pooled examples [n, channels, height, width] or [n, features] or a tree, and y as the task has it."""

    name: str
    x: Tree  # images are uint8 or float32; vectors are float32 (NaN: missing in a table), or int32 or int64 (token ids)
    y: Array  # classification: 0..classes-1
    classes: tuple[str, ...]  # names of the strata
    mean: tuple[float, ...] = ()  # per channel, in the units of x; empty: x is used as it is
    std: tuple[float, ...] = ()
    client: Array | None = None  # the owner of each example, if the data come partitioned: 0..clients-1
    client_names: tuple[str, ...] = ()
    test: Array | None = None  # True where the example belongs to a ready test split
    subset: str = ""  # the user's .npz that is read in place of the official files of this name, if one is
    task: str = "classification"
    targets: tuple[str, ...] = ()  # names of the model's outputs where they are not the classes
    vocabulary: int = 0  # token ids are below it; 0: there are none
    columns: tuple[Column, ...] = ()  # of a table
    rows: Array | None = None  # where the examples are in their table, if rows were left out
    warnings: tuple[str, ...] = ()  # about the examples that were left out

    @property
    def strata(self) -> Array:
        """The labels by which examples are split."""
        return strata_of(self.task, self.y)

    def keep_classes(self, num_classes: int) -> "Dataset":
        """Return the examples of the first classes only."""
        if num_classes == len(self.classes):
            return self
        if self.task != "classification":
            raise PfedlaError(f"classes_limit = {num_classes}: the task is {self.task}, which has no classes")
        if num_classes > len(self.classes):
            raise PfedlaError(f"classes_limit = {num_classes}, {self.name} has only {len(self.classes)} classes")
        return replace(self._take(self.y < num_classes), classes=self.classes[:num_classes])

    def keep(self, kept: Array) -> "Dataset":
        """Return the examples that have no missing value, with a warning; refuse to lose a client."""
        if self.client is not None and (lost := np.setdiff1d(self.client, self.client[kept])).size:
            every = f"every row of client {self.client_names[lost[0]]} has a missing value"
            raise PfedlaError(f'{self.name}: {every}; use missing = "impute"')
        count = f"{(~kept).sum():,} of {len(kept):,} rows have a missing value"
        warning = f'{self.name}: {count} and are left out (missing = "drop")'
        return replace(self._take(kept), rows=np.flatnonzero(kept), warnings=(warning,))

    def _take(self, kept: Array) -> "Dataset":
        arrays = {key: getattr(self, key) for key in ("y", "client", "test", "rows")}
        less: dict[str, Any] = {key: array[kept] for key, array in arrays.items() if array is not None}
        return replace(self, **less, x=take_rows(self.x, kept))

    def match(
        self, shape: Tree, classes: tuple[str, ...], *, pixels: bool, whose: str, task: str = "classification"
    ) -> "Dataset":
        """Number the labels as in `classes`; refuse examples that `whose` model does not take."""
        found = map_tree(lambda a: a.shape[1:], self.x)
        if found != shape or any((a.dtype == np.uint8) != pixels for a in leaves(self.x)):
            takes = f"{'uint8 images' if pixels else 'numbers in their own scale'} of shape {shape}"
            kinds = ", ".join(str(a.dtype) for a in leaves(self.x))
            raise PfedlaError(f"{self.name}: x is {kinds} of shape {found}, {whose} takes {takes}")
        if self.task != task:
            raise PfedlaError(f"{self.name}: y is of a {self.task} task, {whose} is made for {task}")
        if task != "classification":
            return self
        if strange := [name for name in self.classes if name not in classes]:
            raise unknown("class", strange[0], classes)
        return replace(self, y=np.array([classes.index(name) for name in self.classes])[self.y], classes=classes)


def strata_names(task: str) -> tuple[str, ...]:
    """Return the names of what examples without classes are split by."""
    return STRATA.get(task, ("examples",))


def strata_of(task: str, y: Array) -> Array:
    """Return the labels by which examples are split: the class, the event, or zeros."""
    if task == "classification":
        return y
    return y[:, 1].astype(np.int64) if task == "survival" else np.zeros(len(y), np.int64)


def dataset_of(
    name: str,
    x: Tree,
    y: Any,
    *,
    client: Any = None,
    test: Any = None,
    task: str = "auto",
    targets: tuple[str, ...] = (),
    columns: tuple[Column, ...] = (),
    vocabulary: int = 0,
) -> Dataset:
    """Check and arrange a user's arrays; uint8 images are normalised by the training part of a ready split, or all."""
    x, y = _arrange_tree(name, x, missing=bool(columns)), _plain(y)
    for what, array in (("y", y), ("client", client), ("test", test)):
        shape, expected = np.shape(array), (length(x),)
        if array is not None and (shape[:1] if what == "y" and len(shape) == 2 else shape) != expected:
            raise PfedlaError(f"{name}: {what} has shape {shape}, x has {length(x)} examples")
    test = None if test is None else np.asarray(test)
    if test is not None and test.dtype != bool:
        raise PfedlaError(f"{name}: test must be a boolean mask, it is {test.dtype}")
    task = choose_task(name, y, task)
    if task == "classification":
        classes, y = _number(name, "y", y)
    else:
        classes, y, targets = strata_names(task), *_arrange_targets(name, y, task, targets)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    if isinstance(x, np.ndarray) and x.dtype == np.uint8:
        mean, std = pixel_statistics(x if test is None or test.all() else x[~test])
    dataset = Dataset(name=name, x=x, y=y, classes=classes, mean=mean, std=std, test=test, task=task, columns=columns)
    targets = () if task == "classification" else targets
    dataset = replace(dataset, targets=targets, vocabulary=vocabulary or _count_tokens(x))
    if client is None:
        return dataset
    names, client = _number(name, "client", client)
    return replace(dataset, client=client, client_names=names)


def choose_task(name: str, y: Array, task: str = "auto") -> str:
    """Return the task, or for "auto" the one that y is made for; refuse a y that the task cannot have."""
    whole = y.dtype.kind in "biu" or (y.dtype.kind == "f" and bool((y == np.round(y)).all()))
    if y.ndim == 2 and y.dtype.kind not in "biuf":
        raise PfedlaError(f"{name}: y is {y.dtype} of shape {y.shape}; several columns of y must hold numbers")
    if task == "auto":
        if y.ndim == 2:
            return "multilabel" if np.isin(y, (0, 1)).all() else "regression"
        labels = y.dtype.kind != "f" or (whole and len(np.unique(y)) <= FEW)
        return "classification" if labels else "regression"
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    shapes = {"classification": y.ndim == 1, "multilabel": y.ndim == 2, "survival": y.ndim == 2 and y.shape[1] == 2}
    if not shapes.get(task, True):
        needs = {"classification": "[n]", "multilabel": "[n, labels]", "survival": "[n, 2]: time and event"}[task]
        raise PfedlaError(f"{name}: y has shape {y.shape}, the task {task} takes {needs}")
    return task


def _arrange_targets(name: str, y: Array, task: str, targets: tuple[str, ...]) -> tuple[Array, tuple[str, ...]]:
    """Return y as float32 and the names of the model's outputs."""
    if y.dtype.kind not in "biuf":
        raise PfedlaError(f"{name}: y must hold numbers for the task {task}, it is {y.dtype}")
    with np.errstate(over="ignore"):
        y = np.ascontiguousarray(y, np.float32)
    if not np.isfinite(y).all():
        raise PfedlaError(f"{name}: y{_first(~np.isfinite(y))} is not finite, or too large for float32")
    flags = y if task == "multilabel" else y[:, 1:] if task == "survival" else y[:0]
    if not np.isin(flags, (0, 1)).all():
        what = "the event, y[:, 1]," if task == "survival" else "y"
        raise PfedlaError(f"{name}: {what} must be 0 or 1 for the task {task}; row {_first(~np.isin(flags, (0, 1)))}")
    if task == "survival":
        if (y[:, 0] < 0).any() or not y[:, 1].any():
            raise PfedlaError(f"{name}: survival takes times of 0 or more and at least one event, y[:, 1] = 1")
        return y, ("risk",)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and task == "regression" else y
    count = y.shape[1] if y.ndim == 2 else 1
    if targets and len(targets) != count:
        raise PfedlaError(f"{name}: {len(targets)} names of targets for {count} columns of y")
    return y, targets or (("target",) if y.ndim == 1 else tuple(map(str, range(count))))


def _first(bad: Array) -> str:
    """Return the position of the first True as [row, column]."""
    return str(np.argwhere(bad)[0].tolist())


def _plain(values: Any) -> Array:
    """Return an array; one of objects that are all text (as pandas has it) becomes an array of text."""
    array: Array = np.asarray(values)
    if array.dtype.kind in "OT" and all(isinstance(one, str) for one in array.flat):
        return array.astype(str)
    return array


def _count_tokens(x: Tree) -> int:
    """Return one more than the largest token id of integer vectors, or of the input "ids"; 0 if there are none."""
    ids = next((x[key] for key in ("ids", "input_ids") if key in x), None) if isinstance(x, dict) else x
    if not isinstance(ids, np.ndarray) or ids.dtype.kind != "i" or ids.min() < 0:
        return 0
    return int(ids.max()) + 1


def _arrange_tree(name: str, x: Tree, *, missing: bool = False) -> Tree:
    """Return checked inputs: an array, or a tuple or dict of arrays of one length."""
    if not isinstance(x, dict | tuple):
        return _arrange(name, np.asarray(x), missing=missing)
    keys = list(x) if isinstance(x, dict) else [f"x{position}" for position in range(len(x))]
    if not 1 <= len(keys) <= MOST_INPUTS or not all(isinstance(key, str) and key.isidentifier() for key in keys):
        raise PfedlaError(f"{name}: x must have 1 to {MOST_INPUTS} inputs, named as arguments of the model")
    arranged = [
        _arrange_leaf(f"{name}: input {key}", np.asarray(leaf)) for key, leaf in zip(keys, leaves(x), strict=True)
    ]
    if len({len(leaf) for leaf in arranged}) > 1:
        sizes = ", ".join(f"{key} {len(leaf)}" for key, leaf in zip(keys, arranged, strict=True))
        raise PfedlaError(f"{name}: the inputs have different numbers of examples ({sizes})")
    return dict(zip(keys, arranged, strict=True)) if isinstance(x, dict) else tuple(arranged)


def _arrange_leaf(name: str, x: Array) -> Array:
    """Return one of several inputs: floats as float32, whole numbers as int64, bool as it is."""
    if x.ndim < 1 or x.dtype.kind not in "biuf" or 0 in x.shape or x.size > MOST_NUMBERS:
        raise PfedlaError(f"{name} is {x.dtype} of shape {x.shape}; give numbers [n, …], at most {MOST_NUMBERS:,}")
    kind = {"b": np.bool_, "f": np.float32}.get(x.dtype.kind, np.int64)
    return _check_finite(name, np.ascontiguousarray(x, kind))


def _arrange(name: str, x: Array, *, missing: bool = False) -> Array:
    """Return vectors of int32, int64 (token ids) and images of uint8 in their type, others as float32."""
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "biuf" or 0 in x.shape or x.size > MOST_NUMBERS:
        shapes = f"[n, features] or [n, (channels,) height, width], at most {MOST_NUMBERS:,} numbers"
        raise PfedlaError(f"{name}: x is {x.dtype} of shape {x.shape}; give {shapes}")
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
    return x if missing else _check_finite(f"{name}: x", x)


def _check_finite(name: str, x: Array) -> Array:
    if x.dtype.kind == "f" and not (finite := np.isfinite(x)).all():
        raise PfedlaError(f"{name}{_first(~finite)} is not finite, or too large for float32")
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
    values = _plain(values)
    if values.dtype.kind == "S":
        values = np.char.decode(values, "utf-8", "replace")
    if values.dtype.kind == "f":
        if not (whole := (values == np.round(values)) & (np.abs(values) < 2**53)).all():
            row = _first(~whole)
            raise PfedlaError(f"{name}: {what} must hold whole numbers or names, {what}{row} is {values[~whole][0]}")
        values = values.astype(np.int64)
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
