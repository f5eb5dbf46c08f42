"""Shares to whole numbers, so that neither a client nor a class is favoured."""

from itertools import pairwise

import numpy as np

from pfedla.data.own import Array

EPSILON = 1e-6


def shares_to_counts(shares: Array, total: int) -> Array:
    """Whole numbers closest to total * shares with the exact sum (largest remainders; ties to the first)."""
    exact = total * shares / shares.sum()
    counts: Array = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def balanced_counts(exact: Array, totals: Array | None = None) -> Array:
    """A table rounded both ways: every number up or down, the rows summing to `totals`, the columns up or down too.

    Without `totals` the rows of `exact` sum to whole numbers and keep them; with it, these are the sums rounded, and the
    columns come as near as that allows. Rounding row by row would favour the same columns in every row: with a hundred
    classes, some would never be tested, and others asked for more often than there are examples.
    """
    sums = exact.sum(1)
    totals = np.round(sums).astype(np.int64) if totals is None else totals
    counts: Array = np.floor(exact + EPSILON).astype(np.int64)
    movable = exact - counts > EPSILON  # may be rounded up
    up = np.zeros_like(movable)
    owed = np.zeros(exact.shape[1])  # what the columns did not get so far
    for row, free in enumerate(movable):
        owed += exact[row] * (totals[row] / sums[row] if sums[row] else 1) - counts[row]
        chosen = np.argsort(np.where(free, -owed, np.inf), kind="stable")[: totals[row] - counts[row].sum()]
        up[row, chosen] = True
        owed[chosen] -= 1
    while (path := _unfair_path(up, movable, -owed)) is not None:
        for column, following in pairwise(path):
            row = np.flatnonzero(up[:, column] & movable[:, following] & ~up[:, following])[0]
            up[row, column], up[row, following] = False, True
        owed[path[0]] += 1
        owed[path[-1]] -= 1
    return counts + up


def _unfair_path(up: Array, movable: Array, excess: Array) -> list[int] | None:
    """Columns along which one unit can be handed on from a column that has too much to one that has too little.

    None when every column is within one of its exact sum. While one is not, such a path exists where the rows' sums are
    exact (it is a flow problem); where they were rounded, there may be none.
    """
    most, least = int(excess.argmax()), int(excess.argmin())
    if excess[most] < 1 - EPSILON and excess[least] > EPSILON - 1:
        return None
    passes = up.T @ (movable & ~up)  # [from, to]: some row can hand a unit on
    if (path := _nearest(most, passes, excess[most] - excess)) is not None:
        return path
    path = _nearest(least, passes.T, excess - excess[least])
    return None if path is None else path[::-1]


def _nearest(start: int, passes: Array, gap: Array) -> list[int] | None:
    """The shortest way from a column to one whose excess differs by more than a unit."""
    came_from = {start: start}
    queue = [start]
    for column in queue:
        if gap[column] > 1 + EPSILON:
            path = [column]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        for neighbour in np.flatnonzero(passes[column]).tolist():
            if neighbour not in came_from:
                came_from[neighbour] = column
                queue.append(neighbour)
    return None
