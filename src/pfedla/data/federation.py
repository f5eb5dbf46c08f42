"""Arrays to clients: the partitioned data, kept compact and normalised when a client uses them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from pfedla.core.contracts import generator
from pfedla.core.errors import PfedlaError, invalid
from pfedla.core.settings import AUTO, Auto
from pfedla.core.training import normalise
from pfedla.core.trees import Tree, leaves, map_tree, take_rows
from pfedla.data.dataset import Array, Column, Dataset, strata_of
from pfedla.data.datasets import KNOWN
from pfedla.data.partition import Data, Split, leaked_share, resolve, split_dataset
from pfedla.data.scaling import Scaling, describe_columns, find_wild, is_numeric
from pfedla.data.sources import combine, is_own_file, load_data, to_dataset
from pfedla.data.validation import FEWEST, split_rows

LARGE_TARGET = 30  # of regression: a squared error this large needs a small learning rate


class Examples(NamedTuple):
    x: Tree  # images stay uint8
    y: Tensor


@dataclass(eq=False)
class Outline:
    """What a server knows of a federation: how many examples each client has and what an example is."""

    shape: Tree  # of one example: a tuple of sizes, or a tuple or dict of them
    classes: tuple[str, ...]  # names of the strata where the task is not classification
    num_examples: Tensor  # [clients], for training
    _: KW_ONLY
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    leaked_share: float = 0.0  # share of the test examples that train another client
    subset: str = ""  # the file that was read in place of the official ones, if one was
    known_counts: Array | None = None  # what the methods of these names return, where the server has no examples
    known_fingerprint: str = ""
    task: str = "classification"
    targets: tuple[str, ...] = ()  # names of the outputs where they are not the classes
    vocabulary: int = 0  # token ids are below it; 0: there are none
    columns: tuple[Column, ...] = ()  # of the table that the examples come from
    scaling: tuple[Scaling, ...] | None = None  # of each client; its examples are scaled already
    warnings: tuple[str, ...] = ()  # about the data

    def __post_init__(self) -> None:
        self.names = self.names or tuple(map(str, range(len(self))))

    def __len__(self) -> int:
        return len(self.num_examples)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the model's outputs."""
        return self.targets or self.classes

    def normalise(self, x: Tree) -> Tree:
        return normalise(x, self.mean, self.std)

    def describe_inputs(self) -> dict[str, Any]:
        """Return what federation.json says of the inputs and outputs, beside shape and classes."""
        scaling = None if self.scaling is None else [one.to_lists() for one in self.scaling]
        known: dict[str, Any] = {"targets": self.targets, "vocabulary": self.vocabulary}
        return known | {"columns": describe_columns(self.columns), "scaling": scaling}

    def class_counts(self) -> Array | None:
        """Return [clients, 2 (train, test), classes], or None where the server does not know them."""
        return self.known_counts

    def fingerprint(self) -> str:
        """Return the SHA-256 of all examples and how they are normalised, or "" where the server does not know it."""
        return self.known_fingerprint


class Federation(Outline):
    """The partitioned data: for each client its training and test examples, and how to normalise them."""

    def __init__(self, train: Sequence[Examples], test: Sequence[Examples], classes: tuple[str, ...], **known: Any):
        """`known`: mean, std, names, task and so on, as in `Outline`."""
        self.train, self.test = tuple(train), tuple(test)
        num_examples = torch.tensor([len(examples.y) for examples in self.train])
        super().__init__(map_tree(lambda leaf: tuple(leaf.shape[1:]), self.train[0].x), classes, num_examples, **known)
        for name, own, held in zip(self.names, self.train, self.test, strict=True):
            if not len(own.y) or not len(held.y):
                raise PfedlaError(f"client {name} has {len(own.y)} training, {len(held.y)} test examples: needs both")

    def __repr__(self) -> str:
        sizes = f"{self.num_examples.min()}-{self.num_examples.max()} training examples"
        what = f"{len(self.classes)} classes" if self.task == "classification" else self.task
        return f"Federation({len(self)} clients, {sizes}, {what})"

    def only(self, clients: Sequence[int]) -> "Federation":
        """Return some of the clients, under their names."""
        train, test = ([part[client] for client in clients] for part in (self.train, self.test))
        known = self._known_of(clients)
        if self.leaked_share:  # by their content, as their positions in the data set are not kept
            contents = ([_rows(one.x) for one in part] for part in (train, test))
            known["leaked_share"] = leaked_share(*contents)
        return Federation(train, test, self.classes, **known)

    def _known_of(self, clients: Sequence[int]) -> dict[str, Any]:
        kept = ("mean", "std", "subset", "task", "targets", "vocabulary", "columns", "warnings")
        known: dict[str, Any] = {key: getattr(self, key) for key in kept}
        known["scaling"] = None if self.scaling is None else tuple(self.scaling[client] for client in clients)
        known["names"] = tuple(self.names[client] for client in clients)
        return known

    def hold_back(self, share: float, seed: int) -> tuple["Federation", "Federation | None"]:
        """Return the clients that take part in a run, and the others: at least one and never all."""
        if not share:
            return self, None
        if len(self) < 2:
            raise PfedlaError(f"unseen_clients = {share}: a single client cannot be held back")
        count = min(len(self) - 1, max(1, int(share * len(self) + 0.5)))
        order = torch.randperm(len(self), generator=generator(seed, "unseen"))
        unseen, seen = (part.sort().values.tolist() for part in (order[:count], order[count:]))
        return self.only(seen), self.only(unseen)

    def for_validation(self, seed: int) -> "Federation":
        """Return the clients with a part of their training examples as test examples, and without their own ones."""
        if self.leaked_share:
            leaked = f"{100 * self.leaked_share:.0f} % of the test examples are training examples of another client"
            raise PfedlaError(f"{leaked}, so tuning would see them: leave out data.overlapping")
        large = [client for client, examples in enumerate(self.train) if len(examples.y) >= FEWEST]
        if not large:
            raise PfedlaError(f"no client has {FEWEST} training examples: nothing can be split off for validation")
        pairs = []
        for client in large:
            x, y = self.train[client]
            rng = np.random.default_rng(generator(seed, "validation", client=client).initial_seed())
            parts = map(torch.from_numpy, split_rows(strata_of(self.task, y.numpy()), rng))
            pairs.append([Examples(take_rows(x, rows), y[rows]) for rows in parts])
        # A scaling stays as it was measured: on all training rows, those for validation among them, on no test row.
        known, few = self._known_of(large), len(self) - len(large)
        if few:
            known["warnings"] += (f"{few} clients have fewer than {FEWEST} training examples and are not tuned on",)
        train, validation = zip(*pairs, strict=True)
        return Federation(train, validation, self.classes, **known)

    def fingerprint(self) -> str:
        known: tuple[Any, ...] = (self.classes, self.mean, self.std, self.names)
        known += () if self.task == "classification" else (self.task, self.targets)
        content = repr((*known, *map(digest_of, self.train, self.test)))
        return hashlib.sha256(content.encode()).hexdigest()

    def class_counts(self) -> Array:
        parts, length = zip(self.train, self.test, strict=True), len(self.classes)
        strata = [[strata_of(self.task, part.y.numpy()) for part in pair] for pair in parts]
        return np.array([[np.bincount(part, minlength=length) for part in pair] for pair in strata])


def _rows(x: Tree) -> list[bytes]:
    """Return the content of each example."""
    return [b"".join(map(bytes, row)) for row in zip(*(leaf.numpy() for leaf in leaves(x)), strict=True)]


def digest_of(train: Examples, test: Examples) -> str:
    """Return the SHA-256 of one client's examples and labels in their order."""
    digest = hashlib.sha256()
    for x, y in (train, test):
        for leaf in leaves(x):
            digest.update(repr((leaf.dtype, tuple(leaf.shape))).encode())
            digest.update(leaf.contiguous().numpy().data)
        digest.update(y.contiguous().numpy().data)
    return digest.hexdigest()


def federation_of(
    x: Any, y: Any, client: Any = None, test: Any = None, *, seed: int = 0, task: str = AUTO, **settings: Any
) -> Federation:
    """Make a federation from your own arrays: examples, labels, and the owner of each example or a partition.

    `x` may be a tuple or dict of arrays, or a pandas frame; of a frame, `y` and `client` may be names of columns.
    `test` marks a ready test split; without it 30 % of every client's examples are held out, class by class.
    Further arguments are those of the [data] section: `partition="dirichlet", clients=20, beta=0.3`.
    """
    data = _parse(settings)
    dataset = to_dataset("arrays", x, y, data, task=task, client=client, test=test)
    return build_federation(data, seed, dataset)[1]


def federation_from(
    clients: Mapping[str, Any],
    test: Mapping[str, Any] | None = None,
    *,
    task: str = AUTO,
    seed: int = 0,
    **settings: Any,
) -> Federation:
    """Make a federation from the data of each client, and perhaps ready test data of each.

    A client's data are a torch Dataset or a Hugging Face one (items (x, y), or dicts with "label" or "labels"), a pair
    (x, y), or a pandas frame (`label="column"`). Further arguments are those of the [data] section.
    """
    data = _parse(settings)
    return build_federation(data, seed, combine(clients, test, data, task))[1]


def _parse(settings: Mapping[str, Any]) -> Data:
    given = {key: v.item() if isinstance(v, np.generic) else v for key, v in settings.items() if v is not None}
    try:
        return Data(dataset="arrays", **given)
    except ValidationError as error:
        raise invalid(error, Data.model_fields) from None


def federation_of_one(
    dataset: Dataset,
    name: str,
    seed: int,
    test_share: float | Auto = AUTO,
    *,
    standardise: str = AUTO,
    scaling: Scaling | None = None,
) -> Federation:
    """Make a federation of one client that owns all examples of `dataset`; `scaling` replaces its own."""
    one = replace(dataset, client=np.zeros(len(dataset.y), np.int64), client_names=(name,))
    data = _parse({"partition": "client", "test_share": test_share, "standardise": standardise})
    return build_federation(data, seed, one, scaling=scaling)[1]


def build_federation(
    data: Data, seed: int, dataset: Dataset | None = None, task: str = AUTO, *, scaling: Scaling | None = None
) -> tuple[Data, Federation]:
    """Return the section with every "auto" resolved, and the federation that it describes."""
    data, dataset = resolve(data, dataset or load_data(data, task))
    if dataset.task == "classification" and len(dataset.classes) < 2:
        raise PfedlaError(f"{dataset.name}: y holds a single class, {dataset.classes[0]}")
    split = split_dataset(dataset, data, np.random.default_rng(generator(seed, "partition").initial_seed()))
    names = dataset.client_names if data.partition == "client" else tuple(map(str, range(len(split[0]))))
    copied = ("mean", "std", "subset", "task", "targets", "vocabulary", "columns")
    known: dict[str, Any] = {key: getattr(dataset, key) for key in copied} | {"names": names}
    pairs = ([(map_tree(lambda a, rows=rows: a[rows], dataset.x), dataset.y[rows]) for rows in part] for part in split)
    train, test = ([Examples(map_tree(torch.from_numpy, x), torch.from_numpy(y)) for x, y in part] for part in pairs)
    catalogued = KNOWN.get(data.dataset)
    standardise: str = data.standardise
    if standardise == AUTO:
        standardise = catalogued.standardise if catalogued else "site" if dataset.columns else "none"
    known["warnings"] = tuple(
        _find_problems(dataset, split, names, scaled=standardise != "none" or scaling is not None)
    )
    if found := _measure(dataset, split, standardise, scaling):
        known["scaling"] = found
        parts = (zip(found, part, strict=True) for part in (train, test))
        train, test = ([Examples(one.apply(x), y) for one, (x, y) in part] for part in parts)
    federation = Federation(train, test, dataset.classes, **known, leaked_share=leaked_share(*split))
    updates: dict[str, Any] = {}
    if dataset.columns or standardise != "none":
        updates["standardise"] = standardise
    if catalogued:
        updates |= {key: value for key, value in catalogued.of_table.items() if getattr(data, key) == AUTO}
    if data.partition != "client":
        updates["samples_per_client"] = sum(map(len, split[0] + split[1])) // len(federation)
    if is_own_file(data.dataset):
        updates["dataset"] = str(Path(data.dataset).resolve())  # a run folder may be used from elsewhere
    if data.tokenizer != AUTO:
        updates["tokenizer"] = str(Path(data.tokenizer).resolve())
    return data.model_copy(update=updates), federation


def _measure(dataset: Dataset, split: Split, standardise: str, scaling: Scaling | None) -> tuple[Scaling, ...] | None:
    """Return the scaling of each client by its training rows, or of all; None where x stays as it is."""
    if scaling is not None:
        return (scaling,) * len(split[0])
    x = dataset.x
    vectors = isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype == np.float32
    if not vectors and standardise != "none" and not dataset.columns:
        raise PfedlaError(f"standardise = {standardise!r}: {dataset.name} has no vectors of numbers to standardise")
    if not vectors or (standardise == "none" and not np.isnan(x).any()):
        return None
    numeric, on = is_numeric(dataset.columns, x.shape[1]), standardise != "none"
    if standardise == "shared":
        return (Scaling.measure(x[np.concatenate(split[0])], numeric, standardise=on),) * len(split[0])
    return tuple(Scaling.measure(x[rows], numeric, standardise=on) for rows in split[0])


def _find_problems(dataset: Dataset, split: Split, names: Sequence[str], *, scaled: bool) -> list[str]:
    """Return warnings: features whose scale is wild, clients with a single test example."""
    found, x = [*dataset.warnings], dataset.x
    if not scaled and isinstance(x, np.ndarray) and x.ndim == 2 and x.dtype == np.float32:
        found += find_wild(dataset.name, x, dataset.columns)
    if dataset.task == "regression" and (size := float(np.abs(dataset.y).max())) > LARGE_TARGET:
        found.append(
            f"{dataset.name}: targets up to {size:.3g} may diverge: give them in units in which they are about 1"
        )
    if few := [name for name, rows in zip(names, split[1], strict=True) if len(rows) == 1]:
        found.append(
            f"{dataset.name}: client {few[0]} has one test example, so its score says little ({len(few)} in all)"
        )
    return found
