"""Personalised federated learning that learns how much of each layer to borrow from whom."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"
__all__ = ["Comparison", "Experiment", "Faults", "Federation", "LayerWeightHypernetwork", "Layers", "Metric"]
__all__ += ["Objective", "PfedlaError", "Run", "Simulation", "__version__", "compare", "federation_from"]
__all__ += ["federation_of", "layer_gradient", "lora", "merge_lora", "mix", "run", "simulate", "task_of"]
# Where they are: loaded when first used, so that `import pfedla` and `pfedla --help` stay quick; without torch first.
_HOMES = ["core.errors", "core.settings", "runs.experiment", "core.layers", "core.tasks", "core.lora"]
_HOMES += ["core.objectives", "data.federation", "algorithms.pfedla", "runs.result", "runs.run", "runs.comparison"]

if TYPE_CHECKING:
    from pfedla.algorithms.pfedla import LayerWeightHypernetwork, layer_gradient
    from pfedla.core.errors import PfedlaError
    from pfedla.core.layers import Layers, mix
    from pfedla.core.lora import lora, merge_lora
    from pfedla.core.objectives import Metric, Objective
    from pfedla.core.settings import Faults
    from pfedla.core.tasks import task_of
    from pfedla.data.federation import Federation, federation_from, federation_of
    from pfedla.runs.comparison import Comparison, compare
    from pfedla.runs.experiment import Experiment
    from pfedla.runs.result import Simulation
    from pfedla.runs.run import Run, run, simulate


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        module = import_module(f"pfedla.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module 'pfedla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
