"""Labels to clients: draw as many examples of each class as a rule (rules.py) gives every client.

Clients are disjoint unless asked otherwise. Training and test examples of a client have the same distribution
(per class within one, totals exact).
"""

from typing import NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.settings import AUTO
from pfedla.data.dataset import Array, Dataset
from pfedla.data.recipe import Data, require
from pfedla.data.rules import DEALT, Rule, round_table, rule_of

LARGEST = 2**33  # bytes of all clients' examples


class Split(NamedTuple):
    """For training and for test: positions in the data set, per client."""

    train: list[Array]
    test: list[Array]


class Quotas(NamedTuple):
    """For training and for test: how many examples of each class every client gets [clients, classes]."""

    train: Array
    test: Array


def split_dataset(dataset: Dataset, data: Data, rng: np.random.Generator) -> Split:
    """Split a data set into clients; `data` is resolved."""
    if data.partition == "client":
        return _split_by_client(dataset, data, rng)
    rule, clients, wanted = rule_of(dataset, data, rng), require(data.clients), data.samples_per_client
    samples = _find_largest(dataset, rule, data) if wanted == AUTO else wanted
    size = clients * min(samples, len(dataset.y)) * dataset.x[:1].nbytes
    if data.overlapping and size > LARGEST:  # disjoint clients hold the data set once among them
        raise PfedlaError(f"samples_per_client = {samples}: {clients} overlapping clients take {size >> 30} GiB")
    examples = rule.examples(samples)
    quotas = quotas_of(examples, require(data.test_share))
    if not _has_every_class(data, examples, quotas):
        why = f"; {_name_scarcest(dataset, rule, data)}" if wanted == AUTO else ""
        raise PfedlaError(f"samples_per_client = {samples} is too few for all classes of a client{why}")
    if not data.overlapping:
        return draw(dataset, quotas, rng)
    pairs = zip(*quotas, strict=True)
    alone = [draw(dataset, Quotas(train[None], test[None]), rng) for train, test in pairs]
    return Split([split.train[0] for split in alone], [split.test[0] for split in alone])


def quotas_of(examples: Array, test_share: float) -> Quotas:
    """Choose the test examples: every client's total exact, its classes and all clients' within one."""
    totals = np.round(examples.sum(1) * test_share).astype(np.int64)
    test = round_table(examples * test_share, totals)
    return Quotas(examples - test, test)


def _has_every_class(data: Data, examples: Array, quotas: Quotas) -> bool:
    """Tell whether a rule about classes lost none to rounding."""
    if data.partition in DEALT:
        return True
    if data.partition == "dominant":
        return bool(examples.all())
    held = examples > 0
    whole = (held.sum(1) == data.classes_per_client).all()
    return bool(whole and quotas.train[held].all() and quotas.test[held].all())


def _count(dataset: Dataset) -> tuple[Array, Array | None]:
    """Count the examples of each class, and those in the ready test split if there is one."""
    length = len(dataset.classes)
    ready = None if dataset.test is None else np.bincount(dataset.y[dataset.test], minlength=length)
    return np.bincount(dataset.y, minlength=length), ready


def _find_largest(dataset: Dataset, rule: Rule, data: Data) -> int:
    """Find the most examples per client that the classes (and the parts of a ready test split) allow."""
    available, ready = _count(dataset)
    if ready is not None and not ((ready > 0) & (ready < available)).all():
        raise PfedlaError(f"the ready test split lacks a class: {_name_scarcest(dataset, rule, data)}")
    for samples in range(_bound(rule.demand, available, ready, data), 0, -1):
        quotas = quotas_of(rule.examples(samples), require(data.test_share))
        train, test = (quota.max(0) if data.overlapping else quota.sum(0) for quota in quotas)
        fits = train + test <= available if ready is None else (train <= available - ready) & (test <= ready)
        if fits.all():
            return samples
    raise PfedlaError(f"not one sample per client: {_name_scarcest(dataset, rule, data)}")


def _bound(demand: Array, available: Array, ready: Array | None, data: Data) -> int:
    """Return an upper bound of the samples per client, where the search begins."""
    asked = demand > 0
    bounds = [available[asked] / demand[asked]]
    if ready is not None:
        slack = 2 * require(data.clients)  # rounding moves at most two examples of a class per client
        test_share = require(data.test_share)
        for there, share in ((available - ready, 1 - test_share), (ready, test_share)):
            bounds.append((there[asked] + slack) / (share * demand[asked]))
    return int(np.min(bounds) + 1e-9)


def _name_scarcest(dataset: Dataset, rule: Rule, data: Data) -> str:
    """Name the class that limits the number of samples, by its rarer part if there is a ready test split."""
    available, ready = _count(dataset)
    rarest = available if ready is None else np.minimum(available - ready, ready)
    label = int(np.argmin(np.where(rule.demand > 0, rarest / np.maximum(rule.demand, 1e-9), np.inf)))
    part = "" if ready is None else " for training or for test"
    few = f"class {dataset.classes[label]!r} of {dataset.name} has only {rarest[label]} examples{part}"
    return f"{few}; use fewer than {data.clients} clients or give more examples"


def draw(dataset: Dataset, quotas: Quotas, rng: np.random.Generator) -> Split:
    """Draw random examples by quota, disjoint between clients; test examples come from a ready test split."""
    pools: list[tuple[Array, Array]] = []  # per class: candidates for training, for test
    for label, name in enumerate(dataset.classes):
        rows = rng.permutation(np.flatnonzero(dataset.y == label))
        need, need_test = quotas.train[:, label].sum(), quotas.test[:, label].sum()
        if dataset.test is None:
            _check_enough(name, rows, need + need_test, "")
            pools.append((rows[need_test:], rows[:need_test]))
        else:
            train_rows, test_rows = rows[~dataset.test[rows]], rows[dataset.test[rows]]
            _check_enough(name, train_rows, need, " for training")
            _check_enough(name, test_rows, need_test, " for test")
            pools.append((train_rows, test_rows))
    split = Split([], [])
    for which, (part, quota) in enumerate(zip(split, quotas, strict=True)):
        ends = np.cumsum(quota, axis=0)
        for begin, end in zip(ends - quota, ends, strict=True):
            picked = [pool[which][first:last] for pool, first, last in zip(pools, begin, end, strict=True)]
            part.append(np.sort(np.concatenate(picked)))
    return split


def _check_enough(name: str, rows: Array, need: int, purpose: str) -> None:
    if need > len(rows):
        lacking = f"has {len(rows)} examples{purpose}, the partition needs {need}"
        raise PfedlaError(f"class {name!r} {lacking}; use fewer clients or a smaller samples_per_client")


def _split_by_client(dataset: Dataset, data: Data, rng: np.random.Generator) -> Split:
    """Split by the owners that the data name; the test split is theirs, or drawn per class."""
    assert dataset.client is not None  # `resolve` has seen it
    examples = np.zeros((len(dataset.client_names), len(dataset.classes)), np.int64)
    np.add.at(examples, (dataset.client, dataset.y), 1)
    # One sort instead of a search for each client.
    own_rows = np.split(np.argsort(dataset.client, kind="stable"), np.cumsum(examples.sum(1))[:-1])
    if dataset.test is not None:
        test = [rows[dataset.test[rows]] for rows in own_rows]
    else:
        quotas = quotas_of(examples, require(data.test_share)).test
        test = [_draw_test(dataset.y, rows, quota, rng) for rows, quota in zip(own_rows, quotas, strict=True)]
    return Split([np.setdiff1d(rows, held_out) for rows, held_out in zip(own_rows, test, strict=True)], test)


def _draw_test(y: Array, rows: Array, quota: Array, rng: np.random.Generator) -> Array:
    picked = [rng.permutation(rows[y[rows] == label])[:count] for label, count in enumerate(quota)]
    return np.sort(np.concatenate(picked))


def leaked_share(split: Split) -> float:
    """Return the share of the test examples that train another client; 0 unless clients overlap."""
    tests = np.concatenate(split.test)
    return float(np.isin(tests, np.concatenate(split.train)).mean()) if len(tests) else 0.0
