"""Downloads from an HTTP server on this machine: checksums, safe unpacking, failures."""

import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from official import EMNIST_SPLITS, NUM, SITES, cifar_files, heart_table, idx_files, tar_of, write, zip_of

from pfedla.core.errors import PfedlaError
from pfedla.data.datasets import KNOWN, Source, load, unpack

Offer = Callable[..., Path]


def change(monkeypatch: pytest.MonkeyPatch, name: str, **values: object) -> Source:
    for key, value in values.items():
        monkeypatch.setitem(KNOWN[name].source.__dict__, key, value)
    return KNOWN[name].source


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Offer]:
    """Serve a download with the checksums of its contents, into an empty data directory."""
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "host")))
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def serve(name: str, contents: dict[str, bytes], members: dict[str, bytes] | None = None) -> Path:
        write(tmp_path / "host", contents)
        md5 = {file: hashlib.md5(content).hexdigest() for file, content in contents.items()}
        sha256 = {file: hashlib.sha256(content).hexdigest() for file, content in (members or {}).items()}
        hosts = ("http://127.0.0.1:9/", f"http://127.0.0.1:{server.server_address[1]}/")  # the first does not answer
        change(monkeypatch, name, md5=md5, sha256=sha256, members=tuple(members or ()), hosts=hosts, elsewhere=None)
        return tmp_path / "host"

    yield serve
    server.shutdown()
    server.server_close()


def test_single_files(offer: Offer, pfedla) -> None:
    """The second time nothing is downloaded."""
    offer("mnist", idx_files("mnist"))
    for done in ("downloaded to", "already in"):
        code, out, err = pfedla("data", "fetch", "mnist")
        assert (code, f"{done} {KNOWN['mnist'].source.home}" in out) == (0, True), err


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_a_tar_archive(offer: Offer, pfedla, name: str) -> None:
    """Nothing else is unpacked, no scratch is left; a damaged file is fetched anew; an archive is used and kept."""
    files, home = cifar_files(name), KNOWN[name].source.home
    inside = {f"some-folder/{file}": content for file, content in files.items()} | {"some-folder/readme.html": b"hello"}
    host = offer(name, {"c.tar.gz": tar_of(inside)}, files)
    for before in ({}, files | {next(iter(files)): b"short"}):
        write(home, before)
        code, _, err = pfedla("data", "fetch", name)
        assert code == 0, err
        assert {path.name: path.read_bytes() for path in home.iterdir()} == files
        assert not (home.parent / "c.tar.gz").exists()
    by_hand = (host / "c.tar.gz").rename(home.parent / "c.tar.gz")
    (home / next(iter(files))).unlink()
    assert (pfedla("data", "fetch", name)[0], by_hand.exists(), load(name).y.size) == (0, True, 6 * NUM)


def test_one_zip_archive_has_all_of_emnist(offer: Offer, pfedla) -> None:
    files = {file: content for split in EMNIST_SPLITS for file, content in idx_files(f"emnist-{split}", 70).items()}
    offer("emnist-letters", {"gzip.zip": zip_of({f"gzip/{file}": content for file, content in files.items()})}, files)
    code, _, err = pfedla("data", "fetch", "emnist-letters")
    assert code == 0, err
    for split in EMNIST_SPLITS:
        assert len(load(f"emnist-{split}").y) == 140
    assert KNOWN["emnist-byclass"].source.members == tuple(files)


def test_a_wrong_checksum_is_refused_and_nothing_is_left(offer: Offer, pfedla) -> None:
    files, home = cifar_files("cifar10"), KNOWN["cifar10"].source.home
    served = offer("cifar10", {"c.tar.gz": tar_of(files)}, files) / "c.tar.gz"
    served.write_bytes(tar_of(files | {"data_batch_1.bin": b"other"}))
    code, _, err = pfedla("data", "fetch", "cifar10")
    assert (code, "checksum" in err) == (2, True)
    assert not home.exists() or not list(home.iterdir())


@pytest.mark.parametrize("name", ["mnist", "emnist", "cifar100", "heart-disease", "tcga-brca"])
def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path, monkeypatch, pfedla, name: str) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    source = change(monkeypatch, name, hosts=("http://127.0.0.1:9/",))
    code, _, err = pfedla("data", "fetch", name)
    named = ["http://127.0.0.1:9/", str(source.home), *(source.files if source.members else ())]
    assert (code, all(word in err for word in named)) == (2, True)


def test_a_wrong_name_is_seen_first_and_a_wrong_directory_is_not_the_networks_fault(tmp_path, monkeypatch, pfedla):
    code, _, err = pfedla("data", "fetch", "cifar10", "cifar11")
    assert (code, "cifar11" in err) == (2, True)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "file"))
    assert pfedla("data", "fetch", "mnist")[0] == 1


def tar_with(name: str = "folder/b.bin", kind: bytes = tarfile.REGTYPE) -> bytes:
    buffer = io.BytesIO(gzip.decompress(tar_of({"folder/a.bin": b"abc"})))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.linkname = kind, 3 * (kind == tarfile.REGTYPE), "/etc/passwd"
        tar.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *[("a.tar", tar_with(name)) for name in ("../b.bin", "folder/../../b.bin")],
        *[("a.tar", tar_with(kind=kind)) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)],
        *[("a.zip", zip_of({"a.bin": b"abc", name: b"abc"})) for name in ("../b.bin", "/b.bin")],
        ("a.zip", zip_of({"a.bin": b"abc"})),  # not all files
        ("a.zip", zip_of({"a.bin": b"abc", "b.bin": b"xyz"})),  # another checksum
        ("a.tar.gz", tar_of({"a.bin": b"abc", "b.bin": bytes(range(256)) * 99})[:-40]),
    ],
)
def test_archives_that_are_not_used(tmp_path: Path, monkeypatch, name: str, content: bytes) -> None:
    """All or nothing, and never outside its folder; that an archive is the published one is checked before."""
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "deep"))
    (tmp_path / name).write_bytes(content)
    known = {"folder": "target", "files": (), "md5": {}, "hosts": (), "megabytes": 0, "members": ("a.bin", "b.bin")}
    source = Source(**known, sha256={"b.bin": hashlib.sha256(b"abc").hexdigest()})
    with pytest.raises((PfedlaError, tarfile.TarError, EOFError)):
        unpack(tmp_path / name, source)
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([name, "deep", "target"])


def test_every_download_has_a_checksum_and_what_the_loader_reads_is_downloaded() -> None:
    """But for data of real sites: their hosts publish none, so that the loader counts and checks every value."""
    for source in (entry.source for entry in KNOWN.values() if entry.source):
        if source.origin:
            assert not source.md5
        else:
            assert set(source.files) <= {*(source.members or source.md5)}
            assert {len(digest) for digest in source.md5.values()} == {32}


@pytest.mark.parametrize("name", ["heart-disease", "tcga-brca"])
def test_files_without_a_checksum(offer: Offer, pfedla, name: str) -> None:
    """They are checked by what they hold; what is there is kept, what is damaged is fetched anew."""
    files, home = SITES[name](), KNOWN[name].source.home
    host, first = offer(name, {}), next(iter(files))
    write(host, files)
    for before, done in (({}, "downloaded to"), ({}, "already in"), ({first: b"<html>log in</html>"}, "downloaded to")):
        write(home, before)
        code, out, err = pfedla("data", "fetch", name)
        assert (code, f"{done} {home}" in out) == (0, True), err
        assert {path.relative_to(home).as_posix() for path in home.rglob("*.*")} == files.keys()
    write(home, {first: b"mine"})
    write(host, {first: b"<html>log in</html>"})
    code, _, err = pfedla("data", "fetch", name)
    assert (code, first in err) == (2, True)
    write(host, files)
    assert pfedla("data", "fetch", name)[0] == 0


def test_a_prepared_file_is_as_good_and_a_damaged_one_is_replaced(offer: Offer, pfedla) -> None:
    files, home = SITES["heart-disease"](), KNOWN["heart-disease"].source.home
    write(offer("heart-disease", {}), files)
    write(home.parent / "sites", {"heart-disease.csv": heart_table()})
    assert "already in" in pfedla("data", "fetch", "heart-disease")[1]
    write(home.parent / "sites", {"heart-disease.csv": heart_table()[:-100]})
    code, out, err = pfedla("data", "fetch", "heart-disease")
    assert (code, "heart-disease.csv" in out, load("heart-disease").y.size > 700) == (0, True, True), err


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("name", ["watch", "sentiment"])
def test_what_nobody_offers_says_which_file_to_put_where(tmp_path, monkeypatch, pfedla, name: str, damaged) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    (file,) = KNOWN[name].source.files
    write(tmp_path / "data" / "sites", {file: b"damaged"} if damaged else {})
    code, out, err = pfedla("data", "fetch", name)
    named = (file, str(tmp_path / "data" / "sites"), {"watch": "seglearn", "sentiment": "vaderSentiment"}[name])
    assert (code, all(word in err for word in named), file in out) == (2, True, damaged)
