"""The paper's tables from results.json: Markdown, CSV and LaTeX, the paper's numbers beside ours."""

import csv
import io
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedla.report.paired import compare, find_first, find_supported_first
from pfedla.report.tables import MIB, markdown_table
from pfedla.reproduction.grid import Paper
from pfedla.reproduction.paper_weights import Summary, tabulate_weights

NOTE = (
    "Test accuracy in % of the personal models on every client's own test data, mean of clients, last round. "
    "With several seeds: mean ± standard deviation (seeds). Bold: ahead of every other row by a paired "
    "t-test at 5 %, with at least three seeds. A dash: the method does not apply to the model."
)
PAIRED_NOTE = (
    "Difference to the first, the row with the highest mean of those with the most seeds: paired over the "
    "seeds that both have, mean ± standard error (seeds). Bold: a paired t-test supports it at 5 %."
)


@dataclass(frozen=True)
class Entry:
    """A row in a column, over the seeds."""

    accuracies: dict[int, float] = field(default_factory=dict)  # seed -> % of the personal models, mean of clients
    mib: float | None = None  # down and up, mean over the seeds
    saved_mib: float | None = None  # of the download, by retained layers
    gave_up: int = 0  # on how many seeds
    reason: str = ""

    @property
    def mean(self) -> float | None:
        return statistics.mean(self.accuracies.values()) if self.accuracies and not self.gave_up else None

    @property
    def std(self) -> float | None:
        has_std = len(self.accuracies) > 1 and not self.gave_up
        return statistics.stdev(self.accuracies.values()) if has_std else None

    def __str__(self) -> str:
        if self.gave_up:
            return f"gave up on {self.gave_up} of {self.gave_up + len(self.accuracies)} seeds"
        if self.mean is None:
            return "–" if self.reason else "not run"
        return f"{self.mean:.2f}" + (f" ± {self.std:.2f} ({len(self.accuracies)})" if self.std is not None else "")


Entries = dict[str, dict[str, Entry]]  # column -> row


def collect_entries(summary: Summary) -> Entries:
    """Return all rows of the columns that have any cell."""
    found: dict[str, dict[str, list[Summary]]] = {column: {} for column in summary["columns"]}
    for cell in summary["cells"]:
        found[cell["column"]].setdefault(cell["row"], []).append(cell)
    return {
        column: {row: _collect_entry(cells.get(row, [])) for row in summary["rows"]}
        for column, cells in found.items()
        if cells
    }


def _collect_entry(cells: list[Summary]) -> Entry:
    done = [cell for cell in cells if "accuracy" in cell]
    failed = [cell for cell in cells if "reason" in cell]
    # A method that runs on one seed applies; then its other reasons are that it gave up.
    gave_up = len(failed) if done else sum(cell.get("gave_up", False) for cell in failed)
    reason = failed[0]["reason"] if failed else ""
    if not done:
        return Entry(gave_up=gave_up, reason=reason)
    saved = [cell["saved_bytes"]["sent"] / MIB for cell in done if "saved_bytes" in cell]
    return Entry(
        accuracies={cell["seed"]: 100 * cell["accuracy"]["mean"] for cell in done},
        mib=statistics.mean(cell["traffic"]["down_bytes"] + cell["traffic"]["up_bytes"] for cell in done) / MIB,
        saved_mib=statistics.mean(saved) if saved else None,
        gave_up=gave_up,
        reason=reason,
    )


def by_seed(rows: dict[str, Entry]) -> dict[str, dict[int, float]]:
    return {row: {} if entry.gave_up else entry.accuracies for row, entry in rows.items()}


def _show_paper(number: Any) -> str:
    if not number or "mean" not in number:
        return "–"
    return f"{number['mean']:.2f}" + (f" ± {number['std']:.2f}" if "std" in number else "")


def tabulate(summary: Summary, paper: Paper) -> list[list[str]]:
    """Return the main table: ours, and the paper's where it has numbers of the column."""
    entries, has_mib = collect_entries(summary), summary["form"] == "retained"
    lines = [[""], *([row] for row in summary["rows"])]
    for column, rows in entries.items():
        theirs, best = paper.get(column, {}), find_supported_first(by_seed(rows))
        lines[0] += [column, *(["paper"] if theirs else []), *(["MiB", "saved"] if has_mib else [])]
        for line, (row, entry) in zip(lines[1:], rows.items(), strict=True):
            line.append(f"**{entry}**" if row == best else str(entry))
            line += [_show_paper(theirs.get(row))] if theirs else []
            if has_mib:
                line += ["–" if value is None else f"{value:.2f}" for value in (entry.mib, entry.saved_mib)]
    return lines


def tabulate_differences(summary: Summary) -> list[list[str]]:
    """Return each row's paired difference to the first, of the columns in which rows have several seeds."""
    lines: dict[str, list[str]] = {row: [] for row in summary["rows"]}
    header = [""]
    for column, rows in collect_entries(summary).items():
        values = by_seed(rows)
        first = find_first(values)
        if first is None or len(values[first]) < 2:
            continue
        header.append(column)
        for row, line in lines.items():
            difference = compare(values[row], values[first])
            shown = "first" if row == first else str(difference or "–")
            line.append(f"**{shown}**" if difference and difference.is_supported else shown)
    return [header, *([row, *line] for row, line in lines.items() if set(line) - {"–"})] if header[1:] else []


def describe_columns(summary: Summary) -> list[str]:
    """Return a line per column: what was run."""
    lines = []
    for column in summary["columns"]:
        cells = [cell for cell in summary["cells"] if cell["column"] == column and "accuracy" in cell]
        if not cells:
            continue
        first, experiment = cells[0], cells[0]["experiment"]
        data = experiment["data"]
        subsets = sorted({cell.get("subset", "") for cell in cells} - {""})
        subset = f" (subset {' / '.join(subsets)})" if subsets else ""
        leak = f", OVERLAPPING: {100 * first['leaked_test_share']:.0f} % leak" if data.get("overlapping") else ""
        rounds = "/".join(str(number) for number in sorted({cell["rounds"] for cell in cells}))
        lines.append(
            f"{column}: {data['dataset']}{subset}{leak}, {len(first['accuracy']['per_client'])} clients of "
            f"{data['samples_per_client']} images, {100 * experiment['participation']:.0f} % a round, "
            f"{rounds} rounds, {experiment['training']['local_epochs']} local epochs; "
            f"{sum(cell['seconds'] for cell in cells) / 60:.0f} min for all runs"
        )
    return lines


def to_markdown(summary: Summary, paper: Paper) -> str:
    parts = [markdown_table(weights)] if (weights := tabulate_weights(summary)) else []
    parts += [markdown_table(tabulate(summary, paper)), NOTE]
    if differences := tabulate_differences(summary):
        parts += [markdown_table(differences), PAIRED_NOTE]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in describe_columns(summary))]) + "\n"


def to_csv(summary: Summary, paper: Paper) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ours = ["seeds", "accuracy", "std", "mib", "difference_to_first", "standard_error", "paired_seeds"]
    writer.writerow(["column", "row", *ours, "paper_accuracy", "paper_std", "paper_mib", "reason"])
    for column, rows in collect_entries(summary).items():
        values = by_seed(rows)
        first = values.get(find_first(values) or "", {})
        for row, entry in rows.items():
            numbers = (entry.mean, entry.std, entry.mib, *(compare(values[row], first) or (None, None, None)))
            shown = [round(value, 4) if isinstance(value, float) else value for value in numbers]
            theirs = [paper.get(column, {}).get(row, {}).get(key) for key in ("mean", "std", "mib")]
            writer.writerow([column, row, len(entry.accuracies), *shown, *theirs, entry.reason])
    return text.getvalue()


def to_latex(summary: Summary, paper: Paper) -> str:
    """Return a booktabs table: ours, and the paper's in small print."""
    entries = collect_entries(summary)
    lines = [[""] + [_escape(column) for column in entries]]
    for row in summary["rows"]:
        cells = [_escape(row)]
        for column, rows in entries.items():
            ours, theirs = _escape(str(rows[row])), _show_paper(paper.get(column, {}).get(row))
            ours = rf"\textbf{{{ours}}}" if row == find_supported_first(by_seed(rows)) else ours
            cells.append(ours if theirs == "–" else rf"{ours} {{\scriptsize({_escape(theirs)})}}")
        lines.append(cells)
    header, *body = [" & ".join(line) + r" \\" for line in lines]
    begin = r"\begin{tabular}{l" + "c" * len(entries) + "}"
    return "\n".join([begin, r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def _escape(text: str) -> str:
    for sign in "%&_#":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("±", r"$\pm$").replace("–", "--")


def write_tables(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    paths = []
    for name, make in {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}.items():
        paths.append(folder / name)
        paths[-1].write_text(make(summary, paper), encoding="utf-8")
    return paths
