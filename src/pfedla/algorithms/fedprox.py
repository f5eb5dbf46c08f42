"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2."""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.search import Range, Space
from pfedla.core.settings import Factor


class FedProx(PartialFedAvg):
    name = "fedprox"
    summary = "FedAvg, held near the global model by a penalty"
    sends_statistics = True
    search: ClassVar[Space] = {"penalty": Range(0.001, 1)}
    penalty: Factor = 0.01
    """μ, how strongly local training is pulled to the global model. 0: FedAvg."""

    def pull(self) -> float:
        return self.penalty  # min f_i(w) + μ/2 |w - w_global|²
