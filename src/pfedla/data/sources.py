"""Where the files of a data set come from: official hosts, published checksums, safe unpacking."""

import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from pydantic import BaseModel

from pfedla.core.errors import PfedlaError
from pfedla.core.files import sha256

LARGEST_MEMBER = 2**30  # bytes
UNREADABLE = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError)


class Source(BaseModel, frozen=True):
    """The files of a data set, where they are and how to get them."""

    folder: str  # below the data directory
    files: tuple[str, ...]  # what the loader reads; a .gz may also be there unpacked
    md5: dict[str, str]  # of the downloads, as published: the files themselves, or an archive
    hosts: tuple[str, ...]  # tried in this order
    megabytes: int  # to download
    members: tuple[str, ...] = ()  # the files to take out of the archive; empty: the downloads are the files
    sha256: dict[str, str] = {}  # of the members, where published
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
    folder = data_directory() if source.members else source.home
    for file in source.md5:
        was_there = (folder / file).exists()
        path = _retrieve(name, source, file, folder)
        if source.members:
            unpack(path, source.home, source.members, source.sha256)
            if not was_there:
                path.unlink()


def _retrieve(name: str, source: Source, file: str, folder: Path) -> Path:
    import pooch

    pooch.get_logger().setLevel("WARNING")
    folder.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in (host + file for host in source.hosts):
        try:
            return Path(pooch.retrieve(url, f"md5:{source.md5[file]}", fname=file, path=folder, progressbar=True))
        except Exception as error:  # pooch passes on whatever the network raised
            wrong = isinstance(error, ValueError) and "hash" in str(error)
            reasons.append(f"{url}: {'not the published checksum' if wrong else type(error).__name__}")
    instead = f", or put {', '.join(source.files)} into {source.home}" if source.members else ""
    failed = f"{name} could not be downloaded ({'; '.join(reasons)})"
    raise PfedlaError(f"{failed}: put it, whole, at {folder / file} and run this again{instead}")


def unpack(archive: Path, target: Path, members: tuple[str, ...], digests: Mapping[str, str]) -> None:
    """Take the named files out of an archive into a flat folder: all of them or none."""
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".unpacking-") as scratch:
        found = {name: Path(scratch) / name for name in members}
        try:
            for path, size, content in _read_members(archive):
                if path.is_absolute() or ".." in path.parts or ":" in str(path) or size > LARGEST_MEMBER:
                    raise PfedlaError(f"{archive} is not used: {path} leaves its folder or is too large ({size} bytes)")
                if path.name in found:
                    with content, found[path.name].open("wb") as copy:
                        shutil.copyfileobj(content, copy, 2**20)
        except UNREADABLE as error:
            raise PfedlaError(f"{archive}: damaged or incomplete ({error}); delete it, fetch it again") from error
        for name, file in found.items():
            if not file.exists() or (name in digests and sha256(file) != digests[name]):
                raise PfedlaError(f"{archive} is not used: {name} is not in it, or not with the published checksum")
        for name, file in found.items():
            file.replace(target / name)


def _read_members(archive: Path) -> Iterator[tuple[PurePosixPath, int, IO[bytes]]]:
    """Yield the regular files of a tar or zip archive; links and devices are left out."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for info in zipped.infolist():
                if not info.is_dir():
                    yield PurePosixPath(info.filename.replace("\\", "/")), info.file_size, zipped.open(info)
        return
    with tarfile.open(archive) as tarred:
        for member in tarred:
            if member.isreg() and (content := tarred.extractfile(member)):
                yield PurePosixPath(member.name), member.size, content
