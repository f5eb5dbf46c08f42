"""From an experiment to what it is made of: federation, model, method. Everything is checked before anything runs."""

from typing import NamedTuple

from torch import nn

from pfedla import algorithms
from pfedla.core.contracts import Algorithm, generator
from pfedla.core.errors import check_affordable, unknown
from pfedla.core.faults import check_faults
from pfedla.core.models import MODELS, build_model, model_for
from pfedla.core.settings import AUTO
from pfedla.core.tasks import Task, task_of
from pfedla.core.training import batch_bounds
from pfedla.data import datasets
from pfedla.data.dataset import Dataset
from pfedla.data.federation import Federation, Outline, build_federation
from pfedla.engines.client import usable_device
from pfedla.engines.simulated import resolve_engine
from pfedla.runs.experiment import AlgorithmSection, Experiment

DEFAULT_LR = 0.01


class Built(NamedTuple):
    """An experiment with every "auto" resolved, and what it is made of."""

    experiment: Experiment
    federation: Outline  # a Federation where the data are at hand
    algorithm: Algorithm
    note: str = ""  # what a user should know about what was resolved
    unseen: Federation | None = None  # the clients that join after the last round


def build(experiment: Experiment, dataset: Dataset | None = None) -> Built:
    """Check everything that can be checked before anything runs, resolve every "auto", and put the parts together."""
    check_names(experiment)
    data, federation = build_federation(experiment.data, experiment.seed, dataset)
    seen, unseen = federation.hold_back(experiment.unseen_clients, experiment.seed)
    built = build_around(experiment.model_copy(update={"data": data}), seen)
    if unseen is not None:
        algorithms.check_joining(built.algorithm)
    return built._replace(unseen=unseen)


def check_names(experiment: Experiment) -> None:
    algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    usable_device(experiment.engine.device)
    if experiment.model not in (AUTO, *MODELS):
        raise unknown("model", experiment.model, [AUTO, *MODELS])


def build_around(experiment: Experiment, federation: Outline) -> Built:
    """Build an experiment whose federation is known, with one of our models."""
    name = model_for(federation.shape) if experiment.model == AUTO else experiment.model
    module = build_model(name, federation.shape, len(federation.classes), generator(experiment.seed, "model"))
    known = datasets.KNOWN.get(experiment.data.dataset)
    lr = known.lr if known else DEFAULT_LR
    return _build_method(experiment.model_copy(update={"model": name}), federation, task_of(module), lr)


def build_own(experiment: Experiment, federation: Federation, module: nn.Module) -> Built:
    """Build an experiment around a federation and a module that the caller brings (`simulate`)."""
    task, batch_size = task_of(module), experiment.training.batch_size
    sizes = {stop - start for n in set(federation.num_examples.tolist()) for start, stop in batch_bounds(n, batch_size)}
    task.check(federation.normalise(federation.train[0].x[: min(sizes)]), len(federation.classes))
    return _build_method(experiment, federation, task, DEFAULT_LR)


def _build_method(experiment: Experiment, federation: Outline, task: Task, lr: float) -> Built:
    training = experiment.training
    if training.lr == AUTO:
        training = training.model_copy(update={"lr": lr})
    if training.augment:
        federation.check_images()
    section = experiment.algorithm
    method = algorithms.create(section.name, task, training, section.options)
    num_numbers = len(federation) * sum(task.layers.num_parameters)
    check_affordable(f"the models of {len(federation)} clients", num_numbers)
    method.check(len(federation))
    check_faults(experiment.faults, len(federation), training.local_epochs)
    options = algorithms.resolve_options(section.name, section.options)
    resolved = experiment.model_copy(
        update={
            "training": training,
            "algorithm": AlgorithmSection(name=section.name, **options),
            "engine": resolve_engine(experiment.engine, task.module),
        }
    )
    return Built(resolved, federation, method, note=method.notice(experiment.rounds * experiment.participation))
