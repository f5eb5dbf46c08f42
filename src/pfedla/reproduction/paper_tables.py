"""The paper's tables from the summaries of runs: Markdown, CSV and LaTeX, the paper's number beside ours."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pfedla.report.tables import MIB
from pfedla.reproduction.paper_weights import Summary, weight_table

Paper = Mapping[str, Mapping[str, Mapping[str, float]]]  # column -> row -> mean, std, mib


@dataclass(frozen=True)
class Entry:
    """A row in a column: over the seeds. Accuracies in %, of the personal models, last round, mean of clients."""

    accuracies: tuple[float, ...] = ()
    seeds: tuple[int, ...] = ()
    mib: float | None = None  # down and up, mean over the seeds
    saved_mib: float | None = None  # of the download, by layers that stayed at home
    reason: str = ""  # why it does not apply

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.accuracies) if self.accuracies else None

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


Entries = dict[str, dict[str, Entry]]  # column -> row


def entries(summary: Summary) -> Entries:
    found: dict[str, dict[str, list[Summary]]] = {column: {} for column in summary["columns"]}
    for cell in summary["cells"]:
        found[cell["column"]].setdefault(cell["row"], []).append(cell)
    return {column: {row: _entry(rows.get(row, [])) for row in summary["rows"]} for column, rows in found.items() if rows}


def _entry(cells: list[Summary]) -> Entry:
    played = [cell for cell in cells if "accuracy" in cell]
    if not played:
        return Entry(reason=cells[0]["reason"] if cells else "")
    mib = statistics.mean(cell["traffic"]["down_bytes"] + cell["traffic"]["up_bytes"] for cell in played) / MIB
    saved = [cell["saved_bytes"]["sent"] / MIB for cell in played if "saved_bytes" in cell]
    accuracies = tuple(100 * cell["accuracy"]["mean"] for cell in played)
    seeds = tuple(sorted(cell["seed"] for cell in played))
    return Entry(accuracies, seeds, mib, statistics.mean(saved) if saved else None)


def seeds_by_row(summary: Summary, column: str) -> dict[str, set[int]]:
    """Of the rows that were played in a column."""
    found: dict[str, set[int]] = {}
    for cell in summary["cells"]:
        if cell["column"] == column and "accuracy" in cell:
            found.setdefault(cell["row"], set()).add(cell["seed"])
    return found


def common_seeds(summary: Summary, column: str) -> set[int]:
    """Those that every row of a column has: a seed is a federation, and rows are compared on the same ones."""
    found = list(seeds_by_row(summary, column).values())
    return set.intersection(*found) if found else set()


def compared(summary: Summary) -> Summary:
    """The cells of the common seeds; all of them where rows have none in common."""
    common = {column: common_seeds(summary, column) for column in summary["columns"]}
    kept = [
        cell
        for cell in summary["cells"]
        if "accuracy" not in cell or not common[cell["column"]] or cell["seed"] in common[cell["column"]]
    ]
    return {**summary, "cells": kept}


def repeated_seeds(summary: Summary, column: str) -> tuple[list[str], set[int]]:
    """The rows that have more than the common seeds, and which they share; nothing if these are not more."""
    common = common_seeds(summary, column)
    more = {row: seeds for row, seeds in seeds_by_row(summary, column).items() if seeds > common}
    shared = set.intersection(*more.values()) if more else set()
    return (list(more), shared) if common < shared and common else ([], set())


def repeated(summary: Summary) -> Summary:
    """The cells of these rows and seeds."""
    cells = []
    for column in summary["columns"]:
        rows, seeds = repeated_seeds(summary, column)
        some = [cell for cell in summary["cells"] if cell["column"] == column and cell["row"] in rows]
        cells += [cell for cell in some if cell["seed"] in seeds]
    there = {cell["row"] for cell in cells}
    rows = [row for row in summary["rows"] if row in there]
    return {**summary, "cells": cells, "rows": rows, "title": f"{summary['title']}: the rows with more seeds"}


def best(column: Mapping[str, Entry]) -> str | None:
    """The row with the highest mean, as printed: equal to two decimals, the first. None if rows have other seeds."""
    means = {row: round(entry.mean, 2) for row, entry in column.items() if entry.mean is not None}
    alike = len({entry.seeds for entry in column.values() if entry.mean is not None}) == 1
    return max(means, key=lambda row: means[row]) if len(means) > 1 and alike else None


def shown(entry: Entry) -> str:
    if entry.mean is None:
        return "–"
    return f"{entry.mean:.2f}" + (f" ± {entry.std:.2f}" if entry.std is not None else "")


def printed(number: Mapping[str, float] | None) -> str:
    """The paper's own."""
    if not number or "mean" not in number:
        return "–"
    return f"{number['mean']:.2f}" + (f" ± {number['std']:.2f}" if "std" in number else "")


def settings(summary: Summary) -> list[str]:
    """A line per column: what was really run."""
    lines = []
    for column in summary["columns"]:
        cells = [cell for cell in summary["cells"] if cell["column"] == column and "accuracy" in cell]
        if not cells:
            continue
        rounds = "/".join(str(n) for n in sorted({cell["rounds"] for cell in cells}))
        experiment = cells[0]["experiment"]
        epochs, share = experiment["training"]["local_epochs"], experiment["participation"]
        which = f"seeds {_listed(common_seeds(summary, column))}" if common_seeds(summary, column) else "seeds differ by row"
        rows, more = repeated_seeds(summary, column)
        if rows:
            which += f", for {', '.join(rows)} {_listed(more)}"
        data = experiment["data"]
        subsets = sorted({cell.get("subset", "") for cell in cells})
        subset = f" (subset {' / '.join(one or 'all' for one in subsets)})" if any(subsets) else ""
        leak = f", OVERLAPPING: {100 * cells[0]['leaked_test_share']:.0f} % leak" if data.get("overlapping") else ""
        clients = len(cells[0]["accuracy"]["per_client"])
        lines.append(
            f"{column}: {data['dataset']}{subset}{leak}, {clients} clients of {data['samples_per_client']} images, "
            f"{100 * share:.0f} % a round, {rounds} rounds, {epochs} local epochs, {which}; "
            f"{sum(cell['seconds'] for cell in cells) / 60:.0f} minutes"
        )
    return lines


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def markdown(summary: Summary, paper: Paper) -> str:
    parts = [_markdown_table(compared(summary), paper)]
    if weights := weight_table(summary):
        parts.insert(0, _lines(weights))
    parts.append(NOTE)
    if (more := repeated(summary))["cells"]:
        parts += [AGAIN, _markdown_table(more, paper)]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in settings(summary))]) + "\n"


def _markdown_table(summary: Summary, paper: Paper) -> str:
    found = entries(summary)
    with_mib = summary["form"] == "retained"
    lines = [[""]]
    for column in found:
        lines[0] += [column, "paper", *(["MiB", "saved"] if with_mib else [])]
    for row in summary["rows"]:
        cells = [row]
        for column, rows in found.items():
            entry = rows[row]
            text = shown(entry)
            cells += [f"**{text}**" if row == best(rows) else text, printed(paper.get(column, {}).get(row))]
            if with_mib:
                cells += ["–" if value is None else f"{value:.2f}" for value in (entry.mib, entry.saved_mib)]
        lines.append(cells)
    return _lines(lines)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    body = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


NOTE = (
    "Test accuracy in % of the personal models on every client's own test data, mean of clients, last round; ± is the standard "
    "deviation over seeds. Bold: the highest of the column."
)
AGAIN = "The rows of which more seeds were played, over all of these:"


def comma_separated(summary: Summary, paper: Paper) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["column", "row", "seeds", "accuracy", "std", "mib", "paper_accuracy", "paper_std", "paper_mib", "reason"])
    for part in (compared(summary), repeated(summary)):
        _write_rows(writer, part, paper)
    return text.getvalue()


def _write_rows(writer: Any, summary: Summary, paper: Paper) -> None:
    for column, rows in entries(summary).items():
        for row, entry in rows.items():
            theirs = paper.get(column, {}).get(row, {})
            ours = [None if value is None else round(value, 4) for value in (entry.mean, entry.std, entry.mib)]
            writer.writerow(
                [column, row, len(entry.accuracies), *ours, *(theirs.get(key) for key in ("mean", "std", "mib")), entry.reason]
            )


def latex(summary: Summary, paper: Paper) -> str:
    """booktabs: ours, the best in bold, and the paper's in small print below it; a second table has what has more seeds."""
    return "\n".join(_tabular(part, paper) for part in (compared(summary), repeated(summary)) if part["cells"])


def _tabular(summary: Summary, paper: Paper) -> str:
    found = entries(summary)
    lines = [
        r"\begin{tabular}{l" + "c" * len(found) + "}", r"\toprule",
        " & ".join(["", *(_escaped(column) for column in found)]) + r" \\", r"\midrule",
    ]  # fmt: skip
    for row in summary["rows"]:
        cells = [_escaped(row)]
        for column, rows in found.items():
            text = shown(rows[row]).replace("±", r"$\pm$").replace("–", "--")
            text = rf"\textbf{{{text}}}" if row == best(rows) else text
            theirs = printed(paper.get(column, {}).get(row)).replace("±", r"$\pm$")
            cells.append(text if theirs == "–" else rf"{text} {{\scriptsize({theirs})}}")
        lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    for sign in "%&_#":
        text = text.replace(sign, f"\\{sign}")
    return text


def terminal_tables(summary: Summary, paper: Paper) -> list[Table]:
    tables = [_terminal_table(part, paper) for part in (compared(summary), repeated(summary)) if part["cells"]]
    if tables:
        tables[-1].caption = "\n".join([NOTE, *settings(summary)])
    return tables


def _terminal_table(summary: Summary, paper: Paper) -> Table:
    found = entries(summary)
    table = Table("", title=summary["title"], title_justify="left", caption_justify="left")
    for column in found:
        table.add_column(f"{column}", justify="right")
        table.add_column("paper", justify="right", style="dim")
    for row in summary["rows"]:
        cells: list[str | Text] = [row]
        for column, rows in found.items():
            text = shown(rows[row])
            cells += [Text(text, style="bold" if row == best(rows) else ""), printed(paper.get(column, {}).get(row))]
        table.add_row(*cells)
    return table


def accounting_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("data set", "k", "retained", "MiB", "paper", "difference", title=title, title_justify="left")
    for row in rows:
        difference = f"{row['mib'] - row['paper']:+.2f}" if row["paper"] is not None else ""
        theirs = f"{row['paper']:.2f}" if row["paper"] is not None else "–"
        table.add_row(row["column"], row["row"], ", ".join(row["retained"]) or "–", f"{row['mib']:.2f}", theirs, difference)
    return table


def write_tables(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    contents = {"table.md": markdown, "table.csv": comma_separated, "table.tex": latex}
    paths = []
    for name, make in contents.items():
        paths.append(folder / name)
        paths[-1].write_text(make(summary, paper), encoding="utf-8")
    return paths
