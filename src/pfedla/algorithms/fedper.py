"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2."""

from pfedla.algorithms.partial import PrivateByName


class FedPer(PrivateByName):
    name = "fedper"
    summary = "a shared body, a head of one's own; trained together"
