"""Order clients so that similar clients are next to each other."""

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from pfedla.report.reading import Array

OPTIMAL, CLUSTERED = 300, 2_000  # most clients for optimal leaf order, and for clustering: more take minutes


def order_by_labels(counts: Array) -> list[int]:
    """Order clients by their shares of the classes; counts [clients, classes]."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if len(counts) > CLUSTERED:
        return [int(client) for client in np.lexsort((-shares.max(1), shares.argmax(1)))]
    return _order_leaves(pdist(shares, "cityblock") / 2)


def order_by_weights(alpha: Array) -> list[int]:
    """Order clients by how much they borrow from each other; alpha [clients, layers, clients]."""
    taken = alpha.mean(1, dtype=np.float64)
    tie = (taken + taken.T) / 2
    np.fill_diagonal(tie, 0)
    distance = tie.max() - tie
    np.fill_diagonal(distance, 0)
    return _order_leaves(squareform(distance, checks=False))


def _order_leaves(distances: Array) -> list[int]:
    clients = round((1 + np.sqrt(1 + 8 * len(distances))) / 2)
    if clients < 3:
        return list(range(clients))
    return [int(client) for client in leaves_list(linkage(distances, "average", optimal_ordering=clients <= OPTIMAL))]
