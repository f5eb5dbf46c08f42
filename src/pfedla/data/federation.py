"""Arrays to clients: the partitioned data, kept in their compact form and normalised when a client uses them."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.core.contracts import generator, numpy_generator
from pfedla.core.errors import PfedlaError
from pfedla.core.training import normalise
from pfedla.data.own import Array, Dataset, dataset_of
from pfedla.data.partition import leaked_share, split_of
from pfedla.data.recipe import Recipe, recipe_of


class Examples(NamedTuple):
    """Images stay uint8 here."""

    x: Tensor
    y: Tensor


class Outline:
    """What a server knows of a federation: its clients' numbers of examples and what an example is, not the examples."""

    def __init__(
        self, shape: tuple[int, ...], classes: tuple[str, ...], num_examples: Tensor, mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (), names: tuple[str, ...] = (), leaked_share: float = 0.0, subset: str = "",
    ) -> None:  # fmt: skip
        self.shape, self.classes, self.mean, self.std = shape, classes, mean, std
        self.num_examples = num_examples  # [clients], for training
        self.names = names or tuple(map(str, range(len(num_examples))))
        self.leaked_share = leaked_share  # of the test examples: those that train another client
        self.subset = subset  # the file that stood in for the official ones, if one did

    def __len__(self) -> int:
        return len(self.num_examples)

    def check_images(self) -> None:
        if len(self.shape) != 3:
            raise PfedlaError(f"augment crops and flips images, but these examples have the shape {self.shape}; leave it out")

    def normalised(self, x: Tensor) -> Tensor:
        """float32, channel by channel; data that came as floats are used as they are."""
        return normalise(x, self.mean, self.std)

    def fingerprint_of(self, digests: Iterable[str]) -> str:
        """SHA-256 of all clients' examples, given by their own, and of how they are normalised."""
        return hashlib.sha256(repr((self.classes, self.mean, self.std, self.names, *digests)).encode()).hexdigest()

    def class_counts(self) -> Array | None:
        """[clients, 2 (train, test), classes], as far as it is known here."""
        return None

    def fingerprint(self) -> str:
        """Empty if it is not known here."""
        return ""


def _leaked_among(train: Sequence[Examples], test: Sequence[Examples]) -> float:
    """The share of the test examples that train one of these clients; no client trains on its own."""
    trained = {row.tobytes() for part in train for row in part.x.flatten(1).numpy()}
    tested = [row.tobytes() in trained for part in test for row in part.x.flatten(1).numpy()]
    return sum(tested) / max(1, len(tested))


def digest_of(train: Examples, test: Examples) -> str:
    """SHA-256 of one client's examples and labels in their order."""
    digest = hashlib.sha256()
    for x, y in (train, test):
        digest.update(repr((x.dtype, tuple(x.shape))).encode())
        for part in (x, y):
            digest.update(part.contiguous().numpy().data)
    return digest.hexdigest()


class Federation(Outline):
    """The partitioned data: for each client its training and test examples, and how to normalise them."""

    def __init__(
        self, train: Sequence[Examples], test: Sequence[Examples], classes: tuple[str, ...],
        mean: tuple[float, ...] = (), std: tuple[float, ...] = (), names: tuple[str, ...] = (), leaked_share: float = 0.0,
        subset: str = "",
    ) -> None:  # fmt: skip
        self.train, self.test = tuple(train), tuple(test)
        sizes = torch.tensor([len(examples.y) for examples in self.train])
        super().__init__(tuple(self.train[0].x.shape[1:]), classes, sizes, mean, std, names, leaked_share, subset)
        for name, examples, tests in zip(self.names, self.train, self.test, strict=True):
            if not len(examples.y) or not len(tests.y):
                raise PfedlaError(
                    f"client {name} has {len(examples.y)} training and {len(tests.y)} test examples: it needs both"
                )

    def __repr__(self) -> str:
        sizes = self.num_examples
        return f"Federation({len(self)} clients, {sizes.min()}-{sizes.max()} training examples, {len(self.classes)} classes)"

    def only(self, clients: Sequence[int]) -> "Federation":
        """Some of the clients, under their names."""
        train, test = ([part[client] for client in clients] for part in (self.train, self.test))
        names = tuple(self.names[client] for client in clients)
        leaked = _leaked_among(train, test) if self.leaked_share else 0.0
        return Federation(train, test, self.classes, self.mean, self.std, names, leaked, self.subset)

    def parted(self, unseen: float, seed: int) -> tuple["Federation", "Federation | None"]:
        """Those who take part in a run, and the share of the clients that does not: at least one and never all."""
        if not unseen:
            return self, None
        if len(self) < 2:
            raise PfedlaError(f"unseen_clients = {unseen}: of a single client none can stay away")
        count = min(len(self) - 1, max(1, int(unseen * len(self) + 0.5)))
        order = torch.randperm(len(self), generator=generator(seed, "unseen"))
        away, here = (part.sort().values.tolist() for part in (order[:count], order[count:]))
        return self.only(here), self.only(away)

    def fingerprint(self) -> str:
        return self.fingerprint_of(digest_of(*pair) for pair in zip(self.train, self.test, strict=True))

    def class_counts(self) -> Array:
        """[clients, 2 (train, test), classes]"""
        num_classes = len(self.classes)
        rows = [
            [np.bincount(part.y.numpy(), minlength=num_classes) for part in pair]
            for pair in zip(self.train, self.test, strict=True)
        ]
        return np.array(rows)


def federation_of(
    x: Array, y: Array, client: Array | None = None, test: Array | None = None, *, seed: int = 0, **recipe: Any
) -> Federation:
    """A federation from your own arrays: examples, labels, and whose each example is or how to cut them into clients.

    `test` marks a ready test split; without it 30 % of every client's examples are held out, class by class. Further
    arguments say how to cut: `partition="dirichlet", clients=20, beta=0.3`, all as in docs/data.md, with the same defaults.
    """
    dataset = dataset_of("arrays", x, y, client, test)
    return partitioned(dataset, recipe_of(dataset, **recipe), seed)


def partitioned(dataset: Dataset, recipe: Recipe, seed: int) -> Federation:
    """Cut a data set into clients."""
    if len(dataset.classes) < 2:
        raise PfedlaError(f"{dataset.name}: y holds a single class, {dataset.classes[0]}")
    split = split_of(dataset, recipe, numpy_generator(seed, "partition"))

    def examples(rows: Array) -> Examples:
        return Examples(torch.from_numpy(dataset.x[rows]), torch.from_numpy(dataset.y[rows]))

    return Federation(
        [examples(rows) for rows in split.train], [examples(rows) for rows in split.test], dataset.classes,
        dataset.mean, dataset.std, dataset.client_names if recipe.partition == "client" else (), leaked_share(split),
        dataset.subset,
    )  # fmt: skip
