"""pFedLA: personalised federated learning that learns how much of each layer to borrow from whom.

Public names are loaded when first used, so that `import pfedla` and `pfedla --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Federation": "pfedla.data.federation",
    "federation_of": "pfedla.data.federation",
    "Layers": "pfedla.core.layers",
    "mix": "pfedla.core.layers",
    "LayerWeightHypernetwork": "pfedla.algorithms.hypernetworks",
    "layer_gradient": "pfedla.algorithms.hypernetworks",
    "task_of": "pfedla.core.tasks",
    "simulate": "pfedla.runs.simulation",
    "Simulation": "pfedla.runs.simulation",
    "Experiment": "pfedla.runs.experiment",
    "run": "pfedla.runs.result",
    "Faults": "pfedla.core.faults",
    "PfedlaError": "pfedla.core.errors",
}
__all__ = [
    "Experiment", "Faults", "Federation", "LayerWeightHypernetwork", "Layers", "PfedlaError", "Simulation", "__version__",
    "federation_of", "layer_gradient", "mix", "run", "simulate", "task_of",
]  # fmt: skip

if TYPE_CHECKING:
    from pfedla.algorithms.hypernetworks import LayerWeightHypernetwork, layer_gradient
    from pfedla.core.errors import PfedlaError
    from pfedla.core.faults import Faults
    from pfedla.core.layers import Layers, mix
    from pfedla.core.tasks import task_of
    from pfedla.data.federation import Federation, federation_of
    from pfedla.runs.experiment import Experiment
    from pfedla.runs.result import run
    from pfedla.runs.simulation import Simulation, simulate


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pfedla' has no attribute {name!r}")
