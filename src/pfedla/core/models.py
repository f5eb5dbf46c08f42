"""The registry of models: by name, by entry point, or by "package.module:factory"."""

import inspect
import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from pfedla.core import architectures
from pfedla.core.architectures import MLP as MLP
from pfedla.core.architectures import PaperCNN as PaperCNN
from pfedla.core.architectures import Shape
from pfedla.core.architectures import SmallCNN as SmallCNN
from pfedla.core.errors import PfedlaError, first_line
from pfedla.core.plugins import find_named, locate

LARGEST_MODEL = 2**28  # parameters: 1 GiB
_building = threading.RLock()  # weights are drawn from the process's one random state
Factory = Callable[..., nn.Module]
MODELS: dict[str, Factory] = {
    "cnn": partial(PaperCNN, batch_norm=False),
    "cnn-bn": partial(PaperCNN, batch_norm=True),
    "small-cnn": SmallCNN,
    "mlp": MLP,
    "linear": architectures.LinearModel,
    "resnet20": partial(architectures.ResNet20, group_norm=False),
    "resnet20-gn": partial(architectures.ResNet20, group_norm=True),
    "vit-tiny": architectures.VisionTransformer,
    "transformer-text": architectures.TextTransformer,
    "lstm-text": architectures.TextLSTM,
}


class Inputs(NamedTuple):
    kind: str
    smallest: int = 0  # height and width of the images that a model takes


ANY, TEXT = Inputs("any"), Inputs("text")
INPUTS = {"cnn": Inputs("images", 16), "cnn-bn": Inputs("images", 16), "small-cnn": Inputs("images", 4)}
INPUTS |= dict.fromkeys(("mlp", "linear"), ANY)
INPUTS |= dict.fromkeys(("resnet20", "resnet20-gn", "vit-tiny"), Inputs("images", 8))
INPUTS |= dict.fromkeys(("transformer-text", "lstm-text"), TEXT)
VARIANTS = {"cnn-bn": "with BatchNorm", "resnet20": "with BatchNorm", "resnet20-gn": "with GroupNorm"}


def describe_models() -> dict[str, dict[str, str]]:
    """Return what each model takes and is."""
    found = {}
    for name, factory in MODELS.items():
        kind, smallest = INPUTS.get(name, ANY)
        summary = (inspect.getdoc(getattr(factory, "func", factory)) or "").partition("\n")[0]
        variant = f" ({VARIANTS[name]})" if name in VARIANTS else ""
        takes = f"{kind} from {smallest}x{smallest}" if smallest else kind
        found[name] = {"takes": takes, "summary": summary.rstrip(".") + variant}
    return found


def model_for(shape: Shape) -> str:
    """Return the default model for a shape: the paper's, with BatchNorm for colour images, if it takes them."""
    if isinstance(shape, Mapping) and "ids" in shape:
        return "transformer-text"
    if not is_plain(shape):
        raise PfedlaError(f"no model of the registry takes inputs of shape {shape}; give your own with --model")
    paper = "cnn-bn" if shape[0] == 3 else "cnn"
    return next(name for name in (paper, "small-cnn", "mlp") if _side(shape) >= INPUTS[name].smallest)


def is_plain(shape: Shape) -> bool:
    """Return whether an example is one tensor, not a tuple or dict of tensors."""
    return not isinstance(shape, Mapping) and all(isinstance(size, int) for size in shape)


def _side(shape: Shape) -> int:
    return min(shape[1:]) if len(shape) == 3 else 0


def find(name: str) -> Factory:
    """Return the factory of a model: registered, installed as an entry point, or "package.module:factory"."""
    factory = find_named("model", name, MODELS)
    # Nothing else is called: the name may come from an untrusted run folder.
    if name not in MODELS and not (inspect.isfunction(factory) or inspect.isclass(factory)):
        raise PfedlaError(f"model {name!r} is no function or class that makes an nn.Module, but {factory!r:.80}")
    if inspect.isclass(factory) and not issubclass(factory, nn.Module):
        raise PfedlaError(f"model {name!r}: {factory.__name__} is not a subclass of nn.Module")
    return factory  # type: ignore[no-any-return]


def make(name: str, shape: Shape, num_outputs: int, vocabulary: int = 0) -> nn.Module:
    """Call a factory as factory(shape, num_outputs), or factory() if it takes no argument."""
    factory = find(name)
    parameters = inspect.signature(factory).parameters
    more = {"vocabulary": vocabulary} if "vocabulary" in parameters else {}
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    given = (
        (shape, num_outputs) if any(one.kind in kinds for one in parameters.values() if one.name not in more) else ()
    )
    try:
        inspect.signature(factory).bind(*given, **more)
    except TypeError as error:
        raise PfedlaError(f"model {name!r} is called as factory(shape, num_outputs) or factory(): {error}") from None
    try:
        module = factory(*given, **more)
    except Exception as error:  # whatever the user's code raises
        raise PfedlaError(f"model {name!r}: {type(error).__name__}: {first_line(error)}{locate(error)}") from error
    if not isinstance(module, nn.Module):
        raise PfedlaError(f"model {name!r} returned a {type(module).__name__}, not an nn.Module")
    return module


def outline(name: str, shape: Shape, num_outputs: int, vocabulary: int = 0) -> nn.Module:
    """Return a model without memory (on "meta"), own code with it; refuse one that is impossible or too large."""
    find(name)
    kind, smallest = INPUTS.get(name, ANY)
    if name in MODELS and (kind == "text") != (isinstance(shape, Mapping) and "ids" in shape) and name in INPUTS:
        raise PfedlaError(f"model {name!r} takes {kind} inputs, not examples of shape {shape}; use {model_for(shape)}")
    if kind == "text" and not vocabulary:
        raise PfedlaError(f"model {name!r} needs the size of the vocabulary, which these data do not have")
    if smallest and _side(shape) < smallest:
        least = f"images of at least {smallest}x{smallest}"
        raise PfedlaError(f"model {name!r} takes {least}, not examples of shape {shape}; use {model_for(shape)}")
    numbers = [math.prod(part) for part in ([shape] if is_plain(shape) else _sizes(shape))]
    size = max(*numbers, num_outputs, vocabulary)
    if size <= LARGEST_MODEL:  # beyond, torch cannot even count
        with torch.device("meta" if name in MODELS else "cpu"):
            module = make(name, shape, num_outputs, vocabulary)
        size = sum(p.numel() for p in module.parameters() if not isinstance(p, nn.UninitializedParameter))
    if size > LARGEST_MODEL:
        raise PfedlaError(f"model {name!r} for shape {shape} and {num_outputs} outputs is too large: {size:,} numbers")
    return module


def _sizes(shape: Any) -> list[Any]:
    parts = shape.values() if isinstance(shape, Mapping) else shape
    return [part for one in parts for part in ([one] if is_plain(one) else _sizes(one))]


def build_model(
    name: str, shape: Shape, num_outputs: int, generator: torch.Generator, vocabulary: int = 0
) -> nn.Module:
    """Return a model with weights drawn from `generator`; the global random state does not change."""
    with _building, torch.random.fork_rng(devices=[]):
        if name in MODELS:
            outline(name, shape, num_outputs, vocabulary)
            torch.manual_seed(generator.initial_seed())
            return make(name, shape, num_outputs, vocabulary)
        torch.manual_seed(generator.initial_seed())
        return outline(name, shape, num_outputs, vocabulary)
