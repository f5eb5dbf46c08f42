"""Grids, tables and figures of the paper, committed results."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfedla import algorithms
from pfedla.core.errors import PfedlaError
from pfedla.report.reading import read_result
from pfedla.report.rows import Row
from pfedla.reproduction import campaign, paper_results, summaries
from pfedla.reproduction.campaign import Table
from pfedla.reproduction.frontier import draw_frontier, tabulate_frontier
from pfedla.reproduction.grid import Cell, Grid, Wanted, list_cells, list_names, load_grid, load_paper
from pfedla.reproduction.paper_figures import Weights, average_by_distance, collect_weights, draw_self_weights
from pfedla.reproduction.paper_results import account, write_figures
from pfedla.runs.progress import Display

ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "tests" / "fixtures" / "format1"
NOWHERE = Path("no-runs-here")


# Grids


@pytest.mark.parametrize("name", list_names())
def test_every_cell_is_a_valid_experiment(name: str) -> None:
    grid = load_grid(name)
    for wanted in (Wanted(), Wanted(paper_budget=True)):
        found = list_cells(grid, wanted)
        assert len({cell.folder for cell in found}) == len(found)
        for cell in found:
            section = cell.experiment.algorithm
            algorithms.resolve_options(section.name, section.options)
    for column, rows in load_paper(name).items():
        if column in {one.name for one in grid.columns}:
            assert rows.keys() <= {row.name for row in grid.rows}


def test_cells_are_chosen_by_data_set_method_clients_and_seed() -> None:
    grid = load_grid("table1")
    wanted = Wanted(datasets=["emnist"], methods=["pFedLA", "local"], clients=[10], seeds=[3, 4], rounds=7)
    some = [(cell.row, cell.experiment.seed, cell.experiment.rounds) for cell in list_cells(grid, wanted)]
    assert some == [(row, seed, 7) for seed in (3, 4) for row in ("Local", "pFedLA")]
    assert {cell.experiment.rounds for cell in list_cells(grid, Wanted(paper_budget=True))} == {600}
    wrong = {
        "emnist": Wanted(datasets=["emnits"]),
        "method": Wanted(methods=["fedsgd"]),
        "choose one of: 10": Wanted(clients=[50]),
    }
    for key, one in wrong.items():
        with pytest.raises(PfedlaError, match=key):
            list_cells(grid, one)


def test_the_accounting_is_the_papers() -> None:
    lines = account(load_grid("table3"), load_paper("table3"))[1:]
    assert len(lines) == 7
    assert all(abs(float(line[-1])) <= 0.02 + 1e-9 for line in lines)  # MiB as printed


# Stored cells are recognised


@pytest.fixture
def format1(tmp_path: Path) -> Path:
    """Return a copy of the summaries of format 1."""
    return Path(shutil.copytree(FIXTURES / "results", tmp_path / "results"))


def grid_of(folder: Path) -> Grid:
    """Return the grid that the summaries of format 1 were made for."""
    return Grid.model_validate(tomllib.loads((folder / "grid.toml").read_text()))


@pytest.mark.parametrize(("name", "count"), [("table1", 58), ("table3", 7)])
def test_cells_of_format_1_are_recognised(format1: Path, name: str, count: int) -> None:
    before = json.loads((format1 / name / "results.json").read_text())["cells"]
    shutil.rmtree(format1 / ({"table1", "table3"} - {name}).pop())  # no other table can help
    grid = grid_of(format1 / name)
    summary = summaries.write_summary(NOWHERE, name, grid, Wanted(clients=[10]), format1 / name)
    assert (len(before), len(summary["cells"]), summary["other_cells"]) == (count, count, [])
    assert (summary["format"], summaries.FORMAT) == (4, 4)
    old, new = ([cell.get(key) for cell in some] for key, some in (("accuracy", before), ("score", summary["cells"])))
    assert sorted(map(json.dumps, old)) == sorted(map(json.dumps, new))
    names = {"pFedLA": "pFedLA held-out", "HeurpFedLA": "HeurpFedLA held-out", "pFedLA (paper's rule)": "pFedLA"}
    rows = {(cell["column"], cell["row"], cell["seed"]): cell for cell in summary["cells"]}
    for cell in before if name == "table1" else []:
        now = rows[cell["column"], names.get(cell["row"], cell["row"]), cell["seed"]]
        assert now.get("score") == cell.get("accuracy")
        if "held-out" in now["row"]:
            assert now["experiment"]["algorithm"]["name"] == "pfedla-heldout"


def test_a_new_option_with_a_default_changes_nothing(format1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, wanted = grid_of(format1 / "table1"), Wanted(clients=[10])
    folders = [cell.folder for cell in list_cells(grid, wanted)]
    known = algorithms.resolve_options
    monkeypatch.setattr(algorithms, "resolve_options", lambda *words: {**known(*words), "imaginary": 1.5})
    summary = summaries.write_summary(NOWHERE, "table1", grid, wanted, format1 / "table1")
    assert (len(summary["cells"]), summary["other_cells"]) == (58, [])
    assert [cell.folder for cell in list_cells(grid, wanted)] == folders


def test_no_cell_is_lost_when_the_grid_asks_for_less(format1: Path) -> None:
    folder = format1 / "table1"
    grid = grid_of(folder)
    fewer = grid.model_copy(update={"rows": [row for row in grid.rows if row.name != "Local"]})
    summary = summaries.write_summary(NOWHERE, "table1", fewer, Wanted(), folder)
    lost = {cell["row"] for cell in summary["other_cells"]}
    assert lost == {"Local"}
    assert len(summary["cells"]) + len(summary["other_cells"]) >= 58
    assert "Local" not in paper_results.to_markdown(summary, {})
    assert summaries.write_summary(NOWHERE, "table1", grid, Wanted(rounds=1), folder)["cells"] == []
    again = summaries.write_summary(NOWHERE, "table1", grid, Wanted(clients=[10]), folder)
    assert (len(again["cells"]), again["other_cells"]) == (58, [])


def test_another_setting_is_another_cell(format1: Path) -> None:
    stored = summaries.read_cells(format1 / "table1" / "results.json")
    (cell,) = list_cells(grid_of(format1 / "table1"), Wanted(datasets=["emnist"], methods=["fedrep"], clients=[10]))
    assert summaries.match(cell, stored) is not None
    values = cell.experiment.model_dump()
    for section, key, value in (("training", "lr", 0.5), ("algorithm", "head_epochs", 3), ("faults", "dropout", 0.1)):
        other = cell.experiment.parse({**values, section: {**values[section], key: value}})
        assert summaries.match(Cell(cell.row, cell.column, other), stored) is None


# Tables by hand


def summary_of(accuracies: dict[tuple[str, str, int], float | None], **more: Any) -> dict[str, Any]:
    made = []
    for (column, row, seed), mean in accuracies.items():
        cell: dict[str, Any] = {"column": column, "row": row, "seed": seed}
        if mean is None:
            cell["reason"] = "it does not work"
        else:
            data = {"dataset": "digits", "samples_per_client": 100}
            cell |= {
                "score": {"mean": mean, "per_client": [mean, mean]},
                "score_after_training": {"mean": mean / 2, "per_client": [mean, 0.0]},
                "traffic": {"down_bytes": 2**20, "up_bytes": 2**21},
                "experiment": {"training": {"local_epochs": 1, "lr": 0.1}, "participation": 1.0, "data": data},
                "rounds": 2,
                "seconds": 60.0,
                "curve": [[1, mean], [2, mean]],
            }
        made.append(cell)
    columns, rows = (list(dict.fromkeys(place[axis] for place in accuracies)) for axis in (0, 1))
    return {"title": "t", "form": "table", "columns": columns, "rows": rows, "cells": made, **more}


def test_a_table_shows_seeds_the_papers_number_and_what_was_not_run() -> None:
    values = {("A", "x_1", 0): 0.5, ("A", "x_1", 1): 0.6, ("A", "y", 0): 0.54, ("B", "x_1", 0): None}
    summary = summary_of(values)
    paper = {"A": {"x_1": {"mean": 55.5, "std": 0.25}}}
    assert paper_results.tabulate(summary, paper) == [
        ["", "A", "paper", "B"],
        ["x_1", "55.00 ± 5.00 (2)", "55.50 ± 0.25", "–"],
        ["y", "54.00", "–", "not run"],
    ]
    assert [line[1] for line in paper_results.tabulate_after_training(summary, paper)] == [
        "A",
        "27.50 ± 2.50 (2)",
        "27.00",
    ]
    assert paper_results.tabulate_differences(summary) == [["", "A"], ["x_1", "first"], ["y", "+4.00 (1)"]]
    latex = paper_results.to_latex(summary, paper)
    assert r"x\_1 & 55.00 $\pm$ 5.00 (2) & 55.50 $\pm$ 0.25 & -- \\" in latex
    lines = paper_results.to_csv(summary, paper).splitlines()
    found = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    shown = [found[0][key] for key in ("seeds", "mean", "se", "worst", "mib", "paper_std")]
    assert shown == ["2", "55.0", "5.0", "55.0", "3.0", "0.25"]
    assert (found[1]["difference_to_first"], found[1]["paired_seeds"], found[1]["p"]) == ("4.0", "1", "")
    assert (found[2]["seeds"], found[2]["mean"], found[2]["reason"]) == ("0", "", "it does not work")


def test_a_supported_difference_is_bold_beside_the_first() -> None:
    means = {"Local": (0.5, 0.6, 0.7), "FedAvg": (0.4, 0.51, 0.59), "ours": (0.51, 0.6, 0.72)}
    summary = summary_of({("A", row, seed): mean for row, some in means.items() for seed, mean in enumerate(some)})
    first = {line[0]: line[1] for line in paper_results.tabulate(summary, {})[1:]}
    assert (first["ours"], first["Local"]) == ("**61.00 ± 6.08 (3)**", "**60.00 ± 5.77 (3)**")
    assert not first["FedAvg"].startswith("*")
    paired = {line[0]: line[1] for line in paper_results.tabulate_differences(summary)[1:]}
    assert paired["ours"] == "first"
    assert paired["FedAvg"].startswith("**-11.00 [-13.00, -9.00], p 0.0")
    assert paired["Local"] == "-1.00 [-2.00, +0.00], p 0.225 (3)"
    clients = {line[0]: line[1] for line in paper_results.tabulate_clients(summary)[1:]}
    assert (clients["ours"], clients["FedAvg"]) == ("61.0 / 61.0 / 67 %", "50.0 / 50.0")


def test_a_codec_is_compared_with_plain_messages_of_its_method() -> None:
    means = {"x": (0.5, 0.7), "x, int8": (0.6, 0.6), "y": (0.2, 0.2), "y, int8": (0.1, 0.1), "y, topk": (None, None)}
    cells = {("A", row, seed): mean for row, some in means.items() for seed, mean in enumerate(some)}
    summary = summary_of(cells, form="frontier")
    for cell in summary["cells"]:
        if cell["row"] == "y, int8":
            cell["traffic"] = {"down_bytes": 2**18, "up_bytes": 2**19}
    found = {line[0]: line[1:] for line in tabulate_frontier(summary)}
    assert found["x"] == ["3.0", "100.0 %", "–"]
    assert found["y, int8"][:2] == ["0.8", "25.0 %"]
    assert found["y, int8"][2].startswith("-10.00")
    assert found["y, topk"] == ["–", "–", "–"]
    (axis,) = draw_frontier(summary, {}).axes
    assert {container.get_label() for container in axis.containers} == {"x", "y"}
    assert tabulate_frontier(summary | {"form": "table"}) == []


def test_a_row_that_gave_up_on_a_seed_is_not_averaged() -> None:
    summary = summary_of({("A", "x", 0): 0.5, ("A", "x", 1): None, ("A", "y", 0): 0.4, ("A", "y", 1): 0.6})
    shown = [line[1] for line in paper_results.tabulate(summary, {})[1:]]
    assert shown == ["gave up on 1 of 2 seeds", "50.00 ± 10.00 (2)"]


def weights_of(values: Any) -> Weights:
    return Weights("panel", [], layers=["conv", "fc"], alpha=values)


def test_weights_by_distance_and_by_period() -> None:
    weights = np.array([[9, 1, 2, 5], [1, 9, 1, 2], [2, 1, 9, 1], [7, 2, 1, 9.0]])
    assert average_by_distance(weights) == [9, 1, 2, 6]
    alpha = np.zeros((2, 4, 2, 4))
    alpha[1, :, 1] = weights
    assert np.array_equal(weights_of(alpha).map("fc"), weights)
    alpha = np.zeros((7, 5, 2, 5))
    for snapshot in range(7):
        alpha[snapshot, 0, 0] = np.array([5, 3, 2, 1, 0]) * snapshot
    whose = weights_of(alpha).by_period()
    assert whose["self"][:, 0].tolist() == [7.5, 17.5, 27.5]
    assert whose["others"][:, 0].tolist() == [0.75, 1.75, 2.75]
    assert weights_of(alpha).own.tolist() == [30, 0]


@pytest.mark.parametrize("form", ["table", "retained", "neighbours", "frontier"])
def test_tables_have_a_figure(form: str, tmp_path: Path) -> None:
    values = {("A", "k = 0", 0): 0.5, ("A", "k = 1", 0): 0.6, ("A", "held-out, k = 1", 0): 0.1, ("A", "k = 1", 1): None}
    paths = write_figures(summary_of(values, form=form), {"A": {"k = 0": {"mean": 50.0}}}, tmp_path)
    assert [path.name for path in paths] == ["figure.png", "figure.pdf", "figure.svg"]


def test_self_weights_are_drawn_by_layer(tmp_path: Path) -> None:
    summary = summary_of({("A", "x", 0): 0.5, ("A", "x", 1): 0.7, ("A", "y", 0): 0.6})
    for seed, cell in enumerate(summary["cells"][:2]):
        values = [[0.1, 0.1], [0.2 + 0.2 * seed, 0.8]]
        cell["self_weights"] = {"layers": ["conv", "fc"], "rounds": [0, 4], "values": values}
    (axis,) = draw_self_weights(summary).axes
    assert axis.get_title() == "A, x"
    conv, fc = axis.get_lines()
    assert (conv.get_label(), conv.get_xdata().tolist()) == ("conv", [0, 4])
    np.testing.assert_allclose([conv.get_ydata(), fc.get_ydata()], [[0.1, 0.3], [0.1, 0.8]])
    names = {path.name for path in write_figures(summary, {}, tmp_path)}
    assert {"figure.png", "self_weights.png", "self_weights.pdf"} <= names


# Runs

GRID = """
title = "small"
form = "heatmap"
experiment = { rounds = 2, training.local_epochs = 1, data = { dataset = "digits", clients = 4 } }
columns = [{ name = "digits", experiment.data.partition = "classes", layer = "fc1" }]
rows = [
    { name = "Local", experiment.algorithm.name = "local" },
    { name = "pFedLA", experiment.algorithm.name = "pfedla" },
    { name = "FedBN", experiment.algorithm.name = "fedbn" },
    { name = "retained", experiment.algorithm = { name = "heurpfedla", retained_layers = 2 } },
]
"""
SMALL = Grid.model_validate(tomllib.loads(GRID))


class Counting(Display):
    def __init__(self) -> None:
        super().__init__(0, quiet=True)
        self.begun: list[str] = []

    def begin(self, name: str, seed: int) -> None:
        self.begun.append(name)


def go_on() -> bool:
    return False


@pytest.mark.slow
def test_only_missing_cells_are_run(tmp_path: Path) -> None:
    runs, out, cells = tmp_path / "runs", tmp_path / "out" / "table1", list_cells(SMALL)
    display, again = Counting(), Counting()
    small = Table("small", SMALL, Wanted(), out)
    campaign.run_queue([(small, cell) for cell in cells[:2]], runs, display, go_on, jobs=1)
    assert display.begun == ["Local, digits", "pFedLA, digits"]
    campaign.run_queue([(small, cell) for cell in cells], runs, again, go_on, jobs=1)
    assert again.begun == ["FedBN, digits", "retained, digits"]
    summaries.write_summary(runs, "small", SMALL, Wanted(methods=["pfedla"]), out)
    summary = summaries.write_summary(runs, "small", SMALL, Wanted(), out)
    assert json.loads((out / "results.json").read_text()) == summary
    _, mixed, refused, retained = summary["cells"]
    result = read_result(runs / cells[1].folder / "result.json")
    assert (mixed["score"], mixed["traffic"]) == (result["score"], result["traffic"])
    assert mixed["metrics"]["auroc"]["per_client"] == result["metrics"]["auroc"]["per_client"]
    assert np.array(mixed["alpha"]["values"]).shape == (3, 4, 4, 4)
    assert "BatchNorm" in refused["reason"]
    assert (paper_results.average_saved_mib(Row("retained", [retained])) or 0) > 0
    assert [one.title for one in collect_weights(summary)] == ["digits, pFedLA", "digits, retained"]
    paths = [*paper_results.write_tables(summary, {}, out), *write_figures(summary, {}, out)]
    assert all(path.stat().st_size for path in paths)
    # Another table beside it takes the numbers that stand there.
    none, beside = Counting(), tmp_path / "out" / "table2"
    other = Table("other", SMALL, Wanted(), beside)
    campaign.run_queue([(other, cell) for cell in cells], tmp_path / "nothing", none, go_on, jobs=1)
    assert none.begun == []
    copied = summaries.write_summary(NOWHERE, "other", SMALL, Wanted(), beside)
    assert copied["cells"] == summary["cells"]
    repeated = summaries.summarise_cell(runs / cells[1].folder, cells[1], SMALL)
    assert summaries.list_differences(mixed, repeated) == []
    older = {**mixed, summaries.AFTER: {"mean": mixed[summaries.AFTER]["mean"]}}  # of format 3
    assert summaries.list_differences(older, repeated) == []
    repeated["curve"][0][1] += 1e-9
    assert summaries.list_differences(mixed, repeated) == ["curve"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# What is committed

COMMITTED = [name for name in list_names() if (ROOT / "results" / name / "results.json").exists()]


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_tables_are_made_of_the_committed_numbers(name: str, tmp_path: Path) -> None:
    folder = ROOT / "results" / name
    summary = summaries.read_summary(folder / "results.json")
    for path in paper_results.write_tables(summary, load_paper(name), tmp_path):
        assert path.read_text(encoding="utf-8") == (folder / path.name).read_text(encoding="utf-8")
    stored = summaries.read_cells(folder / "results.json")
    known = list_cells(load_grid(name), Wanted(seeds=sorted({one.content["seed"] for one in stored})))
    assert all(any(one.is_of(cell) for cell in known) for one in stored)


# The command line


def test_reproduce_lists_and_accounts(pfedla) -> None:
    code, out, _ = pfedla("reproduce")
    assert (code, [name for name in list_names() if name not in out]) == (0, [])
    code, out, _ = pfedla("reproduce", "table3", "--accounting-only")
    assert (code, "693.96" in out) == (0, True)
    for words, key in (
        (["tabel1"], "table1"),
        (["table1", "--accounting-only"], "accounting"),
        (["table1", "-d", "svhn"], "svhn"),
        (["table1", "--clients", "ten"], "--clients"),
        (["table1", "--check"], "results.json"),
    ):
        code, _, err = pfedla("reproduce", *words)
        assert (code, key in err) == (2, True)


@pytest.mark.slow
def test_reproduce_runs_a_figure_and_checks_it(pfedla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.reproduction.grid.home", lambda: tmp_path / "experiments")
    (tmp_path / "experiments" / "small").mkdir(parents=True)
    (tmp_path / "experiments" / "small" / "grid.toml").write_text(GRID)
    code, out, err = pfedla("reproduce", "small", "-a", "pfedla")
    assert code == 0, err
    assert "pFedLA" in out
    folder = tmp_path / "runs" / "reproduce" / "small"
    names = {"results.json", "table.md", "table.csv", "table.tex", "figure.png", "figure.pdf", "figure.svg"} | {".lock"}
    assert {path.name for path in folder.iterdir()} == names
    assert pfedla("reproduce", "small", "-a", "pfedla", "--check")[0] == 0
    path = folder / "results.json"
    path.write_text(path.read_text().replace('"cpu_model": "', '"cpu_model": "not '))
    code, _, err = pfedla("reproduce", "small", "-a", "pfedla", "--check")
    assert (code, "CPU" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", list_names())
def test_every_grid_runs_for_two_rounds_on_small_data(name: str, tmp_path: Path) -> None:
    grid = load_grid(name)
    cells = list_cells(grid, Wanted(rounds=2, seeds=grid.seeds[:1]))
    small = {}
    for cell in cells:
        values = cell.experiment.model_dump(exclude={"data": {"samples_per_client", "classes_limit"}})
        values["data"] |= {"dataset": "digits", "overlapping": False}
        values["data"] |= {"clients": 10} if values["data"]["clients"] == 100 else {}
        values |= {"model": "auto", "metric": "auto", "engine": {"compile": False}}
        values["training"] |= {"lr": 0.05} | ({} if cell.experiment.tuned_trials else {"local_epochs": 4})
        one = Cell(cell.row, cell.column, cell.experiment.parse(values))
        small[one.folder] = one
    display = Counting()
    table = Table(name, grid, Wanted(), tmp_path / "out" / name)
    campaign.run_cells([(table, one) for one in small.values()], tmp_path / "runs", display, go_on)
    assert len(display.begun) == len(small)
    for one in small.values():
        assert summaries.is_done(tmp_path / "runs", one)
