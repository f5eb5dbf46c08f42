"""From an experiment to what it is made of: federation, model, method. Everything is checked before anything runs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from pfedla import algorithms
from pfedla.core import models
from pfedla.core.accounting import check_installed
from pfedla.core.contracts import Algorithm, generator
from pfedla.core.errors import PfedlaError, check_affordable, unknown
from pfedla.core.faults import check_faults
from pfedla.core.objectives import OBJECTIVES, Objective
from pfedla.core.privacy import check_private
from pfedla.core.settings import AUTO, Auto
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds
from pfedla.data import datasets
from pfedla.data.dataset import Dataset
from pfedla.data.federation import Examples, Federation, Outline, build_federation
from pfedla.engines.client import pick, usable_device
from pfedla.engines.simulated import resolve_engine
from pfedla.runs.experiment import AlgorithmSection, Experiment

DEFAULT_LR = 0.01


class Built(NamedTuple):
    """An experiment with every "auto" resolved, and what it is made of."""

    experiment: Experiment
    federation: Outline  # a Federation where the data are at hand
    algorithm: Algorithm
    unseen: Federation | None = None  # the clients that join after the last round
    notes: tuple[str, ...] = ()  # what a user should know before the run

    def exclude(self, clients: Mapping[str, int | Auto]) -> "Built":
        return self._replace(experiment=self.experiment.model_copy(update={"exclude": dict(clients)}))


def build(experiment: Experiment, dataset: Dataset | None = None, *, validation: bool = False) -> Built:
    """Check everything that can be checked before anything runs, resolve every "auto", and put the parts together.

    `validation`: test on a part of the training examples; test examples and unseen clients are left out.
    """
    algorithms.resolve_options(experiment.algorithm.name, experiment.algorithm.options)
    usable_device(experiment.engine.device)
    if experiment.model != AUTO:
        models.find(experiment.model)
    data, federation = build_federation(experiment.data, experiment.seed, dataset, experiment.task)
    seen, unseen = federation.hold_back(experiment.unseen_clients, experiment.seed)
    if validation:
        seen, unseen = seen.for_validation(experiment.seed), None
    built = build_around(experiment.model_copy(update={"data": data}), seen)
    if unseen is not None:
        algorithms.check_joining(built.algorithm)
    return built._replace(unseen=unseen)


def check_privacy(experiment: Experiment, method: Algorithm, batch: Examples) -> None:
    """Refuse what private training cannot do."""
    if experiment.privacy.epsilon != "off" and experiment.privacy.noise_multiplier != "off":
        raise PfedlaError("give privacy.epsilon, from which the noise follows, or privacy.noise_multiplier, not both")
    if experiment.engine.compile:
        raise PfedlaError("[privacy] has training steps of its own; leave --compile out")
    algorithms.check_privacy(method)
    check_private(method.task, batch if len(batch.y) else None)
    check_installed()


def check_federation(federation: object) -> None:
    if not isinstance(federation, Outline):
        what = f"{type(federation).__name__}, but a Federation"
        raise PfedlaError(f"the first argument is a {what} is expected; federation_of makes one of your arrays")


def choose_objective(experiment: Experiment, federation: Outline) -> Objective:
    """Return what is learned: the experiment's task and metric; where they are "auto", the data set's."""
    task = federation.task if experiment.task == AUTO else experiment.task
    if task not in OBJECTIVES:  # of a plan that was written elsewhere
        raise unknown("task", task, OBJECTIVES)
    objective = OBJECTIVES[task]
    known = datasets.KNOWN.get(experiment.data.dataset)
    metric = (known.metric if known else "") if experiment.metric == AUTO else experiment.metric
    return objective.with_headline(metric) if metric else objective


def build_around(
    experiment: Experiment, federation: Outline, module: nn.Module | None = None, objective: Objective | None = None
) -> Built:
    """Build an experiment whose federation is known, around the caller's module (`simulate`) or one of our models."""
    model, training, section = experiment.model, experiment.training, experiment.algorithm
    num_clients, num_outputs, lr = len(federation), len(federation.outputs), DEFAULT_LR
    known = datasets.KNOWN.get(experiment.data.dataset)
    resolved: dict[str, Any] = {}
    if objective is None:
        objective = choose_objective(experiment, federation)
        resolved = {"metric": known.metric} if known and known.metric and experiment.metric == AUTO else {}
    if module is None:
        model = models.model_for(federation.shape) if model == AUTO else model
        draws = generator(experiment.seed, "model")
        module = models.build_model(model, federation.shape, num_outputs, draws, federation.vocabulary)
        lr = known.lr if known else DEFAULT_LR
    if training.momentum and training.optimizer == "adamw":
        raise PfedlaError(f"momentum = {training.momentum} is for sgd; leave it out with adamw")
    if training.nesterov and not training.momentum:
        raise PfedlaError("nesterov needs a momentum")
    if training.lr == AUTO:
        training = training.model_copy(update={"lr": lr})
    task, batch, sizes = task_of(module, objective), Examples(None, torch.empty(0)), list[int]()
    if isinstance(federation, Federation):
        sizes = federation.num_examples.tolist()
        smallest = min(stop - start for size in set(sizes) for start, stop in batch_bounds(size, training.batch_size))
        some = pick(federation.train[0], slice(smallest))
        batch = Examples(federation.normalise(some.x), some.y)
        task.check(*batch, num_outputs)
    method = algorithms.create(section.name, task, training, section.options)
    method = method.model_copy(update={"wire": experiment.wire})
    check_affordable(f"the models of {num_clients} clients", num_clients * sum(task.layers.num_parameters))
    method.check(num_clients)
    check_faults(experiment.faults, num_clients, training.local_epochs, objective.name)
    if experiment.privacy.is_on:
        check_privacy(experiment, method, batch)
    options = algorithms.resolve_options(section.name, section.options)
    resolved |= {"model": model, "training": training}
    resolved["algorithm"] = AlgorithmSection(name=section.name, **options)
    engine = experiment.engine
    if (
        experiment.privacy.is_on and engine.name == AUTO
    ):  # stacked, the gradients of all examples cost five times as much
        engine = engine.model_copy(update={"name": "threaded"})
    resolved["engine"], note = resolve_engine(engine, task, *batch, sizes)
    if objective.name in OBJECTIVES and objective.name != "classification":
        resolved["task"] = objective.name
    return Built(experiment.model_copy(update=resolved), federation, method, notes=(*federation.warnings, note))
