"""The paper's tables from results.json: Markdown, CSV and LaTeX, the paper's numbers beside ours."""

import csv
import io
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

import torch

from pfedla.core.layers import Layers
from pfedla.core.models import build_model, model_for
from pfedla.core.rounds import plan_traffic
from pfedla.data.datasets import find
from pfedla.report.reading import MIB
from pfedla.report.tables import Row, markdown_table, mean_and_std, rank, show_mean
from pfedla.reproduction.grid import Grid, Paper, Summary, collect_rows
from pfedla.reproduction.paper_figures import tabulate_weights

ROUNDS = 75  # of the paper's table of MiB
NOTE = (
    "Test accuracy in % of the personal models on every client's own test data, mean of clients, last round. "
    "With several seeds: mean ± standard deviation (seeds). Bold: ahead of every other row by a paired "
    "t-test at 5 %, with at least three seeds. A dash: the method does not apply to the model."
)
PAIRED_NOTE = (
    "Difference to the first, the row with the highest mean of those with the most seeds: paired over the "
    "seeds that both have, mean ± standard error (seeds). Bold: a paired t-test supports it at 5 %."
)


def show_row(row: Row, best: str | None) -> str:
    """Return the accuracy of a row: mean ± standard deviation (seeds), or why there is none."""
    count = len(row.accuracies)
    shown = row.outcome or show_mean(row.accuracies.values(), 2) + f" ({count})" * (count > 1)
    return f"**{shown}**" if row.algorithm == best else shown


def show_paper(number: Mapping[str, float]) -> str:
    parts = [f"{number[key]:.2f}" for key in ("mean", "std") if key in number]
    return " ± ".join(parts) or "–"


def layers_of(dataset: str, model: str | None = None) -> Layers:
    entry = find(dataset)
    return Layers.of(build_model(model or model_for(entry.shape), entry.shape, entry.num_classes, torch.Generator()))


def average_saved_mib(row: Row) -> float | None:
    """Return the download that retained layers saved in runs in which all clients take part, mean over the seeds."""
    saved = []
    for cell in row.results:
        experiment = cell["experiment"]
        if experiment["algorithm"].get("retained_layers") and experiment["participation"] == 1:
            layers = layers_of(experiment["data"]["dataset"], experiment["model"])
            full = plan_traffic(layers, len(cell["accuracy"]["per_client"]), cell["rounds"], []).down_bytes
            saved.append((full - cell["traffic"]["down_bytes"]) / MIB)
    return statistics.mean(saved) if saved else None


def account(grid: Grid, paper: Paper) -> list[list[str]]:
    """Return a table of MiB by column and k, with the layers that the paper's numbers imply."""
    lines = [["data set", "k", "retained", "MiB", "paper", "difference"]]
    for column in grid.columns:
        data = column.experiment["data"]
        layers = layers_of(data["dataset"])
        for k in range(len(column.retained) + 1):
            retained = column.retained[:k]
            traffic = plan_traffic(layers, data["clients"], ROUNDS, layers.positions(retained))
            mib = (traffic.down_bytes + traffic.up_bytes) / MIB
            theirs = paper.get(column.name, {}).get(f"k = {k}", {}).get("mib")
            compared = ["–", "–"] if theirs is None else [f"{theirs:.2f}", f"{mib - theirs:+.2f}"]
            lines.append([column.name, f"k = {k}", ", ".join(retained) or "–", f"{mib:.2f}", *compared])
    return lines


def tabulate(summary: Summary, paper: Paper) -> list[list[str]]:
    """Return the main table: ours, and the paper's where it has numbers of the column."""
    lines, has_mib = [[""], *([row] for row in summary["rows"])], summary["form"] == "retained"
    for column, rows in collect_rows(summary).items():
        theirs, best = paper.get(column, {}), rank(rows.values()).best
        lines[0] += [column, *["paper"] * bool(theirs), *["MiB", "saved"] * has_mib]
        for line, (name, row) in zip(lines[1:], rows.items(), strict=True):
            line += [show_row(row, best), *[show_paper(theirs.get(name, {}))] * bool(theirs)]
            sent = (row.mib, average_saved_mib(row)) if has_mib else ()
            line += ["–" if value is None else f"{value:.2f}" for value in sent]
    return lines


def tabulate_differences(summary: Summary) -> list[list[str]]:
    """Return each row's paired difference to the first, of the columns in which rows have several seeds."""
    lines = [[""], *([row] for row in summary["rows"])]
    for column, rows in collect_rows(summary).items():
        first, _, differences = rank(rows.values())
        if first is None or len(rows[first].accuracies) < 2:
            continue
        lines[0].append(column)
        for line in lines[1:]:
            difference = differences.get(line[0])
            shown = "first" if line[0] == first else str(difference or "–")
            line.append(f"**{shown}**" if difference and difference.is_supported else shown)
    return [line for line in lines if set(line[1:]) - {"–"}]


def describe_columns(summary: Summary) -> list[str]:
    """Return a line per column: what was run."""
    lines = []
    for column, rows in collect_rows(summary).items():
        cells = [cell for row in rows.values() for cell in row.results]
        if not cells:
            continue
        first, experiment = cells[0], cells[0]["experiment"]
        data = experiment["data"]
        subsets = sorted({cell.get("subset", "") for cell in cells} - {""})
        subset = f" (subset {' / '.join(subsets)})" if subsets else ""
        leak = f", OVERLAPPING: {100 * first['leaked_test_share']:.0f} % leak" if data.get("overlapping") else ""
        lines.append(
            f"{column}: {data['dataset']}{subset}{leak}, {len(first['accuracy']['per_client'])} clients of "
            f"{data['samples_per_client']} images, {100 * experiment['participation']:.0f} % a round, "
            f"{'/'.join(map(str, sorted({cell['rounds'] for cell in cells})))} rounds, "
            f"{experiment['training']['local_epochs']} local epochs; "
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
    for column, rows in collect_rows(summary).items():
        differences = rank(rows.values()).differences
        for name, row in rows.items():
            numbers = (*mean_and_std(row.accuracies.values()), row.mib, *differences.get(name, [None] * 3))
            shown = [round(value, 4) if isinstance(value, float) else value for value in numbers]
            theirs = [paper.get(column, {}).get(name, {}).get(key) for key in ("mean", "std", "mib")]
            reason = next(iter(row.gave_up.values()), row.not_applicable)
            writer.writerow([column, name, len(row.results), *shown, *theirs, reason])
    return text.getvalue()


def to_latex(summary: Summary, paper: Paper) -> str:
    """Return a booktabs table: ours, and the paper's in small print."""
    entries = collect_rows(summary)
    lines = [["", *entries], *([row] for row in summary["rows"])]
    for column, rows in entries.items():
        best = rank(rows.values()).best
        for line in lines[1:]:
            theirs = show_paper(paper.get(column, {}).get(line[0], {}))
            small = "" if theirs == "–" else rf" {{\scriptsize({theirs})}}"
            line.append(show_row(rows[line[0]], best) + small)
    text = re.sub("([%&_#])", r"\\\1", "\n".join("\t".join(line) for line in lines))
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text).replace("±", r"$\pm$").replace("–", "--")
    header, *body = [line.replace("\t", " & ") + r" \\" for line in text.split("\n")]
    begin = r"\begin{tabular}{l" + "c" * len(entries) + "}"
    return "\n".join([begin, r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def write_tables(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    made = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}
    for name, make in made.items():
        (folder / name).write_text(make(summary, paper), encoding="utf-8")
    return [folder / name for name in made]
