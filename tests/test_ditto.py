"""Ditto: its two updates by a slow twin, and the methods it contains."""

import torch
from conftest import NORMS, TinyNet, add_noise, assert_same, make, one_client, plain_sgd, play

from pfedla.core.contracts import Payload
from pfedla.data.federation import Federation


def test_the_client_equals_a_slow_twin() -> None:
    module = TinyNet(dtype=torch.float64)
    algorithm, data = make("ditto", module=module, penalty=0.7, personal_epochs=1), one_client()
    received = algorithm.task.initial()
    client = add_noise(received, seed=2)
    result = algorithm.local_update(client, Payload(received, torch.ones(2).bool()), data)
    personal = plain_sgd(module, client, data, epochs=1, towards=received, pull=0.7)
    assert_same(result.model, personal, tolerance=1e-12)
    assert_same(result.client, result.model)
    assert_same(result.upload.tensors, plain_sgd(module, received, data), tolerance=1e-12)


@NORMS
def test_without_a_pull_it_is_local_and_fedavg_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    algorithm = make("ditto", batch_norm=batch_norm, penalty=0.0)
    played, clients = play(algorithm, federation, participation=0.5)
    local, local_clients = play(make("local", batch_norm=batch_norm), federation, participation=0.5)
    assert_same({name: clients[name] for name in local_clients}, local_clients)
    assert torch.equal(played[-1].evaluation.loss, local[-1].evaluation.loss)
    fedavg, _ = play(make("fedavg", batch_norm=batch_norm), federation, participation=0.5)
    # In training mode BatchNorm does not read its statistics: the parameters are FedAvg's with BatchNorm too.
    parameters = algorithm.task.layers.parameters(fedavg[-1].server["model"])
    assert_same(played[-1].server["model"], parameters)
