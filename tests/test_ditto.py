"""Ditto: its two updates by hand and by a slow twin, and the methods it contains."""

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, play, toy_federation
from torch import nn
from torch.func import functional_call

from pfedla.algorithms.ditto import Ditto
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.local import Local
from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation

NORMS = pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
TRAINING = budget(0.1, 2, 5)
ALL_SENT = torch.ones(2).bool()


def ditto(batch_norm: bool = False, **options: object) -> Ditto:
    return Ditto(task=task_of(TinyNet(batch_norm)), training=TRAINING, **options)


def test_the_server_is_fedavg_by_hand() -> None:
    algorithm = Ditto(task=task_of(nn.Linear(1, 2)), training=TRAINING)
    cohort = Cohort(1, 0, torch.tensor([1, 4]), torch.tensor([10, 30]))
    uploads = Payload(
        {"weight": torch.tensor([[[1.0], [0.0]], [[5.0], [4.0]]]), "bias": torch.zeros(2, 2)},
        torch.ones(2, 1).bool(),
    )
    server = algorithm.init_server(5, seed=0)
    after = algorithm.aggregate(server, cohort, algorithm.download(server, cohort), uploads)
    assert after["model"]["weight"].flatten().tolist() == [4.0, 3.0]


def test_the_pull_by_hand() -> None:
    """With inputs of zero only the pull acts on the weights: one step is v - lr λ (v - w)."""
    algorithm = Ditto(task=task_of(nn.Linear(1, 2)), training=budget(0.1, 1, 4), penalty=2.0)
    client = {"weight": torch.tensor([[3.0], [-1.0]]), "bias": torch.zeros(2)}
    download = Payload({"weight": torch.tensor([[1.0], [1.0]]), "bias": torch.zeros(2)}, torch.ones(1).bool())
    data = LocalData(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1]), torch.arange(4)[None])
    result = algorithm.local_update(client, download, data)
    torch.testing.assert_close(result.model["weight"], torch.tensor([[3.0 - 0.2 * 2.0], [-1.0 + 0.2 * 2.0]]))
    assert torch.equal(result.upload.tensors["weight"], download.tensors["weight"])  # w feels no pull


def test_the_client_equals_a_slow_twin() -> None:
    task = task_of(TinyNet(dtype=torch.float64))
    algorithm = Ditto(task=task, training=TRAINING, penalty=0.7, personal_epochs=1)
    noise = torch.Generator().manual_seed(2)
    client = {
        n: v + 0.3 * torch.randn(v.shape, generator=noise, dtype=v.dtype) for n, v in task.initial().items()
    }
    received = task.initial()
    example = toy_federation((13,)).train[0]
    order = torch.stack([torch.randperm(13, generator=noise) for _ in range(2)])
    result = algorithm.local_update(
        client, Payload(received, ALL_SENT), LocalData(example.x.double(), example.y, order)
    )

    def twin(start: dict, epochs: int, pull: float) -> dict:
        leaves = {n: v.clone().requires_grad_() for n, v in start.items()}
        for epoch in range(epochs):
            for rows in (order[epoch][:5], order[epoch][5:10], order[epoch][10:]):
                objective = F.cross_entropy(
                    functional_call(task.module, leaves, (example.x[rows].double(),)), example.y[rows]
                )
                objective = objective + pull / 2 * sum(
                    ((v - received[n]) ** 2).sum() for n, v in leaves.items()
                )
                gradients = torch.autograd.grad(objective, list(leaves.values()))
                leaves = {
                    n: (v - 0.1 * g).detach().requires_grad_()
                    for (n, v), g in zip(leaves.items(), gradients, strict=True)
                }
        return {n: v.detach() for n, v in leaves.items()}

    assert_same(result.model, twin(client, 1, 0.7), tolerance=1e-12)
    assert_same(result.client, result.model)
    assert_same(result.upload.tensors, twin(received, 2, 0.0), tolerance=1e-12)


@NORMS
def test_without_a_pull_it_is_local_and_fedavg_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = ditto(batch_norm, penalty=0.0)
    local, fedavg = (kind(task=algorithm.task, training=TRAINING) for kind in (Local, FedAvg))
    played, clients = play(algorithm, federation, participation=0.5)
    local_played, local_clients = play(local, federation, participation=0.5)
    assert_same({name: clients[name] for name in local_clients}, local_clients)
    assert torch.equal(played[-1].evaluation.loss, local_played[-1].evaluation.loss)
    fedavg_played, _ = play(fedavg, federation, participation=0.5)
    # In training mode BatchNorm does not read its statistics, so the parameters are FedAvg's with BatchNorm too.
    assert_same(
        played[-1].server["model"], algorithm.task.layers.parameters(fedavg_played[-1].server["model"])
    )


def test_a_stronger_pull_brings_the_personal_models_nearer_to_the_global_one(federation: Federation) -> None:
    distances = []
    for penalty in (0.0, 1.0, 5.0):
        played, clients = play(ditto(penalty=penalty), federation)
        model = played[-1].server["model"]
        distances.append(sum(float(((clients[n] - v) ** 2).sum()) for n, v in model.items()))
    assert distances[0] > distances[1] > distances[2]


@pytest.mark.parametrize("options", [{"personal_epochs": 3}, {"penalty": 10.0}])
def test_what_cannot_work_is_refused(options: dict) -> None:
    ditto(penalty=9.0, personal_epochs=2).check(6)
    with pytest.raises(PfedlaError):
        ditto(**options).check(6)
