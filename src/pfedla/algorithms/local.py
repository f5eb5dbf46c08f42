"""Local: every client trains its own model and never communicates. The lower bound of every table."""

from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState, all_sent
from pfedla.core.layers import Params
from pfedla.core.training import sgd


class Local(Algorithm):
    name = "local"
    summary = "each client trains alone"
    cannot_join = "it shares nothing, there is nothing to join"

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        return Payload({}, ~all_sent(len(cohort.ids), self.task.layers))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return server

    def init_client(self) -> ClientState:
        return self.task.initial()

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = sgd(self.task, client, data, self.training)
        return LocalResult(client=model, upload=Payload({}, download.sent), model=model, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return client
