"""The data sets of catalogue.toml and their loaders. Training and test images are pooled, as in the paper."""

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError, unknown
from pfedla.data.dataset import Dataset, pixel_statistics
from pfedla.data.formats import read_cifar, read_idx_pair
from pfedla.data.npz import load_npz
from pfedla.data.sources import Source, download

EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")


@dataclass(frozen=True, kw_only=True)
class Known:
    """What is known of a data set before any file is read, and the paper's settings for it."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    lr: float
    samples_per_client: int | None  # None: as many as the partition allows
    classes_limit: int | None  # None: all
    summary: str
    source: Source | None  # None: embedded in a package
    load: Callable[[], Dataset]

    @property
    def num_classes(self) -> int:
        return self.classes_limit or len(self.classes)


def emnist_files(split: str) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"emnist-{split}-{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in kinds)


def _describe(name: str, entry: dict[str, Any]) -> Known:
    """Make an entry of the catalogue into what is known of a data set."""
    words = entry["classes"]
    classes = tuple(words.split() if isinstance(words, str) else words)
    source = _source_of(entry) if "folder" in entry else None
    return Known(
        shape=tuple(entry["shape"]),
        classes=classes,
        lr=entry["lr"],
        samples_per_client=entry.get("samples_per_client"),
        classes_limit=entry.get("classes_limit"),
        summary=entry["summary"],
        source=source,
        load=partial(LOADERS[entry["format"]], name, entry, classes, source),
    )


def _source_of(entry: dict[str, Any]) -> Source:
    digests = entry.get("sha256", {})
    files = members = tuple(digests)
    if "split" in entry:
        files = emnist_files(entry["split"])
        members = tuple(name for split in EMNIST_SPLITS for name in emnist_files(split))
    return Source(
        folder=entry["folder"],
        files=files or tuple(entry["md5"]),
        md5=entry["md5"],
        hosts=tuple(entry["hosts"]),
        megabytes=entry["megabytes"],
        members=members,
        digests=digests,
        elsewhere=Path(entry["elsewhere"]) if "elsewhere" in entry else None,
    )


def _load_digits(name: str, entry: dict[str, Any], classes: tuple[str, ...], source: None) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    mean, std = tuple(entry["mean"]), tuple(entry["std"])
    return Dataset(name=name, x=x, y=y, classes=classes, mean=mean, std=std)


def _load_idx(name: str, entry: dict[str, Any], classes: tuple[str, ...], source: Source) -> Dataset:
    """Load MNIST, or a set in its format."""
    train_images, train_labels, test_images, test_labels = source.require(name)
    first = 1 if entry.get("split") == "letters" else 0
    train_x, train_y = read_idx_pair(train_images, train_labels, len(classes), first)
    test_x, test_y = read_idx_pair(test_images, test_labels, len(classes), first)
    x, y = np.concatenate([train_x, test_x])[:, None], np.concatenate([train_y, test_y])
    if "split" in entry:  # EMNIST's images are transposed in its files
        x = np.ascontiguousarray(x.transpose(0, 1, 3, 2))
        mean, std = pixel_statistics(x[: len(train_y)])
    else:
        mean, std = _scale(entry["mean"]), _scale(entry["std"])
    return Dataset(name=name, x=x, y=y, classes=classes, mean=mean, std=std)


def _load_emnist(name: str, entry: dict[str, Any], classes: tuple[str, ...], source: Source) -> Dataset:
    if (subset := _find_emnist_subset(source)) is None:
        return _load_idx(name, entry, classes, source)
    dataset = load_npz(subset)
    numbered = {str(number): label for number, label in enumerate(classes)}
    if all(label in numbered for label in dataset.classes):
        dataset = replace(dataset, classes=tuple(numbered[label] for label in dataset.classes))
    return replace(dataset, name=name, subset=str(subset))


def _find_emnist_subset(source: Source) -> Path | None:
    """Find a user's part of a split (letters.npz); it is read while the official files are not there."""
    if source.folder != "emnist" or source.place() is not None:
        return None
    subset = source.home / f"{source.files[0].split('-')[1]}.npz"
    return subset if subset.is_file() else None


def _load_cifar(name: str, entry: dict[str, Any], classes: tuple[str, ...], source: Source) -> Dataset:
    """Load CIFAR; of CIFAR-100 the fine labels."""
    parts, num_labels = ((5, 1), (20, 100)) if name == "cifar100" else ((1, 1, 1, 1, 1, 1), (10,))
    labels, x = read_cifar(source.require(name), parts, num_labels, source.digests)
    mean, std = _scale(entry["mean"]), _scale(entry["std"])
    return Dataset(name=name, x=x, y=labels[:, -1], classes=classes, mean=mean, std=std)


def _scale(values: list[float]) -> tuple[float, ...]:
    return tuple(255 * value for value in values)


LOADERS: dict[str, Callable[..., Dataset]] = {
    "embedded": _load_digits,
    "idx": _load_idx,
    "emnist": _load_emnist,
    "cifar": _load_cifar,
}
_CATALOGUE = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
KNOWN: dict[str, Known] = {
    name: _describe(name, _CATALOGUE.get(entry.get("like"), {}) | entry) for name, entry in _CATALOGUE.items()
}


def find(name: str) -> Known:
    if name not in KNOWN:
        raise unknown("data set", name, [*KNOWN, "a file.npz"])
    return KNOWN[name]


def load(name: str) -> Dataset:
    """Load a data set by its name, or a file that ends in .npz."""
    return load_npz(Path(name)) if name.endswith(".npz") else find(name).load()


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
    if (subset := _find_emnist_subset(source)) is not None:
        return State(True, subset, says=f"a subset, {source.folder}/{subset.name}")
    lacking = source.missing(source.home)
    if len(lacking) < len(source.files):
        return State(False, None, says=f"incomplete, {source.folder} lacks {', '.join(lacking)}")
    return State(False, None, says=f"no ({source.megabytes} MB)")
