"""FedBABU: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022."""

from pfedla.algorithms.fedavg import FineTuned
from pfedla.algorithms.partial import PrivateByName, Trained
from pfedla.core.contracts import LocalData, Params
from pfedla.core.training import sgd


class FedBABU(FineTuned, PrivateByName):
    name = "fedbabu"
    summary = "a shared body under a random head, fine-tuned before use"

    def train(self, start: Params, received: Params, data: LocalData) -> Trained:
        return sgd(self.task, start, data, self.training, only=received)
