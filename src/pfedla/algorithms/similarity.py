"""Aggregation weighted by similarity, per layer or per whole model: the toy in Fig. 1 of the pFedLA paper."""

import torch
from torch import Tensor

from pfedla.algorithms.partial import MixedModels
from pfedla.core.contracts import ServerState
from pfedla.core.layers import Layers, Params, inner_products, rows_of, take


class LayerSimilarity(MixedModels):
    name = "layer-similarity"
    summary = "per layer, a mix weighted by the similarity of the layers"

    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        return weigh_by_cosine(*compare(server["models"], ids, self.task.layers), ids)


class ModelSimilarity(MixedModels):
    name = "model-similarity"
    summary = "a mix weighted by the similarity of the whole models"

    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        products, squares = (part.sum(1, keepdim=True) for part in compare(server["models"], ids, self.task.layers))
        return weigh_by_cosine(products, squares, ids).expand(-1, len(self.task.layers), -1)


def weigh_by_cosine(products: Tensor, squares: Tensor, ids: Tensor) -> Tensor:
    """Return the cosine similarities of the clients `ids` and all others, cut at zero, each row divided by its sum."""
    scale = squares[ids].sqrt().unsqueeze(-1) * squares.sqrt().T
    cosine = torch.where(scale > 0, products / torch.where(scale > 0, scale, 1.0), 0.0).clamp(min=0)
    cosine[torch.arange(len(ids)), :, ids] = 1.0  # a client is like itself, also where a layer is all zero
    return (cosine / cosine.sum(-1, keepdim=True)).float()


def compare(models: Params, ids: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """Return inner products [ids, layers, clients] and squared norms [clients, layers], in double precision."""
    flat = {name: rows_of(value).double() for name, value in models.items()}
    squares = torch.zeros(len(next(iter(flat.values()))), len(layers), dtype=torch.float64)
    for name, value in flat.items():
        squares[:, layers.index[name]] += value.square().sum(1)
    return inner_products(take(flat, ids), flat, layers), squares
