"""`pfedla data`, and how a split is named wherever its results are."""

import json
from pathlib import Path

import numpy as np
import pytest

from pfedla.data.datasets import KNOWN

FAST = ("--rounds", 1, "--local-epochs", 1, "--clients", 4)


def test_list(pfedla, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    code, out, _ = pfedla("data", "list")
    assert code == 0
    assert all(name in out for name in KNOWN)
    assert str(tmp_path) in out
    assert "no (170 MB)" in out
    listed = json.loads(pfedla("data", "list", "--json")[1])
    assert listed["data_directory"] == str(tmp_path)
    assert listed["datasets"]["digits"]["here"] is True
    assert listed["datasets"]["cifar10"] == {"here": False, "where": ""}


@pytest.mark.parametrize("partition", ["classes", "dominant", "dirichlet", "shards", "iid", "twins", "chain", "toy"])
def test_show(pfedla, tmp_path: Path, partition: str) -> None:
    code, out, err = pfedla("data", "show", "--partition", partition)
    assert code == 0, err
    assert "mean distance between two clients" in out
    picture = tmp_path / f"federation-digits-{partition}-s0.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(pfedla("data", "show", "--partition", partition, "--json")[1])
    clients = {"twins": 8, "chain": 8, "toy": 6}.get(partition, 10)
    assert content["data"]["clients"] == len(content["train"]) == clients
    assert len(content["classes"]) == (9 if partition == "toy" else 10)
    assert content["leaked_test_share"] == 0


def test_show_prints_the_classes_of_each_client(pfedla) -> None:
    code, out, err = pfedla("data", "show", "--partition", "chain", "--samples", 40, "--out", "pictures/chain.svg")
    assert code == 0, err
    assert "0: 10, 7: 10, 8: 10, 9: 10" in out
    assert Path("pictures/chain.svg").exists()
    code, _, err = pfedla("data", "show", "--out", "picture.bmp")
    assert (code, "--out" in err) == (2, True)


def test_show_takes_a_run_and_many_clients(pfedla) -> None:
    pfedla("run", *FAST, "--partition", "shards", "--set", "data.shards_per_client=1", "--out", "r", "-q")
    shown = json.loads(pfedla("data", "show", "r", "--json")[1])
    kept = json.loads(Path("r/federation.json").read_text())
    assert shown["train"] == kept["train"]
    assert shown["statistics"] == kept["statistics"]
    assert kept["statistics"]["classes_per_client"]["max"] <= 4
    np.savez("many.npz", x=np.zeros((9000, 2)), y=np.arange(9000) % 30)
    code, out, err = pfedla("data", "show", "-d", "many.npz", "--clients", 60)  # a heat map, a table cut short
    assert code == 0, err
    assert "and 20 more clients" in out


def test_names_are_shown_as_they_are(pfedla) -> None:
    """Dollar signs are mathematics to matplotlib; long names are cut with a mark."""
    y = np.array(["$\\foo$", "a very long name of a very rare thing"])[np.arange(80) % 2]
    np.savez("$^$.npz", x=np.zeros((80, 2)), y=y, client=np.array(["$^$", "b"])[np.arange(80) // 40])
    code, out, err = pfedla("data", "show", "-d", "$^$.npz")
    assert code == 0, err
    assert "a very long…re thing: 20" in out
    code, _, err = pfedla("run", "-d", "$^$.npz", "--rounds", 1, "-q")
    assert code == 0, err


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--set data.beta=0.1", "beta"),
        ("--set data.classes_limit=1", "data.classes_limit"),
        ("--partition toy --clients 7", "clients"),
        ("--partition direchlet", "data.partition"),
        ("-d own.npz --set data.overlapping=true", "overlapping"),
        ("-d cifar10", "`pfedla data fetch cifar10`"),
    ],
)
def test_refusals(pfedla, monkeypatch, tmp_path: Path, words: str, key: str) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    np.savez("own.npz", x=np.zeros((40, 2)), y=np.arange(40) % 2, client=np.arange(40) // 20)
    for command in (("data", "show"), ("run", "--rounds", "1")):
        code, _, err = pfedla(*command, *words.split())
        assert code == 2
        assert key in err


def test_the_first_classes_alone(pfedla) -> None:
    code, _, err = pfedla("run", *FAST, "--set", "data.classes_limit=5", "--out", "r", "-q")
    assert code == 0, err
    assert len(json.loads(Path("r/federation.json").read_text())["classes"]) == 5
    evaluated = json.loads(pfedla("evaluate", "r", "--client", 0, "--json")[1])
    assert evaluated["accuracy"] == json.loads(Path("r/result.json").read_text())["accuracy"]["per_client"][0]


def test_an_overlapping_split_is_named_in_every_result(pfedla, tmp_path: Path) -> None:
    leak = ("--samples", 150, "--set", "data.overlapping=true")
    code, out, err = pfedla("run", "-a", "fedavg", *FAST, *leak)
    assert code == 0, err
    assert "overlapping" in out
    run = tmp_path / "runs" / "fedavg-digits-classes-overlapping-s0"
    result = json.loads((run / "result.json").read_text())
    assert result["overlapping"] is True
    assert 0 < result["leaked_test_share"] < 1
    code, out, _ = pfedla("compare", "-a", "local,fedavg", *FAST, *leak)
    assert "overlapping" in out.lower()
    folder = tmp_path / "runs" / "compare-digits-classes-overlapping"
    assert "overlapping" in (folder / "comparison.md").read_text().lower()
    assert "overlapping" in pfedla("evaluate", run, "--client", 0)[1].lower()
    code, out, _ = pfedla("data", "show", "--clients", 4, *leak)
    assert "overlapping" in out.lower()
    assert (tmp_path / "federation-digits-classes-overlapping-s0.png").exists()
    honest = json.loads(pfedla("run", *FAST, "--json")[1])
    assert (honest["overlapping"], honest["leaked_test_share"]) == (False, 0.0)
