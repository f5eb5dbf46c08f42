"""The data sets of catalogue.toml: where their files come from, how they are loaded (training and test pooled)."""

import os
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import platformdirs
from pydantic import BaseModel

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import sha256
from pfedla.core.settings import AUTO
from pfedla.data.arrays import load_arrays
from pfedla.data.dataset import Dataset, pixel_statistics
from pfedla.data.published import read_cifar, read_idx_pair
from pfedla.data.sites import load_brca, load_heart, load_sentiment, load_watch


class Source(BaseModel, frozen=True):
    """The files of a data set, where they are and how to get them."""

    folder: str  # below the data directory
    files: tuple[str, ...]  # what the loader reads; a .gz may also be there unpacked
    md5: dict[str, str] = {}  # of the downloads, as published: the files themselves, or an archive
    hosts: tuple[str, ...] = ()  # tried in this order; none: nobody offers the files in this form
    megabytes: int  # to download
    prepared: str = ""  # one file below the data directory that may be there in place of `files`
    origin: str = ""  # where the files come from, in words
    members: tuple[str, ...] = ()  # the files to take out of the archive; empty: the downloads are the files
    sha256: dict[str, str] = {}  # of the members, where published
    elsewhere: Path | None = None  # where a distribution's package puts the files

    @property
    def home(self) -> Path:
        return data_directory() / self.folder

    def find(self, place: Path) -> dict[str, Path]:
        """Return which files are in a folder, packed or unpacked; an empty one does not count."""
        paths = [(name, place / file) for name in self.files for file in (name.removesuffix(".gz"), name)]
        return {name: path for name, path in paths if path.is_file() and path.stat().st_size}

    def lacking(self) -> str:
        return ", ".join(name for name in self.files if name not in self.find(self.home))

    def advise(self) -> str:
        """Return which files to put where, and where they come from."""
        instead = f", or {Path(self.prepared).name} into {(data_directory() / self.prepared).parent}"
        origin = f" ({self.origin})" if self.origin else ""
        return f"put {', '.join(self.files)} into {self.home}{instead if self.prepared else ''}{origin}"


class Known(BaseModel, frozen=True):
    """What is known of a data set before any file is read, and the paper's settings for it."""

    summary: str
    format: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    lr: float
    mean: tuple[float, ...] = ()  # as a share of 255; empty: those of the training images
    std: tuple[float, ...] = ()
    split: str = ""  # of EMNIST
    fold: str = ""  # whose ready test split is used, where the data have several
    samples_per_client: int | None = None  # None: as many as the partition allows
    classes_limit: int | None = None  # None: all
    source: Source | None = None  # None: embedded in a package
    task: str = "classification"
    metric: str = ""  # the headline metric; empty: the task's own
    standardise: str = "none"
    missing: str = ""  # what becomes of missing values; empty: there are none
    label: str = ""  # of a table, the columns of another file in its form: for `pfedla evaluate` and `pfedla join`
    client: str = ""
    columns: tuple[str, ...] = ()

    @property
    def num_classes(self) -> int:
        return self.classes_limit or len(self.classes)

    @property
    def num_outputs(self) -> int:
        return 1 if self.task == "survival" else self.num_classes

    @property
    def of_table(self) -> dict[str, str]:
        """The settings of [data] for a table in this format."""
        found = {"label": self.label, "client": self.client, "missing": self.missing}
        return {key: value for key, value in found.items() if value}


def _read_catalogue() -> dict[str, Known]:
    catalogue = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    known = {}
    for name, own in catalogue.items():
        entry: dict[str, Any] = catalogue.get(own.get("like"), {}) | own
        if source := entry.get("source"):
            start = f"emnist-{entry['split']}-" if "split" in entry else ""
            files = source.get("files") or source.get("members") or source["md5"]
            entry["source"] = source | {"files": [file for file in files if file.startswith(start)]}
        known[name] = Known(**entry)
    return known


KNOWN = _read_catalogue()


def find(name: str) -> Known:
    if name not in KNOWN:
        raise unknown("data set", name, [*KNOWN, "a file .npz, .csv, .tsv or .parquet", "a folder of images"])
    return KNOWN[name]


def data_directory() -> Path:
    """Return PFEDLA_DATA_DIR, or the user's cache."""
    return Path(os.environ.get("PFEDLA_DATA_DIR") or platformdirs.user_cache_dir("pfedla"))


class State(NamedTuple):
    """Whether a data set is here, where (a folder, a prepared file, or a user's part of EMNIST), and in words."""

    here: bool
    place: Path | None
    says: str


def state_of(name: str) -> State:
    known = find(name)
    if not (source := known.source):
        return State(True, None, says="yes, in the package")
    for place in (source.home, source.elsewhere or source.home):
        if len(source.find(place)) == len(source.files):
            return State(True, place, says=f"yes, {source.folder if place == source.home else place}")
    if known.split and (subset := source.home / f"{known.split}.npz").is_file():
        return State(True, subset, says=f"a subset, {source.folder}/{subset.name}")
    if source.prepared and (prepared := data_directory() / source.prepared).is_file():
        return State(True, prepared, says=f"yes, {source.prepared}")
    if source.find(source.home):
        return State(False, None, says=f"incomplete, {source.folder} lacks {source.lacking()}")
    needs = f"{source.megabytes} MB" if source.hosts else f"needs {source.folder}/{source.lacking()}"
    return State(False, None, says=f"no ({needs})")


def load(name: str, missing: str = AUTO) -> Dataset:
    """Load a data set of the catalogue; `missing` as in [data]."""
    known, (here, place, _) = find(name), state_of(name)
    source, place = known.source, place or Path()
    if source and not here:
        offers = f"downloads {source.megabytes} MB" if source.hosts else "says where it comes from"
        raise PfedlaError(f"{source.home} lacks {source.lacking()}; `pfedla data fetch {name}` {offers}")
    if source and known.format in SITES:
        paths = [place] if place.is_file() else [*source.find(place).values()]
        return _load_site(known, paths, known.missing if missing == AUTO else missing)
    if place.suffix == ".npz":
        dataset = load_arrays(place)
        labels = {str(number): label for number, label in enumerate(known.classes)}
        if labels.keys() >= {*dataset.classes}:
            dataset = replace(dataset, classes=tuple(labels[number] for number in dataset.classes))
        return replace(dataset, name=name, subset=str(place))
    mean, std = (tuple(255 * value for value in values) for values in (known.mean, known.std))
    if source is None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        x, y = bunch.images.astype(np.uint8)[:, None], bunch.target.astype(np.int64)
    elif known.format == "cifar":
        x, y = read_cifar([*source.find(place).values()], len(known.classes), source.sha256)
    else:
        paths, first = [*source.find(place).values()], 1 if known.split == "letters" else 0
        train, test = (read_idx_pair(paths[part], paths[part + 1], len(known.classes), first) for part in (0, 2))
        x, y = (np.concatenate(pair) for pair in zip(train, test, strict=True))
        x = x.transpose(0, 2, 1) if known.split else x  # EMNIST's images are transposed in its files
        x = np.ascontiguousarray(x)[:, None]
        mean, std = (mean, std) if mean else pixel_statistics(x[: len(train[1])])
    return Dataset(name=name, x=x, y=y, classes=known.classes, mean=mean, std=std)


SITES = ("heart", "brca", "watch", "sentiment")  # formats


def _load_site(known: Known, paths: list[Path], missing: str) -> Dataset:
    if known.format == "heart":
        return load_heart(paths, missing, fold=known.fold)
    if known.format == "brca":
        return load_brca(paths, known.columns)
    return (load_watch if known.format == "watch" else load_sentiment)(paths[0], known.classes)


def fetch(name: str, on_damage: Callable[[str], None]) -> tuple[Dataset, bool]:
    """Download a data set unless it is here and whole; return it, and whether it was downloaded."""
    known, place = find(name), state_of(name).place
    if (source := known.source) is None:
        return load(name), False
    damaged = False
    if place and not (known.split and place.is_file()):  # a part of EMNIST is not what is asked for
        try:
            return load(name), False
        except PfedlaError as damage:
            on_damage(str(damage))
            damaged = True
    if not source.hosts:
        raise PfedlaError(f"nobody offers {name} for download in this form: {source.advise()}")
    folder = data_directory() if source.members else source.home
    for file in source.md5 or source.files:
        was_there = (folder / file).exists()
        path = _retrieve(name, source, file, folder, again=damaged)
        if source.members:
            unpack(path, source)
            if not was_there:
                path.unlink()
    return load(name), True


def _retrieve(name: str, source: Source, file: str, folder: Path, *, again: bool) -> Path:
    """Download a file, unless it is there with the published checksum, or (without one) not damaged."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    path, md5, reasons = folder / file, source.md5.get(file), []
    path.parent.mkdir(parents=True, exist_ok=True)
    if not md5 and path.exists() and not again:
        return path
    target = path if md5 else path.with_name(f".{path.name}.part")
    if not md5:
        target.unlink(missing_ok=True)  # else it would be taken for the file
    for url in (host + file for host in source.hosts):
        try:
            pooch.retrieve(url, md5 and f"md5:{md5}", fname=target.name, path=target.parent, progressbar=True)
            return target.replace(path)
        except Exception as error:  # pooch passes on whatever the network raised
            wrong = isinstance(error, ValueError) and "hash" in str(error)
            reasons.append(f"{url}: {'not the published checksum' if wrong else type(error).__name__}")
    failed = f"{name} could not be downloaded ({'; '.join(reasons)})"
    whole = f"put it, whole, at {path} and run this again, or " if source.members else ""
    raise PfedlaError(f"{failed}: {whole}{source.advise()}")


def unpack(archive: Path, source: Source) -> None:
    """Take the named files out of an archive, whose MD5 was checked, into a flat folder: all of them or none."""
    source.home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=source.home, prefix=".unpacking-") as scratch:
        # The filter refuses links and paths that leave the folder; of zip files shutil skips them in any case.
        shutil.unpack_archive(archive, scratch, filter=None if archive.suffix == ".zip" else "data")
        found = {path.name: path for path in Path(scratch).rglob("*") if path.is_file()}
        for name in source.members:
            if name not in found or source.sha256.get(name) not in (None, sha256(found[name])):
                raise PfedlaError(f"{archive} is not used: {name} is not in it, or not with the published checksum")
        for name in source.members:
            found[name].replace(source.home / name)
