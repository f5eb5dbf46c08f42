"""FedBABU: the body is trained and averaged; the head stays at its random start until a client fine-tunes.

Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, find_private, keep_and_send, resolve_epochs
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.layers import finite_or
from pfedla.core.settings import AUTO, Auto, Positive
from pfedla.core.training import sgd


class FedBABU(PartialFedAvg):
    name: ClassVar[str] = "fedbabu"
    summary: ClassVar[str] = "a shared body under a random head, fine-tuned before use"
    personalizes_on_data: ClassVar[bool] = True

    private: str = "head"
    """Layers that the rounds do not train: "head" (the last Linear layer) or names, separated by commas."""
    fine_tuning_epochs: Positive | Auto = AUTO
    """Epochs of fine-tuning the whole model before use, at most the local budget. auto: all of it."""

    def check(self, num_clients: int) -> None:
        self.private_layers()
        resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)

    def private_layers(self) -> list[int]:
        return find_private(self.private, self.task.layers)

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        start = {**download.tensors, **client}
        return keep_and_send(client, download, *sgd(self.task, start, data, self.training, only=download.tensors))

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        start = {**download.tensors, **client}
        epochs = resolve_epochs("fine_tuning_epochs", self.fine_tuning_epochs, self.training)
        tuned, _ = sgd(self.task, start, data, self.training, epochs=epochs)
        return finite_or(tuned, start)  # if fine-tuning diverges, the model is used without it
