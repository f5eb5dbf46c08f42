"""The paper's tables (Markdown, CSV, LaTeX) and figures (PDF, PNG) from results.json, with the paper's numbers."""

import csv
import io
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedla.core.layers import Layers
from pfedla.core.models import model_for, outline
from pfedla.core.rounds import plan_traffic
from pfedla.data.datasets import find
from pfedla.report.figures import finish_curves, panels, save
from pfedla.report.reading import MIB, Array, Metric, Values
from pfedla.report.tables import Row, markdown_table, mean_and_std, rank, show_mean
from pfedla.reproduction.grid import Grid, Paper
from pfedla.reproduction.summaries import Summary, collect_rows

TARGET, TWIN, SIMILAR = 0, 1, 2  # of the partition `twins`; all others share no class with the target
ROUNDS = 75  # of the paper's table of MiB
NOTE = (
    "Test {metric} of the personal models on every client's own test data, mean of clients, last round. "
    "With several seeds: mean ± standard deviation (seeds). Bold: ahead of every other row by a paired "
    "t-test at 5 %, with at least three seeds. A dash: the method does not apply to the model."
)
PAIRED_NOTE = (
    "Difference to the first, the row with the {best} mean of those with the most seeds: paired over the "
    "seeds that both have, mean ± standard error (seeds). Bold: a paired t-test supports it at 5 %."
)


def metric_of(summary: Summary) -> Metric:
    return Metric.of(next((cell for cell in summary["cells"] if "score" in cell), {}))


def explain(summary: Summary) -> str:
    """Return what the main table shows."""
    metric = metric_of(summary)
    return NOTE.format(metric=metric.description + " in %" * metric.percent)


def show_row(row: Row, best: str | None) -> str:
    """Return the score of a row: mean ± standard deviation (seeds), or why there is none."""
    count = len(row.scores)
    shown = row.outcome or show_mean(row.scores.values(), row.metric, 2) + f" ({count})" * (count > 1)
    return f"**{shown}**" if row.algorithm == best else shown


def show_paper(number: Mapping[str, float]) -> str:
    parts = [f"{number[key]:.2f}" for key in ("mean", "std") if key in number]
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
        if first is None or len(rows[first].scores) < 2:
            continue
        lines[0].append(column)
        for line in lines[1:]:
            difference = differences.get(line[0])
            shown = "first" if line[0] == first else difference.show(rows[first].metric) if difference else "–"
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
            f"{column}: {data['dataset']}{subset}{leak}, {len(first['score']['per_client'])} clients of "
            f"{data['samples_per_client']} images, {100 * experiment['participation']:.0f} % a round, "
            f"{'/'.join(map(str, sorted({cell['rounds'] for cell in cells})))} rounds, "
            f"{experiment['training']['local_epochs']} local epochs; "
            f"{sum(cell['seconds'] for cell in cells) / 60:.0f} min for all runs"
        )
    return lines


def to_markdown(summary: Summary, paper: Paper) -> str:
    parts = [markdown_table(weights)] if (weights := tabulate_weights(summary)) else []
    parts += [markdown_table(tabulate(summary, paper)), explain(summary)]
    if differences := tabulate_differences(summary):
        best = "highest" if metric_of(summary).higher_is_better else "lowest"
        parts += [markdown_table(differences), PAIRED_NOTE.format(best=best)]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in describe_columns(summary))]) + "\n"


def to_csv(summary: Summary, paper: Paper) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    name = metric_of(summary).name
    ours = ["seeds", name, "std", "mib", "difference_to_first", "standard_error", "paired_seeds"]
    writer.writerow(["column", "row", *ours, f"paper_{name}", "paper_std", "paper_mib", "reason"])
    for column, rows in collect_rows(summary).items():
        differences = rank(rows.values()).differences
        for name, row in rows.items():
            numbers = (*mean_and_std(row.scores.values()), row.mib, *differences.get(name, [None] * 3))
            shown = [round(value, 4) if isinstance(value, float) else value for value in numbers]
            theirs = [paper.get(column, {}).get(name, {}).get(key) for key in ("mean", "std", "mib")]
            reason = next(iter(row.gave_up.values()), row.not_applicable)
            writer.writerow([column, name, len(row.results), *shown, *theirs, reason])
    return text.getvalue()


def to_latex(summary: Summary, paper: Paper) -> str:
    """Return the main table with booktabs."""
    lines = tabulate(summary, paper)
    text = re.sub("([%&_#])", r"\\\1", "\n".join("\t".join(line) for line in lines))
    text = re.sub(r"\*\*(.+?)\*\*", r"\\textbf{\1}", text).replace("±", r"$\pm$").replace("–", "--")
    header, *body = [line.replace("\t", " & ") + r" \\" for line in text.split("\n")]
    begin = r"\begin{tabular}{l" + "c" * (len(lines[0]) - 1) + "}"
    return "\n".join([begin, r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}", ""])


def write_tables(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    made = {"table.md": to_markdown, "table.csv": to_csv, "table.tex": to_latex}
    for name, make in made.items():
        (folder / name).write_text(make(summary, paper), encoding="utf-8")
    return [folder / name for name in made]


class Weights(NamedTuple):
    """What a panel shows: the cells of a row with weights, one per seed."""

    title: str
    cells: list[Values]
    layers: list[str]
    alpha: Array  # mean over seeds, [snapshots, receivers, layers, senders]

    @property
    def own(self) -> Array:
        """The target client's self-weights [layers] after the last round."""
        return self.alpha[-1, TARGET, :, TARGET]

    def map(self, layer: str) -> Array:
        """Return the weights [receivers, senders] of a layer after the last round."""
        return self.alpha[-1, :, self.layers.index(layer)]

    def by_period(self) -> dict[str, Array]:
        """Return the target client's weights [periods, layers] by sender; `others` is the mean of one of them."""
        # The start is uniform by construction; a period is a third of the snapshots after it.
        found = np.stack([part.mean(0)[TARGET] for part in np.array_split(self.alpha[1:], 3)])
        by_sender = {"self": found[..., TARGET], "same labels": found[..., TWIN], "similar": found[..., SIMILAR]}
        return {**by_sender, "others": found[..., SIMILAR + 1 :].mean(-1)}


def collect_weights(summary: Summary) -> list[Weights]:
    """Return a panel per column, or per column and row where several rows have weights."""
    found = []
    for column, rows in collect_rows(summary).items():
        kept = {name: [cell for cell in row.results if cell.get("alpha")] for name, row in rows.items()}
        some = {name: cells for name, cells in kept.items() if cells}
        for name, cells in some.items():
            alpha = np.asarray(np.mean([cell["alpha"]["values"] for cell in cells], axis=0))
            title = f"{column}, {name}" if len(some) > 1 else column
            found.append(Weights(title, cells, cells[0]["alpha"]["layers"], alpha))
    return found


def average_by_distance(weights: Array) -> list[float]:
    """Return the mean weight between clients at distance 0, 1, 2, … along the chain."""
    apart = np.abs(np.subtract.outer(np.arange(len(weights)), np.arange(len(weights))))
    return [float(weights[apart == distance].mean()) for distance in range(len(weights))]


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


def draw_bars(axis: Any, labels: Sequence[str], series: Mapping[str, Array], **options: Any) -> None:
    """Draw the values of every series as bars side by side above each label."""
    width = 0.8 / len(series)
    for position, (name, values) in enumerate(series.items()):
        offset = width * (position - (len(series) - 1) / 2)
        axis.bar(np.arange(len(labels)) + offset, values, width, label=name, **options)
    axis.set_xticks(range(len(labels)), labels)


def draw_heatmap(summary: Summary, paper: Paper) -> Any:
    found = collect_weights(summary)
    figure, axes = panels(len(found), (3.1, 3.3), margin=(0.6, 0))
    for axis, panel in zip(axes, found, strict=True):
        layer = summary["layers"][panel.cells[0]["column"]]
        weights = panel.map(layer)
        image = axis.imshow(weights, cmap="YlGnBu", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axis, shrink=0.8)
        axis.set(title=f"{panel.title} ({layer})", xlabel="sender", ylabel="receiver")
        axis.set(xticks=range(len(weights)), yticks=range(len(weights)))
    return figure


def draw_evolution(summary: Summary, paper: Paper) -> Any:
    shown = [(panel, period) for panel in collect_weights(summary) for period in range(3)]
    figure, axes = panels(len(shown), (3.4, 2.3), most=3, sharex="row", sharey="row")
    for axis, (panel, period) in zip(axes, shown, strict=True):
        draw_bars(axis, panel.layers, {name: values[period] for name, values in panel.by_period().items()})
        axis.tick_params(axis="x", labelsize=8)
        axis.set_title(f"{panel.title}, {('early', 'middle', 'last')[period]} period", fontsize=9)
        axis.set_ylabel("" if period else "weight for the target")
        axis.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=7)
    return figure


def draw_layer_weights(summary: Summary, paper: Paper) -> Any:
    found = collect_weights(summary)
    figure, axes = panels(len(found), (4, 3))
    for axis, panel in zip(axes, found, strict=True):
        own = panel.own
        draw_bars(axis, panel.layers, {"": own}, color=np.where(own == own.max(), "C1", "C0"))
        title = f"{panel.title}: largest for {panel.layers[int(own.argmax())]}"
        axis.set(title=title, ylabel="self-weight of the target", ylim=(0, 1))
        axis.grid(alpha=0.3, axis="y")
    return figure


def draw_toy(summary: Summary, paper: Paper) -> Any:
    """Draw (a) the score of every client, (b) the self-weights of client 1, by row."""
    figure, (left, right) = panels(2, (4.5, 3.2))
    metric, scores, weights = metric_of(summary), {}, {}
    for panel in collect_weights(summary):
        row = f"{panel.cells[0]['row']} ({count_seeds(len(panel.cells))})"
        scores[row] = metric.factor * np.mean([cell["score"]["per_client"] for cell in panel.cells], axis=0)
        weights[row] = panel.own
    draw_bars(left, [str(client + 1) for client in range(len(scores[row]))], scores)
    draw_bars(right, panel.layers, weights)
    left.set(title=f"(a) {panel.cells[0]['column']}, last round", xlabel="client", ylabel=metric.axis)
    right.set(title="(b) self-weight of client 1, last round", ylabel="weight")
    left.legend(fontsize=8)
    return figure


def draw_options(summary: Summary, paper: Paper) -> Any:
    """Draw the score by k or K (rows "name, k = 3"): a line per name, and the paper's; dashed: MiB."""
    entries = collect_rows(summary)
    figure, axes = panels(len(entries), (4.4, 3.2))
    for axis, (column, rows) in zip(axes, entries.items(), strict=True):
        right = axis.twinx() if summary["form"] == "retained" else None
        names = dict.fromkeys(row.rpartition(" = ")[0] for row in rows)
        for position, name in enumerate(names):
            line = {row: entry for row, entry in rows.items() if row.rpartition(" = ")[0] == name}
            numbers = [row.rpartition(" = ")[2] for row in line]
            found = [mean_and_std(row.scores.values()) for row in line.values()]
            means, spread = np.array([mean for mean, _ in found], float), [std or 0 for _, std in found]
            theirs = [paper.get(column, {}).get(row, {}).get("mean") for row in line]
            style = {"color": f"C{position}", "marker": "o"}
            if np.isfinite(means).any():
                axis.errorbar(numbers, means, spread, capsize=3, label=f"ours: {name}", **style)
                sent = np.array([row.mib for row in line.values()], float)
                if right is not None:
                    right.plot(numbers, sent, linestyle="--", markersize=3, linewidth=0.8, **style)
            if any(theirs):
                axis.plot(numbers, np.array(theirs, float), "s:", color="gray", label="paper")
        if right is not None:  # after all lines: it fits the axis to those that are there
            right.set(ylabel="MiB sent (dashed)", ylim=(0, None))
        axis.set(title=column, xlabel=name.rpartition(" ")[2], ylabel=metric_of(summary).axis)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure


def draw_curves(summary: Summary, paper: Paper) -> Any:
    """Draw the mean learning curve of every row; if it gave up on a seed it has none: its other seeds one by one."""
    found = {name: rows for name, rows in collect_rows(summary).items() if any(row.results for row in rows.values())}
    figure, axes = panels(len(found), (4, 3.2), most=4)
    legend: dict[str, tuple[Any, list[int]]] = {}  # by row: a line of it, and its seeds by panel
    for axis, (column, rows) in zip(axes, found.items(), strict=True):
        for position, (row, entry) in enumerate(rows.items()):
            if not entry.results:
                continue
            curves = np.array([cell["curve"] for cell in entry.results], float)  # [seeds, rounds, (round, score)]
            width = 2.2 if row.startswith(("pFedLA", "HeurpFedLA")) else 1.2
            style = {"color": f"C{position % 10}", "linestyle": "-" if position < 10 else "--", "linewidth": width}
            shown = curves if entry.gave_up else curves.mean(0, keepdims=True)
            line, *_ = axis.plot(shown[0, :, 0], entry.metric.factor * shown[..., 1].T, **style)
            legend.setdefault(row, (line, []))[1].append(len(curves))
        finish_curves(axis, column, ylabel=metric_of(summary).axis, size=12)
    labels = [f"{row} ({count_seeds(*counts)})" for row, (_, counts) in legend.items()]
    lines = [line for line, _ in legend.values()]
    figure.legend(lines, labels, loc="outside lower center", fontsize=8, ncols=2 * min(4, len(found)))
    return figure


def count_seeds(*counts: int) -> str:
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low > 1)}" if low == high else f"{low} to {high} seeds"


FIGURES = {"toy": draw_toy, "evolution": draw_evolution, "heatmap": draw_heatmap, "layer-weights": draw_layer_weights}
FIGURES |= {"table": draw_curves, "retained": draw_options, "neighbours": draw_options}


def write_figures(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    if not any("score" in cell for cell in summary["cells"]):
        return []
    figure = FIGURES[summary["form"]](summary, paper)
    return [save(figure, folder / f"figure.{kind}") for kind in ("png", "pdf")]
