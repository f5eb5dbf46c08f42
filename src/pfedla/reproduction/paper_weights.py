"""What the paper's figures show of the weights, as numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Summary = Mapping[str, Any]  # what results.json holds, or one of its cells
PERIODS = ("early", "middle", "last")
TARGET, TWIN, SIMILAR = 0, 1, 2  # of the partition `twins`; all others share no class with the target


def alpha_of(cell: Summary) -> tuple[Array, list[str]]:
    """Return the weights [snapshots, receivers, layers, senders] and the layers."""
    return np.array(cell["alpha"]["values"]), cell["alpha"]["layers"]


def group_cells(summary: Summary) -> dict[str, dict[str, list[Summary]]]:
    """Return the cells with a result, by column and row."""
    found: dict[str, dict[str, list[Summary]]] = {}
    for cell in summary["cells"]:
        if "accuracy" in cell:
            found.setdefault(cell["column"], {}).setdefault(cell["row"], []).append(cell)
    return found


def group_alpha(summary: Summary) -> dict[str, list[Summary]]:
    """Return the cells with weights by panel: a column, or column and row where several rows have weights."""
    found: dict[str, list[Summary]] = {}
    for column, rows in group_cells(summary).items():
        some = {row: kept for row, cells in rows.items() if (kept := [cell for cell in cells if cell.get("alpha")])}
        found |= {f"{column}, {row}" if len(some) > 1 else column: cells for row, cells in some.items()}
    return found


def layer_of(summary: Summary, cells: list[Summary]) -> str:
    layer: str = summary["layers"][cells[0]["column"]]
    return layer


def average_map(cells: list[Summary], layer: str) -> Array:
    """Return the weights [receivers, senders] of a layer after the last round, mean over seeds."""
    maps = []
    for cell in cells:
        alpha, layers = alpha_of(cell)
        maps.append(alpha[-1, :, layers.index(layer)])
    return np.asarray(np.mean(maps, axis=0))


def average_by_distance(weights: Array) -> list[float]:
    """Return the mean weight between clients at distance 0, 1, 2, … along the chain."""
    apart = np.abs(np.subtract.outer(np.arange(len(weights)), np.arange(len(weights))))
    return [float(weights[apart == distance].mean()) for distance in range(len(weights))]


def average_by_period(cells: list[Summary]) -> tuple[dict[str, Array], list[str]]:
    """Return the target client's weights [periods, layers] by sender; `others` is the mean of one of them."""
    whose: dict[str, list[Array]] = {}
    for cell in cells:
        alpha, layers = alpha_of(cell)
        # The start is uniform by construction; a period is a third of the snapshots after it.
        periods = np.stack([part.mean(0)[TARGET] for part in np.array_split(alpha[1:], len(PERIODS))])
        senders = {"self": [TARGET], "same labels": [TWIN], "similar": [SIMILAR]}
        for name, some in {**senders, "others": list(range(SIMILAR + 1, alpha.shape[-1]))}.items():
            whose.setdefault(name, []).append(periods[:, :, some].mean(-1))
    return {name: np.mean(parts, axis=0) for name, parts in whose.items()}, layers


def average_self_weights(cells: list[Summary]) -> tuple[Array, list[str]]:
    """Return the target client's self-weights [layers] after the last round, mean over seeds."""
    found = [alpha_of(cell) for cell in cells]
    return np.mean([alpha[-1, TARGET, :, TARGET] for alpha, _ in found], axis=0), found[0][1]


def tabulate_weights(summary: Summary) -> list[list[str]]:
    """Return the numbers of a figure as a table; nothing for a table."""
    panels, form = group_alpha(summary), summary["form"]
    lines: list[list[str]] = []
    if form == "toy":
        lines = [["client 1", "accuracy %", "seed"]]
        for cell in (cell for cell in summary["cells"] if "accuracy" in cell):
            lines.append([cell["row"], f"{100 * cell['accuracy']['per_client'][0]:.2f}", str(cell["seed"])])
    elif form == "heatmap" and panels:
        for panel, cells in panels.items():
            layer = layer_of(summary, cells)
            weights = average_by_distance(average_map(cells, layer))
            lines.append([f"{panel}, {layer}", *(f"{weight:.3f}" for weight in weights)])
        lines.insert(0, ["mean weight at distance", *map(str, range(max(map(len, lines)) - 1))])
    elif form == "evolution" and panels:
        for panel, cells in panels.items():
            whose, _ = average_by_period(cells)
            lines.append([panel, *(f"{values[-1].mean():.3f}" for values in whose.values())])
        lines.insert(0, ["last period, mean of layers", *whose])
    elif form == "layer-weights" and panels:
        lines = [["self-weight of the target", "largest layer", "from the first layer to the last"]]
        for panel, cells in panels.items():
            own, layers = average_self_weights(cells)
            lines.append([panel, layers[int(own.argmax())], " ".join(f"{weight:.3f}" for weight in own)])
    return lines
