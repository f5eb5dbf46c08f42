"""Aggregation weighted by similarity, per layer or per whole model: the toy in Fig. 1 of the pFedLA paper."""

from abc import abstractmethod

import torch
from torch import Tensor

from pfedla.algorithms.partial import KeptModels
from pfedla.core.contracts import Cohort, Payload, ServerState, all_sent
from pfedla.core.layers import Layers, Params, append_mean_row, inner_products, mix, num_clients, rows_of, take


class MixedModels(KeptModels):
    """Abstract: a client gets a mix of everyone's models."""

    @abstractmethod
    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        """Return the weights of the clients `ids`, [receivers, layers, clients]; a row sums to one."""

    def alpha(self, server: ServerState) -> Tensor:
        return self.weigh(server, torch.arange(num_clients(server)))

    def admit(self, server: ServerState, seed: int) -> ServerState:
        return {**super().admit(server, seed), "models": append_mean_row(server["models"])}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        mixed = mix(self.weigh(server, cohort.ids), server["models"], self.task.layers)
        return Payload(mixed, all_sent(len(cohort.ids), self.task.layers))


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
