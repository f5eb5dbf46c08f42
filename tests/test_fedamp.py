"""FedAMP: the weights by hand, a round by a slow twin, and Local as its limit."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, play, toy_federation
from torch import nn
from torch.func import functional_call

from pfedla.algorithms.fedamp import FedAMP
from pfedla.algorithms.local import Local
from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation

NORMS = pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
TRAINING = budget(0.1, 2, 5)
LINE = {"weight": torch.tensor([[[0.0]], [[1.0]], [[3.0]]]), "bias": torch.tensor([[0.0], [1.0], [1.0]])}


def fedamp(batch_norm: bool = False, **options: object) -> FedAMP:
    return FedAMP(task=task_of(TinyNet(batch_norm)), training=TRAINING, **options)


def line(**options: object) -> FedAMP:
    return FedAMP(task=task_of(nn.Linear(1, 1)), training=TRAINING, **options)


def test_the_weights_and_the_mix_by_hand() -> None:
    """Squared distances 2 (0-1), 10 (0-2) and 4 (1-2); ξ = α/σ exp(-d/σ)."""
    algorithm, server = line(sigma=2.0, step_size=0.8), {"models": LINE}
    near, far, middle = (0.4 * math.exp(-d / 2) for d in (2, 10, 4))
    expected = torch.tensor(
        [[1 - near - far, near, far], [near, 1 - near - middle, middle], [far, middle, 1 - far - middle]]
    )
    alpha = algorithm.alpha(server)
    assert alpha.shape == (3, 1, 3)
    torch.testing.assert_close(alpha[:, 0], expected)
    mixed = algorithm.download(server, Cohort(1, 0, torch.tensor([0, 2]), torch.tensor([1, 1]))).tensors
    torch.testing.assert_close(
        mixed["weight"].flatten(), torch.tensor([near + 3 * far, middle + 3 * (1 - far - middle)])
    )
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
    task = task_of(TinyNet(dtype=torch.float64))
    algorithm = FedAMP(task=task, training=TRAINING, step_size=0.5, penalty=0.3)
    noise = torch.Generator().manual_seed(2)
    received = {
        n: v + 0.3 * torch.randn(v.shape, generator=noise, dtype=v.dtype) for n, v in task.initial().items()
    }
    example = toy_federation((13,)).train[0]
    order = torch.stack([torch.randperm(13, generator=noise) for _ in range(2)])
    result = algorithm.local_update(
        algorithm.init_client(),
        Payload(received, torch.ones(2).bool()),
        LocalData(example.x.double(), example.y, order),
    )
    leaves = {n: v.clone().requires_grad_() for n, v in received.items()}
    for rows in (rows for epoch in order for rows in (epoch[:5], epoch[5:10], epoch[10:])):
        objective = F.cross_entropy(
            functional_call(task.module, leaves, (example.x[rows].double(),)), example.y[rows]
        )
        objective = objective + 0.3 / (2 * 0.5) * sum(
            ((v - received[n]) ** 2).sum() for n, v in leaves.items()
        )
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        leaves = {
            n: (v - 0.1 * g).detach().requires_grad_()
            for (n, v), g in zip(leaves.items(), gradients, strict=True)
        }
    assert_same(result.model, {n: v.detach() for n, v in leaves.items()}, tolerance=1e-12)
    assert_same(result.upload.tensors, result.model)


def test_the_personal_model_is_the_mix_before_the_first_training_and_then_the_own() -> None:
    algorithm = fedamp()
    client = algorithm.init_client()
    download = Payload(
        {name: value + 1 for name, value in algorithm.task.initial().items()}, torch.ones(2).bool()
    )
    data = LocalData(*[torch.empty(0)] * 3)
    assert_same(algorithm.personalize(client, download, data), download.tensors)
    trained = data._replace(has_trained=torch.tensor(True))
    assert_same(algorithm.personalize(client, download, trained), algorithm.task.initial())


@NORMS
def test_without_attention_and_pull_it_is_local_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = fedamp(batch_norm, sigma=1e38, penalty=0.0)
    played, clients = play(algorithm, federation, participation=0.5)
    local_played, local_clients = play(
        Local(task=algorithm.task, training=TRAINING), federation, participation=0.5
    )
    assert_same({name: clients[name] for name in local_clients}, local_clients)
    assert torch.equal(played[-1].evaluation.loss, local_played[-1].evaluation.loss)


def test_similar_clients_come_to_weigh_more() -> None:
    """The toy clients 0-1, 2-3 and 4-5 label by the same rule."""
    federation = toy_federation((60,) * 6)
    algorithm = fedamp(sigma=0.5, step_size=0.05)
    alpha = algorithm.alpha(play(algorithm, federation, rounds=range(1, 9))[0][-1].server)[:, 0]
    partner = torch.tensor([1, 0, 3, 2, 5, 4])
    others = alpha.clone()
    others[torch.arange(6), torch.arange(6)] = 0
    assert torch.equal(others.argmax(1), partner)


def test_a_pull_too_strong_for_the_learning_rate_is_refused() -> None:
    fedamp(penalty=0.9, step_size=0.1).check(6)
    with pytest.raises(PfedlaError, match="penalty / step_size"):
        fedamp(penalty=1.0, step_size=0.1).check(6)
