"""Ditto: Li et al., "Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1."""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, add_prefix, check_pull, resolve_epochs, strip_prefix
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.search import Epochs, Range, Space
from pfedla.core.settings import AUTO, Auto, Factor, Positive
from pfedla.core.training import sgd

GLOBAL = "global/"  # before the names of the statistics that belong to w; v_k has its own


# Departs from the paper: the server's mean is FedAvg's, weighted by n_i; Algorithm 1 takes the plain mean.
class Ditto(PartialFedAvg):
    name = "ditto"
    summary = "FedAvg, and a model of one's own pulled towards it"
    search: ClassVar[Space] = {"penalty": Range(0.03, 3), "personal_epochs": Epochs()}
    penalty: Factor = 1.0
    """λ, how strongly the personal model is pulled to the global one. 0: not at all."""
    personal_epochs: Positive | Auto = AUTO
    """Epochs of the personal model. auto: the local budget, so that the client computes twice as much."""

    def check(self, num_clients: int) -> None:
        resolve_epochs("personal_epochs", self.personal_epochs, self.training)
        check_pull(self.penalty, self.training.learning_rate)

    def count_epochs(self) -> tuple[int, int]:
        budget = self.training.local_epochs  # both models are trained on the data
        return budget + len(resolve_epochs("personal_epochs", self.personal_epochs, self.training)), 0

    def init_client(self) -> ClientState:
        return self.task.initial() | add_prefix(GLOBAL, super().init_client())

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        w, statistics = download.tensors, strip_prefix(GLOBAL, client)
        trained, _ = sgd(self.task, {**w, **statistics}, data, self.training)
        epochs = resolve_epochs("personal_epochs", self.personal_epochs, self.training)
        own = self.personalize(client, download, data)
        # v_k ← v_k - η(∇f_k(v_k) + λ(v_k - w)) with the w that was received: Algorithm 1 reads w^t in both updates.
        own, loss = sgd(self.task, own, data, self.training, epochs=epochs, towards=w, pull=self.penalty)
        state = own | add_prefix(GLOBAL, {name: trained[name] for name in statistics})
        return LocalResult(state, Payload(self.share(trained), download.sent), model=own, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return v_k: the common initial model until the client has trained once."""
        return {name: value for name, value in client.items() if not name.startswith(GLOBAL)}
