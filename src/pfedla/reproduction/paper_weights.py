"""What the paper's figures show of the weights, as numbers: pictures, tables and tests read these."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Summary = Mapping[str, Any]  # what results.json holds
PERIODS = ("early", "middle", "last")
TARGET, TWIN, SIMILAR = 0, 1, 2  # of the partition `twins`; all others share no class with the target


def alpha_of(cell: Summary) -> tuple[Array, list[str], list[int]]:
    """[snapshots, receivers, layers, senders], layers, rounds."""
    return np.array(cell["alpha"]["values"]), cell["alpha"]["layers"], cell["alpha"]["rounds"]


def by_column(summary: Summary, row: str | None = None) -> dict[str, list[Summary]]:
    """The cells that were played, of each column."""
    found: dict[str, list[Summary]] = {}
    for cell in summary["cells"]:
        if "accuracy" in cell and row in (None, cell["row"]):
            found.setdefault(cell["column"], []).append(cell)
    return found


def with_alpha(summary: Summary) -> dict[str, list[Summary]]:
    """Of each column the cells that have weights to show."""
    found = {column: [cell for cell in cells if "alpha" in cell] for column, cells in by_column(summary).items()}
    return {column: cells for column, cells in found.items() if cells}


def heatmap(cells: list[Summary], layer: str) -> Array:
    """[receivers, senders] after the last round, mean over seeds."""
    maps = []
    for cell in cells:
        alpha, layers, _ = alpha_of(cell)
        maps.append(alpha[-1, :, layers.index(layer)])
    return np.asarray(np.mean(maps, axis=0))


def by_distance(weights: Array) -> list[float]:
    """Mean weight between clients at distance 0, 1, 2, … along the chain."""
    apart = np.abs(np.subtract.outer(np.arange(len(weights)), np.arange(len(weights))))
    return [float(weights[apart == distance].mean()) for distance in range(len(weights))]


def evolution(cells: list[Summary]) -> tuple[dict[str, Array], list[str]]:
    """Of the target client, whose weight: [periods, layers]; `others` is the mean of one of them."""
    whose: dict[str, list[Array]] = {}
    for cell in cells:
        alpha, layers, _ = alpha_of(cell)
        # The start is uniform by construction; a period is a third of the snapshots after it.
        periods = np.stack([part.mean(0)[TARGET] for part in np.array_split(alpha[1:], len(PERIODS))])
        for name, senders in (("self", [TARGET]), ("same labels", [TWIN]), ("similar", [SIMILAR])):
            whose.setdefault(name, []).append(periods[:, :, senders].mean(-1))
        whose.setdefault("others", []).append(periods[:, :, SIMILAR + 1 :].mean(-1))
    return {name: np.mean(parts, axis=0) for name, parts in whose.items()}, layers


def self_weights(cells: list[Summary], client: int = TARGET) -> tuple[Array, list[str]]:
    """[layers], of one client after the last round, mean over seeds."""
    parts = []
    for cell in cells:
        alpha, layers, _ = alpha_of(cell)
        parts.append(alpha[-1, client, :, client])
    return np.mean(parts, axis=0), layers


def weight_table(summary: Summary) -> list[list[str]]:
    """A header and a row per column of the experiment; nothing for a table."""
    found, form = with_alpha(summary), summary["form"]
    if form == "heatmap" and found:
        rows = {column: by_distance(heatmap(cells, summary["layers"][column])) for column, cells in found.items()}
        distances = max(map(len, rows.values()))
        header = ["mean weight at distance", *map(str, range(distances))]
        return [header, *([f"{column}, {summary['layers'][column]}", *_three(row)] for column, row in rows.items())]
    if form == "evolution" and found:
        lines = []
        for column, cells in found.items():
            whose, _ = evolution(cells)
            lines.append([column, *_three([float(values[-1].mean()) for values in whose.values()])])
        return [["last period, mean of layers", *whose], *lines]
    if form == "toy":
        cells = [cell for cell in summary["cells"] if "accuracy" in cell]
        first = [[cell["row"], f"{100 * cell['accuracy']['per_client'][0]:.2f}", str(cell["seed"])] for cell in cells]
        return [["client 1", "accuracy %", "seed"], *first]
    if form == "layer-weights" and found:
        lines = []
        for column, cells in found.items():
            values, layers = self_weights(cells)
            lines.append([column, layers[int(values.argmax())], " ".join(f"{v:.3f}" for v in values)])
        return [["self-weight of the target", "largest layer", "from the first layer to the last"], *lines]
    return []


def _three(values: list[float]) -> list[str]:
    return [f"{value:.3f}" for value in values]
