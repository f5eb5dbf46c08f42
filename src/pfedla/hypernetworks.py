"""pFedLA's hypernetwork: a client's embedding in, its aggregation weights alpha[layer, sender] out (Eq. 4).

Written for one client as a function of its tensors; all clients' hypernetworks live in stacked tensors and one
vectorised call (or one vector-Jacobian product) serves them all. Usable on its own:

>>> import torch
>>> network = LayerWeightHypernetwork(num_senders=3, num_layers=2)
>>> tensors = network.init(num_clients=3, generator=torch.Generator().manual_seed(0))
>>> network.alpha(tensors, own=torch.arange(3))[0]  # the heads start at zero: every weight is 1/3
tensor([[0.3333, 0.3333, 0.3333],
        [0.3333, 0.3333, 0.3333]])
>>> wanted = torch.tensor([0.0, 1.0, 0.0]).expand(3, 2, 3)  # every client wants more of sender 1
>>> tensors = network.step(tensors, own=torch.arange(3), gradient=wanted, lr=0.1)
>>> network.alpha(tensors, own=torch.arange(3))[0, 0].argmax().item()
1
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vjp, vmap

from pfedla.layers import Layers
from pfedla.tree import Params, copies

TRUNK_DEPTH = 3


@dataclass(frozen=True)
class LayerWeightHypernetwork:
    """An embedding, a trunk of three Linear+ReLU, one Linear head per layer, weights normalised over the senders."""

    num_senders: int
    num_layers: int
    embedding_size: int = 100
    hidden_size: int = 100
    normalise: Literal["softmax", "relu"] = "softmax"

    @property
    def num_parameters(self) -> int:
        """Of one client: embedding, trunk, heads."""
        hidden = self.hidden_size
        trunk = hidden * (self.embedding_size + 1) + (TRUNK_DEPTH - 1) * hidden * (hidden + 1)
        return self.embedding_size + trunk + self.num_layers * self.num_senders * (hidden + 1)

    def init(self, num_clients: int, generator: torch.Generator) -> Params:
        """One draw, common to all clients: only their data break the symmetry, so renumbering clients changes nothing."""
        one: Params = {"embedding": torch.randn(self.embedding_size, generator=generator)}
        width = self.embedding_size
        for depth in range(TRUNK_DEPTH):
            bound = 1 / math.sqrt(width)  # as nn.Linear starts
            one[f"trunk{depth}.weight"] = bound * (2 * torch.rand(self.hidden_size, width, generator=generator) - 1)
            one[f"trunk{depth}.bias"] = bound * (2 * torch.rand(self.hidden_size, generator=generator) - 1)
            width = self.hidden_size
        one["heads.weight"] = torch.zeros(self.num_layers, self.num_senders, width)
        # Zero logits are uniform under softmax; ReLU needs a positive start to be uniform and alive.
        start = 0.0 if self.normalise == "softmax" else 1.0
        one["heads.bias"] = torch.full((self.num_layers, self.num_senders), start)
        return copies(one, num_clients)

    def _alpha_of_one(self, tensors: Params, own: Tensor) -> Tensor:
        hidden = tensors["embedding"]
        for depth in range(TRUNK_DEPTH):
            hidden = F.relu(F.linear(hidden, tensors[f"trunk{depth}.weight"], tensors[f"trunk{depth}.bias"]))
        logits = tensors["heads.weight"] @ hidden + tensors["heads.bias"]
        if self.normalise == "softmax":
            return logits.softmax(-1)
        return normalise_or_own(logits.relu(), own)

    def alpha(self, tensors: Params, own: Tensor) -> Tensor:
        """[clients, layers, senders] from stacked tensors; `own` holds each client's position among the senders."""
        return vmap(self._alpha_of_one)(tensors, own)

    def step(self, tensors: Params, own: Tensor, gradient: Tensor, lr: float) -> Params:
        """Move embedding and weights along the product of `gradient` = dObjective/dalpha with the Jacobian (Eq. 10-11)."""
        pull_back = vjp(lambda all_tensors: self.alpha(all_tensors, own), tensors)[1]
        (ascent,) = pull_back(gradient)
        return {name: torch.add(value, ascent[name], alpha=lr) for name, value in tensors.items()}


def normalise_or_own(weights: Tensor, own: Tensor | int) -> Tensor:
    """One client's non-negative weights [layers, senders] divided by their sum; a row of zeros is the own model's."""
    total = weights.sum(-1, keepdim=True)
    only_own = (torch.arange(weights.shape[-1], device=weights.device) == own).to(weights.dtype)
    # The inner `where` keeps 0/0 out of the gradient too.
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), only_own)


def layer_gradient(delta: Params, models: Params, layers: Layers) -> Tensor:
    """g[i, layer, j] = <delta_i, model_j> over the tensors of the layer: how a receiver's wish points at each sender.

    It is the gradient of <delta_i, sum_j alpha[i, layer, j] model_j> with respect to alpha, in one GEMM a tensor; no
    autograd through the stacked models is needed.
    """
    some = next(iter(models.values()))
    receivers, senders = len(next(iter(delta.values()))), len(some)
    gradient = some.new_zeros(receivers, len(layers), senders)
    for name, value in delta.items():
        gradient[:, layers.index[name]] += value.flatten(1) @ models[name].flatten(1).T
    return gradient
