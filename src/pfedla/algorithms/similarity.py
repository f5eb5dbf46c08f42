"""Aggregation weighted by similarity, per layer or per whole model: the toy in Fig. 1 of the pFedLA paper.

Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, introduction.
The weights are computed, not learned: alpha[i, layer, j] is the cosine similarity of the parameters of
clients i and j, cut at zero, each row divided by its sum.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import keep_and_send
from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState
from pfedla.core.layers import Layers, Params, append_mean_row, copies, inner_products, mix, put_, rows_of, take
from pfedla.core.training import sgd


class MixedModels(Algorithm):
    """The server keeps everyone's trained parameters; a client gets a mix. A method gives the weights."""

    cannot_join: ClassVar[str] = ""

    @abstractmethod
    def weigh(self, models: Params, ids: Tensor) -> Tensor:
        """Return the weights of the clients `ids`, [receivers, layers, clients]; a row sums to one."""

    def alpha(self, server: ServerState) -> Tensor:
        count = len(next(iter(server["models"].values())))
        return self.weigh(server["models"], torch.arange(count)).float()

    def admit(self, server: ServerState, seed: int) -> ServerState:
        return {"models": append_mean_row(server["models"])}

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"models": copies(self.task.layers.parameters(self.task.initial()), num_clients)}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        alpha = self.weigh(server["models"], cohort.ids)
        sent = torch.ones(alpha.shape[:2], dtype=torch.bool)
        return Payload(mix(alpha, server["models"], self.task.layers), sent)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        put_(server["models"], cohort.ids, uploads.tensors)
        return server

    def init_client(self) -> ClientState:
        statistics: ClientState = self.task.layers.only_statistics(self.task.initial())
        return statistics

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        trained = sgd(self.task, {**download.tensors, **client}, data, self.training)
        return keep_and_send(client, download, *trained)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return {**download.tensors, **client}


class LayerSimilarity(MixedModels):
    name: ClassVar[str] = "layer-similarity"
    summary: ClassVar[str] = "per layer, a mix weighted by the similarity of the layers"

    def weigh(self, models: Params, ids: Tensor) -> Tensor:
        return weigh_by_cosine(*compare(models, ids, self.task.layers), ids)


class ModelSimilarity(MixedModels):
    name: ClassVar[str] = "model-similarity"
    summary: ClassVar[str] = "a mix weighted by the similarity of the whole models"

    def weigh(self, models: Params, ids: Tensor) -> Tensor:
        products, squares = (part.sum(1, keepdim=True) for part in compare(models, ids, self.task.layers))
        return weigh_by_cosine(products, squares, ids).expand(-1, len(self.task.layers), -1)


def compare(models: Params, ids: Tensor, layers: Layers) -> tuple[Tensor, Tensor]:
    """Return the inner products of the models of `ids` with all, and all squared norms, in double precision.

    [receivers, layers, clients] and [clients, layers].
    """
    flat = {name: rows_of(value).double() for name, value in models.items()}
    squares = torch.zeros(len(next(iter(flat.values()))), len(layers), dtype=torch.float64)
    for name, value in flat.items():
        squares[:, layers.index[name]] += value.square().sum(1)
    return inner_products(take(flat, ids), flat, layers), squares


def weigh_by_cosine(products: Tensor, squares: Tensor, ids: Tensor) -> Tensor:
    norms = squares.sqrt()
    scale = norms[ids].unsqueeze(-1) * norms.T
    cosine = torch.where(scale > 0, products / torch.where(scale > 0, scale, 1.0), 0.0).clamp(min=0)
    cosine[torch.arange(len(ids)), :, ids] = 1.0  # a client is like itself, also where a layer is all zero
    return cosine / cosine.sum(-1, keepdim=True)
