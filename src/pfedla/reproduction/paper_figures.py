"""The paper's figures, drawn from results.json."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pfedla.report.figures import finish_curves, panels
from pfedla.report.reading import Array, Metric, Values
from pfedla.report.rows import Row
from pfedla.report.significance import standard_error
from pfedla.reproduction.frontier import draw_frontier
from pfedla.reproduction.grid import Paper
from pfedla.reproduction.summaries import Summary, collect_rows

TARGET, TWIN, SIMILAR = 0, 1, 2  # of the partition `twins`; all others share no class with the target


def metric_of(summary: Summary) -> Metric:
    return Metric.of(next((cell for cell in summary["cells"] if "score" in cell), {}))


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
        axis.set_title(f"{panel.title} ({layer})", fontsize=9)
        axis.set(xlabel="sender", ylabel="receiver")
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
            found = [list(row.scores.values()) for row in line.values()]
            means = np.array([statistics.mean(some) if some else None for some in found], float)
            errors = [standard_error(some) or 0 for some in found]
            theirs = [paper.get(column, {}).get(row, {}).get("mean") for row in line]
            style = {"color": f"C{position}", "marker": "o"}
            if np.isfinite(means).any():
                axis.errorbar(numbers, means, errors, capsize=3, label=f"ours: {name}", **style)
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
        metric = next(row.metric for row in rows.values() if row.results)
        finish_curves(axis, column, ylabel=metric.axis, size=12)
    labels = [f"{row} ({count_seeds(*counts)})" for row, (_, counts) in legend.items()]
    lines = [line for line, _ in legend.values()]
    figure.legend(lines, labels, loc="outside lower center", fontsize=8, ncols=2 * min(4, len(found)))
    return figure


def draw_self_weights(summary: Summary) -> Any:
    """Draw the mean self-weight of every layer over the rounds: a panel per column and method with weights."""
    found = [
        (
            f"{column.partition(',')[0]}, {name}",
            [cell["self_weights"] for cell in row.results if "self_weights" in cell],
        )
        for column, rows in collect_rows(summary).items()
        for name, row in rows.items()
    ]
    shown = [(title, cells) for title, cells in found if cells]
    figure, axes = panels(len(shown), (3.2, 2.6), most=4)
    for axis, (title, cells) in zip(axes, shown, strict=True):
        means = np.mean([cell["values"] for cell in cells], axis=0)  # over the seeds
        for layer, name in enumerate(cells[0]["layers"]):
            axis.plot(cells[0]["rounds"], means[:, layer], label=name, color=f"C{layer}")
        finish_curves(axis, title, ylabel="self-weight", size=9)
        axis.set_ylim(0, 1.02)
        axis.legend(fontsize=6)
    return figure


def draw_privacy(summary: Summary, paper: Paper) -> Any:
    """Draw score and self-weight against epsilon (columns "data, ε = 8"): two panels per data set."""
    entries: dict[str, dict[str, Mapping[str, Row]]] = {}
    for column, rows in collect_rows(summary).items():
        name, _, epsilon = column.rpartition(", ε = ")
        entries.setdefault(name, {})[epsilon] = rows
    figure, axes = panels(2 * len(entries), (3.6, 3), most=2)
    for position, (name, by_epsilon) in enumerate(entries.items()):
        left, right = axes[2 * position : 2 * position + 2]
        for place, row in enumerate(summary["rows"]):
            found = [rows[row] for rows in by_epsilon.values()]
            scores = [[*one.scores.values()] for one in found]
            own = [
                [np.mean(c["self_weights"]["values"][-1]) for c in one.results if "self_weights" in c] for one in found
            ]
            for axis, values in ((left, scores), (right, own)):
                known = [(epsilon, some) for epsilon, some in zip(by_epsilon, values, strict=True) if some]
                if known:
                    means, errors = zip(*((np.mean(some), standard_error(some) or 0) for _, some in known), strict=True)
                    style = {"color": f"C{place}", "marker": "o", "capsize": 3, "label": row}
                    axis.errorbar([epsilon for epsilon, _ in known], means, errors, **style)
        metric = next(row.metric for rows in by_epsilon.values() for row in rows.values() if row.results)
        left.set(title=name, xlabel="ε", ylabel=metric.axis)
        right.set(title=f"{name}: self-weight", xlabel="ε", ylabel="mean over clients and layers", ylim=(0, 1))
        left.legend(fontsize=7)
    return figure


def count_seeds(*counts: int) -> str:
    low, high = min(counts), max(counts)
    return f"{low} seed{'s' * (low > 1)}" if low == high else f"{low} to {high} seeds"


FIGURES = {"toy": draw_toy, "evolution": draw_evolution, "heatmap": draw_heatmap, "layer-weights": draw_layer_weights}
FIGURES |= {"table": draw_curves, "retained": draw_options, "neighbours": draw_options}
FIGURES |= {"frontier": draw_frontier, "privacy": draw_privacy}
