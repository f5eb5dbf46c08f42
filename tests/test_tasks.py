"""The direct task is the functional one, faster: the same gradients, for every kind of module."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from conftest import budget, engine_for
from torch import Tensor, nn

from pfedla.algorithms import create
from pfedla.core.models import PaperCNN, SmallCNN
from pfedla.core.rounds import everyone
from pfedla.core.tasks import channels_last, task_of
from pfedla.data.federation import Examples, Federation


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x.flatten(1))))


class Views(nn.Module):
    """Cannot be fed channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.out(x.view(len(x), -1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 5, batch_first=True)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x[:, 0])[0][:, -1])


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "cnn": (lambda: PaperCNN((1, 16, 16), 3, batch_norm=False), (1, 16, 16)),
    "cnn-bn": (lambda: PaperCNN((3, 16, 16), 3, batch_norm=True), (3, 16, 16)),
    "small-cnn": (lambda: SmallCNN((1, 4, 4), 3), (1, 4, 4)),
    "tied, unused": (Tied, (1, 4, 4)),
    "views": (Views, (1, 4, 4)),
    "recurrent": (Recurrent, (1, 4, 4)),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("some", [False, True])
def test_direct_gradients_are_the_functional_ones(kind: str, some: bool) -> None:
    torch.manual_seed(0)
    build, shape = MODULES[kind]
    task = task_of(build())
    direct = task.direct(shape)
    x, y = torch.randn(6, *shape), torch.randint(0, 3, (6,))
    initial = task.initial()
    before = {name: value.clone() for name, value in initial.items()}
    parameters, statistics = task.layers.parameters(initial), task.layers.only_statistics(initial)
    only = set(list(parameters)[1:3]) if some else None
    wanted, loss, after = task.gradient(parameters, statistics, x, y, only)
    found, direct_loss, direct_after = direct.gradient(parameters, statistics, x, y, only)
    assert found.keys() == wanted.keys()
    assert len(found) == (2 if some else len(parameters))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(direct_loss, loss)
    torch.testing.assert_close(direct_after, after)
    assert all(torch.equal(value, before[name]) for name, value in initial.items())  # nothing was written into
    moving = {name: parameters[name] for name in found}
    torch.testing.assert_close(direct.descended(moving, wanted, 0.1), task.descended(moving, wanted, 0.1))
    assert some or all(bool(value.any()) for name, value in found.items() if not name.startswith("unused"))


def test_without_channels_last_the_bits_are_the_same() -> None:
    torch.manual_seed(0)
    task = task_of(Views())
    parameters, x, y = task.initial(), torch.randn(6, 1, 4, 4), torch.randint(0, 3, (6,))
    wanted, found = task.gradient(parameters, {}, x, y), task.direct((1, 4, 4)).gradient(parameters, {}, x, y)
    assert all(torch.equal(found[0][name], value) for name, value in wanted[0].items())
    assert torch.equal(wanted[1], found[1])


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_keeps_the_numbers_and_reaches_the_convolutions(channels: int) -> None:
    images = torch.randn(5, channels, 6, 7)
    laid_out = channels_last(images)
    assert torch.equal(images, laid_out)
    assert laid_out.stride(1) == 1
    assert channels_last(laid_out) is laid_out
    order = torch.tensor([3, 1, 0])
    assert laid_out[order][:2].stride(1) == 1  # a batch of a drawn order stays so
    # The feature maps come out channels last, also those of a single channel, where torch would not see to it.
    assert F.conv2d(laid_out[order], torch.randn(8, channels, 3, 3)).stride(1) == 1


def test_a_client_trained_by_the_engine_equals_the_textbook_loop() -> None:
    """The plain, slow reference of local training: nn.Module, torch.optim.SGD, channels first, the same batches."""
    torch.manual_seed(0)
    shape, epochs, size = (3, 16, 16), 2, 32
    x, y = torch.randn(70, *shape), torch.randint(0, 3, (70,))
    federation = Federation([Examples(x, y)], [Examples(x[:2], y[:2])], ("a", "b", "c"))
    module = PaperCNN(shape, 3, batch_norm=True)
    algorithm = create("fedavg", task_of(module), budget(0.05, epochs, size))
    engine = engine_for(algorithm, federation, threads=2, recalibrate="never")
    cohort = everyone(federation.num_examples, 1, 0)
    with engine:
        downloads = algorithm.download(algorithm.init_server(1, 0), cohort)
        (answer,) = engine.train(cohort, downloads)
        order = engine.client(0).local_data(cohort, downloads).order
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module.train()
    for epoch in range(epochs):
        for batch in order[epoch].split(size):
            optimizer.zero_grad()
            F.cross_entropy(module(x[batch]), y[batch]).backward()
            optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(answer.upload.tensors[name], value, rtol=1e-3, atol=1e-5)
