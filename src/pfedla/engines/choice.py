"""Which engine, and whether to compile: by tables of what was measured (docs/performance.md), never by a timing at run time.

What is chosen is written into the run's experiment.toml, so that the same file gives the same bits.
"""

import os
import shutil
from importlib.util import find_spec
from typing import Literal

from torch import nn

from pfedla.errors import PfedlaError

AUTO: Literal["auto"] = "auto"
FLOWER = "flower"
Compile = Literal["auto", "on", "off"]

# On a CPU one stacked product for all clients wins where a step is mostly Python: small networks without convolutions.
VECTORIZED_PARAMETERS = 2**16
# How much faster a compiled step is, by model, at the least of its sizes; compiling takes 15 to 30 s itself, so `auto` asks
# for a gain that a run of a minute or two has back.
COMPILE_GAIN = {"cnn": 0.26, "cnn-bn": 0.12, "small-cnn": 0.37, "mlp": 0.21}
WORTH_COMPILING = 0.5


def chosen_engine(name: str, device: str, module: nn.Module) -> str:
    """`name`, or for "auto" the one that is faster for this model on this device; never Flower, which is for many machines."""
    if name == FLOWER:
        check_flower(device)
    if name != AUTO:
        return name
    convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
    small = sum(parameter.numel() for parameter in module.parameters()) <= VECTORIZED_PARAMETERS
    return "vectorized" if device != "cpu" or (small and not convolves) else "threaded"


def check_flower(device: str) -> None:
    """Refuse the engine where it cannot run, before Flower is imported."""
    if not all(map(find_spec, ("flwr", "ray"))):
        raise PfedlaError("engine 'flower' needs Flower: pip install 'pfedla[flower-simulation]'")
    if device != "cpu":
        raise PfedlaError(f"engine 'flower' runs its clients on CPUs, not on {device!r}; engine 'vectorized' uses one GPU")


def chosen_compile(asked: Compile, engine: str, device: str, model: str = "") -> tuple[Literal["on", "off"], str]:
    """Whether the training step is compiled, and what there is to say about it."""
    if asked == AUTO:
        asked = "on" if COMPILE_GAIN.get(model, 0.0) >= WORTH_COMPILING else "off"
    if asked == "off":
        return "off", ""
    if engine not in ("threaded", FLOWER) or device != "cpu":
        raise PfedlaError(
            f"compile = on is for the threaded and flower engines on the cpu, not for {engine} on {device}; leave it out"
        )
    if not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        return "off", "there is no C++ compiler (g++, clang++ or $CXX): the training step is not compiled"
    return "on", "the training step is compiled first: up to half a minute"
