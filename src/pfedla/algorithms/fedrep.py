"""FedRep: a shared representation and a head of one's own, trained in turn.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.
"""

from typing import ClassVar, Literal

from torch import Tensor, nn

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.contracts import LocalData, Params
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.settings import Natural
from pfedla.core.training import sgd


class FedRep(PartialFedAvg):
    name: ClassVar[str] = "fedrep"
    summary: ClassVar[str] = "a shared body, a head of one's own; trained in turn"

    private: str = "head"  # "head": the last Linear layer; or names of layers separated by commas; "" for none
    head_epochs: Natural | Literal["auto"] = "auto"  # auto: the local budget less the body's
    body_epochs: Natural | Literal["auto"] = "auto"  # auto: half of the local budget, rounded up

    def check(self, num_clients: int) -> None:
        head, body = self._epochs()
        if self.private_layers() and not head:
            raise NotApplicableError(
                f"FedRep trains head and body in turn, and a local budget of {self.training.local_epochs} leaves no epoch to the head"
            )
        if head + body != self.training.local_epochs or min(head, body) < 0:
            raise PfedlaError(
                f"head_epochs {head} and body_epochs {body} make {head + body}, but the local budget is "
                f"{self.training.local_epochs} epochs; give one of them, or set local_epochs"
            )

    def _epochs(self) -> tuple[int, int]:
        budget = self.training.local_epochs
        body = self.body_epochs
        if body == "auto":
            body = (budget + 1) // 2 if self.head_epochs == "auto" else budget - self.head_epochs
        return (budget - body if self.head_epochs == "auto" else self.head_epochs), body

    def private_layers(self) -> list[int]:
        layers = self.task.layers
        if self.private != "head":
            return layers.positions(name.strip() for name in self.private.split(",") if name.strip())
        linear = [layer for layer, kind in enumerate(layers.kinds) if issubclass(kind, nn.Linear)]
        if not linear:
            raise NotApplicableError("FedRep's head is the last Linear layer, and the model has none; name it with private")
        return linear[-1:]

    def _train(self, model: Params, data: LocalData) -> tuple[Params, Tensor]:
        head_epochs, body_epochs = self._epochs()
        private = set(self.private_layers())
        head = {name for name in self.task.layers.parameters(model) if self.task.layers.index[name] in private}
        body = set(self.task.layers.parameters(model)) - head
        first, rest = range(head_epochs), range(head_epochs, head_epochs + body_epochs)
        # With the body frozen its statistics are too: they must not move while the head is fitted.
        model, head_loss = sgd(self.task, model, data, self.training, epochs=first, only=head, keep_statistics=True)
        model, body_loss = sgd(self.task, model, data, self.training, epochs=rest, only=body)
        played = len(data.order)  # a straggler may not come to the body's
        head_played = min(head_epochs, played)
        return model, (head_played * head_loss + (played - head_played) * body_loss) / played
