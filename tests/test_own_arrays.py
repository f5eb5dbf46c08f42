"""Your own arrays: what is taken, what is refused."""

import pickle

import numpy as np
import pytest
import torch
from conftest import budget, play
from torch import nn

from pfedla.algorithms import create
from pfedla.core.errors import PfedlaError
from pfedla.core.tasks import task_of
from pfedla.data.arrays import load_arrays
from pfedla.data.dataset import dataset_of, pixel_statistics
from pfedla.data.federation import Federation, federation_of


def test_own_images_and_vectors(tmp_path) -> None:
    path, y, values = tmp_path / "mine.npz", np.arange(40) % 4, np.arange(200.0).reshape(40, 5)
    for given, kept in (((9, 9), (1, 9, 9)), ((9, 9, 3), (3, 9, 9)), ((3, 9, 9), (3, 9, 9))):
        np.savez(path, x=np.zeros((40, *given), np.uint8), y=y)
        assert (load_arrays(path).x.shape[1:], load_arrays(path).x.dtype) == (kept, np.uint8)
    for x in (values, values.astype(">f8"), values.astype(np.longdouble), np.asfortranarray(values)):
        np.savez(path, x=x, y=np.array([-5, -5, 2**40, 3])[y])
        dataset = load_arrays(path)
        assert (dataset.x.tolist(), dataset.classes) == (values.tolist(), ("-5", "3", str(2**40)))
    assert (dataset.x.dtype, dataset.mean) == (np.float32, ())


def test_own_clients_and_a_ready_test_split_are_honoured() -> None:
    rows = np.arange(24)
    federation = federation_of(rows[:, None] * 1.0, rows % 2, rows // 8, rows % 4 == 0)
    assert [examples.x.flatten().tolist() for examples in federation.test] == [[0, 4], [8, 12], [16, 20]]
    assert [len(examples.y) for examples in federation.train] == [6, 6, 6]


def test_uint8_images_are_normalised_by_training_data_alone() -> None:
    x = np.repeat([10, 0], 10).astype(np.uint8)[:, None, None] + np.zeros((20, 4, 4), np.uint8)
    x[::2] += 2
    federation = federation_of(x, np.arange(20) % 2, np.zeros(20, int), np.arange(20) >= 10)
    assert (federation.mean, federation.std) == ((11.0,), (1.0,))
    assert federation.normalise(federation.train[0].x).unique().tolist() == [-1.0, 1.0]
    assert federation.train[0].x.dtype == torch.uint8


def tokens(dtype: str) -> Federation:
    x = np.random.default_rng(0).integers(0, 20, (60, 5))
    return federation_of(x.astype(dtype), x[:, 0] > 9, np.arange(60) % 3)


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
@pytest.mark.parametrize(("dtype", "kept"), [("int64", torch.int64), ("int32", torch.int32), (">i8", torch.int64)])
def test_token_ids_stay_integers_and_train_an_embedding(engine: str, dtype: str, kept: torch.dtype) -> None:
    federation = tokens(dtype)
    assert federation.train[0].x.dtype == federation.normalise(federation.train[0].x).dtype == kept
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(20, 2))
    played, _ = play(create("fedavg", task_of(model), budget(0.5, 2, 8)), federation, engine=engine)
    assert not any(round.failures for round in played)
    assert played[-1].evaluation.loss.isfinite().all()


def test_other_vectors_and_integer_images_become_float32() -> None:
    for dtype in ("uint8", "int16", "bool", "float16", "float64"):
        assert tokens(dtype).train[0].x.dtype == torch.float32
    assert dataset_of("mine", np.zeros((2, 4, 4), np.int64), np.arange(2)).x.dtype == np.float32


@pytest.mark.parametrize(
    ("arrays", "named"),
    [
        ({"y": np.zeros(3, int)}, "y"),
        ({"y": np.array([0.5, 1, np.nan, 3])}, r"y\[2\]"),
        ({"x": np.array([[1, 2], [3, 4], [np.nan, 0], [5, 6]])}, r"x\[2, 0\]"),
        ({"x": np.full((4, 2), 1e39)}, r"x\[0, 0\]"),
        ({"test": np.zeros(4)}, "test"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0, int)}, "shape"),
        ({"x": np.zeros((4, 2), complex)}, "complex"),
        ({"client": np.array([0, 1, np.nan, 1])}, "client"),
        ({"x": np.array([{"a": 1}] * 4, dtype=object)}, "objects"),
        ({"x": np.zeros((10_001, 1)), "y": np.arange(10_001)}, "y"),
        ({"y": np.array([65, 0x110000, 66, 67], np.uint32).view("<U1")}, "y"),  # characters that Python cannot make
        ({"y": np.array([65, 0xD800, 66, 67], np.uint32).view("<U1")}, "y"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_bad_arrays_are_refused(tmp_path, arrays: dict, named: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **{"x": np.zeros((4, 2)), "y": np.arange(4), **arrays})
    with pytest.raises(PfedlaError, match=rf"bad\.npz: .*{named}"):
        load_arrays(path)
    for content in (b"", b"not a zip", pickle.dumps({"x": [1]})):
        path.write_bytes(content)
        with pytest.raises(PfedlaError, match=r"bad\.npz"):
            load_arrays(path)


def test_a_folder_of_arrays_and_a_single_class(tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((4, 2)))
    with pytest.raises(PfedlaError, match="y"):
        load_arrays(tmp_path)
    np.save(tmp_path / "y.npy", np.arange(4) % 2)
    assert load_arrays(tmp_path).y.tolist() == [0, 1, 0, 1]
    with pytest.raises(PfedlaError, match="single class"):
        federation_of(np.zeros((8, 2)), np.zeros(8, int), np.arange(8) % 2)


def test_pixel_statistics_are_exact() -> None:
    """Counted in pieces; the twin is numpy's own mean and standard deviation in float64."""
    x = np.random.default_rng(0).integers(0, 256, (5000, 3, 4, 5), np.uint8)
    exact = [x.mean((0, 2, 3), dtype=np.float64), x.std((0, 2, 3), dtype=np.float64)]
    np.testing.assert_allclose(pixel_statistics(x), exact, rtol=1e-12)
    assert pixel_statistics(np.full((3, 1, 2, 2), 7, np.uint8)) == ((7.0,), (1.0,))


def test_names_and_the_first_classes_alone() -> None:
    x, rows = np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1), np.array([0, 1, 2, 4, 5, 6, 8, 9, 10])
    labels, owners = np.array([b"ant", b"bee", b"cat", b"dog"] * 3), np.repeat(["b", "a"], 6)
    dataset = dataset_of("mine", x, labels, client=owners, test=np.arange(12) % 2 == 0)
    kept = dataset.keep_classes(3)
    assert (kept.classes, kept.client_names, kept.y.tolist()) == (("ant", "bee", "cat"), ("a", "b"), [0, 1, 2] * 3)
    assert (kept.x.flatten() == rows).all()
    assert ((kept.client == (rows < 6)) & (kept.test == (rows % 2 == 0))).all()
    with pytest.raises(PfedlaError, match="classes_limit"):
        dataset.keep_classes(5)
