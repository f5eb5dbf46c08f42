"""The queue of a campaign: its order, its processes, and that a kill changes no number."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from filelock import FileLock

from pfedla.core.errors import GaveUpError, Stopped
from pfedla.reproduction import campaign, summaries
from pfedla.reproduction.campaign import Entry, Table, plan_queue
from pfedla.reproduction.grid import Grid, Wanted, list_cells
from pfedla.runs.progress import Display

GRID = """
title = "queue"
form = "table"
seeds = [0]
experiment = { rounds = 30, evaluate_every = 5, training.local_epochs = 1, data = { dataset = "digits", clients = 4 } }

[[columns]]
name = "later"
order = [3, 3]
seeds = [0]
experiment.data.partition = "dominant"

[[columns]]
name = "first"
order = [0, 2]
experiment.data.partition = "classes"

[[columns]]
name = "second"
order = [1, 2]
experiment.data.partition = "iid"

[[rows]]
name = "Local"
seeds = [0, 1]
experiment.algorithm.name = "local"

[[rows]]
name = "FedAvg"
experiment.algorithm.name = "fedavg"
"""
DRIVER = """
import sys
from pathlib import Path
from test_campaign import run_all

if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
"""


def queue(folder: Path) -> list[Entry]:
    grid = Grid.model_validate(tomllib.loads(GRID))
    return plan_queue([Table("queue", grid, Wanted(), folder / "out" / "queue")])


def run_all(folder: Path, jobs: int = 2) -> None:
    found = queue(folder)
    campaign.run_queue(found, folder / "runs", Display(1, quiet=True), lambda: False, jobs)
    found[0][0].write_summary(folder / "runs")


def test_the_order_of_a_queue(tmp_path: Path) -> None:
    order = [(cell.column, cell.row, cell.experiment.seed) for _, cell in queue(tmp_path)]
    assert order == [
        ("first", "Local", 0),
        ("first", "FedAvg", 0),
        ("second", "Local", 0),
        ("second", "FedAvg", 0),
        ("first", "Local", 1),
        ("second", "Local", 1),
        ("later", "Local", 0),
        ("later", "FedAvg", 0),
    ]


def test_cells_of_two_tables_are_run_once(tmp_path: Path) -> None:
    grid = Grid.model_validate(tomllib.loads(GRID))
    both = [Table(name, grid, Wanted(), tmp_path / name) for name in ("one", "two")]
    assert [table.name for table, _ in plan_queue(both)] == ["one"] * len(list_cells(grid))


def in_use(folder: Path) -> FileLock:
    folder.mkdir(parents=True)
    return FileLock(folder / ".lock")


def test_the_status_counts_and_estimates(tmp_path: Path) -> None:
    some = [entry for entry in queue(tmp_path) if entry[1].column == "first"]
    runs = tmp_path / "runs"
    campaign.run_cells(some[:1], runs, Display(1, quiet=True), lambda: False)
    with in_use(runs / some[1][1].folder):
        head, line, everything = campaign.describe_status(some, runs)
    found = dict(zip(head, line, strict=True))
    assert (found["runs"], found["done"], found["left"]) == ("3", "1", "2")
    assert found["running"] == "FedAvg, seed 0 (0/30)"
    assert float(found["hours to go"]) >= 0
    assert everything[2:4] == ["3", "1"]


def test_a_cell_in_use_by_another_process_is_waited_for(tmp_path: Path) -> None:
    entry, runs = queue(tmp_path)[0], tmp_path / "runs"
    calls = []

    def stopping() -> bool:
        calls.append(1)
        return len(calls) > 1

    with in_use(runs / entry[1].folder), pytest.raises(Stopped):
        campaign.run_cells([entry], runs, Display(1, quiet=True), stopping)
    assert not summaries.is_done(runs, entry[1])


@pytest.mark.slow
def test_a_process_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PFEDLA_DATA_DIR", str(tmp_path))
    some = queue(tmp_path)[:2]
    broken = [
        (table, type(cell)(cell.row, cell.column, cell.experiment.model_copy(update={"model": "no-such-model"})))
        for table, cell in some
    ]
    with pytest.raises(GaveUpError, match="2 of 2"):
        campaign.run_queue(broken, tmp_path / "runs", Display(1, quiet=True), lambda: False, jobs=2)


@pytest.mark.slow
def test_a_campaign_that_is_killed_three_times_ends_with_the_same_numbers(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    run_all(straight, jobs=1)
    program = [sys.executable, "-c", DRIVER, str(killed)]
    where = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    for position in range(4):
        process = subprocess.Popen(program, env=os.environ | {"PYTHONPATH": where}, start_new_session=True)
        if position == 3:
            assert process.wait(300) == 0
            break
        wait_for_lines(killed / "runs", 4 * (position + 1))
        if position == 1:  # the parent alone: its workers end by themselves
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    one, other = ([strip(cell) for cell in read(folder)] for folder in (straight, killed))
    assert len(one) == 8
    assert one == other


def wait_for_lines(runs: Path, count: int) -> None:
    for _ in range(1200):
        if sum(len(path.read_bytes().splitlines()) for path in runs.glob("*/rounds.jsonl")) >= count:
            return
        time.sleep(0.05)
    pytest.fail("the campaign does not get on")


def read(folder: Path) -> list[dict]:
    return list(json.loads((folder / "out" / "queue" / "results.json").read_text())["cells"])


def strip(cell: dict) -> dict:
    return {key: value for key, value in cell.items() if key not in ("seconds", "run_by")}
