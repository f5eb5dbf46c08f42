"""Arrays to clients: the partitioned data, kept in their compact form and normalised when a client uses them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.data.datasets import Array, Dataset, dataset_of
from pfedla.data.partition import Partition, Split, by_client, class_shares, draw, largest_samples, quotas_of
from pfedla.errors import PfedlaError, unknown
from pfedla.seeds import numpy_generator


class Examples(NamedTuple):
    """Images stay uint8 here."""

    x: Tensor
    y: Tensor


class Federation:
    """The partitioned data: for each client its training and test examples, and how to normalise them."""

    def __init__(
        self, train: Sequence[Examples], test: Sequence[Examples], classes: tuple[str, ...],
        mean: tuple[float, ...] = (), std: tuple[float, ...] = (), names: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.train, self.test = tuple(train), tuple(test)
        self.classes, self.mean, self.std = classes, mean, std
        self.names = names or tuple(map(str, range(len(self.train))))
        for name, examples, tests in zip(self.names, self.train, self.test, strict=True):
            if not len(examples.y) or not len(tests.y):
                raise PfedlaError(
                    f"client {name} has {len(examples.y)} training and {len(tests.y)} test examples: it needs both"
                )
        self.num_examples = torch.tensor([len(examples.y) for examples in self.train])

    def __len__(self) -> int:
        return len(self.train)

    def __repr__(self) -> str:
        sizes = self.num_examples
        return f"Federation({len(self)} clients, {sizes.min()}-{sizes.max()} training examples, {len(self.classes)} classes)"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.train[0].x.shape[1:])

    def normalised(self, x: Tensor) -> Tensor:
        """float32, channel by channel; data that came as floats are used as they are."""
        if not self.mean:
            return x.float()
        mean, std = (torch.tensor(v, device=x.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return (x.float() - mean) / std

    def class_counts(self) -> Array:
        """[clients, 2 (train, test), classes]"""
        num_classes = len(self.classes)
        rows = [
            [np.bincount(part.y.numpy(), minlength=num_classes) for part in pair]
            for pair in zip(self.train, self.test, strict=True)
        ]
        return np.array(rows)


def _federation(dataset: Dataset, split: Split, names: tuple[str, ...] = ()) -> Federation:
    if len(dataset.classes) < 2:
        raise PfedlaError(f"{dataset.name}: y holds a single class, {dataset.classes[0]}")

    def examples(rows: Array) -> Examples:
        return Examples(torch.from_numpy(dataset.x[rows]), torch.from_numpy(dataset.y[rows]))

    return Federation(
        [examples(rows) for rows in split.train], [examples(rows) for rows in split.test], dataset.classes,
        dataset.mean, dataset.std, names,
    )  # fmt: skip


def federation_of(
    x: Array, y: Array, client: Array, test: Array | None = None, *, test_share: float = 0.3, seed: int = 0
) -> Federation:
    """A federation from your own arrays: examples, labels and whose each example is.

    `test` marks a ready test split; without it 30 % of every client's examples are held out, class by class.
    """
    dataset = dataset_of("arrays", x, y, client, test)
    return _federation(dataset, by_client(dataset, test_share, numpy_generator(seed, "partition")), dataset.client_names)


def partitioned(
    dataset: Dataset, partition: Partition, *, clients: int, samples_per_client: int | None,
    classes_per_client: int, dominant_classes: int, dominant_share: float, test_share: float, seed: int,
) -> Federation:  # fmt: skip
    """Cut a data set into clients. `samples_per_client=None` takes as many as the classes allow."""
    rng = numpy_generator(seed, "partition")
    if partition == "client":
        return _federation(dataset, by_client(dataset, test_share, rng), dataset.client_names)
    num_classes = len(dataset.classes)
    if partition == "classes":
        classes, limit = classes_per_client, num_classes
    elif partition == "dominant":
        classes, limit = dominant_classes, num_classes - 1
    else:
        raise unknown("partition", partition, ["classes", "dominant", "client"])
    if classes > limit:
        key = "classes_per_client" if partition == "classes" else "dominant_classes"
        raise PfedlaError(f"{key} = {classes}, but {dataset.name} has {num_classes} classes and allows at most {limit}")
    if partition == "dominant" and dominant_share <= classes / num_classes:
        raise PfedlaError(f"dominant_share = {dominant_share}: {classes} of {num_classes} classes would not prevail; use more")
    shares = class_shares(partition, clients, num_classes, classes, dominant_share, rng)
    samples = samples_per_client or largest_samples(dataset, shares, test_share)
    if not samples:
        raise PfedlaError(f"{dataset.name} has too few examples of some class for {clients} clients; use fewer clients")
    quotas = quotas_of(shares, samples, test_share)
    both = quotas.train + quotas.test
    enough = quotas.train[shares > 0].all() and quotas.test[shares > 0].all() if partition == "classes" else both.all()
    if not enough:
        wanted = "training and test examples of each of its classes" if partition == "classes" else "every class"
        raise PfedlaError(
            f"{samples} samples per client are too few for {wanted}; {dataset.name} has {len(dataset.y)} examples of "
            f"{num_classes} classes for {clients} clients"
        )
    return _federation(dataset, draw(dataset, quotas, rng))
