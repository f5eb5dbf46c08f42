"""The attacks of benchmarks/privacy find what is there to be found, and nothing where nothing is."""

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm
from torch import Tensor

from pfedla.algorithms.pfedla_heldout import draw_hash
from pfedla.core.models import MLP
from pfedla.core.tasks import task_of

PLACE = Path(__file__).parent.parent / "benchmarks" / "privacy"


@pytest.fixture(autouse=True)
def _find_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLACE))


def scene(examples: int) -> Any:
    """Return a client whose images are noise and whose server knows one model, an MLP."""
    torch.manual_seed(0)
    task, x, y = task_of(MLP((1, 4, 4), 3)), torch.rand(examples, 1, 4, 4), torch.arange(examples) % 3
    hashes, others = [draw_hash(0, 1, len(task.layers))], torch.rand(20, 1, 4, 4)
    return importlib.import_module("inversion").Scene(task, 0.1, [task.initial()], hashes, x, y, others, 0.0, 1.0)


def reconstruct(kind: str) -> float:
    """Return the PSNR in dB of one image reconstructed from one message."""
    inversion, client = importlib.import_module("inversion"), scene(1)
    message = inversion.make_message(kind, client, 0, client.x, client.y, 0)
    start = torch.full_like(client.x, 0.5)
    found = inversion.invert([message], start, low=0.0, high=1.0, steps=400)
    return float(inversion.psnr(client.x, found.images))


def test_one_exact_gradient_of_an_mlp_gives_its_example_away() -> None:
    inversion, client = importlib.import_module("inversion"), scene(1)
    first = inversion.make_message("exact", client, 0, client.x, client.y, 0).seen[0]
    weight, bias = first[:-64].view(64, 16), first[-64:]  # of the first layer: each row is the example times its bias
    row = bias.abs().argmax()
    torch.testing.assert_close(weight[row] / bias[row], client.x.flatten(), rtol=1e-4, atol=1e-4)
    assert reconstruct("exact") > 30


def test_a_random_gradient_gives_nothing_away() -> None:
    assert reconstruct("random") < 20


def test_the_messages_are_those_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    inversion, client = importlib.import_module("inversion"), scene(5)
    monkeypatch.setattr(inversion, "CLIP", 100.0)  # longer than every gradient
    task, parameters = client.task, client.models[0]
    expected, _, _ = task.gradient(parameters, {}, client.x, client.y)

    def seen(kind: str) -> Tensor:
        return torch.cat(inversion.make_message(kind, client, 0, client.x, client.y, 0).seen)

    exact = torch.cat(inversion.by_layer(task, expected, client.hashes[0], "exact"))
    torch.testing.assert_close(seen("exact"), exact)
    torch.testing.assert_close(seen("update 1"), exact, rtol=1e-3, atol=1e-5)  # rounded as models are
    torch.testing.assert_close(seen("noise 0"), exact)
    sketch = torch.cat(inversion.by_layer(task, expected, client.hashes[0], 16))
    torch.testing.assert_close(seen("sketch 16"), sketch)
    moved = parameters
    for _ in range(3):
        moved = {
            name: value - 0.1 * task.gradient(moved, {}, client.x, client.y)[0][name] for name, value in moved.items()
        }
    away = {name: (parameters[name] - moved[name]) / 0.3 for name in moved}
    update = torch.cat(inversion.by_layer(task, away, client.hashes[0], "exact"))
    torch.testing.assert_close(seen("update 3"), update, rtol=1e-3, atol=1e-5)


def test_each_example_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    inversion, client = importlib.import_module("inversion"), scene(4)
    monkeypatch.setattr(inversion, "CLIP", 0.01)  # shorter than every gradient
    total = {name: torch.zeros_like(value) for name, value in client.models[0].items()}
    for x, y in zip(client.x, client.y, strict=True):
        gradient, _, _ = client.task.gradient(client.models[0], {}, x[None], y[None])
        length = torch.cat([value.flatten() for value in gradient.values()]).norm()
        assert length > 0.01
        total = {name: value + gradient[name] * 0.01 / length / 4 for name, value in total.items()}
    found = inversion.clipped_gradient(client.task, client.models[0], client.x, client.y)
    torch.testing.assert_close(found, total)


def test_the_privacy_budget_is_that_of_the_gaussian_mechanism() -> None:
    inversion = importlib.import_module("inversion")
    for multiplier, rounds in ((1.0, 1), (1.0, 10), (5.0, 10)):
        value, shift = inversion.epsilon(multiplier, rounds), math.sqrt(rounds) / multiplier
        delta, _ = quad(
            lambda at, v=value, s=shift: max(0.0, norm.pdf(at - s) - math.exp(v) * norm.pdf(at)), -10, 20, limit=500
        )
        assert delta == pytest.approx(inversion.DELTA, rel=1e-2)


def test_reconstructions_are_matched_to_the_true_images() -> None:
    inversion = importlib.import_module("inversion")
    true = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    found, values = inversion.match(true, true.flip(0) * 0.9)
    torch.testing.assert_close(found, true * 0.9)
    assert (values > 20).all()
    assert inversion.unpack(inversion.pack(true), 4).shape == (5, 4, 4)


def test_random_losses_betray_no_member() -> None:
    membership = importlib.import_module("membership")
    members, others = torch.randn(2, 20_000, generator=torch.Generator().manual_seed(0))
    assert membership.judge(members, others)["auc"] == pytest.approx(0.5, abs=0.01)
    assert membership.judge(members, others)["tpr"] == pytest.approx(0.01, abs=0.005)
    assert membership.judge(members + 100, others) == {"auc": 1.0, "tpr": 1.0}


@pytest.mark.slow
def test_a_model_that_learned_by_heart_betrays_its_members() -> None:
    membership = importlib.import_module("membership")
    how: dict[str, Any] = {"seeds": [0, 1], "rounds": 30, "sets": ["data.samples_per_client=20", "training.lr=0.2"]}
    lines = membership.measure("digits", "local", **how)
    assert {(line["seed"], line["model"]) for line in lines} >= {(0, "personal"), (1, "personal")}
    assert min(line["loss"]["auc"] for line in lines) > 0.55
