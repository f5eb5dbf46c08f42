"""pFedLA: personalised federated learning that learns how much of each layer to borrow from whom.

Public names are loaded when first used, so that `import pfedla` and `pfedla --help` stay quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Federation": "pfedla.data.federation",
    "federation_of": "pfedla.data.federation",
    "Layers": "pfedla.layers",
    "mix": "pfedla.layers",
    "LayerWeightHypernetwork": "pfedla.hypernetworks",
    "layer_gradient": "pfedla.hypernetworks",
    "task_of": "pfedla.tasks",
    "simulate": "pfedla.simulation",
    "Simulation": "pfedla.simulation",
    "Experiment": "pfedla.experiment",
    "run": "pfedla.results",
    "Faults": "pfedla.faults",
    "PfedlaError": "pfedla.errors",
}
__all__ = [
    "Experiment", "Faults", "Federation", "LayerWeightHypernetwork", "Layers", "PfedlaError", "Simulation", "__version__",
    "federation_of", "layer_gradient", "mix", "run", "simulate", "task_of",
]  # fmt: skip

if TYPE_CHECKING:
    from pfedla.data.federation import Federation, federation_of
    from pfedla.errors import PfedlaError
    from pfedla.experiment import Experiment
    from pfedla.faults import Faults
    from pfedla.hypernetworks import LayerWeightHypernetwork, layer_gradient
    from pfedla.layers import Layers, mix
    from pfedla.results import run
    from pfedla.simulation import Simulation, simulate
    from pfedla.tasks import task_of


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'pfedla' has no attribute {name!r}")
