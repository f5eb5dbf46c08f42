"""Similarity-weighted aggregation by hand."""

import math

import pytest
import torch
from conftest import budget, make, play, toy_federation
from torch import nn

from pfedla.algorithms import create
from pfedla.core.contracts import Cohort
from pfedla.core.tasks import task_of

TWO_LAYERS = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1))


def server_of(first: list[list[float]], second: list[tuple[float, float]]) -> dict:
    return {
        "models": {
            "0.weight": torch.tensor(first)[:, None],
            "1.weight": torch.tensor([[[w]] for w, _ in second]),
            "1.bias": torch.tensor([[b] for _, b in second]),
        }
    }


FIRST = [[1.0, 0.0], [1.0, 1.0], [-1.0, 0.0]]
SECOND = [(3.0, 4.0), (4.0, 3.0), (0.0, 0.0)]


def test_per_layer_by_hand() -> None:
    algorithm = create("layer-similarity", task_of(TWO_LAYERS), budget(0.1, 1, 4))
    alpha = algorithm.alpha(server_of(FIRST, SECOND))
    c = 1 / math.sqrt(2)
    near = [1 / (1 + c), c / (1 + c), 0.0]  # the third points the other way: its cosine is cut to zero
    torch.testing.assert_close(alpha[0, 0], torch.tensor(near))
    torch.testing.assert_close(
        alpha[0, 1], torch.tensor([1 / 1.96, 0.96 / 1.96, 0.0])
    )  # a layer's weight and bias together
    torch.testing.assert_close(alpha[2, 1], torch.tensor([0.0, 0.0, 1.0]))  # all zero: like itself alone
    mixed = algorithm.download(server_of(FIRST, SECOND), Cohort(1, 0, torch.tensor([0]), torch.tensor([5]))).tensors
    torch.testing.assert_close(mixed["0.weight"][0, 0], torch.tensor([near[0] + near[1], near[1]]))


def test_per_model_by_hand() -> None:
    algorithm = create("model-similarity", task_of(TWO_LAYERS), budget(0.1, 1, 4))
    alpha = algorithm.alpha(server_of(FIRST, SECOND))
    cosine = (1 + 24) / math.sqrt(26 * 27)  # of the whole vectors (1, 0, 3, 4) and (1, 1, 4, 3)
    expected = torch.tensor([1 / (1 + cosine), cosine / (1 + cosine), 0.0])
    torch.testing.assert_close(alpha[0], expected.expand(2, 3))  # the same in every layer


@pytest.mark.parametrize("name", ["layer-similarity", "model-similarity"])
def test_the_start_is_uniform_and_the_weights_follow_the_models(name: str) -> None:
    federation, algorithm = toy_federation(), make(name)
    start = algorithm.init_server(6, seed=0)
    torch.testing.assert_close(algorithm.alpha(start), torch.full((6, 2, 6), 1 / 6))
    played, _ = play(algorithm, federation, rounds=range(1, 6))
    alpha = algorithm.alpha(played[-1].server)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(6, 2))
    assert (alpha.amax(-1) - 1e-6 <= alpha.diagonal(dim1=0, dim2=2).T).all()  # nobody is more alike than oneself
    differs = (alpha[:, 0] - alpha[:, 1]).abs().max() > 1e-4
    assert differs == (name == "layer-similarity")
