"""Models that people bring, with the optimisers they use: engines agree, threads and a resume change no bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import assert_same, flat, make, personal_models, play
from torch import Tensor, nn

from pfedla.core.lora import lora
from pfedla.core.models import build_model
from pfedla.data.federation import Examples, Federation
from pfedla.engines.simulated import find_obstacle

IMAGE, COLOUR, VECTOR, WORDS, VOCABULARY = (1, 8, 8), (3, 16, 16), (6,), 7, 20
TEXT = {"ids": (WORDS,), "mask": (WORDS,)}
SIZES = (9, 6, 9, 7)


def registered(name: str, shape: Any) -> nn.Module:
    return build_model(name, shape, 3, torch.Generator().manual_seed(0), VOCABULARY)


def with_lora() -> nn.Module:
    return lora(registered("transformer-text", TEXT), rank=2, alpha=4.0, targets=["fc1"])


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (lambda: registered("mlp", VECTOR), VECTOR),
    "cnn": (lambda: registered("small-cnn", IMAGE), IMAGE),
    "cnn-bn": (lambda: registered("cnn-bn", COLOUR), COLOUR),
    "resnet20-gn": (lambda: registered("resnet20-gn", IMAGE), IMAGE),
    "lstm": (lambda: registered("lstm-text", TEXT), TEXT),
    "transformer": (lambda: registered("transformer-text", TEXT), TEXT),
    "lora": (with_lora, TEXT),
}
RECIPES: dict[str, dict[str, Any]] = {"momentum": {"momentum": 0.9}, "adamw": {"optimizer": "adamw"}}
METHODS = ["fedavg", "fedrep", "ditto", "pfedla", "pfedla-heldout"]
QUICK = [("mlp", "adamw", "pfedla"), ("transformer", "momentum", "fedavg"), ("lora", "adamw", "pfedla-heldout")]
CASES = [(m, r, a) for m in MODELS for r in RECIPES for a in METHODS]
MARKED = [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id="-".join(case)) for case in CASES]


def federation_of_kind(shape: Any) -> Federation:
    draws = torch.Generator().manual_seed(1)

    def some(count: int) -> Examples:
        y = torch.randint(0, 3, (count,), generator=draws)
        if isinstance(shape, dict):
            ids = torch.randint(1, VOCABULARY, (count, WORDS), generator=draws)
            ids[:, 0] = 1 + y
            mask = torch.arange(WORDS) < torch.randint(2, WORDS + 1, (count, 1), generator=draws)
            return Examples({"ids": torch.where(mask, ids, 0), "mask": mask}, y)
        return Examples(torch.randn(count, *shape, generator=draws) + y.view(-1, *[1] * len(shape)), y)

    return Federation([*map(some, SIZES)], [some(5) for _ in SIZES], ("a", "b", "c"), vocabulary=VOCABULARY)


@pytest.mark.parametrize(("model", "recipe", "name"), MARKED)
def test_engines_threads_and_a_resume_agree(model: str, recipe: str, name: str) -> None:
    build, shape = MODELS[model]
    federation = federation_of_kind(shape)

    def algorithm() -> Any:
        return make(name, module=build(), recipe=RECIPES[recipe], lr=0.001 if recipe == "adamw" else 0.05, epochs=2)

    straight, clients = play(algorithm(), federation, threads=1)
    assert not straight[-1].failures
    assert not straight[-1].evaluation_failures
    first, saved = play(algorithm(), federation, threads=2, rounds=range(1, 3))
    second, resumed = play(
        algorithm(), federation, threads=2, rounds=range(3, 4), server=first[-1].server, clients=saved
    )
    assert_same(flat(straight[-1].server), flat(second[-1].server))
    assert_same(clients, resumed)
    task, (x, y) = algorithm().task, federation.train[0]
    task.try_out(x)
    assert task.draws == (model in ("transformer", "lora"))
    if find_obstacle(task, x, y)[0] == "cannot be stacked":
        assert model == "lstm"
        return
    stacked, stacked_clients = play(algorithm(), federation, engine="vectorized")
    # AdamW divides by the gradient's size, so rounding in a gradient that is all but zero becomes a whole step.
    rtol = 5e-2 if recipe == "adamw" else 1e-3
    torch.testing.assert_close(stacked[-1].training_loss, straight[-1].training_loss, rtol=rtol, atol=1e-4)
    torch.testing.assert_close(stacked[-1].evaluation.loss, straight[-1].evaluation.loss, rtol=rtol, atol=1e-4)
    if recipe == "momentum":
        ends = ((straight, clients), (stacked, stacked_clients))
        for one, other in zip(*(personal_models(algorithm(), federation, *end) for end in ends), strict=True):
            assert_same(one, other, 1e-3)


def test_dropout_draws_anew_in_every_step_round_and_client() -> None:
    """And never from the stream of the process."""
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.dropout = nn.Linear(6, 3), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            kept = self.dropout(torch.ones(len(x), 6))
            if self.training:
                seen.append(kept)
            return self.fc(x * kept)

    torch.manual_seed(5)
    before, module = torch.random.get_rng_state(), Spy()
    torch.random.set_rng_state(before)
    federation = federation_of_kind(VECTOR).only([0, 2])  # of equal sizes
    play(make("fedavg", module=module, batch_size=9, epochs=2), federation, threads=1, rounds=range(1, 3))
    masks = [mask for mask in seen if len(mask) == 9]
    assert len(masks) == 8  # two clients, rounds, epochs
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8
    assert torch.equal(before, torch.random.get_rng_state())
    again, seen[:] = list(seen), []
    play(make("fedavg", module=module, batch_size=9, epochs=2), federation, threads=1, rounds=range(1, 3))
    assert all(torch.equal(one, other) for one, other in zip(again, seen, strict=True))
