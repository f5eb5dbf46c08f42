"""The data sets by name: their files, their loaders, the paper's settings. As there, training and test images are pooled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError, unknown
from pfedla.data import names
from pfedla.data.formats import read_cifar, read_idx_pair
from pfedla.data.own import Array, Dataset, load_npz, pixel_statistics
from pfedla.data.sources import Download, Source, absent, download, located


@dataclass(frozen=True)
class Known:
    """What is known of a data set before any file is read, and the paper's settings for it."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    lr: float
    samples_per_client: int | None  # None: as many as the partition allows
    load: Callable[[], Dataset]
    summary: str
    source: Source | None = None  # None: embedded
    classes_limit: int | None = None  # None: all

    @property
    def num_classes(self) -> int:
        return self.classes_limit or len(self.classes)


def load_digits() -> Dataset:
    """scikit-learn's digits: 1,797 images of 8x8 with values 0..16, embedded in the package."""
    from sklearn.datasets import load_digits as read

    bunch = read()
    x = bunch.images.astype(np.uint8)[:, None]
    # Mean and standard deviation over all 1,797 images, in the units of the file.
    return Dataset("digits", x, bunch.target.astype(np.int64), names.DIGITS, mean=(4.884,), std=(6.017,))


# MNIST and its kin: IDX files

IDX_FILES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def _idx_source(
    folder: str, md5: tuple[str, ...], hosts: tuple[str, ...], megabytes: int, elsewhere: Path | None = None
) -> Source:
    downloads = tuple(
        Download(name, f"md5:{digest}", tuple(host + name for host in hosts))
        for name, digest in zip(IDX_FILES, md5, strict=True)
    )
    return Source(folder, IDX_FILES, downloads, megabytes, elsewhere=elsewhere)


# MD5 published in the README of github.com/zalandoresearch/fashion-mnist.
FASHION_MNIST = _idx_source(
    "fashion-mnist",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d", "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79", "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    31,
    Path("/usr/share/datasets/fashion-mnist"),  # Debian's dataset-fashion-mnist
)  # fmt: skip
# MD5 published in torchvision/datasets/mnist.py of github.com/pytorch/vision. The host no longer answers everybody.
MNIST = _idx_source(
    "mnist",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873", "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3", "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    (
        "http://yann.lecun.com/exdb/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    12,
)  # fmt: skip


def _load_idx(name: str, source: Source, classes: tuple[str, ...], mean: float, std: float) -> Dataset:
    folder = _place(name, source)
    pairs = [
        read_idx_pair(_file(folder, images), _file(folder, labels), len(classes))
        for images, labels in (IDX_FILES[:2], IDX_FILES[2:])
    ]
    x, y = (np.concatenate(arrays) for arrays in zip(*pairs, strict=True))
    return Dataset(name, x[:, None], y, classes, mean=(mean * 255,), std=(std * 255,))


def emnist_files(split: str) -> tuple[str, ...]:
    kinds = [f"{part}-{kind}-ubyte.gz" for part in ("train", "test") for kind in ("images-idx3", "labels-idx1")]
    return tuple(f"emnist-{split}-{kind}" for kind in kinds)


# MD5 published in torchvision/datasets/mnist.py of github.com/pytorch/vision; one archive holds all six splits.
EMNIST_ARCHIVE = Download(
    "gzip.zip",
    "md5:58c8d27c78d21e728a6bc7b3cc06412e",
    ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
    tuple(name for split in names.EMNIST for name in emnist_files(split)),
)


def emnist_source(split: str) -> Source:
    return Source("emnist", emnist_files(split), (EMNIST_ARCHIVE,), 562)


def _emnist_subset(source: Source) -> Path | None:
    """A user's own part of a split, such as letters.npz beside the official files, stands in while these are not there."""
    if source.folder != "emnist" or source.place() is not None:
        return None
    subset = source.home / f"{source.files[0].split('-')[1]}.npz"
    return subset if subset.is_file() else None


def _load_emnist(name: str, split: str) -> Dataset:
    """EMNIST's images are transposed in its files; letters are counted from 1."""
    source, classes = emnist_source(split), names.EMNIST[split]
    if (subset := _emnist_subset(source)) is not None:
        dataset = load_npz(subset)
        numbered = {str(number): label for number, label in enumerate(classes)}
        named = tuple(numbered[label] for label in dataset.classes if label in numbered)
        return replace(
            dataset, name=name, classes=named if len(named) == len(dataset.classes) else dataset.classes, subset=str(subset)
        )
    folder = _place(name, source)
    first = 1 if split == "letters" else 0
    train_images, train_labels, test_images, test_labels = (_file(folder, file) for file in source.files)
    train_x, train_y = read_idx_pair(train_images, train_labels, len(classes), first)
    test_x, test_y = read_idx_pair(test_images, test_labels, len(classes), first)
    x = np.empty((len(train_x) + len(test_x), 1, 28, 28), np.uint8)
    x[: len(train_x), 0], x[len(train_x) :, 0] = train_x.transpose(0, 2, 1), test_x.transpose(0, 2, 1)
    mean, std = pixel_statistics(x[: len(train_x)])
    return Dataset(name, x, np.concatenate([train_y, test_y]), classes, mean, std)


# CIFAR: binary records. MD5 of the archives published at www.cs.toronto.edu/~kriz/cifar.html, SHA-256 of the files in
# lib/torchvision/datasets/cifar10.rb and cifar100.rb of github.com/ankane/torchvision-ruby.

CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR100_FILES = {
    "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
    "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
}


def _cifar_source(folder: str, archive: str, md5: str, files: dict[str, str], megabytes: int) -> Source:
    # The first address is the published one, which now leads to the second.
    hosts = ("https://www.cs.toronto.edu/~kriz/", "https://cave.cs.toronto.edu/kriz/")
    item = Download(archive, f"md5:{md5}", tuple(host + archive for host in hosts), tuple(files))
    return Source(folder, tuple(files), (item,), megabytes, files)


CIFAR10 = _cifar_source(
    "cifar-10-batches-bin", "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530", CIFAR10_FILES, 170
)
CIFAR100 = _cifar_source("cifar-100-binary", "cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8", CIFAR100_FILES, 169)


def _load_cifar10() -> Dataset:
    labels, x = _read_cifar("cifar10", CIFAR10, parts=(1, 1, 1, 1, 1, 1), num_labels=(10,))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the 50,000 training images, of 255
    return Dataset("cifar10", x, labels[:, 0], names.CIFAR10, _of_255(mean), _of_255(std))


def _load_cifar100() -> Dataset:
    """Fine labels; the coarse ones are kept beside them."""
    labels, x = _read_cifar("cifar100", CIFAR100, parts=(5, 1), num_labels=(20, 100))
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)  # of the 50,000 training images, of 255
    return Dataset(
        "cifar100", x, labels[:, 1], names.CIFAR100, _of_255(mean), _of_255(std),
        coarse=labels[:, 0], coarse_classes=names.CIFAR100_COARSE,
    )  # fmt: skip


def _of_255(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(255 * value for value in values)


def _read_cifar(name: str, source: Source, parts: tuple[int, ...], num_labels: tuple[int, ...]) -> tuple[Array, Array]:
    folder = _place(name, source)
    return read_cifar([folder / file for file in source.files], parts, num_labels, source.digests)


def _place(name: str, source: Source) -> Path:
    if (place := source.place()) is None:
        raise absent(name, source)
    return place


def _file(folder: Path, name: str) -> Path:
    path = located(folder, name)
    assert path is not None  # `place` has seen it
    return path


def _emnist(split: str, summary: str, name: str = "", classes_limit: int | None = None) -> Known:
    load = partial(_load_emnist, name or f"emnist-{split}", split)
    return Known((1, 28, 28), names.EMNIST[split], 0.005, 600, load, summary, emnist_source(split), classes_limit)


KNOWN: dict[str, Known] = {
    "digits": Known((1, 8, 8), names.DIGITS, 0.05, None, load_digits, "1,797 digits of 8x8"),
    "fashion-mnist": Known(
        (1, 28, 28), names.FASHION, 0.005, 600,
        lambda: _load_idx("fashion-mnist", FASHION_MNIST, names.FASHION, 0.2860, 0.3530),
        "70,000 pieces of clothing", FASHION_MNIST,
    ),
    "mnist": Known(
        (1, 28, 28), names.DIGITS, 0.005, 600, lambda: _load_idx("mnist", MNIST, names.DIGITS, 0.1307, 0.3081),
        "70,000 digits", MNIST,
    ),
    "emnist": _emnist("letters", "the letters A to J: ten classes as in the paper", "emnist", 10),
    "emnist-byclass": _emnist("byclass", "814,255 digits, capitals, small letters"),
    "emnist-bymerge": _emnist("bymerge", "814,255, letters that look alike merged"),
    "emnist-balanced": _emnist("balanced", "131,600, as bymerge, all classes alike"),
    "emnist-letters": _emnist("letters", "145,600 letters"),
    "emnist-digits": _emnist("digits", "280,000 digits"),
    "emnist-mnist": _emnist("mnist", "70,000 digits, made like MNIST"),
    "cifar10": Known((3, 32, 32), names.CIFAR10, 0.01, 600, _load_cifar10, "60,000 colour photographs", CIFAR10),
    "cifar100": Known((3, 32, 32), names.CIFAR100, 0.01, 600, _load_cifar100, "60,000 colour photographs", CIFAR100),
}  # fmt: skip


def known(name: str) -> Known:
    if name not in KNOWN:
        raise unknown("data set", name, KNOWN)
    return KNOWN[name]


def load(name: str) -> Dataset:
    """A data set by its name, or a file that ends in .npz."""
    if name.endswith(".npz"):
        return load_npz(Path(name))
    if name not in KNOWN:
        raise unknown("data set", name, [*KNOWN, "a file.npz"])
    return KNOWN[name].load()


def fetch(name: str, on_damage: Callable[[str], None]) -> tuple[Dataset, Path | None, bool]:
    """Download a data set unless it is here and whole; returns it, its folder, and whether anything was downloaded."""
    source = known(name).source
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
    source = known(name).source
    if source is None:
        return State(True, None, "yes, in the package")
    if place := source.place():
        return State(True, place, f"yes, {source.folder if place == source.home else place}")
    if (subset := _emnist_subset(source)) is not None:
        return State(True, subset, f"a subset, {source.folder}/{subset.name}")
    lacking = source.missing(source.home)
    if len(lacking) < len(source.files):
        return State(False, None, f"incomplete, {source.folder} lacks {', '.join(lacking)}")
    return State(False, None, f"no ({source.megabytes} MB)")
