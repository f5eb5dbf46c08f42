"""What the paper's figures show of the weights, as numbers."""

from collections.abc import Callable, Sequence

import numpy as np

from pfedla.report.reading import Array, Values
from pfedla.reproduction.grid import Summary, collect_rows

PERIODS = ("early", "middle", "last")
TARGET, TWIN, SIMILAR = 0, 1, 2  # of the partition `twins`; all others share no class with the target


def group_alpha(summary: Summary) -> dict[str, list[Values]]:
    """Return the cells with weights by panel: a column, or column and row where several rows have weights."""
    found: dict[str, list[Values]] = {}
    for column, rows in collect_rows(summary).items():
        kept = {name: [cell for cell in row.results if cell.get("alpha")] for name, row in rows.items()}
        some = {name: cells for name, cells in kept.items() if cells}
        found |= {f"{column}, {name}" if len(some) > 1 else column: cells for name, cells in some.items()}
    return found


def layers_in(cells: Sequence[Summary]) -> list[str]:
    return list(cells[0]["alpha"]["layers"])


def average(cells: Sequence[Summary], take: Callable[[Array], Array]) -> Array:
    """Return the mean over seeds of what `take` takes of the weights [snapshots, receivers, layers, senders]."""
    return np.asarray(np.mean([take(np.array(cell["alpha"]["values"])) for cell in cells], axis=0))


def average_map(cells: Sequence[Summary], layer: str) -> Array:
    """Return the weights [receivers, senders] of a layer after the last round."""
    return average(cells, lambda alpha: alpha[-1, :, layers_in(cells).index(layer)])


def average_self_weights(cells: Sequence[Summary]) -> Array:
    """Return the target client's self-weights [layers] after the last round."""
    return average(cells, lambda alpha: alpha[-1, TARGET, :, TARGET])


def average_by_period(cells: Sequence[Summary]) -> dict[str, Array]:
    """Return the target client's weights [periods, layers] by sender; `others` is the mean of one of them."""
    # The start is uniform by construction; a period is a third of the snapshots after it.
    periods = average(cells, lambda alpha: np.stack([part.mean(0)[TARGET] for part in np.array_split(alpha[1:], 3)]))
    others = periods[..., SIMILAR + 1 :].mean(-1)
    return {
        "self": periods[..., TARGET],
        "same labels": periods[..., TWIN],
        "similar": periods[..., SIMILAR],
        "others": others,
    }


def average_by_distance(weights: Array) -> list[float]:
    """Return the mean weight between clients at distance 0, 1, 2, … along the chain."""
    apart = np.abs(np.subtract.outer(np.arange(len(weights)), np.arange(len(weights))))
    return [float(weights[apart == distance].mean()) for distance in range(len(weights))]


def tabulate_weights(summary: Summary) -> list[list[str]]:
    """Return the numbers of a figure as a table; nothing for a table."""
    form, header, lines = summary["form"], [""], []
    if form == "toy":
        cells = [cell for cell in summary["cells"] if "accuracy" in cell]
        rows = [[one["row"], f"{100 * one['accuracy']['per_client'][TARGET]:.2f}", str(one["seed"])] for one in cells]
        return [["client 1", "accuracy %", "seed"], *rows]
    for panel, cells in group_alpha(summary).items():
        if form == "heatmap":
            layer = summary["layers"][cells[0]["column"]]
            weights = average_by_distance(average_map(cells, layer))
            lines.append([f"{panel}, {layer}", *(f"{weight:.3f}" for weight in weights)])
            header = ["mean weight at distance", *map(str, range(max(len(header), len(weights) + 1) - 1))]
        elif form == "evolution":
            whose = average_by_period(cells)
            lines.append([panel, *(f"{values[-1].mean():.3f}" for values in whose.values())])
            header = ["last period, mean of layers", *whose]
        elif form == "layer-weights":
            own = average_self_weights(cells)
            largest = layers_in(cells)[int(own.argmax())]
            lines.append([panel, largest, " ".join(f"{weight:.3f}" for weight in own)])
            header = ["self-weight of the target", "largest layer", "from the first layer to the last"]
    return [header, *lines] if lines else []
