"""Downloads over a real HTTP server on this machine: checksums, safe unpacking, what is said when it fails."""

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from official import NUM, cifar_files, idx_files, tar_of, write, zip_of

from pfedla.core.errors import PfedlaError
from pfedla.data import names
from pfedla.data.datasets import KNOWN, load
from pfedla.data.sources import Download, Source, unpack


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def host(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    """A folder that is served, and an empty data directory; offer() puts a data set's download on the host."""
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    served = tmp_path / "host"
    served.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(served)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("test_fetch.PORT", server.server_address[1], raising=False)
    yield served
    server.shutdown()
    server.server_close()


PORT = 0


def offer(host: Path, monkeypatch, name: str, contents: dict[str, bytes], members: dict[str, bytes] | None = None) -> None:
    """The data set's own downloads, but from our host and with the checksums of these contents."""
    digests = {file: hashlib.sha256(content).hexdigest() for file, content in (members or {}).items()}
    source = KNOWN[name].source
    write(host, contents)
    downloads = tuple(
        Download(
            file, f"md5:{hashlib.md5(content).hexdigest()}",
            (f"http://127.0.0.1:9/{file}", f"http://127.0.0.1:{PORT}/{file}"), tuple(digests),
        )
        for file, content in contents.items()
    )  # fmt: skip
    for key, value in {"downloads": downloads, "digests": digests, "elsewhere": None}.items():
        monkeypatch.setitem(source.__dict__, key, value)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_single_files(host: Path, monkeypatch, pfedla, name: str) -> None:
    """The first address does not answer, the second does."""
    offer(host, monkeypatch, name, idx_files(name))
    code, out, err = pfedla("data", "fetch", name)
    assert code == 0, err
    folder = KNOWN[name].source.home
    assert f"{name}: {2 * NUM} examples of 10 classes, checked; downloaded to {folder}" in out
    assert len(load(name).y) == 2 * NUM
    code, out, _ = pfedla("data", "fetch", name)  # the second time nothing is downloaded
    assert f"already in {folder}" in out


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_tar_archive(host: Path, monkeypatch, pfedla, name: str) -> None:
    files = cifar_files(name)
    inside = {f"some-folder/{file}": content for file, content in files.items()} | {"some-folder/readme.html": b"hello"}
    archive = KNOWN[name].source.downloads[0].name
    offer(host, monkeypatch, name, {archive: tar_of(inside)}, files)
    code, out, err = pfedla("data", "fetch", name)
    assert code == 0, err
    assert "downloaded to" in out
    home = KNOWN[name].source.home
    assert sorted(path.name for path in home.iterdir()) == sorted(files)  # nothing else, no scratch left
    assert not (home.parent / archive).exists()


def test_one_zip_archive_has_all_of_emnist(host: Path, monkeypatch, pfedla) -> None:
    files = {file: content for split in names.EMNIST for file, content in idx_files(f"emnist-{split}", 70).items()}
    inside = {f"gzip/{file}": content for file, content in files.items()}
    offer(host, monkeypatch, "emnist-letters", {"gzip.zip": zip_of(inside)}, files)
    code, _, err = pfedla("data", "fetch", "emnist-letters")
    assert code == 0, err
    for split in names.EMNIST:
        assert len(load(f"emnist-{split}").y) == 140
    assert len(files) == 24
    assert KNOWN["emnist-byclass"].source.downloads[0].members == tuple(files)


def test_a_damaged_file_is_fetched_anew(host: Path, monkeypatch, pfedla) -> None:
    files = cifar_files("cifar10")
    home = KNOWN["cifar10"].source.home
    write(home, files | {"data_batch_3.bin": b"short"})
    offer(host, monkeypatch, "cifar10", {"c.tar.gz": tar_of(files)}, files)
    code, out, err = pfedla("data", "fetch", "cifar10")
    assert code == 0, err
    assert "data_batch_3.bin: 5 bytes are not whole records" in out
    assert "downloaded to" in out
    assert (home / "data_batch_3.bin").read_bytes() == files["data_batch_3.bin"]


def test_an_archive_brought_by_hand_is_used_and_kept(host: Path, monkeypatch, pfedla) -> None:
    files = cifar_files("cifar10")
    offer(host, monkeypatch, "cifar10", {"c.tar.gz": tar_of(files)}, files)
    directory = KNOWN["cifar10"].source.home.parent
    directory.mkdir(parents=True)
    (host / "c.tar.gz").rename(directory / "c.tar.gz")
    code, _, err = pfedla("data", "fetch", "cifar10")
    assert code == 0, err
    assert (directory / "c.tar.gz").exists()
    assert load("cifar10").y.size == 6 * NUM


# What goes wrong


def test_a_wrong_checksum_is_refused_and_nothing_is_left(host: Path, monkeypatch, pfedla) -> None:
    files = cifar_files("cifar10")
    offer(host, monkeypatch, "cifar10", {"c.tar.gz": tar_of(files)}, files)
    (host / "c.tar.gz").write_bytes(tar_of(files | {"data_batch_1.bin": b"other"}))
    code, _, err = pfedla("data", "fetch", "cifar10")
    assert code == 2
    assert "not the published checksum" in err
    home = KNOWN["cifar10"].source.home
    assert not home.exists() or not list(home.iterdir())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "emnist", "emnist-byclass", "cifar10", "cifar100"])
def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path: Path, monkeypatch, pfedla, name: str) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    source = KNOWN[name].source
    nowhere = tuple(replace(item, urls=("http://127.0.0.1:9/x",)) for item in source.downloads)
    monkeypatch.setitem(source.__dict__, "downloads", nowhere)
    monkeypatch.setitem(source.__dict__, "elsewhere", None)
    code, _, err = pfedla("data", "fetch", name)
    assert code == 2
    assert f"{name} could not be downloaded (http://127.0.0.1:9/x: ConnectionError)" in err
    assert source.downloads[0].name in err
    assert str(source.home) in err
    assert all(file in err for file in source.files)


def test_a_damaged_archive_brought_by_hand_is_named(tmp_path: Path, monkeypatch, pfedla) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    source = KNOWN["cifar10"].source
    monkeypatch.setitem(source.__dict__, "downloads", (replace(source.downloads[0], urls=("http://127.0.0.1:9/x",)),))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"bad")
    code, _, err = pfedla("data", "fetch", "cifar10")
    assert code == 2
    assert "is here, but its MD5 is bae60998ffe4923b131e3d6e4c19993e, not c32a1d4ab5d03f1284b67883e8d87530" in err


def test_a_data_directory_that_cannot_be_made_is_not_the_networks_fault(tmp_path: Path, monkeypatch, pfedla) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "file"))
    code, _, err = pfedla("data", "fetch", "mnist")
    assert code == 1
    assert "Not a directory" in err


def test_names_are_checked_before_anything_is_downloaded(pfedla) -> None:
    code, _, err = pfedla("data", "fetch", "cifar10", "cifar11")
    assert code == 2
    assert "unknown data set 'cifar11' (did you mean 'cifar10'?)" in err


def test_what_is_embedded_needs_no_fetching(pfedla) -> None:
    assert "embedded" in pfedla("data", "fetch", "digits")[1]


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
    ("content", "message"),
    [
        (tar_with(tarfile.TarInfo("../b.bin")), r"'\.\./b\.bin' points out of its folder"),
        (tar_with(tarfile.TarInfo("folder/../../b.bin")), "points out of its folder"),
        (tar_with(tarfile.TarInfo("/b.bin")), "points out of its folder"),
        (tar_with(link(tarfile.SYMTYPE)), "a link or a device"),
        (tar_with(link(tarfile.LNKTYPE)), "a link or a device"),
        (tar_with(link(tarfile.FIFOTYPE)), "a link or a device"),
        (zip_of({"a.bin": b"abc", "../b.bin": b"abc"}), "points out of its folder"),
        (zip_of({"a.bin": b"abc", "..\\b.bin": b"abc"}), "points out of its folder"),
        (zip_of({"a.bin": b"abc", "C:/b.bin": b"abc"}), "points out of its folder"),
        (zip_of({"a.bin": b"abc"}), r"has no b\.bin"),
        (zip_of({"a.bin": b"abc", "b.bin": b"xyz"}), r"checksum of b\.bin in it is not the published one"),
        (zip_of({"a.bin": b"abc", "b.bin": b"abc"})[:-30], "damaged or incomplete"),
        (tar_of({"a.bin": b"abc", "b.bin": bytes(range(256)) * 99})[:-40], "damaged or incomplete"),
        (b"neither tar nor zip", "damaged or incomplete"),
        (b"", "damaged or incomplete"),
    ],
)
def test_archives_that_are_not_used(tmp_path: Path, content: bytes, message: str) -> None:
    archive, target = tmp_path / "archive", tmp_path / "deep" / "target"
    archive.write_bytes(content)
    with pytest.raises(PfedlaError, match=message) as error:
        unpack(archive, target, ("a.bin", "b.bin"), {"b.bin": hashlib.sha256(b"abc").hexdigest()})
    assert str(archive) in str(error.value)
    assert not list(target.iterdir())  # all or nothing
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "deep"]


def test_a_member_that_is_too_large_is_not_unpacked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("pfedla.data.sources.LARGEST_MEMBER", 2)
    (tmp_path / "archive").write_bytes(zip_of({"a.bin": b"abc"}))
    with pytest.raises(PfedlaError, match="would be 3 bytes"):
        unpack(tmp_path / "archive", tmp_path / "target", ("a.bin",), {})


@pytest.mark.parametrize("name", [name for name, entry in KNOWN.items() if entry.source])
def test_every_source_is_whole(name: str) -> None:
    """What the loader reads is what is downloaded; every download has a checksum and a secure or official address."""
    source: Source = KNOWN[name].source
    brought = {file for item in source.downloads for file in item.members or (item.name,)}
    assert set(source.files) <= brought
    for item in source.downloads:
        assert len(item.checksum.removeprefix("md5:")) == 32
        assert all(url.endswith(item.name) for url in item.urls)
    assert all(len(digest) == 64 for digest in source.digests.values())
