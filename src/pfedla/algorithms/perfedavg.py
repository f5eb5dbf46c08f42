"""Per-FedAvg: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees", NeurIPS 2020, Alg. 1."""

from typing import ClassVar

import torch
from torch import Tensor

from pfedla.algorithms.partial import PartialFedAvg
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Params, Payload, ServerState
from pfedla.core.layers import finite_or
from pfedla.core.optimizers import check_plain
from pfedla.core.search import Range, Space
from pfedla.core.settings import AUTO, Auto, Factor, Rate
from pfedla.core.tasks import descend
from pfedla.core.training import batches


class PerFedAvg(PartialFedAvg):
    name = "per-fedavg"
    summary = "a common start, adapted by one step on one's own data"
    personalizes_on_data = True
    search: ClassVar[Space] = {"inner_lr": Range(0.001, 0.3)}
    inner_lr: Factor = 0.01
    """α, the learning rate of the step that adapts the common model to a client."""
    beta: Rate | Auto = AUTO
    """β, the outer learning rate. auto: the local learning rate."""
    hessian_free: bool = False
    """Whether differences of gradients stand for the Hessian, or else it is left out (first order)."""
    delta: Rate = 0.001
    """δ, the length of these differences."""
    weighted: bool = False
    """Whether the server weights clients by their number of examples; the paper takes the plain mean."""

    def check(self, num_clients: int) -> None:
        check_plain(self.name, self.training)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        weights = cohort.num_examples if self.weighted else torch.ones_like(cohort.num_examples)
        return {"model": self.average(uploads.tensors, weights)}

    def _adapt(self, w: Params, statistics: Params, batch: tuple[Tensor, Tensor]) -> Params:
        """Return w - α ∇f(w; batch); the statistics stay as they are."""
        return descend(w, self.task.gradient(w, statistics, *batch)[0], self.inner_lr)

    def _curvature(self, w: Params, statistics: Params, direction: Params, batch: tuple[Tensor, Tensor]) -> Params:
        """Return ∇²f(w; batch) g for g = `direction`, by central differences around w."""
        norm = torch.stack([value.float().square().sum() for value in direction.values()]).sum().sqrt()
        # Departs from the paper: it moves w by δg, which is far away for a large g; here by δ at most.
        step = self.delta / norm.clamp(min=1)
        moved = ({n: v + sign * (step.to(v.dtype) * direction[n]) for n, v in w.items()} for sign in (1, -1))
        ahead, behind = (self.task.gradient(there, statistics, *batch)[0] for there in moved)
        return {name: (v - behind[name]) / (2 * step).to(v.dtype) for name, v in ahead.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        """Minimise f_i(w - α ∇f_i(w)); its gradient is (I - α ∇²f(w; D'')) ∇f(w - α ∇f(w; D); D')."""
        beta = self.training.learning_rate if self.beta == "auto" else self.beta
        parameters, statistics, losses = download.tensors, client, []
        for epoch in range(len(data.order)):
            drawn = list(batches(data, self.training, range(epoch, epoch + 1)))
            for position, outer in enumerate(drawn):  # D'
                # Departs from the paper: D and D'' are the next two batches of the epoch, not drawn anew.
                inner, curved = (drawn[(position + ahead) % len(drawn)] for ahead in (1, 2))
                adapted = self._adapt(parameters, statistics, inner)
                # The statistics follow this evaluation only: such a model is deployed.
                gradients, loss, updated = self.task.gradient(adapted, statistics, *outer)
                if self.hessian_free:
                    curvature = self._curvature(parameters, statistics, gradients, curved)
                    gradients = descend(gradients, curvature, self.inner_lr)
                parameters = descend(parameters, gradients, beta)  # from w, not from the adapted model
                statistics = updated
                losses.append(loss)
        upload = Payload(parameters, download.sent)
        model = self.personalize(statistics, upload, data)
        return LocalResult(client=statistics, upload=upload, model=model, loss=torch.stack(losses).mean())

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        adapted = self._adapt(download.tensors, client, next(batches(data, self.training)))
        return {**finite_or(adapted, download.tensors), **client}  # the common model if the step diverges
