"""What methods have in common: layers that stay at home, parameters that all travel, servers that keep everyone's model."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from pfedla.core.contracts import (
    Algorithm,
    ClientState,
    Cohort,
    LocalData,
    LocalResult,
    Params,
    Payload,
    ServerState,
    all_sent,
)
from pfedla.core.layers import append_mean_row, copies, inner_products, mix, put_, repeat, take, weighted_mean
from pfedla.core.training import sgd


class PartialFedAvg(Algorithm):
    """A method says which layers are private and, if it differs, how a client trains."""

    cannot_join: ClassVar[str] = ""  # a newcomer trains what is private

    @abstractmethod
    def private_layers(self) -> list[int]: ...

    def _sent(self) -> Tensor:
        sent = torch.ones(len(self.task.layers), dtype=torch.bool)
        sent[self.private_layers()] = False
        return sent

    def _is_private(self, name: str) -> bool:
        """A private layer's tensors, and all statistics: they belong to the client's data."""
        return name in self.task.layers.statistics or self.task.layers.index[name] in self.private_layers()

    def _shared(self, tensors: Params) -> Params:
        return {name: value for name, value in tensors.items() if not self._is_private(name)}

    # Server: FedAvg on what is shared

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"model": self._shared(self.task.initial())}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        count = len(cohort.ids)
        return Payload(repeat(server["model"], count), self._sent().expand(count, -1))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return {"model": weighted_mean(uploads.tensors, cohort.num_examples)}

    # Client

    def init_client(self) -> ClientState:
        return {name: value for name, value in self.task.initial().items() if self._is_private(name)}

    def _train(self, model: Params, data: LocalData) -> tuple[Params, Tensor]:
        return sgd(self.task, model, data, self.training)

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = self._train({**download.tensors, **client}, data)
        private = {name: model[name] for name in client}
        return LocalResult(private, Payload(self._shared(model), download.sent), model, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return {**download.tensors, **client}


class SendsParameters(PartialFedAvg):
    """All parameters travel, BatchNorm's statistics stay at home; on the server FedAvg, unless a method says otherwise."""

    def private_layers(self) -> list[int]:
        return []


class KeepsAllModels(SendsParameters):
    """The server keeps everyone's last trained parameters and mixes them by weights that it computes from them."""

    @abstractmethod
    def _alpha(self, server: ServerState, ids: Tensor) -> Tensor:
        """[receivers, layers, clients], rows summing to one."""

    def alpha(self, server: ServerState) -> Tensor:
        return self._alpha(server, torch.arange(len(next(iter(server["models"].values()))))).float()

    def _products(self, server: ServerState, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Inner products of the models of `ids` with all, [receivers, layers, clients], and the squared lengths of all,
        [clients, layers]; in double, as what is made of them are differences and quotients."""
        layers = self.task.layers
        models = {name: value.flatten(1).double() for name, value in server["models"].items()}
        squares = torch.zeros(len(next(iter(models.values()))), len(layers), dtype=torch.float64)
        for name, value in models.items():
            squares[:, layers.index[name]] += value.square().sum(1)
        return inner_products(take(models, ids), models, layers), squares

    def admit(self, server: ServerState, seed: int) -> ServerState:
        return {"models": append_mean_row(server["models"])}

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"models": copies(self.task.layers.parameters(self.task.initial()), num_clients)}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        mixed = mix(self._alpha(server, cohort.ids), server["models"], self.task.layers)
        return Payload(mixed, all_sent(len(cohort.ids), self.task.layers))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        put_(server["models"], cohort.ids, uploads.tensors)
        return server
