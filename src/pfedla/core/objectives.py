"""What a model is trained for: a loss, and the metrics by which it is judged on one client's test data.

A metric that cannot be computed (AUROC where a class is absent) is nan: shown as undefined, never as 0 or 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from pfedla.core.errors import unknown
from pfedla.core.trees import Tree, first_leaf

Array = npt.NDArray[Any]
UNDEFINED = float("nan")
CALIBRATION_BINS = 15


class Metric(NamedTuple):
    """How good a model's outputs are for one client's labels."""

    name: str
    function: Callable[[Array, Array], float]  # outputs and labels of all test examples
    higher_is_better: bool = True
    percent: bool = False  # whether it is shown as a percentage


@dataclass(frozen=True)
class Objective:
    """A loss (mean over a batch, differentiable, runs under vmap), its metrics, and the one that is the headline.

    The loss gets a model's outputs as they are, the metrics the main tensor of them: see `main_output`.
    """

    name: str
    loss: Callable[[Any, Tensor], Tensor]
    metrics: tuple[Metric, ...] = ()
    headline: str = "loss"

    @property
    def metric(self) -> Metric:
        if self.headline == "loss":
            return Metric("loss", lambda outputs, y: UNDEFINED, higher_is_better=False)
        found = {metric.name: metric for metric in self.metrics}
        if self.headline not in found:
            raise unknown(f"metric of task {self.name!r}:", self.headline, [*found, "loss"])
        return found[self.headline]

    def with_headline(self, name: str) -> "Objective":
        chosen = replace(self, headline=name)
        return chosen if chosen.metric else self

    def describe(self) -> dict[str, Any]:
        """Return what files and tables need to know of the headline metric."""
        shown = {"higher_is_better": self.metric.higher_is_better, "percent": self.metric.percent}
        return {"name": self.name, "metric": self.headline, **shown}

    def score(self, outputs: Tensor, loss: float, y: Tensor) -> float:
        """Return the headline metric of one client."""
        return loss if self.headline == "loss" else self.metric.function(outputs.cpu().numpy(), y.cpu().numpy())

    def measure(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return every metric of one client."""
        arrays = outputs.cpu().numpy(), y.cpu().numpy()
        return {metric.name: metric.function(*arrays) for metric in self.metrics}


def main_output(outputs: Tree) -> Tensor:
    """Return the tensor that counts: of a dict its "logits", else the first."""
    return outputs["logits"] if isinstance(outputs, dict) and "logits" in outputs else first_leaf(outputs)  # type: ignore[no-any-return]


# Classification: outputs are logits [n, classes], y is int64 [n]


def cross_entropy(outputs: Tree, y: Tensor) -> Tensor:
    return F.cross_entropy(main_output(outputs), y)


def accuracy(outputs: Array, y: Array) -> float:
    right = (outputs.argmax(-1) == y) & np.isfinite(outputs).all(-1)  # a broken model is never right
    return float(right.mean())


def probabilities(logits: Array) -> Array:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _of_classes(function: Callable[[Array, Array], float], least: int = 2) -> Callable[[Array, Array], float]:
    """Give `function` the probabilities; undefined for a broken model, or if fewer than `least` classes are there."""

    def metric(outputs: Array, y: Array) -> float:
        if not np.isfinite(outputs).all() or len(np.unique(y)) < least:
            return UNDEFINED
        return float(function(probabilities(outputs), y))

    return metric


def _one_against_rest(name: str) -> Callable[[Array, Array], float]:
    """Average a binary metric of sklearn over the classes that are there; of two classes take the second."""

    def metric(shares: Array, y: Array) -> float:
        from sklearn import metrics

        labels = [1] if shares.shape[1] == 2 else np.unique(y).tolist()
        return float(np.mean([getattr(metrics, name)(y == label, shares[:, label]) for label in labels]))

    return _of_classes(metric)


def _balanced_accuracy(shares: Array, y: Array) -> float:
    from sklearn.metrics import recall_score

    return float(recall_score(y, shares.argmax(1), labels=np.unique(y), average="macro", zero_division=0))


def _macro_f1(shares: Array, y: Array) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(y, shares.argmax(1), labels=np.unique(y), average="macro", zero_division=0))


def _brier(shares: Array, y: Array) -> float:
    """Return the mean squared error of the probabilities: of two classes of the second's, else summed over all."""
    errors = np.square(shares - np.eye(shares.shape[1])[y])
    return float(errors[:, 1].mean() if shares.shape[1] == 2 else errors.sum(1).mean())


def _calibration_error(shares: Array, y: Array) -> float:
    """Return the expected calibration error: |confidence - accuracy| in bins of the confidence, weighted by size."""
    confidence, right = shares.max(1), shares.argmax(1) == y
    bins = np.minimum((confidence * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    gaps = [abs((confidence[bins == one] - right[bins == one]).sum()) for one in np.unique(bins)]
    return float(np.sum(gaps) / len(y))


CLASSIFICATION = Objective(
    "classification",
    cross_entropy,
    (
        Metric("accuracy", accuracy, percent=True),
        Metric("balanced_accuracy", _of_classes(_balanced_accuracy), percent=True),
        Metric("macro_f1", _of_classes(_macro_f1)),
        Metric("auroc", _one_against_rest("roc_auc_score")),
        Metric("auprc", _one_against_rest("average_precision_score")),
        Metric("brier", _of_classes(_brier, least=1), higher_is_better=False),
        Metric("ece", _of_classes(_calibration_error, least=1), higher_is_better=False),
    ),
    headline="accuracy",
)


# Multilabel: outputs are logits [n, labels], y is 0 or 1 of the same shape


def binary_cross_entropy(outputs: Tree, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(main_output(outputs), y)


def _of_labels(name: str, **options: Any) -> Callable[[Array, Array], float]:
    """Average a binary metric of sklearn over the labels that some examples have and others do not."""

    def metric(outputs: Array, y: Array) -> float:
        from sklearn import metrics

        defined = (y.min(0) < y.max(0)).nonzero()[0]
        if not np.isfinite(outputs).all() or not len(defined):
            return UNDEFINED
        found = outputs > 0 if name == "f1_score" else outputs
        return float(np.mean([getattr(metrics, name)(y[:, one], found[:, one], **options) for one in defined]))

    return metric


def _label_accuracy(outputs: Array, y: Array) -> float:
    return float((((outputs > 0) == (y > 0.5)) & np.isfinite(outputs)).mean())


MULTILABEL = Objective(
    "multilabel",
    binary_cross_entropy,
    (
        Metric("auroc", _of_labels("roc_auc_score")),
        Metric("auprc", _of_labels("average_precision_score")),
        Metric("macro_f1", _of_labels("f1_score", zero_division=0)),
        Metric("accuracy", _label_accuracy, percent=True),
    ),
    headline="auroc",
)


# Regression: outputs are [n, targets], y is float [n] or [n, targets]


def squared_error(outputs: Tree, y: Tensor) -> Tensor:
    return F.mse_loss(main_output(outputs).reshape(y.shape), y)


def _of_errors(function: Callable[[Array, Array], float]) -> Callable[[Array, Array], float]:
    def metric(outputs: Array, y: Array) -> float:
        outputs, y = outputs.reshape(len(y), -1).astype(np.float64), y.reshape(len(y), -1).astype(np.float64)
        return float(function(y, outputs)) if np.isfinite(outputs).all() else UNDEFINED

    return metric


def _rmse(y: Array, outputs: Array) -> float:
    from sklearn.metrics import mean_squared_error

    return float(np.sqrt(mean_squared_error(y, outputs)))


def _mae(y: Array, outputs: Array) -> float:
    from sklearn.metrics import mean_absolute_error

    return float(mean_absolute_error(y, outputs))


def _r2(y: Array, outputs: Array) -> float:
    from sklearn.metrics import r2_score

    return float(r2_score(y, outputs)) if np.ptp(y, axis=0).all() else UNDEFINED


REGRESSION = Objective(
    "regression",
    squared_error,
    (
        Metric("rmse", _of_errors(_rmse), higher_is_better=False),
        Metric("mae", _of_errors(_mae), higher_is_better=False),
        Metric("r2", _of_errors(_r2)),
    ),
    headline="rmse",
)


# Survival: outputs are the log of the hazard ratio [n, 1], y is (time, event) [n, 2]


def cox_loss(outputs: Tree, y: Tensor) -> Tensor:
    """Return the negative log partial likelihood (Breslow's for ties) per event; zero in a batch without events."""
    hazard, (time, event) = main_output(outputs).reshape(len(y)), y.unbind(-1)
    at_risk = time[None, :] >= time[:, None]
    total = torch.where(at_risk, hazard[None, :], -torch.inf).logsumexp(1)
    return ((total - hazard) * event).sum() / event.sum().clamp(min=1)


def concordance(outputs: Array, y: Array) -> float:
    """Return Harrell's c-index: the share of comparable pairs in which who has the event first has the higher risk."""
    risk, (time, event) = outputs.reshape(len(y)), y.T
    if not np.isfinite(risk).all():
        return UNDEFINED
    agree = pairs = 0.0
    for one in event.nonzero()[0]:
        later = (time > time[one]) | ((time == time[one]) & (event == 0))
        agree += (risk[later] < risk[one]).sum() + (risk[later] == risk[one]).sum() / 2
        pairs += later.sum()
    return float(agree / pairs) if pairs else UNDEFINED


SURVIVAL = Objective("survival", cox_loss, (Metric("c_index", concordance),), headline="c_index")

OBJECTIVES = {one.name: one for one in (CLASSIFICATION, MULTILABEL, REGRESSION, SURVIVAL)}


def constant_outputs(objective: Objective, y: Tensor, num_outputs: int) -> tuple[str, Tensor] | None:
    """Return the best answer that looks at no input, from the training labels: its name, and the outputs [1, …]."""
    if objective.name == "classification":
        shares = torch.bincount(y, minlength=num_outputs) / len(y)
        return "majority class", shares.clamp(min=1e-6).log()[None]
    if objective.name == "multilabel":
        return "label frequencies", y.mean(0, keepdim=True).clamp(1e-6, 1 - 1e-6).logit()
    return ("mean", y.mean(0, keepdim=True)) if objective.name == "regression" else None
