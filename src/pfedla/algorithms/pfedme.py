"""pFedMe: every client has a model of its own that is held near a common one by a quadratic penalty.

T Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1:
min_w Σ F_i(w) with F_i(w) = min_θ f_i(θ) + λ/2 |θ − w|². Names: λ `penalty`, K `inner_steps`, η `eta`, η_p `personal_lr`,
β `server_mix`; the inner problem is the loop over `inner_steps` in `local_update`, ∇F_i(w) = λ(w − θ) the step after it.
"""

from itertools import islice
from typing import ClassVar

import torch

from pfedla.algorithms.partial import SendsParameters
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Params, Payload, ServerState
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import weighted_mean
from pfedla.core.settings import Positive, Rate
from pfedla.core.training import batches

PERSONAL = "personal/"  # before the name of a parameter: θ_i's
HAS_TRAINED = "has_trained"  # whether there is a θ_i yet


class PFedMe(SendsParameters):
    name: ClassVar[str] = "pfedme"
    summary: ClassVar[str] = "a model of one's own, held near the common one"

    penalty: Rate = 15.0  # λ: how hard θ is held near the common model
    inner_steps: Positive = 5  # K, on each mini-batch
    eta: Rate = 0.005  # η, of the local copy of the common model
    personal_lr: Rate = 0.01  # η_p, of θ; the common training.learning_rate is not used
    server_mix: Rate = 1.0  # β: share of the new mean in the common model
    equal_budget: bool = True  # True: as many gradient steps as the others make; False: K times as many

    def check(self, num_clients: int) -> None:
        if self.eta * self.penalty >= 1:
            raise PfedlaError(
                f"eta {self.eta} times penalty {self.penalty} is {self.eta * self.penalty:g}, but should be below 1: "
                "the common model would jump past the personal one; lower one of them"
            )
        if self.personal_lr * self.penalty >= 2:
            raise PfedlaError(
                f"personal_lr {self.personal_lr} times penalty {self.penalty} is {self.personal_lr * self.penalty:g}, but "
                "should be below 2: the penalty alone would make the personal model diverge; lower one of them"
            )

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        # Departs from the paper: weighted by the number of examples, as FedAvg, where the paper takes the plain mean.
        mean = weighted_mean(uploads.tensors, cohort.num_examples)
        return {"model": {name: torch.lerp(value, mean[name], self.server_mix) for name, value in server["model"].items()}}

    # Client

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        theta = {PERSONAL + name: value for name, value in self.task.layers.parameters(initial).items()}
        device = next(iter(theta.values())).device
        flag = torch.zeros((), dtype=torch.bool, device=device)
        return {**theta, **self.task.layers.only_statistics(initial), HAS_TRAINED: flag}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        # Departs from the paper: all its R mini-batches take K steps each; here only every K-th of the common budget does.
        stride = self.inner_steps if self.equal_budget else 1
        local, statistics = download.tensors, self.task.layers.only_statistics(client)
        theta = local  # warm within the round, from the common model at its start
        losses = []
        for x, y in islice(batches(data, self.training), 0, None, stride):
            for _ in range(self.inner_steps):
                gradients, loss, statistics = self.task.gradient(theta, statistics, x, y)
                theta = {
                    name: value - self.personal_lr * (gradients[name] + self.penalty * (value - local[name]))
                    for name, value in theta.items()
                }
                losses.append(loss)
            local = {name: torch.lerp(value, theta[name], self.eta * self.penalty) for name, value in local.items()}
        state = {**{PERSONAL + name: value for name, value in theta.items()}, **statistics}
        state[HAS_TRAINED] = torch.ones_like(client[HAS_TRAINED])
        upload = Payload(local, download.sent)
        return LocalResult(state, upload, {**theta, **statistics}, torch.stack(losses).mean())

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        common, own = download.tensors, self.task.layers.only_statistics(client)
        # A client that never trained has no θ_i; the common model is all it knows.
        theta = {name: torch.where(client[HAS_TRAINED], client[PERSONAL + name], value) for name, value in common.items()}
        return {**theta, **own}
