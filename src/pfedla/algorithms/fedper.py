"""FedPer: a shared body and a head of one's own, trained together.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.
"""

from typing import ClassVar

from pfedla.algorithms.partial import PartialFedAvg, find_private


class FedPer(PartialFedAvg):
    name: ClassVar[str] = "fedper"
    summary: ClassVar[str] = "a shared body, a head of one's own; trained together"

    private: str = "head"
    """The personal layers: "head" (the last Linear layer) or names, separated by commas; "" for none."""

    def check(self, num_clients: int) -> None:
        self.private_layers()

    def private_layers(self) -> list[int]:
        return find_private(self.private, self.task.layers)
