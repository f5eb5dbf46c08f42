"""Where the clients live. Engines take and give CPU tensors, whatever device they use."""

import os
import shutil
from typing import Any

from torch import nn

from pfedla.core.contracts import Algorithm
from pfedla.core.errors import PfedlaError
from pfedla.core.settings import AUTO, EngineSettings
from pfedla.data.federation import Federation
from pfedla.engines.client import SimulatedClients
from pfedla.engines.threaded import ThreadedEngine
from pfedla.engines.vectorized import VectorizedEngine

ENGINES: dict[str, type[SimulatedClients]] = {"threaded": ThreadedEngine, "vectorized": VectorizedEngine}
# On a CPU stacking wins where a step is mostly Python: small networks without convolutions.
VECTORIZED_PARAMETERS = 2**16


def resolve_engine(settings: EngineSettings, module: nn.Module) -> EngineSettings:
    """Replace "auto" by the faster engine for this model and device; refuse what cannot be compiled.

    The choice follows a measured rule (docs/performance.md), not a timing: the same file gives the same bits.
    """
    name = settings.name
    if name == AUTO:
        convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
        small = sum(parameter.numel() for parameter in module.parameters()) <= VECTORIZED_PARAMETERS
        stacks = settings.device != "cpu" or (small and not convolves)
        name = "vectorized" if stacks and not settings.compile else "threaded"
    if settings.compile and (name != "threaded" or settings.device != "cpu"):
        raise PfedlaError(f"--compile needs the threaded engine on the cpu, not {name} on {settings.device}")
    if settings.compile and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise PfedlaError("--compile needs a C++ compiler: install g++ or clang++, or name one in $CXX")
    return settings.model_copy(update={"name": name})


def create_engine(
    algorithm: Algorithm, federation: Federation, settings: EngineSettings, **how: Any
) -> SimulatedClients:
    """Return the engine of the settings; `how`: recalibrate, faults, stopping."""
    settings = resolve_engine(settings, algorithm.task.module)
    return ENGINES[settings.name](algorithm, federation, settings, **how)
