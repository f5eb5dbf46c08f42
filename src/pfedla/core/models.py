"""The paper's CNN, a small one for tiny images, an MLP for feature vectors."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, unknown

Shape = tuple[int, ...]  # of one example: (channels, height, width) or (features,)
LARGEST_MODEL = 2**28  # parameters: 1 GiB


class PaperCNN(nn.Module):
    """Two 5x5 convolutions (16, 32), each with 2x2 max-pooling, then 120-84-classes, as in the paper's Table 3."""

    def __init__(self, shape: Shape, num_classes: int, batch_norm: bool) -> None:
        super().__init__()
        channels, height, width = shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.bn1 = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.bn2 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(32 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU after the pooling gives the same numbers (it is monotone) on a quarter of the values.
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
    """For images too small for the paper's CNN: two padded 3x3 convolutions (16, 32), then 64-classes."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.fc2 = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """For feature vectors, also of integers (images are flattened): 64-64-classes."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x.flatten(1).to(self.fc1.weight.dtype)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": partial(PaperCNN, batch_norm=False),
    "cnn-bn": partial(PaperCNN, batch_norm=True),
    "small-cnn": SmallCNN,
    "mlp": MLP,
}
SMALLEST = {"cnn": 16, "cnn-bn": 16, "small-cnn": 4, "mlp": 0}  # height and width of the images that a model takes


def model_for(shape: Shape) -> str:
    """Return the default model for a shape: the paper's, with BatchNorm for colour images, if it takes them."""
    paper = "cnn-bn" if shape[0] == 3 else "cnn"
    return next(name for name in (paper, "small-cnn", "mlp") if _side(shape) >= SMALLEST[name])


def _side(shape: Shape) -> int:
    return min(shape[1:]) if len(shape) == 3 else 0


def outline(name: str, shape: Shape, num_classes: int) -> nn.Module:
    """Return a named model without memory (on "meta"); refuse one that is impossible or too large."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if _side(shape) < SMALLEST.get(name, 0):
        least = f"images of at least {SMALLEST[name]}x{SMALLEST[name]}"
        raise PfedlaError(f"model {name!r} takes {least}, not examples of shape {shape}; use {model_for(shape)}")
    size = max(math.prod(shape), num_classes)
    if size <= LARGEST_MODEL:  # beyond, torch cannot even count
        with torch.device("meta"):
            module = MODELS[name](shape, num_classes)
        size = sum(parameter.numel() for parameter in module.parameters())
    if size > LARGEST_MODEL:
        raise PfedlaError(f"model {name!r} for shape {shape} and {num_classes} classes is too large: {size:,} numbers")
    return module


def build_model(name: str, shape: Shape, num_classes: int, generator: torch.Generator) -> nn.Module:
    """Return a named model with weights drawn from `generator`; the global random state does not change."""
    outline(name, shape, num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        return MODELS[name](shape, num_classes)
