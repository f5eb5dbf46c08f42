"""Which classes a client gets, and how many examples of each: non-IID_1, non-IID_2, the paper's analysis federations, and
the splits of the literature."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.data.own import Array, Dataset
from pfedla.data.recipe import TOY_CLASSES, TOY_CLASSES_PER_CLIENT, TOY_CLIENTS, Recipe
from pfedla.data.rounding import balanced_counts, shares_to_counts

FEWEST = 10  # a dirichlet draw that leaves a client fewer examples, or fewer than half the mean, is drawn anew
DRAWS = 1000


class Rule(Protocol):
    """What is random about who gets which class is drawn when a rule is made; it then serves any number of samples."""

    def __call__(self, samples: int) -> Array:
        """Examples [clients, classes] for so many samples per client."""
        ...

    def demand(self, overlapping: bool) -> Array:
        """[classes]: how many examples of each class one sample per client asks of the data set."""
        ...


def rule_of(dataset: Dataset, recipe: Recipe, rng: np.random.Generator) -> Rule:
    if recipe.partition in DEALT:
        return Dealt(recipe, np.bincount(dataset.y, minlength=len(dataset.classes)), int(rng.integers(2**63)))
    if recipe.partition == "dominant":
        return ByShares(_dominant(dataset, recipe, rng))
    return ByShares(_holders(dataset, recipe, rng) / recipe.classes_per_client)


@dataclass(frozen=True)
class ByShares:
    """Every client gets the same number of samples, of each class by its own shares."""

    shares: Array  # [clients, classes], each row sums to one

    def __call__(self, samples: int) -> Array:
        return balanced_counts(samples * self.shares)

    def demand(self, overlapping: bool) -> Array:
        asked: Array = self.shares.max(0) if overlapping else self.shares.sum(0)
        return asked


# Rules that say which classes a client holds


def _holders(dataset: Dataset, recipe: Recipe, rng: np.random.Generator) -> Array:
    """[clients, classes] booleans. Every client then gets the same amount of each of its classes."""
    clients, num_classes, each = recipe.clients, len(dataset.classes), recipe.classes_per_client
    needed = {"classes": each, "chain": each + 1, "twins": 2 * each, "toy": TOY_CLASSES}
    if num_classes < needed[recipe.partition] or (recipe.partition == "toy" and num_classes != TOY_CLASSES):
        exactly = "exactly" if recipe.partition == "toy" else "at least"
        raise PfedlaError(
            f"partition '{recipe.partition}' with classes_per_client = {each} needs {exactly} {needed[recipe.partition]} "
            f"classes, {dataset.name} has {num_classes}"
        )
    if recipe.partition == "classes":
        return assign_classes(clients, num_classes, each, rng)
    if recipe.partition == "chain":
        return _runs([*range(clients)], each, num_classes)
    if recipe.partition == "toy":
        # Pairs of clients share two of three classes, each pair one with the next: a near, a far and three strange clients.
        if (clients, each) != (TOY_CLIENTS, TOY_CLASSES_PER_CLIENT):
            raise PfedlaError(
                f"partition 'toy' has {TOY_CLIENTS} clients with {TOY_CLASSES_PER_CLIENT} classes each; leave clients and "
                "classes_per_client out"
            )
        return _runs([3 * client // 2 for client in range(clients)], each, num_classes)
    return _twins(clients, num_classes, each, rng)


def _runs(starts: list[int], each: int, num_classes: int) -> Array:
    """Consecutive classes from each start, around the class list."""
    holds = np.zeros((len(starts), num_classes), bool)
    for client, start in enumerate(starts):
        holds[client, np.arange(start, start + each) % num_classes] = True
    return holds


def _twins(clients: int, num_classes: int, each: int, rng: np.random.Generator) -> Array:
    """Client 0 is the target, 1 has its classes, 2 all but one of them; the others have none, so that contrast shows."""
    if clients < 4:
        raise PfedlaError(f"partition 'twins' needs at least 4 clients (target, twin, similar one, others), not {clients}")
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


def _dominant(dataset: Dataset, recipe: Recipe, rng: np.random.Generator) -> Array:
    """All classes, of which a few random ones together make up `dominant_share`."""
    num_classes, few, share = len(dataset.classes), recipe.dominant_classes, recipe.dominant_share
    if few >= num_classes:
        raise PfedlaError(
            f"dominant_classes = {few}, but {dataset.name} has {num_classes} classes and allows at most {num_classes - 1}"
        )
    if share <= few / num_classes:
        raise PfedlaError(f"dominant_share = {share}: {few} of {num_classes} classes would not prevail; use more")
    holds = assign_classes(recipe.clients, num_classes, few, rng)
    return np.where(holds, share / few, (1 - share) / (num_classes - few))


# Rules that deal a pool out: the classes are in it as in the data set


@dataclass(frozen=True)
class Dealt:
    """A pool with the data set's own shares of classes, dealt out to the clients."""

    recipe: Recipe
    available: Array  # [classes]
    seed: int

    def __call__(self, samples: int) -> Array:
        total, there = self.recipe.clients * samples, int(self.available.sum())
        need = samples if self.recipe.overlapping else total
        if need > there:
            raise PfedlaError(
                f"{self.recipe.clients} clients with {samples} samples each need {need} examples, there are {there}: "
                f"{need - there} are lacking; use fewer clients or fewer samples per client"
            )
        pool = shares_to_counts(self.available, total)
        return DEALT[self.recipe.partition](pool, samples, self.recipe, np.random.default_rng(self.seed))

    def demand(self, overlapping: bool) -> Array:
        asked: Array = self.recipe.clients * self.available / self.available.sum()
        return asked


def _deal_iid(pool: Array, samples: int, recipe: Recipe, rng: np.random.Generator) -> Array:
    """A shuffled pool, dealt out in equal hands."""
    hands = rng.permutation(np.repeat(np.arange(len(pool)), pool)).reshape(recipe.clients, samples)
    return np.stack([np.bincount(hand, minlength=len(pool)) for hand in hands])


def _deal_shards(pool: Array, samples: int, recipe: Recipe, rng: np.random.Generator) -> Array:
    """The pool in the order of its classes, cut into shards; every client gets a few at random (McMahan et al. 2017)."""
    per_client = recipe.shards_per_client
    if per_client > samples:
        raise PfedlaError(f"shards_per_client = {per_client}, but a client has only {samples} samples; use fewer shards")
    order = rng.permutation(recipe.clients * per_client)  # which shard of which client lies next in the line
    owner, position = np.divmod(order, per_client)
    sizes = samples // per_client + (position < samples % per_client)
    owners = np.repeat(owner, sizes)  # of every place in the line
    examples = np.zeros((recipe.clients, len(pool)), np.int64)
    np.add.at(examples, (owners, np.repeat(np.arange(len(pool)), pool)), 1)
    return examples


def _deal_dirichlet(pool: Array, samples: int, recipe: Recipe, rng: np.random.Generator) -> Array:
    """Every class is dealt to the clients by shares drawn from Dirichlet(beta) (Yurochkin et al. 2019).

    Sizes differ; `samples` is their mean.
    """
    fewest = max(2, min(FEWEST, samples // 2))
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(recipe.clients, recipe.beta), size=len(pool))
        examples = np.stack([shares_to_counts(row, count) for row, count in zip(shares, pool, strict=True)], axis=1)
        if examples.sum(1).min() >= fewest:
            return examples
    raise PfedlaError(
        f"partition 'dirichlet' with beta = {recipe.beta}: in {DRAWS} draws some of the {recipe.clients} clients always had "
        f"fewer than {fewest} examples; use a larger beta, fewer clients or more samples per client"
    )


DEALT = {"iid": _deal_iid, "shards": _deal_shards, "dirichlet": _deal_dirichlet}
