"""The paper's figures from the summaries of runs, in the paper's form, as PDF and PNG."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.report.figures import finish, save, subplots
from pfedla.reproduction.paper_tables import Entries, Paper, compared, entries
from pfedla.reproduction.paper_weights import (
    PERIODS,
    Summary,
    by_column,
    evolution,
    heatmap,
    self_weights,
    with_alpha,
)


def draw_heatmap(summary: Summary, entered: Entries, paper: Paper) -> Any:
    found = with_alpha(summary)
    figure, axes = subplots(1, len(found), figsize=(3.1 * len(found) + 0.6, 3.3))
    for axis, (column, cells) in zip(axes.flat, found.items(), strict=True):
        layer = summary["layers"][column]
        weights = heatmap(cells, layer)
        picture = axis.imshow(weights, cmap="YlGnBu", vmin=0, interpolation="nearest")
        figure.colorbar(picture, ax=axis, shrink=0.8)
        axis.set(title=f"{column} ({layer})", xlabel="sender", ylabel="receiver")
        axis.set_xticks(range(len(weights)))
        axis.set_yticks(range(len(weights)))
    return figure


def draw_evolution(summary: Summary, entered: Entries, paper: Paper) -> Any:
    found = with_alpha(summary)
    figure, axes = subplots(
        len(found), len(PERIODS), figsize=(3.4 * len(PERIODS), 2.3 * len(found)), sharex="row", sharey="row"
    )
    for line, (column, cells) in zip(axes, found.items(), strict=True):
        whose, layers = evolution(cells)
        for position, (axis, period) in enumerate(zip(line, PERIODS, strict=True)):
            for offset, (name, values) in enumerate(whose.items()):
                axis.bar(np.arange(len(layers)) + 0.2 * offset - 0.3, values[position], 0.2, label=name)
            axis.set_xticks(range(len(layers)), layers, fontsize=8)
            axis.set_title(f"{column}, {period} period", fontsize=9)
            axis.grid(alpha=0.3, axis="y")
        line[0].set_ylabel("weight for the target")
    axes[0, 0].legend(fontsize=7)
    return figure


def draw_layer_weights(summary: Summary, entered: Entries, paper: Paper) -> Any:
    found = with_alpha(summary)
    figure, axes = subplots(1, len(found), figsize=(4 * len(found), 3))
    for axis, (column, cells) in zip(axes.flat, found.items(), strict=True):
        values, layers = self_weights(cells)
        largest = int(values.argmax())
        axis.bar(layers, values, color=["C1" if position == largest else "C0" for position in range(len(layers))])
        axis.set(title=f"{column}: {layers[largest]} is the largest", ylabel="self-weight of the target", ylim=(0, 1))
        axis.grid(alpha=0.3, axis="y")
    return figure


def draw_toy(summary: Summary, entered: Entries, paper: Paper) -> Any:
    """(a) the accuracy of every client by both methods; (b) the self-weight of each layer of client 1."""
    figure, axes = subplots(1, 2, figsize=(9, 3.2))
    for offset, row in enumerate(summary["rows"]):
        for column, cells in by_column(summary, row).items():
            accuracy = 100 * np.mean([cell["accuracy"]["per_client"] for cell in cells], axis=0)
            axes[0, 0].bar(np.arange(len(accuracy)) + 0.4 * offset - 0.2, accuracy, 0.4, label=row)
            values, layers = self_weights(cells)
            axes[0, 1].bar(np.arange(len(layers)) + 0.4 * offset - 0.2, values, 0.4, label=row)
            axes[0, 1].set_xticks(range(len(layers)), layers)
            axes[0, 0].set(title=f"(a) {column}, last round", xlabel="client", ylabel="test accuracy (%)")
            axes[0, 0].set_xticks(range(len(accuracy)), [str(n + 1) for n in range(len(accuracy))])
    axes[0, 1].set(title="(b) self-weight of client 1, last round", ylabel="weight")
    axes[0, 0].legend(fontsize=8)
    return figure


def draw_options(summary: Summary, entered: Entries, paper: Paper) -> Any:
    """Accuracy by k or K, the paper's beside ours; with MiB if layers are retained."""
    figure, axes = subplots(1, len(entered), figsize=(4.2 * len(entered), 3.2))
    for axis, (column, rows) in zip(axes.flat, entered.items(), strict=True):
        numbers = [row.rpartition(" ")[2] for row in rows]
        means = [np.nan if entry.mean is None else entry.mean for entry in rows.values()]
        axis.errorbar(numbers, means, [entry.std or 0 for entry in rows.values()], marker="o", capsize=3, label="ours")
        theirs = [paper.get(column, {}).get(row, {}).get("mean", np.nan) for row in rows]
        axis.plot(numbers, theirs, marker="s", linestyle=":", color="gray", label="paper")
        axis.set(title=column, xlabel=next(iter(rows)).partition(" ")[0], ylabel="test accuracy (%)")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper left")
        if summary["form"] == "retained":
            right = axis.twinx()
            right.bar(numbers, [entry.mib or 0 for entry in rows.values()], alpha=0.15, color="C2")
            right.set_ylabel("MiB sent", color="C2")
    return figure


def draw_curves(summary: Summary, entered: Entries, paper: Paper) -> Any:
    """Learning curves of every row, a panel per column: the mean over seeds."""
    found = by_column(summary)
    across = min(4, len(found))
    figure, axes = subplots(-(-len(found) // across), across, figsize=(4 * across, 3.2 * -(-len(found) // across)))
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    lines: dict[str, Any] = {}  # a row may be in some panels only
    for axis, (column, cells) in zip(axes.flat, found.items(), strict=False):
        for position, row in enumerate(summary["rows"]):
            curves = [cell["curve"] for cell in cells if cell["row"] == row]
            if curves and len({len(curve) for curve in curves}) == 1:
                points = np.mean(np.array(curves, float), axis=0)
                ours = row.startswith(("pFedLA", "HeurpFedLA"))
                style = {"color": f"C{position % 10}", "linestyle": "-" if position < 10 else "--"}
                (lines[row],) = axis.plot(points[:, 0], 100 * points[:, 1], linewidth=2.2 if ours else 1.2, **style)
        axis.set(title=column, xlabel="round", ylabel="test accuracy (%)")
        finish(axis)
    rows = [row for row in summary["rows"] if row in lines]
    figure.legend([lines[row] for row in rows], rows, loc="outside lower center", fontsize=8, ncols=3 * across)
    return figure


FIGURES: Mapping[str, Callable[[Summary, Entries, Paper], Any]] = {
    "table": draw_curves, "retained": draw_options, "neighbours": draw_options, "toy": draw_toy,
    "evolution": draw_evolution, "heatmap": draw_heatmap, "layer-weights": draw_layer_weights,
}  # fmt: skip


def write_figures(summary: Summary, paper: Paper, folder: Path) -> list[Path]:
    summary = compared(summary)
    if not by_column(summary):
        return []
    figure = FIGURES[summary["form"]](summary, entries(summary), paper)
    return [save(figure, folder / f"figure.{kind}") for kind in ("png", "pdf")]
