"""The [data] section: which data, and how they are split into clients."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from pfedla.core.errors import PfedlaError
from pfedla.core.settings import AUTO, Auto, Option, Positive, Section, Share
from pfedla.data.dataset import Dataset
from pfedla.data.datasets import KNOWN

Partition = Literal["classes", "dominant", "dirichlet", "shards", "iid", "twins", "chain", "toy", "client"]
TEST_SHARE = 0.3  # the paper's
MOST_CELLS = 2**24  # clients times classes: the size of the tables
TOY_CLIENTS, TOY_CLASSES, TOY_CLASSES_PER_CLIENT = 6, 9, 3
USED_BY = {
    "classes_per_client": ("classes", "twins", "chain", "toy"),
    "dominant_classes": ("dominant",),
    "dominant_share": ("dominant",),
    "beta": ("dirichlet",),
    "shards_per_client": ("shards",),
}
T = TypeVar("T")


class Data(Section):
    """Which data, and how they are split into clients."""

    dataset: Annotated[str, Option("dataset", "-d")] = "digits"
    """A name of `pfedla data list`, or a file.npz of your own."""
    classes_limit: Annotated[int, Field(ge=2, le=10**6)] | Auto = AUTO
    """Use only the first classes. auto: all; emnist 10, partition toy 9."""
    partition: Annotated[Partition | Auto, Option("partition")] = AUTO
    """classes: a few classes per client (non-IID_1); dominant: all classes, a few dominate (non-IID_2);
    dirichlet, shards, iid; twins, chain, toy: the paper's analyses; client: the owners in the data. auto:
    client if the data have owners, else classes."""
    clients: Annotated[Positive | Auto, Option("clients")] = AUTO
    """Number of clients. auto: 10, or the data's own; twins and chain 8, toy 6."""
    samples_per_client: Annotated[Positive | Auto, Option("samples")] = AUTO
    """Training and test examples per client. auto: 600 as in the paper; digits and own data all there are."""
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


def require(value: T | Auto) -> T:
    """Return a setting that `resolve` has decided."""
    assert value != AUTO
    return value


def limit_classes(data: Data, dataset: Dataset) -> Dataset:
    """Return the examples of the classes that are used."""
    known, limit = KNOWN.get(data.dataset), data.classes_limit
    if data.partition == "toy":
        if limit not in (AUTO, TOY_CLASSES):
            raise PfedlaError(f"classes_limit: partition 'toy' has {TOY_CLASSES} classes; leave it out")
        limit = TOY_CLASSES
    if limit == AUTO:
        there = len(dataset.classes)
        limit = min(there, (known.classes_limit if known else None) or there)
    return dataset.keep_classes(require(limit))


def resolve(data: Data, dataset: Dataset) -> Data:
    """Return the section with every "auto" decided that its partition uses; refuse what would be ignored.

    `samples_per_client` stays "auto" where the split takes as many examples as there are.
    """
    partition = data.partition
    if partition == AUTO:
        partition = "client" if dataset.client_names else "classes"
    for key, users in USED_BY.items():
        if getattr(data, key) != AUTO and partition not in users:
            raise PfedlaError(f"{key} is only used by partition {', '.join(users)}, not by {partition}")
    if partition == "client":
        _check_own_clients(data, dataset)
    defaults = {
        key: value
        for key, value in _defaults(data, partition, dataset).items()
        if getattr(data, key) == AUTO and partition in USED_BY.get(key, (partition,))
    }
    num_classes = len(dataset.classes)
    resolved = data.model_copy(update=defaults | {"partition": partition, "classes_limit": num_classes})
    clients = require(resolved.clients)
    if clients > len(dataset.y):
        raise PfedlaError(f"clients = {clients}, but {dataset.name} has only {len(dataset.y)} examples")
    if clients * num_classes > MOST_CELLS:
        raise PfedlaError(f"clients = {clients} times {num_classes} classes is more than {MOST_CELLS:,}")
    return resolved


def _defaults(data: Data, partition: Partition, dataset: Dataset) -> dict[str, Any]:
    num_classes, known = len(dataset.classes), KNOWN.get(data.dataset)
    found: dict[str, Any] = {
        "clients": {"twins": 8, "chain": 8, "toy": TOY_CLIENTS}.get(partition, 10),
        "classes_per_client": 12 if partition == "classes" and num_classes >= 100 else min(4, num_classes),
        "dominant_classes": 6 if num_classes >= 100 else min(2, max(1, num_classes // 2)),
        "dominant_share": 0.6,
        "beta": 0.5,
        "shards_per_client": 2,
        "test_share": TEST_SHARE,
        "samples_per_client": (known.samples_per_client if known else None) or AUTO,
    }
    if partition == "toy":
        found["classes_per_client"] = TOY_CLASSES_PER_CLIENT
    if partition == "client":
        found |= {"clients": len(dataset.client_names), "samples_per_client": AUTO}
        if dataset.test is not None:
            del found["test_share"]
    return found


def _check_own_clients(data: Data, dataset: Dataset) -> None:
    name, found = dataset.name, len(dataset.client_names)
    if not found:
        raise PfedlaError(f"partition 'client': {name} has no array 'client' with the owner of each example")
    if data.clients not in (AUTO, found):
        raise PfedlaError(f"clients = {data.clients}, but {name} names {found} clients; leave it out")
    if data.samples_per_client != AUTO or data.overlapping:
        key = "overlapping" if data.overlapping else "samples_per_client"
        raise PfedlaError(f"{key}: {name} names the owner of each example, and all are used; leave it out")
    if dataset.test is not None and data.test_share != AUTO:
        raise PfedlaError(f"test_share: {name} has a ready test split; leave it out")
