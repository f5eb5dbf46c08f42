"""APFL: Deng et al., "Adaptive Personalized Federated Learning", 2020, Algorithm 1."""

from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import PartialFedAvg, add_prefix, strip_prefix
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.optimizers import check_plain
from pfedla.core.search import Choice, Space
from pfedla.core.settings import AUTO, Auto, Chance, Rate
from pfedla.core.tasks import descend
from pfedla.core.training import batches

PERSONAL = "personal/"  # before the names of v_i's parameters and of the mixed model's statistics
MIXING = "apfl/mixing"


# Departs from the paper: the server's mean is FedAvg's, weighted by n_i; Algorithm 1 takes the plain mean.
class APFL(PartialFedAvg):
    name = "apfl"
    summary = "a mix of one's own model and the global one"
    search: ClassVar[Space] = {"mixing": Choice((0.25, 0.5, 0.75))}
    mixing: Chance = 0.5
    """α, the share of the client's own model; if it is learned, its start."""
    adaptive: bool = True
    """Whether each client learns its α."""
    mixing_lr: Rate | Auto = AUTO
    """Learning rate of α. auto: the local learning rate."""

    def check(self, num_clients: int) -> None:
        check_plain(self.name, self.training)

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        share = next(iter(initial.values())).new_tensor(self.mixing, dtype=torch.float32)
        return {**super().init_client(), **add_prefix(PERSONAL, initial), MIXING: share}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        """Take w_i ← w_i - η∇f(w_i), v_i ← v_i - ηα_i∇f(v̄_i) and, once, α_i ← α_i - η⟨v_i - w_i, ∇f(v̄_i)⟩."""
        layers, lr = self.task.layers, self.training.learning_rate
        personal, shared, share = strip_prefix(PERSONAL, client), download.tensors, client[MIXING]
        own, own_statistics = layers.parameters(personal), layers.only_statistics(personal)
        statistics = layers.only_statistics(client)
        losses: list[Tensor] = []
        for x, y in batches(data, self.training):
            at_shared, _, statistics = self.task.gradient(shared, statistics, x, y)
            at_mixed, loss, own_statistics = self.task.gradient(interpolate(share, own, shared), own_statistics, x, y)
            at_own = {name: share.to(value.dtype) * value for name, value in at_mixed.items()}
            if self.adaptive and not losses:  # once a round, while w_i is still the global model
                slopes = [((own[n] - shared[n]) * g).sum(dtype=share.dtype) for n, g in at_mixed.items()]
                mixing_lr = lr if self.mixing_lr == "auto" else self.mixing_lr
                share = (share - mixing_lr * torch.stack(slopes).sum()).clamp(0, 1)
            shared, own = descend(shared, at_shared, lr), descend(own, at_own, lr)
            losses.append(loss)
        state = {**statistics, **add_prefix(PERSONAL, own | own_statistics), MIXING: share}
        model = {**interpolate(share, own, shared), **own_statistics}
        return LocalResult(state, Payload(shared, download.sent), model=model, loss=torch.stack(losses).mean())

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return v̄_i with the global w of the download: the model of the paper's theory, and the newest."""
        own = strip_prefix(PERSONAL, client)
        return {**own, **interpolate(client[MIXING], own, download.tensors)}


def interpolate(share: Tensor, own: Params, shared: Params) -> Params:
    """Return v̄_i = α_i v_i + (1-α_i) w_i. lerp is exact at both ends: α = 0 is w_i, α = 1 is v_i, bit for bit."""
    return {name: torch.lerp(value, own[name], share.to(value.dtype)) for name, value in shared.items()}
