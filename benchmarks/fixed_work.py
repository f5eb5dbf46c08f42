"""The fixed work that all contenders do: the same images, the same model, the same local budget.

Every contender is its own process and reads the clients' images from one file, so that none pays for what
another needs.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pfedla.core.models import PaperCNN, model_for
from pfedla.data.datasets import state_of
from pfedla.data.federation import Examples, Federation
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment

CLASSES = 10
TEST_SHARE = 0.3
DATASETS = {"Fashion-MNIST": ("fashion-mnist", (1, 28, 28)), "CIFAR-10": ("cifar10", (3, 32, 32))}


@dataclass(frozen=True)
class Work:
    """One round: `clients` train `images` images each for `epochs` epochs, then their models become one."""

    shape: tuple[int, ...]
    clients: int = 10
    images: int = 420
    epochs: int = 2
    batch_size: int = 32
    lr: float = 0.01

    @property
    def samples(self) -> int:
        return self.clients * self.images * self.epochs

    @property
    def batch_norm(self) -> bool:
        return model_for(self.shape) == "cnn-bn"


def lay_out(dataset: str, work: Work, path: Path, *, synthetic: bool = False) -> str:
    """Write the clients' images to a file, real ones if they are there; return whether they are real."""
    name, shape = DATASETS[dataset]
    if state_of(name).here and not synthetic:
        samples = round(work.images / (1 - TEST_SHARE))  # the paper's split: four classes each, 30 % held out
        data = {"dataset": name, "clients": work.clients, "samples_per_client": samples, "test_share": TEST_SHARE}
        federation = build(Experiment.parse({"algorithm": {"name": "fedavg"}, "data": data})).federation
        x, y = (torch.stack([examples[part] for examples in federation.train]) for part in (0, 1))
        mean, std, kind = federation.mean, federation.std, "real"
    else:
        draws = torch.Generator().manual_seed(0)
        x = torch.randint(0, 256, (work.clients, work.images, *shape), generator=draws, dtype=torch.uint8)
        y = torch.randint(0, CLASSES, (work.clients, work.images), generator=draws)
        mean, std, kind = (127.5,) * shape[0], (73.9,) * shape[0], "synthetic"
    assert x.shape == (work.clients, work.images, *work.shape)
    save_file({"x": x, "y": y, "mean": torch.tensor(mean), "std": torch.tensor(std)}, path)
    return kind


def read_federation(path: Path) -> Federation:
    """One test image a client: our engines test every trained model, and the other contenders have no such work."""
    tensors = load_file(path)
    train = [Examples(*client) for client in zip(tensors["x"], tensors["y"], strict=True)]
    test = [Examples(x[:1], y[:1]) for x, y in train]
    mean, std = (tuple(tensors[name].tolist()) for name in ("mean", "std"))
    return Federation(train, test, tuple(map(str, range(CLASSES))), mean=mean, std=std)


def loaders(path: Path, work: Work) -> list[DataLoader[tuple[Tensor, ...]]]:
    """Every client's training data as a tutorial has them: normalised once, then in shuffled batches."""
    federation = read_federation(path)
    datasets = [TensorDataset(federation.normalise(x), y) for x, y in federation.train]
    return [DataLoader(dataset, work.batch_size, shuffle=True) for dataset in datasets]


class TextbookCNN(PaperCNN):
    """The paper's CNN as tutorials write it: convolution, (BatchNorm,) ReLU, then the pooling."""

    def __init__(self, shape: tuple[int, ...], batch_norm: bool) -> None:
        super().__init__(shape, CLASSES, batch_norm)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def train_textbook(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], work: Work) -> None:
    """The local training of a tutorial."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    for _ in range(work.epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()


def mean_of(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The clients are of one size: the plain mean. BatchNorm's integer counter is copied."""
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if value.is_floating_point() else value
        for name, value in states[0].items()
    }


def flop_per_sample(work: Work) -> int:
    """Of the convolutions and linear layers: 2 per multiply and add, forward once; backward again for the weights'
    gradient and, but for the first layer, for the inputs'. The rest of the network is not counted."""
    total, first = 0, True

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total, first
        weight = module.weight
        forward = 2 * output[0].numel() * weight[0].numel()  # each output is a product over one filter or row
        total += forward * (2 if first else 3)
        first = False

    model = TextbookCNN(work.shape, work.batch_norm)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(count)
    model(torch.zeros(2, *work.shape))
    return total
