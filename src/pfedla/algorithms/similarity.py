"""Similarity-weighted aggregation, per layer or per whole model: the two methods of the toy in Fig. 1 of the pFedLA paper.

Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, introduction. The weights are
computed, not learned: alpha[i, layer, j] is the cosine similarity of the parameters of clients i and j, cut at zero, each row
divided by its sum.
"""

from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import KeepsAllModels
from pfedla.core.contracts import ServerState


class LayerSimilarity(KeepsAllModels):
    name: ClassVar[str] = "layer-similarity"
    summary: ClassVar[str] = "per layer, a mix weighted by the similarity of the layers"

    def _alpha(self, server: ServerState, ids: Tensor) -> Tensor:
        products, squares = self._products(server, ids)
        lengths = squares.sqrt()
        scale = lengths[ids].unsqueeze(-1) * lengths.T
        cosine = torch.where(scale > 0, products / torch.where(scale > 0, scale, 1.0), 0.0).clamp(min=0)
        cosine[torch.arange(len(ids)), :, ids] = 1.0  # a client is like itself, also where a layer is all zero
        return cosine / cosine.sum(-1, keepdim=True)


class ModelSimilarity(LayerSimilarity):
    """One similarity for the whole model: the same weight in every layer."""

    name: ClassVar[str] = "model-similarity"
    summary: ClassVar[str] = "a mix weighted by the similarity of the whole models"

    def _products(self, server: ServerState, ids: Tensor) -> tuple[Tensor, Tensor]:
        products, squares = super()._products(server, ids)
        return products.sum(1, keepdim=True).expand_as(products), squares.sum(1, keepdim=True).expand_as(squares)
