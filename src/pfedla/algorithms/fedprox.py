"""FedProx: FedAvg whose local training is held near the global model by a quadratic penalty.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2.
Names: μ `penalty`; min f_i(w) + μ/2 |w - w_global|² is `sgd` with towards=w_global, pull=μ.
"""

from pfedla.algorithms.partial import PartialFedAvg, check_pull
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Payload
from pfedla.core.settings import Factor
from pfedla.core.training import keep_and_send, sgd


class FedProx(PartialFedAvg):
    name = "fedprox"
    summary = "FedAvg, held near the global model by a penalty"
    sends_statistics = True
    penalty: Factor = 0.01
    """μ, how strongly local training is pulled to the global model. 0: FedAvg."""

    def check(self, num_clients: int) -> None:
        check_pull("penalty", self.penalty, self.training.learning_rate)

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        towards = download.tensors if self.penalty else None  # without a penalty FedAvg's steps, bit for bit
        trained = sgd(self.task, download.tensors, data, self.training, towards=towards, pull=self.penalty)
        return keep_and_send(client, download, *trained)
