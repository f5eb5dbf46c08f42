"""The paper's tables (Markdown, CSV, LaTeX) and figures (PDF, PNG, SVG) from results.json, with the paper's numbers."""

import csv
import io
import statistics
from collections.abc import Mapping
from pathlib import Path

from pfedla.core.files import write_text
from pfedla.core.layers import Layers
from pfedla.core.models import model_for, outline
from pfedla.core.rounds import plan_traffic
from pfedla.core.settings import AUTO
from pfedla.data.datasets import find
from pfedla.report.figures import FORMATS, save
from pfedla.report.methods import MethodTable, show_difference, show_interval, show_p
from pfedla.report.reading import MIB, Metric
from pfedla.report.rows import Row
from pfedla.report.tables import latex_table, markdown_table
from pfedla.reproduction import attack_results, site_results
from pfedla.reproduction.frontier import FRONTIER_NOTE, tabulate_frontier
from pfedla.reproduction.grid import Grid, Paper
from pfedla.reproduction.paper_figures import (
    FIGURES,
    TARGET,
    average_by_distance,
    collect_weights,
    draw_self_weights,
    metric_of,
)
from pfedla.reproduction.summaries import Summary, after_training, collect_rows

TABLES = ("table", "retained", "neighbours", "frontier", "privacy")  # forms; the others are figures
ROUNDS = 75  # of the paper's table of MiB
NOTE = (
    "Test {metric} of the personal models on every client's own test data, mean of clients, last round. "
    "With several seeds: mean ± standard error (seeds). Bold: the best row, and those not significantly worse at 5 %. "
    "A dash: the method does not apply to the model. Of published numbers ± is the standard deviation."
)
AFTER_NOTE = (
    "The same for the models right after local training in the last round; bold is decided within this table. not run: "
    "or not known."
)
PAIRED_NOTE = (
    "Difference to the first, the row with the {best} mean of those with the most seeds: paired over the "
    "seeds that both have, with an interval over the seeds (number of seeds). p, from three seeds on: paired t-test, "
    "from six on Wilcoxon's signed-rank test, Holm-corrected over the rows. Bold: p below 5 %."
)
CLIENTS_NOTE = "Over the clients, mean of the seeds: worst / {percentile}"
SHARE_NOTE = " / share of clients that are better off than with both Local and FedAvg"


def explain(summary: Summary) -> str:
    """Return what the main table shows."""
    metrics = dict.fromkeys(table.metric for table in compare_rows(summary).values() if table.results)
    shown = [metric.description + " in %" * metric.percent for metric in metrics or [Metric()]]
    return NOTE.format(metric=" or ".join(shown))


def show_row(table: MethodTable, row: Row) -> str:
    """Return the score of a row: mean ± standard error (seeds), or why there is none."""
    shown, count = table.show_score(row, digits=2), len(row.scores)
    number = f" ({count})" * (count > 1)
    return f"{shown.removesuffix('**')}{number}**" if shown.startswith("**") else shown + number


def show_paper(number: Mapping[str, float]) -> str:
    digits = 2 if number.get("mean", 0) > 1 else 3  # a percentage, else a share
    parts = [f"{number[key]:.{digits}f}" for key in ("mean", "std") if key in number]
    return " ± ".join(parts) or "–"


def layers_of(dataset: str, model: str | None = None) -> Layers:
    entry = find(dataset)
    return Layers.of(outline(model or model_for(entry.shape), entry.shape, entry.num_classes))


def average_saved_mib(row: Row) -> float | None:
    """Return the download that retained layers saved in runs in which all clients take part, mean over the seeds."""
    saved = []
    for cell in row.results:
        experiment = cell["experiment"]
        if experiment["algorithm"].get("retained_layers") and experiment["participation"] == 1:
            layers = layers_of(experiment["data"]["dataset"], experiment["model"])
            full = plan_traffic(layers, len(cell["score"]["per_client"]), cell["rounds"], []).down_bytes
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


def compare_rows(summary: Summary) -> dict[str, MethodTable]:
    """Return the rows of every column with their statistics."""
    return {column: MethodTable(list(rows.values())) for column, rows in collect_rows(summary).items()}


def tabulate(summary: Summary, paper: Paper) -> list[list[str]]:
    """Return the main table: ours, and the paper's where it has numbers of the column."""
    lines, has_mib = [[""], *([row] for row in summary["rows"])], summary["form"] == "retained"
    for column, table in compare_rows(summary).items():
        theirs = paper.get(column, {})
        lines[0] += [column, *[summary.get("source", "paper")] * bool(theirs), *["MiB", "saved"] * has_mib]
        for line, row in zip(lines[1:], table.rows, strict=True):
            line += [show_row(table, row), *[show_paper(theirs.get(row.algorithm, {}))] * bool(theirs)]
            sent = (row.mib, average_saved_mib(row)) if has_mib else ()
            line += ["–" if value is None else f"{value:.2f}" for value in sent]
    return lines


def tabulate_after_training(summary: Summary, paper: Paper) -> list[list[str]]:
    """Return the main table with the scores after local training; nothing if none is known."""
    if summary["form"] != "table":
        return []
    known = after_training(summary)
    return tabulate(known, paper) if any("score" in cell for cell in known["cells"]) else []


def tabulate_differences(summary: Summary) -> list[list[str]]:
    """Return each row's paired difference to the first, of the columns in which rows have several seeds."""
    lines = [[""], *([row] for row in summary["rows"])]
    for column, table in compare_rows(summary).items():
        first = table.analysis.summaries.get(table.analysis.best)
        if first is None or first.seeds < 2:
            continue
        lines[0].append(column)
        for line in lines[1:]:
            line.append("first" if line[0] == table.analysis.best else show_difference_of(table, line[0]))
    return [line for line in lines if set(line[1:]) - {"–"}]


def show_difference_of(table: MethodTable, row: str) -> str:
    """Return the difference to the first, its interval, p and number of seeds."""
    one = table.analysis.to_best.get(row)
    if one is None:
        return "–"
    tested = f" {show_interval(one, table.metric)}, p {show_p(one.p_corrected)}" if one.p is not None else ""
    shown = f"{show_difference(one, table.metric)}{tested} ({one.seeds})"
    return f"**{shown}**" if one.is_significant else shown


def tabulate_clients(summary: Summary) -> list[list[str]]:
    """Return how the clients of each row fare: the worst, a low percentile, how many gain by taking part."""
    lines = [[""], *([row] for row in summary["rows"])]
    for column, table in compare_rows(summary).items() if summary["form"] in TABLES else []:
        lines[0].append(column)
        for line in lines[1:]:
            worst, percentile, _ = table.spread_cells(line[0])
            shares = [f"{share} %" for share in table.share_cell(line[0]) if share != "–"]
            line.append(" / ".join([worst, percentile, *shares]) if worst != "–" else "–")
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
        rates = sorted({cell["experiment"]["training"]["lr"] for cell in cells})
        tuned = MethodTable(list(rows.values())).describe_tuning()
        tuned = f"{tuned}; " * bool(tuned)
        size = "" if data["samples_per_client"] == AUTO else f" of {data['samples_per_client']} images"
        leak = f", OVERLAPPING: {100 * first['leaked_test_share']:.0f} % leak" if data.get("overlapping") else ""
        lines.append(
            f"{column}: {data['dataset']}{subset}{leak}, {len(first['score']['per_client'])} clients{size}, "
            f"{100 * experiment['participation']:.0f} % a round, "
            f"{'/'.join(map(str, sorted({cell['rounds'] for cell in cells})))} rounds, "
            f"{experiment['training']['local_epochs']} local epochs, "
            f"learning rate {'/'.join(map(str, rates))}; "
            f"{tuned}{sum(cell['seconds'] for cell in cells) / 60:.0f} min for all runs"
        )
    return lines


def to_markdown(summary: Summary, paper: Paper) -> str:
    parts = [markdown_table(weights)] if (weights := tabulate_weights(summary)) else []
    parts += [markdown_table(tabulate(summary, paper)), explain(summary)]
    parts += [markdown_table(after), AFTER_NOTE] if (after := tabulate_after_training(summary, paper)) else []
    parts += [markdown_table(costs), FRONTIER_NOTE] if (costs := tabulate_frontier(summary)) else []
    if differences := tabulate_differences(summary):
        best = "highest" if metric_of(summary).higher_is_better else "lowest"
        parts += [markdown_table(differences), PAIRED_NOTE.format(best=best)]
    if clients := tabulate_clients(summary):
        note = CLIENTS_NOTE.format(percentile=metric_of(summary).percentile)
        has_shares = any(table.has_shares for table in compare_rows(summary).values())
        parts += [markdown_table(clients), f"{note}{SHARE_NOTE * has_shares}."]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in describe_columns(summary))]) + "\n"


def to_csv(summary: Summary, paper: Paper) -> str:
    """Return a line per column and row; scores are as in the tables, an accuracy in %."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    ours = ["metric", "seeds", "mean", "se", "worst", "p10", "spread", "share_better", "after_training", "mib"]
    tested = ["difference_to_first", "low", "high", "p", "p_corrected", "test", "paired_seeds"]
    theirs = ["paper_mean", "paper_std", "paper_mib"]
    writer.writerow(["column", "row", *ours, *tested, *theirs, "reason"])
    for column, table in compare_rows(summary).items():
        for row, metric in ((row, table.metric) for row in table.rows):
            found = table.analysis.summaries.get(row.algorithm)
            numbers = [scale(metric, one) for one in found[1:6]] + [found.share_better] if found else [None] * 6
            one = table.analysis.to_best.get(row.algorithm)
            ends = [scale(metric, getattr(one, key, None)) for key in ("mean", "low", "high")]
            paired = [*ends, *(getattr(one, key, None) for key in ("p", "p_corrected", "test", "seeds"))]
            after = scale(metric, row.after_training)
            shown = [round(one, 4) if isinstance(one, float) else one for one in (*numbers, after, row.mib, *paired)]
            printed = [paper.get(column, {}).get(row.algorithm, {}).get(key) for key in ("mean", "std", "mib")]
            reason = next(iter(row.gave_up.values()), row.not_applicable)
            writer.writerow([column, row.algorithm, metric.name, len(row.results), *shown, *printed, reason])
    return text.getvalue()


def scale(metric: Metric, score: float | None) -> float | None:
    return None if score is None else metric.factor * score


def to_latex(summary: Summary, paper: Paper) -> str:
    """Return the tables of scores and of differences with booktabs."""
    tables = [tabulate(summary, paper), tabulate_after_training(summary, paper)]
    tables += [tabulate_differences(summary), tabulate_clients(summary)]
    return "\n\n".join(latex_table(lines) for lines in tables if len(lines) > 1) + "\n"


def list_tables(summary: Summary, paper: Paper) -> list[tuple[list[list[str]], str, list[str]]]:
    """Return what a terminal shows: lines, title and notes of each table."""
    if summary["form"] == "sites":
        return site_results.list_tables(summary)
    if summary["form"] == "attacks":
        return attack_results.list_tables(summary)
    tables = [(tabulate(summary, paper), summary["title"], [explain(summary), *describe_columns(summary)])]
    after = tabulate_after_training(summary, paper)
    return tables + [(after, "After local training", [AFTER_NOTE])] * bool(after)


def write_tables(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    if summary["form"] == "sites":
        return site_results.write_site_tables(summary, folder)
    if summary["form"] == "attacks":
        return attack_results.write_attack_tables(summary, folder)
    made = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}
    for name, make in made.items():
        write_text(folder / name, make(summary, paper))
    return [folder / name for name in made]


def tabulate_weights(summary: Summary) -> list[list[str]]:
    """Return the numbers of a figure as a table; nothing for a table."""
    form, header, lines = summary["form"], [""], []
    if form == "toy":
        metric, cells = metric_of(summary), [cell for cell in summary["cells"] if "score" in cell]
        scores = [metric.factor * one["score"]["per_client"][TARGET] for one in cells]
        shown = [metric.show_number(score, 2) for score in scores]
        rows = [[one["row"], score, str(one["seed"])] for one, score in zip(cells, shown, strict=True)]
        return [["client 1", metric.heading, "seed"], *rows]
    for panel in collect_weights(summary):
        if form == "heatmap":
            layer = summary["layers"][panel.cells[0]["column"]]
            weights = average_by_distance(panel.map(layer))
            lines.append([f"{panel.title}, {layer}", *(f"{weight:.3f}" for weight in weights)])
            header = ["mean weight at distance", *map(str, range(max(len(header), len(weights) + 1) - 1))]
        elif form == "evolution":
            whose = panel.by_period()
            lines.append([panel.title, *(f"{values[-1].mean():.3f}" for values in whose.values())])
            header = ["last period, mean of layers", *whose]
        elif form == "layer-weights":
            largest = panel.layers[int(panel.own.argmax())]
            lines.append([panel.title, largest, " ".join(f"{weight:.3f}" for weight in panel.own)])
            header = ["self-weight of the target", "largest layer", "from the first layer to the last"]
    return [header, *lines] if lines else []


def write_figures(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    if not any("score" in cell for cell in summary["cells"]):
        return []
    if summary["form"] == "sites":
        return site_results.write_site_figures(summary, folder)
    if summary["form"] == "attacks":
        return attack_results.write_attack_figures(summary, folder)
    drawn = {"figure": FIGURES[summary["form"]](summary, paper)}
    if summary["form"] != "privacy" and any("self_weights" in cell for cell in summary["cells"]):
        drawn["self_weights"] = draw_self_weights(summary)
    caption = ". ".join([summary["title"], *describe_columns(summary)])
    return [save(figure, folder / f"{name}{end}", caption) for name, figure in drawn.items() for end in FORMATS]
