"""How many examples of each class a client gets: the paper's non-IID_1 and non-IID_2 and other splits."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.dataset import Array, Dataset
from pfedla.data.recipe import Data, require

FEWEST = 10  # a dirichlet draw that leaves a client fewer examples, or fewer than half the mean, is repeated
DRAWS = 1000
EPSILON = 1e-6


class Rule(NamedTuple):
    """Which client gets which class is drawn when a rule is made; it then serves any number of samples."""

    examples: Callable[[int], Array]  # samples per client -> examples [clients, classes]
    demand: Array  # [classes]: how many examples of each class one sample per client takes from the data set


def rule_of(dataset: Dataset, data: Data, rng: np.random.Generator) -> Rule:
    if data.partition in DEALT:
        return _deal(np.bincount(dataset.y, minlength=len(dataset.classes)), data, int(rng.integers(2**63)))
    shares = (_choose_dominant if data.partition == "dominant" else _choose_holders)(dataset, data, rng)
    demand = shares.max(0) if data.overlapping else shares.sum(0)
    return Rule(lambda samples: round_table(samples * shares), demand)


def _choose_holders(dataset: Dataset, data: Data, rng: np.random.Generator) -> Array:
    """Give each client a few classes, of all the same share [clients, classes]."""
    clients, each, num_classes = require(data.clients), require(data.classes_per_client), len(dataset.classes)
    if num_classes < (needed := {"chain": each + 1, "twins": 2 * each}.get(data.partition, each)):
        raise PfedlaError(f"classes_per_client = {each} needs {needed} classes, {dataset.name} has {num_classes}")
    if data.partition == "classes":
        return assign_classes(clients, num_classes, each, rng) / each
    if data.partition == "twins":
        return _choose_twins(clients, num_classes, each, rng) / each
    # Consecutive classes. In "toy" client 0 shares two with client 1, one with client 5 and none with the others.
    starts = np.arange(clients) * 3 // 2 if data.partition == "toy" else np.arange(clients)
    shares = np.zeros((clients, num_classes))
    np.put_along_axis(shares, (starts[:, None] + np.arange(each)) % num_classes, 1 / each, axis=1)
    return shares


def _choose_twins(clients: int, num_classes: int, each: int, rng: np.random.Generator) -> Array:
    """Client 0 is the target, 1 has its classes, 2 all but one of them; the others have none of them."""
    if clients < 4:
        raise PfedlaError(f"clients = {clients}: partition 'twins' needs 4 (target, twin, similar one, others) or more")
    order = rng.permutation(num_classes)
    target, rest = order[:each], order[each:]
    holds = np.zeros((clients, num_classes), bool)
    holds[:2, target] = True
    holds[2, target[1:]] = True
    others = assign_classes(clients - 3, len(rest), each, rng)
    holds[3:, rest] = others
    holds[2, rest[others.sum(0).argmin()]] = True  # the rarest of the other classes, for balance
    return holds


def assign_classes(num_clients: int, num_classes: int, per_client: int, rng: np.random.Generator) -> Array:
    """Draw distinct classes for each client [clients, classes], every class held equally often (±1)."""
    each, extra = divmod(num_clients * per_client, num_classes)
    left = np.full(num_classes, each)
    left[rng.permutation(num_classes)[:extra]] += 1
    holds = np.zeros((num_clients, num_classes), bool)
    for client in range(num_clients):
        # A class that as many clients need as remain must be taken now; the others are drawn by what is left.
        must = left >= num_clients - client
        weights = np.where(must, 0, left).astype(float)
        free = per_client - must.sum()
        chosen = rng.choice(num_classes, size=free, replace=False, p=weights / weights.sum()) if free else []
        holds[client] = must
        holds[client, chosen] = True
        left -= holds[client]
    return holds


def _choose_dominant(dataset: Dataset, data: Data, rng: np.random.Generator) -> Array:
    """All classes, of which a few random ones together make up `dominant_share`."""
    num_classes, few, share = len(dataset.classes), require(data.dominant_classes), require(data.dominant_share)
    if few >= num_classes or share <= few / num_classes:
        what = f"dominant_classes = {few} of {num_classes} with dominant_share = {share}"
        raise PfedlaError(f"{what} would not dominate; use fewer classes or a larger share")
    holds = assign_classes(require(data.clients), num_classes, few, rng)
    return np.where(holds, share / few, (1 - share) / (num_classes - few))


def _deal(available: Array, data: Data, seed: int) -> Rule:
    """Deal out a pool that has the data set's own shares of classes."""
    clients, there = require(data.clients), int(available.sum())

    def count(samples: int) -> Array:
        need = samples if data.overlapping else clients * samples
        if need > there:
            raise PfedlaError(f"samples_per_client = {samples}: needs {need} examples, there are {there}")
        pool = round_shares(available, clients * samples)
        return DEALT[data.partition](pool, samples, data, np.random.default_rng(seed))

    return Rule(count, clients * available / there)


def _deal_iid(pool: Array, samples: int, data: Data, rng: np.random.Generator) -> Array:
    """Shuffle the pool and deal it out in equal parts."""
    parts = rng.permutation(np.repeat(np.arange(len(pool)), pool)).reshape(-1, samples)
    return np.stack([np.bincount(part, minlength=len(pool)) for part in parts])


def _deal_shards(pool: Array, samples: int, data: Data, rng: np.random.Generator) -> Array:
    """Cut the pool, sorted by class, into shards; every client gets a few at random (McMahan et al. 2017)."""
    clients, per_client = require(data.clients), require(data.shards_per_client)
    if per_client > samples:
        raise PfedlaError(f"shards_per_client = {per_client}, but a client has only {samples} samples")
    owner, position = np.divmod(rng.permutation(clients * per_client), per_client)
    sizes = samples // per_client + (position < samples % per_client)
    examples = np.zeros((clients, len(pool)), np.int64)
    np.add.at(examples, (np.repeat(owner, sizes), np.repeat(np.arange(len(pool)), pool)), 1)
    return examples


def _deal_dirichlet(pool: Array, samples: int, data: Data, rng: np.random.Generator) -> Array:
    """Deal each class by shares drawn from Dirichlet(beta) (Yurochkin et al. 2019); `samples` is the mean size."""
    clients, beta = require(data.clients), require(data.beta)
    fewest = max(2, min(FEWEST, samples // 2))
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(clients, beta), size=len(pool))
        examples = np.stack([round_shares(row, count) for row, count in zip(shares, pool, strict=True)], axis=1)
        if examples.sum(1).min() >= fewest:
            return examples
    few = f"in {DRAWS} draws one of {clients} clients always had fewer than {fewest} examples"
    raise PfedlaError(f"beta = {beta}: {few}; use a larger beta, fewer clients or more samples per client")


DEALT = {"iid": _deal_iid, "shards": _deal_shards, "dirichlet": _deal_dirichlet}


def round_shares(shares: Array, total: int) -> Array:
    """Round total * shares to whole numbers with the exact sum (largest remainders, ties to the first)."""
    exact = total * shares / shares.sum()
    counts: Array = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(-(exact - counts), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def round_table(exact: Array, totals: Array | None = None) -> Array:
    """Round a table: its rows sum to `totals` (else to their own sums), its columns to theirs within one if possible.

    Rounding row by row would favour the same columns in every row: of a hundred classes, some would never be tested.
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
    while np.abs(owed).max() >= 1 - EPSILON:  # move a unit from a column with too much to one with too little
        most, least, passes = int(owed.argmin()), int(owed.argmax()), up.T @ (movable & ~up)  # [from, to]
        path = _find_path(most, passes, owed - owed[most]) or _find_path(least, passes.T, owed[least] - owed)[::-1]
        if not path:  # there is one if the rows' sums are exact: it is a flow problem
            break
        for column, following in pairwise(path):
            row = np.flatnonzero(up[:, column] & movable[:, following] & ~up[:, following])[0]
            up[row, column], up[row, following] = False, True
        owed[path[0]] += 1
        owed[path[-1]] -= 1
    return counts + up


def _find_path(start: int, passes: Array, gap: Array) -> list[int]:
    """Find the shortest path from a column to one that is more than a unit away."""
    paths, seen = [[start]], {start}
    for path in paths:
        if gap[path[-1]] > 1 + EPSILON:
            return path
        following = [column for column in np.flatnonzero(passes[path[-1]]).tolist() if column not in seen]
        seen.update(following)
        paths += [[*path, column] for column in following]
    return []
