"""The paper's figures from results.json, as PDF and PNG."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.report.figures import finish_curves, panels, save
from pfedla.report.reading import Array
from pfedla.report.tables import Row, mean_and_std
from pfedla.reproduction import paper_weights as weights
from pfedla.reproduction.grid import Paper, Summary, collect_rows
from pfedla.reproduction.paper_tables import average_mib


def draw_bars(axis: Any, labels: Sequence[str], series: Mapping[str, Array], **options: Any) -> None:
    """Draw the values of every series as bars side by side above each label."""
    width = 0.8 / len(series)
    for position, (name, values) in enumerate(series.items()):
        offset = width * (position - (len(series) - 1) / 2)
        axis.bar(np.arange(len(labels)) + offset, values, width, label=name, **options)
    axis.set_xticks(range(len(labels)), labels)


def draw_heatmap(summary: Summary, paper: Paper) -> Any:
    found = weights.group_alpha(summary)
    figure, axes = panels(len(found), (3.1, 3.3), margin=(0.6, 0))
    for axis, (panel, cells) in zip(axes, found.items(), strict=True):
        layer = summary["layers"][cells[0]["column"]]
        shown = weights.average_map(cells, layer)
        image = axis.imshow(shown, cmap="YlGnBu", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axis, shrink=0.8)
        ticks = range(len(shown))
        axis.set(title=f"{panel} ({layer})", xlabel="sender", ylabel="receiver", xticks=ticks, yticks=ticks)
    return figure


def draw_evolution(summary: Summary, paper: Paper) -> Any:
    found, periods = weights.group_alpha(summary), weights.PERIODS
    figure, axes = panels(3 * len(found), (3.4, 2.3), most=3, sharex="row", sharey="row")
    for line, (panel, cells) in enumerate(found.items()):
        whose = weights.average_by_period(cells)
        for position, period in enumerate(periods):
            axis = axes[3 * line + position]
            draw_bars(axis, weights.layers_in(cells), {name: values[position] for name, values in whose.items()})
            axis.tick_params(axis="x", labelsize=8)
            axis.set_title(f"{panel}, {period} period", fontsize=9)
            axis.grid(alpha=0.3, axis="y")
        axes[3 * line].set_ylabel("weight for the target")
    axes[0].legend(fontsize=7)
    return figure


def draw_layer_weights(summary: Summary, paper: Paper) -> Any:
    found = weights.group_alpha(summary)
    figure, axes = panels(len(found), (4, 3))
    for axis, (panel, cells) in zip(axes, found.items(), strict=True):
        own, layers = weights.average_self_weights(cells), weights.layers_in(cells)
        draw_bars(axis, layers, {"": own}, color=np.where(own == own.max(), "C1", "C0"))
        title = f"{panel}: largest for {layers[int(own.argmax())]}"
        axis.set(title=title, ylabel="self-weight of the target", ylim=(0, 1))
        axis.grid(alpha=0.3, axis="y")
    return figure


def draw_toy(summary: Summary, paper: Paper) -> Any:
    """Draw (a) the accuracy of every client, (b) the self-weights of client 1, by row."""
    figure, (left, right) = panels(2, (4.5, 3.2))
    ((column, rows),) = collect_rows(summary).items()
    accuracies, own = {}, {}
    for cells in (row.results for row in rows.values() if row.results):
        label = f"{cells[0]['row']} ({_count_seeds(len(cells))})"
        accuracies[label] = 100 * np.mean([cell["accuracy"]["per_client"] for cell in cells], axis=0)
        own[label] = weights.average_self_weights(cells)
    draw_bars(left, [str(client + 1) for client in range(len(accuracies[label]))], accuracies)
    draw_bars(right, weights.layers_in(cells), own)
    left.set(title=f"(a) {column}, last round", xlabel="client", ylabel="test accuracy (%)")
    right.set(title="(b) self-weight of client 1, last round", ylabel="weight")
    left.legend(fontsize=8)
    return figure


def draw_options(summary: Summary, paper: Paper) -> Any:
    """Draw the accuracy by k or K (rows "name, k = 3"): a line per name, and the paper's; dashed: MiB."""
    entries = collect_rows(summary)
    figure, axes = panels(len(entries), (4.4, 3.2))
    for axis, (column, rows) in zip(axes, entries.items(), strict=True):
        right = axis.twinx() if summary["form"] == "retained" else None
        lines: dict[str, dict[str, Row]] = {}
        for row, entry in rows.items():
            name, _, number = row.rpartition(" = ")
            lines.setdefault(name, {})[number] = entry
        for position, (name, line) in enumerate(lines.items()):
            theirs = [paper.get(column, {}).get(f"{name} = {number}", {}).get("mean") for number in line]
            numbers, found = list(line), [mean_and_std(row.accuracies.values()) for row in line.values()]
            style = {"color": f"C{position}", "marker": "o"}
            means, spread = np.array([mean for mean, _ in found], float), [std or 0 for _, std in found]
            if has_means := bool(np.isfinite(means).any()):
                axis.errorbar(numbers, means, spread, capsize=3, label=f"ours: {name}", **style)
            if any(theirs):
                axis.plot(numbers, np.array(theirs, float), "s:", color="gray", label="paper")
            if right is not None and has_means:
                sent = np.array([average_mib(row) for row in line.values()], float)
                right.plot(numbers, sent, linestyle="--", markersize=3, linewidth=0.8, **style)
        if right is not None:
            right.set(ylabel="MiB sent (dashed)", ylim=(0, None))
        axis.set(title=column, xlabel=name.rpartition(" ")[2], ylabel="test accuracy (%)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    return figure


def draw_curves(summary: Summary, paper: Paper) -> Any:
    """Draw the learning curves of every row, a panel per column: the mean over seeds.

    A row that gave up on a seed has no mean: its other seeds are drawn one by one.
    """
    found = {name: rows for name, rows in collect_rows(summary).items() if any(row.results for row in rows.values())}
    across = min(4, len(found))
    figure, axes = panels(len(found), (4, 3.2), most=4)
    legend: dict[str, tuple[Any, list[int]]] = {}  # by row: a line of it, and its seeds by panel
    for axis, (column, rows) in zip(axes, found.items(), strict=True):
        for position, (row, entry) in enumerate(rows.items()):
            if not entry.results:
                continue
            curves = np.array([cell["curve"] for cell in entry.results], float)  # [seeds, rounds, (round, accuracy)]
            width = 2.2 if row.startswith(("pFedLA", "HeurpFedLA")) else 1.2
            style = {"color": f"C{position % 10}", "linestyle": "-" if position < 10 else "--", "linewidth": width}
            shown = curves if entry.gave_up else curves.mean(0, keepdims=True)
            line, *_ = axis.plot(shown[0, :, 0], 100 * shown[..., 1].T, **style)
            legend.setdefault(row, (line, []))[1].append(len(curves))
        finish_curves(axis, column, size=12, columns=0)
    labels = [f"{row} ({_count_seeds(*counts)})" for row, (_, counts) in legend.items()]
    lines = [line for line, _ in legend.values()]
    figure.legend(lines, labels, loc="outside lower center", fontsize=8, ncols=2 * across)
    return figure


def _count_seeds(*counts: int) -> str:
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low > 1)}" if low == high else f"{low} to {high} seeds"


FIGURES: Mapping[str, Callable[[Summary, Paper], Any]] = {
    "table": draw_curves,
    "retained": draw_options,
    "neighbours": draw_options,
    "toy": draw_toy,
    "evolution": draw_evolution,
    "heatmap": draw_heatmap,
    "layer-weights": draw_layer_weights,
}


def write_figures(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    if not any("accuracy" in cell for cell in summary["cells"]):
        return []
    figure = FIGURES[summary["form"]](summary, paper)
    return [save(figure, folder / f"figure.{kind}") for kind in ("png", "pdf")]
