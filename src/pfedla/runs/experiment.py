"""An experiment is data: a strict TOML file, or the same as options. Imports no torch: the command line needs it."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import tomli_w
from pydantic import ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from pfedla.core import settings
from pfedla.core.errors import PfedlaError, invalid, shown
from pfedla.core.files import parse_toml
from pfedla.core.settings import AUTO, Natural, Option, Positive, Section
from pfedla.data.partition import Data

SITES = "sites"  # the data set of a deployment whose sites bring their own data
# Options that are gone, with the defaults that older run folders wrote down.
REMOVED = {"body_epochs": ("auto",), "joint_epochs": ("auto",), "embedding_size": ("auto", 100), "hidden_layers": (3,)}
REMOVED["augment"] = (False,)
# No part of what a run is: its numbers are the same with any of these.
FREE: dict[str, Any] = {"tuned_trials": True, "checkpoint": True, "engine": {"threads"}}
FREE["uploads"] = {"max_failed_rounds"}


class AlgorithmSection(Section):
    """The method, and its own options."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, use_attribute_docstrings=True)
    name: Annotated[str, Option("algorithm", "-a")] = "pfedla"
    """A name of `pfedla algorithms`, or your own package.module:Class."""

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Experiment(Section):
    """Everything that decides the numbers of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63), Option("seed")] = 0
    """Every random draw comes from it: split, initialisation, cohorts, batches."""
    rounds: Annotated[Positive, Option("rounds")] = 20
    """Rounds of training."""
    participation: Annotated[float, Field(gt=0, le=1), Option("participation")] = 1.0
    """Share of the clients in each round."""
    unseen_clients: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the clients that join only after the last round."""
    evaluate_every: Positive = 1
    """Test all personal models after every so many rounds, and always after the last."""
    recalibrate: settings.Recalibrate = "unsampled"
    """Whose BatchNorm statistics are estimated anew before a test."""
    tuned_trials: Natural = 0
    """Validation trials by which the method's options were chosen; tables name it."""
    task: Annotated[Literal["auto", "classification", "multilabel", "regression", "survival"], Option("task")] = AUTO
    """classification, multilabel, regression or survival: decides loss and metrics. auto: by the labels."""
    metric: Annotated[str, Option("metric")] = AUTO
    """The metric of curves and tables: accuracy, auroc, rmse, c_index, … auto: the data set's, or the task's."""
    model: Annotated[str, Option("model")] = AUTO
    """A name of `pfedla models`, or your own package.module:factory. auto: by the shape of the examples."""
    exclude: dict[str, Positive | settings.Auto] = Field({})
    """Clients (by name or number) that take no part, each with the first round without it. auto: the next round."""
    data: Data = Data()
    training: settings.Training = settings.Training()
    algorithm: AlgorithmSection = AlgorithmSection()
    engine: settings.EngineSettings = settings.EngineSettings()
    uploads: settings.UploadSettings = settings.UploadSettings()
    wire: settings.WireSettings = settings.WireSettings()
    privacy: settings.Privacy = settings.Privacy()
    faults: settings.Faults = settings.Faults()
    checkpoint: settings.CheckpointSettings = settings.CheckpointSettings()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        try:
            json.dumps(values, ensure_ascii=False, default=str).encode()
            return cls.model_validate(values)
        except UnicodeEncodeError as error:  # the name of a file, as the system has it
            raise PfedlaError(f"{shown(error.object)}: a name is not valid Unicode; rename it") from None
        except ValidationError as error:
            section, *inner = map(str, error.errors()[0]["loc"])
            known = cls().model_dump()
            raise invalid(error, [f"{section}.{one}" for one in known[section]] if inner else known, depth=2) from None

    def to_toml(self) -> str:
        """Return the whole experiment; what is still "auto" is the default, and left out."""
        values = self.model_dump()
        values = {key: value for key, value in values.items() if value not in (AUTO, {})}
        for section in ("data", "faults", "privacy"):
            values[section] = {key: value for key, value in values[section].items() if value != AUTO}
        return tomli_w.dumps(values)

    def identity(self) -> dict[str, Any]:
        """Return what the numbers of each round depend on, without defaults: a new option leaves it as it was."""
        from pfedla.algorithms import default_options

        # With schedule cosine the learning rate of every round depends on the last, with an epsilon its noise.
        is_planned = self.training.schedule == "cosine" or self.privacy.epsilon != "off"
        may_change = FREE if is_planned else {**FREE, "rounds": True}
        values = self.model_dump(exclude=may_change, exclude_defaults=True)
        defaults = default_options(self.algorithm.name)
        options = {key: value for key, value in self.algorithm.options.items() if defaults.get(key) != value}
        values["algorithm"] = {"name": self.algorithm.name, **options}
        return {key: value for key, value in values.items() if value != {}}


class Place(NamedTuple):  # of a setting in the experiment file
    section: str  # empty: at the top
    key: str
    field: FieldInfo
    option: Option | None  # on the command line


def list_settings() -> dict[str, Place]:
    """Return every setting by its short name: the name of its option, or its key. Made from the sections' fields."""
    found: dict[str, Place] = {}
    sections = {"": Experiment()} | {key: value for key, value in Experiment() if isinstance(value, Section)}
    for section, defaults in sections.items():
        for key, field in type(defaults).model_fields.items():
            if section or key not in sections:
                option = next((mark for mark in field.metadata if isinstance(mark, Option)), None)
                found[option.name.replace("-", "_") if option else key] = Place(section, key, field, option)
    return found


def upgrade(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate an experiment that an older version wrote into today's settings."""
    from pfedla.algorithms import default_options

    engine, algorithm = values.get("engine"), values.get("algorithm")
    if isinstance(engine, dict) and isinstance(engine.get("compile"), str):
        values = overlay(values, {"engine": {"compile": engine["compile"] == "on"}})
    if isinstance(training := values.get("training"), dict):
        values = {**values, "training": _drop_removed(training)}
    if isinstance(algorithm, dict):
        if algorithm.get("rule") == "held-out":  # the other rule, "paper", is what pfedla and heurpfedla are now
            algorithm = algorithm | {"name": "pfedla-heldout", "sketch": "exact"}
        if "rule" in algorithm:
            known = {"name", *default_options(algorithm.get("name", "pfedla"))}
            algorithm = {key: value for key, value in algorithm.items() if key in known}
        values = {**values, "algorithm": _drop_removed(algorithm)}
    return dict(values)


def _drop_removed(section: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if value not in REMOVED.get(key, ())}


def read_toml(path: Path) -> dict[str, Any]:
    """Read an experiment file, or the one in a run folder (also of format 1)."""
    path = path / "experiment.toml" if path.is_dir() else path
    return upgrade(parse_toml(path))


def gather(file: Path | None, options: Mapping[str, Any], sets: list[str], *, spread: bool = False) -> dict[str, Any]:
    """Merge the experiment file, the options that were given, and --set; each overrides the one before."""
    values = read_toml(file) if file else {}
    section = values.get("algorithm")
    if isinstance(section, dict):
        named = section.get("name", "pfedla")
        if spread and isinstance(named, str):  # compare: its options move into a section of that name
            overridden = {"algorithm.name", *(one.partition("=")[0].strip() for one in sets)}
            own = {key: v for key, v in values.pop("algorithm").items() if f"algorithm.{key}" not in overridden}
            values = overlay({named: own} if own else {}, values)
        elif options.get("algorithm") not in (None, named):  # its options are not those of another algorithm
            values["algorithm"] = {}
    values = overlay(values, nest({name: value for name, value in options.items() if value is not None}))
    for assignment in sets:
        values = overlay(values, parse_assignment(assignment))
    return values


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings given by their short names into their sections."""
    values: dict[str, Any] = {}
    for name, value in flat.items():
        place = list_settings()[name]
        values = overlay(values, {place.section: {place.key: value}} if place.section else {place.key: value})
    return values


def parse_assignment(assignment: str) -> dict[str, Any]:
    """Parse one "section.key=value"; the value is TOML, a bare word is a string."""
    path, equals, text = assignment.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) > 2 or not all(parts):
        raise PfedlaError(f"--set {shown(assignment)}: write section.key=value, for example algorithm.neighbours=5")
    try:
        value = text if text.strip() == "nan" else tomllib.loads(f"value = {text}")["value"]  # nan names an attack
    except ValueError:
        value = text
    return {parts[0]: value} if len(parts) == 1 else {parts[0]: {parts[1]: value}}


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = below.get(key)
        merged[key] = overlay(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
