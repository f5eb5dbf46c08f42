"""Play the cells that are missing, and sum up those that are there."""

import json
import subprocess
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pfedla
from pfedla import algorithms
from pfedla.core.errors import GaveUpError, NotApplicableError, Stopped
from pfedla.core.files import read_object, write_text
from pfedla.core.rounds import planned_traffic
from pfedla.data import datasets
from pfedla.data.own import Dataset
from pfedla.report.figures import read_alpha, read_rounds
from pfedla.reproduction.accounting import layers_of, saved_by_weights
from pfedla.reproduction.grid import Cell, Grid, Wanted, names
from pfedla.reproduction.grid import cells as cells_of
from pfedla.runs.experiment import Experiment, build, read_toml
from pfedla.runs.folder import EXPERIMENT, RESULT, RunFolder
from pfedla.runs.progress import Reporter
from pfedla.runs.result import environment, run_built
from pfedla.runs.result_file import read_result

COMMIT, REASON, SUMMARY = "commit.json", "reason.json", "results.json"
SNAPSHOTS = 21  # of alpha in a summary, at most
Place = tuple[str, str, int]  # column, row, seed
RUN_BY = ("torch", "cpu", "cpu_model", "python")
FORMS_WITH_ALPHA = ("toy", "evolution", "heatmap", "layer-weights")


def is_done(runs: Path, cell: Cell) -> bool:
    folder = runs / cell.folder
    return ((folder / RESULT).exists() and (folder / COMMIT).exists()) or (folder / REASON).exists()


def standing(folder: Path, grid: Grid) -> dict[str, dict[str, Any]]:
    """By their run, the cells that stand in the summary in `folder` or of an experiment beside it: tables share runs."""
    found: dict[str, dict[str, Any]] = {}
    for name in [*(name for name in names() if name != folder.name), folder.name]:  # its own come last
        path = folder.parent / name / SUMMARY
        for cell in read_object(path)["cells"] if path.exists() else []:
            if _is_enough(cell, grid):
                kept = {key: value for key, value in cell.items() if key != "alpha" or grid.form in FORMS_WITH_ALPHA}
                found[cell["run"]] = kept
    return found


def _is_enough(cell: dict[str, Any], grid: Grid) -> bool:
    """Whether a cell that another table has tells all that this one shows."""
    if "reason" in cell:
        return True
    if grid.form == "retained" and cell["experiment"]["algorithm"].get("retained_layers"):
        return "saved_bytes" in cell
    return grid.form not in FORMS_WITH_ALPHA or "alpha" in cell


def play(
    runs: Path, cells: Iterable[Cell], reporter: Reporter, stopping: Callable[[], bool] = lambda: False,
    stands: Container[str] = (),
) -> None:  # fmt: skip
    """Every cell that is not there yet and of which nothing stands, one after the other.

    One that was stopped goes on where it stands.
    """
    cells = list(cells)

    def is_there(cell: Cell) -> bool:
        return cell.folder in stands or is_done(runs, cell)

    for name in dict.fromkeys(cell.experiment.data.dataset for cell in cells if not is_there(cell)):
        if not datasets.state_of(name).here:
            datasets.load(name)  # says what is missing, before hours are spent on the others
    runs.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, Dataset] = {}
    for cell in cells:
        one = cell.experiment
        if is_there(cell):  # by now: another process may play too
            reporter.skip(one.rounds)
            continue
        if stopping():
            raise Stopped
        reporter.begin(f"{cell.row}, {cell.column}", one.seed)
        if one.data.dataset not in loaded:
            loaded = {one.data.dataset: datasets.load(one.data.dataset)}  # one at a time: CIFAR is large
        path = runs / cell.folder
        try:
            built = build(one, loaded[one.data.dataset])
            folder = RunFolder(path, resume=True)
            folder.stopping = stopping
            run_built(built, folder, reporter)
            write_text(path / COMMIT, json.dumps(commit()) + "\n")
        except (NotApplicableError, GaveUpError) as error:
            reporter.say(f"{cell.row}, {cell.column}: {error}")
            reporter.skip(one.rounds)
            path.mkdir(exist_ok=True)
            write_text(path / REASON, json.dumps({"reason": str(error)}) + "\n")


def commit() -> dict[str, str]:
    """Which pfedla this is: its version, and in a checkout the commit."""
    where = Path(pfedla.__file__).parents[2]
    version = {"pfedla": pfedla.__version__}
    words = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, check=True) if (where / ".git").exists() else None
    except (OSError, subprocess.CalledProcessError):  # no git, or not ours to ask
        found = None
    return version | ({"commit": found.stdout.strip()} if found else {})


def write_summary(runs: Path, name: str, grid: Grid, wanted: Wanted, folder: Path) -> dict[str, Any]:
    """results.json: what is known of each cell that is there, all that tables and figures are made of.

    Cells that an earlier command left there, of other seeds or data sets, stay if they are still what the grid asks for; runs
    of which another table's summary tells are taken from it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SUMMARY
    before = read_object(path)["cells"] if path.exists() else []
    everything = replace(wanted, datasets=(), methods=(), clients=(), seeds=sorted({cell["seed"] for cell in before}))
    asked_for = {place_of(cell): cell.folder for cell in cells_of(grid, everything)}
    before = [cell for cell in before if asked_for.get(place(cell)) == cell["run"]]
    stands, new = standing(folder, grid), []
    for cell in cells_of(grid, wanted):
        if is_done(runs, cell):
            new.append(cell_summary(runs / cell.folder, cell, grid))
        elif cell.folder in stands:
            new.append(stands[cell.folder] | _where(cell))
    known = {place(cell): cell for cell in [*before, *new]}
    columns, rows = [column.name for column in grid.columns], [row.name for row in grid.rows]
    order = sorted(known, key=lambda where: (columns.index(where[0]), rows.index(where[1]), where[2]))
    summary = {
        "name": name, "title": grid.title, "form": grid.form, "columns": columns, "rows": rows,
        "layers": {column.name: column.layer for column in grid.columns if column.layer},
        "cells": [known[where] for where in order],
    }  # fmt: skip
    write_text(path, _one_line_per_cell(summary))
    return summary


def place(cell: dict[str, Any]) -> Place:
    return cell["column"], cell["row"], cell["seed"]


def place_of(cell: Cell) -> Place:
    return cell.column, cell.row, cell.experiment.seed


def _where(cell: Cell) -> dict[str, Any]:
    return {"row": cell.row, "column": cell.column, "seed": cell.experiment.seed}


def _one_line_per_cell(summary: dict[str, Any]) -> str:
    head = json.dumps({**summary, "cells": []}, ensure_ascii=False, indent=2).removesuffix("[]\n}")
    cells = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in summary["cells"])
    return f"{head}[\n{cells}\n]}}\n"


def cell_summary(run: Path, cell: Cell, grid: Grid) -> dict[str, Any]:
    what = {**_where(cell), "run": cell.folder}
    if not (run / RESULT).exists():
        return {**what, "reason": read_object(run / REASON)["reason"]}
    result = read_result(run / RESULT)
    experiment = Experiment.parse(read_toml(run / EXPERIMENT))
    machine = read_object(run / "environment.json")
    lines = read_rounds(run)
    summary = {
        **what,
        "accuracy": result["accuracy"],
        "accuracy_after_training": result["accuracy_after_training"]["mean"],
        "traffic": result["traffic"],
        "subset": Path(result["subset"]).name,
        "leaked_test_share": result["leaked_test_share"],
        "refused_uploads": result["refused_uploads"],
        "curve": [[line["round"], line["accuracy"]["mean"]] for line in lines],
        "retained": _retained(lines),
        "seconds": round(result["seconds"]["total"], 1),
        "run_by": read_object(run / COMMIT) | {key: machine[key] for key in RUN_BY if key in machine},
        "experiment": {key: value for key, value in experiment.numbers().items() if key not in ("faults", "uploads")},
        "rounds": experiment.rounds,
    }
    if (found := read_alpha(run)) is None:
        return summary
    alpha, layers, rounds = found
    retained = algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options).get("retained_layers", 0)
    if retained and experiment.participation == 1 and rounds == list(range(experiment.rounds + 1)):
        sizes = layers_of(experiment.data.dataset, experiment.model)
        full = planned_traffic(sizes, len(alpha[0]), experiment.rounds, []).down_bytes
        by_weights = saved_by_weights(alpha[:-1], sizes, retained)
        summary["saved_bytes"] = {"sent": full - result["traffic"]["down_bytes"], "accounted": by_weights}
    if grid.form in FORMS_WITH_ALPHA:
        step = -(-(len(rounds) - 1) // (SNAPSHOTS - 1)) or 1
        kept = sorted({*range(0, len(rounds), step), len(rounds) - 1})
        summary["alpha"] = {
            "layers": layers,
            "rounds": [rounds[position] for position in kept],
            "values": [[[[round(float(v), 4) for v in row] for row in rows] for rows in alpha[position]] for position in kept],
            "classes": read_object(run / "federation.json")["train"],
        }
    return summary


def ran_here(cell: dict[str, Any]) -> bool:
    """Whether the last bits can be asked for: it was played with this torch on such a CPU."""
    machine = environment()
    return bool(machine["cpu_model"]) and all(cell["run_by"].get(key) == machine[key] for key in ("torch", "cpu", "cpu_model"))


def differences(before: dict[str, Any], again: dict[str, Any]) -> list[str]:
    """What is not the same when a cell was played again: all but how long it took and what it ran on."""
    apart = {"seconds", "run_by"}
    return sorted(key for key in before.keys() | again.keys() if key not in apart and before.get(key) != again.get(key))


def _retained(lines: list[dict[str, Any]]) -> dict[str, int]:
    """How often each layer was kept at home, over the rounds that have a line."""
    total: dict[str, int] = {}
    for line in lines:
        for layer, count in line["retained"].items():
            total[layer] = total.get(layer, 0) + count
    return total
