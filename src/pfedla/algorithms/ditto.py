"""Ditto: FedAvg's global model, and beside it a personal model of every client's own that is pulled towards it.

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
Names: w is the `download`, λ `penalty`, v_k the unprefixed tensors of the client state;
v_k ← v_k - η(∇f_k(v_k) + λ(v_k - w)) is `sgd` with towards=w, pull=λ.
"""

from typing import ClassVar, Literal

from pfedla.algorithms.partial import SendsParameters
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.settings import Factor, Positive
from pfedla.core.training import sgd

GLOBAL = "global/"  # before the names of the statistics that belong to w; v_k has its own


class Ditto(SendsParameters):
    name: ClassVar[str] = "ditto"
    summary: ClassVar[str] = "FedAvg, and a model of one's own pulled towards it"

    penalty: Factor = 1.0  # λ; 0: the personal model never hears of the others
    personal_epochs: Positive | Literal["auto"] = "auto"  # of v_k; auto: as many as w gets, so twice the compute

    def check(self, num_clients: int) -> None:
        if self._personal_epochs() > self.training.local_epochs:
            raise PfedlaError(
                f"personal_epochs = {self.personal_epochs}, but the local budget is {self.training.local_epochs} epochs; "
                "give fewer, or set local_epochs"
            )
        if self.training.learning_rate * self.penalty >= 1:
            raise PfedlaError(
                f"penalty = {self.penalty} times the learning rate {self.training.learning_rate} is not below 1: "
                "every step would throw the personal model past the global one"
            )

    # Server: FedAvg, on all parameters.
    # Departs from the paper: Algorithm 1 takes the plain mean of the participants; with n_i weights w is our FedAvg's.

    # Client

    def _personal_epochs(self) -> int:
        return self.training.local_epochs if self.personal_epochs == "auto" else self.personal_epochs

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return {**initial, **{GLOBAL + name: value for name, value in self.task.layers.only_statistics(initial).items()}}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        personal = self.personalize(client, download, data)
        statistics = {name: client[GLOBAL + name] for name in self.task.layers.only_statistics(personal)}
        trained, _ = sgd(self.task, {**download.tensors, **statistics}, data, self.training)
        # Towards the w that was received, not the one just trained: Algorithm 1 reads w^t in both updates.
        personal, loss = sgd(
            self.task, personal, data, self.training, epochs=range(self._personal_epochs()), towards=download.tensors,
            pull=self.penalty,
        )  # fmt: skip
        state = {**personal, **{GLOBAL + name: trained[name] for name in statistics}}
        return LocalResult(state, Payload(self._shared(trained), download.sent), personal, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """v_k: the common initial model until the client has trained once."""
        return {name: value for name, value in client.items() if not name.startswith(GLOBAL)}
