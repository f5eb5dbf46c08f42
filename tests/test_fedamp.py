"""FedAMP: the weights by hand, a round by a slow twin, and Local as its limit."""

import math

import pytest
import torch
from conftest import NORMS, TinyNet, add_noise, assert_same, make, one_client, plain_sgd, play
from torch import nn

from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.data.federation import Federation

LINE = {"weight": torch.tensor([[[0.0]], [[1.0]], [[3.0]]]), "bias": torch.tensor([[0.0], [1.0], [1.0]])}


def line(**options: float):
    return make("fedamp", module=nn.Linear(1, 1), **options)


def test_the_weights_and_the_mix_by_hand() -> None:
    """Squared distances 2 (0-1), 10 (0-2) and 4 (1-2); ξ = α/σ exp(-d/σ)."""
    algorithm, server = line(sigma=2.0, step_size=0.8), {"models": LINE}
    near, far, mid = (0.4 * math.exp(-d / 2) for d in (2, 10, 4))
    expected = [[1 - near - far, near, far], [near, 1 - near - mid, mid], [far, mid, 1 - far - mid]]
    alpha = algorithm.alpha(server)
    assert alpha.shape == (3, 1, 3)
    torch.testing.assert_close(alpha[:, 0], torch.tensor(expected))
    mixed = algorithm.download(server, Cohort(1, 0, torch.tensor([0, 2]), torch.tensor([1, 1]))).tensors
    weights = torch.tensor([near + 3 * far, mid + 3 * (1 - far - mid)])
    torch.testing.assert_close(mixed["weight"].flatten(), weights)
    torch.testing.assert_close(mixed["bias"].flatten(), torch.tensor([near + far, 1 - far]))


def test_no_self_weight_is_negative() -> None:
    alpha = line(sigma=2.0, step_size=100.0).alpha({"models": LINE})[:, 0]
    torch.testing.assert_close(alpha.sum(1), torch.ones(3))
    torch.testing.assert_close(alpha.diagonal(), torch.zeros(3), rtol=0, atol=1e-6)
    assert (alpha >= 0).all()
    assert alpha[0, 1].item() == pytest.approx(1 / (1 + math.exp(-4)))  # the others keep their proportions


def test_a_huge_model_gets_no_weight() -> None:
    models = {name: value.clone() for name, value in LINE.items()}
    models["weight"][1] = 1e30
    alpha = line(sigma=2.0).alpha({"models": models})[:, 0]
    assert alpha.isfinite().all()
    assert alpha[0, 1] == alpha[1, 0] == 0
    assert alpha[1, 1] == 1


def test_the_client_equals_a_slow_twin() -> None:
    module = TinyNet(dtype=torch.float64)
    algorithm, data = make("fedamp", module=module, step_size=0.5, penalty=0.3), one_client()
    received = add_noise(algorithm.task.initial(), seed=2)
    result = algorithm.local_update(algorithm.init_client(), Payload(received, torch.ones(2).bool()), data)
    twin = plain_sgd(module, received, data, towards=received, pull=0.3 / 0.5)
    assert_same(result.model, twin, tolerance=1e-12)
    assert_same(result.upload.tensors, result.model)


def test_the_personal_model_is_the_mix_until_the_first_training_and_then_the_own() -> None:
    algorithm = make("fedamp")
    initial = algorithm.task.initial()
    download = Payload({name: value + 1 for name, value in initial.items()}, torch.ones(2).bool())
    data = LocalData(*[torch.empty(0)] * 3)
    assert_same(algorithm.personalize(initial, download, data), download.tensors)
    trained = data._replace(has_trained=torch.tensor(True))
    assert_same(algorithm.personalize(initial, download, trained), initial)


@NORMS
def test_without_attention_and_pull_it_is_local_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = make("fedamp", batch_norm=batch_norm, sigma=1e38, penalty=0.0)
    played, clients = play(algorithm, federation, participation=0.5)
    local, local_clients = play(make("local", batch_norm=batch_norm), federation, participation=0.5)
    assert_same(clients, local_clients)
    assert torch.equal(played[-1].evaluation.loss, local[-1].evaluation.loss)
