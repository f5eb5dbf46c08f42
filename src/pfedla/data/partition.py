"""Labels to clients: how many examples of each class every client gets, then which ones.

A rule makes a table of quotas [clients, classes]; `draw` takes that many examples, disjoint between clients, and
splits each client's into training and test with the same distribution (per class within one, totals exact).
"""

from typing import Literal, NamedTuple

import numpy as np

from pfedla.data.datasets import Array, Dataset
from pfedla.errors import PfedlaError

Partition = Literal["classes", "dominant", "client"]


class Split(NamedTuple):
    """Positions in the data set, per client."""

    train: list[Array]
    test: list[Array]


def shares_to_counts(shares: Array, total: int) -> Array:
    """Whole numbers closest to total * shares with the exact sum (largest remainders; ties to the first)."""
    exact = total * shares / shares.sum()
    counts: Array = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def assign_classes(num_clients: int, num_classes: int, per_client: int, rng: np.random.Generator) -> Array:
    """[clients, classes] booleans: distinct random classes for each client, every class held equally often (±1)."""
    each, extra = divmod(num_clients * per_client, num_classes)
    left = np.full(num_classes, each)
    left[rng.permutation(num_classes)[:extra]] += 1
    holds = np.zeros((num_clients, num_classes), bool)
    for client in range(num_clients):
        # A class that is still owed to as many clients as remain must be taken now; the rest is drawn by what is left.
        must = left >= num_clients - client
        weights = np.where(must, 0, left).astype(float)
        free = per_client - must.sum()
        chosen = rng.choice(num_classes, size=free, replace=False, p=weights / weights.sum()) if free else []
        holds[client] = must
        holds[client, chosen] = True
        left -= holds[client]
    return holds


def class_shares(
    partition: Partition, num_clients: int, num_classes: int, classes: int, share: float, rng: np.random.Generator
) -> Array:
    """[clients, classes] shares, each row summing to one.

    classes (non-IID_1): `classes` random classes a client, the same amount of each.
    dominant (non-IID_2): all classes, of which `classes` random ones together make up `share`.
    """
    holds = assign_classes(num_clients, num_classes, classes, rng)
    if partition == "classes":
        return holds / classes
    return np.where(holds, share / classes, (1 - share) / (num_classes - classes))


class Quotas(NamedTuple):
    """[clients, classes]: how many examples of each class every client gets, for training and for test."""

    train: Array
    test: Array


def quotas_of(shares: Array, samples: int, test_share: float) -> Quotas:
    both = np.stack([shares_to_counts(row, samples) for row in shares])
    test = np.stack([_test_counts(row, test_share) for row in both])
    return Quotas(both - test, test)


def _test_counts(quota: Array, test_share: float) -> Array:
    """Test examples per class: the total exact, each class within one of its share."""
    return shares_to_counts(quota, round(quota.sum() * test_share)) if quota.any() else quota


def largest_samples(dataset: Dataset, shares: Array, test_share: float) -> int:
    """The most examples per client that the classes (and the parts of a ready test split) allow; 0 if not even one."""
    available = np.bincount(dataset.y, minlength=len(dataset.classes))
    ready = None if dataset.test is None else np.bincount(dataset.y[dataset.test], minlength=len(dataset.classes))
    demand = shares.sum(0)
    most = int(np.min(available[demand > 0] / demand[demand > 0]))  # before rounding
    for samples in range(most, 0, -1):
        train, test = (quota.sum(0) for quota in quotas_of(shares, samples, test_share))
        fits = train + test <= available if ready is None else (train <= available - ready) & (test <= ready)
        if fits.all():
            return samples
    return 0


def draw(dataset: Dataset, quotas: Quotas, rng: np.random.Generator) -> Split:
    """Disjoint random examples by quota. A ready test split is honoured: test quotas are taken from it alone."""
    split = Split([], [])
    pools: list[tuple[Array, Array]] = []  # per class: candidates for training, for test
    for label, name in enumerate(dataset.classes):
        rows = rng.permutation(np.flatnonzero(dataset.y == label))
        need, need_test = quotas.train[:, label].sum(), quotas.test[:, label].sum()
        if dataset.test is None:
            _enough(name, rows, need + need_test, "")
            pools.append((rows[need_test:], rows[:need_test]))
        else:
            train_rows, test_rows = rows[~dataset.test[rows]], rows[dataset.test[rows]]
            _enough(name, train_rows, need, " for training")
            _enough(name, test_rows, need_test, " for test")
            pools.append((train_rows, test_rows))
    ends = np.cumsum(quotas.train, axis=0), np.cumsum(quotas.test, axis=0)
    for client in range(len(quotas.train)):
        for part, end, which in ((split.train, ends[0], 0), (split.test, ends[1], 1)):
            begin = end[client - 1] if client else np.zeros_like(end[0])
            picked = [pools[label][which][begin[label] : end[client, label]] for label in range(len(pools))]
            part.append(np.sort(np.concatenate(picked)))
    return split


def _enough(name: str, rows: Array, need: int, purpose: str) -> None:
    if need > len(rows):
        raise PfedlaError(
            f"class {name!r} has {len(rows)} examples{purpose}, the partition asks for {need}: {need - len(rows)} are "
            "lacking; use fewer clients or fewer samples per client"
        )


def by_client(dataset: Dataset, test_share: float, rng: np.random.Generator) -> Split:
    """The data's own partition; its ready test split, or one drawn per class."""
    if dataset.client is None:
        raise PfedlaError(f"partition 'client': {dataset.name} has no array 'client'; use classes or dominant")
    split = Split([], [])
    for client in range(len(dataset.client_names)):
        rows = np.flatnonzero(dataset.client == client)
        if dataset.test is None:
            labels = dataset.y[rows]
            counts = _test_counts(np.bincount(labels, minlength=len(dataset.classes)), test_share)
            held_out = [rng.permutation(rows[labels == label])[:count] for label, count in enumerate(counts)]
            test = np.sort(np.concatenate(held_out))
        else:
            test = rows[dataset.test[rows]]
        split.test.append(test)
        split.train.append(np.setdiff1d(rows, test))
    return split
