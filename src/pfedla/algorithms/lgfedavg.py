"""LG-FedAvg: a representation of one's own, shared last layers.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020, Algorithm 1.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.errors import NotApplicableError
from pfedla.core.settings import Positive


class LGFedAvg(PartialFedAvg):
    name: ClassVar[str] = "lg-fedavg"
    summary: ClassVar[str] = "a representation of one's own, shared last layers"

    shared_layers: Positive = 1  # counted from the output

    def check(self, num_clients: int) -> None:
        if self.shared_layers >= len(self.task.layers):
            raise NotApplicableError(
                f"shared_layers = {self.shared_layers}, but the model has {len(self.task.layers)} layers: none would be local"
            )

    def private_layers(self) -> list[int]:
        return [*range(len(self.task.layers) - self.shared_layers)]
