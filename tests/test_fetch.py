"""Downloads from an HTTP server on this machine: checksums, safe unpacking, failures."""

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from official import EMNIST_SPLITS, NUM, cifar_files, idx_files, tar_of, write, zip_of

from pfedla.core.errors import PfedlaError
from pfedla.data.datasets import KNOWN, load
from pfedla.data.sources import Source, unpack


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class Host:
    """A folder that is served on this machine; offer() puts a data set's download there."""

    def __init__(self, folder: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.port, self.monkeypatch = folder, port, monkeypatch

    def offer(self, name: str, contents: dict[str, bytes], members: dict[str, bytes] | None = None) -> None:
        """Serve a download with the checksums of these contents; the first address does not answer."""
        write(self.folder, contents)
        values = {
            "md5": {file: hashlib.md5(content).hexdigest() for file, content in contents.items()},
            "sha256": {file: hashlib.sha256(content).hexdigest() for file, content in (members or {}).items()},
            "members": tuple(members or ()),
            "hosts": ("http://127.0.0.1:9/", f"http://127.0.0.1:{self.port}/"),
            "elsewhere": None,
        }
        change(self.monkeypatch, name, **values)


def change(monkeypatch: pytest.MonkeyPatch, name: str, **values: object) -> Source:
    source = KNOWN[name].source
    for key, value in values.items():
        monkeypatch.setitem(source.__dict__, key, value)
    return source


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A server, and an empty data directory."""
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    (tmp_path / "host").mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "host")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Host(tmp_path / "host", server.server_address[1], monkeypatch)
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_single_files(host: Host, pfedla, name: str) -> None:
    """The first address does not answer, the second does; the second time nothing is downloaded."""
    host.offer(name, idx_files(name))
    for done in ("downloaded to", "already in"):
        code, out, err = pfedla("data", "fetch", name)
        assert code == 0, err
        assert f"{done} {KNOWN[name].source.home}" in out
    assert len(load(name).y) == 2 * NUM


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_tar_archive(host: Host, pfedla, name: str) -> None:
    files = cifar_files(name)
    inside = {f"some-folder/{file}": content for file, content in files.items()} | {"some-folder/readme.html": b"hello"}
    archive = next(iter(KNOWN[name].source.md5))
    host.offer(name, {archive: tar_of(inside)}, files)
    code, out, err = pfedla("data", "fetch", name)
    assert code == 0, err
    assert "downloaded to" in out
    home = KNOWN[name].source.home
    assert sorted(path.name for path in home.iterdir()) == sorted(files)  # nothing else, no scratch left
    assert not (home.parent / archive).exists()


def test_one_zip_archive_has_all_of_emnist(host: Host, pfedla) -> None:
    files = {file: content for split in EMNIST_SPLITS for file, content in idx_files(f"emnist-{split}", 70).items()}
    inside = {f"gzip/{file}": content for file, content in files.items()}
    host.offer("emnist-letters", {"gzip.zip": zip_of(inside)}, files)
    code, _, err = pfedla("data", "fetch", "emnist-letters")
    assert code == 0, err
    for split in EMNIST_SPLITS:
        assert len(load(f"emnist-{split}").y) == 140
    assert len(files) == 24
    assert KNOWN["emnist-byclass"].source.members == tuple(files)


def test_a_damaged_file_is_fetched_anew(host: Host, pfedla) -> None:
    files = cifar_files("cifar10")
    home = KNOWN["cifar10"].source.home
    write(home, files | {"data_batch_3.bin": b"short"})
    host.offer("cifar10", {"c.tar.gz": tar_of(files)}, files)
    code, out, err = pfedla("data", "fetch", "cifar10")
    assert code == 0, err
    assert "data_batch_3.bin" in out
    assert (home / "data_batch_3.bin").read_bytes() == files["data_batch_3.bin"]


def test_an_archive_brought_by_hand_is_used_and_kept(host: Host, pfedla) -> None:
    files = cifar_files("cifar10")
    host.offer("cifar10", {"c.tar.gz": tar_of(files)}, files)
    directory = KNOWN["cifar10"].source.home.parent
    directory.mkdir(parents=True)
    (host.folder / "c.tar.gz").rename(directory / "c.tar.gz")
    assert pfedla("data", "fetch", "cifar10")[0] == 0
    assert (directory / "c.tar.gz").exists()
    assert load("cifar10").y.size == 6 * NUM


# What goes wrong


def test_a_wrong_checksum_is_refused_and_nothing_is_left(host: Host, pfedla) -> None:
    files = cifar_files("cifar10")
    host.offer("cifar10", {"c.tar.gz": tar_of(files)}, files)
    (host.folder / "c.tar.gz").write_bytes(tar_of(files | {"data_batch_1.bin": b"other"}))
    code, _, err = pfedla("data", "fetch", "cifar10")
    assert code == 2
    assert "not the published checksum" in err
    home = KNOWN["cifar10"].source.home
    assert not home.exists() or not list(home.iterdir())


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar100"])
def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path, monkeypatch, pfedla, name: str) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    source = change(monkeypatch, name, hosts=("http://127.0.0.1:9/",))
    code, _, err = pfedla("data", "fetch", name)
    assert code == 2
    named = ["http://127.0.0.1:9/", str(source.home), *(source.files if source.members else ())]
    assert all(word in err for word in named)


def test_a_data_directory_that_cannot_be_made_is_not_the_networks_fault(tmp_path: Path, monkeypatch, pfedla) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "file"))
    assert pfedla("data", "fetch", "mnist")[0] == 1


def test_names_are_checked_before_anything_is_downloaded(pfedla) -> None:
    code, _, err = pfedla("data", "fetch", "cifar10", "cifar11")
    assert code == 2
    assert "cifar11" in err


def tar_with(member: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        good = tarfile.TarInfo("folder/a.bin")
        good.size = 3
        tar.addfile(good, io.BytesIO(b"abc"))
        member.size = 3 if member.isreg() else 0
        tar.addfile(member, io.BytesIO(b"abc"))
    return buffer.getvalue()


def link(kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo("folder/b.bin")
    member.type, member.linkname = kind, "/etc/passwd"
    return member


@pytest.mark.parametrize(
    "content",
    [
        *[tar_with(tarfile.TarInfo(name)) for name in ("../b.bin", "folder/../../b.bin", "/b.bin")],
        *[tar_with(link(kind)) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)],
        *[zip_of({"a.bin": b"abc", name: b"abc"}) for name in ("../b.bin", "..\\b.bin", "C:/b.bin")],
        zip_of({"a.bin": b"abc"}),  # not all files
        zip_of({"a.bin": b"abc", "b.bin": b"xyz"}),  # another checksum
        zip_of({"a.bin": b"abc", "b.bin": bytes(10**5 + 1)}),  # too large
        zip_of({"a.bin": b"abc", "b.bin": b"abc"})[:-30],
        tar_of({"a.bin": b"abc", "b.bin": bytes(range(256)) * 99})[:-40],
        b"neither tar nor zip",
        b"",
    ],
)
def test_archives_that_are_not_used(tmp_path: Path, monkeypatch, content: bytes) -> None:
    archive, target = tmp_path / "archive", tmp_path / "deep" / "target"
    monkeypatch.setattr("pfedla.data.sources.LARGEST_MEMBER", 10**5)
    archive.write_bytes(content)
    with pytest.raises(PfedlaError, match=re.escape(str(archive))):
        unpack(archive, target, ("a.bin", "b.bin"), {"b.bin": hashlib.sha256(b"abc").hexdigest()})
    assert not list(target.iterdir())  # all or nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "deep"]


@pytest.mark.parametrize("name", [name for name, entry in KNOWN.items() if entry.source])
def test_every_source_is_whole(name: str) -> None:
    """What the loader reads is what is downloaded; every download has a checksum."""
    source: Source = KNOWN[name].source
    assert set(source.files) <= {*(source.members or source.md5)}
    assert all(len(digest) == 32 for digest in source.md5.values())
    assert all(len(digest) == 64 for digest in source.sha256.values())
    assert all(host.endswith("/") for host in source.hosts)
