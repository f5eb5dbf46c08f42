"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021."""

from typing import ClassVar

from pfedla.algorithms.partial import PrivateByName, Trained, resolve_epochs
from pfedla.core.contracts import LocalData, Params
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.search import Epochs, Space
from pfedla.core.settings import AUTO, Auto, Natural
from pfedla.core.training import sgd


class FedRep(PrivateByName):
    name = "fedrep"
    summary = "a shared body, a head of one's own; trained in turn"
    search: ClassVar[Space] = {"head_epochs": Epochs(spare=1)}  # one at least for the body
    head_epochs: Natural | Auto = AUTO
    """Epochs of the head; the rest of the local budget trains the body. auto: half, rounded down."""

    def check(self, num_clients: int) -> None:
        head, private = self._count_head_epochs(), self.private_layers()
        resolve_epochs("head_epochs", head, self.training)
        if private and not head:
            raise NotApplicableError(f"local_epochs = {self.training.local_epochs} leaves no epoch to the head")
        if head and not private:
            raise PfedlaError(f"head_epochs = {head}, but no layer is private; set head_epochs = 0")

    def _count_head_epochs(self) -> int:
        return self.training.local_epochs // 2 if self.head_epochs == "auto" else self.head_epochs

    def train(self, start: Params, received: Params, data: LocalData) -> Trained:
        count = self._count_head_epochs()
        first, rest, head = range(count), range(count, self.training.local_epochs), start.keys() - received
        # With the body frozen its statistics are frozen too: they must not move while the head is fitted.
        model, head_loss = sgd(self.task, start, data, self.training, epochs=first, only=head, keep_statistics=True)
        model, body_loss = sgd(self.task, model, data, self.training, epochs=rest, only=received)
        trained = len(data.order)  # a straggler may not get to the body's epochs
        head_trained = min(count, trained)
        return model, (head_trained * head_loss + (trained - head_trained) * body_loss) / trained
