"""`pfedla reproduce`: the paper's tables and figures."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from pfedla.cli.options import Quiet, out_console, whole_numbers, words_of
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.runs.interruption import Interruption

if TYPE_CHECKING:
    from pfedla.reproduction.grid import Cell, Grid

RUNS = Path("runs/reproduce")
Name = Annotated[str | None, typer.Argument(help="Which table or figure; left out, they are listed.", metavar="NAME")]


def reproduce(
    name: Name = None,
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="Only these data sets, separated by commas.")] = "",
    methods: Annotated[str, typer.Option("--methods", "-a", help="Only these rows or algorithms, separated by commas.")] = "",
    clients: Annotated[str, typer.Option(help="Only the columns of so many clients: 10 or 100.")] = "",
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds (default: the budget in grid.toml).")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds separated by commas (default: as in grid.toml).")] = "",
    paper_budget: Annotated[bool, typer.Option("--paper-budget", help="The paper's rounds and epochs: days on a CPU.")] = False,
    accounting_only: Annotated[
        bool, typer.Option("--accounting-only", help="Compute what is sent beside the paper's numbers; nothing is trained.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Play a drawn cell of OUT/results.json that ran on such a CPU again, and compare."),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept; those that are there are not played again.")] = RUNS,
    out: Annotated[Path | None, typer.Option(help="Folder for table, figure and summary (default: RUNS/NAME).")] = None,
    quiet: Quiet = False,
) -> None:
    """A table or figure of the paper: play the runs that are missing, then write it beside the paper's numbers.

    Example: pfedla reproduce table1 --dataset fashion-mnist --clients 10 --seeds 0,1,2

    Ctrl-C stops it; the same command goes on. A run is shared by all tables that are made of it, and is not played where its
    numbers stand in OUT or beside it.
    """
    from pfedla.reproduction import campaign as play
    from pfedla.reproduction import grid as grids
    from pfedla.reproduction import paper_tables as report
    from pfedla.reproduction.paper_figures import write_figures
    from pfedla.runs.progress import Reporter

    if name is None:
        table = Table("name", "what", "runs")
        for each in grids.names():
            found = grids.load(each)
            table.add_row(each, found.title, str(len(grids.cells(found))))
        out_console.print(table)
        return
    grid = grids.load(name)
    if accounting_only:
        if grid.form != "retained":
            raise PfedlaError(f"{name} has no accounting; table3 and effect_of_k have")
        from pfedla.reproduction.accounting import accounting

        out_console.print(report.accounting_table(grid.title, accounting(grid, grids.paper(name))))
        return
    wanted = grids.Wanted(
        words_of(dataset), words_of(methods), whole_numbers("--clients", clients, "10"),
        whole_numbers("--seeds", seeds, "0,1,2"), rounds, paper_budget,
    )  # fmt: skip
    folder = out or runs / name
    cells = grids.cells(grid, wanted)
    if check:
        _check(grid, cells, folder, quiet)
        return
    stopped = None
    try:
        with (
            Interruption(quiet) as interruption,
            Reporter(sum(cell.experiment.rounds for cell in cells), quiet, again="the same command goes on") as reporter,
        ):
            play.play(runs, cells, reporter, interruption.wanted, play.standing(folder, grid))
    except Stopped as caught:
        stopped = caught  # what is finished is worth a table
    summary = play.write_summary(runs, name, grid, wanted, folder)
    paths = [*report.write_tables(summary, grids.paper(name), folder), *write_figures(summary, grids.paper(name), folder)]
    if not quiet:
        for table in report.terminal_tables(summary, grids.paper(name)):
            out_console.print(table)
        for path in paths:
            out_console.print(f"  {path}", soft_wrap=True)
    if stopped is not None:
        raise stopped


def _check(grid: "Grid", cells: "Sequence[Cell]", folder: Path, quiet: bool) -> None:
    """Play a drawn cell again, in a folder of its own, and compare it with what stands in results.json."""
    from pfedla.core.files import read_object
    from pfedla.reproduction import campaign as play
    from pfedla.runs.progress import Reporter

    if not (folder / play.SUMMARY).exists():
        raise PfedlaError(f"{folder / play.SUMMARY}: no such file; --out names the folder whose numbers are checked")
    stands = {play.place(cell): cell for cell in read_object(folder / play.SUMMARY)["cells"] if "accuracy" in cell}
    there = [cell for cell in cells if stands.get(play.place_of(cell), {}).get("run") == cell.folder]
    if not there:
        raise PfedlaError(f"{folder / play.SUMMARY} holds none of the cells that were asked for, with this budget")
    here = [cell for cell in there if play.ran_here(stands[play.place_of(cell)])]
    if not here:
        by = [stands[play.place_of(cell)]["run_by"] for cell in there]
        ran_on = sorted({f"torch {one['torch']}, {one['cpu']}, {one.get('cpu_model', 'its model not recorded')}" for one in by})
        raise PfedlaError(f"none of these cells is known to have run with this torch on such a CPU: {'; '.join(ran_on)}")
    cell = random.choice(here)
    before = stands[play.place_of(cell)]
    with (
        tempfile.TemporaryDirectory() as place,
        Interruption(quiet) as interruption,
        Reporter(cell.experiment.rounds, quiet) as reporter,
    ):
        play.play(Path(place), [cell], reporter, interruption.wanted)
        again = play.cell_summary(Path(place) / cell.folder, cell, grid)
    what = f"{cell.row}, {cell.column}, seed {cell.experiment.seed}"
    if differs := play.differences(before, again):
        versions = f"before {before['run_by']}, now {again.get('run_by')}"
        raise PfedlaError(f"{what}: {', '.join(differs)} are not what stands in {folder / play.SUMMARY}; {versions}")
    out_console.print(f"{what}: every number is what stands in {folder / play.SUMMARY}", soft_wrap=True)
