"""results.json: the numbers of all cells of a table, each recognised by its experiment."""

import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pfedla
from pfedla import algorithms
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, write_text
from pfedla.core.settings import AUTO
from pfedla.report import reading
from pfedla.report.reading import Values, read_alpha, read_result, read_rounds
from pfedla.report.rows import Row
from pfedla.reproduction.grid import Cell, Grid, Wanted, list_cells, list_names, resolve
from pfedla.runs.experiment import Experiment, read_toml, upgrade
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT, describe_environment

COMMIT, REASON, SUMMARY = "commit.json", "reason.json", "results.json"
AFTER = "score_after_training"
FORMAT = 4  # of results.json; 1 had no "format", 2 had accuracy for score, 3 only a mean after local training
SNAPSHOTS = 21  # of alpha in a summary, at most
MACHINE = ("torch", "cpu", "cpu_model")  # a repetition on the same has the same bits
NOT_KEPT: Any = dict.fromkeys(("rounds", "checkpoint", "faults", "uploads"), True) | {"engine": {"threads"}}
Summary = Mapping[str, Any]  # what results.json holds, or one of its cells


class Stored(NamedTuple):
    """A cell of a results.json, recognised by its experiment: settings that it lacks count as their defaults."""

    content: Values
    settings: Values | None  # of its run; None for a cell of format 1 that has only a reason

    def is_of(self, cell: Cell) -> bool:
        """Return whether it equals what the grid asks for, wherever the grid does not say "auto"."""
        settings = self.settings
        if settings is None:  # compare the folders' names without their hashes
            return str(self.content["run"]).rpartition("-")[0] == cell.folder.rpartition("-")[0]
        return all(value in (AUTO, settings.get(key)) for key, value in cell.settings.items())


def read_summary(path: Path) -> Values:
    """Return the content of a results.json with the names of today."""
    summary = read_object(path)
    cells = {key: list(map(_upgrade, summary[key])) for key in ("cells", "other_cells") if key in summary}
    return summary | cells


def _upgrade(cell: Values) -> Values:
    cell = reading.upgrade(cell)
    after = cell.get(AFTER)
    return cell if after is None or isinstance(after, dict) else {**cell, AFTER: {"mean": after}}


def read_cells(path: Path) -> list[Stored]:
    """Return all cells of a results.json; experiments of format 1 are translated."""
    summary = read_summary(path) if path.exists() else {"cells": []}
    return [_restore(cell) for cell in [*summary["cells"], *summary.get("other_cells", [])]]


def _restore(cell: Values) -> Stored:
    if "experiment" not in cell:
        return Stored(cell, None)
    values = upgrade(cell["experiment"])
    try:
        known = {"name", *algorithms.default_options(values["algorithm"]["name"])}
        values["algorithm"] = {key: value for key, value in values["algorithm"].items() if key in known}
        return Stored({**cell, "experiment": values}, resolve(Experiment.parse({**values, "rounds": cell["rounds"]})))
    except PfedlaError:  # a method or value that is gone: the cell is kept, and is no grid's
        return Stored(cell, {})


def find_stored(folder: Path, grid: Grid) -> list[Stored]:
    """Return the cells of the summary in `folder`, then those of the summaries beside it: tables share runs."""
    others = [one for name in list_names() if name != folder.name for one in read_cells(folder.parent / name / SUMMARY)]
    enough = [one for one in others if not grid.shows_alpha or "reason" in one.content or "alpha" in one.content]
    return [*read_cells(folder / SUMMARY), *enough]


def match(cell: Cell, stored: Iterable[Stored]) -> Stored | None:
    return next((one for one in stored if one.is_of(cell)), None)


def is_done(runs: Path, cell: Cell) -> bool:
    return (runs / cell.folder / COMMIT).exists() or (runs / cell.folder / REASON).exists()


@cache
def describe_version() -> dict[str, str]:
    """Return the version of pfedla that this process runs, and in a checkout its commit."""
    where = Path(pfedla.__file__).parents[2]
    words = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(words, capture_output=True, text=True) if (where / ".git").exists() else None
    return {"pfedla": pfedla.__version__} | ({"commit": found.stdout.strip()} if found and not found.returncode else {})


def write_summary(runs: Path, name: str, grid: Grid, wanted: Wanted, folder: Path) -> Values:
    """Write results.json: what is known of each cell, all that tables and figures are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    before, stored = read_cells(folder / SUMMARY), find_stored(folder, grid)
    seeds = {*(wanted.seeds or grid.all_seeds), *(one.content["seed"] for one in before)}
    asked = list_cells(grid, Wanted(seeds=sorted(seeds), rounds=wanted.rounds, paper_budget=wanted.paper_budget))
    now = {cell.folder for cell in list_cells(grid, wanted)}
    found: list[Values] = []
    for cell in asked:
        if cell.folder in now and is_done(runs, cell):
            found.append(summarise_cell(runs / cell.folder, cell, grid))
        elif one := match(cell, stored if cell.folder in now else before):
            found.append({key: value for key, value in one.content.items() if grid.shows_alpha or key != "alpha"})
            found[-1] |= cell.place
    columns, rows = [column.name for column in grid.columns], [row.name for row in grid.rows]
    found.sort(key=lambda cell: (columns.index(cell["column"]), rows.index(cell["row"]), cell["seed"]))
    # No cell is lost: those that the grid does not ask for, or not with this budget; tables and figures ignore them.
    others = [one.content for one in before if not any(one.is_of(cell) for cell in asked)]
    summary: Values = {"format": FORMAT, "name": name, "title": grid.title, "form": grid.form}
    summary |= {"columns": columns, "rows": rows} | ({"source": grid.source} if grid.source != "paper" else {})
    summary["layers"] = {column.name: column.layer for column in grid.columns if column.layer}
    text = json.dumps(summary, ensure_ascii=False, indent=2).removesuffix("\n}")
    for key, cells in {"other_cells": others, "cells": found}.items():  # a line per cell
        lines = ",\n".join(json.dumps(cell, ensure_ascii=False) for cell in cells)
        text += f',\n  "{key}": [\n{lines}\n]' if cells else f',\n  "{key}": []'
    write_text(folder / SUMMARY, text + "\n}\n")
    return {**summary, "other_cells": others, "cells": found}


def summarise_cell(run: Path, cell: Cell, grid: Grid) -> Values:
    """Return what results.json keeps of a run."""
    if not (run / RESULT).exists():
        asked = cell.experiment.model_dump(exclude={"rounds"})
        return {**cell.place, **read_object(run / REASON), "experiment": asked, "rounds": cell.experiment.rounds}
    result, lines = read_result(run / RESULT), read_rounds(run)
    experiment, machine = Experiment.parse(read_toml(run / EXPERIMENT)), read_object(run / "environment.json")
    retained: Counter[str] = Counter()
    for line in lines:
        retained.update(line["retained"])
    summary = {
        **cell.place,
        **{key: result[key] for key in ("task", "score", AFTER, "traffic", "leaked_test_share", "refused_uploads")},
        "metrics": {name: {"per_client": one["per_client"]} for name, one in result["metrics"].items()},
        "subset": Path(result["subset"]).name,
        "curve": [[line["round"], line["score"]["mean"]] for line in lines],
        "retained": dict(retained),
        "seconds": round(result["seconds"]["total"], 1),
        "run_by": read_object(run / COMMIT) | {key: machine[key] for key in (*MACHINE, "python") if key in machine},
        "experiment": experiment.model_dump(exclude=NOT_KEPT),
        "rounds": experiment.rounds,
    }
    if grid.form == "sites":
        federation = read_object(run / FEDERATION)
        tested = [sum(counts) for counts in federation["test"]]
        summary |= {"clients": federation["clients"], "test_examples": tested, "baseline": result["baseline"]}
    if grid.form == "attacks":
        return summary | _describe_attack(run, result, experiment)
    summary |= {"tuned_trials": cell.experiment.tuned_trials} if cell.experiment.tuned_trials else {}
    if grid.shows_alpha:
        return {**summary, "alpha": _thin_alpha(run, 1 if grid.form == "sites" else SNAPSHOTS)}
    own = _mean_self_weights(run)
    return {**summary, "self_weights": own} if own else summary


def _describe_attack(run: Path, result: Values, experiment: Experiment) -> Values:
    """Return the attack of a run, who attacked, and the weights [snapshots, layers] that the others gave to them."""
    found: Values = {"attackers": result.get("attackers", [])}
    found["experiment"] = experiment.model_dump(exclude=NOT_KEPT) | {"faults": result["faults"]}
    if (alpha := read_alpha(run)) is not None and found["attackers"]:
        kept, out = _choose_snapshots(len(alpha.rounds), SNAPSHOTS), found["attackers"]
        honest = [client for client in range(alpha.values.shape[1]) if client not in out]
        values = alpha.values[kept][:, honest][..., out].sum(-1).mean(1).astype(float).round(4).tolist()
        found["weights"] = {"layers": alpha.layers, "rounds": [alpha.rounds[one] for one in kept], "values": values}
    return found


def _mean_self_weights(run: Path) -> Values | None:
    """Return the self-weights [snapshots, layers] of a run with weights, mean over the clients."""
    if (alpha := read_alpha(run)) is None:
        return None
    kept = _choose_snapshots(len(alpha.rounds), SNAPSHOTS)
    values = alpha.own[kept].mean(-1).astype(float).round(4).tolist()
    return {"layers": alpha.layers, "rounds": [alpha.rounds[one] for one in kept], "values": values}


def _choose_snapshots(count: int, most: int) -> list[int]:
    """Return the positions of at most so many of `count` snapshots, the last among them."""
    last = count - 1
    return sorted({*(range(0, last + 1, max(1, -(-last // (most - 1)))) if most > 1 else ()), last})


def _thin_alpha(run: Path, most: int) -> Values | None:
    """Return the weights of at most so many snapshots, the last among them, and the classes of the clients."""
    if (alpha := read_alpha(run)) is None:
        return None
    kept = _choose_snapshots(len(alpha.rounds), most)
    values, rounds = alpha.values[kept].astype(float).round(4).tolist(), [alpha.rounds[one] for one in kept]
    classes = read_object(run / FEDERATION)["train"]
    return {"layers": alpha.layers, "rounds": rounds, "values": values, "classes": classes}


def ran_here(cell: Values) -> bool:
    """Whether a cell was run with this torch on this model of CPU, so that a repetition has the same bits."""
    machine = describe_environment()
    return bool(machine["cpu_model"]) and all(cell["run_by"].get(key) == machine[key] for key in MACHINE)


def list_differences(before: Values, again: Values) -> list[str]:
    """Return which numbers of a cell differ after a repetition."""
    apart = {"seconds", "run_by", "experiment", "run"}
    if "score" not in again:
        return ["score"]
    return sorted(key for key in before.keys() & again.keys() - apart if not _is_repeated(before[key], again[key]))


def _is_repeated(before: Any, again: Any) -> bool:
    """Tell whether a number is the same; of a mean in an older results.json the clients' numbers are not known."""
    if isinstance(before, dict) and isinstance(again, dict):
        return before.items() <= again.items() if before.keys() == {"mean"} else before == again
    return bool(before == again)


def after_training(summary: Summary) -> Summary:
    """Return the same cells with the scores right after local training in place of the personal models'.

    A cell of which only the mean is known has none.
    """
    found = []
    for cell in summary["cells"]:
        if "per_client" in cell.get(AFTER, {}):
            found.append({**cell, "score": cell[AFTER]})
        elif "reason" in cell:
            found.append(cell)
    return {**summary, "cells": found}


def collect_rows(summary: Summary) -> dict[str, dict[str, Row]]:
    """Return all rows of the columns that have any cell, by column and row."""
    found: dict[str, dict[str, Row]] = {}
    for column in summary["columns"]:
        cells = [cell for cell in summary["cells"] if cell["column"] == column]
        for name in summary["rows"] if cells else []:
            done = [cell for cell in cells if cell["row"] == name and "score" in cell]
            failed = [cell for cell in cells if cell["row"] == name and "reason" in cell]
            # A method that runs on one seed applies; then its other reasons are that it gave up.
            gave_up = {cell["seed"]: cell["reason"] for cell in failed if done or cell.get("gave_up")}
            reason = failed[0]["reason"] if failed and not gave_up else ""
            found.setdefault(column, {})[name] = Row(name, done, gave_up=gave_up, not_applicable=reason)
    return found
