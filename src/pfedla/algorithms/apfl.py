"""APFL: every client mixes a model of its own with the global one; the share of its own may be learned.

Deng et al., "Adaptive Personalized Federated Learning", 2020, Algorithm 1.
Names: α_i `mixing`, v_i the tensors under "personal/", w_i starts each round as the `download`;
v̄_i = α_i v_i + (1-α_i) w_i is `_mix`, w_i ← w_i - η∇f(w_i), v_i ← v_i - ηα_i∇f(v̄_i) and
α_i ← α_i - η⟨v_i - w_i, ∇f(v̄_i)⟩ are `local_update`.
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pfedla.algorithms.partial import SendsParameters
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.settings import Positive, Rate
from pfedla.core.training import batches

PERSONAL = "personal/"  # before the names of v_i's parameters and of the mixed model's statistics; w_i's have no prefix
MIXING = "apfl/mixing"


class APFL(SendsParameters):
    name: ClassVar[str] = "apfl"
    summary: ClassVar[str] = "a mix of one's own model and the global one"

    mixing: Annotated[float, Field(ge=0, le=1)] = 0.5  # α: the share of the own model, to begin with if it is learned
    adaptive: bool = True  # whether α_i is learned
    mixing_lr: Rate | Literal["auto"] = "auto"  # of α_i; auto: training.learning_rate
    joint_epochs: Positive | Literal["auto"] = "auto"  # auto: the local budget, at two gradients a step

    def check(self, num_clients: int) -> None:
        if self.joint_epochs != "auto" and self.joint_epochs > self.training.local_epochs:
            raise PfedlaError(
                f"joint_epochs = {self.joint_epochs}, but the local budget is {self.training.local_epochs} epochs; "
                "give fewer, or set local_epochs"
            )

    # Server: FedAvg, on all parameters.
    # Departs from the paper: Algorithm 1 takes the plain mean of the participants; with n_i weights w is our FedAvg's.

    # Client

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        share = next(iter(self.task.layers.parameters(initial).values())).new_tensor(self.mixing)
        own = {PERSONAL + name: value for name, value in initial.items()}
        return {**self.task.layers.only_statistics(initial), **own, MIXING: share}

    def _own(self, client: ClientState) -> Params:
        return {name.removeprefix(PERSONAL): value for name, value in client.items() if name.startswith(PERSONAL)}

    def _mix(self, share: Tensor, own: Params, shared: Params) -> Params:
        # lerp is exact at both ends: α = 0 is w_i and α = 1 is v_i, bit for bit.
        return {name: torch.lerp(value, own[name], share) for name, value in shared.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        layers, lr = self.task.layers, self.training.learning_rate
        mixing_lr = lr if self.mixing_lr == "auto" else self.mixing_lr
        own, shared = layers.parameters(self._own(client)), layers.parameters(download.tensors)
        own_statistics, statistics = layers.only_statistics(self._own(client)), layers.only_statistics(client)
        share = client[MIXING]
        losses: list[Tensor] = []
        gradient = self.task.gradient
        for x, y in batches(data, self.training, None if self.joint_epochs == "auto" else range(self.joint_epochs)):
            at_shared, _, statistics = gradient(shared, statistics, x, y)
            at_mixed, loss, own_statistics = gradient(self._mix(share, own, shared), own_statistics, x, y)
            next_share = share
            if self.adaptive and not losses:  # once a round, at its first batch, where w_i is still the global model
                slope = torch.stack([((own[name] - shared[name]) * value).sum() for name, value in at_mixed.items()]).sum()
                next_share = (share - mixing_lr * slope).clamp(0, 1)
            shared = {name: torch.add(value, at_shared[name], alpha=-lr) for name, value in shared.items()}
            own = {name: torch.add(value, share * at_mixed[name], alpha=-lr) for name, value in own.items()}
            share = next_share
            losses.append(loss)
        personal = {PERSONAL + name: value for name, value in {**own, **own_statistics}.items()}
        mixed = {**self._mix(share, own, shared), **own_statistics}
        state = {**statistics, **personal, MIXING: share}
        return LocalResult(state, Payload(shared, download.sent), mixed, torch.stack(losses).mean())

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """v̄_i with the global w of the download: what the paper's theory is about, and the newest there is."""
        own = self._own(client)
        mixed = self._mix(client[MIXING], own, self.task.layers.parameters(download.tensors))
        return {**mixed, **self.task.layers.only_statistics(own)}
