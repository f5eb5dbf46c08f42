"""Everything that examples come from to a `Dataset`: names, files, folders, frames, and data sets in Python."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.core.errors import PfedlaError, shown
from pfedla.core.settings import AUTO
from pfedla.core.trees import Tree, leaves, map_tree
from pfedla.data import datasets
from pfedla.data.arrays import load_arrays
from pfedla.data.dataset import Array, Column, Dataset, dataset_of
from pfedla.data.folders import load_images
from pfedla.data.frames import ENDINGS, dataset_of_frame, read_table
from pfedla.data.partition import Data

FOR_TABLES = ("label", "client", "drop", "text", "tokenizer", "missing")  # settings of [data]
LABEL_KEYS = ("label", "labels")  # of items that are dicts


def is_own_file(name: str) -> bool:
    """Return whether a data set is a file or folder of the user, not one of the catalogue."""
    return name not in datasets.KNOWN and (name.lower().endswith((".npz", *ENDINGS)) or Path(name).is_dir())


def load_data(data: Data, task: str = AUTO, path: Path | None = None, columns: Sequence[Column] = ()) -> Dataset:
    """Load the data set of the section, or `path` in the same way: with the columns of the run, if it has any."""
    if path is None and not is_own_file(data.dataset):
        known = datasets.find(data.dataset)
        for key in FOR_TABLES:
            may_be = ("drop", "impute") if key == "missing" and known.missing else (known.of_table.get(key),)
            if getattr(data, key) not in (AUTO, *may_be):
                raise PfedlaError(f"{key} = {getattr(data, key)!r} is for your own tables; leave it out")
        dataset = datasets.load(data.dataset, data.missing)
        if task not in (AUTO, dataset.task):
            raise PfedlaError(f"task = {task!r}: {data.dataset} is for {dataset.task}")
        return dataset
    path = path or Path(data.dataset)
    if path.name.lower().endswith(ENDINGS):
        return dataset_of_frame(path.name, read_table(path), data, task, columns)
    if columns:
        raise PfedlaError(f"{path}: the run was made of a table; give a file {', '.join(ENDINGS)} with its columns")
    if unused := [key for key in FOR_TABLES if getattr(data, key) != AUTO]:
        raise PfedlaError(f"{unused[0]} is for tables ({', '.join(ENDINGS)}), {path.name} is not one; leave it out")
    if path.is_dir() and not any(path.glob("*.npy")):
        return load_images(path)
    return load_arrays(path, task)


def is_frame(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "pandas" and getattr(x, "ndim", 0) == 2


def to_dataset(name: str, x: Any, y: Any, data: Data, *, task: str, client: Any, test: Any) -> Dataset:
    """Return arrays or a frame as a data set; of a frame y and client may be names of columns."""
    if is_frame(x):
        given = {"y": y, "client": client, "test": test}
        columns = {key: value for key, value in given.items() if isinstance(value, str) and key != "test"}
        arrays = {key: value for key, value in given.items() if value is not None and key not in columns}
        named = {"label": columns.get("y"), "client": columns.get("client")}
        data = data.model_copy(update={key: value for key, value in named.items() if value})
        return dataset_of_frame(name, x, data, task, **arrays)
    try:
        return dataset_of(name, x, y, client=client, test=test, task=task)
    except (TypeError, ValueError) as error:  # numpy's: a ragged list, an object that is no array
        if isinstance(error, PfedlaError):
            raise
        advice = "give arrays [n, …], or use federation_from for torch Datasets"
        raise PfedlaError(f"{name}: not arrays of numbers ({error}); {advice}") from None


def combine(clients: Mapping[str, Any], test: Mapping[str, Any] | None, data: Data, task: str) -> Dataset:
    """Return the data of all clients as one data set that names their owners, and the test examples if given."""
    if not isinstance(clients, Mapping) or not clients:
        raise PfedlaError(f"give a dict of client names and their data, not {shown(clients)}")
    if test is not None and (strange := sorted(map(str, {*clients} ^ {*test}))):
        raise PfedlaError(f"client {strange[0]} has not both training and test data")
    sources = [(str(name), False, source) for name, source in clients.items()]
    sources += [(str(name), True, source) for name, source in (test or {}).items()]
    if all(is_frame(source) for *_, source in sources):
        import pandas

        frame = pandas.concat([source for *_, source in sources], ignore_index=True)
        marks = _mark(sources, [len(source) for *_, source in sources], ready=test is not None)
        return dataset_of_frame("frames", frame, data, task, **marks)
    parts = [_collect(f"client {name}{', test' * held}", source) for name, held, source in sources]
    for (name, _, _), (x, y) in zip(sources, parts, strict=True):
        shapes = [map_tree(lambda leaf: leaf.shape[1:], one) for one in (x, parts[0][0])]
        if shapes[0] != shapes[1] or y.shape[1:] != parts[0][1].shape[1:]:
            raise PfedlaError(f"client {name}: x has shape {shapes[0]}, that of client {sources[0][0]} {shapes[1]}")
    marks = _mark(sources, [len(y) for _, y in parts], ready=test is not None)
    x = map_tree(lambda *pieces: np.concatenate(pieces), *(x for x, _ in parts))
    return dataset_of("clients", x, np.concatenate([y for _, y in parts]), task=task, **marks)


def _mark(sources: Sequence[tuple[str, bool, Any]], sizes: Sequence[int], *, ready: bool) -> dict[str, Any]:
    owners = {"client": np.repeat([name for name, *_ in sources], sizes)}
    return owners | ({"test": np.repeat([held for _, held, _ in sources], sizes)} if ready else {})


def _collect(name: str, source: Any) -> tuple[Tree, Array]:
    """Return x and y of one client: a pair of arrays, or a data set whose items are pairs or dicts."""
    if is_frame(source):
        raise PfedlaError(f"{name}: it has a pandas frame, but not every client has; give all as frames or none")
    if isinstance(source, tuple) and len(source) == 2 and not isinstance(source[0], Mapping | tuple):
        arrays = [np.asarray(one) for one in source]
        if arrays[0].dtype.kind != "O" and arrays[0].ndim > 0 and len(arrays[0]) == len(arrays[1]):
            return arrays[0], arrays[1]
    elif isinstance(source, tuple) and len(source) == 2 and np.ndim(source[1]) > 0:
        return map_tree(np.asarray, source[0]), np.asarray(source[1])
    try:
        items = [source[row] for row in range(len(source))]
    except (TypeError, KeyError, NotImplementedError):
        kinds = "a torch or Hugging Face data set with a length, a pair (x, y) of arrays, or a frame"
        raise PfedlaError(f"{name}: {type(source).__name__} cannot be read; give {kinds}") from None
    if not items:
        raise PfedlaError(f"{name} has no examples")
    pairs = [_split_item(f"{name}, item {row}", item) for row, item in enumerate(items)]
    structure = map_tree(np.shape, pairs[0][0])
    for row, (x, y) in enumerate(pairs):
        if map_tree(np.shape, x) != structure or np.shape(y) != np.shape(pairs[0][1]):
            raise PfedlaError(f"{name}, item {row}: x has shape {map_tree(np.shape, x)}, item 0 has {structure}")
    return map_tree(lambda *rows: np.stack(rows), *(x for x, _ in pairs)), np.stack([y for _, y in pairs])


def _split_item(name: str, item: Any) -> tuple[Tree, Array]:
    """Return x and y of one example; of a dict the inputs that are numbers, alone if there is a single one."""
    if isinstance(item, Mapping):
        keys = [key for key in LABEL_KEYS if key in item]
        if len(keys) != 1:
            raise PfedlaError(
                f"{name}: a dict needs one of the keys {' or '.join(LABEL_KEYS)}, it has {shown([*item])}"
            )
        inputs = {str(key): np.asarray(value) for key, value in item.items() if key != keys[0]}
        inputs = {key: value for key, value in inputs.items() if value.dtype.kind in "biuf"}
        x: Tree = inputs if len(inputs) != 1 else next(iter(inputs.values()))
        y = np.asarray(item[keys[0]])
    elif isinstance(item, tuple | list) and len(item) == 2:
        x = item[0] if isinstance(item[0], dict | tuple) else (item[0],)
        x = map_tree(np.asarray, x)
        x, y = x if isinstance(item[0], dict | tuple) else x[0], np.asarray(item[1])
    else:
        raise PfedlaError(f"{name}: an item is (x, y) or a dict with a label, not {type(item).__name__}")
    if not [*leaves(x)] or any(leaf.dtype.kind not in "biuf" for leaf in leaves(x)):
        raise PfedlaError(f"{name}: it has no inputs that are numbers")
    return x, y
