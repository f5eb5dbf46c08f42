"""Data as people have them: tasks, trees of inputs, image folders, torch Datasets, frames."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from pfedla.core.errors import PfedlaError
from pfedla.data.arrays import load_arrays
from pfedla.data.dataset import dataset_of
from pfedla.data.federation import build_federation, digest_of, federation_from, federation_of
from pfedla.data.partition import Data

ROWS = np.arange(90)
X = np.random.default_rng(0).normal(size=(90, 4))
NAMES = np.array(["a", "b", "c"])[ROWS % 3]
OWNERS = ROWS // 30


def test_splits_of_classification_data_are_as_ever() -> None:
    """The fingerprints were computed before there were other tasks."""
    assert build_federation(Data(), 0)[1].fingerprint()[:12] == "e96e2eedca56"
    assert build_federation(Data(partition="dirichlet"), 3)[1].fingerprint()[:12] == "756d0dc915b3"
    overlapping = build_federation(Data(overlapping=True, samples_per_client=60), 1)[1].only([1, 2])
    assert overlapping.fingerprint()[:12] == "e85b7dfeb5cf"
    own = federation_of(X, NAMES, OWNERS)
    assert (own.fingerprint()[:12], digest_of(own.train[0], own.test[0])[:12]) == ("1f12d4cc884e", "25072afee183")
    tokens = federation_of((X * 50).astype(np.int64), NAMES, partition="iid", clients=3)
    assert tokens.fingerprint()[:12] == "c258672462b6"


@pytest.mark.parametrize(
    ("y", "task", "outputs"),
    [
        (ROWS % 2 * 1.0, "classification", ("0", "1")),
        (ROWS % 2 == 0, "classification", ("False", "True")),
        (pd.Series(NAMES), "classification", ("a", "b", "c")),
        (ROWS * 1.0, "regression", ("target",)),
        (X[:, 0], "regression", ("target",)),
        (X[:, :1], "regression", ("target",)),
        (X[:, :2], "regression", ("0", "1")),
        (np.stack([ROWS % 2, ROWS % 3 == 0], 1), "multilabel", ("0", "1")),
    ],
)
def test_y_says_the_task(y, task: str, outputs: tuple) -> None:
    federation = federation_of(X, y, OWNERS)
    assert (federation.task, federation.outputs) == (task, outputs)
    assert federation.train[0].y.dtype == (torch.int64 if task == "classification" else torch.float32)
    assert federation.class_counts().shape == (3, 2, len(federation.classes))
    assert [len(test.y) for test in federation.test] == [9, 9, 9]
    unowned = federation_of(X, y, clients=3, partition="iid")
    assert sum(len(part.y) for part in unowned.train + unowned.test) == 90
    assert federation.fingerprint() != unowned.fingerprint()


def test_survival_is_split_by_event() -> None:
    y = np.stack([ROWS + 1.0, ROWS % 5 == 0], 1)
    federation = federation_of(X, y, OWNERS, task="survival")
    assert (federation.classes, federation.outputs) == (("censored", "event"), ("risk",))
    events = federation.class_counts()[:, :, 1]
    assert (events.sum(1) == 6).all()
    assert ((events[:, 1] >= 1) & (events[:, 1] <= 2)).all()  # 30 % of six, within one
    seen, unseen = federation.hold_back(0.3, 0)
    assert (seen.task, unseen.task, seen.outputs) == ("survival", "survival", ("risk",))
    assert federation_of(X, y, OWNERS).task == "regression"


@pytest.mark.parametrize(
    ("y", "settings", "named"),
    [
        (X[:, 0], {"task": "classification"}, "whole numbers"),
        (NAMES, {"task": "regression"}, "numbers"),
        (X[:, :2], {"task": "multilabel"}, "0 or 1"),
        (X[:, :2], {"task": "survival"}, "event"),
        (X[:, 0], {"task": "survival"}, "time and event"),
        (X[:, 0], {"task": "regresion"}, "did you mean 'regression'"),
        (X[:, 0], {"partition": "classes"}, "iid or client"),
        (X[:, 0], {"classes_limit": 2}, "classes_limit"),
        (np.where(ROWS == 4, np.nan, X[:, 0]), {}, r"y\[4\]"),
    ],
)
def test_wrong_tasks_are_refused(y, settings: dict, named: str) -> None:
    with pytest.raises(PfedlaError, match=named):
        federation_of(X, y, OWNERS, **settings)


def test_trees_of_inputs(tmp_path) -> None:
    ids = np.random.default_rng(0).integers(0, 11, (90, 5))
    x = {"ids": ids, "mask": ids > 0}
    federation = federation_of(x, NAMES, OWNERS)
    assert (federation.shape, federation.vocabulary) == ({"ids": (5,), "mask": (5,)}, ids.max() + 1)
    assert federation.normalise(federation.train[0].x)["mask"].dtype == torch.bool
    np.savez(tmp_path / "own.npz", **{"x.ids": ids, "x.mask": ids > 0, "y": NAMES, "client": OWNERS})
    assert build_federation(Data(dataset=str(tmp_path / "own.npz")), 0)[1].fingerprint() == federation.fingerprint()
    pair = federation_of((X, ids), NAMES, clients=3, partition="iid", overlapping=True)
    assert pair.shape == ((4,), (5,))
    assert pair.only([0, 1]).leaked_share > 0
    limited = federation_of(x, NAMES, OWNERS, classes_limit=2)
    assert limited.train[0].x["ids"].shape[0] == len(limited.train[0].y) == 14
    for wrong, named in (({"ids": ids[:3], "mask": ids > 0}, "ids 3"), ({"a b": ids}, "named"), ({}, "inputs")):
        with pytest.raises(PfedlaError, match=named):
            federation_of(wrong, NAMES, OWNERS)
    with pytest.raises(PfedlaError, match="input x0"):
        dataset_of("mine", (X * np.nan, ids), NAMES)


def test_errors_name_the_file_with_its_ending_and_choices(tmp_path) -> None:
    np.savez(tmp_path / "own.npz", x=np.where(ROWS[:, None] == 3, np.nan, X), y=NAMES)
    with pytest.raises(PfedlaError, match=r"own\.npz: x\[3, 0\]"):
        load_arrays(tmp_path / "own.npz")
    with pytest.raises(PfedlaError, match=r"\.parquet"):
        build_federation(Data(dataset="table.xls"), 0)
    with pytest.raises(PfedlaError, match="federation_from"):
        federation_of([[1, 2], [3]], [0, 1])
    with pytest.raises(PfedlaError, match="label is for tables"):
        build_federation(Data(dataset=str(tmp_path / "own.npz"), label="y"), 0)


def test_a_client_with_one_test_example_is_named() -> None:
    owners = np.where(ROWS < 3, "small", "large")
    (warning,) = federation_of(X, NAMES, owners).warnings
    assert "small" in warning
    assert not federation_of(X, X[:, 0], OWNERS).warnings
    assert "targets" in federation_of(X, X[:, 0] * 100, OWNERS).warnings[0]


def save(path, value: int, *, size: tuple = (6, 5), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value,) * 3).save(path)


def test_folders_of_images(tmp_path) -> None:
    for number in range(24):
        kind, owner = "cat" if number % 2 else "dog", "north" if number < 12 else "south"
        save(tmp_path / "owned" / owner / kind / f"{number}.png", number)
        save(tmp_path / "pooled" / kind / f"{number}.PNG", number, mode="RGB" if number == 3 else "L")
    owned = build_federation(Data(dataset=str(tmp_path / "owned")), 0)[1]
    assert (owned.names, owned.classes, owned.shape) == (("north", "south"), ("cat", "dog"), (1, 5, 6))
    assert owned.train[0].x.dtype == torch.uint8
    settings = {"partition": "iid", "clients": 2}
    assert build_federation(Data(dataset=str(tmp_path / "pooled"), **settings), 0)[1].shape == (3, 5, 6)
    save(tmp_path / "pooled" / "cat" / "odd.png", 1, size=(7, 5))
    with pytest.raises(PfedlaError, match=r"odd\.png"):
        build_federation(Data(dataset=str(tmp_path / "pooled")), 0)
    (tmp_path / "pooled" / "cat" / "odd.png").write_bytes(b"no image")
    with pytest.raises(PfedlaError, match=r"odd\.png"):
        build_federation(Data(dataset=str(tmp_path / "pooled")), 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(PfedlaError, match=r"class/image\.png"):
        build_federation(Data(dataset=str(tmp_path / "empty")), 0)


class Items:
    """As a Hugging Face data set: items are dicts, of which some values are no numbers."""

    def __init__(self, items: list) -> None:
        self.items, self.column_names = items, [*items[0]]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> dict:
        return self.items[row]


def test_data_sets_in_python() -> None:
    y = torch.from_numpy(ROWS % 2)
    parts = {"north": slice(0, 30), "east": slice(30, 60), "south": slice(60, 90)}
    tensors = {name: TensorDataset(torch.from_numpy(X)[rows], y[rows]) for name, rows in parts.items()}
    pairs = {name: (X[rows], y[rows].numpy()) for name, rows in parts.items()}
    federation = federation_from(tensors)
    assert (federation.names, federation.shape) == (("east", "north", "south"), (4,))
    assert federation.fingerprint() == federation_from(pairs).fingerprint()
    items = [{"input_ids": [row, 1], "attention_mask": [1, 1], "text": "x", "label": row % 2} for row in range(20)]
    hugging = federation_from({"a": Items(items), "b": items})
    assert hugging.shape == {"input_ids": (2,), "attention_mask": (2,)}
    assert hugging.vocabulary == 20
    ready = federation_from({"a": (X[:20], NAMES[:20])}, {"a": (X[20:30], NAMES[20:30])})
    assert (len(ready.train[0].y), len(ready.test[0].y)) == (20, 10)
    frames = {
        name: pd.DataFrame(X[rows], columns=[*"abcd"]).assign(ill=y[rows].numpy()) for name, rows in parts.items()
    }
    framed = federation_from(frames, label="ill")
    assert (framed.names, framed.columns[3].name, framed.scaling is None) == (federation.names, "d", False)
    multi = federation_from({"a": TensorDataset(torch.ones(20, 3), (torch.rand(20, 2) > 0.5).float())})
    assert multi.task == "multilabel"


@pytest.mark.parametrize(
    ("clients", "named"),
    [
        ({}, "dict"),
        ({"a": 3}, "client a"),
        ({"a": [(np.zeros(2), 0), (np.zeros(3), 1)]}, "client a, item 1"),
        ({"a": [{"x": 1}]}, "client a, item 0"),
        ({"a": [{"text": "x", "label": 1}]}, "client a, item 0"),
        ({"a": [7]}, "client a, item 0"),
        ({"a": []}, "client a"),
        ({"a": (X, NAMES), "b": (X[:, :2], NAMES)}, "client b"),
        ({"a": (X, NAMES), "b": pd.DataFrame(X)}, "client b"),
    ],
)
def test_wrong_data_sets_are_refused(clients: dict, named: str) -> None:
    with pytest.raises(PfedlaError, match=named):
        federation_from(clients)


def test_frames() -> None:
    frame = pd.DataFrame(X, columns=[*"abcd"]).assign(kind=NAMES, owner=OWNERS)
    by_name = federation_of(frame, "kind", "owner")
    assert (by_name.shape, by_name.names, by_name.classes) == ((4,), ("0", "1", "2"), ("a", "b", "c"))
    by_array = federation_of(frame[[*"abcd"]], frame["kind"], frame["owner"])
    assert by_array.fingerprint() == by_name.fingerprint()
    assert (
        federation_of(frame[[*"abcd"]], frame["kind"], partition="iid", clients=2, standardise="none").scaling is None
    )
