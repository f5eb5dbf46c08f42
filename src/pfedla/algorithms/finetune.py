"""FedAvg with fine-tuning: the global model is trained a little more on a client's own data before use.

Its training is FedAvg's, only the deployed model differs: the usual second baseline of personalised methods.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, resolve_epochs
from pfedla.core.contracts import ClientState, LocalData, Params, Payload
from pfedla.core.layers import finite_or
from pfedla.core.settings import AUTO, Auto, Positive
from pfedla.core.training import sgd


class FedAvgFineTuned(PartialFedAvg):
    name: ClassVar[str] = "fedavg-ft"
    summary: ClassVar[str] = "FedAvg, fine-tuned on the client before use"
    personalizes_on_data: ClassVar[bool] = True
    sends_statistics: ClassVar[bool] = True

    fine_tuning_epochs: Positive | Auto = AUTO
    """Epochs of fine-tuning on the client's training data, at most the local budget. auto: all of it."""

    def check(self, num_clients: int) -> None:
        resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        epochs = resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)
        tuned, _ = sgd(self.task, download.tensors, data, self.training, epochs=epochs)
        return finite_or(tuned, download.tensors)  # if fine-tuning diverges, the global model is used
