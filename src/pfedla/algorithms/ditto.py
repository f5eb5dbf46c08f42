"""Ditto: FedAvg's global model, and beside it a personal model per client that is pulled towards it.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
Names: w is the `download`, λ `penalty`, v_k the unprefixed tensors of the client state;
v_k ← v_k - η(∇f_k(v_k) + λ(v_k - w)) is `sgd` with towards=w, pull=λ.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, add_prefix, check_pull, resolve_epochs, strip_prefix
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.settings import AUTO, Auto, Factor, Positive
from pfedla.core.training import sgd

GLOBAL = "global/"  # before the names of the statistics that belong to w; v_k has its own


class Ditto(PartialFedAvg):
    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg, and a model of one's own pulled towards it"

    penalty: Factor = 1.0
    """λ, how strongly the personal model is pulled to the global one. 0: not at all."""
    personal_epochs: Positive | Auto = AUTO
    """Epochs of the personal model. auto: the local budget, so that the client computes twice as much."""

    def check(self, num_clients: int) -> None:
        resolve_epochs("personal_epochs", self.personal_epochs, self.training)
        check_pull("penalty", self.penalty, self.training.learning_rate)

    # Server: FedAvg on all parameters.
    # Departs from the paper: Algorithm 1 takes the plain mean; with n_i weights w is our FedAvg's.

    # Client

    def init_client(self) -> ClientState:
        initial: ClientState = self.task.initial()
        return initial | add_prefix(GLOBAL, self.task.layers.only_statistics(initial))

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        personal, statistics = self.personalize(client, download, data), strip_prefix(GLOBAL, client)
        trained, _ = sgd(self.task, {**download.tensors, **statistics}, data, self.training)
        epochs = resolve_epochs("personal_epochs", self.personal_epochs, self.training)
        # Towards the w that was received, not the one just trained: Algorithm 1 reads w^t in both updates.
        w, pull = download.tensors, self.penalty
        personal, loss = sgd(self.task, personal, data, self.training, epochs=epochs, towards=w, pull=pull)
        state = personal | add_prefix(GLOBAL, {name: trained[name] for name in statistics})
        return LocalResult(state, Payload(self.share(trained), download.sent), model=personal, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return v_k: the common initial model until the client has trained once."""
        return {name: value for name, value in client.items() if not name.startswith(GLOBAL)}
