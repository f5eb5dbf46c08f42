"""Use the result: load a client's personal model from a run folder, and evaluate it."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, FailFast, Field, ValidationError, model_validator
from torch import Tensor, nn

from pfedla.core import models
from pfedla.core.contracts import generator
from pfedla.core.errors import PfedlaError, shown, unknown
from pfedla.core.files import read_object, read_tensors, refuse_links, write_text
from pfedla.core.settings import AUTO
from pfedla.core.tasks import load_tensors, task_of
from pfedla.core.trees import Tree, take_rows
from pfedla.data.dataset import Array, Column, Dataset
from pfedla.data.federation import Examples, Federation, Outline, build_federation, digest_of, federation_of_one
from pfedla.data.scaling import Scaling
from pfedla.data.sources import load_data
from pfedla.report.reading import check_sum
from pfedla.runs.build import choose_objective
from pfedla.runs.experiment import SITES, Experiment, read_toml
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT
from pfedla.runs.prediction import PersonalModel, find_client, to_examples, to_labels
from pfedla.runs.recognition import find_trained

JOINED = "joined"  # the folder of the clients that joined after the run
GIVE_A_FILE = "give a file with --data"
MOST_INPUTS, MOST_AXES = 16, 8  # of a model that takes several tensors; of a tensor
Numbers = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], FailFast()]
Names = Annotated[tuple[str, ...], FailFast()]


class ColumnFile(BaseModel):
    name: str
    kind: Literal["number", "category", "text"]
    categories: Names = ()
    tokenizer: str = ""
    length: int = 0


class ScalingFile(BaseModel):
    fill: Numbers
    centre: Numbers
    scale: Annotated[tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...], FailFast()]

    def load(self) -> Scaling:
        return Scaling.from_lists(self.model_dump())


def _name_of_task(task: Any) -> Any:
    return task.get("name") if isinstance(task, Mapping) else task


def _parse_shape(shape: Any) -> Tree:
    """Return the sizes of one example, or a tuple or dict of them, from JSON."""
    if isinstance(shape, dict) and 0 < len(shape) <= MOST_INPUTS:
        return {key: _parse_sizes(sizes) for key, sizes in shape.items()}
    if isinstance(shape, list) and 0 < len(shape) <= MOST_INPUTS and isinstance(shape[0], list):
        return tuple(_parse_sizes(sizes) for sizes in shape)
    return _parse_sizes(shape)


def _parse_sizes(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, list) or len(sizes) > MOST_AXES or not all(type(one) is int and one > 0 for one in sizes):
        raise ValueError(f"{shown(sizes)} is no shape of an example")
    return tuple(sizes)


class FederationFile(BaseModel):
    """federation.json of a run folder. FailFast: an untrusted one could be answered by gigabytes of messages."""

    task: Annotated[
        Literal["classification", "multilabel", "regression", "survival"], BeforeValidator(_name_of_task)
    ] = "classification"
    shape: Annotated[Any, BeforeValidator(_parse_shape)]
    classes: Names
    mean: Annotated[tuple[Annotated[float, Field(ge=0, le=255)], ...], FailFast()]  # of uint8 images, per channel
    std: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=255)], ...], FailFast()]
    clients: Names
    subset: str = ""
    fingerprint: str = ""  # empty where it is not known
    targets: Names = ()
    vocabulary: Annotated[int, Field(ge=0, le=2**31)] = 0
    columns: Annotated[tuple[ColumnFile, ...], FailFast()] = ()
    # Of each client; empty where examples are used as they are.
    scaling: Annotated[tuple[ScalingFile, ...], FailFast(), BeforeValidator(lambda value: value or ())] = ()
    dtype: Any = None  # of the inputs where they are neither float32 nor uint8, in the form of `shape`

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        shape = self.shape
        if models.is_plain(shape):
            sizes, channels = (len(self.mean), len(self.std)), shape[:-2]  # a feature vector has none
            if len(shape) not in (1, 3) or sizes not in ((0, 0), channels * 2):
                raise ValueError(f"shape {self.shape} with {sizes[0]} means and {sizes[1]} standard deviations")
        elif self.mean or self.std or self.scaling:
            raise ValueError("several inputs cannot be normalised")
        if not self.classes:
            raise ValueError("no classes")
        for one in self.scaling:
            if {(len(values),) for values in one.model_dump().values()} != {self.shape}:
                raise ValueError(f"scaling of other than {self.shape} features")
        if self.scaling and len(self.scaling) != len(self.clients):
            raise ValueError(f"scaling of {len(self.scaling)} clients, there are {len(self.clients)}")
        return self

    def to_outline(self) -> Outline:
        """Return what is known of the federation, without its examples."""
        nobody = torch.zeros(len(self.clients), dtype=torch.int64)
        kept = ("mean", "std", "subset", "task", "targets", "vocabulary")
        known: dict[str, Any] = {key: getattr(self, key) for key in kept} | {"names": self.clients}
        known["columns"] = tuple(Column(**one.model_dump()) for one in self.columns)
        known["scaling"] = tuple(one.load() for one in self.scaling) or None
        return Outline(self.shape, self.classes, nobody, **known)


@dataclass(frozen=True, kw_only=True)
class PersonalClient:
    """A client of a finished run, and its model."""

    run: Path
    client: int | str  # its number, or joined/NAME for one that joined after the run
    name: str
    experiment: Experiment
    federation: FederationFile
    own_data: dict[str, Any]  # what the folder says of the data of a joined client or a site; nothing of others'
    model: PersonalModel

    @property
    def module(self) -> nn.Module:
        return self.model.module

    @property
    def number(self) -> int:
        """The number by which its examples are hashed."""
        return self.client if isinstance(self.client, int) else 0

    @property
    def folder(self) -> Path:
        """Where the hashes of its examples are."""
        return self.run if isinstance(self.client, int) else self.run / self.client


def read_run(run: Path) -> tuple[Experiment, FederationFile]:
    """Return the experiment and the federation of a finished run."""
    for name in (EXPERIMENT, FEDERATION, RESULT):
        if not (run / name).exists():
            inside = sorted(path.parent.name for path in run.glob(f"*/{RESULT}"))
            hint = f"; it holds runs: {', '.join(inside)}" if inside else ""
            raise PfedlaError(f"{run} is not a finished run: it has no {name}{hint}")
    refuse_links(run)
    check_sum(run, FEDERATION)
    try:
        federation = FederationFile.model_validate(read_object(run / FEDERATION))
    except ValidationError as error:
        problem = error.errors()[0]
        raise PfedlaError(f"{run / FEDERATION} is damaged: {problem['loc']}: {problem['msg']}") from None
    return Experiment.parse(read_toml(run)), federation


def load_personal(run: Path, client: str) -> PersonalClient:
    """Load the model of a client that is given by its name, its number unless names are numbers, or joined/NAME."""
    experiment, known = read_run(run)
    joined = [f"{JOINED}/{path.parent.name}" for path in sorted(run.glob(f"{JOINED}/*/{RESULT}"))]
    found: int | str = client
    if client not in joined:
        try:
            found = find_client(known.clients, client)
        except PfedlaError:
            raise unknown("client", client, [*known.clients, *joined]) from None
    is_joined = isinstance(found, str)
    path = f"{found}/model.safetensors" if is_joined else f"models/client-{found}.safetensors"
    about = run / (f"{found}/{RESULT}" if is_joined else "site.json")
    own_data, outline = read_object(about) if about.exists() else {}, known.to_outline()
    scaling = outline.scaling[int(found)] if outline.scaling and not is_joined else None
    if "scaling" in own_data:
        try:
            scaling = ScalingFile.model_validate(own_data["scaling"]).load()
        except ValidationError:
            raise PfedlaError(f"{about} is damaged: its scaling cannot be read") from None
    check_sum(run / str(found) if is_joined else run, "model.safetensors" if is_joined else path)
    module = _load_module(run / path, experiment, outline)
    model = PersonalModel(module, outline, choose_objective(experiment, outline), scaling)
    name = client if is_joined else known.clients[int(found)]
    more: dict[str, Any] = {"experiment": experiment, "federation": known, "own_data": own_data}
    return PersonalClient(run=run, client=found, name=name, model=model, **more)


def _load_module(path: Path, experiment: Experiment, outline: Outline) -> nn.Module:
    """Build the run's model, with its frozen tensors, and load the client's own into it."""
    name, given = experiment.model, (outline.shape, len(outline.outputs))
    draws, vocabulary = generator(experiment.seed, "model"), outline.vocabulary
    if name not in models.MODELS:  # own code makes its tensors at once
        module = models.build_model(name, *given, draws, vocabulary)
        return load_tensors(module, read_tensors(path, task_of(module).initial()))
    # Two untrusted files must agree on the sizes before anything of that size is made.
    module = models.outline(name, *given, vocabulary)
    tensors = read_tensors(path, task_of(module).initial())
    everything = {*dict(module.named_parameters(remove_duplicate=False))}
    if everything | {*dict(module.named_buffers(remove_duplicate=False))} != tensors.keys():
        return load_tensors(models.build_model(name, *given, draws, vocabulary), tensors)
    module.load_state_dict(tensors, assign=True)
    return module


class Given(NamedTuple):
    """Labelled examples on which a model is tested."""

    examples: Examples
    rows: Array  # where they stand in the file, or in the client's test split
    raw: bool  # whether they still have to be scaled


def evaluate_personal(personal: PersonalClient, data: Path | None, predictions: Path | None = None) -> dict[str, Any]:
    """Test a personal model on the examples of a file, or on the client's own test split of the run."""
    if predictions and predictions.exists():
        raise PfedlaError(f"{predictions} exists already and is never overwritten; choose another file")
    given = _read_test_split(personal) if data is None else _read_examples(personal, data)
    outputs, found = personal.model.measure(given.examples, raw=given.raw)
    metrics = {name: _or_none(value) for name, value in found["metrics"].items()}
    known: dict[str, Any] = {"client": personal.client, "name": personal.name, "examples": len(given.rows)}
    known |= {"task": personal.model.objective.describe(), "score": _or_none(found["score"])}
    if predictions:
        write_predictions(predictions, personal.model, given, outputs)
    return known | {"loss": _or_none(found["loss"]), "metrics": metrics}


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _read_test_split(personal: PersonalClient) -> Given:
    """Split the client's data again; refuse data that have changed since."""
    experiment, known, own = personal.experiment, personal.federation, personal.own_data
    if experiment.data.dataset == SITES or not isinstance(personal.client, int):
        source = str(own.get("data", ""))
        if not source:
            raise PfedlaError(f"the folder does not name the data of client {personal.name}; {GIVE_A_FILE}")
        given = _split_again(personal, Path(source))
        same = given is not None
    else:
        source = experiment.data.dataset
        _, federation = build_federation(experiment.data, experiment.seed, task=experiment.task)
        federation, _ = federation.hold_back(experiment.unseen_clients, experiment.seed)
        # A site of a public data set knows its own examples only.
        split = federation.train[personal.client], federation.test[personal.client]
        same = own.get("digest") == digest_of(*split) if own else known.fingerprint in ("", federation.fingerprint())
        given = Given(split[1], np.arange(len(split[1].y)), raw=False)
    if given is None or not same:
        raise PfedlaError(f"{source} has changed since the model was made; {GIVE_A_FILE}")
    return given


def _split_again(personal: PersonalClient, path: Path) -> Given | None:
    """Return the test split of the data of a site or a joined client; None if `path` holds other data."""
    if isinstance(personal.client, int):
        one = load_site(path, personal.federation.to_outline(), personal.experiment)
    else:
        one, _ = load_unseen(path, personal.experiment, personal.federation)
    train, test = one.train[0], one.test[0]
    if personal.own_data.get("digest") != digest_of(train, test):
        return None
    return Given(test, np.arange(len(test.y)), raw=False)


def load_site(path: Path, known: Outline, experiment: Experiment) -> Federation:
    """Return a federation of one site from its own file or folder; without a test mask the split is drawn."""
    dataset = _read_file(path, known, "this federation", experiment)
    if isinstance(dataset.x, np.ndarray) and dataset.x.dtype != np.uint8:
        dataset = replace(dataset, x=dataset.x.astype(np.float32))
    return federation_of_one(dataset, "this site", experiment.seed, standardise=experiment.data.standardise)


def _read_file(path: Path, known: Outline, whose: str, experiment: Experiment) -> Dataset:
    """Read a file in the form of the run's data; labels are numbered as the run's classes."""
    # Of a table only the run's columns are read; it may be of one client, whose column is then missing.
    data = experiment.data.model_copy(update={"drop": AUTO} if known.columns else {})
    try:
        dataset = load_data(data, known.task, path, known.columns)
    except PfedlaError:
        if data.client == AUTO:
            raise
        dataset = load_data(data.model_copy(update={"client": AUTO}), known.task, path, known.columns)
    pixels, task = bool(known.mean), known.task
    return dataset.match(known.shape, known.classes, pixels=pixels, whose=whose, task=task)


def load_unseen(path: Path, experiment: Experiment, known: FederationFile) -> tuple[Federation, str]:
    """Return a federation of the one client in a file, scaled as the run's, and how its examples are split."""
    if str(path.resolve()) in (experiment.data.dataset, known.subset):
        raise PfedlaError(f"{path}: the run is made of these examples; an unseen client brings its own")
    outline, section = known.to_outline(), experiment.data
    dataset = _read_file(path, outline, "the run", experiment)
    name, *others = dataset.client_names or (path.stem,)
    if others:
        raise PfedlaError(f"{path} holds examples of several clients, {shown([name, *others])}; give a file of each")
    dataset = replace(dataset, mean=known.mean, std=known.std)
    how: dict[str, Any] = {"standardise": section.standardise}
    if section.standardise == "shared" and outline.scaling:
        how["scaling"] = outline.scaling[0]
    if dataset.test is not None:
        return federation_of_one(dataset, name, experiment.seed, **how), "the file's own"
    return federation_of_one(dataset, name, experiment.seed, section.test_share, **how), "as the run's"


def _read_examples(personal: PersonalClient, path: Path) -> Given:
    """Read the test rows of a file; of one that holds the run's clients, only the rows of this client."""
    section, own = personal.experiment.data, personal.own_data
    dataset = _read_file(path, personal.federation.to_outline(), "the model", personal.experiment)
    rows = np.ones(len(dataset.y), bool) if dataset.test is None else dataset.test.copy()
    if dataset.client is not None and section.partition == "client" and isinstance(personal.client, int):
        if personal.name not in dataset.client_names:
            raise unknown(f"client of {path}", personal.name, dataset.client_names)
        rows &= dataset.client == dataset.client_names.index(personal.name)
    if not rows.any():
        raise PfedlaError(f"{path} has no test example of this client")
    if own.get("data") and dataset.test is None:
        if again := _split_again(personal, path):  # its own data, or a copy: the test split is drawn again
            return again
        if str(path.resolve()) == own["data"]:
            raise PfedlaError(f"{path} has changed since the model was made; give a file of other examples")
    examples = to_examples(replace(dataset, x=take_rows(dataset.x, rows), y=dataset.y[rows]))
    _refuse_trained(personal, path, examples.x, is_split=dataset.test is not None)
    places = np.flatnonzero(rows) if dataset.rows is None else dataset.rows[rows]
    return Given(examples, places, raw=True)


def _refuse_trained(personal: PersonalClient, path: Path, x: Tree, *, is_split: bool) -> None:
    """Refuse examples that the client's model was trained on; in old runs, which keep no hashes, by the path."""
    scaling = personal.model.scaling
    trained = find_trained(personal.folder, scaling.apply(x) if scaling else x, personal.number)
    known = (personal.experiment.data.dataset, personal.federation.subset, personal.own_data.get("data"))
    if trained is None and not is_split and str(path.resolve()) in known:
        raise PfedlaError(f"{path}: the model was trained on these examples; leave --data out to use its test split")
    if trained is not None and trained.any():
        count = f"{trained.sum():,} of {len(trained):,} rows"
        fix = "remove them, or leave --data out to test on the client's own split"
        raise PfedlaError(f"{path}: the model was trained on {count} of client {personal.name}; {fix}")


def write_predictions(path: Path, model: PersonalModel, given: Given, outputs: Tensor) -> None:
    """Write a table of the examples: row, label, prediction, and the probability of each class or label."""
    names, y = model.outline.outputs, given.examples.y.numpy()
    found, shares = model.to_predictions(outputs), model.to_probabilities(outputs)
    heads, parts = ["row"], [given.rows]
    if model.task == "classification":
        heads, parts = [*heads, "label", "prediction"], [*parts, to_labels(model.outline.classes)[y], found]
    elif model.task == "survival":
        heads, parts = [*heads, "time", "event", "risk"], [*parts, *y.T, found]
    else:
        labels, found = y.reshape(len(y), -1).T, found.reshape(len(y), -1).T
        pairs = zip(("label", "prediction"), (labels, found), strict=True)
        ends = [""] if len(labels) == 1 else [f"_{name}" for name in names]
        for kind, columns in pairs:
            heads, parts = [*heads, *(f"{kind}{end}" for end in ends)], [*parts, *columns]
    if shares is not None:
        heads, parts = [*heads, *(f"probability_{name}" for name in names)], [*parts, *shares.T]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(zip(*(part.tolist() for part in parts), strict=True))
    write_text(path, text.getvalue())
