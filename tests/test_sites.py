"""Data of real sites: the real files where they are, official and prepared forms, damage, missing values."""

import io
import json
import lzma
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flower_grid import LoopbackGrid, check, deploy, run_server
from official import SITES, brca_table, heart_rows, heart_table, npz_of, sentiment_text, table, watch_arrays, write

from pfedla.core.errors import PfedlaError
from pfedla.data import sites
from pfedla.data.datasets import KNOWN, data_directory, load
from pfedla.data.federation import build_federation
from pfedla.data.partition import Data

METRICS = {"heart-disease": "auroc", "tcga-brca": "c_index", "watch": "balanced_accuracy", "sentiment": "accuracy"}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty data directory; the folder of the prepared files in it."""
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "sites"


def count_strata(dataset: Any) -> list[list[int]]:
    """Return how many examples of each class each client has."""
    parts = [dataset.strata[dataset.client == client] for client in range(len(dataset.client_names))]
    return [np.bincount(part, minlength=len(dataset.classes)).tolist() for part in parts]


# The real files


def test_four_hospitals(real) -> None:
    real("heart-disease")
    dataset = load("heart-disease")
    assert dataset.client_names == ("cleveland", "hungary", "switzerland", "va-long-beach")
    assert count_strata(dataset) == [[164, 139], [163, 98], [1, 45], [29, 101]]
    assert (dataset.x.shape, np.isfinite(dataset.x).all(), len(dataset.columns)) == ((740, 15), True, 10)
    assert dataset.warnings[0].startswith("heart-disease: 180 of 920 rows")
    everybody = load("heart-disease", "impute")
    assert count_strata(everybody) == [[164, 139], [188, 106], [8, 115], [51, 149]]
    assert (everybody.x.shape, len(everybody.columns), everybody.warnings) == ((920, 22), 13, ())
    data, federation = build_federation(Data(dataset="heart-disease", missing="impute"), 0)
    assert all(part.x.isfinite().all() for part in (*federation.train, *federation.test))
    assert (data.missing, data.standardise, data.partition) == ("impute", "site", "client")


def test_six_regions(real) -> None:
    real("tcga-brca")
    dataset = load("tcga-brca")
    assert dataset.client_names == tuple(f"region {number}" for number in range(6))
    assert count_strata(dataset) == [[252, 59], [157, 39], [184, 22], [143, 19], [153, 9], [48, 3]]
    assert (dataset.x.shape, dataset.task, dataset.targets) == ((1088, 39), "survival", ("risk",))
    folds = [(int((~dataset.test[rows]).sum()), int(dataset.test[rows].sum())) for rows in owned(dataset)]
    assert folds == [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
    assert (dataset.x[0, 0], dataset.y[0].tolist()) == (90, [538, 0])  # age; days, event
    federation = build_federation(Data(dataset="tcga-brca"), 3)[1]
    assert [len(part.y) for part in federation.test] == [test for _, test in folds]


def owned(dataset: Any) -> list[np.ndarray]:
    return [np.flatnonzero(dataset.client == client) for client in range(len(dataset.client_names))]


def test_ten_wearers(real) -> None:
    real("watch")
    dataset = load("watch")
    assert dataset.client_names == tuple(f"wearer {number}" for number in range(1, 11))
    assert (dataset.x.shape, len(dataset.classes), int(dataset.test.sum())) == ((4458, 30), 7, 1255)
    assert np.bincount(dataset.y).tolist() == [469, 739, 750, 688, 692, 550, 570]
    assert np.bincount(dataset.client).tolist() == [539, 521, 283, 272, 468, 455, 503, 461, 461, 495]


def test_four_domains(real) -> None:
    real("sentiment")
    dataset = load("sentiment")
    assert (dataset.client_names, dataset.classes) == (
        ("amazon", "editorials", "film", "tweets"),
        ("negative", "positive"),
    )
    assert count_strata(dataset) == [[1233, 1744], [1756, 1175], [5075, 4995], [1087, 2345]]
    assert (dataset.x.shape, dataset.x.dtype) == ((19410, 1024), np.float32)
    norms = np.linalg.norm(dataset.x, axis=1)
    assert ((abs(norms - 1) < 1e-5) | (norms == 0)).all()  # a text may be a single sign


SLOW = ("watch", "sentiment")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in METRICS])
def test_a_run_needs_no_further_option(pfedla, real, name: str) -> None:
    real(name)
    code, out, err = pfedla("run", "-d", name, "-a", "pfedla", "--rounds", 2, "--local-epochs", 1, "--out", "r")
    assert code == 0, err
    result = json.loads(Path("r/result.json").read_text())
    assert (result["task"]["metric"], result["partition"]) == (METRICS[name], "client")
    assert result["loss"] is not None
    undefined = [client for client, score in enumerate(result["score"]["per_client"]) if score is None]
    assert undefined == ([2] if name == "heart-disease" else [])  # Switzerland has one healthy patient
    assert ("No AUROC for 1 of 4 clients" in out) == bool(undefined)
    client = load(name).client_names[0]
    for command in (("evaluate", "r", "--client", client), ("export", "r", "--client", client), ("data", "show", "r")):
        code, _, err = pfedla(*command)
        assert code == 0, err
    assert pfedla("run", "r", "--resume", "--rounds", 3, "-q")[0] == 0


def test_a_comparison_says_who_has_no_score(pfedla, real) -> None:
    real("heart-disease")
    few = ("--rounds", 1, "--local-epochs", 1, "--out", "c")
    code, out, err = pfedla("compare", "-a", "local,fedavg", "-d", "heart-disease", *few)
    assert (code, "No AUROC for 1 of 4 clients" in out.replace("\n", " ")) == (0, True), err
    assert "1 of 4 clients" in Path("c/comparison.md").read_text()
    code, _, err = pfedla("report", "c")
    assert code == 0, err


# Made-up values in the published numbers


@pytest.mark.parametrize(("name", "prepared"), [("heart-disease", heart_table), ("tcga-brca", brca_table)])
def test_official_files_and_the_prepared_one_hold_the_same(directory: Path, name: str, prepared) -> None:
    write(KNOWN[name].source.home, SITES[name]())
    official = load(name)
    for path in KNOWN[name].source.home.rglob("*.*"):
        path.unlink()
    write(directory, {f"{name}.csv": prepared()})
    again = load(name)
    assert (official.client_names, official.columns) == (again.client_names, again.columns)
    for key in ("x", "y", "client", "test"):
        np.testing.assert_array_equal(getattr(official, key), getattr(again, key))
    fingerprints = {build_federation(Data(dataset=name), 1, one)[1].fingerprint() for one in (official, again)}
    assert len(fingerprints) == 1  # a site may have the one form and the server the other


def test_hearts_are_encoded_one_by_one(directory: Path) -> None:
    write(KNOWN["heart-disease"].source.home, SITES["heart-disease"]())
    rows = [row for rows in heart_rows().values() for row in rows]
    complete = [row for row in rows if row[3] != "?"]
    dataset, everybody = load("heart-disease"), load("heart-disease", "impute")
    assert (len(dataset.y), len(everybody.y)) == (len(complete), 920)
    names = [*sites.ATTRIBUTES]
    first, codes = dict(zip(names, complete[0], strict=False)), {"cp": (1, 2, 3, 4), "restecg": (0, 1, 2)}
    expected = [
        [first[name] == code for code in codes[name]] if name in codes else [first[name]] for name in names[:10]
    ]
    assert dataset.x[0].tolist() == pytest.approx([float(value) for part in expected for value in part])
    assert dataset.y.tolist() == [int(row[-1] > 0) for row in complete]
    assert np.isnan(everybody.x[0]).tolist() == [place == 6 for place in range(22)]  # trestbps, behind four of cp


def test_an_attribute_that_a_whole_site_lacks_is_filled_in(directory: Path) -> None:
    rows = heart_rows()
    for row in rows["switzerland"]:
        row[11] = row[12] = "?"  # ca and thal
    files = KNOWN["heart-disease"].source.files
    write(KNOWN["heart-disease"].source.home, dict(zip(files, map(table, rows.values()), strict=True)))
    for standardise in ("site", "shared", "none"):
        how = Data(dataset="heart-disease", missing="impute", standardise=standardise)
        federation = build_federation(how, 0)[1]
        assert all(part.x.isfinite().all() for part in (*federation.train, *federation.test))
    assert (build_federation(Data(dataset="heart-disease", missing="impute"), 0)[1].train[2].x[:, 18] == 0).all()
    assert len(load("heart-disease", "drop").y) == len(load("heart-disease").y)  # they are not among the ten


def test_windows_do_not_cross_a_recordings_border(directory: Path) -> None:
    """The samples count up: of each window, least and greatest say where it begins and ends."""
    write(directory, {"watch.npz": npz_of(watch_arrays())})
    dataset = load("watch")
    describe = dataset.x.reshape(-1, 6, 5)[:, 1]
    starts = [0, 50, 100, 150, 200]  # of training windows that end before sample 315
    assert describe[:, 2][~dataset.test].reshape(140, -1).tolist() == [starts] * 140
    assert describe[:, 2][dataset.test].tolist() == [315] * 140  # the next would end at 465
    assert (describe[:, 3] - describe[:, 2] == 99).all()
    assert (describe[:, 4] == 1).all()
    np.testing.assert_allclose(
        describe[:, :2], np.stack([describe[:, 2] + 49.5, np.full(len(dataset.y), 28.866)], 1), 1e-4
    )
    assert (dataset.x[:, 2] // 1000 == dataset.y).all()
    assert np.bincount(dataset.client).tolist() == [14 * 6] * 10


def test_texts_are_kept_once_and_only_with_a_clear_rating(directory: Path) -> None:
    write(directory, SITES["sentiment"]())
    dataset = load("sentiment")
    for counts, total in zip(count_strata(dataset), (3_708, 5_190, 10_605, 4_200), strict=True):
        assert counts == [total // 3 - 1, total // 3]  # the fourth text repeats the first, which is negative


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (b"oldpeak", b"newpeak", "newpeak|oldpeak"),
        (b"site,age,sex", b"site,sex,age", "another order"),
        (b"\nhungary,", b"\nbudapest,", "budapest"),
        (b"\ncleveland,", b"\ncleveland,0,", "row 1 has 16 values"),
        (b"\ncleveland,", b"\ncleveland,9", "column age"),
        (b"\ncleveland,", b"\ncleveland,x", "column age"),
        (b"\ncleveland,", b"\ncleveland,nan ", "column age"),
        (b",1\n", b",2\n", "column disease"),
        (b",1\n", b",\n", "no label"),
        (b"site", b"\xff", "damaged"),
    ],
)
def test_damaged_tables_of_hospitals_are_named(directory: Path, old: bytes, new: bytes, named: str) -> None:
    content = heart_table()
    assert old in content
    write(directory, {"heart-disease.csv": content.replace(old, new, 1)})
    with pytest.raises(PfedlaError, match=rf"(?s)sites/heart-disease\.csv.*({named})"):
        load("heart-disease")


def test_damaged_official_files_are_named(directory: Path) -> None:
    files, home = SITES["heart-disease"](), KNOWN["heart-disease"].source.home
    for content in (b"", b"<html></html>", files["processed.va.data"][:-60], files["processed.cleveland.data"]):
        write(home, files | {"processed.va.data": content})
        with pytest.raises(PfedlaError, match=r"processed\.va\.data"):
            load("heart-disease")


@pytest.mark.parametrize(
    ("position", "old", "new"),
    [
        (0, b"pid,", b"id,"),
        (0, b",E,T", b",T,E"),
        (0, b".0\n", b".0.0\n"),
        (0, b",0.0,", b",2.0,"),
        (0, b",0.0,", b",,"),
        (1, b"train_0", b"train_1"),
        (1, b"train_0", b"train_9"),
        (1, b"\nP-0", b"\nP-9"),
    ],
)
def test_damaged_files_of_regions_are_named(directory: Path, position: int, old: bytes, new: bytes) -> None:
    files = SITES["tcga-brca"]()
    name = list(files)[position]
    assert old in files[name]
    write(KNOWN["tcga-brca"].source.home, files | {name: files[name].replace(old, new, 1)})
    with pytest.raises(PfedlaError, match=name):
        load("tcga-brca")
    write(directory, {"tcga-brca.csv": brca_table().replace(b"train", b"valid", 1)})
    (KNOWN["tcga-brca"].source.home / name).unlink()
    with pytest.raises(PfedlaError, match=r"tcga-brca\.csv"):
        load("tcga-brca")


def change(**arrays: Any) -> bytes:
    found = {**watch_arrays(), **arrays}
    return npz_of({key: value for key, value in found.items() if value is not None})


def bomb() -> bytes:
    """Return a file whose samples are zeros that unpack to more than is read."""
    buffer = io.BytesIO(change(samples=None))
    with zipfile.ZipFile(buffer, "a", zipfile.ZIP_DEFLATED) as archive:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**22, 6)})
        archive.writestr("samples.npy", header.getvalue() + bytes(2**22 * 24))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: change(side=None), "no array side"),
        (lambda: change(samples=np.zeros((63_000, 6), int)), "samples is int64"),
        (lambda: change(samples=np.zeros((63_000, 5))), "63000, 5"),
        (lambda: change(samples=np.full((63_000, 6), np.nan)), "not finite"),
        (lambda: change(samples=np.zeros((62_999, 6))), "lengths"),
        (lambda: change(length=np.full(140, 450.0)), "length is float64"),
        (lambda: change(length=np.r_[-450, np.full(137, 450), 900, 900]), "lengths"),
        (lambda: change(exercise=np.full(140, 7)), "one recording of each"),
        (lambda: change(subject=np.ones(139, int)), "subject"),
        (lambda: change(samples=np.array([{}], dtype=object)), "never opened"),
        (lambda: change()[:-200], "damaged"),
        (lambda: pickle.dumps(watch_arrays()), "damaged"),
        (bomb, "would unpack"),
    ],
)
def test_damaged_recordings_are_named(directory: Path, make: Callable[[], bytes], named: str) -> None:
    write(directory, {"watch.npz": make()})
    with pytest.raises(PfedlaError, match=rf"watch\.npz.*{named}"):
        load("watch")


def pack(text: str) -> bytes:
    return lzma.compress(text.encode(), preset=0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: pack(sentiment_text())[:-100], "incomplete"),
        (lambda: pack(sentiment_text()) + b"more", "follows its end"),
        (lambda: b"no xz", "damaged"),
        (lambda: lzma.compress(bytes(2**24 + 1), preset=0), "more than"),
        (lambda: pack(sentiment_text().replace("valence", "score", 1)), "columns"),
        (lambda: pack(sentiment_text().replace("\ttext 1\n", "\n", 1)), "row 2 has 2 values"),
        (lambda: pack(sentiment_text().replace("\t-2\t", "\t-5\t", 1)), "row 1, column valence"),
        (lambda: pack(sentiment_text().replace("\t-2\t", "\tbad\t", 1)), "row 1, column valence"),
        (lambda: pack(sentiment_text().replace("\t-2\t", "\t\t", 1)), "no valence"),
        (lambda: pack(sentiment_text().replace("\nfilm\t", "\nbook\t", 1)), "book"),
        (lambda: lzma.compress(b"\xff" * 9), "damaged"),
    ],
)
def test_damaged_texts_are_named(directory: Path, make: Callable[[], bytes], named: str) -> None:
    write(directory, {"sentiment.tsv.xz": make()})
    with pytest.raises(PfedlaError, match=rf"sentiment\.tsv\.xz.*{named}"):
        load("sentiment")


# Missing values of own tables


def patients() -> pd.DataFrame:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"site": ["north", "south"] * 40, "age": rng.integers(20, 90, 80), "bp": rng.normal(size=80)})
    frame["ward"], frame["ill"] = rng.choice(["er", "icu"], 80), np.arange(80) // 2 % 2
    frame.loc[[4, 9], "bp"], frame.loc[[9, 12], "ward"] = np.nan, None
    return frame


def test_rows_of_a_table_that_lack_a_value_can_be_left_out(pfedla) -> None:
    patients().to_csv("all.csv", index=False)
    own = ("-d", "all.csv", "--label", "ill", "--client", "site")
    shown = {}
    for missing in ("auto", "impute", "drop"):
        code, out, err = pfedla("data", "show", *own, "--missing", missing, "--json")
        assert code == 0, err
        shown[missing] = np.sum([json.loads(out)["train"], json.loads(out)["test"]], axis=(0, 2)).sum()
    assert shown == {"auto": 80, "impute": 80, "drop": 77}
    assert "3 of 80 rows" in pfedla("data", "show", *own, "--missing", "drop")[1]
    dropped = ("--missing", "drop", "--drop", "bp,ward")  # only columns that are used count
    assert "rows" not in pfedla("data", "show", *own, *dropped)[1]
    assert pfedla("run", *own, "-a", "fedavg", "--rounds", 1, "--missing", "drop", "--out", "r", "-q")[0] == 0
    new = patients().assign(age=lambda frame: frame["age"] + 0.25)
    new.to_csv("new.csv", index=False)
    evaluate = ("evaluate", "r", "--client", "north", "--data", "new.csv", "--predictions", "p.csv")
    code, _, err = pfedla(*evaluate)
    assert code == 0, err
    assert pd.read_csv("p.csv")["row"].tolist() == [row for row in range(0, 80, 2) if row not in (4, 12)]


def test_a_client_is_never_left_out_in_silence(pfedla) -> None:
    frame = patients()
    frame.loc[frame["site"] == "south", "bp"] = np.nan
    frame.to_csv("all.csv", index=False)
    own = ("-d", "all.csv", "--label", "ill", "--client", "site", "--missing", "drop")
    code, _, err = pfedla("data", "show", *own)
    assert (code, "client south" in err) == (2, True)
    frame.assign(bp=np.nan).to_csv("all.csv", index=False)
    code, _, err = pfedla("data", "show", *own)
    assert (code, "'bp'" in err) == (2, True)


def test_settings_of_own_tables_are_refused_elsewhere(directory: Path, pfedla) -> None:
    write(directory, {"heart-disease.csv": heart_table()})
    np.savez("own.npz", x=np.zeros((40, 2)), y=np.arange(40) % 2)
    for words in (
        "heart-disease --label age",
        "heart-disease --drop age",
        "digits --missing drop",
        "own.npz --missing drop",
    ):
        code, _, err = pfedla("data", "show", "-d", *words.split())
        assert (code, words.split()[1][2:] in err) == (2, True)


# A new site, and sites behind Flower


def test_another_table_in_the_form_of_the_hospitals(directory: Path, pfedla) -> None:
    """Codes are read as whole numbers or, beside a gap, as floats: 2 and 2.0 are one category."""
    write(directory, {"heart-disease.csv": heart_table()})
    code, _, err = pfedla("run", "-d", "heart-disease", "-a", "fedavg", "--rounds", 1, "--out", "r", "-q")
    assert code == 0, err
    rows = [row for row in heart_rows(1)["cleveland"] if row[3] != "?"][:60]
    frame = pd.DataFrame(rows, columns=[*sites.ATTRIBUTES, "disease"]).assign(disease=lambda one: one["disease"] // 3)
    frame.assign(site="cleveland").to_csv("whole.csv", index=False)
    frame.loc[60] = {"age": 50, "disease": 0}
    frame.assign(site="cleveland").to_csv("gap.csv", index=False)
    for name in ("whole", "gap"):
        found = ("evaluate", "r", "--client", "cleveland", "--data", f"{name}.csv", "--predictions", f"{name}-p.csv")
        code, _, err = pfedla(*found)
        assert code == 0, err
    assert Path("whole-p.csv").read_text() == Path("gap-p.csv").read_text()
    code, _, err = pfedla("join", "r", "--data", "whole.csv", "--rounds", 1, "-q")
    assert code == 0, err


@pytest.mark.parametrize("name", ["heart-disease", "tcga-brca", pytest.param("watch", marks=pytest.mark.slow)])
def test_sites_behind_flower(directory: Path, tmp_path: Path, pfedla, name: str) -> None:
    """Also where a client's headline metric is undefined; the run folder knows how raw examples are scaled."""
    files = SITES[name]()
    if name == "heart-disease":
        rows = heart_rows()
        for row in rows["switzerland"]:
            row[-1] = 1
        files = dict(zip(files, map(table, rows.values()), strict=True))
    write(KNOWN[name].source.home, files)
    values = {"data": {"dataset": name}, "rounds": 2, "evaluate_every": 2, "training": {"local_epochs": 1}}
    deployment = deploy(tmp_path / "fed", values)
    grid = LoopbackGrid(deployment)
    said = run_server(grid)
    result = check(deployment)
    undefined = [client for client, score in enumerate(result["score"]["per_client"]) if score is None]
    assert (undefined, result["failures"]) == ([2] if name == "heart-disease" else [], {}), said
    described = [
        json.loads((folder / "federation.json").read_text())
        for folder in (deployment.folder, tmp_path / "fed/simulated/run")
    ]
    assert described[0]["scaling"] == described[1]["scaling"]
    assert described[0]["columns"] == described[1]["columns"]
    code, _, err = pfedla("evaluate", deployment.folder, "--client", 0)
    assert code == 0, err
    assert data_directory() == directory.parent
