"""Files to arrays, labels to clients."""

import gzip
import io
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedla.data.datasets import FASHION_FILES, dataset_of, load, load_npz, read_idx
from pfedla.data.federation import federation_of, partitioned
from pfedla.data.partition import assign_classes, shares_to_counts
from pfedla.errors import PfedlaError

SPLIT = {"classes_per_client": 4, "dominant_classes": 2, "dominant_share": 0.6, "test_share": 0.3, "seed": 0}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(folder, count: int = 400) -> np.ndarray:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name in FASHION_FILES:
        images = "images" in name
        array = rng.integers(0, 256, (count, 28, 28), np.uint8) if images else (np.arange(count) % 10).astype(np.uint8)
        (folder / name).write_bytes(gzip.compress(idx(array)))
    return array


def test_digits_are_embedded() -> None:
    digits = load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == np.uint8
    assert digits.mean[0] == pytest.approx(digits.x.mean(), abs=1e-3)
    assert digits.std[0] == pytest.approx(digits.x.std(), abs=1e-3)


def test_fashion_mnist_is_read_from_the_data_directory(tmp_path, monkeypatch) -> None:
    write_fashion(tmp_path / "fashion-mnist")
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    dataset = load("fashion-mnist")
    assert dataset.x.shape == (800, 1, 28, 28)
    assert np.bincount(dataset.y).tolist() == [80] * 10


def test_the_real_fashion_mnist(fashion_mnist: None) -> None:
    dataset = load("fashion-mnist")
    assert dataset.x.shape == (70_000, 1, 28, 28)
    assert np.bincount(dataset.y).tolist() == [7_000] * 10
    assert dataset.mean[0] == pytest.approx(dataset.x[:60_000].mean(), abs=0.02)
    assert dataset.std[0] == pytest.approx(dataset.x[:60_000].std(), abs=0.02)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (idx(np.zeros((4, 2), np.uint8))[:-1], "7 bytes of data where its head says 8"),
        (idx(np.zeros((4, 2), np.uint8)) + b"x", "9 bytes of data where its head says 8"),
        (b"\x00\x01\x08\x01" + bytes(8), "not an IDX file"),
        (b"\x00\x00\x0d\x01" + bytes(8), "not an IDX file"),
        (b"\x00\x00\x08\x03\x00", "damaged or incomplete"),
        (b"", "damaged or incomplete"),
        (struct.pack(">HBB4I", 0, 8, 4, *[2**31] * 4), "claims"),
        (pickle.dumps([1, 2, 3]), "not an IDX file"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, content: bytes, message: str) -> None:
    path = tmp_path / "file-idx"
    path.write_bytes(content)
    with pytest.raises(PfedlaError, match=message) as error:
        read_idx(path)
    assert str(path) in str(error.value)


def test_a_truncated_gzip_is_named(tmp_path) -> None:
    path = tmp_path / "file-idx.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((400, 20), np.uint8)))[:-12])
    with pytest.raises(PfedlaError, match="damaged or incomplete"):
        read_idx(path)


def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    monkeypatch.setattr("pfedla.data.datasets.fashion_mnist_folder", lambda: None)
    monkeypatch.setattr("pfedla.data.datasets.FASHION_URL", "http://127.0.0.1:9/")
    with pytest.raises(PfedlaError) as error:
        load("fashion-mnist")
    assert "train-images-idx3-ubyte.gz" in str(error.value)
    assert str(tmp_path / "fashion-mnist") in str(error.value)


# Your own arrays


def test_own_images_and_vectors(tmp_path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "mine.npz"
    for x, shape in (
        (rng.integers(0, 256, (40, 9, 9), np.uint8), (1, 9, 9)),
        (rng.integers(0, 256, (40, 9, 9, 3), np.uint8), (3, 9, 9)),
        (rng.integers(0, 256, (40, 3, 9, 9), np.uint8), (3, 9, 9)),
        (rng.normal(size=(40, 5)), (5,)),
    ):
        np.savez(path, x=x, y=np.arange(40) % 4)
        dataset = load_npz(path)
        assert dataset.x.shape[1:] == shape
        assert dataset.x.dtype == (np.uint8 if x.dtype == np.uint8 else np.float32)
    assert dataset.mean == ()


def test_labels_and_clients_may_have_names() -> None:
    x = np.zeros((6, 2))
    dataset = dataset_of("mine", x, np.array(["cat", "dog"] * 3), np.array(["b", "a", "b", "a", "b", "a"]))
    assert dataset.classes == ("cat", "dog")
    assert dataset.client_names == ("a", "b")
    assert dataset.client.tolist() == [1, 0] * 3


def test_own_clients_and_a_ready_test_split_are_honoured() -> None:
    x = np.arange(24, dtype=float)[:, None]
    test = np.arange(24) % 4 == 0
    federation = federation_of(x, np.arange(24) % 2, np.arange(24) // 8, test)
    assert [examples.x.flatten().tolist() for examples in federation.test] == [[0, 4], [8, 12], [16, 20]]
    assert [len(examples.y) for examples in federation.train] == [6, 6, 6]


def test_uint8_images_are_normalised_by_training_data_alone() -> None:
    x = np.zeros((20, 4, 4), np.uint8)
    x[:10] = 10
    x[::2] += 2
    test = np.arange(20) >= 10
    federation = federation_of(x, np.arange(20) % 2, np.zeros(20, int), test)
    assert federation.mean == (11.0,)
    assert federation.std == (1.0,)
    assert federation.normalised(federation.train[0].x).unique().tolist() == [-1.0, 1.0]
    assert federation.train[0].x.dtype == torch.uint8


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((4, 2))}, "no array y"),
        ({"x": np.zeros((4, 2)), "y": np.zeros(3, int)}, "y has shape"),
        ({"x": np.zeros((4, 2)), "y": np.array([0.5, 1, 2, 3])}, "whole numbers or names"),
        ({"x": np.full((4, 2), np.nan), "y": np.arange(4)}, "not finite"),
        ({"x": np.zeros(4), "y": np.arange(4)}, "shape"),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "test": np.zeros(4)}, "boolean mask"),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "client": np.zeros(5, int)}, "client has shape"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "shape"),
        ({"x": np.zeros((4, 0, 5, 5)), "y": np.arange(4)}, "shape"),
        ({"x": np.float64(3), "y": np.arange(4)}, "shape"),
        ({"x": np.zeros((4, 2), complex), "y": np.arange(4)}, "complex"),
        ({"x": np.zeros((4, 2)), "y": np.arange(4), "client": np.array([0, 1, np.nan, 1])}, "client must hold"),
        ({"x": np.array([{"a": 1}] * 4, dtype=object), "y": np.arange(4)}, "plain arrays"),
    ],
)
def test_bad_arrays_are_refused(tmp_path, arrays: dict, message: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(PfedlaError, match=message):
        load_npz(path)


def test_a_file_that_is_no_npz_is_refused(tmp_path) -> None:
    path = tmp_path / "bad.npz"
    plain = io.BytesIO()
    np.save(plain, np.zeros(3))
    for content in (b"", b"not a zip", pickle.dumps({"x": [1]}), plain.getvalue()):
        path.write_bytes(content)
        with pytest.raises(PfedlaError, match="cannot be read"):
            load_npz(path)


def test_bytes_are_names_too() -> None:
    assert dataset_of("mine", np.zeros((2, 2)), np.array([b"cat", b"dog"])).classes == ("cat", "dog")


def test_a_single_class_is_refused_for_training() -> None:
    with pytest.raises(PfedlaError, match="single class"):
        federation_of(np.zeros((8, 2)), np.zeros(8, int), np.arange(8) % 2)


def test_parts_of_fashion_mnist_that_do_not_fit_are_refused(tmp_path, monkeypatch) -> None:
    """Also where the two parts' mistakes would cancel out."""
    write_fashion(tmp_path / "fashion-mnist")
    for part, count in (("train", 390), ("t10k", 410)):
        path = tmp_path / "fashion-mnist" / f"{part}-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(idx((np.arange(count) % 10).astype(np.uint8))))
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    with pytest.raises(PfedlaError, match="not Fashion-MNIST's"):
        load("fashion-mnist")


# Partitions


@given(shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=12), total=st.integers(0, 500))
def test_shares_become_counts_with_the_exact_sum(shares: list[float], total: int) -> None:
    counts = shares_to_counts(np.array(shares), total)
    assert counts.sum() == total
    assert (np.abs(counts - total * np.array(shares) / sum(shares)) <= 1 + 1e-6).all()


@given(clients=st.integers(1, 40), classes=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_classes_are_assigned_evenly_and_distinct(clients: int, classes: int, seed: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, classes))
    holds = assign_classes(clients, classes, each, np.random.default_rng(seed))
    assert (holds.sum(1) == each).all()
    held = holds.sum(0)
    assert held.max() - held.min() <= 1


@settings(deadline=None, max_examples=60)
@given(
    partition=st.sampled_from(["classes", "dominant"]), clients=st.integers(1, 12), classes=st.integers(4, 9),
    samples=st.integers(20, 60), seed=st.integers(0, 999), ready=st.booleans(),
)  # fmt: skip
def test_partitions(partition: str, clients: int, classes: int, samples: int, seed: int, ready: bool) -> None:
    per_class = 12 * 60
    y = np.repeat(np.arange(classes), per_class)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    test = np.arange(len(y)) % 2 == 0 if ready else None
    dataset = dataset_of("numbers", x, y, test=test)
    how = {**SPLIT, "classes_per_client": 3, "seed": seed}
    federation, again = (partitioned(dataset, partition, clients=clients, samples_per_client=samples, **how) for _ in range(2))
    rows = [np.concatenate([a.x.flatten(), b.x.flatten()]) for a, b in zip(federation.train, federation.test, strict=True)]
    assert len(np.unique(np.concatenate(rows))) == clients * samples  # disjoint, sizes exact
    assert all(torch.equal(a.x, b.x) for a, b in zip(federation.train, again.train, strict=True))  # same seed, same split
    counts = federation.class_counts()
    assert (counts[:, 1].sum(1) == round(0.3 * samples)).all()
    assert (np.abs(counts[:, 1] - 0.3 * counts.sum(1)) <= 1).all()
    totals = counts.sum(1)
    if partition == "classes":
        assert ((totals > 0).sum(1) == 3).all()
        assert all(np.ptp(row[row > 0]) <= 1 for row in totals)
    else:
        top_two = np.sort(totals, axis=1)[:, -2:].sum(1)
        assert (np.abs(top_two - 0.6 * samples) <= 2).all()
        assert (totals > 0).all()
    if ready:
        assert all((part.x.long() % 2 == 0).all() for part in federation.test)
        assert all((part.x.long() % 2 == 1).all() for part in federation.train)


def test_a_class_that_lacks_examples_is_named_with_how_many() -> None:
    y = np.repeat(np.arange(5), [100, 100, 100, 100, 20])
    dataset = dataset_of("scarce", np.zeros((420, 2)), y)
    with pytest.raises(PfedlaError, match=r"class '4' has 20 examples, the partition asks for 100: 80 are lacking"):
        partitioned(dataset, "classes", clients=5, samples_per_client=100, **SPLIT | {"classes_per_client": 5})


@pytest.mark.parametrize(
    ("partition", "samples", "how", "message"),
    [
        ("classes", 8, {}, "training and test examples of each"),
        ("dominant", 8, {}, "too few for every class"),
        ("dominant", 100, {"dominant_share": 0.15}, "would not prevail"),
        ("dominant", 100, {"dominant_classes": 10}, "at most 9"),
        ("classes", 100, {"classes_per_client": 11}, "at most 10"),
    ],
)
def test_partitions_that_would_break_their_rule_are_refused(partition: str, samples: int, how: dict, message: str) -> None:
    with pytest.raises(PfedlaError, match=message):
        partitioned(load("digits"), partition, clients=4, samples_per_client=samples, **SPLIT | how)


@pytest.mark.parametrize("each", [20, 40, 100])
def test_all_of_a_ready_split_is_taken(each: int) -> None:
    """Ten clients, two classes, 70/30 ready: nothing needs to be left over."""
    y = np.arange(10 * each) % 2
    test = np.arange(10 * each) // 2 % 10 < 3
    dataset = dataset_of("ready", np.zeros((10 * each, 1)), y, test=test)
    how = SPLIT | {"classes_per_client": 2}
    federation = partitioned(dataset, "classes", clients=10, samples_per_client=None, **how)
    assert (federation.class_counts().sum((1, 2)) == each).all()


def test_all_that_the_classes_allow_is_taken_when_no_number_is_given() -> None:
    digits = load("digits")
    federation = partitioned(digits, "classes", clients=10, samples_per_client=None, **SPLIT)
    sizes = federation.class_counts().sum((1, 2))
    assert (sizes == sizes[0]).all()
    with pytest.raises(PfedlaError, match="lacking"):
        partitioned(digits, "classes", clients=10, samples_per_client=int(sizes[0]) + 4, **SPLIT)
