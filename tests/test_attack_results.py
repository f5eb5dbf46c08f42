"""Tables of attacks: the columns of a grid, honest clients against the same clients without attack, the picture."""

import csv
from pathlib import Path
from typing import Any

import pytest

from pfedla.core.faults import choose_attackers
from pfedla.core.settings import Faults
from pfedla.reproduction import grid as grids
from pfedla.reproduction.attack_results import collect_attacks, draw_weights, tabulate_attacks
from pfedla.reproduction.campaign import Table, run_cells
from pfedla.reproduction.grid import Wanted, list_cells, load_grid
from pfedla.reproduction.paper_results import list_tables, write_figures, write_tables
from pfedla.reproduction.summaries import match, read_cells
from pfedla.runs.folder import RunFolder

GRID = """
title = "small"
form = "attacks"
seeds = [0, 1]

[experiment]
rounds = 2
model = "mlp"
training.local_epochs = 1

[attacks]
"sign flip" = { attack = "sign-flip" }
"late" = { attack = "sign-flip", attack_from = 2 }

[[columns]]
name = "Digits, few"
experiment.data = { dataset = "digits", clients = 5, samples_per_client = 30 }
attacks = { "sign flip" = [0.2, 0.4], late = [0.2] }

[[rows]]
name = "Local"
experiment.algorithm = { name = "local" }

[[rows]]
name = "pFedLA"
experiment.algorithm = { name = "pfedla" }
"""


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(grids, "home", lambda: tmp_path)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "grid.toml").write_text(GRID)
    return Table("small", load_grid("small"), Wanted(), tmp_path / "results" / "small")


def test_a_column_is_repeated_with_each_of_its_attacks(table: Table) -> None:
    columns = [f"Digits, few{end}" for end in ("", ", sign flip, 20 %", ", sign flip, 40 %", ", late, 20 %")]
    assert [column.name for column in table.grid.columns] == columns
    cells = list_cells(table.grid, Wanted(seeds=[0]))
    assert [cell.row for cell in cells] == ["Local", *["pFedLA"] * 4]  # under attack one learns alone as without
    assert cells[0].experiment.faults == Faults()
    assert cells[-1].experiment.faults == Faults(attack="sign-flip", attackers=0.2, attack_from=2)


def test_from_runs_to_tables_and_figures(table: Table, tmp_path: Path) -> None:
    """And every stored cell is recognised again, and no other one."""
    runs, cells = tmp_path / "runs", list_cells(table.grid)
    run_cells([(table, cell) for cell in cells], runs, None, lambda: False, 1)
    summary = table.write_summary(runs)
    stored = read_cells(table.folder / "results.json")
    for cell in cells:
        found = match(cell, stored)
        assert found is not None
        assert found.content["run"] == cell.folder
    assert table.write_summary(tmp_path / "gone") == summary  # from the stored cells
    rows = {(one["row"], one["column"], one["seed"]): one for one in summary["cells"]}
    attackers = choose_attackers(Faults(attack="sign-flip", attackers=0.4), 5, 0).tolist()
    hit, clean = (rows["pFedLA", f"Digits, few{end}", 0] for end in (", sign flip, 40 %", ""))
    assert (hit["attackers"], clean["attackers"]) == (attackers, [])
    weights = hit["weights"]
    assert weights["values"][0] == pytest.approx([0.4] * len(weights["layers"]))  # uniform before the first round

    found = collect_attacks(summary)["Digits, few"]
    gaps = []
    for seed in (0, 1):
        hit, clean = (rows["pFedLA", f"Digits, few{end}", seed]["score"] for end in (", sign flip, 40 %", ""))
        honest = [c for c in range(5) if c not in choose_attackers(Faults(attackers=0.4), 5, seed).tolist()]
        gaps.append(sum(hit["per_client"][c] - clean["per_client"][c] for c in honest) / 3)
    difference = found["sign flip", 0.4]["pFedLA"].difference
    assert difference is not None
    assert difference.mean == pytest.approx(sum(gaps) / 2)
    assert found["", 0.0]["pFedLA"].difference is None
    lines = tabulate_attacks(found, ["Local", "pFedLA"], share_only=0.2)
    assert [line[:2] for line in lines[1:]] == [["none", "–"], ["sign flip", "20 %"], ["late", "20 %"]]
    assert lines[2][2] == "–"

    paths = [*write_tables(summary, {}, table.folder), *write_figures(summary, {}, table.folder)]
    assert {path.name for path in paths} >= {"table.md", "table.csv", "table.tex", "figure.png", "figure.svg"}
    assert len([*csv.reader((table.folder / "table.csv").open(encoding="utf-8"))]) == 1 + 2 + 3
    (axis,) = draw_weights(summary).axes
    assert [line.get_label() for line in axis.lines] == ["sign flip", "late", "uniform"]
    assert [title for _, title, _ in list_tables(summary, {})] == ["Digits, few"]


def test_a_finished_cell_is_marked_before_another_process_may_touch_its_folder(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens the folder next removes half-written files: the mark must be whole by then."""
    (cell, *_), released = list_cells(table.grid), []
    leave = RunFolder.__exit__

    def note(self: RunFolder, *error: Any) -> None:
        released.append((self.path / "commit.json").exists())
        leave(self, *error)

    monkeypatch.setattr(RunFolder, "__exit__", note)
    run_cells([(table, cell)], tmp_path / "runs", None, lambda: False, 1)
    assert released == [True]
