"""The [data] section, and labels to clients: how many examples of each class a client gets (a rule), and which ones.

A client's training and test examples have the same distribution (per class within one). An axis [2] is training, test.
"""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from pfedla.core.errors import PfedlaError
from pfedla.core.settings import AUTO, Auto, Option, Positive, Section, Share
from pfedla.core.trees import leaves
from pfedla.data.dataset import Array, Dataset
from pfedla.data.datasets import KNOWN

Partition = Literal["classes", "dominant", "dirichlet", "shards", "iid", "twins", "chain", "toy", "client"]
MOST_CELLS = 2**24  # clients times classes: the size of the tables
COMMON = {"clients": 10, "test_share": 0.3}  # the paper's
DEFAULTS: dict[str, dict[str, Any]] = {  # of what not all partitions use, or not alike
    "classes": {"classes_per_client": 4},
    "dominant": {"dominant_classes": 2, "dominant_share": 0.6},
    "dirichlet": {"beta": 0.5},
    "shards": {"shards_per_client": 2},
    "iid": {},
    "twins": {"clients": 8, "classes_per_client": 4},
    "chain": {"clients": 8, "classes_per_client": 4},
    "toy": {"clients": 6, "classes_per_client": 3, "classes_limit": 9},
    "client": {},
}
MANY_CLASSES = {"classes": {"classes_per_client": 12}, "dominant": {"dominant_classes": 6}}  # of a hundred or more
LARGEST = 2**33  # bytes of all clients' examples
FEWEST = 10  # a dirichlet draw that leaves a client fewer examples, or fewer than half the mean, is repeated
DRAWS = 1000
EPSILON = 1e-6
DEALT = ("iid", "shards", "dirichlet")
Random = np.random.Generator
Split = list[list[Array]]  # [2, clients]: positions in the data set
Count = Callable[[int], Array]  # samples per client -> examples [clients, classes]


class Data(Section):
    """Which data, and how they are split into clients."""

    dataset: Annotated[str, Option("dataset", "-d")] = "digits"
    """A name of `pfedla data list`, or your own: a file .npz, .csv, .tsv or .parquet, or a folder of images."""
    label: Annotated[str, Option("label")] = AUTO
    """Column of a table that is predicted, or several with commas between (survival: time,event). auto: label, y or
    target."""
    client: Annotated[str, Option("client")] = AUTO
    """Column of a table that names the owner of each row. auto: client, if there is one."""
    drop: Annotated[str, Option("drop")] = AUTO
    """Columns of a table that are not used, with commas between. auto: none."""
    text: Annotated[str, Option("text")] = AUTO
    """Column of a table that holds text: it alone is the input, as token ids and mask. auto: none."""
    tokenizer: Annotated[str, Option("tokenizer")] = AUTO
    """Path of the tokenizer.json for `text`."""
    text_length: Annotated[int, Field(ge=1, le=10**5)] | Auto = AUTO
    """Tokens of a text: longer ones are cut, shorter ones padded. auto: 128."""
    standardise: Annotated[Literal["site", "shared", "none"] | Auto, Option("standardise")] = AUTO
    """Give every numeric feature mean 0 and standard deviation 1 over the training examples of each client (site) or
    of all clients (shared). auto: site for tables and watch, none for arrays."""
    missing: Annotated[Literal["drop", "impute"] | Auto, Option("missing")] = AUTO
    """Rows of a table that lack a value: leave them out (drop), or use the mean of the training rows for a number and
    no category for a word (impute). auto: impute; heart-disease drop."""
    classes_limit: Annotated[int, Field(ge=2, le=10**6)] | Auto = AUTO
    """Use only the first classes. auto: all; emnist 10, partition toy 9."""
    partition: Annotated[Partition | Auto, Option("partition")] = AUTO
    """classes: a few classes per client (non-IID_1); dominant: all classes, a few dominate (non-IID_2);
    dirichlet, shards, iid; twins, chain, toy: the paper's analyses; client: the owners in the data. auto:
    client if the data have owners, else classes (iid where the task is not classification)."""
    clients: Annotated[Positive | Auto, Option("clients")] = AUTO
    """Number of clients. auto: 10, or the data's own; twins and chain 8, toy 6."""
    samples_per_client: Annotated[Positive | Auto, Option("samples")] = AUTO
    """Training and test examples per client. auto: 600; digits and own data all there are."""
    classes_per_client: Positive | Auto = AUTO
    """Classes per client (classes, twins, chain, toy). auto: 4; 12 of a hundred or more (classes); toy 3."""
    dominant_classes: Positive | Auto = AUTO
    """Dominant classes per client (dominant). auto: 2; 6 of a hundred classes or more."""
    dominant_share: Share | Auto = AUTO
    """Share of a client's examples that is of its dominant classes (dominant). auto: 0.6."""
    beta: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | Auto = AUTO
    """Concentration of the Dirichlet distribution (dirichlet): smaller is more heterogeneous. auto: 0.5."""
    shards_per_client: Positive | Auto = AUTO
    """Pieces of the examples sorted by class per client (shards). auto: 2."""
    overlapping: bool = False
    """Let all clients draw from one pool: test examples of one client may be training examples of another."""
    test_share: Share | Auto = AUTO
    """Share of a client's examples that is held out for test. auto: 0.3, or the split that own data bring."""

    @property
    def split_name(self) -> str:
        """The partition as results name it; an overlap between clients is never left out."""
        return f"{self.partition}{'-overlapping' if self.overlapping else ''}"


def resolve(data: Data, dataset: Dataset) -> tuple[Data, Dataset]:
    """Decide every "auto" that the partition uses, keep the examples of the classes used; refuse what it ignores."""
    owners, known = len(dataset.client_names), KNOWN.get(data.dataset)
    by_class = dataset.task == "classification"
    default: Partition = "client" if owners else "classes" if by_class else "iid"
    partition: Partition = default if data.partition == AUTO else data.partition
    if not by_class and partition not in ("client", "iid"):
        raise PfedlaError(f"partition '{partition}' splits by class, the task is {dataset.task}; use iid or client")
    fixed = DEFAULTS["toy"] if partition == "toy" else {}
    if partition == "client":
        if not owners:
            give = "give an array client, or of a table --client COLUMN"
            raise PfedlaError(f"partition 'client': {dataset.name} names no owners; {give}")
        fixed = {"clients": owners, "samples_per_client": AUTO, "overlapping": False}
        fixed |= {} if dataset.test is None else {"test_share": AUTO}
    samples, limit = (known.samples_per_client, known.classes_limit) if known else (None, None)
    used = {**COMMON, "samples_per_client": samples or AUTO, **DEFAULTS[partition], **fixed}  # AUTO: all there are
    used.setdefault("classes_limit", min(len(dataset.classes), limit or len(dataset.classes)))
    given = {key: value for key, value in data if value != AUTO}
    dataset = dataset.keep_classes(given.get("classes_limit", used["classes_limit"]))
    num_classes = len(dataset.classes)
    used |= MANY_CLASSES.get(partition, {}) if num_classes >= 100 else {}
    most = {"classes_per_client": num_classes, "dominant_classes": max(1, num_classes // 2)}
    used |= {key: min(used[key], most[key]) for key in used.keys() & most.keys()}
    for key, value in given.items():
        if key not in used and any(key in others for others in DEFAULTS.values()):
            raise PfedlaError(f"{key} is not used by partition '{partition}'; leave it out")
        if value != fixed.get(key, value):
            raise PfedlaError(f"{key} is fixed by partition '{partition}' of {dataset.name}; leave it out")
    used["classes_limit"] = num_classes if by_class else AUTO
    resolved = data.model_copy(update={**used, **given, "partition": partition})
    if int(resolved.clients) > len(dataset.y) or int(resolved.clients) * num_classes > MOST_CELLS:
        there_are = f"{len(dataset.y)} examples; clients times classes may be {MOST_CELLS:,}"
        raise PfedlaError(f"clients = {resolved.clients} is too many: {dataset.name} has {there_are}")
    return resolved, dataset


def split_dataset(dataset: Dataset, data: Data, rng: Random) -> Split:
    """Split a data set into clients; `data` is resolved."""
    if data.partition == "client":
        return _split_by_client(dataset, data, rng)
    count, demand = choose_rule(dataset, data, rng)
    if data.samples_per_client == AUTO:
        quotas = _find_largest(dataset, data, count, demand)
    else:
        quotas = quotas_of(count(data.samples_per_client), data)
        if not _has_every_class(quotas, data):
            raise PfedlaError(f"samples_per_client = {data.samples_per_client} is too few for all classes of a client")
    if not data.overlapping:
        return draw(dataset, quotas, rng)
    if (size := int(quotas.sum()) * sum(leaf[:1].nbytes for leaf in leaves(dataset.x))) > LARGEST:
        raise PfedlaError(f"samples_per_client: {data.clients} overlapping clients take {size >> 30} GiB")
    alone = [draw(dataset, quotas[:, [client]], rng) for client in range(int(data.clients))]
    return [[split[part][0] for split in alone] for part in (0, 1)]


def quotas_of(examples: Array, data: Data) -> Array:
    """Divide [clients, classes] into [2, clients, classes]: totals of clients exact, of classes within one."""
    exact, totals = examples * float(data.test_share), np.round(examples.sum(1) * float(data.test_share))
    test = round_table(exact, totals.astype(np.int64))
    return np.stack([examples - test, test])


def _has_every_class(quotas: Array, data: Data) -> bool:
    """Tell whether a rule about classes lost none to rounding."""
    held = quotas.any(0)
    if data.partition in DEALT or data.partition == "dominant":
        return data.partition in DEALT or bool(held.all())
    return bool((held.sum(1) == data.classes_per_client).all() and quotas[:, held].all())


def _find_largest(dataset: Dataset, data: Data, count: Count, demand: Array) -> Array:
    """Find the largest quotas that the classes (and the parts of a ready test split) allow."""
    parts = [...] if dataset.test is None else [~dataset.test, dataset.test]
    available = np.stack([np.bincount(dataset.strata[part], minlength=len(dataset.classes)) for part in parts])
    demand = np.where(demand > 0, demand, np.nan)  # classes that nobody asks for are no bound
    # Of a ready test split each part is a bound too; rounding moves at most two examples of a class per client.
    shares = np.array([[1 - float(data.test_share)], [float(data.test_share)]])
    bounds = [*((available + 2 * int(data.clients)) / (shares * demand)), available.sum(0) / demand]
    most = int(np.nanmin(bounds) + 1e-9) if available.all() else 0
    for samples in range(most, 0, -1):
        quotas = quotas_of(count(samples), data)
        needed = quotas.max(1) if data.overlapping else quotas.sum(1)
        if ((needed if len(available) == 2 else needed.sum(0)) <= available).all():
            if _has_every_class(quotas, data):
                return quotas
            break
    scarce = int(np.nanargmin(available.min(0) / demand))
    few = f"class {dataset.classes[scarce]!r} of {dataset.name} has only {available[:, scarce].tolist()} examples"
    raise PfedlaError(f"samples_per_client: {few}; use fewer clients or give more examples")


def draw(dataset: Dataset, quotas: Array, rng: Random) -> Split:
    """Draw random examples by quota [2, clients, classes], disjoint; test examples come from a ready test split."""
    clients, strata = quotas.shape[1], dataset.strata
    owners = np.full((2, len(dataset.y)), clients)  # nobody's, until drawn
    for label, quota in enumerate(np.moveaxis(quotas, 2, 0)):
        rows, needs = rng.permutation(np.flatnonzero(strata == label)), quota.sum(1)
        ready = np.arange(len(rows)) < needs[1] if dataset.test is None else dataset.test[rows]
        for part, pool in enumerate((rows[~ready], rows[ready])):
            if needs[part] > len(pool):
                needed = f"{len(rows)} examples, the partition needs {needs[0]} + {needs[1]} for test"
                advice = "use fewer clients or a smaller samples_per_client"
                raise PfedlaError(f"class {dataset.classes[label]!r} has {needed}; {advice}")
            owners[part, pool[: needs[part]]] = np.repeat(np.arange(clients), quota[part])
    return [_group(owner, clients) for owner in owners]


def _group(owner: Array, clients: int) -> list[Array]:
    """Return the positions of each client's examples: one sort instead of a search for each client."""
    ends = np.bincount(owner, minlength=clients).cumsum()
    return np.split(np.argsort(owner, kind="stable"), ends)[:clients]


def _split_by_client(dataset: Dataset, data: Data, rng: Random) -> Split:
    """Split by the owners that the data name; the test split is theirs, or drawn per class."""
    assert dataset.client is not None  # `resolve` has seen it
    own_rows, test, strata = _group(dataset.client, len(dataset.client_names)), dataset.test, dataset.strata
    if test is None:
        test = np.zeros(len(dataset.y), bool)
        examples = np.stack([np.bincount(strata[rows], minlength=len(dataset.classes)) for rows in own_rows])
        for rows, quota in zip(own_rows, quotas_of(examples, data)[1], strict=True):
            for label, count in enumerate(quota):
                test[rng.permutation(rows[strata[rows] == label])[:count]] = True
    return [[rows[test[rows] == part] for rows in own_rows] for part in (False, True)]


def leaked_share(train: Iterable[Iterable[Any]], test: Iterable[Iterable[Any]]) -> float:
    """Return the share of the test examples that train a client; no client trains on its own test examples."""
    trained = {*chain.from_iterable(train)}
    tested = [example in trained for example in chain.from_iterable(test)]
    return sum(tested) / max(1, len(tested))


def split_statistics(counts: Array) -> dict[str, Any]:
    """Return how heterogeneous the clients are; counts [clients, 2, classes]."""
    totals = counts.sum(1)
    shares = totals / totals.sum(1, keepdims=True)
    logarithms = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy = -(shares * logarithms).sum(1) + 0.0  # 0 for a single class, and not minus zero
    found: dict[str, Any] = {}
    for key, values in {"classes_per_client": (totals > 0).sum(1), "label_entropy_bits": entropy}.items():
        found[key] = {"mean": float(values.mean()), "min": values.min().item(), "max": values.max().item()}
    # The mean total variation distance between two clients: 0 same labels, 1 no class in common.
    distance = sum(float(np.abs(shares[i + 1 :] - shares[i]).sum()) / 2 for i in range(len(shares)))
    pairs = len(shares) * (len(shares) - 1) / 2
    return found | {"mean_pairwise_distance": distance / max(1, pairs)}


def choose_rule(dataset: Dataset, data: Data, rng: Random) -> tuple[Count, Array]:
    """Draw which client gets which class; also return how many of each class one sample per client takes [classes]."""
    clients = int(data.clients)
    if data.partition in DEALT:
        available = np.bincount(dataset.strata, minlength=len(dataset.classes))
        seed = int(rng.integers(2**63))
        return partial(_deal, data, available, seed), clients * available / available.sum()
    shares = _choose_shares(dataset, data, rng)
    return lambda samples: round_table(samples * shares), shares.max(0) if data.overlapping else shares.sum(0)


def _choose_shares(dataset: Dataset, data: Data, rng: Random) -> Array:
    """Give each client a few classes of the same share; "dominant": all, a few make up `dominant_share`."""
    clients, num_classes = int(data.clients), len(dataset.classes)
    if data.partition == "dominant":
        few, share = int(data.dominant_classes), float(data.dominant_share)
        if few >= num_classes or share <= few / num_classes:
            what = f"dominant_classes = {few} of {num_classes} with dominant_share = {share}"
            raise PfedlaError(f"{what} would not dominate; use fewer classes or a larger share")
        holds = assign_classes(clients, num_classes, few, rng)
        return np.where(holds, share / few, (1 - share) / (num_classes - few))
    each = int(data.classes_per_client)
    if num_classes < (needed := {"chain": each + 1, "twins": 2 * each}.get(data.partition, each)):
        raise PfedlaError(f"classes_per_client = {each} needs {needed} classes, {dataset.name} has {num_classes}")
    if data.partition == "classes":
        return assign_classes(clients, num_classes, each, rng) / each
    holds = np.zeros((clients, num_classes), bool)
    if data.partition == "twins":  # client 1 has the classes of client 0, 2 all but one of them, the others none
        if clients < 4:
            raise PfedlaError(f"clients = {clients}: partition 'twins' needs 4 (target, twin, similar, others) or more")
        target, rest = np.split(rng.permutation(num_classes), [each])
        holds[:2, target] = True
        holds[2, target[1:]] = True
        holds[3:, rest] = assign_classes(clients - 3, len(rest), each, rng)
        holds[2, rest[holds[3:, rest].sum(0).argmin()]] = True  # the rarest of the other classes, for balance
    else:  # Consecutive classes. In "toy" client 0 shares two with client 1, one with client 5, none with the others.
        starts = np.arange(clients) * 3 // 2 if data.partition == "toy" else np.arange(clients)
        np.put_along_axis(holds, (starts[:, None] + np.arange(each)) % num_classes, True, axis=1)
    return holds / each


def assign_classes(num_clients: int, num_classes: int, per_client: int, rng: Random) -> Array:
    """Draw distinct classes for each client [clients, classes], every class held equally often (±1)."""
    each, extra = divmod(num_clients * per_client, num_classes)
    left = np.full(num_classes, each)
    left[rng.permutation(num_classes)[:extra]] += 1
    holds = np.zeros((num_clients, num_classes), bool)
    for client in range(num_clients):
        # A class that as many clients need as remain must be taken now; the others are drawn by what is left.
        holds[client] = left >= num_clients - client
        weights = np.where(holds[client], 0, left)
        if free := per_client - holds[client].sum():
            holds[client, rng.choice(num_classes, size=free, replace=False, p=weights / weights.sum())] = True
        left -= holds[client]
    return holds


def _deal(data: Data, available: Array, seed: int, samples: int) -> Array:
    """Deal out a pool that has the data set's own shares of classes [clients, classes]."""
    clients, there, rng = int(data.clients), int(available.sum()), np.random.default_rng(seed)
    if (need := samples if data.overlapping else clients * samples) > there:
        raise PfedlaError(f"samples_per_client = {samples}: needs {need} examples, there are {there}")
    pool = round_shares(available, clients * samples)
    if data.partition == "dirichlet":
        return _deal_dirichlet(pool, samples, data, rng)
    labels, owners = np.repeat(np.arange(len(pool)), pool), np.repeat(np.arange(clients), samples)
    if data.partition == "iid":
        labels = rng.permutation(labels)
    else:  # sorted by class and cut into shards, of which every client gets a few at random (McMahan et al. 2017)
        if (shards := int(data.shards_per_client)) > samples:
            raise PfedlaError(f"shards_per_client = {shards}, but a client has only {samples} samples")
        owner, position = np.divmod(rng.permutation(clients * shards), shards)
        owners = np.repeat(owner, samples // shards + (position < samples % shards))
    examples = np.zeros((clients, len(pool)), np.int64)
    np.add.at(examples, (owners, labels), 1)
    return examples


def _deal_dirichlet(pool: Array, samples: int, data: Data, rng: Random) -> Array:
    """Deal each class by shares drawn from Dirichlet(beta) (Yurochkin et al. 2019); `samples` is the mean size."""
    fewest = max(2, min(FEWEST, samples // 2))
    for _ in range(DRAWS):
        shares = rng.dirichlet(np.full(int(data.clients), data.beta), size=len(pool))
        examples = np.stack([round_shares(row, count) for row, count in zip(shares, pool, strict=True)], axis=1)
        if examples.sum(1).min() >= fewest:
            return examples
    few = f"in {DRAWS} draws one of {data.clients} clients always had fewer than {fewest} examples"
    raise PfedlaError(f"beta = {data.beta}: {few}; use a larger beta, fewer clients or more samples per client")


def round_shares(shares: Array, total: int) -> Array:
    """Round total * shares to whole numbers with the exact sum (largest remainders, ties to the first)."""
    exact = total * shares / shares.sum()
    counts: Array = np.floor(exact + 1e-9).astype(np.int64)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return counts


def round_table(exact: Array, totals: Array | None = None) -> Array:
    """Round a table: its rows sum to `totals` (else to their own sums), columns to theirs within one if possible."""
    # Rounding row by row would favour the same columns in every row: of a hundred classes, some would never be tested.
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
