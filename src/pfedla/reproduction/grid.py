"""A table or figure of the paper as data: experiments/<name>/grid.toml says which runs it is made of."""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

import pfedla
from pfedla import algorithms
from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import safe_name
from pfedla.core.settings import Section
from pfedla.report.reading import Values, flatten
from pfedla.report.tables import Row
from pfedla.runs.experiment import Experiment, overlay

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
    def label(self) -> str:
        """What can be read in the name of the run's folder."""
        one = self.experiment
        return f"{one.algorithm.name}-{safe_name(one.data.dataset)}-{one.data.split_name}-r{one.rounds}-s{one.seed}"

    @property
    def folder(self) -> str:
        """The name of the run's folder: the same for the same experiment, whichever table asks for it."""
        identity = {**self.experiment.identity(), "rounds": self.experiment.rounds}
        return f"{self.label}-{hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]}"

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
    may_differ: Any = {"checkpoint": True, "engine": {"threads"}, "uploads": {"max_failed_rounds"}}
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
            parts = [
                grid.experiment,
                column.experiment,
                budget,
                row.experiment,
                column.row_experiment.get(row.name, {}),
            ]
            asked = {"seed": seed} | ({"rounds": wanted.rounds} if wanted.rounds else {})
            cells.append(Cell(row.name, column.name, Experiment.parse(reduce(overlay, [*parts, asked]))))
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


def collect_rows(summary: Summary) -> dict[str, dict[str, Row]]:
    """Return all rows of the columns that have any cell, by column and row."""
    found: dict[str, dict[str, Row]] = {}
    for column in summary["columns"]:
        cells = [cell for cell in summary["cells"] if cell["column"] == column]
        for name in summary["rows"] if cells else []:
            done = [cell for cell in cells if cell["row"] == name and "accuracy" in cell]
            failed = [cell for cell in cells if cell["row"] == name and "reason" in cell]
            # A method that runs on one seed applies; then its other reasons are that it gave up.
            gave_up = {cell["seed"]: cell["reason"] for cell in failed if done or cell.get("gave_up")}
            reason = failed[0]["reason"] if failed and not gave_up else ""
            found.setdefault(column, {})[name] = Row(name, done, gave_up=gave_up, not_applicable=reason)
    return found
