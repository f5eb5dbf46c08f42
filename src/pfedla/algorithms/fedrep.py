"""FedRep: a shared representation and a head of one's own, trained in turn.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, find_private, keep_and_send
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Payload
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.settings import AUTO, Auto, Natural
from pfedla.core.training import sgd


class FedRep(PartialFedAvg):
    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "a shared body, a head of one's own; trained in turn"

    private: str = "head"
    """The layers of the head: "head" (the last Linear layer) or names, separated by commas; "" for none."""
    head_epochs: Natural | Auto = AUTO
    """Epochs of the head, with the body frozen. auto: the local budget less the body's epochs."""
    body_epochs: Natural | Auto = AUTO
    """Epochs of the body, with the head frozen. auto: half of the local budget, rounded up."""

    def check(self, num_clients: int) -> None:
        head, body = self._epochs()
        budget = self.training.local_epochs
        if self.private_layers() and not head:
            raise NotApplicableError(f"local_epochs = {budget} leaves no epoch to the head")
        if head and not self.private_layers():
            raise PfedlaError(f"head_epochs = {head}, but no layer is private; set head_epochs = 0")
        if head + body != budget or min(head, body) < 0:
            asked = f"head_epochs {head} and body_epochs {body}"
            raise PfedlaError(f"{asked} do not make up the local budget of {budget} epochs; give one of them")

    def _epochs(self) -> tuple[int, int]:
        """Return the epochs of the head and of the body."""
        budget = self.training.local_epochs
        body = self.body_epochs
        if body == "auto":
            body = (budget + 1) // 2 if self.head_epochs == "auto" else budget - self.head_epochs
        return (budget - body if self.head_epochs == "auto" else self.head_epochs), body

    def private_layers(self) -> list[int]:
        return find_private(self.private, self.task.layers)

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        head_epochs, body_epochs = self._epochs()
        first, rest = range(head_epochs), range(head_epochs, head_epochs + body_epochs)
        model = {**download.tensors, **client}
        # With the body frozen its statistics are frozen too: they must not move while the head is fitted.
        model, head_loss = sgd(self.task, model, data, self.training, epochs=first, only=client, keep_statistics=True)
        model, body_loss = sgd(self.task, model, data, self.training, epochs=rest, only=download.tensors)
        trained = len(data.order)  # a straggler may not get to the body's epochs
        head_trained = min(head_epochs, trained)
        loss = (head_trained * head_loss + (trained - head_trained) * body_loss) / trained
        return keep_and_send(client, download, model, loss)
