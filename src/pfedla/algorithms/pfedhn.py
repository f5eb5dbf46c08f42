"""pFedHN: one hypernetwork on the server writes every client's weights from the client's embedding.

Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1.
Names: θ_i = h(v_i; φ) `_generate`; the gradient of φ and v_i, (∂θ_i/∂(φ, v_i))ᵀ (θ_i - θ̃_i) with θ̃_i
the trained weights, `aggregate`; the step down it `_descend`.
"""

import math
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import vjp, vmap

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.contracts import Cohort, Params, Payload, ServerState, all_sent, generator
from pfedla.core.errors import check_affordable
from pfedla.core.layers import append_mean_row, take
from pfedla.core.settings import AUTO, Auto, Factor, Rate

EMBEDDING = "embedding"


class PFedHN(PartialFedAvg):
    name: ClassVar[str] = "pfedhn"
    summary: ClassVar[str] = "one hypernetwork writes every client's weights"

    hypernetwork_lr: Rate = 0.01
    """Learning rate of the hypernetwork."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the hypernetwork's SGD."""
    weight_decay: Factor = 1e-3
    """Weight decay of the hypernetwork's SGD."""
    clip: Rate = 50.0
    """Largest norm of the gradient that one client causes."""
    embedding_size: Annotated[int, Field(ge=1, le=10_000)] | Auto = AUTO
    """Numbers in a client's embedding. auto: int(1 + N/4) for N clients."""
    hidden_size: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Width of the hypernetwork's hidden layers."""
    hidden_layers: Annotated[int, Field(ge=0, le=100)] = 3
    """Hidden layers of the hypernetwork after the first."""

    def check(self, num_clients: int) -> None:
        what = f"a hypernetwork with hidden_size = {self.hidden_size}"
        check_affordable(what, self.hypernetwork_numbers(num_clients))

    # The hypernetwork

    def hypernetwork_numbers(self, num_clients: int) -> int:
        """Return how many numbers the server keeps: embeddings, trunk, heads, and as much momentum."""
        hidden, size = self.hidden_size, self._embedding_size(num_clients)
        trunk = hidden * (size + 1) + self.hidden_layers * hidden * (hidden + 1)
        heads: int = (hidden + 1) * sum(self.task.layers.num_parameters)
        return 2 * (num_clients * size + trunk + heads)

    def _embedding_size(self, num_clients: int) -> int:
        return int(1 + num_clients / 4) if self.embedding_size == "auto" else self.embedding_size

    def _parameters(self) -> Params:
        """Return a model whose shapes are those to be written."""
        parameters: Params = self.task.layers.parameters(self.task.initial())
        return parameters

    def _linear(self, name: str, inputs: int, outputs: int, draws: torch.Generator) -> Params:
        bound = 1 / math.sqrt(inputs)  # as nn.Linear starts
        return {
            f"{name}.weight": bound * (2 * torch.rand(outputs, inputs, generator=draws) - 1),
            f"{name}.bias": bound * (2 * torch.rand(outputs, generator=draws) - 1),
        }

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        draws = generator(seed, "hypernetwork")
        size = self._embedding_size(num_clients)
        embeddings = {EMBEDDING: torch.randn(num_clients, size, generator=draws)}  # as nn.Embedding starts
        network = self._linear("trunk0", size, self.hidden_size, draws)
        for depth in range(1, self.hidden_layers + 1):
            network |= self._linear(f"trunk{depth}", self.hidden_size, self.hidden_size, draws)
        for name, value in self._parameters().items():
            network |= self._linear(f"head.{name}", self.hidden_size, value.numel(), draws)
        still = {name: torch.zeros_like(value) for name, value in {**embeddings, **network}.items()}
        return {"embeddings": embeddings, "network": network, "momentum": still}

    def admit(self, server: ServerState, seed: int) -> ServerState:
        # An unseen client starts at the mean embedding; φ stays, as in the paper.
        embeddings = append_mean_row(server["embeddings"])
        still = torch.cat([server["momentum"][EMBEDDING], torch.zeros_like(embeddings[EMBEDDING][:1])])
        momentum = server["momentum"] | {EMBEDDING: still}
        return {"embeddings": embeddings, "network": server["network"], "momentum": momentum}

    def _generate(self, network: Params, embedding: Tensor, like: Params) -> Params:
        """Return one client's weights: a trunk with ReLU between its layers, one linear head per tensor."""
        hidden = F.linear(embedding, network["trunk0.weight"], network["trunk0.bias"])
        for depth in range(1, self.hidden_layers + 1):
            hidden = F.linear(hidden.relu(), network[f"trunk{depth}.weight"], network[f"trunk{depth}.bias"])
        weights = {}
        for name, value in like.items():
            flat = F.linear(hidden, network[f"head.{name}.weight"], network[f"head.{name}.bias"])
            weights[name] = flat.view(value.shape).to(value.dtype)
        return weights

    # Server

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        network, like = server["network"], self._parameters()
        generate = vmap(lambda one: self._generate(network, one[EMBEDDING], like))
        weights = generate(take(server["embeddings"], cohort.ids))
        return Payload(weights, all_sent(len(cohort.ids), self.task.layers))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        # Departs from the paper: it visits one client a step. Here the clients of a cohort step one after the
        # other, in their order, each along the gradient at the snapshot that wrote its weights.
        like = self._parameters()
        back = {name: value - uploads.tensors[name] for name, value in downloads.tensors.items()}  # θ_i - θ̃_i
        after = {group: {name: v.clone() for name, v in part.items()} for group, part in server.items()}
        for row, client in enumerate(cohort.ids.tolist()):  # a gradient is as large as the hypernetwork
            inputs = server["network"], server["embeddings"][EMBEDDING][client]
            pull_back = vjp(lambda network, embedding: self._generate(network, embedding, like), *inputs)[1]
            network, embedding = pull_back(take(back, row))
            self._descend(after, client, {**network, EMBEDDING: embedding})
        return after

    def _descend(self, state: ServerState, client: int, gradient: Params) -> None:
        """Take one step of SGD in `state`, in place: clip, weight decay, momentum, as torch.optim.SGD."""
        norm = float(torch.stack([torch.linalg.vector_norm(value) for value in gradient.values()]).norm())
        if not math.isfinite(norm):
            return  # a finite but huge upload can overflow it; such a step is not taken
        scale = min(1.0, self.clip / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        # Departs from the paper: in its code decay and momentum move every embedding in every step; here an
        # absent client's embedding stays as it is.
        moving = {**state["network"], EMBEDDING: state["embeddings"][EMBEDDING][client]}
        momenta = {**state["momentum"], EMBEDDING: state["momentum"][EMBEDDING][client]}
        for name, value in moving.items():  # views of `state`
            momentum = momenta[name].mul_(self.momentum).add_(gradient[name], alpha=scale)
            value.sub_(momentum.add_(value, alpha=self.weight_decay), alpha=self.hypernetwork_lr)

    # Client: FedAvg's, from the generated weights; the statistics stay
