"""Your own arrays: what is taken, what is refused."""

import io
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedla.core.errors import PfedlaError
from pfedla.data.federation import federation_of
from pfedla.data.own import dataset_of, load_npz, pixel_statistics


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
        ({"x": np.array([{"a": 1}] * 4, dtype=object), "y": np.arange(4)}, "never opened; save plain arrays"),
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
    for content, message in (
        (b"", "cannot be read"), (b"not a zip", "never opened"), (pickle.dumps({"x": [1]}), "a pickle, which is never opened"),
        (plain.getvalue(), "cannot be read"),
    ):  # fmt: skip
        path.write_bytes(content)
        with pytest.raises(PfedlaError, match=message):
            load_npz(path)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_damaged_bytes_never_end_in_anything_but_a_sentence(tmp_path_factory, data: st.DataObject) -> None:
    good = io.BytesIO()
    np.savez_compressed(good, x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2)
    content = bytearray(good.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(content)
    with suppress(PfedlaError):
        load_npz(path)


def test_bytes_are_names_too() -> None:
    assert dataset_of("mine", np.zeros((2, 2)), np.array([b"cat", b"dog"])).classes == ("cat", "dog")


def test_a_single_class_is_refused_for_training() -> None:
    with pytest.raises(PfedlaError, match="single class"):
        federation_of(np.zeros((8, 2)), np.zeros(8, int), np.arange(8) % 2)


def test_pixel_statistics_are_exact() -> None:
    """Counted in pieces; the twin is numpy's own mean and standard deviation in float64."""
    x = np.random.default_rng(0).integers(0, 256, (5000, 3, 4, 5), np.uint8)
    mean, std = pixel_statistics(x)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3), dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(std, x.std((0, 2, 3), dtype=np.float64), rtol=1e-12)
    assert pixel_statistics(np.full((3, 1, 2, 2), 7, np.uint8)) == ((7.0,), (1.0,))


def test_the_first_classes_alone() -> None:
    x = np.arange(12, dtype=np.uint8).reshape(12, 1, 1, 1)
    dataset = dataset_of("mine", x, np.arange(12) % 4, np.arange(12) // 6, np.arange(12) % 2 == 0)
    limited = dataset.limited(3)
    assert limited.classes == ("0", "1", "2")
    assert limited.y.tolist() == [0, 1, 2] * 3
    assert limited.x.flatten().tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    assert limited.client.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert limited.test.tolist() == [row % 2 == 0 for row in (0, 1, 2, 4, 5, 6, 8, 9, 10)]
    assert dataset.limited(4) is dataset
    with pytest.raises(PfedlaError, match="has only 4 classes"):
        dataset.limited(5)
