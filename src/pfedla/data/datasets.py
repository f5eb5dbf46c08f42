"""The data sets of catalogue.toml and their loaders. Training and test images are pooled, as in the paper."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel

from pfedla.core.errors import PfedlaError, unknown
from pfedla.data.dataset import Array, Dataset, pixel_statistics
from pfedla.data.formats import load_arrays, read_cifar, read_idx_pair
from pfedla.data.sources import Source, download


class Known(BaseModel, frozen=True):
    """What is known of a data set before any file is read, and the paper's settings for it."""

    summary: str
    format: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    lr: float
    mean: tuple[float, ...] = ()  # empty: those of the training images
    std: tuple[float, ...] = ()
    split: str = ""  # of EMNIST
    samples_per_client: int | None = None  # None: as many as the partition allows
    classes_limit: int | None = None  # None: all
    source: Source | None = None  # None: embedded in a package

    @property
    def num_classes(self) -> int:
        return self.classes_limit or len(self.classes)


def _read_catalogue() -> dict[str, Known]:
    catalogue = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    known = {}
    for name, own in catalogue.items():
        entry: dict[str, Any] = catalogue.get(own.get("like"), {}) | own
        if isinstance(entry["classes"], str):
            entry["classes"] = entry["classes"].split()
        if source := entry.get("source"):
            members = source.get("members", [*source.get("sha256", {})])
            start = f"emnist-{entry['split']}-" if "split" in entry else ""
            files = [file for file in members or source["md5"] if file.startswith(start)]
            entry["source"] = source | {"files": files, "members": members}
        known[name] = Known(**entry)
    return known


KNOWN = _read_catalogue()


def find(name: str) -> Known:
    if name not in KNOWN:
        raise unknown("data set", name, [*KNOWN, "a file.npz"])
    return KNOWN[name]


def load(name: str) -> Dataset:
    """Load a data set by its name, or a file that ends in .npz."""
    if name.endswith(".npz"):
        return load_arrays(Path(name))
    known = find(name)
    if subset := _find_subset(known):
        dataset = load_arrays(subset)
        labels = {str(number): label for number, label in enumerate(known.classes)}
        if labels.keys() >= {*dataset.classes}:
            dataset = replace(dataset, classes=tuple(labels[number] for number in dataset.classes))
        return replace(dataset, name=name, subset=str(subset))
    x, y, num_training = READERS[known.format](known, known.source.require(name) if known.source else [])
    mean, std = (known.mean, known.std) if known.mean else pixel_statistics(x[:num_training])
    if known.mean and known.source:  # the catalogue has them as shares of 255
        mean, std = (tuple(255 * value for value in values) for values in (mean, std))
    return Dataset(name=name, x=x, y=y, classes=known.classes, mean=mean, std=std)


def _find_subset(known: Known) -> Path | None:
    """Find a user's part of an EMNIST split (letters.npz); it is read while the official files are not there."""
    if known.source is None or not known.split or known.source.place() is not None:
        return None
    subset = known.source.home / f"{known.split}.npz"
    return subset if subset.is_file() else None


# Readers: images, labels, and how many of them are the official training images


def _read_digits(known: Known, paths: list[Path]) -> tuple[Array, Array, int]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64), len(bunch.target)


def _read_idx(known: Known, paths: list[Path]) -> tuple[Array, Array, int]:
    """Read MNIST, or a set in its format."""
    first = 1 if known.split == "letters" else 0
    train, test = (read_idx_pair(paths[part], paths[part + 1], len(known.classes), first) for part in (0, 2))
    x, y = (np.concatenate(pair) for pair in zip(train, test, strict=True))
    x = x.transpose(0, 2, 1) if known.split else x  # EMNIST's images are transposed in its files
    return np.ascontiguousarray(x)[:, None], y, len(train[1])


def _read_cifar(known: Known, paths: list[Path]) -> tuple[Array, Array, int]:
    """Read CIFAR-10, or CIFAR-100 with its fine labels."""
    parts, num_labels = ((5, 1), (20, 100)) if len(known.classes) == 100 else ((1, 1, 1, 1, 1, 1), (10,))
    labels, x = read_cifar(paths, parts, num_labels, known.source.sha256 if known.source else {})
    return x, labels[:, -1], len(x)


READERS = {"embedded": _read_digits, "idx": _read_idx, "cifar": _read_cifar}


# What is here, and how to get the rest


def fetch(name: str, on_damage: Callable[[str], None]) -> tuple[Dataset, Path | None, bool]:
    """Download a data set unless it is here and whole; return it, its folder, whether it was downloaded."""
    source = find(name).source
    if source is None:
        return load(name), None, False
    if place := source.place():
        try:
            return load(name), place, False
        except PfedlaError as damage:
            on_damage(str(damage))
    download(name, source)
    return load(name), source.place(), True


class State(NamedTuple):
    """Whether a data set is here, where, and in words."""

    here: bool
    place: Path | None
    says: str


def state_of(name: str) -> State:
    source = find(name).source
    if source is None:
        return State(True, None, says="yes, in the package")
    if place := source.place():
        return State(True, place, says=f"yes, {source.folder if place == source.home else place}")
    if subset := _find_subset(find(name)):
        return State(True, subset, says=f"a subset, {source.folder}/{subset.name}")
    lacking = source.missing(source.home)
    if len(lacking) < len(source.files):
        return State(False, None, says=f"incomplete, {source.folder} lacks {', '.join(lacking)}")
    return State(False, None, says=f"no ({source.megabytes} MB)")
