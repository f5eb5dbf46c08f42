"""Local: every client trains its own model and never communicates. The lower bound of every table."""

from pfedla.algorithms.partial import PartialFedAvg


class Local(PartialFedAvg):
    name = "local"
    summary = "each client trains alone"
    cannot_join = "it shares nothing, there is nothing to join"

    def private_layers(self) -> list[int]:
        return [*range(len(self.task.layers))]
