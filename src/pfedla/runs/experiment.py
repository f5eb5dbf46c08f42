"""An experiment is data: a strict TOML file (or the same as options). A run is a function of it and its seed."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from pfedla import algorithms
from pfedla.core.contracts import Algorithm, LocalTraining, Recalibrate
from pfedla.data import datasets
from pfedla.data.federation import Federation, Outline, partitioned
from pfedla.data.own import Dataset
from pfedla.data.recipe import LARGEST_BETA, TOY_CLASSES, USED_BY, Partition, Recipe, recipe_of
from pfedla.engines import ENGINE_NAMES
from pfedla.engines.choice import AUTO, Compile, chosen_compile, chosen_engine
from pfedla.engines.simulated import usable_device
from pfedla.core.errors import PfedlaError, check_affordable, shown, unknown
from pfedla.core.faults import Attack, Faults
from pfedla.core.files import check_size
from pfedla.core.models import MODELS, build_model, model_for
from pfedla.core.contracts import generator
from pfedla.runs.simulation import Settings
from pfedla.core.tasks import task_of

Auto = Literal["auto"]
SITES = "sites"  # the data set of a deployment whose sites bring their own data
Positive = Annotated[int, Field(ge=1, le=10**9)]
DATASET_KEYS = {"dataset", "classes_limit"}  # of [data]; the other keys say how the data are cut
Share = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class DataSection(_Section):
    """[data]: which data, and how they are cut into clients."""

    dataset: str = "digits"  # a name of `pfedla data list`, or a file.npz of your own
    classes_limit: Annotated[int, Field(ge=2, le=10**6)] | Auto = AUTO  # only the first classes; auto: all, emnist 10, toy 9
    partition: Partition | Auto = AUTO  # how they are cut; auto: the data's own clients, else classes (non-IID_1)
    clients: Positive | Auto = AUTO  # how many; auto: 10, or the data's own; twins and chain 8, toy 6
    samples_per_client: Positive | Auto = AUTO  # train and test; auto: 600 as in the paper, digits and own data all
    classes_per_client: Positive | Auto = AUTO  # classes, twins, chain; auto: 4; 12 of a hundred (classes); toy 3
    dominant_classes: Positive | Auto = AUTO  # how many prevail (dominant); auto: 2; 6 with a hundred classes
    dominant_share: Share | Auto = AUTO  # of a client's examples, in these classes (dominant); auto: 0.6
    beta: Annotated[float, Field(gt=0, le=LARGEST_BETA, allow_inf_nan=False)] | Auto = AUTO  # of Dirichlet; auto: 0.5
    shards_per_client: Positive | Auto = AUTO  # pieces of the sorted examples (shards); auto: 2
    overlapping: bool = False  # clients draw from one pool: test images of one may train another (the paper-like leak)
    test_share: Share | Auto = AUTO  # auto: 0.3, unless the data name both clients and a ready test split

    @property
    def split_name(self) -> str:
        """The partition as results name it: a leak between clients is never left unsaid."""
        return f"{self.partition}{'-overlapping' if self.overlapping else ''}"


class TrainingSection(_Section):
    """[training]: the local budget, the same for every method."""

    lr: Annotated[float, Field(gt=0, le=1e38, allow_inf_nan=False)] | Auto = AUTO  # of SGD; auto: the paper's for the data
    local_epochs: Annotated[int, Field(ge=1, le=10_000)] = 5  # a round; every epoch's order is drawn before the first
    batch_size: Positive = 32  # of local SGD
    augment: bool = False  # random crop and flip of the training images; the paper states none


class EngineSection(_Section):
    """[engine]: where the clients run; the results do not depend on the number of threads."""

    name: str = AUTO  # auto: vectorized on a GPU and for small networks without convolutions, else threaded
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # clients trained at once; 0: one per core
    device: str = "cpu"  # cpu, cuda, … as torch names them
    compile: Compile = AUTO  # the training step, by torch and a C++ compiler; auto: where it was measured to pay


class UploadsSection(_Section):
    """[uploads]: what is not taken from clients, beside what is malformed or not finite."""

    norm_bound: Annotated[float, Field(ge=1, allow_inf_nan=False)] | Literal["off"] = "off"  # in medians of the round's updates
    max_failed_rounds: Positive = 5  # so many rounds in a row of which nothing can be used end the run


class FaultsSection(_Section):
    """[faults]: what goes wrong on purpose, drawn from the seed."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # chance that a client of the cohort does not answer, each round
    stragglers: Annotated[float, Field(ge=0, le=1)] = 0.0  # chance that it does only some of its local epochs, each round
    attack: Attack = "none"  # what attackers send
    attackers: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the clients, the same ones throughout
    attack_rate: Annotated[float, Field(gt=0, le=1)] = 1.0  # chance that an attacker attacks, each round
    attack_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = AUTO  # of the update; auto: 1; 10 for scale

    def active(self) -> dict[str, Any]:
        """What differs from a run in which nothing goes wrong."""
        return self.model_dump(exclude_defaults=True)

    def faults(self) -> Faults:
        scale = None if self.attack_scale == AUTO else self.attack_scale
        return Faults(self.dropout, self.stragglers, self.attack, self.attackers, self.attack_rate, scale)


class CheckpointSection(_Section):
    """[checkpoint]: how often the run is saved; always when it is stopped and at its end."""

    rounds: Annotated[int, Field(ge=0, le=10**9)] = 0  # every so many rounds; 0: not by rounds
    minutes: Annotated[float, Field(ge=0, le=10**6)] = 10.0  # after the round that ends so long after the last; 0: not by time


class AlgorithmSection(_Section):
    """[algorithm]: its name and its own options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    name: str = "pfedla"  # a name of `pfedla algorithms`

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Experiment(_Section):
    """Everything that decides the numbers of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0  # every draw comes from it: split, initialisation, cohorts, batches
    rounds: Positive = 20  # of training
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the clients in each round
    unseen_clients: Annotated[float, Field(ge=0, lt=1)] = 0.0  # share of the clients that join after the last round only
    evaluate_every: Positive = 1  # test all personal models after every so many rounds; always after the last
    recalibrate: Recalibrate = "unsampled"  # whose BatchNorm statistics are estimated anew before a test
    model: str = AUTO  # the network; auto: by the shape of the examples
    data: DataSection = DataSection()
    training: TrainingSection = TrainingSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    engine: EngineSection = EngineSection()
    uploads: UploadsSection = UploadsSection()
    faults: FaultsSection = FaultsSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise PfedlaError(_explain(error)) from None

    def to_toml(self) -> str:
        """What is "auto" is left out; once all is resolved, that is what the partition does not use."""
        values = self.model_dump()
        for section in ("data", "faults"):
            values[section] = {key: value for key, value in values[section].items() if value != AUTO}
        if not self.unseen_clients:  # as in runs before there was such a key
            del values["unseen_clients"]
        return tomli_w.dumps(values)

    def numbers(self) -> dict[str, Any]:
        """What the numbers of each round depend on: the values that must not change while a run goes on."""
        values = self.model_dump(exclude={"rounds": True, "checkpoint": True, "engine": {"threads"}})
        del values["uploads"]["max_failed_rounds"]
        if not self.unseen_clients:
            del values["unseen_clients"]
        return values

    def settings(self) -> Settings:
        bound = self.uploads.norm_bound
        return Settings(
            rounds=self.rounds, participation=self.participation, seed=self.seed, engine=self.engine.name,
            threads=self.engine.threads, device=self.engine.device, compile=self.engine.compile == "on",
            evaluate_every=self.evaluate_every,
            recalibrate=self.recalibrate, norm_bound=None if bound == "off" else bound,
            max_failed_rounds=self.uploads.max_failed_rounds, faults=self.faults.faults(),
        )  # fmt: skip


def _explain(error: ValidationError) -> str:
    problem = error.errors()[0]
    where = [str(part) for part in problem["loc"]]
    key = ".".join(where[:2])
    if problem["type"] == "extra_forbidden":
        section = where[0] if len(where) > 1 else None
        fields: Any = Experiment.model_fields[section].annotation if section else Experiment
        return str(unknown("key", key, (f"{section}.{field}" if section else field for field in fields.model_fields)))
    if problem["type"] == "model_type":
        return f"{key} = {shown(problem['input'])} is not possible: [{key}] is a section"
    # A union ("auto" or a number) reports each of its members.
    same_key = [other for other in error.errors() if other["loc"][:2] == problem["loc"][:2]]
    messages = dict.fromkeys(other["msg"].removeprefix("Input should be ").lower() for other in same_key)
    return f"{key} = {shown(problem['input'])} is not possible: it should be {' or '.join(messages)}"


def read_toml(path: Path) -> dict[str, Any]:
    path = path / "experiment.toml" if path.is_dir() else path  # a run folder
    if not path.exists():
        raise PfedlaError(f"{path}: no such experiment file")
    check_size(path, 2**20)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise PfedlaError(f"{path}: not a TOML file: {error}") from None


class Built(NamedTuple):
    """An experiment with every "auto" resolved, and what it is made of."""

    experiment: Experiment
    federation: Outline  # a Federation where the data are at hand
    algorithm: Algorithm
    note: str = ""  # what a person should know about what was decided
    unseen: Federation | None = None  # the clients that join after the last round


def build(experiment: Experiment, dataset: Dataset | None = None) -> Built:
    """Check everything that can be checked before anything runs, resolve every "auto", and put the parts together."""
    check_names(experiment)
    data, federation = build_federation(experiment.data, experiment.seed, dataset)
    seen, unseen = federation.parted(experiment.unseen_clients, experiment.seed)
    built = assembled(experiment.model_copy(update={"data": data}), seen)
    if unseen is not None:
        algorithms.check_joining(built.algorithm)
    return built._replace(unseen=unseen)


def check_names(experiment: Experiment) -> None:
    algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    if experiment.engine.name not in (AUTO, *ENGINE_NAMES):
        raise unknown("engine", experiment.engine.name, [AUTO, *ENGINE_NAMES])
    usable_device(experiment.engine.device)
    if experiment.model not in (AUTO, *MODELS):
        raise unknown("model", experiment.model, [AUTO, *MODELS])


def assembled(experiment: Experiment, federation: Outline) -> Built:
    """The same where it is known how the data are cut."""
    options = algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    name = model_for(federation.shape) if experiment.model == AUTO else experiment.model
    module = build_model(name, federation.shape, len(federation.classes), generator(experiment.seed, "model"))
    training = experiment.training
    if training.lr == AUTO:
        entry = datasets.KNOWN.get(experiment.data.dataset)
        training = training.model_copy(update={"lr": entry.lr if entry else 0.01})
    if training.augment:
        federation.check_images()
    budget = LocalTraining(_chosen(training.lr), training.local_epochs, training.batch_size, training.augment)
    method = algorithms.create(experiment.algorithm.name, task_of(module), budget, options)
    check_affordable(f"the models of {len(federation)} clients", len(federation) * sum(method.task.layers.num_parameters))
    method.check(len(federation))
    experiment.faults.faults().check(len(federation), training.local_epochs)
    section = AlgorithmSection(name=experiment.algorithm.name, **options | method.decided())
    engine, note = _chosen_engine(experiment.engine, module, name)
    resolved = experiment.model_copy(update={"model": name, "training": training, "algorithm": section, "engine": engine})
    notices = (note, method.notice(experiment.rounds * experiment.participation))
    return Built(resolved, federation, method, "; ".join(filter(None, notices)))


def _chosen_engine(section: EngineSection, module: nn.Module, model: str) -> tuple[EngineSection, str]:
    name = chosen_engine(section.name, section.device, module)
    compile, note = chosen_compile(section.compile, name, section.device, model)
    return section.model_copy(update={"name": name, "compile": compile}), note


def build_federation(data: DataSection, seed: int, dataset: Dataset | None = None) -> tuple[DataSection, Federation]:
    """The federation, and its section with every "auto" resolved."""
    dataset = dataset or datasets.load(data.dataset)
    dataset = dataset.limited(_classes_limit(data, dataset))
    asked = {key: None if value == AUTO else value for key, value in data.model_dump(exclude=DATASET_KEYS).items()}
    recipe = recipe_of(dataset, **asked)
    entry = datasets.KNOWN.get(data.dataset)
    if recipe.samples_per_client is None and recipe.partition != "client" and entry:
        recipe = replace(recipe, samples_per_client=entry.samples_per_client)
    federation = partitioned(dataset, recipe, seed)
    return _resolved(data, dataset, recipe, federation), federation


def _resolved(data: DataSection, dataset: Dataset, recipe: Recipe, federation: Federation) -> DataSection:
    """The section with what was decided; what its partition does not use stays "auto"."""
    decided: dict[str, Any] = {"classes_limit": len(dataset.classes)}
    if data.dataset.endswith(".npz"):
        decided["dataset"] = str(Path(data.dataset).resolve())  # the run folder may be used from elsewhere
    for key, value in vars(recipe).items():
        if recipe.partition in USED_BY.get(key, (recipe.partition,)):
            decided[key] = value
    if recipe.partition == "client":
        del decided["samples_per_client"]
        if dataset.test is not None:
            del decided["test_share"]
    else:
        decided["samples_per_client"] = int(federation.class_counts().sum()) // len(federation)
    return data.model_copy(update=decided)


def _chosen(value: Any) -> Any:
    """The value of a field whose "auto" is resolved by now."""
    assert value != AUTO
    return value


def _classes_limit(data: DataSection, dataset: Dataset) -> int:
    entry, there = datasets.KNOWN.get(data.dataset), len(dataset.classes)
    if data.partition == "toy":
        if data.classes_limit not in (AUTO, TOY_CLASSES) or there < TOY_CLASSES:
            raise PfedlaError(
                f"partition 'toy' has {TOY_CLASSES} classes; {dataset.name} has {there}, classes_limit must be left out"
            )
        return TOY_CLASSES
    if data.classes_limit != AUTO:
        return data.classes_limit
    return min(there, (entry.classes_limit if entry else None) or there)
