"""From an experiment to what it is made of: federation, model, method. Everything is checked before anything runs."""

from typing import NamedTuple

from torch import nn

from pfedla import algorithms
from pfedla.core.contracts import Algorithm, generator
from pfedla.core.errors import check_affordable, unknown
from pfedla.core.faults import check_faults
from pfedla.core.models import MODELS, build_model, model_for
from pfedla.core.settings import AUTO, Section
from pfedla.core.tasks import task_of
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
    unseen: Federation | None = None  # the clients that join after the last round


def build(experiment: Experiment, dataset: Dataset | None = None) -> Built:
    """Check everything that can be checked before anything runs, resolve every "auto", and put the parts together."""
    algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    usable_device(experiment.engine.device)
    if experiment.model not in (AUTO, *MODELS):
        raise unknown("model", experiment.model, [AUTO, *MODELS])
    data, federation = build_federation(experiment.data, experiment.seed, dataset)
    seen, unseen = federation.hold_back(experiment.unseen_clients, experiment.seed)
    built = build_around(experiment.model_copy(update={"data": data}), seen)
    if unseen is not None:
        algorithms.check_joining(built.algorithm)
    return built._replace(unseen=unseen)


def build_around(experiment: Experiment, federation: Outline, module: nn.Module | None = None) -> Built:
    """Build an experiment whose federation is known, around the caller's module (`simulate`) or one of our models."""
    model, training, section = experiment.model, experiment.training, experiment.algorithm
    num_clients, num_classes, lr = len(federation), len(federation.classes), DEFAULT_LR
    if module is None:
        model = model_for(federation.shape) if model == AUTO else model
        task = task_of(build_model(model, federation.shape, num_classes, generator(experiment.seed, "model")))
        known = datasets.KNOWN.get(experiment.data.dataset)
        lr = known.lr if known else DEFAULT_LR
    else:
        assert isinstance(federation, Federation)
        task, sizes = task_of(module), set(federation.num_examples.tolist())
        smallest = min(stop - start for size in sizes for start, stop in batch_bounds(size, training.batch_size))
        task.check(federation.normalise(federation.train[0].x[:smallest]), num_classes)
    if training.lr == AUTO:
        training = training.model_copy(update={"lr": lr})
    method = algorithms.create(section.name, task, training, section.options)
    check_affordable(f"the models of {num_clients} clients", num_clients * sum(task.layers.num_parameters))
    method.check(num_clients)
    check_faults(experiment.faults, num_clients, training.local_epochs)
    options = algorithms.resolve_options(section.name, section.options)
    resolved: dict[str, Section | str] = {"model": model, "training": training}
    resolved["algorithm"] = AlgorithmSection(name=section.name, **options)
    resolved["engine"] = resolve_engine(experiment.engine, task.module)
    return Built(experiment.model_copy(update=resolved), federation, method)
