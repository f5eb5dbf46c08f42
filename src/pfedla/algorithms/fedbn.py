"""FedBN: FedAvg in which every BatchNorm module stays on its client.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
"""

from typing import ClassVar

from torch import nn

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.errors import NotApplicableError


class FedBN(PartialFedAvg):
    name: ClassVar[str] = "fedbn"
    summary: ClassVar[str] = "FedAvg, but every BatchNorm stays on its client"

    def check(self, num_clients: int) -> None:
        if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.task.module.modules()):
            raise NotApplicableError("FedBN keeps BatchNorm layers on the client, and the model has none")

    def private_layers(self) -> list[int]:
        kinds = self.task.layers.kinds
        return [layer for layer, kind in enumerate(kinds) if issubclass(kind, nn.modules.batchnorm._BatchNorm)]
