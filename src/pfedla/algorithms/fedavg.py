"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017."""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, resolve_epochs
from pfedla.core.contracts import ClientState, LocalData, Params, Payload
from pfedla.core.layers import finite_or
from pfedla.core.search import Epochs, Space
from pfedla.core.settings import AUTO, Auto, Positive
from pfedla.core.training import sgd


class FedAvg(PartialFedAvg):
    name = "fedavg"
    summary = "one global model, the weighted mean of all"
    sends_statistics = True  # BatchNorm's mean and variance are averaged like parameters; its counter is copied


class FineTuned(PartialFedAvg):
    """Abstract: the whole model is fine-tuned on the client's training data before use."""

    personalizes_on_data = True
    search: ClassVar[Space] = {"fine_tuning_epochs": Epochs()}
    fine_tuning_epochs: Positive | Auto = AUTO
    """Epochs of fine-tuning the whole model before use, at most the local budget. auto: all of it."""

    def check(self, num_clients: int) -> None:
        super().check(num_clients)
        resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)

    def count_epochs(self) -> tuple[int, int]:
        epochs = resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)
        return self.training.local_epochs, len(epochs)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        start = self.start(client, download)
        epochs = resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)
        tuned, _ = sgd(self.task, start, data, self.training, epochs=epochs)
        return finite_or(tuned, start)  # if fine-tuning diverges, the model is used without it


class FedAvgFineTuned(FineTuned):
    name = "fedavg-ft"
    summary = "FedAvg, fine-tuned on the client before use"
    sends_statistics = True
