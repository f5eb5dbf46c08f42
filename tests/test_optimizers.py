"""The optimisers as functions equal torch's own; the schedule; fresh state in every round."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from conftest import TinyNet, assert_same, make, one_client, play, toy_federation
from torch import nn

from pfedla import simulate
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.optimizers import learning_rate_at
from pfedla.core.settings import Training
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds, sgd

RECIPES: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "decay": {"weight_decay": 0.05},
    "clipped": {"clip_norm": 0.3},
    "adamw": {"optimizer": "adamw"},
    "adamw-decay": {"optimizer": "adamw", "weight_decay": 0.1, "clip_norm": 0.5},
}


def torch_optimizer(module: nn.Module, recipe: dict[str, Any]) -> torch.optim.Optimizer:
    own = {key: value for key, value in recipe.items() if key not in ("optimizer", "clip_norm")}
    if recipe.get("optimizer") == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=0.1, **{"weight_decay": 0.0, **own})
    return torch.optim.SGD(module.parameters(), lr=0.1, **own)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_an_optimiser_is_torchs(recipe: dict[str, Any]) -> None:
    data, module = one_client(23, epochs=3), TinyNet(dtype=torch.float64)
    training = Training(lr=0.1, batch_size=5, local_epochs=3, **recipe)
    found, _ = sgd(task_of(module), task_of(module).initial(), data, training)
    optimizer = torch_optimizer(module, recipe)
    for epoch in range(3):
        for ends in batch_bounds(len(data.y), 5):
            rows = data.order[epoch][slice(*ends)]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
            if most := recipe.get("clip_norm"):
                nn.utils.clip_grad_norm_(module.parameters(), most)
            optimizer.step()
    torch.testing.assert_close(found, dict(module.state_dict()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "ditto", "pfedla"])
@pytest.mark.parametrize("recipe", ["nesterov", "adamw-decay"])
def test_engines_agree_with_an_optimiser(name: str, recipe: str) -> None:
    ends = []
    batch_norm = recipe == "nesterov"  # a bias before BatchNorm has no gradient: AdamW steps along its rounding
    for engine in ("threaded", "vectorized"):
        algorithm = make(name, batch_norm=batch_norm, recipe=RECIPES[recipe], lr=0.01)
        played, clients = play(algorithm, toy_federation(), engine=engine)
        ends.append(clients)
        assert not played[-1].failures
    assert_same(*ends, 1e-3)


def test_the_schedule_warms_up_and_falls() -> None:
    training = Training(lr=1.0, schedule="cosine", warm_up_rounds=2)
    rates = [learning_rate_at(training, round, rounds=10) for round in range(1, 11)]
    assert rates[:3] == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]
    assert rates[6] == pytest.approx((1 + math.cos(math.pi / 2)) / 2)
    assert all(later < earlier for earlier, later in pairwise(rates[2:]))
    steps = Training(lr=1.0, schedule="step", decay=0.5, decay_every=3)
    assert [learning_rate_at(steps, round, rounds=9) for round in (1, 3, 4, 7)] == [1, 1, 0.5, 0.25]


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_clients_train_with_the_rate_of_the_round(engine: str) -> None:
    """A step to a millionth after the first round: the second changes next to nothing."""
    recipe = {"schedule": "step", "decay": 1e-6, "decay_every": 1}
    played, _ = play(make("fedavg", recipe=recipe), toy_federation(), engine=engine, rounds=range(1, 3))
    first, second = (round.server["model"]["fc1.weight"] for round in played)
    assert (first - TinyNet().fc1.weight).abs().max() > 1e-3
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["apfl", "pfedme", "per-fedavg"])
def test_a_method_with_steps_of_its_own_refuses_an_optimiser(name: str) -> None:
    with pytest.raises(NotApplicableError, match=name):
        simulate(toy_federation(), TinyNet(), name, rounds=1, optimizer="adamw")


def test_a_cosine_run_cannot_be_extended(tmp_path: Any) -> None:
    from pfedla import Experiment, run

    experiment = Experiment.parse({"rounds": 1, "training": {"schedule": "cosine", "local_epochs": 1}})
    run(experiment, tmp_path / "r")
    with pytest.raises(PfedlaError, match="rounds"):
        run(experiment.model_copy(update={"rounds": 2}), tmp_path / "r", resume=True)
