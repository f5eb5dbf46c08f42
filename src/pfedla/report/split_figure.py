"""How a federation is split, as a table and a figure, from what federation.json holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pfedla.report.figures import escape_math, save, subplots
from pfedla.report.reading import Array
from pfedla.report.tables import terminal_table

FORMATS = (".png", ".pdf", ".svg")
BUBBLES = 600  # more clients x classes than this are drawn as a heat map
TABLE_ROWS = 40
NAMED = 5  # classes of a client that are named in the table
LONGEST = 20  # characters of a name


def _count(described: Mapping[str, Any]) -> Array:
    """Return the number of examples [clients, 2 (train, test), classes]."""
    return np.stack([np.array(described["train"]), np.array(described["test"])], axis=1)


def federation_table(described: Mapping[str, Any], name: str) -> Table:
    """Return a table with a line per client: its sizes, and its classes by frequency."""
    counts = _count(described)
    lines = [["client", "train", "test", "classes", "examples of each class (training and test)"]]
    for client, (train, test) in list(zip(described["clients"], counts, strict=True))[:TABLE_ROWS]:
        both = train + test
        order = [label for label in np.argsort(-both, kind="stable") if both[label]]
        parts = [f"{_shorten(described['classes'][label])}: {both[label]}" for label in order[:NAMED]]
        if len(order) > NAMED:
            parts.append(f"{len(order) - NAMED} more: {both[order[NAMED:]].sum()}")
        lines.append([_shorten(client), str(train.sum()), str(test.sum()), str(len(order)), ", ".join(parts)])
    table = terminal_table(lines, name)
    table.columns[-1].justify = "left"
    if len(counts) > TABLE_ROWS:
        table.caption = f"and {len(counts) - TABLE_ROWS} more clients, all of them in the figure"
    return table


def statistics_line(described: Mapping[str, Any]) -> str:
    numbers = described["statistics"]
    entropy, most = numbers["label_entropy_bits"]["mean"], np.log2(len(described["classes"]))
    classes, apart = numbers["classes_per_client"]["mean"], numbers["mean_pairwise_distance"]
    line = f"{classes:.1f} classes a client, label entropy {entropy:.2f} of {most:.2f} bits, "
    line += f"mean distance between two clients {apart:.2f} (0 alike, 1 no class in common)"
    if leaked := described["leaked_test_share"]:
        line += f"; OVERLAPPING: {100 * leaked:.0f} % of the test examples train another client"
    return line


def draw_federation(described: Mapping[str, Any], name: str, path: Path) -> Path:
    """Draw clients x classes, beside every client's number of training and test examples."""
    counts = _count(described)
    clients, classes = len(counts), counts.shape[2]
    labels = [_shorten(label) for label in described["classes"]]
    longest = max(map(len, labels))
    below = 0.5 if longest <= 3 else 0.5 + 0.075 * longest  # inches below the axis for the names of the classes
    tall, wide = np.clip(0.27 * clients, 1.6, 14) + 0.9 + below, np.clip(0.42 * classes + 2.2, 4.5, 15)
    figure, axes = subplots(1, 2, figsize=(wide + 2.4, tall), sharey=True, width_ratios=(wide, 2.2))
    by_class, sizes = axes[0]
    key = _draw_classes(figure, by_class, counts.sum(1))
    _label(by_class.yaxis, [_shorten(client) for client in described["clients"]], most=60)
    _label(by_class.xaxis, labels, most=110)
    by_class.tick_params(labelsize=8)
    by_class.tick_params(axis="x", rotation=0 if longest <= 3 else 90, labelsize=8 if classes <= 60 else 6)
    by_class.set(xlabel=f"class ({key})", ylabel="client", ylim=(clients - 0.4, -0.6))
    train, test = counts[:, 0].sum(1), counts[:, 1].sum(1)
    sizes.barh(np.arange(clients), train, color="C0", label="training")
    sizes.barh(np.arange(clients), test, left=train, color="C1", label="test")
    sizes.set(xlabel="examples")
    sizes.tick_params(labelsize=8)
    sizes.spines[["top", "right"]].set_visible(False)
    figure.legend(*sizes.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=2)
    figure.suptitle(escape_math(name), fontsize=11)
    return save(figure, path)


def _draw_classes(figure: Any, axis: Any, totals: Array) -> str:
    """Draw bubbles, or a heat map where there are many; return what the marks mean."""
    clients, classes = totals.shape
    if totals.size > BUBBLES:
        some = np.where(totals, totals, np.nan)
        image = axis.imshow(some, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        figure.colorbar(image, ax=axis, shrink=0.7, pad=0.01).ax.set_title("examples", fontsize=8)
        axis.hlines(np.arange(clients - 1) + 0.5, -0.5, classes - 0.5, color="white", linewidth=0.5)
        return "white: none"
    client, label = np.nonzero(totals)
    areas = 260 * totals[client, label] / totals.max()  # the largest bubble fills its cell
    colours = {"c": label % 10, "cmap": "tab10", "vmin": 0, "vmax": 9}
    axis.scatter(label, client, s=areas, alpha=0.85, linewidths=0, **colours)
    axis.set_xlim(-0.6, classes - 0.4)
    axis.set_axisbelow(True)
    axis.grid(alpha=0.25)
    return f"area: number of examples, largest {totals.max()}"


def _shorten(name: str) -> str:
    """Cut a long name in the middle: long names often differ at their ends."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"


def _label(axis: Any, names: list[str], most: int) -> None:
    """Label at most so many ticks, evenly spread."""
    ticks = np.arange(0, len(names), -(-len(names) // most))
    axis.set_ticks(ticks, [escape_math(names[tick]) for tick in ticks])
