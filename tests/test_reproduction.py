"""The paper's tables and figures: the grids, the tables and numbers made of runs, and what the committed results show."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pfedla import algorithms
from pfedla.core.errors import PfedlaError
from pfedla.report import paper as report
from pfedla.reproduction import grid as grids
from pfedla.reproduction import play
from pfedla.reproduction.accounting import accounting, layers_of, saved_by_weights
from pfedla.reproduction.grid import Grid, Row, Wanted, cells
from pfedla.reproduction.paper_figures import write_figures
from pfedla.reproduction.paper_weights import by_column, by_distance, evolution, heatmap, self_weights
from pfedla.runs.progress import Reporter

RESULTS = Path(__file__).parents[1] / "results"


# The grids.


@pytest.mark.parametrize("name", grids.names())
def test_every_cell_of_every_grid_is_a_valid_experiment(name: str) -> None:
    grid = grids.load(name)
    for wanted in (Wanted(), Wanted(paper_budget=True)):
        found = cells(grid, wanted)
        for cell in found:
            section = cell.experiment.algorithm
            algorithms.resolve_options(section.name, section.options)
        assert len({cell.folder for cell in found}) == len(found)
    for column, rows in grids.paper(name).items():
        if column in {one.name for one in grid.columns}:
            assert rows.keys() <= {row.name for row in grid.rows}


def test_there_is_an_experiment_for_everything_the_paper_shows() -> None:
    assert set(grids.names()) >= {
        "table1", "table2", "table3", "figure_toy", "figure_weight_evolution", "figure_weight_heatmap",
        "figure_layer_weights", "effect_of_k", "effect_of_neighbours",
    }  # fmt: skip


def test_the_cells_that_are_asked_for() -> None:
    grid = grids.load("table1")
    some = cells(grid, Wanted(["emnist"], ["pFedLA", "local"], [10], [3, 4], rounds=7))
    assert [(c.row, c.experiment.seed, c.experiment.rounds) for c in some] == [
        (row, seed, 7) for seed in (3, 4) for row in ("Local", "pFedLA")
    ]
    assert {c.experiment.data.clients for c in cells(grid, Wanted(clients=[100]))} == {100}
    assert {c.experiment.rounds for c in cells(grid, Wanted(paper_budget=True))} == {600, 2500}
    for wanted, says in (
        (Wanted(datasets=["emnits"]), "did you mean 'emnist'"), (Wanted(methods=["fedprox"]), "unknown method"),
        (Wanted(clients=[50]), "choose one of: 10, 100"),
    ):  # fmt: skip
        with pytest.raises(PfedlaError, match=says):
            cells(grid, wanted)


def test_a_run_is_shared_by_the_tables_that_are_made_of_it() -> None:
    one, other = ({c.folder for c in cells(grids.load(name))} for name in ("table1", "per_layer"))
    assert one & other


def test_the_accounting_is_the_papers() -> None:
    rows = accounting(grids.load("table3"), grids.paper("table3"))
    assert len(rows) == 7
    for row in rows:
        assert abs(round(row["mib"], 2) - row["paper"]) <= 0.02 + 1e-9  # as printed


# Tables and numbers, by hand.


def summary_of(accuracies: dict[tuple[str, str, int], float | None], **more: Any) -> dict[str, Any]:
    made = []
    for (column, row, seed), mean in accuracies.items():
        cell: dict[str, Any] = {"column": column, "row": row, "seed": seed}
        if mean is None:
            cell["reason"] = "it has no BatchNorm"
        else:
            data = {"dataset": "digits", "samples_per_client": 100}
            cell |= {
                "accuracy": {"mean": mean, "per_client": [mean, mean]}, "traffic": {"down_bytes": 2**20, "up_bytes": 2**21},
                "experiment": {"training": {"local_epochs": 1}, "participation": 1.0, "data": data},
                "rounds": 2, "seconds": 60.0, "curve": [[1, mean], [2, mean]],
            }  # fmt: skip
        made.append(cell)
    columns, rows = (list(dict.fromkeys(place[axis] for place in accuracies)) for axis in (0, 1))
    return {"title": "t", "form": "table", "columns": columns, "rows": rows, "cells": made, **more}


def test_a_table_has_the_best_in_bold_the_spread_over_seeds_and_the_papers_number() -> None:
    summary = summary_of(
        {("A", "x_1", 0): 0.5, ("A", "x_1", 1): 0.6, ("A", "y", 0): 0.54, ("B", "x_1", 0): None, ("B", "y", 0): 0.25}
    )
    paper = {"A": {"x_1": {"mean": 55.5, "std": 0.25}, "y": {"mean": 50.0}}}
    lines = report.markdown(summary, paper).splitlines()
    assert lines[:4] == [
        "|  | A | paper | B | paper |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| x_1 | 50.00 | 55.50 ± 0.25 | – | – |",  # of the seed that both have
        "| y | **54.00** | 50.00 | 25.00 | – |",
    ]
    assert lines[-5:-3] == ["| --- | ---: | ---: |", "| x_1 | 55.00 ± 7.07 | 55.50 ± 0.25 |"]
    setting = "digits, 2 clients of 100 images, 100 % a round, 2 rounds, 1 local epochs, seeds 0"
    assert lines[-2:] == [f"- A: {setting}, for x_1 0, 1; 3 minutes", f"- B: {setting}; 1 minutes"]
    tex = report.latex(summary, paper)
    assert r"y & \textbf{54.00} {\scriptsize(50.00)} & 25.00 \\" in tex
    assert r"x\_1 & 55.00 $\pm$ 7.07 {\scriptsize(55.50 $\pm$ 0.25)} \\" in tex
    assert tex.startswith("\\begin{tabular}{lcc}\n\\toprule")
    rows = report.comma_separated(summary, paper).splitlines()
    assert rows[1] == "A,x_1,1,50.0,,3.0,55.5,0.25,,"
    assert rows[3] == "B,x_1,0,,,,,,,it has no BatchNorm"
    assert rows[5:] == ["A,x_1,2,55.0,7.0711,3.0,55.5,0.25,,"]
    both = summary_of({("A", row, seed): 0.5 + seed / 10 for row in ("x", "y") for seed in (0, 1)})
    assert "| y | 55.00 ± 7.07 | – |" in report.markdown(both, {})
    assert report.repeated(both)["cells"] == []
    apart = summary_of({("A", "x", 0): 0.5, ("A", "y", 1): 0.6})  # nothing to compare: no bold, and it is said
    assert "| y | 60.00 | – |" in report.markdown(apart, {})
    assert "seeds differ by row" in report.markdown(apart, {})
    crossed = summary_of({("A", row, seed): 0.5 for row, seed in (("x", 0), ("x", 1), ("y", 1), ("y", 2), ("z", 1))})
    assert {cell["seed"] for cell in report.compared(crossed)["cells"]} == {1}
    assert report.repeated(crossed)["cells"] == []  # x and y have no second seed in common


def alpha_cell(values: Any) -> dict[str, Any]:
    return {"alpha": {"values": values, "layers": ["conv", "fc"], "rounds": list(range(len(values)))}}


def test_weights_by_distance_along_the_chain() -> None:
    weights = np.array([[9, 1, 2, 5], [1, 9, 1, 2], [2, 1, 9, 1], [7, 2, 1, 9.0]])
    assert by_distance(weights) == [9, 1, 2, 6]
    alpha = np.zeros((2, 4, 2, 4))
    alpha[1, :, 1] = weights
    assert np.array_equal(heatmap([alpha_cell(alpha)], "fc"), weights)


def test_the_evolution_is_of_the_target_by_thirds_of_the_run() -> None:
    alpha = np.zeros((7, 5, 2, 5))
    for snapshot in range(7):
        alpha[snapshot, 0, 0] = np.array([5, 3, 2, 1, 0]) * snapshot
    whose, layers = evolution([alpha_cell(alpha)])
    assert layers == ["conv", "fc"]
    assert whose["self"][:, 0].tolist() == [7.5, 17.5, 27.5]
    assert whose["same labels"][:, 0].tolist() == [4.5, 10.5, 16.5]
    assert whose["similar"][:, 0].tolist() == [3, 7, 11]
    assert whose["others"][:, 0].tolist() == [0.75, 1.75, 2.75]
    assert self_weights([alpha_cell(alpha)])[0].tolist() == [30, 0]


# Playing.

SMALL = Grid.model_validate({
    "title": "small", "form": "heatmap",
    "experiment": {"rounds": 2, "training": {"local_epochs": 1}, "data": {"dataset": "digits", "clients": 4}},
    "columns": [
        {"name": "digits", "experiment": {"data": {"partition": "classes"}}, "layer": "fc1"},
        {"name": "more", "experiment": {"data": {"partition": "dominant"}}, "layer": "fc1", "only": ["Local"]},
    ],
    "rows": [
        {"name": "Local", "experiment": {"algorithm": {"name": "local"}}},
        {"name": "pFedLA", "experiment": {"algorithm": {"name": "pfedla"}}},
        {"name": "FedBN", "experiment": {"algorithm": {"name": "fedbn"}}},
    ],
})  # fmt: skip


class Counting(Reporter):
    def __init__(self) -> None:
        super().__init__(0, quiet=True)
        self.begun: list[str] = []

    def begin(self, name: str, seed: int) -> None:
        self.begun.append(name)


def test_only_missing_cells_are_played_and_the_summary_holds_what_they_left(tmp_path: Path) -> None:
    wanted = cells(SMALL)
    reporter, again = Counting(), Counting()
    play.play(tmp_path / "runs", wanted[:2], reporter)
    assert reporter.begun == ["Local, digits", "pFedLA, digits"]
    play.play(tmp_path / "runs", wanted, again)
    assert again.begun == ["FedBN, digits", "Local, more"]
    first = play.write_summary(tmp_path / "runs", "small", SMALL, Wanted(methods=["pfedla", "fedbn"]), tmp_path / "out")
    summary = play.write_summary(tmp_path / "runs", "small", SMALL, Wanted(methods=["local"]), tmp_path / "out")
    assert [play.place(cell) for cell in summary["cells"]] == [play.place_of(cell) for cell in wanted]  # the others have stayed
    assert json.loads((tmp_path / "out/results.json").read_text()) == summary
    result = json.loads((tmp_path / "runs" / wanted[1].folder / "result.json").read_text())
    mixed = summary["cells"][1]
    assert mixed == first["cells"][0]
    assert (mixed["accuracy"], mixed["traffic"]) == (result["accuracy"], result["traffic"])
    assert mixed["experiment"]["algorithm"]["name"] == "pfedla"
    assert np.array(mixed["alpha"]["values"]).shape == (3, 4, 4, 4)
    assert mixed["run_by"].keys() >= {"pfedla", "torch", "cpu", "cpu_model"}
    assert "BatchNorm" in summary["cells"][2]["reason"]
    tables = report.write_tables(summary, {}, tmp_path / "out")
    assert all(path.stat().st_size for path in [*tables, *write_figures(summary, {}, tmp_path / "out")])
    weights = by_distance(heatmap([mixed], "fc1"))
    assert f"| digits, fc1 | {weights[0]:.3f} | {weights[1]:.3f} | {weights[2]:.3f} |" in tables[0].read_text()
    shorter = play.write_summary(tmp_path / "runs", "small", SMALL, Wanted(rounds=1), tmp_path / "out")
    assert shorter["cells"] == []  # of another budget: nothing was played, and nothing of this one is mixed in
    repeated = play.cell_summary(tmp_path / "runs" / wanted[1].folder, wanted[1], SMALL)
    assert play.differences(mixed, repeated) == []
    repeated["curve"][0][1] += 1e-9
    assert play.differences(mixed, repeated) == ["curve"]


def test_a_run_whose_numbers_stand_beside_is_not_played_but_taken(tmp_path: Path) -> None:
    table = SMALL.model_copy(update={"form": "table", "columns": SMALL.columns[:1]})
    named = [row.model_copy(update={"name": f"{row.name} again"}) for row in table.rows]
    other = table.model_copy(update={"rows": named})
    play.play(tmp_path / "runs", cells(table, Wanted(methods=["pfedla"])), Counting())
    first = play.write_summary(tmp_path / "runs", "small", table, Wanted(), tmp_path / "out/table1")
    reporter, nowhere = Counting(), tmp_path / "no runs"
    stands = play.standing(tmp_path / "out/other", other)
    play.play(nowhere, cells(other, Wanted(methods=["pfedla", "fedbn"])), reporter, stands=stands)
    assert reporter.begun == ["FedBN again, digits"]
    second = play.write_summary(nowhere, "other", other, Wanted(), tmp_path / "out/other")
    assert second["cells"][0] == first["cells"][0] | {"row": "pFedLA again"}
    assert play.standing(tmp_path / "out/figure", SMALL) == {}  # weights are left out of a table


def test_what_retained_layers_save_follows_from_the_weights(tmp_path: Path) -> None:
    grid = SMALL.model_copy(update={"rows": [Row(name="two", experiment={"algorithm": {
        "name": "heurpfedla", "retained_layers": 2, "warm_up": 0, "hypernetwork_lr": 30.0,
    }})], "columns": SMALL.columns[:1]})  # fmt: skip
    (cell,) = cells(grid, Wanted(rounds=4))
    play.play(tmp_path, [cell], Counting())
    found = play.cell_summary(tmp_path / cell.folder, cell, grid)
    layers = layers_of("digits")
    assert found["saved_bytes"]["sent"] == found["saved_bytes"]["accounted"]
    by_ties = 4 * 4 * sum(layers.num_parameters[-2:]) * 4  # had the weights stayed equal: rounds, clients, layers, bytes
    assert found["saved_bytes"]["sent"] not in (0, by_ties)
    alpha = np.full((1, 2, 3, 2), 0.5)
    alpha[0, 1, 0] = [0.2, 0.8]  # the second client keeps its first layer
    sizes = SimpleNamespace(num_parameters=[100, 10, 1])
    assert saved_by_weights(alpha, sizes, 1) == 4 * (1 + 100)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["table", "retained", "neighbours"])
def test_tables_of_every_form_have_a_figure(form: str, tmp_path: Path) -> None:
    summary = summary_of({("A", "k = 0", 0): 0.5, ("A", "k = 1", 0): 0.6, ("B", "k = 0", 0): 0.1}, form=form)
    assert [path.name for path in write_figures(summary, {"A": {"k = 0": {"mean": 50.0}}}, tmp_path)] == [
        "figure.png", "figure.pdf",
    ]  # fmt: skip


# What stands in results/.

COMMITTED = sorted(path.parent.name for path in RESULTS.glob("*/results.json"))


def committed(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name / "results.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize("name", COMMITTED)
def test_the_committed_tables_are_made_of_the_committed_numbers(name: str) -> None:
    summary, paper = committed(name), grids.paper(name)
    for file, make in (("table.md", report.markdown), ("table.csv", report.comma_separated), ("table.tex", report.latex)):
        assert (RESULTS / name / file).read_text(encoding="utf-8") == make(summary, paper)
    assert (RESULTS / name / "figure.png").exists()
    assert not any("dirty" in cell.get("run_by", {}).get("commit", "") for cell in summary["cells"])


def test_the_weights_fall_with_the_distance_between_clients() -> None:
    summary = committed("figure_weight_heatmap")
    for column, found in by_column(summary).items():
        weights = by_distance(heatmap(found, summary["layers"][column]))
        assert weights[0] > weights[1] > weights[2] > weights[3], (column, weights)


def test_the_client_with_the_same_labels_gets_most_then_the_similar_one() -> None:
    for column, found in by_column(committed("figure_weight_evolution")).items():
        whose, _ = evolution(found)
        same, similar, others = (whose[name][-1].mean() for name in ("same labels", "similar", "others"))
        assert same > similar > others, (column, same, similar, others)


def test_a_leak_pays_where_training_goes_on_for_longer_and_is_not_all_of_the_papers_number() -> None:
    """What the README of the leak says."""
    found = {(cell["row"], cell["column"]): cell for cell in committed("leak")["cells"]}

    def percent(row: str, column: str) -> float:
        return 100 * found[row, column]["accuracy"]["mean"]

    assert all(abs(percent(row, "overlapping") - percent(row, "disjoint")) < 1 for row in ("FedAvg", "pFedLA"))
    longer = "FedAvg, 20 times the rate"
    assert 1 < percent(longer, "overlapping") - percent(longer, "disjoint") < 2
    leaked = found[longer, "overlapping"]["leaked_test_share"]
    assert leaked < 0.5
    assert round(100 * leaked + (1 - leaked) * percent(longer, "disjoint")) == 93
    assert grids.paper("leak")["overlapping"]["FedAvg"]["mean"] > 98


def test_weights_per_layer_pay_as_their_readme_says() -> None:
    found = report.entries(report.compared(committed("per_layer")))

    def ahead(column: str, of: str) -> float:
        ours, theirs = found[column]["pFedLA per layer"].mean, found[column][of].mean
        assert ours is not None
        assert theirs is not None
        return ours - theirs

    easy, hard = "Fashion-MNIST, classes", "CIFAR-10, classes"
    shared_easy, shared_hard = "Fashion-MNIST, dominant", "CIFAR-10, dominant"
    model, tuned = "pFedLA per model", "FedAvg + fine-tuning"
    assert abs(ahead(easy, model)) < 0.5
    assert ahead(hard, model) > 1.9
    assert ahead(shared_hard, model) > 2.5
    assert ahead(shared_easy, model) > 4
    assert ahead(easy, tuned) > 3
    assert ahead(hard, tuned) > 2
    assert all(0 < ahead(column, tuned) < 1 for column in (shared_easy, shared_hard))
    assert all(abs(ahead(column, "FedRep")) < 1.5 for column in found)
    assert [column for column in found if ahead(column, "FedRep") < 0] == [hard]
    assert round(ahead(hard, "FedBN")) == 16
    assert round(ahead(shared_hard, "FedBN")) == 6
    worst = {
        (cell["column"], cell["row"]): cell["accuracy"]["worst"]
        for cell in committed("per_layer")["cells"]
        if "accuracy" in cell
    }
    assert sum(worst[column, tuned] < worst[column, "pFedLA per layer"] for column in found) == 3


def test_the_neighbours_are_as_their_readme_says() -> None:
    found = report.entries(committed("effect_of_neighbours"))["CIFAR-10"]
    means = [found[f"K = {neighbours}"].mean or 0 for neighbours in (4, 5, 7, 9)]
    everyone = report.entries(committed("many_clients"))["CIFAR-10, 100 clients"]["pFedLA (all)"].mean or 0
    assert [*means, everyone] == sorted([*means, everyone])
    assert 0.8 < (means[-1] - means[0]) / 5 < 1.2
    assert 0.5 < everyone - means[-1] < 1.5
    curves = {
        cell["row"]: dict(cell["curve"]) for cell in committed("effect_of_neighbours")["cells"] if cell["column"] == "CIFAR-10"
    }
    early = [curves[f"K = {neighbours}"][50] for neighbours in (9, 7, 5, 4)]
    assert early == sorted(early)
    letters = {row: entry.mean or 0 for row, entry in report.entries(committed("effect_of_neighbours"))["EMNIST"].items()}
    assert max(letters, key=lambda row: letters[row]) == "K = 7"
    assert min(letters, key=lambda row: letters[row]) == "K = 4"
    assert max(letters.values()) - min(letters.values()) < 2


def test_a_run_has_the_same_numbers_wherever_it_stands() -> None:
    found: dict[str, set[str]] = {}
    for name in COMMITTED:
        for cell in committed(name)["cells"]:
            if "accuracy" in cell:
                found.setdefault(cell["run"], set()).add(json.dumps([cell["accuracy"], cell["traffic"], cell["run_by"]]))
    assert not [run for run, numbers in found.items() if len(numbers) > 1]


@pytest.mark.parametrize("name", [name for name in ("table3", "effect_of_k") if name in COMMITTED])
def test_what_was_saved_is_what_the_accounting_says(name: str) -> None:
    some = [cell for cell in committed(name)["cells"] if cell["row"] != "k = 0"]
    assert {cell["row"] for cell in some} == {"k = 1", "k = 2", "k = 3"}
    for cell in some:
        assert cell["saved_bytes"]["sent"] == cell["saved_bytes"]["accounted"] > 0


def test_the_readmes_hold_the_committed_tables() -> None:
    for name in COMMITTED:
        readme = (RESULTS.parent / "experiments" / name / "README.md").read_text(encoding="utf-8")
        assert (RESULTS / name / "table.md").read_text(encoding="utf-8").strip() in readme


# The command line.


def test_reproduce_lists_what_there_is_and_prints_the_accounting(pfedla) -> None:
    code, out, _ = pfedla("reproduce")
    assert code == 0
    assert all(name in out for name in grids.names())
    code, out, _ = pfedla("reproduce", "table3", "--accounting-only")
    assert code == 0
    assert "693.96" in out
    assert "693.98" in out
    for words, says in (
        (["tabel1"], "did you mean 'table1'"), (["table1", "--accounting-only"], "has no accounting"),
        (["table1", "-d", "svhn"], "unknown data set"), (["table1", "--clients", "ten"], "--clients"),
        (["table1", "--check"], "no such file"),
    ):  # fmt: skip
        code, _, err = pfedla("reproduce", *words)
        assert code == 2
        assert says in err.lower()


@pytest.mark.slow
def test_reproduce_plays_a_figure_and_checks_it(pfedla, real, tmp_path: Path) -> None:
    real("emnist")
    words = ["reproduce", "figure_weight_heatmap", "-d", "emnist", "--rounds", 2]
    code, out, err = pfedla(*words)
    assert code == 0, err
    assert "pFedLA" in out
    left = {path.name for path in (tmp_path / "runs/reproduce/figure_weight_heatmap").iterdir()}
    assert left == {"results.json", "table.md", "table.csv", "table.tex", "figure.png", "figure.pdf"}
    code, out, err = pfedla(*words, "--check")
    assert code == 0, err
    assert "every number is what stands in" in out
    path = tmp_path / "runs/reproduce/figure_weight_heatmap/results.json"
    path.write_text(path.read_text().replace('"cpu_model": "', '"cpu_model": "not '))
    code, _, err = pfedla(*words, "--check")
    assert code == 2
    assert "none of these cells is known to have run with this torch on such a CPU" in err
