"""FedALA: FedAvg, but a client starts from an element-wise mix of its own model and the global one, the weights learned.

Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023, Algorithm 1.
Names: Θ is the `download`, Θ_i the unprefixed tensors of the client state, W_i those under "weight/", s `sample_share`,
p `adaptive_layers`, η `weight_lr`; Θ̂_i = Θ_i + (Θ - Θ_i) ⊙ W_i is `_start`, W_i ← clip(W_i - η∇_W f(Θ̂_i), 0, 1) is `_fit`.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.func import grad

from pfedla.algorithms.partial import SendsParameters
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import NotApplicableError
from pfedla.core.layers import finite_or
from pfedla.core.settings import Natural, Rate
from pfedla.core.training import batches, sgd

WEIGHT = "weight/"
HAS_TRAINED = "fedala/has_trained"


class FedALA(SendsParameters):
    name: ClassVar[str] = "fedala"
    summary: ClassVar[str] = "FedAvg from an element-wise mix with one's own last layers"
    personalizes_on_data: ClassVar[bool] = True

    adaptive_layers: Natural = 1  # p, counted from the output; the layers below are the global ones
    sample_share: Annotated[float, Field(gt=0, le=1)] = 0.8  # s: of the local data, to learn the weights on
    weight_lr: Rate = 1.0  # η of the weights
    # Departs from the paper: it learns the weights to convergence when it first does and then for one epoch a round; under
    # vmap all clients take the same number of steps, so it is a fixed number of epochs in every round.
    weight_epochs: Natural = 1  # over the sample, each round

    def check(self, num_clients: int) -> None:
        if self.adaptive_layers > len(self.task.layers):
            raise NotApplicableError(
                f"adaptive_layers = {self.adaptive_layers}, but the model has {len(self.task.layers)} layers: "
                + ", ".join(self.task.layers.names)
            )

    # Server: FedAvg, on all parameters

    # Client

    def _is_adaptive(self, name: str) -> bool:
        layers = self.task.layers
        return name not in layers.statistics and layers.index[name] >= len(layers) - self.adaptive_layers

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        own = {name: value for name, value in initial.items() if self._is_adaptive(name)}
        weights = {WEIGHT + name: torch.ones_like(value) for name, value in own.items()}
        never = next(iter(initial.values())).new_zeros((), dtype=torch.bool)
        return {**own, **self.task.layers.only_statistics(initial), **weights, HAS_TRAINED: never}

    def _weights(self, client: ClientState) -> Params:
        return {name.removeprefix(WEIGHT): value for name, value in client.items() if name.startswith(WEIGHT)}

    def _start(self, client: ClientState, weights: Params, download: Payload) -> Params:
        # lerp is exact at both ends: a weight of 1 is the global number, bit for bit, as in a client's first round.
        mixed = {name: torch.lerp(client[name], download.tensors[name], weight) for name, weight in weights.items()}
        return {**download.tensors, **mixed, **self.task.layers.only_statistics(client)}

    def _fit(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """The weights after `weight_epochs` over a sample of the data, the model and its statistics held fixed."""
        # The first examples of a drawn order are a random sample; two at least, BatchNorm cannot take one alone.
        count = max(2, int(self.sample_share * data.order.shape[1]))
        crops = data.crops[:1, :count] if self.training.augment else data.crops
        sample = data._replace(order=data.order[:1, :count], crops=crops)

        def objective(weights: Params, x: Tensor, y: Tensor) -> Tensor:
            start = self._start(client, weights, download)
            return self.task.loss(self.task.layers.parameters(start), self.task.layers.only_statistics(start), x, y)[0]

        weights = kept = self._weights(client)
        for _ in range(self.weight_epochs if weights else 0):
            for x, y in batches(sample, self.training):
                gradients = grad(objective)(weights, x, y)
                weights = {name: (value - self.weight_lr * gradients[name]).clamp(0, 1) for name, value in weights.items()}
        # A client that never trained has no model of its own to keep: it takes the global one, its weights stay ones.
        return {name: torch.where(client[HAS_TRAINED], value, kept[name]) for name, value in weights.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        weights = self._fit(client, download, data)
        model, loss = sgd(self.task, self._start(client, weights, download), data, self.training)
        own = {name: model[name] for name in client if name in model}
        learned = {WEIGHT + name: value for name, value in weights.items()}
        state = {**own, **learned, HAS_TRAINED: torch.ones_like(client[HAS_TRAINED])}
        return LocalResult(state, Payload(self._shared(model), download.sent), model, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Θ̂_i from which the client would train now, its weights fitted to the model it received."""
        fitted = self._start(client, self._fit(client, download, data), download)
        return finite_or(fitted, self._start(client, self._weights(client), download))
