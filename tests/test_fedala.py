"""FedALA: its weights by a slow twin, and FedAvg as its limit."""

import pytest
import torch
from conftest import NORMS, TinyNet, add_noise, assert_same, make, one_client, plain_loss, plain_sgd, play

from pfedla.algorithms.fedala import WEIGHT
from pfedla.algorithms.partial import add_prefix, strip_prefix
from pfedla.core.contracts import Payload
from pfedla.data.federation import Federation

BOTH = torch.ones(2).bool()
TRUE = torch.tensor(True)


def test_weights_are_cut_to_zero_and_one_and_only_the_last_layer_has_them(federation: Federation) -> None:
    _, clients = play(make("fedala", weight_lr=1e3), federation)
    weights = strip_prefix(WEIGHT, clients)
    assert weights.keys() == {"fc2.weight", "fc2.bias"}
    assert all(((value >= 0) & (value <= 1)).all() for value in weights.values())
    assert any((value == 0).any() for value in weights.values())
    assert "fc1.weight" not in clients  # the lower layers are the global ones: none is kept


def test_the_client_equals_a_slow_twin() -> None:
    module, data = TinyNet(dtype=torch.float64), one_client(has_trained=TRUE)
    algorithm = make("fedala", module=module, sample_share=0.7, weight_epochs=2)
    mine, received = (add_noise(algorithm.task.initial(), seed) for seed in (2, 3))
    weights = {n: 0.2 + 0.6 * mine[n].sigmoid() for n in ("fc2.weight", "fc2.bias")}
    client = {n: mine[n] for n in weights} | add_prefix(WEIGHT, weights)
    result = algorithm.local_update(client, Payload(received, BOTH), data)

    def start(weights: dict) -> dict:
        return {n: mine[n] + (v - mine[n]) * weights[n] if n in weights else v for n, v in received.items()}

    for rows in [data.order[0][:5], data.order[0][5:9]] * 2:  # 9 of 13 are sampled
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        gradients = torch.autograd.grad(plain_loss(module, start(leaves), data, rows), list(leaves.values()))
        weights = {n: (w - g).clamp(0, 1) for (n, w), g in zip(weights.items(), gradients, strict=True)}
    model = plain_sgd(module, start(weights), data)
    assert_same(strip_prefix(WEIGHT, result.client), weights, tolerance=1e-12)
    assert_same(result.model, model, tolerance=1e-12)
    assert_same({n: result.client[n] for n in weights}, {n: model[n] for n in weights}, tolerance=1e-12)


def test_a_client_that_never_trained_takes_the_global_model() -> None:
    algorithm, data = make("fedala"), one_client(dtype=torch.float32)
    client = algorithm.init_client()
    download = Payload({name: value + 0.5 for name, value in algorithm.task.initial().items()}, BOTH)
    assert_same(algorithm.personalize(client, download, data), download.tensors)
    mine = algorithm.local_update(client, download, data)
    assert_same(mine.model, make("fedavg").local_update({}, download, data).model)
    assert (mine.client[WEIGHT + "fc2.weight"] == 1).all()


@NORMS
@pytest.mark.parametrize("options", [{"adaptive_layers": 0}, {"weight_epochs": 0}], ids=["no layer", "no step"])
def test_without_adaptive_layers_or_steps_it_is_fedavg_bit_for_bit(
    federation: Federation, batch_norm: bool, options: dict
) -> None:
    algorithm, fedavg = (make("fedala", batch_norm=batch_norm, **options), make("fedavg", batch_norm=batch_norm))
    (played, _), (theirs, _) = (play(one, federation, participation=0.5) for one in (algorithm, fedavg))
    # In training mode BatchNorm does not read its statistics: the parameters are FedAvg's with BatchNorm too.
    assert_same(played[-1].server["model"], algorithm.task.layers.parameters(theirs[-1].server["model"]))
    if not batch_norm:
        assert torch.equal(played[-1].evaluation.loss, theirs[-1].evaluation.loss)
