"""Per-FedAvg: a common start from which one gradient step on a client's own data makes its model.

Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach",
NeurIPS 2020, Algorithm 1: min_w Σ f_i(w − α ∇f_i(w)). Names: α `inner_lr`, β `beta`, δ `delta`; the inner step is
`_adapted`, the step of the meta-gradient (I − α ∇²f(w; D'')) ∇f(w − α ∇f(w; D); D') is in `local_update`, its
Hessian-vector product is `_curvature`.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pfedla.algorithms.partial import SendsParameters
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Params, Payload, ServerState
from pfedla.core.layers import finite_or, weighted_mean
from pfedla.core.settings import Factor, Rate
from pfedla.core.training import batches

Batch = tuple[Tensor, Tensor]


class PerFedAvg(SendsParameters):
    name: ClassVar[str] = "per-fedavg"
    summary: ClassVar[str] = "a common start, adapted by one step on one's own data"
    personalizes_on_data: ClassVar[bool] = True

    # Not `alpha`: Algorithm.alpha are the learned weights of pFedLA.
    inner_lr: Factor = 0.01  # α, of the step that adapts
    beta: Rate | Literal["auto"] = "auto"  # outer rate; auto: training.learning_rate
    hessian_free: bool = False  # False: first order, the Hessian is left out
    delta: Rate = 0.001  # δ, of the Hessian-free difference
    weighted: bool = False  # True: FedAvg's weights n_i in place of the paper's plain mean

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        weights = cohort.num_examples if self.weighted else torch.ones_like(cohort.num_examples)
        return {"model": weighted_mean(uploads.tensors, weights)}

    # Client

    def _adapted(self, parameters: Params, statistics: Params, batch: Batch) -> Params:
        """w − α ∇f(w; batch); the statistics are left as they are."""
        gradients, _, _ = self.task.gradient(parameters, statistics, *batch)
        return self.task.descended(parameters, gradients, self.inner_lr)

    def _curvature(self, parameters: Params, statistics: Params, direction: Params, batch: Batch) -> Params:
        """∇²f(w; batch) g for g = `direction`, by central differences around w."""
        norm = torch.stack([value.square().sum() for value in direction.values()]).sum().sqrt()
        # Departs from the paper: it moves w by δg, which for a large g is far away (and then NaN); here by δ at most.
        step = self.delta / norm.clamp(min=1)
        moved = ({n: value + sign * step * direction[n] for n, value in parameters.items()} for sign in (1, -1))
        ahead, behind = (self.task.gradient(there, statistics, *batch)[0] for there in moved)
        return {name: (value - behind[name]) / (2 * step) for name, value in ahead.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        beta = self.training.learning_rate if self.beta == "auto" else self.beta
        parameters, statistics = download.tensors, client
        losses = []
        for outer, inner, curved in self._triples(data):
            adapted = self._adapted(parameters, statistics, inner)
            # The statistics follow this evaluation only: it is of the kind of model that is deployed, once a step.
            gradients, loss, updated = self.task.gradient(adapted, statistics, *outer)
            step = gradients
            if self.hessian_free:
                curvature = self._curvature(parameters, statistics, gradients, curved)
                step = {name: torch.add(value, curvature[name], alpha=-self.inner_lr) for name, value in gradients.items()}
            # From w, not from the adapted model.
            parameters = self.task.descended(parameters, step, beta)
            statistics = updated
            losses.append(loss)
        model = self.personalize(statistics, Payload(parameters, download.sent), data)
        return LocalResult(statistics, Payload(parameters, download.sent), model, torch.stack(losses).mean())

    def _triples(self, data: LocalData) -> Iterator[tuple[Batch, Batch, Batch]]:
        """(D', D, D'') of every local step: D' is the batch of the common budget, D and D'' the two after it in its epoch."""
        # Departs from the paper: the three are drawn without replacement, and coincide where an epoch has too few batches.
        for epoch in range(len(data.order)):
            drawn = list(batches(data, self.training, range(epoch, epoch + 1)))
            for position, batch in enumerate(drawn):
                yield batch, drawn[(position + 1) % len(drawn)], drawn[(position + 2) % len(drawn)]

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        first = next(batches(data, self.training))
        adapted = self._adapted(download.tensors, client, first)
        return {**finite_or(adapted, download.tensors), **client}  # who breaks the model by adapting it does without
