"""FedAvg: one global model, the mean of the clients' trained models weighted by their number of examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
BatchNorm's running mean and variance are averaged like parameters; its integer counter is copied.
"""

from typing import ClassVar

import torch

from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState
from pfedla.core.layers import Params, repeat, weighted_mean
from pfedla.core.training import sgd


class FedAvg(Algorithm):
    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "one global model, the weighted mean of all"
    cannot_join: ClassVar[str] = ""

    # Server

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"model": self.task.initial()}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        sent = torch.ones(len(cohort.ids), len(self.task.layers), dtype=torch.bool)  # every layer
        return Payload(repeat(server["model"], len(sent)), sent)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return {"model": weighted_mean(uploads.tensors, cohort.num_examples)}

    # Client

    def init_client(self) -> ClientState:
        return {}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = sgd(self.task, download.tensors, data, self.training)
        return LocalResult(client=client, upload=Payload(model, download.sent), model=model, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return download.tensors
