"""Liang et al., 2020, "Think Locally, Act Globally: Federated Learning with Local and Global Representations"."""

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.errors import NotApplicableError
from pfedla.core.settings import Positive


class LGFedAvg(PartialFedAvg):
    name = "lg-fedavg"
    summary = "a representation of one's own, shared last layers"
    shared_layers: Positive = 1
    """How many layers are shared, counted from the output."""

    def private_layers(self) -> list[int]:
        if self.shared_layers >= len(self.task.layers):
            raise NotApplicableError(f"shared_layers = {self.shared_layers} is the whole model: none would be local")
        return [*range(len(self.task.layers) - self.shared_layers)]
