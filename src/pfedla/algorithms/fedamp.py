"""FedAMP: Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021, Algorithm 1."""

from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import MixedModels
from pfedla.algorithms.similarity import compare
from pfedla.core.contracts import ClientState, LocalData, Params, Payload, ServerState
from pfedla.core.search import Range, Space
from pfedla.core.settings import Factor, Rate


class FedAMP(MixedModels):
    name = "fedamp"
    summary = "a mean of all models, the nearer ones weighing more"
    search: ClassVar[Space] = {"sigma": Range(1, 1000), "penalty": Range(0.01, 1)}
    sigma: Rate = 10.0
    """σ, the squared distance over which attention fades."""
    step_size: Rate = 1.0
    """α_k, the same in every round."""
    penalty: Factor = 0.1
    """λ; the pull towards the mix is λ/α_k."""

    def pull(self) -> float:
        # Departs from the paper: min f_i(w) + λ/(2α_k) |w - u_i|² is approached by the local budget of SGD, not found.
        return self.penalty / self.step_size

    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        """Return ξ_ij = α_k A'(|w_i - w_j|²) with A(x) = 1 - exp(-x/σ), of the mix u_i = Σ_j ξ_ij w_j."""
        products, squares = (part.sum(1) for part in compare(server["models"], ids, self.task.layers))
        distance = (squares[ids].unsqueeze(1) + squares - 2 * products).clamp(min=0)
        attention = self.step_size / self.sigma * torch.exp(-distance / self.sigma)
        receiver = torch.arange(len(ids))
        attention[receiver, ids] = 0.0
        # Departs from the paper: it asks for an α_k so small that no self-weight is negative.
        attention = attention / attention.sum(1, keepdim=True).clamp(min=1.0)
        attention[receiver, ids] = (1.0 - attention.sum(1)).clamp(min=0.0)
        return attention.float().unsqueeze(1).expand(-1, len(self.task.layers), -1)  # the same for every layer

    def init_client(self) -> ClientState:
        return self.task.initial()

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return w_i, the client's last trained model; u_i before it has trained."""
        return {**client, **{n: torch.where(data.has_trained, client[n], v) for n, v in download.tensors.items()}}
