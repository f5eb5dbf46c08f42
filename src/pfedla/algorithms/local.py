"""Local: every client trains its own model on its own data and never communicates. The lower bound of every table."""

from pfedla.algorithms.partial import PartialSharing
from pfedla.core.contracts import Cohort, Payload, ServerState, all_sent


class Local(PartialSharing):
    name = "local"
    summary = "each client trains alone"
    cannot_join = "it shares nothing, there is nothing to join"

    def private_layers(self) -> list[int]:
        return [*range(len(self.task.layers))]

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        return Payload({}, ~all_sent(len(cohort.ids), self.task.layers))

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return server
