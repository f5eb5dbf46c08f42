"""pFedLA: personalised federated learning that learns how much of each layer to borrow from whom.

Public names are loaded when first used, so that `import pfedla` and `pfedla --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0.dev0"

_HOME = {
    "Experiment": "pfedla.runs.experiment",
    "Faults": "pfedla.core.settings",
    "Federation": "pfedla.data.federation",
    "LayerWeightHypernetwork": "pfedla.algorithms.pfedla",
    "Layers": "pfedla.core.layers",
    "PfedlaError": "pfedla.core.errors",
    "Run": "pfedla.runs.run",
    "Simulation": "pfedla.runs.result",
    "federation_of": "pfedla.data.federation",
    "layer_gradient": "pfedla.algorithms.pfedla",
    "mix": "pfedla.core.layers",
    "run": "pfedla.runs.simulation",
    "simulate": "pfedla.runs.simulation",
    "task_of": "pfedla.core.tasks",
}
__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:
    from pfedla.algorithms.pfedla import LayerWeightHypernetwork as LayerWeightHypernetwork
    from pfedla.algorithms.pfedla import layer_gradient as layer_gradient
    from pfedla.core.errors import PfedlaError as PfedlaError
    from pfedla.core.layers import Layers as Layers
    from pfedla.core.layers import mix as mix
    from pfedla.core.settings import Faults as Faults
    from pfedla.core.tasks import task_of as task_of
    from pfedla.data.federation import Federation as Federation
    from pfedla.data.federation import federation_of as federation_of
    from pfedla.runs.experiment import Experiment as Experiment
    from pfedla.runs.result import Simulation as Simulation
    from pfedla.runs.run import Run as Run
    from pfedla.runs.simulation import run as run
    from pfedla.runs.simulation import simulate as simulate


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pfedla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
