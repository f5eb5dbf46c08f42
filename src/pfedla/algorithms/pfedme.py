"""pFedMe: T Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1."""

from itertools import islice
from typing import ClassVar

import torch

from pfedla.algorithms.partial import PartialFedAvg, add_prefix, check_pull, strip_prefix
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Params, Payload, ServerState
from pfedla.core.optimizers import check_plain
from pfedla.core.search import Range, Space
from pfedla.core.settings import Positive, Rate
from pfedla.core.training import batches

PERSONAL = "personal/"  # before the name of a parameter: θ_i's


class PFedMe(PartialFedAvg):
    name = "pfedme"
    summary = "a model of one's own, held near the common one"
    search: ClassVar[Space] = {"penalty": Range(5, 30), "eta": Range(0.001, 0.03), "personal_lr": Range(0.001, 0.06)}
    uses_lr = False
    penalty: Rate = 15.0
    """λ, how strongly the personal model is held near the common one."""
    inner_steps: Positive = 5
    """K, gradient steps on each mini-batch."""
    eta: Rate = 0.005
    """η, the learning rate of the local copy of the common model."""
    personal_lr: Rate = 0.01
    """η_p, the learning rate of the personal model. The local learning rate of other methods is not used."""
    server_mix: Rate = 1.0
    """β, the share of the new mean in the common model."""
    equal_budget: bool = True
    """Whether a client makes as many gradient steps as in other methods, or else K times as many."""

    def check(self, num_clients: int) -> None:
        check_plain(self.name, self.training)
        check_pull(self.penalty, self.eta, rate="eta")  # w_i would jump past θ
        check_pull(self.penalty, self.personal_lr, rate="personal_lr", below=2)  # θ would diverge

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        # Departs from the paper: weighted by the number of examples; the paper takes the plain mean.
        old, mean = server["model"], super().aggregate(server, cohort, downloads, uploads)["model"]
        return {"model": {name: torch.lerp(old[name], mean[name], self.server_mix) for name in old}}

    def init_client(self) -> ClientState:
        return {**add_prefix(PERSONAL, self.share(self.task.initial())), **super().init_client()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        """Minimise F_i(w) = min_θ f_i(θ) + λ/2 |θ - w|², where ∇F_i(w) = λ(w - θ)."""
        # Departs from the paper: K steps on every K-th batch of the budget, not on each.
        stride = self.inner_steps if self.equal_budget else 1
        local, statistics, losses = download.tensors, self.task.layers.only_statistics(client), []
        theta = local  # warm within the round, from the common model at its start
        for x, y in islice(batches(data, self.training), 0, None, stride):
            for _ in range(self.inner_steps):
                gradients, loss, statistics = self.task.gradient(theta, statistics, x, y)
                slopes = {n: gradients[n] + self.penalty * (value - local[n]) for n, value in theta.items()}
                theta = {name: value - self.personal_lr * slopes[name] for name, value in theta.items()}
                losses.append(loss)
            local = {name: torch.lerp(value, theta[name], self.eta * self.penalty) for name, value in local.items()}
        state, model = {**add_prefix(PERSONAL, theta), **statistics}, {**theta, **statistics}
        return LocalResult(state, Payload(local, download.sent), model=model, loss=torch.stack(losses).mean())

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return θ_i; a client that never trained has none and uses the common model."""
        own, received = strip_prefix(PERSONAL, client), download.tensors
        theta = {name: torch.where(data.has_trained, own[name], value) for name, value in received.items()}
        return {**theta, **self.task.layers.only_statistics(client)}
