"""In which order clients are shown, so that those who are alike stand together."""

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from pfedla.report.figures import Array

TURNED, CLUSTERED = 300, 2_000  # clients: with more, leaves are not turned, nor clusters made: that takes minutes


def by_labels(counts: Array) -> list[int]:
    """Clients with similar shares of the classes beside each other; counts [clients, classes]."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if len(counts) > CLUSTERED:
        return [int(client) for client in np.lexsort((-shares.max(1), shares.argmax(1)))]
    return _leaves(pdist(shares, "cityblock") / 2)


def by_weights(alpha: Array) -> list[int]:
    """Clients who borrow from each other beside each other; alpha [clients, layers, clients], all layers count alike."""
    taken = alpha.mean(1, dtype=np.float64)
    tie = (taken + taken.T) / 2
    np.fill_diagonal(tie, 0)
    distance = tie.max() - tie
    np.fill_diagonal(distance, 0)
    return _leaves(squareform(distance, checks=False))


def _leaves(distances: Array) -> list[int]:
    clients = round((1 + np.sqrt(1 + 8 * len(distances))) / 2)
    if clients < 3:
        return list(range(clients))
    tree = linkage(distances, "average", optimal_ordering=clients <= TURNED)
    return [int(client) for client in leaves_list(tree)]
