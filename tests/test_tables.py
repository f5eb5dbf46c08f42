"""Tables: encoding, missing values, scaling, text; what an unseen site brings."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from pfedla.core.errors import PfedlaError
from pfedla.data.dataset import Column
from pfedla.data.federation import build_federation, federation_of, federation_of_one
from pfedla.data.frames import dataset_of_frame, encode
from pfedla.data.partition import Data
from pfedla.data.scaling import Scaling, describe_columns, parse_columns
from pfedla.data.sources import load_data

UNITS = {"north": 1.0, "east": 88.4, "south": 1.0, "west": 88.4}  # creatinine in mg/dl and in umol/l


def hospitals(rows: int = 40) -> pd.DataFrame:
    rng, site = np.random.default_rng(0), np.repeat([*UNITS], rows)
    ill = rng.random(4 * rows) < 0.5
    frame = pd.DataFrame({"site": site, "creatinine": rng.normal(1 + ill, 0.3) * [UNITS[one] for one in site]})
    frame["age"] = rng.integers(20, 90, 4 * rows)
    frame["ward"] = rng.choice(["A", "B", "C"], 4 * rows)
    frame["smoker"] = rng.random(4 * rows) < 0.3
    frame["disease"] = np.where(ill, "ill", "well")
    frame.loc[3, "creatinine"], frame.loc[5, "ward"] = np.nan, None
    return frame


def write(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path


def section(path: Path, **settings) -> Data:
    return Data(dataset=str(path), label="disease", client="site", **settings)


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".parquet"])
def test_a_table_of_four_sites(tmp_path, ending: str) -> None:
    path = write(hospitals(), tmp_path / f"all{ending}")
    data, federation = build_federation(section(path), 0)
    assert (data.standardise, data.partition, data.dataset) == ("site", "client", str(path))
    assert (federation.names, federation.classes) == (("east", "north", "south", "west"), ("ill", "well"))
    assert [(one.name, one.kind, one.categories) for one in federation.columns] == [
        ("creatinine", "number", ()),
        ("age", "number", ()),
        ("ward", "category", ("A", "B", "C")),
        ("smoker", "category", ("False", "True")),
    ]
    assert federation.shape == (7,)
    for train, test in zip(federation.train, federation.test, strict=True):
        assert train.x[:, :2].mean(0).abs().max() < 1e-5
        seen = train.x[:, 0][train.x[:, 0] != 0]  # what was missing is the mean now, and not part of the deviation
        assert all(abs(one.std(correction=0) - 1) < 1e-5 for one in (seen, train.x[:, 1]))
        assert {*train.x[:, 2:].unique().tolist()} == {0.0, 1.0}
        assert torch.cat([train.x, test.x]).isfinite().all()
    assert not federation.warnings
    wards = torch.cat([part.x[:, 2:5].sum(1) for part in (federation.train[1], federation.test[1])])
    assert sorted(wards.tolist())[:2] == [0.0, 1.0]  # the missing ward is all zeros


def test_shared_and_no_standardisation(tmp_path) -> None:
    path = write(hospitals(), tmp_path / "all.csv")
    shared = build_federation(section(path, standardise="shared"), 0)[1]
    assert all(torch.equal(one.scale, shared.scaling[0].scale) for one in shared.scaling)
    pooled = torch.cat([train.x for train in shared.train])
    assert pooled[:, 1].mean().abs() < 1e-5
    assert pooled[:, 0].mean().abs() < 0.05  # the missing one takes the mean of all sites
    assert shared.train[0].x[:, 0].mean() > 0.5  # one scale for two units
    raw = build_federation(section(path, standardise="none"), 0)[1]
    assert all((one.scale == 1).all() and (one.centre == 0).all() for one in raw.scaling)
    assert all(train.x.isfinite().all() for train in raw.train)  # filled in all the same
    assert raw.only([2]).scaling == (raw.scaling[2],)


def test_wild_columns_are_named(tmp_path) -> None:
    frame = hospitals()
    frame["platelets"] = np.linspace(1e5, 4e5, len(frame))
    path = write(frame, tmp_path / "all.csv")
    (warning,) = build_federation(section(path, standardise="none"), 0)[1].warnings
    assert "platelets" in warning
    assert not build_federation(section(path), 0)[1].warnings
    x = np.random.default_rng(0).normal(size=(80, 5))
    assert not federation_of(x, np.arange(80) % 2, np.arange(80) // 40).warnings
    x[:, 3] *= 1e6
    assert "column 3" in federation_of(x, np.arange(80) % 2, np.arange(80) // 40).warnings[0]
    scaled = federation_of(x, np.arange(80) % 2, np.arange(80) // 40, standardise="site")
    assert (scaled.train[0].x.std(0, correction=0) - 1).abs().max() < 1e-4


def test_an_unseen_site_is_encoded_and_scaled_as_the_run(tmp_path) -> None:
    path = write(hospitals(), tmp_path / "all.csv")
    data, run = build_federation(section(path, standardise="shared"), 0)
    new = hospitals(20).query("site == 'west'").assign(ward="D")
    columns = parse_columns(describe_columns(run.columns))
    assert columns == run.columns
    dataset = load_data(data, run.task, write(new, tmp_path / "new.csv"), columns)
    dataset = dataset.match(run.shape, run.classes, pixels=False, whose="the run")
    assert (dataset.x[:, 2:5] == 0).all()  # no such ward in the run
    shared = Scaling.from_lists(run.scaling[0].to_lists())
    one = federation_of_one(dataset, "new", 0, standardise="shared", scaling=shared)
    raw = torch.from_numpy(dataset.x)
    assert {*one.train[0].x[:, 0].tolist()} <= {*shared.apply(raw)[:, 0].tolist()}
    own = federation_of_one(dataset, "new", 0, standardise="site")
    assert own.train[0].x[:, 0].mean().abs() < 1e-5
    with pytest.raises(PfedlaError, match="creatinine"):
        load_data(data, run.task, write(new.drop(columns="creatinine"), tmp_path / "new.csv"), columns)


@pytest.mark.parametrize(
    ("column", "value", "settings", "named"),
    [
        ("age", np.inf, {}, r"all\.csv: row 8 of column 'age'"),
        ("disease", None, {}, r"all\.csv: row 8 .*'disease'"),
        ("site", None, {}, r"all\.csv: row 8 .*'site'"),
        ("test", 2, {}, "'test'"),
        ("age", 30, {"label": "diseas"}, "disease"),
        ("age", 30, {"client": "ward2"}, "ward"),
        ("age", 30, {"drop": "wart"}, "ward"),
        ("age", 30, {"text": "ward"}, "tokenizer"),
        ("age", 30, {"label": "auto"}, "--label"),
        ("age", 30, {"partition": "classes", "label": "age,creatinine"}, "no value in column 'creatinine'"),
    ],
)
def test_wrong_tables_are_refused(tmp_path, column: str, value, settings: dict, named: str) -> None:
    frame = hospitals()
    frame[column] = frame[column].astype(object) if column in frame else 0
    frame.loc[7, column] = value
    path = write(frame, tmp_path / "all.csv")
    with pytest.raises(PfedlaError, match=named):
        build_federation(Data(**{"dataset": str(path), "label": "disease", "client": "site", **settings}), 0)


def test_an_identifier_is_named_and_can_be_dropped(tmp_path) -> None:
    frame = hospitals().assign(patient=lambda frame: [f"p{row}" for row in range(len(frame))])
    path = write(frame, tmp_path / "all.csv")
    with pytest.raises(PfedlaError, match="'patient'"):
        build_federation(section(path), 0)
    assert build_federation(section(path, drop="patient"), 0)[1].shape == (7,)
    path.write_bytes(b"\x00\xff" * 50)
    with pytest.raises(PfedlaError, match=r"all\.csv"):
        build_federation(section(path), 0)


def test_a_test_column_is_the_split(tmp_path) -> None:
    frame = hospitals().assign(test=lambda frame: frame.index % 4 == 0)
    federation = build_federation(section(write(frame, tmp_path / "all.csv")), 0)[1]
    assert [len(test.y) for test in federation.test] == [10] * 4
    assert federation.shape == (7,)


def test_tasks_of_tables(tmp_path) -> None:
    frame = hospitals().drop(columns=["disease", "ward", "smoker"]).dropna()
    frame["days"], frame["event"] = np.arange(len(frame)) + 1.5, np.arange(len(frame)) % 3 == 0
    frame["fever"] = np.arange(len(frame)) % 2
    path = write(frame, tmp_path / "all.csv")
    for task, label, outputs, shape in (
        ("auto", "days", ("days",), ()),
        ("auto", "event,fever", ("event", "fever"), (2,)),
        ("survival", "days,event", ("risk",), (2,)),
        ("auto", "days,age", ("days", "age"), (2,)),
    ):
        federation = build_federation(Data(dataset=str(path), client="site", label=label), 0, task=task)[1]
        assert (federation.outputs, tuple(federation.train[0].y.shape[1:])) == (outputs, shape)
    assert build_federation(Data(dataset=str(path), label="days"), 0)[0].partition == "iid"


def test_text_becomes_ids_and_mask(tmp_path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {"[PAD]": 3, "[UNK]": 0, "good": 1, "bad": 2}
    tokenizer = tokenizers.Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["good", "bad bad bad bad bad", "good film", None] * 10
    frame = pd.DataFrame({"review": texts, "label": [1.0, 0.0, 1.0, 0.0] * 10, "client": ["a", "b"] * 20, "other": 1})
    path = write(frame, tmp_path / "texts.tsv")
    settings = {"text": "review", "tokenizer": str(tmp_path / "tokenizer.json"), "text_length": 4}
    data, federation = build_federation(Data(dataset=str(path), **settings), 0)
    x = federation.train[0].x
    assert (federation.shape, federation.vocabulary) == ({"ids": (4,), "mask": (4,)}, 4)
    assert (x["ids"].dtype, x["mask"].dtype, federation.classes) == (torch.int64, torch.bool, ("0", "1"))
    assert {tuple(row) for row in x["ids"].tolist()} == {(1, 3, 3, 3), (1, 0, 3, 3)}
    assert x["mask"].any(1).all()
    assert federation.scaling is None
    columns = parse_columns(describe_columns(federation.columns))
    assert columns == (Column("review", "text", tokenizer=str(tmp_path / "tokenizer.json"), length=4),)
    assert load_data(data, "classification", path, columns).x["ids"].shape == (40, 4)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PfedlaError, match=r"tokenizer\.json"):
        build_federation(data, 0)


def test_a_missing_category_leaves_the_others_as_they_are() -> None:
    column = Column("ward", "category", ("er", "icu", "ward"))
    x, _ = encode("t", pd.DataFrame({"ward": ["er", None, "ward"]}), [column])
    assert x.tolist() == [[1, 0, 0], [0, 0, 0], [0, 0, 1]]


def test_a_word_among_numbers_is_named() -> None:
    table = pd.DataFrame({"bp": [*map(str, range(30)), "?"], "label": [0, 1] * 15 + [0]})
    with pytest.raises(PfedlaError, match="row 31 of column 'bp'"):
        dataset_of_frame("t", table, Data(), "auto")


@pytest.mark.parametrize(("label", "task"), [("price", "regression"), ("a,b", "multilabel")])
def test_a_run_folder_of_every_task_can_be_used(label: str, task: str, pfedla: Any) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(60, 4)), columns=["u", "v", "w", "price"])
    table["a"], table["b"], table["site"] = table["u"] > 0, table["v"] > 0, ["north", "south"] * 30
    table[["a", "b"]] = table[["a", "b"]].astype(int)
    table.to_csv("t.csv", index=False)
    others = "a,b" if task == "regression" else "price"
    given = ["-d", "t.csv", "--label", label, "--client", "site", "--drop", others, "--task", task, "-q"]
    assert pfedla("run", "-a", "fedavg", *given, "--rounds", 2, "--out", "r")[0] == 0
    for command in (
        ["evaluate", "r", "--client", "south"],
        ["export", "r", "--client", "south"],
        ["data", "show", "r"],
    ):
        code, _, err = pfedla(*command)
        assert code == 0, err
    assert pfedla("run", "r", "--resume", "--rounds", 3, "-q")[0] == 0
