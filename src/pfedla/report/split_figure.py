"""How a federation is cut, as a table and a picture; reads what federation.json holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from pfedla.report.figures import Array, plain, save, subplots

PICTURES = (".png", ".pdf", ".svg")
BUBBLES = 600  # more cells than this are drawn as a heat map
TABLE_ROWS = 40
NAMED = 5  # classes of a client that are named in the table
LONGEST = 20  # characters of a name


def counts_of(described: Mapping[str, Any]) -> Array:
    """[clients, 2 (train, test), classes]"""
    return np.stack([np.array(described["train"]), np.array(described["test"])], axis=1)


def federation_table(described: Mapping[str, Any], name: str) -> Table:
    """A client a line: its sizes, and its classes from the most frequent on."""
    counts = counts_of(described)
    table = Table(title=name, title_justify="left", caption_justify="left")
    table.add_column("client", no_wrap=True)
    for heading in ("train", "test", "classes"):
        table.add_column(heading, justify="right")
    table.add_column("examples of each class (training and test)")
    for client, (train, test) in list(zip(described["clients"], counts, strict=True))[:TABLE_ROWS]:
        both = train + test
        order = [label for label in np.argsort(-both, kind="stable") if both[label]]
        parts = [f"{_short(described['classes'][label])}: {both[label]}" for label in order[:NAMED]]
        if len(order) > NAMED:
            parts.append(f"{len(order) - NAMED} more: {both[order[NAMED:]].sum()}")
        table.add_row(_short(client), str(train.sum()), str(test.sum()), str(len(order)), ", ".join(parts))
    if len(counts) > TABLE_ROWS:
        table.caption = f"and {len(counts) - TABLE_ROWS} more clients, all of them in the picture"
    return table


def statistics_line(described: Mapping[str, Any]) -> str:
    numbers = described["statistics"]
    line = (
        f"{numbers['classes_per_client']['mean']:.1f} classes a client, label entropy "
        f"{numbers['label_entropy_bits']['mean']:.2f} of {np.log2(len(described['classes'])):.2f} bits, mean distance between "
        f"two clients {numbers['mean_pairwise_distance']:.2f} (0 alike, 1 no class in common)"
    )
    if leaked := described["leaked_test_share"]:
        line += f"; OVERLAPPING: {100 * leaked:.0f} % of the test examples are training examples of another client"
    return line


def draw_federation(described: Mapping[str, Any], name: str, path: Path) -> Path:
    """Clients x classes, bubbles or a heat map where there are many, beside every client's training and test examples."""
    counts = counts_of(described)
    totals = counts.sum(1)
    clients, classes = totals.shape
    labels = [_short(label) for label in described["classes"]]
    upright = max(map(len, labels)) <= 3
    below = 0.5 if upright else 0.5 + 0.075 * max(map(len, labels))  # inches that the names of the classes take
    tall, wide = np.clip(0.27 * clients, 1.6, 14) + 0.9 + below, np.clip(0.42 * classes + 2.2, 4.5, 15)
    figure, axes = subplots(1, 2, figsize=(wide + 2.4, tall), sharey=True, width_ratios=(wide, 2.2))
    who_has_what, sizes = axes[0]
    if clients * classes <= BUBBLES:
        client, label = np.nonzero(totals)
        number = totals[client, label]
        # Areas, so that twice the examples look like twice as much; the largest bubble fills its cell.
        who_has_what.scatter(
            label, client, s=260 * number / totals.max(), c=label % 10, cmap="tab10", vmin=0, vmax=9, alpha=0.85, linewidths=0
        )
        who_has_what.set_xlim(-0.6, classes - 0.4)
        who_has_what.set_axisbelow(True)
        who_has_what.grid(alpha=0.25)
        key = f"area: number of examples, largest {totals.max()}"
    else:
        picture = who_has_what.imshow(
            np.where(totals, totals, np.nan), aspect="auto", cmap="Blues", vmin=0, interpolation="nearest"
        )
        figure.colorbar(picture, ax=who_has_what, shrink=0.7, pad=0.01).ax.set_title("examples", fontsize=8)
        who_has_what.hlines(np.arange(clients - 1) + 0.5, -0.5, classes - 0.5, color="white", linewidth=0.5)
        key = "white: none"
    _label(who_has_what.yaxis, [_short(client) for client in described["clients"]], most=60)
    _label(who_has_what.xaxis, labels, most=110)
    who_has_what.tick_params(labelsize=8)
    who_has_what.tick_params(axis="x", rotation=0 if upright else 90, labelsize=8 if classes <= 60 else 6)
    who_has_what.set(xlabel=f"class ({key})", ylabel="client", ylim=(clients - 0.4, -0.6))
    position = np.arange(clients)
    train, test = counts[:, 0].sum(1), counts[:, 1].sum(1)
    sizes.barh(position, train, color="C0", label="training")
    sizes.barh(position, test, left=train, color="C1", label="test")
    sizes.set(xlabel="examples")
    sizes.tick_params(labelsize=8)
    sizes.spines[["top", "right"]].set_visible(False)
    figure.legend(*sizes.get_legend_handles_labels(), fontsize=8, loc="outside lower right", ncols=2)
    figure.suptitle(plain(name), fontsize=11)
    return save(figure, path)


def _short(name: str) -> str:
    """Cut in the middle: long names often differ at their ends."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"


def _label(axis: Any, names: list[str], most: int) -> None:
    """A name at every tick, thinned out where they would run into one another."""
    ticks = np.arange(0, len(names), -(-len(names) // most))
    axis.set_ticks(ticks, [plain(names[tick]) for tick in ticks])
