"""A table or figure of the paper as data: experiments/<name>/grid.toml says which runs it is made of.

Rows (a method and its options) times columns (a data set, a number of clients) times seeds; each is a cell, one experiment.
"""

import hashlib
import json
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import pfedla
from pfedla import algorithms
from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import safe_name
from pfedla.runs.experiment import Experiment
from pfedla.runs.overrides import overlay

GRID, PAPER = "grid.toml", "paper.toml"
Form = Literal["table", "retained", "neighbours", "toy", "evolution", "heatmap", "layer-weights"]
Values = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Row(_Part):
    """A method: what the paper calls it, and what differs from the common experiment."""

    name: str
    experiment: Values


class Column(_Part):
    """A data set or setting. `paper_experiment` is what the paper's own, longer run has instead."""

    name: str
    experiment: Values
    paper_experiment: Values = {}
    row_experiment: dict[str, Values] = {}  # what a row has in this column alone
    only: list[str] = []  # the rows that are run in this column; empty: all
    layer: str = ""  # the layer that a heat map shows
    retained: list[str] = []  # which layers the paper's k keeps at home, in their order


class Grid(_Part):
    title: str
    form: Form
    seeds: Annotated[list[int], Field(min_length=1)] = [0]
    experiment: Values  # common to all cells
    rows: Annotated[list[Row], Field(min_length=1)]
    columns: Annotated[list[Column], Field(min_length=1)]
    rounds_of_accounting: int = 75  # of the table whose MiB are computed, not run


@dataclass(frozen=True)
class Cell:
    row: str
    column: str
    experiment: Experiment

    @property
    def folder(self) -> str:
        """Its run's folder: the same for the same experiment, whichever table asks for it."""
        one = self.experiment
        options = algorithms.resolve_options(one.algorithm.name, one.algorithm.options)
        decides = {**one.numbers(), "rounds": one.rounds, "algorithm": {"name": one.algorithm.name, **options}}
        digest = hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:8]
        data = one.data
        return f"{one.algorithm.name}-{safe_name(data.dataset)}-{data.split_name}-r{one.rounds}-s{one.seed}-{digest}"


def home() -> Path:
    """Where the experiments are: in the package, or beside it in a checkout."""
    package = Path(pfedla.__file__).parent
    return next((place for place in (package / "experiments", package.parents[1] / "experiments") if place.is_dir()), package)


def names() -> list[str]:
    return sorted(path.parent.name for path in home().glob(f"*/{GRID}"))


def load(name: str) -> Grid:
    if name not in names():
        raise unknown("experiment", name, names())
    path = home() / name / GRID
    try:
        return Grid.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise PfedlaError(f"{path}: {error}") from None


def paper(name: str) -> dict[str, dict[str, Any]]:
    """The paper's numbers: column -> row -> value."""
    path = home() / name / PAPER
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@dataclass(frozen=True)
class Wanted:
    """Which cells are asked for, and with what budget; what is left out is as in the grid."""

    datasets: Collection[str] = ()
    methods: Collection[str] = ()
    clients: Collection[int] = ()
    seeds: Collection[int] = ()
    rounds: int | None = None
    paper_budget: bool = False


def cells(grid: Grid, wanted: Wanted = Wanted()) -> list[Cell]:  # noqa: B008 (frozen)
    """Seed by seed, so that a table is whole as early as it can be."""
    found = []
    for seed in wanted.seeds or grid.seeds:
        for column in grid.columns:
            for row in grid.rows:
                if column.only and row.name not in column.only:
                    continue
                cell = Cell(row.name, column.name, _experiment(grid, row, column, seed, wanted))
                if _is_wanted(cell, wanted):
                    found.append(cell)
    _check(grid, wanted)
    if not found:
        raise PfedlaError("no run of this experiment is of all that was asked for: data sets, methods and clients")
    return found


def _experiment(grid: Grid, row: Row, column: Column, seed: int, wanted: Wanted) -> Experiment:
    values: Values = {"seed": seed}
    budget = column.paper_experiment if wanted.paper_budget else {}
    for part in (grid.experiment, column.experiment, budget, row.experiment, column.row_experiment.get(row.name, {})):
        values = overlay(values, part)
    if wanted.rounds is not None:
        values["rounds"] = wanted.rounds
    return Experiment.parse(values)


def _is_wanted(cell: Cell, wanted: Wanted) -> bool:
    one = cell.experiment
    return (
        (not wanted.datasets or one.data.dataset in wanted.datasets)
        and (not wanted.methods or cell.row in wanted.methods or one.algorithm.name in wanted.methods)
        and (not wanted.clients or one.data.clients in wanted.clients)
    )


def _check(grid: Grid, wanted: Wanted) -> None:
    """A word that fits nothing is a mistake."""
    every = [_experiment(grid, row, column, 0, Wanted()) for column in grid.columns for row in grid.rows]
    choices: dict[str, tuple[Collection[object], list[str]]] = {
        "data set": (wanted.datasets, [one.data.dataset for one in every]),
        "method": (wanted.methods, [*(row.name for row in grid.rows), *(one.algorithm.name for one in every)]),
        "number of clients": (wanted.clients, [str(one.data.clients) for one in every if one.data.clients != "auto"]),
    }
    for kind, (asked, there) in choices.items():
        for word in asked:
            if str(word) not in there:
                raise unknown(f"{kind} in this experiment", word, dict.fromkeys(there))
