"""Labels to clients: how many examples of each class every client gets, then which ones.

A rule (rules.py) says how many examples of each class every client gets for so many samples; `draw` takes that many,
disjoint between clients unless asked otherwise, and splits each client's into training and test with the same
distribution (per class within one, totals exact).
"""

from typing import NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.own import LARGEST, Array, Dataset
from pfedla.data.recipe import Recipe
from pfedla.data.rounding import balanced_counts
from pfedla.data.rules import DEALT, Rule, rule_of


class Split(NamedTuple):
    """Positions in the data set, per client."""

    train: list[Array]
    test: list[Array]


class Quotas(NamedTuple):
    """[clients, classes]: how many examples of each class every client gets, for training and for test."""

    train: Array
    test: Array


def split_of(dataset: Dataset, recipe: Recipe, rng: np.random.Generator) -> Split:
    """Cut a data set into clients, or say why that cannot be."""
    if recipe.partition == "client":
        return by_client(dataset, recipe.test_share, rng)
    rule = rule_of(dataset, recipe, rng)
    samples = recipe.samples_per_client or _largest_samples(dataset, rule, recipe)
    size = recipe.clients * min(samples, len(dataset.y)) * dataset.x[:1].nbytes
    if recipe.overlapping and size > LARGEST:  # the others have the data set once among them
        raise PfedlaError(f"{recipe.clients} overlapping clients of {samples} samples would take {size >> 30} GiB; use fewer")
    examples = rule(samples)
    quotas = quotas_of(examples, recipe.test_share)
    if not _every_class_is_there(recipe, examples, quotas):
        wanted = "every class" if recipe.partition == "dominant" else "training and test examples of each of its classes"
        why = "" if recipe.samples_per_client else f"; {_scarcest(dataset, rule, recipe)}"
        raise PfedlaError(f"{samples} samples per client are too few for {wanted}{why}")
    return draw(dataset, quotas, rng, recipe.overlapping)


def quotas_of(examples: Array, test_share: float) -> Quotas:
    """Test examples: every client's total exact, each of its classes within one of its share, and so each class over all."""
    totals = np.round(examples.sum(1) * test_share).astype(np.int64)
    test = balanced_counts(examples * test_share, totals)
    return Quotas(examples - test, test)


def _every_class_is_there(recipe: Recipe, examples: Array, quotas: Quotas) -> bool:
    """A rule about classes must not lose one to rounding."""
    if recipe.partition in DEALT:
        return True
    if recipe.partition == "dominant":
        return bool(examples.all())
    held = examples > 0
    whole = (held.sum(1) == recipe.classes_per_client).all()
    return bool(whole and quotas.train[held].all() and quotas.test[held].all())


def _available(dataset: Dataset) -> tuple[Array, Array | None]:
    """Examples of each class, and of these in the ready test split if there is one."""
    available = np.bincount(dataset.y, minlength=len(dataset.classes))
    return available, None if dataset.test is None else np.bincount(dataset.y[dataset.test], minlength=len(dataset.classes))


def _largest_samples(dataset: Dataset, rule: Rule, recipe: Recipe) -> int:
    """The most examples per client that the classes (and the parts of a ready test split) allow."""
    available, ready = _available(dataset)
    if ready is not None:
        for part, counts in (("training", available - ready), ("test", ready)):
            if not counts.all():
                name = dataset.classes[int(counts.argmin())]
                raise PfedlaError(
                    f"class {name!r} has no {part} example in the ready split of {dataset.name}; give some, or no split"
                )
    for samples in range(_bound(rule.demand(recipe.overlapping), available, ready, recipe), 0, -1):
        quotas = quotas_of(rule(samples), recipe.test_share)
        train, test = (quota.max(0) if recipe.overlapping else quota.sum(0) for quota in quotas)
        fits = train + test <= available if ready is None else (train <= available - ready) & (test <= ready)
        if fits.all():
            return samples
    raise PfedlaError(f"not even one sample per client can be had: {_scarcest(dataset, rule, recipe)}")


def _scarcest(dataset: Dataset, rule: Rule, recipe: Recipe) -> str:
    """The class that decides how many samples there can be, in words."""
    available, _ = _available(dataset)
    demand = rule.demand(recipe.overlapping)
    label = int(np.argmin(np.where(demand > 0, available / np.maximum(demand, 1e-9), np.inf)))
    return (
        f"class {dataset.classes[label]!r} of {dataset.name} has {available[label]} examples for {recipe.clients} clients; "
        "use fewer clients or give more examples"
    )


def _bound(demand: Array, available: Array, ready: Array | None, recipe: Recipe) -> int:
    """More samples per client than this cannot be had: where the search for the largest number begins."""
    asked = demand > 0
    bounds = [available[asked] / demand[asked]]
    if ready is not None:
        slack = 2 * recipe.clients  # rounding moves at most two examples of a class per client between the parts
        for there, share in ((available - ready, 1 - recipe.test_share), (ready, recipe.test_share)):
            bounds.append((there[asked] + slack) / (share * demand[asked]))
    return int(np.min(bounds) + 1e-9)


def draw(dataset: Dataset, quotas: Quotas, rng: np.random.Generator, overlapping: bool = False) -> Split:
    """Random examples by quota, disjoint between clients; a ready test split is honoured: test quotas come from it alone.

    `overlapping`: every client draws from the whole pool, so that a test example of one may train another.
    """
    if overlapping:
        alone = [_draw_disjoint(dataset, Quotas(train[None], test[None]), rng) for train, test in zip(*quotas, strict=True)]
        return Split([split.train[0] for split in alone], [split.test[0] for split in alone])
    return _draw_disjoint(dataset, quotas, rng)


def _draw_disjoint(dataset: Dataset, quotas: Quotas, rng: np.random.Generator) -> Split:
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
    assert dataset.client is not None  # the recipe has seen it
    split = Split([], [])
    examples = np.zeros((len(dataset.client_names), len(dataset.classes)), np.int64)
    np.add.at(examples, (dataset.client, dataset.y), 1)
    quotas = quotas_of(examples, test_share)
    own_rows = np.split(np.argsort(dataset.client, kind="stable"), np.cumsum(examples.sum(1))[:-1])  # not a search for each
    for client, rows in enumerate(own_rows):
        if dataset.test is None:
            labels = dataset.y[rows]
            held_out = [rng.permutation(rows[labels == label])[:count] for label, count in enumerate(quotas.test[client])]
            test = np.sort(np.concatenate(held_out))
        else:
            test = rows[dataset.test[rows]]
        split.test.append(test)
        split.train.append(np.setdiff1d(rows, test))
    return split


def leaked_share(split: Split) -> float:
    """The share of all test examples that are in the training set of another client; 0 unless overlapping."""
    tests = np.concatenate(split.test)
    return float(np.isin(tests, np.concatenate(split.train)).mean()) if len(tests) else 0.0
