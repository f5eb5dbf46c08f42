"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021."""

from torch.nn.modules.batchnorm import _BatchNorm

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.errors import NotApplicableError


class FedBN(PartialFedAvg):
    name = "fedbn"
    summary = "FedAvg, but every BatchNorm stays on its client"

    def check(self, num_clients: int) -> None:
        if not any(isinstance(module, _BatchNorm) for module in self.task.module.modules()):
            raise NotApplicableError("FedBN keeps BatchNorm layers on the client, and the model has none")

    def private_layers(self) -> list[int]:
        return [layer for layer, kind in enumerate(self.task.layers.kinds) if issubclass(kind, _BatchNorm)]
