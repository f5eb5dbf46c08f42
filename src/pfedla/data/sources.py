"""Where the files of a data set come from: official hosts, published checksums, safe unpacking, the data directory."""

import gzip
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, cast

from pfedla.core.errors import PfedlaError
from pfedla.core.files import sha256

LARGEST_MEMBER = 2**30  # bytes


@dataclass(frozen=True)
class Download:
    """One file of a host: a data file itself, or an archive of several."""

    name: str
    checksum: str  # "md5:…", as published
    urls: tuple[str, ...]  # tried in this order; the checksum makes a mirror as good as the host
    members: tuple[str, ...] = ()  # what is taken out of an archive; empty: it is a data file


@dataclass(frozen=True)
class Source:
    folder: str  # below the data directory
    files: tuple[str, ...]  # what the loader reads; a .gz may also lie there unpacked
    downloads: tuple[Download, ...]
    megabytes: int  # to download
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of unpacked files, where published
    elsewhere: Path | None = None  # where a distribution's package puts them

    @property
    def home(self) -> Path:
        return data_directory() / self.folder

    def place(self) -> Path | None:
        """The first folder that holds all files; None if there is none."""
        places = [self.home, *([self.elsewhere] if self.elsewhere else [])]
        return next((place for place in places if not self.missing(place)), None)

    def missing(self, place: Path) -> list[str]:
        return [name for name in self.files if located(place, name) is None]


def data_directory() -> Path:
    """PFEDLA_DATA_DIR, or the user's cache."""
    import platformdirs

    return Path(os.environ.get("PFEDLA_DATA_DIR") or platformdirs.user_cache_dir("pfedla"))


def located(folder: Path, name: str) -> Path | None:
    """The file, packed or not; an empty one is as good as none."""
    candidates = (folder / name, folder / name.removesuffix(".gz"))
    return next((path for path in candidates if path.is_file() and path.stat().st_size), None)


def absent(name: str, source: Source) -> PfedlaError:
    """The data set is not here: which files are lacking, and how to get them."""
    lacking = source.missing(source.home)
    some = f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not in {source.home}"
    return PfedlaError(f"{name} is not here: {some}; `pfedla data fetch {name}` downloads it ({source.megabytes} MB)")


def download(name: str, source: Source) -> None:
    """Get the files into the data directory; what is downloaded is checked before it is unpacked, and what is unpacked too."""
    for item in source.downloads:
        if not item.members:
            _retrieve(name, source, item, source.home)
            continue
        kept = data_directory() / item.name
        was_there = kept.exists()
        archive = _retrieve(name, source, item, data_directory())
        unpack(archive, source.home, item.members, source.digests)
        if not was_there:
            archive.unlink()


def _retrieve(name: str, source: Source, item: Download, folder: Path) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    if (here := folder / item.name).is_file():
        algorithm, _, expected = item.checksum.partition(":")
        if (found := pooch.file_hash(str(here), alg=algorithm)) != expected:
            reasons.append(f"{here} is here, but its {algorithm.upper()} is {found}, not {expected}: damaged or incomplete")
    for url in item.urls:
        try:
            return Path(pooch.retrieve(url, known_hash=item.checksum, fname=item.name, path=folder, progressbar=True))
        except Exception as error:  # pooch passes on whatever the network raised
            wrong = isinstance(error, ValueError) and "hash" in str(error)
            reasons.append(f"{url}: {'not the published checksum' if wrong else type(error).__name__}")
    names = item.name if item.members else ", ".join(source.missing(source.home) or source.files)
    by_hand = f"get {names} on another machine and put it into {folder}, then run this again"
    if item.members:
        by_hand += f"; or put {', '.join(source.files)} into {source.home}"
    raise PfedlaError(f"{name} could not be downloaded ({'; '.join(reasons)}): {by_hand}")


def unpack(archive: Path, target: Path, members: tuple[str, ...], digests: Mapping[str, str]) -> None:
    """Take the named files out of an archive into a flat folder. All of them or none: they are moved when all are good."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".unpacking-") as scratch:
        found = []
        try:
            for path, size, content in _members(archive):
                if path.name not in members:
                    continue
                if size > LARGEST_MEMBER:
                    raise PfedlaError(f"{archive}: {path} would be {size} bytes; the archive is not used")
                with content as source, (Path(scratch) / path.name).open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
                found.append(path.name)
        except (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError, RuntimeError) as error:
            raise PfedlaError(f"{archive}: damaged or incomplete ({error}); delete it and fetch it anew") from error
        if lacking := [name for name in members if name not in found]:
            raise PfedlaError(f"{archive}: has no {', '.join(lacking)}; the archive is not used")
        for name in members:
            if name in digests and sha256(Path(scratch) / name) != digests[name]:
                raise PfedlaError(f"{archive}: the checksum of {name} in it is not the published one; the archive is not used")
        for name in members:
            (Path(scratch) / name).replace(target / name)


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """The files of a tar or zip archive; one that points out of its folder condemns the whole archive."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                path = _inside(archive, info.filename)
                if not info.is_dir():
                    yield path, info.file_size, zipped.open(info)
    else:
        with tarfile.open(archive) as tarred:
            for member in tarred:
                path = _inside(archive, member.name)
                if member.isdir():
                    continue
                if not member.isreg():
                    raise PfedlaError(f"{archive}: {path} is a link or a device; the archive is not used")
                yield path, member.size, cast(IO[bytes], tarred.extractfile(member))


def _inside(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name:
        raise PfedlaError(f"{archive}: {name!r} points out of its folder; the archive is not used")
    return path
