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
TOY = {"clients": 6, "classes_per_client": 3, "classes_limit": 9}
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
    known, there = KNOWN.get(data.dataset), len(dataset.classes)
    usual = min(there, (known and known.classes_limit) or there)
    default = TOY["classes_limit"] if data.partition == "toy" else usual
    return dataset.keep_classes(default if data.classes_limit == AUTO else data.classes_limit)


def resolve(data: Data, dataset: Dataset) -> Data:
    """Return the section with every "auto" decided that its partition uses; refuse what would be ignored.

    `samples_per_client` stays "auto" where the split takes as many examples as there are.
    """
    owners, num_classes, known = len(dataset.client_names), len(dataset.classes), KNOWN.get(data.dataset)
    partition: Partition = ("client" if owners else "classes") if data.partition == AUTO else data.partition
    if partition == "client" and not owners:
        raise PfedlaError(f"partition 'client': {dataset.name} has no array 'client' with the owner of each example")
    fixed: dict[str, Any] = TOY if partition == "toy" else {}
    if partition == "client":
        fixed = {"clients": owners, "samples_per_client": AUTO, "overlapping": False}
        fixed |= {} if dataset.test is None else {"test_share": AUTO}
    defaults = {
        "clients": 8 if partition in ("twins", "chain") else 10,
        "classes_per_client": 12 if partition == "classes" and num_classes >= 100 else min(4, num_classes),
        "dominant_classes": 6 if num_classes >= 100 else min(2, max(1, num_classes // 2)),
        "dominant_share": 0.6,
        "beta": 0.5,
        "shards_per_client": 2,
        "test_share": TEST_SHARE,
        "samples_per_client": (known and known.samples_per_client) or AUTO,
        **fixed,
    }
    updates: dict[str, Any] = {}
    for key, default in defaults.items():
        value, users = getattr(data, key), USED_BY.get(key, (partition,))
        if value != AUTO and partition not in users:
            raise PfedlaError(f"{key} is only used by partition {', '.join(users)}, not by {partition}")
        if value != AUTO and key in fixed and value != default:
            raise PfedlaError(f"{key} is fixed by partition '{partition}' of {dataset.name}; leave it out")
        if value == AUTO and partition in users:
            updates[key] = default
    resolved = data.model_copy(update={**updates, "partition": partition, "classes_limit": num_classes})
    clients = require(resolved.clients)
    if clients > len(dataset.y) or clients * num_classes > MOST_CELLS:
        most = f"{len(dataset.y)} examples and {MOST_CELLS:,} clients times classes"
        raise PfedlaError(f"clients = {clients} is too many for {dataset.name}: at most {most}")
    return resolved
