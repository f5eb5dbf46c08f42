"""The [data] section: which data, and how they are split into clients."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pfedla.core.errors import PfedlaError
from pfedla.core.settings import AUTO, Auto, Option, Positive, Section, Share
from pfedla.data.dataset import Dataset
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


def resolve(data: Data, dataset: Dataset) -> tuple[Data, Dataset]:
    """Return the section with every "auto" decided that its partition uses, and the examples of the classes used.

    Refuse what would be ignored. `samples_per_client` stays "auto" if the split takes as many examples as there are.
    """
    owners, known = len(dataset.client_names), KNOWN.get(data.dataset)
    partition: Partition = ("client" if owners else "classes") if data.partition == AUTO else data.partition
    fixed = DEFAULTS["toy"] if partition == "toy" else {}
    if partition == "client":
        if not owners:
            raise PfedlaError(f"partition 'client': {dataset.name} has no array 'client', the owner of each example")
        fixed = {"clients": owners, "samples_per_client": AUTO, "overlapping": False}
        fixed |= {} if dataset.test is None else {"test_share": AUTO}
    samples, limit = (known.samples_per_client, known.classes_limit) if known else (None, None)
    used = {**COMMON, "samples_per_client": samples or AUTO, **DEFAULTS[partition], **fixed}
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
    resolved = data.model_copy(update={**used, **given, "partition": partition, "classes_limit": num_classes})
    if int(resolved.clients) > len(dataset.y) or int(resolved.clients) * num_classes > MOST_CELLS:
        there_are = f"{len(dataset.y)} examples; clients times classes may be {MOST_CELLS:,}"
        raise PfedlaError(f"clients = {resolved.clients} is too many: {dataset.name} has {there_are}")
    return resolved, dataset
