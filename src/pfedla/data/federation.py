"""Arrays to clients: the partitioned data, kept compact and normalised when a client uses them."""

import hashlib
from collections.abc import Sequence
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
from pfedla.data import datasets
from pfedla.data.dataset import Array, Dataset, dataset_of
from pfedla.data.partition import Data, leaked_share, resolve, split_dataset


class Examples(NamedTuple):
    x: Tensor  # images stay uint8
    y: Tensor


@dataclass(eq=False)
class Outline:
    """What a server knows of a federation: how many examples each client has and what an example is."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    num_examples: Tensor  # [clients], for training
    _: KW_ONLY
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    leaked_share: float = 0.0  # share of the test examples that train another client
    subset: str = ""  # the file that was read in place of the official ones, if one was
    known_counts: Array | None = None  # what the methods of these names return, where the server has no examples
    known_fingerprint: str = ""

    def __post_init__(self) -> None:
        self.names = self.names or tuple(map(str, range(len(self))))

    def __len__(self) -> int:
        return len(self.num_examples)

    def normalise(self, x: Tensor) -> Tensor:
        return normalise(x, self.mean, self.std)

    def class_counts(self) -> Array | None:
        """Return [clients, 2 (train, test), classes], or None where the server does not know them."""
        return self.known_counts

    def fingerprint(self) -> str:
        """Return the SHA-256 of all examples and how they are normalised, or "" where the server does not know it."""
        return self.known_fingerprint


class Federation(Outline):
    """The partitioned data: for each client its training and test examples, and how to normalise them."""

    def __init__(self, train: Sequence[Examples], test: Sequence[Examples], classes: tuple[str, ...], **known: Any):
        """`known`: mean, std, names, leaked_share and subset, as in `Outline`."""
        self.train, self.test = tuple(train), tuple(test)
        num_examples = torch.tensor([len(examples.y) for examples in self.train])
        super().__init__(tuple(self.train[0].x.shape[1:]), classes, num_examples, **known)
        for name, own, held in zip(self.names, self.train, self.test, strict=True):
            if not len(own.y) or not len(held.y):
                raise PfedlaError(f"client {name} has {len(own.y)} training, {len(held.y)} test examples: needs both")

    def __repr__(self) -> str:
        sizes = f"{self.num_examples.min()}-{self.num_examples.max()} training examples"
        return f"Federation({len(self)} clients, {sizes}, {len(self.classes)} classes)"

    def only(self, clients: Sequence[int]) -> "Federation":
        """Return some of the clients, under their names."""
        train, test = ([part[client] for client in clients] for part in (self.train, self.test))
        known: dict[str, Any] = {"mean": self.mean, "std": self.std, "subset": self.subset}
        known["names"] = tuple(self.names[client] for client in clients)
        if self.leaked_share:  # by their content, as their positions in the data set are not kept
            contents = ([map(bytes, one.x.numpy()) for one in part] for part in (train, test))
            known["leaked_share"] = leaked_share(*contents)
        return Federation(train, test, self.classes, **known)

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

    def fingerprint(self) -> str:
        content = repr((self.classes, self.mean, self.std, self.names, *map(digest_of, self.train, self.test)))
        return hashlib.sha256(content.encode()).hexdigest()

    def class_counts(self) -> Array:
        parts, length = zip(self.train, self.test, strict=True), len(self.classes)
        return np.array([[np.bincount(part.y.numpy(), minlength=length) for part in pair] for pair in parts])


def digest_of(train: Examples, test: Examples) -> str:
    """Return the SHA-256 of one client's examples and labels in their order."""
    digest = hashlib.sha256()
    for x, y in (train, test):
        digest.update(repr((x.dtype, tuple(x.shape))).encode())
        digest.update(x.contiguous().numpy().data)
        digest.update(y.contiguous().numpy().data)
    return digest.hexdigest()


def federation_of(
    x: Array, y: Array, client: Array | None = None, test: Array | None = None, *, seed: int = 0, **settings: Any
) -> Federation:
    """Make a federation from your own arrays: examples, labels, and the owner of each example or a partition.

    `test` marks a ready test split; without it 30 % of every client's examples are held out, class by class.
    Further arguments are those of the [data] section: `partition="dirichlet", clients=20, beta=0.3`.
    """
    given = {key: v.item() if isinstance(v, np.generic) else v for key, v in settings.items() if v is not None}
    try:
        data = Data(dataset="arrays", **given)
    except ValidationError as error:
        raise invalid(error, Data.model_fields) from None
    return build_federation(data, seed, dataset_of("arrays", x, y, client=client, test=test))[1]


def federation_of_one(dataset: Dataset, name: str, seed: int, test_share: float | Auto = AUTO) -> Federation:
    """Make a federation of one client that owns all examples of `dataset`."""
    one = replace(dataset, client=np.zeros(len(dataset.y), np.int64), client_names=(name,))
    return build_federation(Data(dataset="arrays", partition="client", test_share=test_share), seed, one)[1]


def build_federation(data: Data, seed: int, dataset: Dataset | None = None) -> tuple[Data, Federation]:
    """Return the section with every "auto" resolved, and the federation that it describes."""
    data, dataset = resolve(data, dataset or datasets.load(data.dataset))
    if len(dataset.classes) < 2:
        raise PfedlaError(f"{dataset.name}: y holds a single class, {dataset.classes[0]}")
    split = split_dataset(dataset, data, np.random.default_rng(generator(seed, "partition").initial_seed()))
    pairs = ([(dataset.x[rows], dataset.y[rows]) for rows in part] for part in split)
    train, test = ([Examples(torch.from_numpy(x), torch.from_numpy(y)) for x, y in part] for part in pairs)
    names = dataset.client_names if data.partition == "client" else ()
    known = {"mean": dataset.mean, "std": dataset.std, "subset": dataset.subset}
    federation = Federation(train, test, dataset.classes, **known, names=names, leaked_share=leaked_share(*split))
    updates: dict[str, Any] = {}
    if data.partition != "client":
        updates["samples_per_client"] = sum(map(len, split[0] + split[1])) // len(federation)
    if data.dataset.endswith(".npz"):
        updates["dataset"] = str(Path(data.dataset).resolve())  # a run folder may be used from elsewhere
    return data.model_copy(update=updates), federation
