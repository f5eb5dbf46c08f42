"""What a finished run leaves behind, in plain formats: result.json, personal models, weights, pictures."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pfedla.algorithms import short_name
from pfedla.core.contracts import Algorithm, Params
from pfedla.core.errors import PfedlaError
from pfedla.core.files import sum_files, write_tensors
from pfedla.core.objectives import Objective, constant_outputs
from pfedla.core.rounds import NO_ANSWER, Traffic, finite_mean, summarise
from pfedla.core.tasks import load_tensors
from pfedla.data.dataset import Array
from pfedla.data.federation import Federation, Outline
from pfedla.report.figures import draw_run
from pfedla.runs.build import Built
from pfedla.runs.folder import ALPHA, FEDERATION, FORMAT, RESULT, RunFolder, write_alpha
from pfedla.runs.prediction import PersonalModel, find_client
from pfedla.runs.recognition import TRAINED_ON, write_trained_on

if TYPE_CHECKING:
    from pfedla.runs.run import Run


@dataclass(frozen=True, repr=False, kw_only=True)
class Simulation:
    """The end of a run. Metrics are of the last round, on every client's own test data; nan where undefined."""

    algorithm: Algorithm
    federation: Outline
    scores: Tensor  # [clients], the task's headline metric of the personal models: accuracy as a fraction, …
    loss: Tensor
    metrics: dict[str, Tensor]  # [clients] each, every metric of the task
    score_after_training: Tensor  # [clients], right after its last local training; nan if it never trained
    traffic: Traffic
    failures: dict[int, dict[str, int]]  # client -> reason -> how often it had no part in a round for it
    norm_bounds: dict[int, Any]  # uploads.norm_bound by the first round that it was for
    seconds: dict[str, float]  # by phase
    alphas: Tensor | None  # [snapshots, clients, layers, clients]; alpha[i, layer, j]: i receives, j sends
    alpha_rounds: list[int]  # the round after which each snapshot was taken; 0 is the start
    models: list[Params]  # every client's personal model; empty for a client that failed

    @property
    def alpha(self) -> Tensor | None:
        """The weights at the end, [clients, layers, clients]; None if a method has none, or too many to keep."""
        return None if self.alphas is None else self.alphas[-1]

    @property
    def accuracy(self) -> Tensor:
        """The accuracy of the personal models, [clients], if the task has one."""
        if "accuracy" not in self.metrics:
            raise PfedlaError(f"this task has no accuracy; its metrics are {', '.join(self.metrics)}")
        return self.metrics["accuracy"]

    @property
    def refused_uploads(self) -> int:
        """How many uploads came and were not used."""
        others = (NO_ANSWER.reason, "raised", "evaluation raised")
        return sum(n for reasons in self.failures.values() for reason, n in reasons.items() if reason not in others)

    def __repr__(self) -> str:
        metric, known = self.algorithm.task.objective.metric, self.scores[~self.scores.isnan()]
        values = (known.mean(), known.min() if metric.higher_is_better else known.max()) if len(known) else ()
        shown = [f"{100 * value:.1f} %" if metric.percent else f"{value:.4g}" for value in values]
        numbers = f"{metric.name} {shown[0]}, worst client {shown[1]}" if shown else f"{metric.name} undefined"
        return f"Simulation({self.algorithm.name}, {len(self.models)} clients, {numbers})"

    def personal_model(self, client: int | str) -> nn.Module:
        """Return the model that this client (a number or a name) would deploy, in eval mode.

        It takes inputs as in training: `federation.normalise` prepares uint8 images. `predict` takes raw inputs.
        """
        number = find_client(self.federation.names, client)
        if not self.models[number]:
            raise PfedlaError(f"client {self.federation.names[number]} has no personal model: it failed in the run")
        return load_tensors(self.algorithm.task.module, self.models[number])

    def predict(self, x: Any, client: int | str) -> Array:
        """Return what a client's personal model predicts for raw examples.

        `x` has the form that the federation was made from: arrays, tensors, a tuple or dict of them, or a frame with
        the columns of the table. Returns classes as they were given (whole numbers, truth values or names), the 0 or 1
        of each label, the numbers of a regression, or the risk (the log of the hazard ratio).
        """
        return self._personal(client).predict(x)

    def predict_proba(self, x: Any, client: int | str) -> Array:
        """Return probabilities [examples, classes] in the order of `federation.classes`, or [examples, labels]."""
        return self._personal(client).predict_proba(x)

    def score(self, x: Any, y: Any, client: int | str) -> float:
        """Return the headline metric of a client's model for raw examples and their labels, as they were given."""
        return self._personal(client).score(x, y)

    def _personal(self, client: int | str) -> PersonalModel:
        module, scaling = self.personal_model(client), self.federation.scaling
        own = scaling[find_client(self.federation.names, client)] if scaling else None
        return PersonalModel(module, self.federation, self.algorithm.task.objective, own)


def describe_result(built: Built, simulation: Simulation, honest: Tensor) -> dict[str, Any]:
    """Return what result.json holds."""
    experiment, data, federation = built.experiment, built.experiment.data, built.federation
    objective = built.algorithm.task.objective
    scores = {"score": simulation.scores, "score_after_training": simulation.score_after_training}
    higher = {metric.name: metric.higher_is_better for metric in objective.metrics}
    headline = partial(summarise, higher_is_better=objective.metric.higher_is_better)
    failures = {str(client): reasons for client, reasons in sorted(simulation.failures.items())}
    total = sum(simulation.seconds.values())
    result: dict[str, Any] = {
        "format": FORMAT,
        "algorithm": short_name(experiment.algorithm.name),
        "dataset": data.dataset,
        "partition": data.partition,
        "subset": federation.subset,
        "overlapping": data.overlapping,
        "leaked_test_share": federation.leaked_share,
        "clients": len(federation),
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "tuned_trials": experiment.tuned_trials,
        "model": experiment.model,
        "task": objective.describe(),
        **{key: headline(values) for key, values in scores.items()},
        "metrics": {name: summarise(v, higher_is_better=higher[name]) for name, v in simulation.metrics.items()},
        "baseline": measure_baseline(federation, objective),
        "loss": finite_mean(simulation.loss),
        "traffic": asdict(simulation.traffic),
        "refused_uploads": simulation.refused_uploads,
        "norm_bounds": {str(round): bound for round, bound in simulation.norm_bounds.items()},
        "failures": failures,
        "faults": experiment.faults.model_dump(exclude_defaults=True),
        "seconds": {"total": total, "per_round": total / experiment.rounds, "phases": simulation.seconds},
    }
    if not honest.all():
        result["attackers"] = (~honest).nonzero().squeeze(1).tolist()
        result["honest"] = {key: headline(values[honest]) for key, values in scores.items()}
    return result


def measure_baseline(federation: Outline, objective: Objective) -> dict[str, Any] | None:
    """Return how good the best constant answer is: every client's majority class, or mean. None: there is none."""
    if not isinstance(federation, Federation) or objective.headline == "loss":
        return None
    found: dict[str, list[float]] = {}
    name = ""
    for train, test in zip(federation.train, federation.test, strict=True):
        constant = constant_outputs(objective, train.y, len(federation.outputs))
        if constant is None:
            return None
        name, outputs = constant
        for metric, value in objective.measure(outputs.expand(len(test.y), *outputs.shape[1:]), test.y).items():
            found.setdefault(metric, []).append(value)
    higher = {metric.name: metric.higher_is_better for metric in objective.metrics}
    spreads = {
        metric: summarise(torch.tensor(values, dtype=torch.float64), higher_is_better=higher[metric])
        for metric, values in found.items()
    }
    return {"name": name, "score": spreads[objective.headline], "metrics": spreads}


def write_results(run: "Run", folder: RunFolder, simulation: Simulation, result: dict[str, Any]) -> None:
    """Write everything of a finished run; result.json is the last of the numbers: a folder with it is complete."""
    if simulation.alphas is not None:
        write_alpha(folder.path, run.state, run.algorithm.task.layers.names)
    elif type(simulation.algorithm).alpha is not Algorithm.alpha:
        run.say(f"the weights of {len(simulation.models):,} clients are too many to keep: no alpha, no picture of it")
    (folder.path / "models").mkdir(exist_ok=True)
    for client, model in enumerate(simulation.models):
        target = folder.path / "models" / f"client-{client}.safetensors"
        target.unlink(missing_ok=True)
        if model:  # a client that fails has none
            write_tensors(target, model)
    if isinstance(federation := run.built.federation, Federation):
        pairs = zip(federation.train, federation.test, strict=True)
        write_trained_on(folder.path, dict(enumerate(pairs)))
    if run.built.unseen is not None:
        from pfedla.runs.joining import join_unseen

        result["unseen"] = join_unseen(run, run.built.unseen, folder.path / "models")
    result["sha256"] = sum_files(folder.path, FEDERATION, ALPHA, TRAINED_ON, "models/*.safetensors")
    folder.write_json(RESULT, result)
    if run.pictures:
        draw_run(folder.path)
