"""Per-FedAvg: hand-worked numbers, the errors usually made, and the case in which it is FedAvg."""

import pytest
import torch
import torch.nn.functional as F
from conftest import NORMS, Parabola, TinyNet, assert_same, budget, make, personal_models, play, toy_federation
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp

from pfedla.algorithms.perfedavg import PerFedAvg
from pfedla.core.contracts import Cohort, LocalData, Params, Payload
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation


def parabola(batch_size: int = 1, **options) -> PerFedAvg:
    return PerFedAvg(task=Parabola(), training=budget(0.1, 1, batch_size), **options)


def tiny(batch_norm: bool = False, dtype: torch.dtype = torch.float32, batch_size: int = 5, **options) -> PerFedAvg:
    return PerFedAvg(task=task_of(TinyNet(batch_norm, dtype)), training=budget(0.1, 2, batch_size), **options)


def double_client(size: int = 20, epochs: int = 1) -> LocalData:
    x, y = toy_federation((size,)).train[0]
    return LocalData(x.double(), y, torch.stack([torch.arange(size).roll(7 * epoch) for epoch in range(epochs)]))


def test_a_clients_round_by_hand_hessian_free() -> None:
    """Batches 4, 2, 8 from w = 0 with α = 0.5, β = 0.1 (the common rate). The Hessian is 1: the step is β (1 − α) g.

    D' 4, D 2: w̃ = 1,       g = −3,      w = 0.15
    D' 2, D 8: w̃ = 4.075,   g = 2.075,   w = 0.04625  (from w, not from w̃)
    D' 8, D 4: w̃ = 2.023125, g = −5.976875, w = 0.34509375
    """
    algorithm = parabola(inner_lr=0.5, hessian_free=True)
    result = algorithm.local_update({}, Parabola.download(0.0), Parabola.data(4, 2, 8))
    assert result.upload.tensors["weight"].item() == pytest.approx(0.34509375, abs=1e-9)
    adapted = 0.34509375 - 0.5 * (0.34509375 - 4)  # on the first batch
    assert result.model["weight"].item() == pytest.approx(adapted, abs=1e-9)
    assert result.loss.item() == pytest.approx((3**2 + 2.075**2 + 5.976875**2) / 6, abs=1e-9)


def test_the_server_takes_the_plain_mean_or_fedavgs() -> None:
    cohort = Cohort(1, 0, torch.tensor([1, 4]), torch.tensor([10, 30]))
    uploads = Payload({"weight": torch.tensor([[[1.0]], [[5.0]]])}, torch.ones(2, 1).bool())
    for weighted, expected in ((False, 3.0), (True, 4.0)):
        algorithm = parabola(weighted=weighted)
        server = algorithm.init_server(5, seed=0)
        after = algorithm.aggregate(server, cohort, algorithm.download(server, cohort), uploads)
        assert after["model"]["weight"].item() == expected


def test_the_three_batches_of_a_step_are_disjoint_and_the_second_is_the_common_one() -> None:
    algorithm = parabola(batch_size=3, hessian_free=True)
    algorithm.local_update({}, Parabola.download(0.0), Parabola.data(*range(11), epochs=2))
    bounds = [list(range(*pair)) for pair in batch_bounds(11, 3)] * 2
    seen = algorithm.task.seen
    assert len(seen) == 4 * len(bounds) + 1  # the last one makes the model after training
    for step, expected in enumerate(bounds):
        inner, outer, ahead, behind = seen[4 * step : 4 * step + 4]
        assert outer == expected
        assert ahead == behind
        assert len({*inner, *outer, *ahead}) == len(inner) + len(outer) + len(ahead)


@NORMS
def test_the_curvature_is_autograds_hessian_vector_product(batch_norm: bool) -> None:
    algorithm, data = tiny(batch_norm, torch.float64), double_client()
    tensors = algorithm.task.initial()
    layers, noise = algorithm.task.layers, torch.Generator().manual_seed(0)
    parameters, statistics = layers.parameters(tensors), layers.only_statistics(tensors)
    unit = {name: torch.randn(v.shape, generator=noise).double() for name, v in parameters.items()}

    def gradient(at: Params) -> Params:
        def loss(at: Params) -> Tensor:
            buffers = {name: value.clone() for name, value in statistics.items()}
            return F.cross_entropy(functional_call(algorithm.task.module, {**at, **buffers}, (data.x,)), data.y)

        return grad(loss)(at)

    exact = jvp(gradient, (parameters,), (unit,))[1]
    for length in (1e-3, 1.0, 1e12):  # a move of w by δg would end far away at the last
        direction = {name: length * value for name, value in unit.items()}
        found = algorithm._curvature(parameters, statistics, direction, (data.x, data.y))
        for name, value in found.items():
            torch.testing.assert_close(value / length, exact[name], rtol=1e-3, atol=1e-5)


@NORMS
def test_a_clients_round_equals_a_textbook_loop(batch_norm: bool) -> None:
    """The slow twin: a module, autograd, and w restored by hand before the second step."""
    algorithm, data = tiny(batch_norm, torch.float64, inner_lr=0.3, beta=0.2), double_client(epochs=2)
    initial = algorithm.task.initial()
    sent = torch.ones(len(algorithm.task.layers)).bool()
    result = algorithm.local_update(algorithm.init_client(), Payload(algorithm.share(initial), sent), data)
    module = TinyNet(batch_norm, torch.float64).train()
    frozen = TinyNet(batch_norm, torch.float64).train()  # takes the statistics of the inner steps

    def gradients(net: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(F.cross_entropy(net(data.x[rows]), data.y[rows]), list(net.parameters())))

    for order in data.order:
        bounds = list(batch_bounds(20, 5))
        for step, (start, stop) in enumerate(bounds):
            following = slice(*bounds[(step + 1) % len(bounds)])
            w = [value.detach().clone() for value in module.parameters()]
            with torch.no_grad():
                for value, own in zip(frozen.parameters(), w, strict=True):
                    value.copy_(own)
            inner = gradients(frozen, order[following])
            with torch.no_grad():
                for value, slope in zip(module.parameters(), inner, strict=True):
                    value -= 0.3 * slope
            outer = gradients(module, order[start:stop])
            with torch.no_grad():
                for value, own, slope in zip(module.parameters(), w, outer, strict=True):
                    value.copy_(own - 0.2 * slope)
    tensors = {**result.upload.tensors, **result.client}
    assert_same(tensors, {name: module.state_dict()[name] for name in tensors}, tolerance=1e-12)


@NORMS
def test_the_personal_model_is_one_step_on_training_data_never_test_data(
    federation: Federation, batch_norm: bool
) -> None:
    algorithm = tiny(batch_norm, inner_lr=0.2, batch_size=1000)
    models = personal_models(algorithm, federation, [])
    other_test = Federation(federation.train, toy_federation(seed=1).test, federation.classes)
    assert_same(models[0], personal_models(algorithm, other_test, [])[0])
    net = TinyNet(batch_norm).train()
    x, y = federation.train[3]
    F.cross_entropy(functional_call(net, dict(net.named_parameters()), (x,)), y).backward()
    for name, value in net.named_parameters():
        torch.testing.assert_close(models[3][name], value.detach() - 0.2 * value.grad, rtol=1e-5, atol=1e-6)
    for name, value in TinyNet(batch_norm).named_buffers():
        assert torch.equal(models[3][name], value)  # the client's own, untouched by the adaptation


@NORMS
@pytest.mark.parametrize("beta", ["auto", 0.05])
def test_without_inner_rate_and_with_fedavgs_weights_it_is_fedavg(
    federation: Federation, batch_norm: bool, beta: float | str
) -> None:
    """Bit for bit; the common batches are D'. Only parameters are compared."""
    algorithm = tiny(batch_norm, inner_lr=0.0, weighted=True, beta=beta)
    fedavg = make("fedavg", batch_norm=batch_norm, lr=0.1 if beta == "auto" else beta)
    ours, theirs = (play(one, federation, participation=0.7)[0][-1].server["model"] for one in (algorithm, fedavg))
    assert_same(ours, algorithm.task.layers.parameters(theirs))
