"""Run the cells of tables as one queue: a process per core, each takes the next cell that no other process runs."""

import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from pfedla.core.errors import GaveUpError, InUseError, NotApplicableError, PfedlaError, Stopped
from pfedla.core.files import write_text
from pfedla.core.settings import AUTO
from pfedla.data import datasets
from pfedla.report.reading import Values, read_rounds
from pfedla.reproduction.grid import Cell, Grid, Wanted, list_cells, load_grid
from pfedla.reproduction.summaries import (
    COMMIT,
    REASON,
    SUMMARY,
    Stored,
    describe_version,
    find_stored,
    is_done,
    match,
    read_cells,
    write_summary,
)
from pfedla.runs.build import build
from pfedla.runs.folder import RunFolder
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Display
from pfedla.runs.run import Run

Stopping = Callable[[], bool]
POLL = 1.0  # seconds between two looks at what other processes have done
WRITE_AFTER = 60.0  # seconds between two writes of results.json


class Table(NamedTuple):
    """A table or figure, which of its cells are wanted, and where its numbers go."""

    name: str
    grid: Grid
    wanted: Wanted
    folder: Path  # of results.json, the tables and the figure

    def write_summary(self, runs: Path) -> Values:
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".lock"):  # several processes write it
            return write_summary(runs, self.name, self.grid, self.wanted, self.folder)

    def find_stored(self) -> list[Stored]:
        return find_stored(self.folder, self.grid)


Entry = tuple[Table, Cell]


def plan_tables(names: Iterable[str], wanted: Wanted, out: Path) -> list[Table]:
    return [Table(name, load_grid(name), wanted, out / name) for name in names]


def plan_queue(tables: Sequence[Table]) -> list[Entry]:
    """Return the cells of all tables in queue order; a cell that several tables ask for appears once."""
    found: dict[str, tuple[int, Entry]] = {}
    for table in tables:
        orders = {column.name: column.order for column in table.grid.columns}
        for cell in list_cells(table.grid, table.wanted):
            first, later = orders[cell.column]
            is_first = cell.experiment.seed == min(table.grid.seeds)
            found.setdefault(cell.folder, (first if is_first else later, (table, cell)))
    return [entry for _, entry in sorted(found.values(), key=lambda one: one[0])]


def list_missing(queue: Sequence[Entry], runs: Path) -> list[Entry]:
    """Return the cells that are neither finished in `runs` nor stored in a results.json."""
    stored = {name: table.find_stored() for name, table in {table.name: table for table, _ in queue}.items()}
    left = [(table, cell) for table, cell in queue if not is_done(runs, cell)]
    return [(table, cell) for table, cell in left if not match(cell, stored[table.name])]


def run_queue(queue: Sequence[Entry], runs: Path, display: Display, stopping: Stopping, jobs: int) -> None:
    """Run every cell that is missing, in `jobs` processes of low priority; a run that was stopped is resumed."""
    missing = list_missing(queue, runs)
    for name in dict.fromkeys(cell.experiment.data.dataset for _, cell in missing):
        if not datasets.state_of(name).here:
            datasets.load(name)  # raises before hours are spent on the others
    runs.mkdir(parents=True, exist_ok=True)
    display.skip(sum(cell.experiment.rounds for _, cell in queue) - sum(cell.experiment.rounds for _, cell in missing))
    lower_priority()
    if min(jobs, len(missing)) <= 1:
        run_cells(missing, runs, display, stopping)
    else:
        run_in_processes(missing, runs, display, stopping, min(jobs, len(missing)))


def run_cells(
    entries: Sequence[Entry], runs: Path, display: Display | None, stopping: Stopping, threads: int = 0
) -> None:
    """Run the cells in their order, beside other processes that do the same; return when all are done.

    A cell that cannot be run is left out; the error is raised after the others.
    """
    load, written = lru_cache(maxsize=1)(datasets.load), time.monotonic()  # one at a time: CIFAR is large
    left, failed = list(entries), dict[str, PfedlaError]()
    while left:
        busy = []
        for table, cell in left:
            if is_done(runs, cell):
                continue
            if stopping():
                raise Stopped
            try:
                run_cell(cell, runs, load, display, stopping, threads)
            except InUseError:
                busy.append((table, cell))
                continue
            except PfedlaError as error:
                failed[f"{cell.row}, {cell.column}, seed {cell.experiment.seed}"] = error
            if time.monotonic() - written > WRITE_AFTER:
                table.write_summary(runs)
                written = time.monotonic()
        left = [entry for entry in busy if not is_done(runs, entry[1])]
        if left:
            time.sleep(POLL)
    for what, why in failed.items():
        raise PfedlaError(f"{len(failed)} runs failed; {what}: {why}")


def run_cell(
    cell: Cell, runs: Path, load: Callable[[str, str], Any], display: Display | None, stopping: Stopping, threads: int
) -> None:
    path, what = runs / cell.folder, f"{cell.row}, {cell.column}"
    if is_running(runs, cell):  # before anything is built
        raise InUseError(f"{path} is in use by another process")
    if display:
        display.begin(what, cell.experiment.seed)
    engine = cell.experiment.engine.model_copy(update={"threads": threads})
    experiment = cell.experiment.model_copy(update={"engine": engine})
    try:
        built = build(experiment, load(experiment.data.dataset, experiment.data.missing))
        folder = RunFolder(path, resume=True)
        with Run(built, folder, display=display, stopping=stopping, pictures=False) as run:
            for _ in run:
                pass
            run.finish()  # then still under the lock: the next process to hold it removes files that are half written
            write_text(path / COMMIT, json.dumps(describe_version()) + "\n")
    except (NotApplicableError, GaveUpError) as error:
        say = display.say if display else partial(print, file=sys.stderr, flush=True)
        say(f"{what}: {error}")
        path.mkdir(exist_ok=True)
        reason = {"reason": str(error), "gave_up": isinstance(error, GaveUpError)}
        write_text(path / REASON, json.dumps(reason) + "\n")


def run_in_processes(entries: Sequence[Entry], runs: Path, display: Display, stopping: Stopping, jobs: int) -> None:
    """Run the cells in processes of their own, and show how far all are."""
    context, threads = multiprocessing.get_context("spawn"), max(1, (os.cpu_count() or 1) // jobs)
    workers = [context.Process(target=work, args=(entries, runs, threads, os.getpid())) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        while any(worker.is_alive() for worker in workers) and not stopping():
            follow(entries, runs, display)
            time.sleep(POLL)
    finally:
        for worker in workers:
            worker.terminate()  # those that are still at work finish their round
        for worker in workers:
            worker.join()
    follow(entries, runs, display)
    if stopping():
        raise Stopped
    if failed := [worker.exitcode for worker in workers if worker.exitcode]:
        raise GaveUpError(f"{len(failed)} of {jobs} processes ended with an error (see above); the others finished")


def work(entries: Sequence[Entry], runs: Path, threads: int, parent: int) -> None:
    """Take cells until all are done; stop after the round at hand if the parent has ended."""
    lower_priority()
    describe_version()  # now: the checkout may change while the cells run
    with Interruption(quiet=True) as signals:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent passes it on
        try:
            run_cells(entries, runs, None, lambda: signals.wanted() or os.getppid() != parent, threads)
        except Stopped:
            return
        except PfedlaError as error:
            sys.exit(f"pfedla: {error}")


def lower_priority() -> None:
    """Leave the machine to everything else: a campaign takes days."""
    if hasattr(os, "nice"):
        os.nice(19 - os.nice(0))


def follow(entries: Sequence[Entry], runs: Path, display: Display) -> None:
    """Show how many rounds of the cells are done."""
    done = sum(is_done(runs, cell) for _, cell in entries)
    rounds = sum(count_rounds(runs, cell) for _, cell in entries)
    display.follow(f"{done} of {len(entries)} runs", display.skipped + rounds)


def count_rounds(runs: Path, cell: Cell) -> int:
    """Return how many rounds of a cell are done, by its last evaluation."""
    if is_done(runs, cell):
        return cell.experiment.rounds
    lines = read_rounds(runs / cell.folder)
    return int(lines[-1]["round"]) if lines else 0


def is_running(runs: Path, cell: Cell) -> bool:
    """Tell whether another process holds the lock of the cell's run."""
    path = runs / cell.folder / ".lock"
    if not path.exists():
        return False
    try:
        with FileLock(path).acquire(timeout=0):
            return False
    except Timeout:
        return True


def describe_status(queue: Sequence[Entry], runs: Path) -> list[list[str]]:
    """Return a table with a line per column: runs that are done, running and left, and the hours to go on one core."""
    missing = {cell.folder for _, cell in list_missing(queue, runs)}
    lines = [["table", "column", "runs", "done", "running", "left", "hours to go"]]
    groups: dict[tuple[str, str], tuple[Table, list[Cell]]] = {}
    for table, cell in queue:
        groups.setdefault((table.name, cell.column), (table, []))[1].append(cell)
    hours = []
    for (name, column), (table, cells) in groups.items():
        left = [cell for cell in cells if cell.folder in missing]
        running = [
            f"{cell.row}, seed {cell.experiment.seed} ({count_rounds(runs, cell)}/{cell.experiment.rounds})"
            for cell in left
            if is_running(runs, cell)
        ]
        rounds = sum(cell.experiment.rounds - count_rounds(runs, cell) for cell in left)
        pace = measure_pace(table, column, cells, runs)
        hours.append(rounds * pace / 3600)
        shown = "?" if math.isnan(hours[-1]) and left else f"{hours[-1]:.1f}" if left else "0"
        counts = (len(cells), len(cells) - len(left), "; ".join(running) or "–", len(left))
        lines.append([name, column, *map(str, counts), shown])
    known = sum(one for one in hours if not math.isnan(one))
    return [
        *lines,
        ["all", "", *(str(sum(int(line[at]) for line in lines[1:])) for at in (2, 3)), "", "", f"{known:.1f}"],
    ]


def measure_pace(table: Table, column: str, cells: Sequence[Cell], runs: Path) -> float:
    """Return the mean seconds of a round in a column, by its finished and its running cells; nan if there are none."""
    stored = [one.content for one in read_cells(table.folder / SUMMARY) if one.content["column"] == column]
    paces = [one["seconds"] / one["rounds"] for one in stored if one.get("seconds") and _fits(one, cells)]
    for cell in cells:
        if lines := read_rounds(runs / cell.folder):
            paces.append(statistics.mean(sum(line["seconds"].values()) for line in lines))
    return statistics.mean(paces) if paces else math.nan


def _fits(stored: Values, cells: Sequence[Cell]) -> bool:
    """Tell whether a round of a stored cell takes as long as one of the cells."""
    theirs, ours = stored["experiment"], cells[0].experiment
    asked = (ours.training.local_epochs, ours.data.samples_per_client, ours.participation)
    found = (theirs["training"]["local_epochs"], theirs["data"]["samples_per_client"], theirs["participation"])
    return all(value in (AUTO, known) for value, known in zip(asked, found, strict=True))
