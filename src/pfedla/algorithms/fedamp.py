"""FedAMP: every client gets a mean of all clients' models in which those near its own weigh more.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1.
Names: α_k `step_size`, λ `penalty`, σ of A(x) = 1 - exp(-x/σ) `sigma`, ξ `_weights`;
u_i = Σ_j ξ_ij w_j with ξ_ij = α_k A'(|w_i - w_j|²) is `download`, min f_i(w) + λ/(2α_k) |w - u_i|² is `local_update`.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import KeepsAllModels
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload, ServerState
from pfedla.core.errors import PfedlaError
from pfedla.core.settings import Factor, Rate
from pfedla.core.training import sgd

HAS_TRAINED = "fedamp/has_trained"


class FedAMP(KeepsAllModels):
    name: ClassVar[str] = "fedamp"
    summary: ClassVar[str] = "a mean of all models, the nearer ones weighing more"

    sigma: Rate = 10.0  # the squared distance over which attention fades
    step_size: Rate = 1.0  # α_k, the same in every round
    penalty: Factor = 0.1  # λ; the pull towards the mix is λ/α_k

    def check(self, num_clients: int) -> None:
        if self.training.learning_rate * self._pull() >= 1:
            raise PfedlaError(
                f"penalty / step_size = {self._pull()} times the learning rate {self.training.learning_rate} is not below 1: "
                "every step would throw the model past the one it is pulled to"
            )

    def _pull(self) -> float:
        return self.penalty / self.step_size

    # Server

    def _weights(self, server: ServerState, ids: Tensor) -> Tensor:
        """ξ, [receivers, clients]: rows sum to one."""
        products, squares = (part.sum(1) for part in self._products(server, ids))  # of whole models
        distance = (squares[ids].unsqueeze(1) + squares - 2 * products).clamp(min=0)
        attention = self.step_size / self.sigma * torch.exp(-distance / self.sigma)
        receiver = torch.arange(len(ids))
        attention[receiver, ids] = 0.0
        # Departs from the paper: it asks for an α_k so small that no self-weight is negative; here the others are scaled down.
        attention = attention / attention.sum(1, keepdim=True).clamp(min=1.0)
        attention[receiver, ids] = (1.0 - attention.sum(1)).clamp(min=0.0)
        return attention

    def _alpha(self, server: ServerState, ids: Tensor) -> Tensor:
        return self._weights(server, ids).unsqueeze(1).expand(-1, len(self.task.layers), -1)  # the same for every layer

    # Client

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return {**initial, HAS_TRAINED: next(iter(initial.values())).new_zeros((), dtype=torch.bool)}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        # Departs from the paper: the minimum is approached by the local budget of SGD from u_i, not found.
        start = {**download.tensors, **self.task.layers.only_statistics(client)}
        model, loss = sgd(self.task, start, data, self.training, towards=download.tensors, pull=self._pull())
        state = {**model, HAS_TRAINED: torch.ones_like(client[HAS_TRAINED])}
        return LocalResult(state, Payload(self.task.layers.parameters(model), download.sent), model, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """w_i, the client's last trained model; u_i before it has trained."""
        own = {name: torch.where(client[HAS_TRAINED], client[name], value) for name, value in download.tensors.items()}
        return {**own, **self.task.layers.only_statistics(client)}
