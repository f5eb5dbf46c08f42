"""Files to arrays: the official formats, damage, and the real files where they are."""

import gzip
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from official import NUM, cifar_files, idx, idx_files, official_files, write

from pfedla.core.errors import PfedlaError
from pfedla.data.datasets import KNOWN, load, state_of

WITH_FILES = [name for name, entry in KNOWN.items() if entry.source and name != "emnist"]


@pytest.fixture(autouse=True)
def own_directory(request, tmp_path: Path, monkeypatch) -> None:
    """Tests of tiny files have an empty data directory, and know nothing of Debian's."""
    if "real" not in request.fixturenames:
        monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
        monkeypatch.setitem(KNOWN["fashion-mnist"].source.__dict__, "elsewhere", None)


def put(name: str, files: dict[str, bytes]) -> Path:
    folder = KNOWN[name].source.home
    write(folder, files)
    return folder


@pytest.mark.parametrize("name", [name for name in WITH_FILES if KNOWN[name].format == "idx"])
@pytest.mark.parametrize("packed", [True, False])
def test_idx_sets(name: str, packed: bool) -> None:
    files = idx_files(name, 70)
    plain = {file.removesuffix(".gz"): gzip.decompress(content) for file, content in files.items()}
    put(name, files if packed else plain)
    dataset = load(name)
    assert (dataset.name, dataset.classes) == (name, KNOWN[name].classes)
    assert (dataset.x.shape, dataset.x.flags.c_contiguous) == ((140, 1, 28, 28), True)
    assert dataset.y.tolist() == 2 * [i % len(dataset.classes) for i in range(70)]
    assert (dataset.x[:70, 0, 3, 5] == 255).all()  # upright: EMNIST's files are transposed
    assert (dataset.x[70:, 0, 3, 6] == 255).all()
    assert state_of(name).here
    if name.startswith("emnist-"):  # normalised by its training images
        assert (*dataset.mean, *dataset.std) == pytest.approx((dataset.x[:70].mean(), dataset.x[:70].std()))


def test_a_users_subset_stands_in_for_emnist_and_is_named(pfedla) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (600, 28, 28), np.uint8), np.arange(600) % 12
    folder = put("emnist-letters", {})
    np.savez(folder / "letters.npz", x=x, y=y)
    assert (state_of("emnist-letters").here, state_of("emnist-digits").here) == (True, False)
    code, out, err = pfedla("data", "show", "-d", "emnist", "--samples", 40, "--json")
    assert code == 0, err
    shown = json.loads(out)
    assert (shown["classes"], shown["subset"]) == (list("ABCDEFGHIJ"), str(folder / "letters.npz"))
    assert (shown["data"]["dataset"], shown["data"]["classes_limit"]) == ("emnist", 10)
    assert "subset letters.npz" in pfedla("data", "show", "-d", "emnist", "--samples", 40)[1]
    put("emnist-letters", idx_files("emnist-letters"))
    assert len(load("emnist").y) == 2 * NUM  # the official files come first


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar(name: str, classes: int) -> None:
    put(name, cifar_files(name))
    dataset = load(name)
    assert (dataset.x.shape, len(dataset.classes)) == ((6 * NUM, 3, 32, 32), classes)
    assert dataset.y.max() == min(classes, 5 * NUM) - 1  # fine labels
    assert (dataset.x == (dataset.y[:, None] + np.array([0, 50, 100]))[:, :, None, None]).all()


@pytest.mark.parametrize("name", WITH_FILES)
def test_a_set_that_is_not_here_says_what_is_lacking_and_how_to_get_it(name: str) -> None:
    files = official_files(name)
    with pytest.raises(PfedlaError, match=f"`pfedla data fetch {name}`") as error:
        load(name)
    assert all(file in str(error.value) for file in files)
    lost = next(iter(files))
    put(name, {file: content for file, content in files.items() if file != lost})
    assert lost in state_of(name).says
    with pytest.raises(PfedlaError, match=lost):
        load(name)


@pytest.mark.parametrize(
    ("name", "position", "array"),
    [
        ("mnist", 1, np.arange(NUM - 1) % 10),
        ("mnist", 3, np.full(NUM, 47)),
        ("mnist", 0, np.zeros((NUM, 28, 27))),
        ("mnist", 2, np.zeros((0, 28, 28))),
        ("emnist-letters", 1, np.zeros(NUM)),  # counted from one
    ],
)
def test_idx_files_that_do_not_fit_are_named(name: str, position: int, array: np.ndarray) -> None:
    files = idx_files(name)
    damaged = list(files)[position]
    folder = put(name, files | {damaged: gzip.compress(idx(array.astype(np.uint8)))})
    with pytest.raises(PfedlaError, match=str(folder / damaged)):
        load(name)


@pytest.mark.parametrize(("name", "record"), [("cifar10", 3073), ("cifar100", 3074)])
def test_damaged_cifar_files_are_named(name: str, record: int) -> None:
    files = cifar_files(name)
    damaged, good = next(iter(files.items()))
    label = good[:record] + b"\xff\xff" + good[record + 2 :]
    for content in (good[:-1], good[:-record], b"", pickle.dumps({"data": good}), bytes([200]) + good[1:], label):
        put(name, files | {damaged: content})
        with pytest.raises(PfedlaError, match=damaged):
            load(name)


def test_a_cifar_file_of_the_published_size_must_have_the_published_checksum() -> None:
    folder = put("cifar10", {})
    for name in KNOWN["cifar10"].source.files:
        np.zeros(30_730_000, np.uint8).tofile(folder / name)
    with pytest.raises(PfedlaError, match=r"data_batch_1\.bin: .*checksum"):
        load("cifar10")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "each", "training"),
    [("fashion-mnist", 7_000, 60_000), ("cifar10", 6_000, 50_000), ("cifar100", 600, 50_000)],
)
def test_the_real_files(real, name: str, each: int, training: int) -> None:
    real(name)
    dataset = load(name)
    assert np.bincount(dataset.y).tolist() == [each] * len(KNOWN[name].classes)
    assert dataset.x.shape[1:] == KNOWN[name].shape
    planes = dataset.x[:training].swapaxes(0, 1)  # the documented constants, in units of 255
    assert dataset.mean == pytest.approx([plane.mean() for plane in planes], abs=0.02)
    assert dataset.std == pytest.approx([plane.std() for plane in planes], abs=0.02)
