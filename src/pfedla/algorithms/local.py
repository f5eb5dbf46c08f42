"""Local: every client trains its own model and never communicates. The lower bound of every table."""

from typing import ClassVar

import torch

from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState
from pfedla.core.layers import Params
from pfedla.core.training import sgd


class Local(Algorithm):
    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "each client trains alone"
    cannot_join: ClassVar[str] = "it shares nothing, there is nothing to join"

    # Server

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        return Payload({}, torch.zeros(len(cohort.ids), len(self.task.layers), dtype=torch.bool))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return server

    # Client

    def init_client(self) -> ClientState:
        initial: ClientState = self.task.initial()
        return initial

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = sgd(self.task, client, data, self.training)
        return LocalResult(client=model, upload=Payload({}, download.sent), model=model, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return client
