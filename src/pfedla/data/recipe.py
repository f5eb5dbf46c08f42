"""How a data set is to be cut into clients: what can be asked for, and what is taken where nothing is said."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from pfedla.core.errors import PfedlaError, unknown
from pfedla.data.own import Dataset

Partition = Literal["classes", "dominant", "dirichlet", "shards", "iid", "twins", "chain", "toy", "client"]
TEST_SHARE = 0.3  # the paper's
LARGEST_COUNT = 10**9
MOST_CELLS = 2**24  # clients times classes: what tables of them take
LARGEST_BETA = 1e6  # beyond, all clients are alike to the last example
TOY_CLIENTS, TOY_CLASSES, TOY_CLASSES_PER_CLIENT = 6, 9, 3
USED_BY = {
    "classes_per_client": ("classes", "twins", "chain", "toy"),
    "dominant_classes": ("dominant",),
    "dominant_share": ("dominant",),
    "beta": ("dirichlet",),
    "shards_per_client": ("shards",),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything decided; docs/data.md explains each."""

    partition: Partition
    clients: int
    samples_per_client: int | None = None  # training and test; None: as many as the classes allow
    classes_per_client: int = 4
    dominant_classes: int = 2
    dominant_share: float = 0.6
    beta: float = 0.5
    shards_per_client: int = 2
    overlapping: bool = False
    test_share: float = TEST_SHARE

    def __post_init__(self) -> None:
        samples = 1 if self.samples_per_client is None else self.samples_per_client
        whole = {"clients": self.clients, "samples_per_client": samples, "classes_per_client": self.classes_per_client}
        whole |= {"dominant_classes": self.dominant_classes, "shards_per_client": self.shards_per_client}
        for key, value in whole.items():
            if not 1 <= value <= LARGEST_COUNT:
                raise PfedlaError(f"{key} = {value} is not possible: it should be at least 1 and at most {LARGEST_COUNT:g}")
        for key, share in (("dominant_share", self.dominant_share), ("test_share", self.test_share)):
            if not 0 < share < 1:
                raise PfedlaError(f"{key} = {share} is not possible: it should be between 0 and 1")
        if not 0 < self.beta <= LARGEST_BETA:
            raise PfedlaError(f"beta = {self.beta} is not possible: it should be above 0 and at most {LARGEST_BETA:g}")


def recipe_of(dataset: Dataset, **asked: Any) -> Recipe:
    """What was asked for (None: nothing was said), completed; what would be ignored is refused."""
    given = {key: value for key, value in asked.items() if value is not None}
    choices = [field.name for field in fields(Recipe)]
    if strange := [key for key in given if key not in choices]:
        raise unknown("option", strange[0], choices)
    num_classes, found = len(dataset.classes), len(dataset.client_names)
    partition = given.setdefault("partition", "client" if found else "classes")
    if partition not in get_args(Partition):
        raise unknown("partition", partition, get_args(Partition))
    for key, partitions in USED_BY.items():
        if key in given and partition not in partitions:
            raise PfedlaError(f"{key} is used by partition {', '.join(partitions)} only, not by {partition}; leave it out")
    if partition == "client":
        _check_own_clients(dataset, given)
        given["clients"] = found
    defaults = {
        "clients": {"twins": 8, "chain": 8, "toy": TOY_CLIENTS}.get(partition, 10),
        "classes_per_client": 12 if partition == "classes" and num_classes >= 100 else min(4, num_classes),
        "dominant_classes": 6 if num_classes >= 100 else min(2, max(1, num_classes // 2)),
    }
    if partition == "toy":
        defaults["classes_per_client"] = TOY_CLASSES_PER_CLIENT
    recipe = Recipe(**{**defaults, **given})
    if recipe.clients > len(dataset.y):
        raise PfedlaError(f"{recipe.clients} clients, but {dataset.name} has only {len(dataset.y)} examples; use fewer")
    if recipe.clients * num_classes > MOST_CELLS:
        raise PfedlaError(f"{recipe.clients} clients times {num_classes} classes are more than {MOST_CELLS:,}; use fewer")
    return recipe


def _check_own_clients(dataset: Dataset, given: dict[str, Any]) -> None:
    found = len(dataset.client_names)
    if not found:
        raise PfedlaError(f"partition 'client': {dataset.name} has no array 'client' that says whose each example is")
    if given.get("clients", found) != found:
        raise PfedlaError(f"clients = {given['clients']}, but {dataset.name} names {found} clients; leave it out")
    for key in ("samples_per_client", "overlapping"):
        if given.get(key):
            raise PfedlaError(f"{key}: {dataset.name} says whose each example is, all are used; leave it out")
    if dataset.test is not None and "test_share" in given:
        raise PfedlaError(f"test_share: {dataset.name} has a ready test split; leave it out")
