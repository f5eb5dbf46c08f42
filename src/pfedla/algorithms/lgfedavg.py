"""LG-FedAvg: a representation of one's own, shared last layers.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.errors import NotApplicableError
from pfedla.core.settings import Positive


class LGFedAvg(PartialFedAvg):
    name: ClassVar[str] = "lg-fedavg"
    summary: ClassVar[str] = "a representation of one's own, shared last layers"

    shared_layers: Positive = 1
    """How many layers are shared, counted from the output."""

    def check(self, num_clients: int) -> None:
        count = len(self.task.layers)
        if self.shared_layers >= count:
            raise NotApplicableError(f"shared_layers = {self.shared_layers} of {count} layers: none would be local")

    def private_layers(self) -> list[int]:
        return [*range(len(self.task.layers) - self.shared_layers)]
