"""The paper's CNN, a small one for tiny images, an MLP for feature vectors; and `task_of`, which takes any nn.Module."""

import copy
import math
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from pfedla.errors import PfedlaError, unknown
from pfedla.layers import Layers
from pfedla.tree import Params

Shape = tuple[int, ...]  # of one example: (channels, height, width) or (features,)
LARGEST_MODEL = 2**28  # parameters: 1 GiB


class PaperCNN(nn.Module):
    """Two 5x5 convolutions (16, 32) without padding, 2x2 max-pool, then 120-84-classes. BatchNorm before the activation.

    The sizes are those behind the paper's Table 3: 85,822 parameters for 1x28x28, 121,278 with BatchNorm for 3x32x32.
    """

    def __init__(self, shape: Shape, num_classes: int, batch_norm: bool) -> None:
        super().__init__()
        channels, height, width = shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        if min(rows, columns) < 1:
            raise PfedlaError(f"the paper's CNN needs images of at least 16x16, not {height}x{width}; use small-cnn")
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
    """For images too small for the paper's CNN, such as 8x8 digits: two padded 3x3 convolutions (16, 32), 64, classes."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        channels, height, width = shape
        if min(height, width) < 4:
            raise PfedlaError(f"small-cnn needs images of at least 4x4, not {height}x{width}")
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.fc2 = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """For feature vectors (images are flattened): 64-64-classes."""

    def __init__(self, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[Shape, int], nn.Module]] = {
    "cnn": lambda shape, classes: PaperCNN(shape, classes, batch_norm=False),
    "cnn-bn": lambda shape, classes: PaperCNN(shape, classes, batch_norm=True),
    "small-cnn": SmallCNN,
    "mlp": MLP,
}


def model_for(shape: Shape) -> str:
    """The default model of a data set: the paper's, with BatchNorm for colour images."""
    if len(shape) != 3:
        return "mlp"
    if min(shape[1:]) < 16:
        return "small-cnn" if min(shape[1:]) >= 4 else "mlp"
    return "cnn-bn" if shape[0] == 3 else "cnn"


def outline(name: str, shape: Shape, num_classes: int) -> nn.Module:
    """A named model without memory (on "meta"): what it would be made of, if it is possible and not absurdly large."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    if len(shape) != 3 and name != "mlp":
        raise PfedlaError(f"model {name!r} takes images, the data are vectors of {shape[0]} features; use mlp")
    size = max(math.prod(shape), num_classes)
    if size <= LARGEST_MODEL:  # beyond, torch cannot even count
        with torch.device("meta"):
            module = MODELS[name](shape, num_classes)
        size = sum(parameter.numel() for parameter in module.parameters())
    if size > LARGEST_MODEL:
        raise PfedlaError(
            f"model {name!r} for examples of shape {shape} and {num_classes} classes would be too large: more than "
            f"{LARGEST_MODEL:,} parameters"
        )
    return module


def build_model(name: str, shape: Shape, num_classes: int, generator: torch.Generator) -> nn.Module:
    """A named model, its weights drawn from `generator`; the global random stream is left as it was."""
    outline(name, shape, num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        return MODELS[name](shape, num_classes)


def load_tensors(module: nn.Module, tensors: Params) -> nn.Module:
    """A copy of `module` with these parameters and statistics, ready for use (eval mode)."""
    module = copy.deepcopy(module)
    # Not strict: a tied weight has two names in a state_dict and one here.
    module.load_state_dict(tensors, strict=False)
    return module.eval()


class ClassificationTask:
    """An nn.Module that maps a batch to logits, with cross-entropy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copy.deepcopy(module)
        self._layers = Layers.of(self._module)
        self._copies = threading.local()

    @property
    def layers(self) -> Layers:
        return self._layers

    @property
    def module(self) -> nn.Module:
        return self._module

    def to(self, device: torch.device) -> "ClassificationTask":
        return ClassificationTask(copy.deepcopy(self._module).to(device))

    def initial(self) -> Params:
        tensors = [*self._module.named_parameters(), *self._module.named_buffers()]
        return {name: value.detach().clone() for name, value in tensors}

    def _own_copy(self, mode: str) -> nn.Module:
        # functional_call swaps the tensors inside the module while it runs: every thread needs a module of its own.
        if not hasattr(self._copies, mode):
            module = copy.deepcopy(self._module).train(mode != "eval")
            if mode == "recalibrate":
                for part in module.modules():
                    if isinstance(part, nn.modules.batchnorm._NormBase):
                        part.momentum = 1.0  # the statistics become those of the one batch they see
            setattr(self._copies, mode, module)
        return getattr(self._copies, mode)  # type: ignore[no-any-return]

    def check(self, x: Tensor, num_classes: int) -> None:
        """Try the model on a batch in training mode and refuse what could not be trained or repeated."""
        before = torch.random.get_rng_state()
        try:
            with torch.no_grad():
                logits = functional_call(self._own_copy("train"), self.initial(), (x,))
        except Exception as error:  # whatever the user's module raises
            reason = str(error).splitlines()[0]
            raise PfedlaError(f"the model cannot train on a batch of shape {tuple(x.shape)}: {reason}") from error
        if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape != (len(x), max(num_classes, logits.shape[1])):
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise PfedlaError(f"the model should give a logit for each of the {num_classes} classes, it gives {shape}")
        if not torch.equal(before, torch.random.get_rng_state()):
            torch.random.set_rng_state(before)
            raise PfedlaError(
                "the model draws random numbers while it trains (dropout?): they come from a stream shared by all clients, "
                "so no run could be repeated; switch them off"
            )

    def loss(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        statistics = {name: value.clone() for name, value in statistics.items()}  # BatchNorm writes into them
        logits = functional_call(self._own_copy("train"), {**parameters, **statistics}, (x,))
        return F.cross_entropy(logits, y), statistics

    def logits(self, tensors: Params, x: Tensor) -> Tensor:
        return functional_call(self._own_copy("eval"), tensors, (x,))  # type: ignore[no-any-return]

    def recalibrated(self, tensors: Params, x: Tensor) -> Params:
        fresh = {**tensors, **{name: tensors[name].clone() for name in self._layers.statistics}}
        functional_call(self._own_copy("recalibrate"), fresh, (x,))
        return fresh


def task_of(module: nn.Module) -> ClassificationTask:
    """Any classifier as a task: takes a batch, returns logits; its present weights are the common initialisation."""
    if not isinstance(module, nn.Module):
        raise PfedlaError(f"the model should be an nn.Module (an instance), it is {module!r}")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise PfedlaError("the model has no trainable parameter")
    return ClassificationTask(module)
