"""An experiment is data: a strict TOML file (or the same as options). A run is a function of it and its seed."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from pfedla import algorithms
from pfedla.contracts import Algorithm, LocalTraining, Recalibrate
from pfedla.data import datasets
from pfedla.data.federation import Federation, partitioned
from pfedla.data.partition import Partition
from pfedla.engines import ENGINES
from pfedla.engines.clients import usable_device
from pfedla.errors import PfedlaError, unknown
from pfedla.models import MODELS, build_model, model_for, task_of
from pfedla.seeds import generator

AUTO: Literal["auto"] = "auto"
Auto = Literal["auto"]
Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataSection(_Section):
    """[data]: which data, and how they are cut into clients."""

    dataset: str = "digits"
    partition: Partition | Auto = AUTO  # auto: the data's own clients if it names them, else classes (non-IID_1)
    clients: Positive | Auto = AUTO  # auto: 10, or the data's own
    samples_per_client: Positive | Auto = AUTO  # auto: 600 as in the paper; for digits and own data all there is
    classes_per_client: Positive | Auto = AUTO  # auto: 4; 12 with a hundred classes
    dominant_classes: Positive | Auto = AUTO  # auto: 2; 6 with a hundred classes
    dominant_share: Share = 0.6
    test_share: Share = 0.3


class TrainingSection(_Section):
    """[training]: the local budget, the same for every method."""

    lr: Annotated[float, Field(gt=0)] | Auto = AUTO  # auto: the paper's for the data set
    local_epochs: Positive = 5
    batch_size: Positive = 32


class EngineSection(_Section):
    """[engine]: where the clients run; the results do not depend on the number of threads."""

    name: str = "threaded"
    threads: Annotated[int, Field(ge=0)] = 0  # 0: one per core
    device: str = "cpu"


class AlgorithmSection(_Section):
    """[algorithm]: its name and its own options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str = "pfedla"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Experiment(_Section):
    """Everything that decides the numbers of a run."""

    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Positive = 20
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0
    evaluate_every: Positive = 1
    recalibrate: Recalibrate = "unsampled"
    model: str = AUTO
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    engine: EngineSection = EngineSection()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PfedlaError(_explain(error)) from None

    def to_toml(self) -> str:
        return tomli_w.dumps(self.model_dump())


def _explain(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where[:2])
    if problem["type"] == "extra_forbidden":
        section = where[0] if len(where) > 1 else None
        fields: Any = Experiment.model_fields[section].annotation if section else Experiment
        return f"unknown key {key!r}; the keys here are: {', '.join(fields.model_fields)}"
    # A union ("auto" or a number) reports each of its members: the one about the number says more.
    same_key = [other for other in error.errors() if other["loc"][:2] == problem["loc"][:2]]
    messages = dict.fromkeys(other["msg"].removeprefix("Input should be ").lower() for other in same_key)
    return f"{key} = {problem['input']!r} is not possible: it should be {' or '.join(messages)}"


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PfedlaError(f"{path}: no such experiment file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PfedlaError(f"{path}: not a TOML file: {error}") from None


def with_setting(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """`values` with one "section.key=value" laid over; the value is TOML, a bare word is a string."""
    path, equals, text = setting.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) > 2 or not all(parts):
        raise PfedlaError(f"--set {setting!r}: write section.key=value, for example algorithm.neighbours=5")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    return overlay(values, {parts[0]: value} if len(parts) == 1 else {parts[0]: {parts[1]: value}})


def overlay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries merged; what is above wins."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        merged[key] = overlay(below[key], value) if both else value
    return merged


class Built(NamedTuple):
    """An experiment with every "auto" resolved, and what it is made of."""

    experiment: Experiment
    federation: Federation
    module: nn.Module
    algorithm: Algorithm


def build(experiment: Experiment, dataset: datasets.Dataset | None = None) -> Built:
    """Check everything that can be checked before anything runs, resolve every "auto", and put the parts together."""
    algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)  # quick to refuse
    if experiment.engine.name not in ENGINES:
        raise unknown("engine", experiment.engine.name, ENGINES)
    usable_device(experiment.engine.device)
    if experiment.model not in (AUTO, *MODELS):
        raise unknown("model", experiment.model, [AUTO, *MODELS])
    dataset = dataset or datasets.load(experiment.data.dataset)
    data = _resolve_data(experiment.data, dataset)
    federation = partitioned(
        dataset, _chosen(data.partition), clients=_chosen(data.clients),
        samples_per_client=None if data.samples_per_client == AUTO else data.samples_per_client,
        classes_per_client=_chosen(data.classes_per_client), dominant_classes=_chosen(data.dominant_classes),
        dominant_share=data.dominant_share, test_share=data.test_share, seed=experiment.seed,
    )  # fmt: skip
    if data.partition != "client":
        per_client = len(federation.train[0].y) + len(federation.test[0].y)
        data = data.model_copy(update={"samples_per_client": per_client})
    name = model_for(federation.shape) if experiment.model == AUTO else experiment.model
    module = build_model(name, federation.shape, len(federation.classes), generator(experiment.seed, "model"))
    training = experiment.training
    if training.lr == AUTO:
        entry = datasets.KNOWN.get(experiment.data.dataset)
        training = training.model_copy(update={"lr": entry.lr if entry else 0.01})
    options = algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    method = algorithms.create(
        experiment.algorithm.name, task_of(module),
        LocalTraining(_chosen(training.lr), training.local_epochs, training.batch_size), options,
    )  # fmt: skip
    method.check(len(federation))
    resolved = experiment.model_copy(
        update={
            "data": data, "model": name, "training": training,
            "algorithm": AlgorithmSection(name=experiment.algorithm.name, **options),
        }
    )  # fmt: skip
    return Built(resolved, federation, module, method)


def _chosen(value: Any) -> Any:
    """The value of a field whose "auto" is resolved by now."""
    assert value != AUTO
    return value


def _resolve_data(data: DataSection, dataset: datasets.Dataset) -> DataSection:
    many = len(dataset.classes) >= 100
    found = len(dataset.client_names)
    partition = data.partition
    if partition == AUTO:
        partition = "client" if found else "classes"
    clients = data.clients
    if partition == "client":
        if found and clients not in (AUTO, found):
            raise PfedlaError(f"clients = {clients}, but {dataset.name} names {found} clients; leave it out")
        clients = found
    elif clients == AUTO:
        clients = 10
    if isinstance(clients, int) and clients > len(dataset.y):
        raise PfedlaError(f"{clients} clients, but {dataset.name} has only {len(dataset.y)} examples; use fewer")
    entry = datasets.KNOWN.get(data.dataset)
    samples: int | Auto = data.samples_per_client
    if samples == AUTO and entry and entry.samples_per_client and partition != "client":
        samples = entry.samples_per_client
    auto_classes = {"classes_per_client": (4, 12), "dominant_classes": (2, 6)}
    chosen = {
        key: min(values[many], len(dataset.classes) - (key == "dominant_classes"))
        for key, values in auto_classes.items()
        if getattr(data, key) == AUTO
    }
    return data.model_copy(update={"partition": partition, "clients": clients, "samples_per_client": samples, **chosen})
