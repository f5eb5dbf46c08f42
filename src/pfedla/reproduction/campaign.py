"""The runs that a table or figure of the paper is made of (grid.toml), and results.json, which keeps their numbers."""

import hashlib
import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

import pfedla
from pfedla import algorithms
from pfedla.core.errors import GaveUpError, NotApplicableError, PfedlaError, Stopped, unknown
from pfedla.core.files import read_object, safe_name, write_text
from pfedla.core.settings import AUTO, Section
from pfedla.data import datasets
from pfedla.report import reading
from pfedla.report.reading import Values, flatten, read_alpha, read_result, read_rounds
from pfedla.report.tables import Row
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment, overlay, read_toml, upgrade
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT, RunFolder, describe_environment
from pfedla.runs.progress import Display
from pfedla.runs.run import Run

Stopping = Callable[[], bool]
COMMIT, REASON, SUMMARY = "commit.json", "reason.json", "results.json"
FORMAT = 3  # of results.json; 1 had no "format", 2 had accuracy for score
SNAPSHOTS = 21  # of alpha in a summary, at most
MACHINE = ("torch", "cpu", "cpu_model")  # a repetition on the same has the same bits
Summary = Mapping[str, Any]  # what results.json holds, or one of its cells
Paper = Mapping[str, Mapping[str, Mapping[str, float]]]  # column -> row -> mean, std, mib


class GridRow(Section):
    name: str
    experiment: Values  # what differs from the experiment that all cells have in common: the method


class Column(Section):
    name: str
    experiment: Values  # the data
    paper_experiment: Values = Field({})  # the paper's own, longer budget
    row_experiment: dict[str, Values] = Field({})  # what a row has in this column alone
    only: list[str] = Field([])  # the rows of this column; empty: all
    layer: str = ""  # the layer that a heat map shows
    retained: list[str] = Field([])  # the layers that the paper's k retains, in their order


class Grid(Section):
    """Rows (a method and its options) times columns (a data set, a number of clients) times seeds are its cells."""

    title: str
    form: Literal["table", "retained", "neighbours", "toy", "evolution", "heatmap", "layer-weights"]
    seeds: list[int] = Field([0], min_length=1)
    experiment: Values
    rows: list[GridRow] = Field(min_length=1)
    columns: list[Column] = Field(min_length=1)

    @property
    def shows_alpha(self) -> bool:
        return self.form in ("toy", "evolution", "heatmap", "layer-weights")


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """The name of the run's folder: the same for the same experiment, whichever table asks for it."""
        one, data = self.experiment, self.experiment.data
        identity = json.dumps({**one.identity(), "rounds": one.rounds}, sort_keys=True)
        label = f"{one.algorithm.name}-{safe_name(data.dataset)}-{data.split_name}-r{one.rounds}-s{one.seed}"
        return f"{label}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    @property
    def place(self) -> Values:
        """Where the cell stands in results.json."""
        return {"row": self.row, "column": self.column, "seed": self.experiment.seed, "run": self.folder}

    @property
    def words(self) -> dict[str, set[Any]]:
        """By what a cell is chosen."""
        data, method = self.experiment.data, self.experiment.algorithm.name
        return {"data set": {data.dataset}, "method": {self.row, method}, "number of clients": {data.clients}}

    @cached_property
    def settings(self) -> Values:
        return resolve(self.experiment)


def resolve(experiment: Experiment) -> Values:
    """Return all that decides the numbers of a run, as section.key -> value, defaults included."""
    may_differ: Any = {"tuned_trials": True, "checkpoint": True}
    may_differ |= {"engine": {"threads"}, "uploads": {"max_failed_rounds"}}
    section = experiment.algorithm
    options = {"name": section.name, **algorithms.resolve_options(section.name, section.options)}
    return flatten(experiment.model_dump(exclude=may_differ) | {"algorithm": options})


def home() -> Path:
    """Return where the experiments are: in the package, or beside it in a checkout."""
    package = Path(pfedla.__file__).parent
    places = (package / "experiments", package.parents[1] / "experiments")
    return next((place for place in places if place.is_dir()), package)


def list_names() -> list[str]:
    return sorted(path.parent.name for path in home().glob("*/grid.toml"))


def load_grid(name: str) -> Grid:
    if name not in list_names():
        raise unknown("experiment", name, list_names())
    return Grid.model_validate(tomllib.loads((home() / name / "grid.toml").read_text(encoding="utf-8")))


def load_paper(name: str) -> Paper:
    """Return the paper's numbers."""
    path = home() / name / "paper.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@dataclass(frozen=True)
class Wanted:
    """Which cells are asked for, and with what budget; an empty field means as in the grid."""

    datasets: Collection[str] = ()
    methods: Collection[str] = ()
    clients: Collection[int] = ()
    seeds: Collection[int] = ()
    rounds: int | None = None
    paper_budget: bool = False


def list_cells(grid: Grid, wanted: Wanted = Wanted()) -> list[Cell]:  # noqa: B008 (frozen)
    """Return the wanted cells seed by seed, so that a table is complete as early as possible."""
    pairs = [(row, column) for column in grid.columns for row in grid.rows if row.name in (column.only or [row.name])]
    cells = []
    for seed in wanted.seeds or grid.seeds:
        for row, column in pairs:
            budget = column.paper_experiment if wanted.paper_budget else {}
            in_cell = column.row_experiment.get(row.name, {})
            asked = {"seed": seed} | ({"rounds": wanted.rounds} if wanted.rounds else {})
            parts = [grid.experiment, column.experiment, budget, row.experiment, in_cell, asked]
            cells.append(Cell(row.name, column.name, Experiment.parse(reduce(overlay, parts))))
    found = cells
    chosen = {"data set": wanted.datasets, "method": wanted.methods, "number of clients": wanted.clients}
    for kind, words in chosen.items():
        known = set().union(*(cell.words[kind] for cell in cells))
        for word in words:
            if word not in known:
                raise unknown(f"{kind} in this experiment", word, sorted(map(str, known)))
        found = [cell for cell in found if not words or cell.words[kind] & set(words)]
    if not found:
        raise PfedlaError("no cell of this experiment has the data set, method and clients that were asked for")
    return found


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
    cells = {key: list(map(reading.upgrade, summary[key])) for key in ("cells", "other_cells") if key in summary}
    return summary | cells


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


def run_missing(
    runs: Path, cells: list[Cell], display: Display, stopping: Stopping = lambda: False, stored: Sequence[Stored] = ()
) -> None:
    """Run every cell that is neither in `runs` nor stored. A run that was stopped is resumed."""
    missing = [cell for cell in cells if not is_done(runs, cell) and not match(cell, stored)]
    for name in dict.fromkeys(cell.experiment.data.dataset for cell in missing):
        if not datasets.state_of(name).here:
            datasets.load(name)  # raises before hours are spent on the others
    runs.mkdir(parents=True, exist_ok=True)
    load = lru_cache(maxsize=1)(datasets.load)  # one at a time: CIFAR is large
    for cell in cells:
        # It may have been run since, by another process or as another cell of the same experiment.
        if cell not in missing or is_done(runs, cell):
            display.skip(cell.experiment.rounds)
            continue
        if stopping():
            raise Stopped
        path, what = runs / cell.folder, f"{cell.row}, {cell.column}"
        display.begin(what, cell.experiment.seed)
        try:
            built = build(cell.experiment, load(cell.experiment.data.dataset))
            Run(built, RunFolder(path, resume=True), display=display, stopping=stopping).complete()
            write_text(path / COMMIT, json.dumps(describe_version()) + "\n")
        except (NotApplicableError, GaveUpError) as error:
            display.say(f"{what}: {error}")
            path.mkdir(exist_ok=True)
            reason = {"reason": str(error), "gave_up": isinstance(error, GaveUpError)}
            write_text(path / REASON, json.dumps(reason) + "\n")


def describe_version() -> dict[str, str]:
    """Return the version of pfedla, and in a checkout the commit."""
    where = Path(pfedla.__file__).parents[2]
    words = ["git", "-C", str(where), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    found = subprocess.run(words, capture_output=True, text=True) if (where / ".git").exists() else None
    return {"pfedla": pfedla.__version__} | ({"commit": found.stdout.strip()} if found and not found.returncode else {})


def write_summary(runs: Path, name: str, grid: Grid, wanted: Wanted, folder: Path) -> Values:
    """Write results.json: what is known of each cell, all that tables and figures are made of."""
    folder.mkdir(parents=True, exist_ok=True)
    before, stored = read_cells(folder / SUMMARY), find_stored(folder, grid)
    seeds = {*(wanted.seeds or grid.seeds), *(one.content["seed"] for one in before)}
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
    summary |= {"columns": columns, "rows": rows}
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
        **{key: result[key] for key in ("task", "score", "traffic", "leaked_test_share", "refused_uploads")},
        "score_after_training": result["score_after_training"]["mean"],
        "subset": Path(result["subset"]).name,
        "curve": [[line["round"], line["score"]["mean"]] for line in lines],
        "retained": dict(retained),
        "seconds": round(result["seconds"]["total"], 1),
        "run_by": read_object(run / COMMIT) | {key: machine[key] for key in (*MACHINE, "python") if key in machine},
        "experiment": experiment.model_dump(exclude={"rounds", "checkpoint", "faults", "uploads"}),
        "rounds": experiment.rounds,
    }
    return {**summary, "alpha": _thin_alpha(run)} if grid.shows_alpha else summary


def _thin_alpha(run: Path) -> Values | None:
    """Return the weights of at most 21 snapshots, and the classes of the clients."""
    if (alpha := read_alpha(run)) is None:
        return None
    last = len(alpha.rounds) - 1
    kept = sorted({*range(0, last + 1, max(1, -(-last // (SNAPSHOTS - 1)))), last})
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
    return sorted(key for key in before.keys() & again.keys() - apart if before[key] != again[key])


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
