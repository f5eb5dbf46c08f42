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
    assert all(name in out for name in (*KNOWN, str(tmp_path)))
    listed = json.loads(pfedla("data", "list", "--json")[1])
    assert listed["data_directory"] == str(tmp_path)
    assert (listed["datasets"]["digits"]["here"], listed["datasets"]["cifar10"]["here"]) == (True, False)


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["classes", "dominant", "dirichlet", "shards", "iid", "twins", "chain", "toy"])
def test_show(pfedla, tmp_path: Path, partition: str) -> None:
    code, _, err = pfedla("data", "show", "--partition", partition)
    assert code == 0, err
    assert (tmp_path / f"federation-digits-{partition}-s0.png").read_bytes().startswith(b"\x89PNG")
    content = json.loads(pfedla("data", "show", "--partition", partition, "--json")[1])
    clients = {"twins": 8, "chain": 8, "toy": 6}.get(partition, 10)
    assert content["data"]["clients"] == len(content["train"]) == clients
    assert (len(content["classes"]), content["leaked_test_share"]) == (9 if partition == "toy" else 10, 0)


@pytest.mark.slow
def test_show_prints_the_classes_of_each_client_and_takes_a_run(pfedla) -> None:
    code, out, err = pfedla("data", "show", "--partition", "chain", "--samples", 40, "--out", "pictures/chain.svg")
    assert (code, "0: 10, 7: 10, 8: 10, 9: 10" in out) == (0, True), err
    assert Path("pictures/chain.svg").exists()
    code, _, err = pfedla("data", "show", "--out", "picture.bmp")
    assert (code, "--out" in err) == (2, True)
    pfedla("run", *FAST, "--partition", "shards", "--set", "data.shards_per_client=1", "--out", "r", "-q")
    shown = json.loads(pfedla("data", "show", "r", "--json")[1])
    assert shown["train"] == json.loads(Path("r/federation.json").read_text())["train"]
    np.savez("many.npz", x=np.zeros((9000, 2)), y=np.arange(9000) % 30)
    code, out, err = pfedla("data", "show", "-d", "many.npz", "--clients", 60)  # a heat map, a table cut short
    assert (code, "and 20 more clients" in out) == (0, True), err


def test_names_are_shown_as_they_are(pfedla) -> None:
    """Dollar signs are mathematics to matplotlib; long names are cut with a mark."""
    y = np.array(["$\\foo$", "a very long name of a very rare thing"])[np.arange(80) % 2]
    np.savez("$^$.npz", x=np.zeros((80, 2)), y=y, client=np.array(["$^$", "b"])[np.arange(80) // 40])
    code, out, err = pfedla("data", "show", "-d", "$^$.npz")
    assert (code, "a very long…re thing: 20" in out) == (0, True), err


def test_refusals(pfedla, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    np.savez("own.npz", x=np.zeros((40, 2)), y=np.arange(40) % 2, client=np.arange(40) // 20)
    for words, key in (
        ("--set data.beta=0.1", "beta"),
        ("--partition direchlet", "data.partition"),
        ("-d own.npz --set data.overlapping=true", "overlapping"),
        ("-d cifar10", "`pfedla data fetch cifar10`"),
    ):
        for command in (("data", "show"), ("run", "--rounds", "1")):
            code, _, err = pfedla(*command, *words.split())
            assert (code, key in err) == (2, True)


@pytest.mark.slow
def test_an_overlapping_split_is_named_in_every_result(pfedla, tmp_path: Path) -> None:
    leak = ("--samples", 150, "--set", "data.overlapping=true")
    run = tmp_path / "runs" / "fedavg-digits-classes-overlapping-s0"
    for command in (
        ("run", "-a", "fedavg", *FAST, *leak),
        ("compare", "-a", "local,fedavg", *FAST, *leak),
        ("data", "show", "--clients", 4, *leak),
        ("evaluate", run, "--client", 0),
    ):
        code, out, err = pfedla(*command)
        assert (code, "overlapping" in out.lower()) == (0, True), err
    result = json.loads((run / "result.json").read_text())
    assert result["overlapping"] is True
    assert 0 < result["leaked_test_share"] < 1
    comparison = tmp_path / "runs" / "compare-digits-classes-overlapping" / "comparison.md"
    assert "overlapping" in comparison.read_text().lower()
    assert (tmp_path / "federation-digits-classes-overlapping-s0.png").exists()
    honest = json.loads(pfedla("run", *FAST, "--json")[1])
    assert (honest["overlapping"], honest["leaked_test_share"]) == (False, 0.0)


def test_show_takes_tables_and_every_task(pfedla, tmp_path: Path) -> None:
    rows = np.arange(80)
    lines = [f"{'ns'[row % 2]},{row % 7},{1e6 * row},{row + 0.5},{row % 3 == 0}" for row in rows]
    Path("all.csv").write_text("\n".join(["site,a,b,days,event", *lines]))
    for words, counts in (
        ("--label days", [28, 28]),
        ("--label days,event --task survival", [28, 28]),
        ("--label event --set data.standardise=none", [28, 28]),
    ):
        code, out, err = pfedla("data", "show", "-d", "all.csv", "--client", "site", *words.split())
        assert code == 0, err
        assert ("warning: all.csv: column b" in out.replace("\n", " ")) == ("none" in words)
        content = json.loads(pfedla("data", "show", "-d", "all.csv", "--client", "site", *words.split(), "--json")[1])
        assert [sum(train) for train in content["train"]] == counts
    code, _, err = pfedla("data", "show", "-d", "all.csv", "--label", "eventt")
    assert (code, "event" in err) == (2, True)
