"""How heterogeneous a federation is, in numbers."""

from typing import Any

import numpy as np

from pfedla.data.dataset import Array


def mean_pairwise_distance(shares: Array) -> float:
    """Return the mean total variation distance between two clients: 0 same labels, 1 no class in common."""
    clients = len(shares)
    total = sum(float(np.abs(shares[i + 1 :] - shares[i]).sum()) / 2 for i in range(clients))
    return total / (clients * (clients - 1) / 2) if clients > 1 else 0.0


def split_statistics(counts: Array) -> dict[str, Any]:
    """Return the statistics that results show of a split; counts [clients, 2 (train, test), classes]."""
    totals = counts.sum(1)
    shares = totals / totals.sum(1, keepdims=True)
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    spreads = {
        "training_examples": counts[:, 0].sum(1),
        "test_examples": counts[:, 1].sum(1),
        "classes_per_client": (totals > 0).sum(1),
        "label_entropy_bits": -(shares * logarithms).sum(1) + 0.0,  # 0 for a single class, and not minus zero
    }
    numbers = {
        key: {"mean": float(v.mean()), "min": v.min().item(), "max": v.max().item()} for key, v in spreads.items()
    }
    return {**numbers, "mean_pairwise_distance": mean_pairwise_distance(shares)}
