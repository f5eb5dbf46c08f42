"""Tables of real sites: each site against training alone, undefined metrics, tuned options of a column."""

from pathlib import Path
from typing import Any

import pytest

from pfedla.core.errors import PfedlaError
from pfedla.reproduction import grid as grids
from pfedla.reproduction.grid import Wanted, list_cells, load_grid
from pfedla.reproduction.paper_results import list_tables, write_figures, write_tables
from pfedla.reproduction.site_results import collect_sites, draw_sites, known_columns, tabulate_metrics, tabulate_sites

SITES, SEEDS = ["north", "south", "island"], range(8)
TASK = {"name": "classification", "metric": "auroc", "higher_is_better": True, "percent": False}
GAINS = {"Local": (0.0, 0.0), "FedAvg": (0.1, -0.1), "pFedLA": (0.0, 0.0)}  # at the first two sites


def make_cell(row: str, seed: int) -> dict[str, Any]:
    noise = [0.01 * ((seed * (site + 3)) % 5 - 2) for site in range(2)]  # the same for all rows of a seed
    wobble = 0.001 * ((seed * 7 + len(row)) % 3 - 1)  # what is left of a difference
    auroc = [0.7 + noise[site] + GAINS[row][site] + wobble * (row != "Local") for site in range(2)] + [None]
    accuracy = [0.8, 0.9, 1.0]
    alpha = [[[[0.5, 0.3, 0.2], [0.2, 0.6, 0.2], [0.0, 0.0, 1.0]]] * 2]
    values = [[[one[receiver] for one in alpha[0]] for receiver in range(3)]]
    return {
        "row": row,
        "column": "Hospitals",
        "seed": seed,
        "task": TASK,
        "score": {"per_client": auroc, "mean": sum(auroc[:2]) / 2},
        "metrics": {"auroc": {"per_client": auroc}, "accuracy": {"per_client": accuracy}},
        "baseline": {"name": "majority class", "metrics": {"auroc": {"mean": 0.5}, "accuracy": {"mean": 0.75}}},
        "clients": SITES,
        "test_examples": [60, 40, 5],
        "traffic": {"down_bytes": 0, "up_bytes": 0},
        "rounds": 3,
        "seconds": 1.0,
        "tuned_trials": 10,
        "experiment": {"data": {"dataset": "hospitals"}, "model": "mlp", "training": {"local_epochs": 2, "lr": 0.1}},
        "alpha": {"layers": ["fc1", "fc2"], "rounds": [3], "values": values, "classes": []}
        if row == "pFedLA"
        else None,
    }


@pytest.fixture
def summary() -> dict[str, Any]:
    rows = ["Local", "FedAvg", "FedAvg + fine-tuning", "FedRep", "pFedLA", "pFedLA held-out"]
    cells = [make_cell(row, seed) for row in GAINS for seed in SEEDS]
    names = {"form": "sites", "title": "sites", "columns": ["Hospitals", "Nowhere"], "rows": rows, "layers": {}}
    return {**names, "cells": cells}


def test_each_site_is_compared_with_training_alone(summary: dict[str, Any]) -> None:
    rows = known_columns(summary)["Hospitals"]
    north, south, island = collect_sites(rows)
    metric = rows["Local"].metric
    assert north.decide(metric) == "gain: FedAvg"
    assert south.decide(metric) == "loss: FedAvg"
    assert island.decide(metric) == "undefined"
    assert north.differences["FedAvg"].mean == pytest.approx(0.1, abs=0.001)
    assert not north.differences["pFedLA"].is_significant
    head, *lines = tabulate_sites(rows)
    assert head[:5] == ["site", "test examples", "Local: AUROC", "FedAvg", "pFedLA"]
    assert lines[0][3].startswith("**+0.1")
    assert lines[2] == ["island", "5", "undefined", "–", "–", "undefined"]


def test_all_metrics_stand_beside_the_constant_answer(summary: dict[str, Any]) -> None:
    head, *lines = tabulate_metrics(known_columns(summary)["Hospitals"])
    found = {name: dict(zip(head[1:], cells, strict=True)) for name, *cells in lines}
    assert list(found) == ["Local", "FedAvg", "pFedLA", "majority class"]
    assert found["majority class"] == {"AUROC": "0.500", "accuracy %": "75.0"}
    assert found["FedAvg"]["accuracy %"].strip("*") == "90.0 ± 0.0"


def test_a_method_has_one_colour_in_every_panel(summary: dict[str, Any]) -> None:
    other = [{**cell, "column": "Nowhere"} for cell in summary["cells"] if cell["row"] != "FedAvg"]
    figure = draw_sites({**summary, "cells": summary["cells"] + other})
    drawn = [{c.get_label(): c[0].get_color() for c in axis.containers} for axis in figure.axes]
    assert [set(one) for one in drawn] == [{"Local", "FedAvg", "pFedLA"}, {"Local", "pFedLA"}]
    assert drawn[0].items() >= drawn[1].items()


def test_files_of_a_table_of_sites(summary: dict[str, Any], tmp_path: Path) -> None:
    paths = [*write_tables(summary, {}, tmp_path), *write_figures(summary, {}, tmp_path)]
    assert {path.name for path in paths} >= {"table.md", "table.csv", "table.tex", "figure.png", "borrowing.svg"}
    assert all(path.stat().st_size for path in paths)
    assert "tuned, 10 trials each" in (tmp_path / "table.md").read_text()
    assert [title for _, title, _ in list_tables(summary, {})] == ["Hospitals"]


def test_a_column_takes_tuned_options_of_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grids, "home", lambda: tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "grid.toml").write_text("""
title = "small"
form = "sites"
seeds = [0, 1]
experiment.rounds = 2
columns = [{ name = "digits", tuned = "s{seed}.toml", experiment.data = { dataset = "digits" } }]
rows = [
    { name = "Local", experiment.algorithm.name = "local" },
    { name = "FedRep", experiment.algorithm.name = "fedrep" },
]
""")
    for seed in (0, 1):
        common = f'methods = ["fedrep"]\nseed = {seed}\nrounds = 2\n'
        common += '[data]\ndataset = "digits"\n[training]\nlocal_epochs = 5\nbatch_size = 32\n'
        text = f"{common}[fedrep]\nhead_epochs = {seed + 1}\ntuned_trials = 7\n[fedrep.training]\nlr = 0.{seed + 1}\n"
        (tmp_path / "small" / f"s{seed}.toml").write_text(text)
    for cell in list_cells(load_grid("small"), Wanted()):
        one, seed = cell.experiment, cell.experiment.seed
        if cell.row == "FedRep":
            assert (one.algorithm.options, one.training.lr) == ({"head_epochs": seed + 1}, (seed + 1) / 10)
        assert one.tuned_trials == (7 if cell.row == "FedRep" else 0)
    with pytest.raises(PfedlaError, match="missing"):
        list_cells(load_grid("small"), Wanted(seeds=[2]))
    (tmp_path / "small" / "s3.toml").write_text((tmp_path / "small" / "s1.toml").read_text())
    with pytest.raises(PfedlaError, match="seed = 1"):
        list_cells(load_grid("small"), Wanted(seeds=[3]))
