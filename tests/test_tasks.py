"""A model as functions of its tensors: each fast path equals the plain one, for every kind of module."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import FEATURES, assert_same, budget, engine_for, flat, make, play, toy_federation
from torch import Tensor, nn

from pfedla.core.contracts import Cohort
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Layers, mix
from pfedla.core.models import PaperCNN, SmallCNN
from pfedla.core.objectives import CLASSIFICATION
from pfedla.core.tasks import CompiledTask, DirectTask, copy_module, task_of
from pfedla.data.federation import Examples, Federation

IMAGE = (1, 4, 4)


class Do(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.forward = function


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def tie() -> nn.Module:
    """A weight in two places."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)


def freeze(features: int = 16) -> nn.Module:
    """A frozen backbone below a trained head."""
    backbone, head = nn.Linear(features, 8).requires_grad_(False), nn.Linear(8, 3)
    return nn.Sequential(OrderedDict(flat=nn.Flatten(), backbone=backbone, tanh=nn.Tanh(), head=head))


def scale(features: int = 16) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 3), Scale())


def halve(features: int = 16) -> nn.Module:
    linear = nn.Linear(features, 3, dtype=torch.bfloat16)
    return nn.Sequential(nn.Flatten(), Do(Tensor.bfloat16), linear, Do(Tensor.float))


def recur() -> nn.Module:
    gru = nn.GRU(4, 5, batch_first=True)
    return nn.Sequential(Do(lambda x: x[:, 0]), gru, Do(lambda out: out[0][:, -1]), nn.Linear(5, 3))


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: PaperCNN((1, 16, 16), 3, batch_norm=False), (1, 16, 16)),
    "cnn-bn": (lambda: PaperCNN((3, 16, 16), 3, batch_norm=True), (3, 16, 16)),
    "small-cnn": (lambda: SmallCNN(IMAGE, 3), IMAGE),
    "tied": (tie, IMAGE),
    "views": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), Do(lambda x: x.view(len(x), -1)), nn.Linear(16, 3)), IMAGE),
    "recurrent": (recur, IMAGE),
    "scaled": (scale, IMAGE),
    "frozen": (freeze, IMAGE),
    "words": (lambda: nn.Sequential(nn.Embedding(10, 5), nn.Flatten(), nn.Linear(30, 3)), (6,)),
    "half": (halve, IMAGE),
}


def batch(kind: str, count: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 10, (count, *shape)) if kind == "words" else torch.randn(count, *shape)
    return x, torch.randint(0, 3, (count,))


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("some", [False, True])
def test_direct_gradients_are_the_functional_ones(kind: str, some: bool) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[kind]
    task = task_of(build())
    x, y = batch(kind, 6, shape)
    direct = DirectTask(task.module, task.objective, x[:2])
    initial = task.initial()
    before = {name: value.clone() for name, value in initial.items()}
    parameters, statistics = task.layers.parameters(initial), task.layers.only_statistics(initial)
    only = set(list(parameters)[:1]) if some else None
    wanted, loss, after = task.gradient(parameters, statistics, x, y, only)
    found, direct_loss, direct_after = direct.gradient(parameters, statistics, x, y, only)
    assert len(found) == (1 if some else len(parameters))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(direct_loss, loss)
    torch.testing.assert_close(direct_after, after)
    assert_same(initial, before)  # nothing was written into
    stepped = direct.step(parameters, statistics, x, y, 0.1)[0]
    torch.testing.assert_close(stepped, task.step(parameters, statistics, x, y, 0.1)[0], rtol=1e-4, atol=1e-6)
    assert all(bool(value.any()) for value in found.values())


def test_a_client_trained_by_the_engine_equals_the_textbook_loop() -> None:
    """The plain, slow reference of local training: nn.Module, torch.optim.SGD, channels first."""
    torch.manual_seed(0)
    shape, epochs, size = (3, 16, 16), 2, 32
    x, y = torch.randn(70, *shape), torch.randint(0, 3, (70,))
    federation = Federation([Examples(x, y)], [Examples(x[:2], y[:2])], ("a", "b", "c"))
    module = PaperCNN(shape, 3, batch_norm=True)
    algorithm = make("fedavg", module=module, lr=0.05, epochs=epochs, batch_size=size)
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    with engine_for(algorithm, federation, threads=2) as engine:
        downloads = algorithm.download(algorithm.init_server(1, 0), cohort)
        (answer,) = engine.train(cohort, downloads)
        order = engine.clients[0].local_data(cohort, downloads).order
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module.train()
    for epoch in range(epochs):
        for rows in order[epoch].split(size):
            optimizer.zero_grad()
            F.cross_entropy(module(x[rows]), y[rows]).backward()
            optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(answer.upload.tensors[name], value, rtol=1e-3, atol=1e-5)


def pool() -> nn.Module:
    """Pools in both spellings; odd sizes leave a row and a column out."""
    fused = Do(lambda x: F.max_pool2d(x, 2))
    return nn.Sequential(Scale(), fused, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2, 3))


COMPILED = {"pools": (pool, (2, 5, 5)), **{kind: MODULES[kind] for kind in ("frozen", "words", "cnn-bn")}}
SLOW = {"words", "cnn-bn"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else []) for k in COMPILED])
def test_a_compiled_step_is_the_plain_one(kind: str) -> None:
    torch.manual_seed(0)
    build, shape = COMPILED[kind]
    x, y = batch(kind, 8, shape)
    if kind == "pools":
        x[0] = 1.0  # of equal numbers, the first gets the gradient
    module = build()
    plain = task_of(module)
    compiled = CompiledTask(module, plain.objective, x[:2], y[:2], budget(0.1, 1, 8))
    initial = plain.initial()
    parameters, statistics = plain.layers.parameters(initial), plain.layers.only_statistics(initial)
    wanted = plain.step(parameters, statistics, x, y, 0.1)
    found = compiled.step(dict(reversed(parameters.items())), statistics, x, y, 0.1)  # in any order
    assert list(found[0]) == list(reversed(parameters))
    torch.testing.assert_close({name: found[0][name] for name in parameters}, wanted[0], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-4, atol=1e-6)
    moved = max(float((value - parameters[name]).abs().max()) for name, value in wanted[0].items())
    assert moved > 1e-3  # the tolerance above would see a lost step
    if kind == "pools":
        for row, column in ((0, 0), (0, 1), (1, 0), (3, 3)):
            broken = x.clone()
            broken[0, 0, row, column] = torch.nan
            assert compiled.step(parameters, {}, broken, y, 0.1)[1].isnan(), (row, column)


def test_a_model_that_cannot_be_compiled_is_refused() -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    with pytest.raises(PfedlaError, match="compile"):
        CompiledTask(Branches(5, 3), CLASSIFICATION, torch.ones(2, 5), torch.zeros(2).long(), budget(0.1, 1, 8))


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_frozen_tensors_are_never_sent_kept_or_copied(engine: str) -> None:
    torch.manual_seed(0)
    module = freeze(FEATURES)
    backbone = module.backbone.weight.detach().clone()
    layers = Layers.of(module)
    assert layers.names == ("head",)
    assert layers.frozen == {"backbone.weight", "backbone.bias"}
    assert copy_module(module).backbone.weight.data_ptr() == module.backbone.weight.data_ptr()
    for name in ("fedavg", "local", "pfedla"):
        algorithm = make(name, module=module)
        assert set(algorithm.task.initial()) == {"head.weight", "head.bias"}
        played, clients = play(algorithm, toy_federation(), rounds=range(1, 3), engine=engine)
        assert not played[-1].failures
        assert not played[-1].evaluation_failures
        sent = 4 * (8 * 3 + 3) * len(played[-1].cohort.ids) * 2
        assert played[-1].traffic.up_bytes == (0 if name == "local" else sent)
        assert not [key for key in [*clients, *flat(played[-1].server)] if "backbone" in key]
        assert torch.equal(algorithm.task.module.backbone.weight, backbone)


@pytest.mark.parametrize("name", ["fedavg", "pfedla"])
@pytest.mark.parametrize("kind", ["scaled", "half", "words"])
def test_scalar_half_and_integer_tensors_train(name: str, kind: str) -> None:
    torch.manual_seed(0)
    module = {"scaled": scale, "half": halve, "words": lambda features: MODULES["words"][0]()}[kind](FEATURES)
    federation = toy_federation()
    if kind == "words":
        parts = federation.train, federation.test
        whole = ([Examples(x.abs().long().clamp(max=9), y) for x, y in part] for part in parts)
        federation = Federation(*whole, federation.classes)
    ends = []
    for engine in ("threaded", "vectorized"):
        algorithm = make(name, module=module)
        played, _ = play(algorithm, federation, rounds=range(1, 4), engine=engine)
        assert not played[-1].failures
        assert not played[-1].evaluation_failures
        losses = [one.training_loss.mean() for one in played]
        assert losses[-1] < losses[0]
        ends.append(flat(played[-1].server))
    assert_same(*ends, 0.05 if kind == "half" else 1e-4)


def test_integers_cannot_be_mixed() -> None:
    layers = Layers.of(nn.Linear(1, 1))
    with pytest.raises(PfedlaError, match="weight"):
        mix(torch.full((1, 1, 2), 0.5), {"weight": torch.ones(2, 1, 1, dtype=torch.int64)}, layers)
