"""How heterogeneous a federation is, in numbers."""

from typing import Any

import numpy as np

from pfedla.data.dataset import Array


def label_shares(counts: Array) -> Array:
    """Return label distributions [clients, classes] from counts [clients, 2 (train, test), classes]."""
    totals = counts.sum(1)
    shares: Array = totals / totals.sum(1, keepdims=True)
    return shares


def label_entropy(shares: Array) -> Array:
    """Return [clients], in bits: 0 for a single class, log2(classes) for equal shares."""
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: Array = -(shares * logarithms).sum(1) + 0.0  # no minus zero
    return entropy


def mean_pairwise_distance(shares: Array) -> float:
    """Return the mean total variation distance between two clients: 0 same labels, 1 no class in common."""
    clients = len(shares)
    total = sum(float(np.abs(shares[i + 1 :] - shares[i]).sum()) / 2 for i in range(clients))
    return total / (clients * (clients - 1) / 2) if clients > 1 else 0.0


def split_statistics(counts: Array) -> dict[str, Any]:
    """Return the statistics that results show of a split; counts [clients, 2 (train, test), classes]."""
    shares = label_shares(counts)
    return {
        "training_examples": _spread(counts[:, 0].sum(1)),
        "test_examples": _spread(counts[:, 1].sum(1)),
        "classes_per_client": _spread((counts.sum(1) > 0).sum(1)),
        "label_entropy_bits": _spread(label_entropy(shares)),
        "mean_pairwise_distance": mean_pairwise_distance(shares),
    }


def _spread(values: Array) -> dict[str, float]:
    return {"mean": float(values.mean()), "min": values.min().item(), "max": values.max().item()}
