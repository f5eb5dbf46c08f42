"""pFedHN: Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1."""

from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import vjp, vmap

from pfedla.algorithms.partial import PartialSharing, draw_linears
from pfedla.core.contracts import Cohort, Params, Payload, ServerState, all_sent, generator
from pfedla.core.errors import check_affordable
from pfedla.core.layers import take
from pfedla.core.search import Range, Space
from pfedla.core.settings import Factor, Rate

EMBEDDING = "embedding"
TRUNK_DEPTH = 4  # as in the paper's code


class PFedHN(PartialSharing):
    name = "pfedhn"
    summary = "one hypernetwork writes every client's weights"
    search: ClassVar[Space] = {"hypernetwork_lr": Range(0.001, 0.1)}
    hypernetwork_lr: Rate = 0.01
    """Learning rate of the hypernetwork."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the hypernetwork's SGD."""
    weight_decay: Factor = 1e-3
    """Weight decay of the hypernetwork's SGD."""
    clip: Rate = 50.0
    """Largest norm of the gradient that one client causes."""
    hidden_size: Annotated[int, Field(ge=1, le=10_000)] = 100
    """Width of the hypernetwork's hidden layers."""

    def check(self, num_clients: int) -> None:
        sizes = self._sizes(num_clients)
        numbers = num_clients * sizes["trunk0"][0] + sum((inputs + 1) * outputs for inputs, outputs in sizes.values())
        check_affordable(f"hidden_size = {self.hidden_size}", 2 * numbers)  # as many again are the momentum

    def _sizes(self, num_clients: int) -> dict[str, tuple[int, int]]:
        """Return the inputs and outputs of the hypernetwork's Linear layers."""
        hidden, embedding = self.hidden_size, 1 + num_clients // 4  # as in the paper's code
        trunk = {f"trunk{depth}": (hidden if depth else embedding, hidden) for depth in range(TRUNK_DEPTH)}
        heads = {f"head.{name}": (hidden, v.numel()) for name, v in self.share(self.task.initial()).items()}
        return trunk | heads

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        draws, sizes = generator(seed, "hypernetwork"), self._sizes(num_clients)
        embeddings = {EMBEDDING: torch.randn(num_clients, sizes["trunk0"][0], generator=draws)}
        network = draw_linears(sizes, draws)
        still = {name: torch.zeros_like(value) for name, value in {**embeddings, **network}.items()}
        return {"embeddings": embeddings, "network": network, "momentum": still}

    def admit(self, server: ServerState, seed: int) -> ServerState:
        # An unseen client starts at the mean embedding; φ stays, as in the paper.
        embeddings, momentum = server["embeddings"][EMBEDDING], server["momentum"]
        embeddings = torch.cat([embeddings, embeddings.mean(0, keepdim=True)])
        still = momentum | {EMBEDDING: F.pad(momentum[EMBEDDING], (0, 0, 0, 1))}
        return {**server, "embeddings": {EMBEDDING: embeddings}, "momentum": still}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        embeddings, like = server["embeddings"][EMBEDDING][cohort.ids], self.share(self.task.initial())
        written = vmap(generate, in_dims=(None, 0, None))(server["network"], embeddings, like)
        return Payload(written, all_sent(len(cohort.ids), self.task.layers))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        # Departs from the paper: it visits one client a step. Here the clients of a cohort step one after the
        # other, in their order, each along the gradient (∂θ_i/∂(φ, v_i))ᵀ (θ_i - θ̃_i) at the snapshot that wrote θ_i.
        back = {name: value - uploads.tensors[name] for name, value in downloads.tensors.items()}  # θ_i - θ̃_i
        after = {group: {name: v.clone() for name, v in part.items()} for group, part in server.items()}
        for row, client in enumerate(cohort.ids.tolist()):  # a gradient is as large as the hypernetwork
            embedding, way = server["embeddings"][EMBEDDING][client], take(back, row)
            network, embedding, _ = vjp(generate, server["network"], embedding, way)[1](way)
            self._descend(after, client, {**network, EMBEDDING: embedding})
        return after

    def _descend(self, state: ServerState, client: int, gradient: Params) -> None:
        """Take one step of SGD in `state`, in place: clip, weight decay, momentum, as torch.optim.SGD."""
        norm = torch.stack([torch.linalg.vector_norm(value) for value in gradient.values()]).norm()
        if not norm.isfinite():
            return  # a finite but huge upload can overflow it; such a step is not taken
        scale = min(1.0, self.clip / (norm.item() + 1e-6))  # as torch.nn.utils.clip_grad_norm_ has it
        # Departs from the paper: its code moves every embedding in every step; here an absent client's stays.
        moving = {**state["network"], EMBEDDING: state["embeddings"][EMBEDDING][client]}
        momenta = {**state["momentum"], EMBEDDING: state["momentum"][EMBEDDING][client]}
        for name, value in moving.items():  # views of `state`
            momentum = momenta[name].mul_(self.momentum).add_(gradient[name], alpha=scale)
            value.sub_(momentum.add_(value, alpha=self.weight_decay), alpha=self.hypernetwork_lr)


def generate(network: Params, embedding: Tensor, like: Params) -> Params:
    """Return θ_i = h(v_i; φ): a trunk with ReLU between its layers, one linear head per tensor of `like`."""
    hidden = F.linear(embedding, network["trunk0.weight"], network["trunk0.bias"])
    for depth in range(1, TRUNK_DEPTH):
        hidden = F.linear(hidden.relu(), network[f"trunk{depth}.weight"], network[f"trunk{depth}.bias"])
    flat = {name: F.linear(hidden, network[f"head.{name}.weight"], network[f"head.{name}.bias"]) for name in like}
    return {name: flat[name].view(value.shape).to(value.dtype) for name, value in like.items()}
