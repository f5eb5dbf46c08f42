"""pFedLA's hypernetwork: a client's embedding in, its aggregation weights alpha[layer, sender] out (Eq. 4).

Written for one client as a function of its tensors; all clients' hypernetworks live in stacked tensors and one
vectorised call serves them all. `FreeLayerWeights` is a compact form for many clients. Usable on its own:

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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from pfedla.core.layers import Layers, Params, copies, inner_products

TRUNK_DEPTH = 3
TRUNK_SHARE = 0.1  # of the heads' rate, in a tamed step
SMALLEST_DISTANCE = 1e-4  # of models, against their length, that is more than rounding
HEADS = ("heads.weight", "heads.bias")
Normalise = Literal["softmax", "relu"]


@dataclass(frozen=True)
class LayerWeightHypernetwork:
    """An embedding, a trunk of three Linear+ReLU, one Linear head per layer, weights normalised over the senders."""

    num_senders: int
    num_layers: int
    embedding_size: int = 100
    hidden_size: int = 100
    normalise: Normalise = "softmax"

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
        weight = untouched_zeros(num_clients, self.num_layers, self.num_senders, width)
        bias = self._free().init(num_clients)["logits"]
        return {**copies(one, num_clients), **dict(zip(HEADS, (weight, bias), strict=True))}

    def _free(self) -> "FreeLayerWeights":
        """What the heads feed."""
        return FreeLayerWeights(self.num_senders, self.num_layers, self.normalise)

    def _hidden_of_one(self, tensors: Params) -> Tensor:
        hidden = tensors["embedding"]
        for depth in range(TRUNK_DEPTH):
            hidden = F.relu(F.linear(hidden, tensors[f"trunk{depth}.weight"], tensors[f"trunk{depth}.bias"]))
        return hidden

    def _logits_of_one(self, tensors: Params) -> Tensor:
        return tensors["heads.weight"] @ self._hidden_of_one(tensors) + tensors["heads.bias"]

    def alpha(self, tensors: Params, own: Tensor) -> Tensor:
        """[clients, layers, senders] from stacked tensors; `own` holds each client's position among the senders."""
        return self._free().alpha({"logits": vmap(self._logits_of_one)(tensors)}, own)

    def step(self, tensors: Params, own: Tensor, gradient: Tensor, lr: float, *, tamed: bool = False) -> Params:
        """Move embedding and weights along the product of `gradient` = dObjective/dalpha with the Jacobian (Eq. 10-11).

        `tamed`: the heads move the logits as those of the compact form would move, and trunk and embedding are a tenth as
        fast. Else the weights, once they move, move ever faster, because the trunk's output grows with the heads.
        The heads' part is written out: it is an outer product that need not be made in memory before it is added.
        """
        weight, bias = (tensors[name] for name in HEADS)
        body = {name: value.detach().requires_grad_() for name, value in tensors.items() if name not in HEADS}
        traced = vmap(self._hidden_of_one)(body)
        hidden = traced.detach()
        logits = (weight.flatten(1, 2) @ hidden.unsqueeze(-1)).view_as(bias) + bias
        slope = self._free().slope(logits, own, gradient)
        pull = (slope.flatten(1).unsqueeze(1) @ weight.flatten(1, 2)).squeeze(1)
        ascent = torch.autograd.grad((traced * pull).sum(), list(body.values()))  # of a number: a vector takes torch an import
        if tamed:
            share = 1 / (1 + hidden.square().sum(-1))  # of the rate: as much as the heads' features multiply it
            slope = slope * _along(share, slope)
            ascent = tuple(part * _along(TRUNK_SHARE * share, part) for part in ascent)
        moved = {
            name: torch.add(value.detach(), part, alpha=lr) for (name, value), part in zip(body.items(), ascent, strict=True)
        }
        moved["heads.weight"] = torch.addcmul(weight, slope.unsqueeze(-1), hidden[:, None, None], value=lr)
        moved["heads.bias"] = torch.add(bias, slope, alpha=lr)
        return moved


@dataclass(frozen=True)
class FreeLayerWeights:
    """The compact form: one free logit per (client, layer, sender) in place of the network; the same methods."""

    num_senders: int
    num_layers: int
    normalise: Normalise = "softmax"

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.num_senders

    def init(self, num_clients: int, generator: torch.Generator | None = None) -> Params:
        """Nothing is drawn: the weights start uniform."""
        logits = untouched_zeros(num_clients, self.num_layers, self.num_senders)
        # Zero logits are uniform under softmax; ReLU needs a positive start to be uniform and alive.
        return {"logits": logits if self.normalise == "softmax" else logits.fill_(1.0)}

    def _alpha_of_one(self, logits: Tensor, own: Tensor) -> Tensor:
        if self.normalise == "softmax":
            return logits.softmax(-1)
        return normalise_or_own(logits.relu(), own)

    def alpha(self, tensors: Params, own: Tensor) -> Tensor:
        return vmap(self._alpha_of_one)(tensors["logits"], own)

    def slope(self, logits: Tensor, own: Tensor, gradient: Tensor) -> Tensor:
        """dObjective/dlogits from dObjective/dalpha."""
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad((vmap(self._alpha_of_one)(leaf, own) * gradient).sum(), leaf)[0]

    def step(self, tensors: Params, own: Tensor, gradient: Tensor, lr: float, *, tamed: bool = False) -> Params:
        logits = tensors["logits"]
        return {"logits": torch.add(logits, self.slope(logits, own, gradient), alpha=lr)}


def untouched_zeros(*shape: int) -> Tensor:
    """Zeros that take up memory only where they are written to, as torch's own do not: most clients are yet to take part."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def normalise_or_own(weights: Tensor, own: Tensor | int) -> Tensor:
    """One client's non-negative weights [layers, senders] divided by their sum; a row of zeros is the own model's."""
    total = weights.sum(-1, keepdim=True)
    only_own = (torch.arange(weights.shape[-1], device=weights.device) == own).to(weights.dtype)
    # The inner `where` keeps 0/0 out of the gradient too.
    return torch.where(total > 0, weights / torch.where(total > 0, total, 1.0), only_own)


def _along(numbers: Tensor, value: Tensor) -> Tensor:
    """One number per client, against a stacked value."""
    return numbers.view(-1, *[1] * (value.ndim - 1))


def unit_free(gradient: Tensor, delta: Params, start: Params, models: Params, layers: Layers, sent: Tensor) -> Tensor:
    """`layer_gradient` [rows, layers, senders] in a unit of its row, so that one rate serves every model and data set.

    It is centred, which the weights do not feel, and divided by the length of delta_i times how far the senders' models lie
    from i's start, in the root mean square: summed over layers, about the cosine of the angle between where i wants to go
    and the way to a sender. The unit is the same for all layers that were `sent` [rows, layers]: one that matters little to
    i moves little.
    """
    length, distance, size = gradient.new_zeros(3, len(gradient))
    for name, value in models.items():  # one by one: a sum over rows at once would round by how many rows there are
        mean, counted = value.mean(0), sent[:, layers.index[name]]
        # In parts that stay in the cache, with a thousand clients fifteen times as fast as torch's own variance.
        parts = torch.split(value, max(1, 2**16 // mean.numel()))
        apart = sum(torch.linalg.vector_norm(part - mean) ** 2 for part in parts) / len(value)
        length += torch.where(counted, _squares(delta[name]), 0.0)
        distance += torch.where(counted, _squares(start[name] - mean) + apart, 0.0)
        size += torch.where(counted, _squares(start[name]), 0.0)
    # Models that differ by rounding alone, as all do before any has trained, say nothing.
    says = (length > 0) & (distance > SMALLEST_DISTANCE**2 * size)
    share = torch.where(says, 1 / torch.where(says, length.sqrt() * distance.sqrt(), 1.0), 0.0)
    return (gradient - gradient.mean(-1, keepdim=True)) * _along(share, gradient)


def _squares(stacked: Tensor) -> Tensor:
    """[rows]: the square of the length of each row."""
    return stacked.flatten(1).square().sum(1)


def layer_gradient(delta: Params, models: Params, layers: Layers) -> Tensor:
    """g[i, layer, j] = <delta_i, model_j> over the tensors of the layer: how a receiver's wish points at each sender.

    It is the gradient of <delta_i, sum_j alpha[i, layer, j] model_j> with respect to alpha; no autograd through the stacked
    models is needed. `receivers` are as those of `mix`.
    """
    return inner_products(delta, models, layers)
