"""Labels to clients: draw as many examples of each class as a rule (rules.py) gives every client.

Clients are disjoint unless asked otherwise. Training and test examples of a client have the same distribution
(per class within one, totals exact). An axis [2] is training, test.
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


def split_dataset(dataset: Dataset, data: Data, rng: np.random.Generator) -> Split:
    """Split a data set into clients; `data` is resolved."""
    if data.partition == "client":
        return _split_by_client(dataset, data, rng)
    rule, clients, wanted = rule_of(dataset, data, rng), require(data.clients), data.samples_per_client
    samples = _find_largest(dataset, rule, data) if wanted == AUTO else wanted
    size = clients * min(samples, len(dataset.y)) * dataset.x[:1].nbytes
    if data.overlapping and size > LARGEST:  # disjoint clients hold the data set once among them
        raise PfedlaError(f"samples_per_client = {samples}: {clients} overlapping clients take {size >> 30} GiB")
    quotas = quotas_of(rule.examples(samples), require(data.test_share))
    if not _has_every_class(data, quotas):
        why = f"; {_name_scarcest(dataset, rule)}" if wanted == AUTO else ""
        raise PfedlaError(f"samples_per_client = {samples} is too few for all classes of a client{why}")
    if not data.overlapping:
        return draw(dataset, quotas, rng)
    alone = [draw(dataset, quotas[:, client : client + 1], rng) for client in range(clients)]
    return Split([split.train[0] for split in alone], [split.test[0] for split in alone])


def quotas_of(examples: Array, test_share: float) -> Array:
    """Divide [clients, classes] into [2, clients, classes]: totals of clients exact, of classes within one."""
    totals = np.round(examples.sum(1) * test_share).astype(np.int64)
    test = round_table(examples * test_share, totals)
    return np.stack([examples - test, test])


def _has_every_class(data: Data, quotas: Array) -> bool:
    """Tell whether a rule about classes lost none to rounding."""
    held = quotas.any(0)
    if data.partition in DEALT or data.partition == "dominant":
        return data.partition in DEALT or bool(held.all())
    return bool((held.sum(1) == data.classes_per_client).all() and quotas[:, held].all())


def _count(dataset: Dataset) -> Array:
    """Count the examples of each class [1, classes]; with a ready test split [2, classes]."""
    parts = [...] if dataset.test is None else [~dataset.test, dataset.test]
    return np.stack([np.bincount(dataset.y[part], minlength=len(dataset.classes)) for part in parts])


def _find_largest(dataset: Dataset, rule: Rule, data: Data) -> int:
    """Find the most examples per client that the classes (and the parts of a ready test split) allow."""
    available, asked, test_share = _count(dataset), rule.demand > 0, require(data.test_share)
    bounds = [available.sum(0)[asked] / rule.demand[asked]]
    if len(available) == 2:  # rounding moves at most two examples of a class per client
        shares = np.array([[1 - test_share], [test_share]])
        bounds.extend((available[:, asked] + 2 * require(data.clients)) / (shares * rule.demand[asked]))
    most = int(np.min(bounds) + 1e-9) if len(available) == 1 or available.all() else 0
    for samples in range(most, 0, -1):
        quotas = quotas_of(rule.examples(samples), test_share)
        needed = quotas.max(1) if data.overlapping else quotas.sum(1)
        if ((needed if len(available) == 2 else needed.sum(0)) <= available).all():
            return samples
    raise PfedlaError(f"samples_per_client: {_name_scarcest(dataset, rule)}")


def _name_scarcest(dataset: Dataset, rule: Rule) -> str:
    """Name the class that limits the number of samples, by its rarer part if there is a ready test split."""
    rarest = _count(dataset).min(0)
    label = int(np.argmin(np.where(rule.demand > 0, rarest / np.maximum(rule.demand, 1e-9), np.inf)))
    part = "" if dataset.test is None else " for training or for test"
    few = f"class {dataset.classes[label]!r} of {dataset.name} has only {rarest[label]} examples{part}"
    return f"{few}; use fewer clients or give more examples"


def draw(dataset: Dataset, quotas: Array, rng: np.random.Generator) -> Split:
    """Draw random examples by quota [2, clients, classes], disjoint; test examples come from a ready test split."""
    pools: list[tuple[Array, Array]] = []  # per class: candidates for training, for test
    for label, (name, needs) in enumerate(zip(dataset.classes, quotas.sum(1).T, strict=True)):
        rows = rng.permutation(np.flatnonzero(dataset.y == label))
        ready = np.arange(len(rows)) < needs[1] if dataset.test is None else dataset.test[rows]
        pools.append((rows[~ready], rows[ready]))
        if (needs > [len(part) for part in pools[-1]]).any():
            what = f"class {name!r} has {len(rows)} examples, the partition needs {needs[0]} + {needs[1]} for test"
            raise PfedlaError(f"{what}; use fewer clients or a smaller samples_per_client")
    split = Split([], [])
    for which, (part, ends) in enumerate(zip(split, np.cumsum(quotas, axis=1), strict=True)):
        for begin, end in zip(ends - quotas[which], ends, strict=True):
            picked = [pool[which][first:last] for pool, first, last in zip(pools, begin, end, strict=True)]
            part.append(np.sort(np.concatenate(picked)))
    return split


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
        test = []
        for rows, quota in zip(own_rows, quotas_of(examples, require(data.test_share))[1], strict=True):
            picked = [rng.permutation(rows[dataset.y[rows] == label])[:count] for label, count in enumerate(quota)]
            test.append(np.sort(np.concatenate(picked)))
    return Split([np.setdiff1d(rows, held_out) for rows, held_out in zip(own_rows, test, strict=True)], test)


def leaked_share(split: Split) -> float:
    """Return the share of the test examples that train another client; 0 unless clients overlap."""
    tests = np.concatenate(split.test)
    return float(np.isin(tests, np.concatenate(split.train)).mean()) if len(tests) else 0.0
