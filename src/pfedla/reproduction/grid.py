"""What a table or figure of the paper is made of: grid.toml says rows, columns and seeds; their cells are the runs."""

import hashlib
import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

import pfedla
from pfedla import algorithms
from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import safe_name
from pfedla.core.settings import Section
from pfedla.report.reading import Values, flatten
from pfedla.runs.experiment import FREE, Experiment, overlay

Paper = Mapping[str, Mapping[str, Mapping[str, float]]]  # column -> row -> mean, std, mib


class GridRow(Section):
    name: str
    experiment: Values  # what differs from the experiment that all cells have in common: the method
    seeds: list[int] = Field([])  # of this row; empty: the grid's


class Column(Section):
    name: str
    experiment: Values  # the data
    paper_experiment: Values = Field({})  # the paper's own, longer budget
    only: list[str] = Field([])  # the rows of this column; empty: all
    tuned: str = ""  # a file beside grid.toml that `pfedla tune` wrote, perhaps one for each {seed}
    seeds: list[int] = Field([])  # the only seeds of this column; empty: all
    order: list[int] = Field(
        [0, 1], min_length=2, max_length=2
    )  # place in a queue: of the first seed, and of the others
    layer: str = ""  # the layer that a heat map shows
    retained: list[str] = Field([])  # the layers that the paper's k retains, in their order
    attacks: dict[str, list[float]] = Field({})  # the shares of attackers, by attack: a column each


class Grid(Section):
    """Rows (a method and its options) times columns (a data set, a number of clients) times seeds are its cells."""

    title: str
    form: Literal[
        "table",
        "retained",
        "neighbours",
        "toy",
        "evolution",
        "heatmap",
        "layer-weights",
        "sites",
        "attacks",
        "frontier",
        "privacy",
    ]
    source: str = "paper"  # whose numbers paper.toml has
    seeds: list[int] = Field([0], min_length=1)
    folder: str = ""  # where the files are that its columns name
    experiment: Values
    rows: list[GridRow] = Field(min_length=1)
    columns: list[Column] = Field(min_length=1)
    attacks: dict[str, Values] = Field({})  # the settings of [faults] by name

    @property
    def all_seeds(self) -> list[int]:
        return sorted({*self.seeds, *(seed for row in self.rows for seed in row.seeds)})

    def attack(self, column: Column) -> list[Column]:
        """Return a column and those with its attacks. What a client trains alone is the same under attack."""
        taught = [row.name for row in self.rows if row.experiment["algorithm"]["name"] != "local"]
        found = [column]
        for attack, share in ((attack, share) for attack, shares in column.attacks.items() for share in shares):
            experiment = overlay(column.experiment, {"faults": {**self.attacks[attack], "attackers": share}})
            changed = {"name": f"{column.name}, {attack}, {100 * share:g} %", "experiment": experiment, "only": taught}
            found.append(column.model_copy(update=changed))
        return found

    @property
    def shows_alpha(self) -> bool:
        return self.form in ("toy", "evolution", "heatmap", "layer-weights", "sites")


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
        label = f"{safe_name(one.algorithm.name)}-{safe_name(data.dataset)}-{data.split_name}-r{one.rounds}-s{one.seed}"
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
    """Return what decides the numbers of an honest run, as section.key -> value, defaults included."""
    section = experiment.algorithm
    options = {"name": section.name, **algorithms.resolve_options(section.name, section.options)}
    return flatten(experiment.model_dump(exclude=FREE | {"uploads": True}) | {"algorithm": options})


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
    grid = Grid.model_validate(tomllib.loads((home() / name / "grid.toml").read_text(encoding="utf-8")))
    columns = [attacked for column in grid.columns for attacked in grid.attack(column)]
    return grid.model_copy(update={"folder": str(home() / name), "columns": columns})


def read_tuned(grid: Grid, column: Column, seed: int) -> dict[str, Values]:
    """Return the options that were tuned for a column and seed, by method."""
    if not column.tuned:
        return {}
    path = Path(grid.folder) / column.tuned.format(seed=seed)
    tuned = _read_tuned(path)
    asked = flatten(reduce(overlay, [grid.experiment, column.experiment]))
    asked |= {"seed": seed} if "{seed}" in column.tuned else {}
    found = flatten(tuned)
    for key in ("seed", "rounds", "data.dataset", "training.local_epochs", "training.batch_size"):
        if asked.get(key, found[key]) != found[key]:
            raise PfedlaError(f"{path} was tuned with {key} = {found[key]}, the column has {asked[key]}")
    methods: dict[str, Values] = {}
    for name in [one for one in tuned["methods"] if one in tuned]:  # a method may not fit
        own = dict(tuned[name])
        beside = {key: own.pop(key) for key in ("training", "tuned_trials")}
        methods[name] = {"algorithm": own, **beside}
    return methods


@lru_cache(maxsize=64)
def _read_tuned(path: Path) -> Values:
    if not path.exists():
        raise PfedlaError(f"{path} is missing: `pfedla tune` writes it")
    return tomllib.loads(path.read_text(encoding="utf-8"))


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
    for seed in wanted.seeds or grid.all_seeds:
        for row, column in pairs:
            if not wanted.seeds and (seed not in (row.seeds or grid.seeds) or seed not in (column.seeds or [seed])):
                continue
            budget = column.paper_experiment if wanted.paper_budget else {}
            tuned = read_tuned(grid, column, seed).get(row.experiment["algorithm"]["name"], {})
            asked = {"seed": seed} | ({"rounds": wanted.rounds} if wanted.rounds else {})
            parts = [grid.experiment, column.experiment, budget, row.experiment, tuned, asked]
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
