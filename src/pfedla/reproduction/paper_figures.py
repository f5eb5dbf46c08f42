"""The paper's figures from results.json, as PDF and PNG."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.report.figures import save, style_axis, subplots
from pfedla.reproduction.grid import Paper
from pfedla.reproduction.paper_tables import Entry, collect_entries
from pfedla.reproduction.paper_weights import (
    PERIODS,
    Summary,
    average_by_period,
    average_map,
    average_self_weights,
    group_alpha,
    group_cells,
    layer_of,
)


def draw_heatmap(summary: Summary, paper: Paper) -> Any:
    panels = group_alpha(summary)
    figure, axes = subplots(1, len(panels), figsize=(3.1 * len(panels) + 0.6, 3.3))
    for axis, (panel, cells) in zip(axes.flat, panels.items(), strict=True):
        layer = layer_of(summary, cells)
        weights = average_map(cells, layer)
        image = axis.imshow(weights, cmap="YlGnBu", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axis, shrink=0.8)
        ticks = range(len(weights))
        axis.set(title=f"{panel} ({layer})", xlabel="sender", ylabel="receiver", xticks=ticks, yticks=ticks)
    return figure


def draw_evolution(summary: Summary, paper: Paper) -> Any:
    panels = group_alpha(summary)
    size = (3.4 * len(PERIODS), 2.3 * len(panels))
    figure, axes = subplots(len(panels), len(PERIODS), figsize=size, sharex="row", sharey="row")
    for line, (panel, cells) in zip(axes, panels.items(), strict=True):
        whose, layers = average_by_period(cells)
        for position, (axis, period) in enumerate(zip(line, PERIODS, strict=True)):
            for offset, (name, values) in enumerate(whose.items()):
                axis.bar(np.arange(len(layers)) + 0.2 * offset - 0.3, values[position], 0.2, label=name)
            axis.set_xticks(range(len(layers)), layers, fontsize=8)
            axis.set_title(f"{panel}, {period} period", fontsize=9)
            axis.grid(alpha=0.3, axis="y")
        line[0].set_ylabel("weight for the target")
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_layer_weights(summary: Summary, paper: Paper) -> Any:
    panels = group_alpha(summary)
    figure, axes = subplots(1, len(panels), figsize=(4 * len(panels), 3))
    for axis, (panel, cells) in zip(axes.flat, panels.items(), strict=True):
        own, layers = average_self_weights(cells)
        largest = int(own.argmax())
        axis.bar(layers, own, color=["C1" if position == largest else "C0" for position in range(len(layers))])
        axis.set(title=f"{panel}: largest for {layers[largest]}", ylabel="self-weight of the target", ylim=(0, 1))
        axis.grid(alpha=0.3, axis="y")
    return figure


def draw_toy(summary: Summary, paper: Paper) -> Any:
    """Draw (a) the accuracy of every client, (b) the self-weights of client 1, by row."""
    figure, axes = subplots(1, 2, figsize=(9, 3.2))
    left, right = axes[0]
    ((column, rows),) = group_cells(summary).items()
    for position, (row, cells) in enumerate(rows.items()):
        offset = 0.4 * position - 0.2
        accuracy = 100 * np.mean([cell["accuracy"]["per_client"] for cell in cells], axis=0)
        own, layers = average_self_weights(cells)
        left.bar(np.arange(len(accuracy)) + offset, accuracy, 0.4, label=f"{row} ({_count_seeds(len(cells))})")
        right.bar(np.arange(len(layers)) + offset, own, 0.4)
    left.set(title=f"(a) {column}, last round", xlabel="client", ylabel="test accuracy (%)")
    left.set_xticks(range(len(accuracy)), [str(client + 1) for client in range(len(accuracy))])
    right.set(title="(b) self-weight of client 1, last round", ylabel="weight")
    right.set_xticks(range(len(layers)), layers)
    left.legend(fontsize=8)
    return figure


def draw_options(summary: Summary, paper: Paper) -> Any:
    """Draw the accuracy by k or K (rows "name, k = 3"): a line per name, and the paper's; dashed: MiB."""
    entries = collect_entries(summary)
    figure, axes = subplots(1, len(entries), figsize=(4.4 * len(entries), 3.2))
    for axis, (column, rows) in zip(axes.flat, entries.items(), strict=True):
        right = axis.twinx() if summary["form"] == "retained" else None
        lines: dict[str, dict[str, Entry]] = {}
        for row, entry in rows.items():
            name, _, number = row.rpartition(" = ")
            lines.setdefault(name, {})[number] = entry
        for position, (name, line) in enumerate(lines.items()):
            theirs = [paper.get(column, {}).get(f"{name} = {number}", {}).get("mean") for number in line]
            means, spread = ([entry.mean for entry in line.values()], [entry.std or 0 for entry in line.values()])
            style = {"color": f"C{position}", "marker": "o"}
            if any(means):
                numbers = np.array(means, float)
                axis.errorbar(list(line), numbers, spread, capsize=3, label=f"ours: {name}", **style)
            if any(theirs):
                axis.plot(list(line), np.array(theirs, float), "s:", color="gray", label="paper")
            if right is not None and any(means):
                sent = np.array([entry.mib for entry in line.values()], float)
                right.plot(list(line), sent, linestyle="--", markersize=3, linewidth=0.8, **style)
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
    found, entries = group_cells(summary), collect_entries(summary)
    across = min(4, len(found))
    down = -(-len(found) // across)
    figure, axes = subplots(down, across, figsize=(4 * across, 3.2 * down))
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    legend: dict[str, tuple[Any, list[int]]] = {}  # by row: a line of it, and its seeds by panel
    for axis, (column, rows) in zip(axes.flat, found.items(), strict=False):
        for position, row in enumerate(summary["rows"]):
            if row not in rows:
                continue
            curves = [np.array(cell["curve"], float) for cell in rows[row]]
            width = 2.2 if row.startswith(("pFedLA", "HeurpFedLA")) else 1.2
            style = {"color": f"C{position % 10}", "linestyle": "-" if position < 10 else "--", "linewidth": width}
            shown = curves if entries[column][row].gave_up else [np.mean(curves, axis=0)]
            for curve in shown:
                (line,) = axis.plot(curve[:, 0], 100 * curve[:, 1], **style)
            legend.setdefault(row, (line, []))[1].append(len(curves))
        axis.set(title=column, xlabel="round", ylabel="test accuracy (%)")
        style_axis(axis)
    labels = [f"{row} ({_count_seeds(*legend[row][1])})" for row in legend]
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
    if not group_cells(summary):
        return []
    figure = FIGURES[summary["form"]](summary, paper)
    return [save(figure, folder / f"figure.{kind}") for kind in ("png", "pdf")]
