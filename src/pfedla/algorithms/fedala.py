"""FedALA: Zhang et al., "Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023."""

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from pfedla.algorithms.partial import PartialFedAvg, add_prefix, check_layers, strip_prefix
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.layers import finite_or
from pfedla.core.search import Range, Space
from pfedla.core.settings import Natural, Rate
from pfedla.core.training import batches

WEIGHT = "weight/"  # before the name of a parameter: W_i's


class FedALA(PartialFedAvg):
    name = "fedala"
    summary = "FedAvg from an element-wise mix with one's own last layers"
    personalizes_on_data = True
    search: ClassVar[Space] = {"weight_lr": Range(0.1, 10)}
    adaptive_layers: Natural = 1
    """p, how many layers are mixed, counted from the output; the layers below are the global ones."""
    sample_share: Annotated[float, Field(gt=0, le=1)] = 0.8
    """s, the share of the local data on which the weights are learned."""
    weight_lr: Rate = 1.0
    """η, the learning rate of the weights."""
    # Departs from the paper: it first learns to convergence. Under vmap all clients take the same number of steps.
    weight_epochs: Natural = 1
    """Epochs over the sample in which the weights are learned, in every round."""

    def check(self, num_clients: int) -> None:
        check_layers("adaptive_layers", self.adaptive_layers, self.task.layers)

    def init_client(self) -> ClientState:
        layers, initial = self.task.layers, self.share(self.task.initial())
        mixed = range(len(layers) - self.adaptive_layers, len(layers))
        own = {name: value for name, value in initial.items() if layers.index[name] in mixed}
        return {**own, **super().init_client(), **{WEIGHT + name: torch.ones_like(v) for name, v in own.items()}}

    def start(self, client: ClientState, download: Payload) -> Params:
        """Return Θ̂_i = Θ_i + (Θ - Θ_i) ⊙ W_i. lerp is exact at both ends: a weight of 1 is Θ, bit for bit."""
        shared, weights = download.tensors, strip_prefix(WEIGHT, client)
        mixed = {name: torch.lerp(client[name], shared[name], weight) for name, weight in weights.items()}
        return {**shared, **mixed, **self.task.layers.only_statistics(client)}

    def _fit(self, client: ClientState, download: Payload, data: LocalData) -> ClientState:
        """Return the state with W_i ← clip(W_i - η∇f(Θ̂_i) ⊙ (Θ - Θ_i), 0, 1), learned on a sample of the data."""
        # The first examples of a drawn order are a random sample; BatchNorm needs two.
        count = max(2, int(self.sample_share * data.order.shape[1]))
        sample = data._replace(order=data.order[:1, :count].expand(self.weight_epochs, -1))
        statistics, weights = self.task.layers.only_statistics(client), strip_prefix(WEIGHT, client)
        fitted, towards = client, {name: download.tensors[name] - client[name] for name in weights}
        for x, y in batches(sample, self.training) if weights else ():
            start = self.share(self.start(fitted, download))
            gradients, _, _ = self.task.gradient(start, statistics, x, y, weights)
            weights = {n: (v - self.weight_lr * gradients[n] * towards[n]).clamp(0, 1) for n, v in weights.items()}
            fitted = client | add_prefix(WEIGHT, weights)
        # A client that never trained takes the global model, and its weights stay ones.
        return {name: torch.where(data.has_trained, value, client[name]) for name, value in fitted.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        return super().local_update(self._fit(client, download, data), download, data)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        fitted = self.start(self._fit(client, download, data), download)
        return finite_or(fitted, self.start(client, download))
