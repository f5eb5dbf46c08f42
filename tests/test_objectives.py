"""Tasks beyond classes: metrics equal scikit-learn's, undefined stays undefined, every task trains in every engine."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FEATURES, TinyNet, toy_federation
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics
from torch import Tensor, nn

from pfedla import simulate
from pfedla.core.errors import PfedlaError
from pfedla.core.objectives import (
    CLASSIFICATION,
    MULTILABEL,
    OBJECTIVES,
    REGRESSION,
    Metric,
    Objective,
    concordance,
    constant_outputs,
    cox_loss,
)
from pfedla.core.rounds import summarise
from pfedla.data.federation import Examples, Federation


def measured(objective: Objective, outputs: Any, y: Any) -> dict[str, float]:
    return objective.measure(torch.as_tensor(np.asarray(outputs)), torch.as_tensor(np.asarray(y)))


@given(st.integers(2, 5), st.integers(5, 40), st.integers(0, 10**6))
def test_classification_metrics_are_scikit_learns(num_classes: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits, y = rng.normal(size=(count, num_classes)), np.r_[:num_classes, rng.integers(0, num_classes, count)]
    logits = np.r_[rng.normal(size=(num_classes, num_classes)), logits]
    found = measured(CLASSIFICATION, logits, y)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    chosen = logits.argmax(1)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(y, chosen))
    assert found["balanced_accuracy"] == pytest.approx(metrics.balanced_accuracy_score(y, chosen))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(y, chosen, average="macro"))
    binary = num_classes == 2
    auroc = metrics.roc_auc_score(y, shares[:, 1] if binary else shares, multi_class="ovr", average="macro")
    assert found["auroc"] == pytest.approx(auroc)
    precision = metrics.average_precision_score(
        y if binary else np.eye(num_classes)[y], shares[:, 1] if binary else shares
    )
    assert found["auprc"] == pytest.approx(precision)
    if binary:
        assert found["brier"] == pytest.approx(metrics.brier_score_loss(y, shares[:, 1]))
    assert 0 <= found["ece"] <= 1


def test_a_metric_of_one_class_is_undefined() -> None:
    found = measured(CLASSIFICATION, [[2.0, 0.0], [1.0, 0.5]], [0, 0])
    assert found["accuracy"] == 1.0
    assert all(math.isnan(found[name]) for name in ("auroc", "auprc", "balanced_accuracy", "macro_f1"))
    broken = measured(CLASSIFICATION, [[math.nan, 0.0], [1.0, 0.5]], [0, 1])
    assert broken["accuracy"] == 0.0
    assert math.isnan(broken["brier"])


def test_calibration_error_by_hand() -> None:
    logit = math.log(0.8 / 0.2)
    found = measured(CLASSIFICATION, [[logit, 0.0]] * 10, [0] * 5 + [1] * 5)  # 80 % sure, half right
    assert found["ece"] == pytest.approx(0.3)


def test_multilabel_and_regression_metrics_are_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    outputs, y = rng.normal(size=(30, 3)), (rng.random((30, 3)) < 0.4).astype(np.float32)
    y[:, 2] = 1.0  # a label that all have is left out
    found = measured(MULTILABEL, outputs, y)
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(y[:, :2], outputs[:, :2], average="macro"))
    assert found["auprc"] == pytest.approx(metrics.average_precision_score(y[:, :2], outputs[:, :2]))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(y[:, :2], outputs[:, :2] > 0, average="macro"))
    values, target = rng.normal(size=(20, 1)), rng.normal(size=20)
    found = measured(REGRESSION, values, target)
    assert found["rmse"] == pytest.approx(metrics.root_mean_squared_error(target, values[:, 0]))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(target, values[:, 0]))
    assert found["r2"] == pytest.approx(metrics.r2_score(target, values[:, 0]))
    assert math.isnan(measured(REGRESSION, values, np.ones(20))["r2"])


def test_cox_loss_and_concordance_by_hand() -> None:
    hazard = torch.tensor([[1.0], [0.0], [2.0]])
    y = torch.tensor([[1.0, 1], [2.0, 0], [3.0, 1]])
    risk = [1.0, 0.0, 2.0]
    first = math.log(sum(math.exp(one) for one in risk)) - 1.0  # all are at risk when the first has the event
    assert cox_loss(hazard, y).item() == pytest.approx((first + 0.0) / 2)
    assert concordance(hazard.numpy(), y.numpy()) == 0.5  # the first against the two later: one right, one wrong
    assert math.isnan(concordance(hazard.numpy(), np.array([[1.0, 0], [2, 0], [3, 0]])))
    assert cox_loss(hazard, y * torch.tensor([1.0, 0.0])) == 0  # nobody has the event


@given(st.integers(2, 30), st.integers(1, 6), st.integers(0, 10**6))
def test_concordance_is_that_of_lifelines(count: int, different: int, seed: int) -> None:
    """With ties in times and risks, without comparable pairs, with a single patient's event."""
    from lifelines.utils import concordance_index

    draws = np.random.default_rng(seed)
    time, risk = draws.integers(0, different, count).astype(float), draws.integers(0, different, count).astype(float)
    event = draws.integers(0, 2, count).astype(float)
    found = concordance(risk[:, None], np.stack([time, event], axis=1))
    try:
        expected = concordance_index(time, -risk, event)
    except ZeroDivisionError:  # no pair can be compared
        assert math.isnan(found)
    else:
        assert found == pytest.approx(expected)


def test_the_cox_loss_is_the_likelihood_of_lifelines() -> None:
    import pandas
    from lifelines import CoxPHFitter

    draws = np.random.default_rng(0)
    x, time, event = draws.normal(size=50), draws.permutation(50) + 1.0, draws.integers(0, 2, 50)
    fitted = CoxPHFitter().fit(pandas.DataFrame({"x": x, "time": time, "event": event}), "time", "event")
    hazard = torch.tensor(x * fitted.params_["x"])[:, None]  # lifelines centres x, which the likelihood does not feel
    loss = cox_loss(hazard, torch.tensor(np.stack([time, event], axis=1)))
    assert -loss.item() * event.sum() == pytest.approx(fitted.log_likelihood_)


def test_where_lower_is_better_the_worst_is_the_largest() -> None:
    values = torch.tensor([1.0, 3.0, torch.nan, 2.0])
    found = summarise(values, higher_is_better=False)
    assert (found["worst"], found["mean"], found["per_client"][2]) == (3.0, 2.0, None)
    assert found["p10"] == pytest.approx(2.8)


def federation_for(task: str) -> Federation:
    """The toy federation with labels of another kind."""
    draws, known = torch.Generator().manual_seed(3), toy_federation()
    rule = torch.randn(FEATURES, 2, generator=draws)

    def label(examples: Examples) -> Examples:
        values = examples.x @ rule
        if task == "regression":
            return Examples(examples.x, values[:, 0])
        if task == "multilabel":
            return Examples(examples.x, (values > 0).float())
        event = (torch.rand(len(values), generator=draws) < 0.7).float()
        return Examples(examples.x, torch.stack([(-values[:, 0]).exp(), event], 1))

    return Federation([*map(label, known.train)], [*map(label, known.test)], ("all",), task=task, targets=TARGETS[task])


TARGETS = {"regression": ("value",), "multilabel": ("one", "two"), "survival": ("risk",)}


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("name", ["local", "fedavg", "pfedla", "pfedla-heldout", "fedrep"])
def test_every_task_trains_and_engines_agree(task: str, name: str) -> None:
    federation, width = federation_for(task), len(TARGETS[task])
    ends = []
    for engine in ("threaded", "vectorized"):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, width))
        result = simulate(federation, module, name, rounds=8, lr=0.03, engine=engine)
        ends.append(result)
        assert set(result.metrics) == {metric.name for metric in OBJECTIVES[task].metrics}
    torch.testing.assert_close(ends[0].scores, ends[1].scores, rtol=1e-3, atol=1e-3, equal_nan=True)
    if task != "survival":
        first = simulate(federation, module, name, rounds=1, lr=1e-9)
        better = ends[0].scores.nanmean() - first.scores.nanmean()
        assert better > 0 if task == "multilabel" else better < 0
    with pytest.raises(PfedlaError, match="accuracy") if task != "multilabel" else pytest.MonkeyPatch.context():
        _ = ends[0].accuracy


def test_an_own_loss_and_metric() -> None:
    def hinge(outputs: Tensor, y: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(outputs, y)

    result = simulate(toy_federation(), TinyNet(), "fedavg", rounds=2, loss=hinge)
    assert "accuracy" in result.metrics
    sure = Metric("sure", lambda outputs, y: float((outputs.max(1) > 0).mean()))
    own = Objective("margin", hinge, (sure,), headline="sure")
    assert simulate(toy_federation(), TinyNet(), "fedavg", rounds=2, task=own).scores.isfinite().all()
    bare = simulate(toy_federation(), TinyNet(), "fedavg", rounds=2, task=Objective("margin", hinge))
    assert torch.equal(bare.scores, bare.loss)
    with pytest.raises(PfedlaError, match="loss"):
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=2, loss=lambda outputs, y: outputs)
    with pytest.raises(PfedlaError, match="aurocc"):
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=2, metric="aurocc")


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(FEATURES, 3)

    def forward(self, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
        hidden = values * mask
        return {"hidden": hidden, "logits": self.fc(hidden)}


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_inputs_and_outputs_may_be_trees(kind: str) -> None:
    def widen(examples: Examples) -> Examples:
        mask = examples.x > -1
        x = {"values": examples.x, "mask": mask} if kind == "dict" else (examples.x, mask)
        return Examples(x, examples.y)

    known = toy_federation()
    federation = Federation([*map(widen, known.train)], [*map(widen, known.test)], known.classes)
    ends = [simulate(federation, TwoInputs(), "pfedla-heldout", rounds=3, engine=e, lr=0.1) for e in ENGINES]
    torch.testing.assert_close(ends[0].loss, ends[1].loss, rtol=1e-4, atol=1e-5)
    assert not ends[0].failures


ENGINES = ("threaded", "vectorized")


def test_the_baseline_is_the_best_constant() -> None:
    y = torch.tensor([0, 0, 1])
    name, outputs = constant_outputs(CLASSIFICATION, y, 3)
    assert name == "majority class"
    assert outputs.argmax() == 0
    assert constant_outputs(REGRESSION, torch.tensor([1.0, 3.0]), 1)[1].item() == 2.0
