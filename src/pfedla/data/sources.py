"""Where the files of a data set come from: official hosts, published checksums, safe unpacking."""

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


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a data set, where they are and how to get them."""

    folder: str  # below the data directory
    files: tuple[str, ...]  # what the loader reads; a .gz may also be there unpacked
    md5: Mapping[str, str]  # of the downloads, as published: the files themselves, or an archive
    hosts: tuple[str, ...]  # tried in this order
    megabytes: int  # to download
    members: tuple[str, ...] = ()  # the files to take out of the archive; empty: the downloads are the files
    digests: Mapping[str, str] = field(default_factory=dict)  # SHA-256 of the members, where published
    elsewhere: Path | None = None  # where a distribution's package puts the files

    @property
    def home(self) -> Path:
        return data_directory() / self.folder

    def place(self) -> Path | None:
        """Return the first folder that holds all files, or None."""
        places = [self.home, *([self.elsewhere] if self.elsewhere else [])]
        return next((place for place in places if not self.missing(place)), None)

    def missing(self, place: Path) -> list[str]:
        return [name for name in self.files if find_file(place, name) is None]

    def require(self, name: str) -> list[Path]:
        """Return the paths of all files, or say which are lacking and how to get them."""
        if (place := self.place()) is not None:
            return [path for file in self.files if (path := find_file(place, file))]
        lacking = f"{self.home} lacks {', '.join(self.missing(self.home))}"
        raise PfedlaError(f"{lacking}; `pfedla data fetch {name}` downloads {self.megabytes} MB")


def data_directory() -> Path:
    """Return PFEDLA_DATA_DIR, or the user's cache."""
    import platformdirs

    return Path(os.environ.get("PFEDLA_DATA_DIR") or platformdirs.user_cache_dir("pfedla"))


def find_file(folder: Path, name: str) -> Path | None:
    """Return where a file is, packed or unpacked; an empty one does not count."""
    candidates = (folder / name, folder / name.removesuffix(".gz"))
    return next((path for path in candidates if path.is_file() and path.stat().st_size), None)


def download(name: str, source: Source) -> None:
    """Download the files into the data directory; archives are checked before they are unpacked."""
    for file in source.md5:
        if not source.members:
            _retrieve(name, source, file, source.home)
            continue
        was_there = (data_directory() / file).exists()
        archive = _retrieve(name, source, file, data_directory())
        unpack(archive, source.home, source.members, source.digests)
        if not was_there:
            archive.unlink()


def _retrieve(name: str, source: Source, file: str, folder: Path) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    folder.mkdir(parents=True, exist_ok=True)
    here, md5, reasons = folder / file, source.md5[file], []
    if here.is_file() and (found := pooch.file_hash(str(here), alg="md5")) != md5:
        reasons.append(f"{here} is damaged or incomplete: its MD5 is {found}, not {md5}")
    for url in (host + file for host in source.hosts):
        try:
            return Path(pooch.retrieve(url, f"md5:{md5}", fname=file, path=folder, progressbar=True))
        except Exception as error:  # pooch passes on whatever the network raised
            wrong = isinstance(error, ValueError) and "hash" in str(error)
            reasons.append(f"{url}: {'not the published checksum' if wrong else type(error).__name__}")
    instead = f"; or put {', '.join(source.files)} into {source.home}" if source.members else ""
    raise PfedlaError(
        f"{name} could not be downloaded ({'; '.join(reasons)}): get {file} on another machine, put it into "
        f"{folder} and run this again{instead}"
    )


def unpack(archive: Path, target: Path, members: tuple[str, ...], digests: Mapping[str, str]) -> None:
    """Take the named files out of an archive into a flat folder: all of them or none."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".unpacking-") as scratch:
        found = {}
        try:
            for path, size, content in _members(archive):
                if path.name not in members:
                    continue
                if size > LARGEST_MEMBER:
                    raise PfedlaError(f"{archive} is not used: {path} would be {size} bytes")
                found[path.name] = Path(scratch) / path.name
                with content as source, found[path.name].open("wb") as file:
                    shutil.copyfileobj(source, file, 2**20)
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise PfedlaError(f"{archive}: damaged or incomplete ({error}); delete it, fetch it again") from error
        for name in members:
            if name not in found:
                raise PfedlaError(f"{archive} is not used: it has no {name}")
            if name in digests and sha256(found[name]) != digests[name]:
                raise PfedlaError(f"{archive} is not used: the checksum of {name} is not the published one")
        for name in members:
            found[name].replace(target / name)


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield the files of a tar or zip archive; refuse an archive if any member leaves its folder."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                path = _check_inside(archive, info.filename)
                if not info.is_dir():
                    yield path, info.file_size, zipped.open(info)
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            path = _check_inside(archive, member.name)
            if member.isreg():
                yield path, member.size, cast(IO[bytes], tarred.extractfile(member))
            elif not member.isdir():
                raise PfedlaError(f"{archive} is not used: {path} is a link or a device")


def _check_inside(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or ":" in name:
        raise PfedlaError(f"{archive} is not used: {name!r} points out of its folder")
    return path
