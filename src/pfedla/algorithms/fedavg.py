"""FedAvg: one global model, the mean of the clients' trained models weighted by their number of examples.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
Both sides are `PartialFedAvg` without private layers. BatchNorm's running mean and variance are averaged like
parameters; its integer counter is copied.
"""

from pfedla.algorithms.partial import PartialFedAvg


class FedAvg(PartialFedAvg):
    name = "fedavg"
    summary = "one global model, the weighted mean of all"
    sends_statistics = True
