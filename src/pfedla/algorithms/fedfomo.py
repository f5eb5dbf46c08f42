"""FedFomo: every client mixes a few other clients' models into its own, by how much each helps on held-out data.

Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, section 3.
Tied to names: w_n = (L(θ_i) - L(θ_n)) / |θ_n - θ_i| `_weights`; θ_i += Σ max(w_n, 0)/Σ max(w, 0) (θ_n - θ_i) `_mixed`;
affinity P and the ε-greedy choice of the models to send `_choices`.
"""

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from pfedla.core.contracts import (
    Algorithm,
    ClientState,
    Cohort,
    LocalData,
    LocalResult,
    Params,
    Payload,
    ServerState,
    generator,
)
from pfedla.core.layers import copies, into_corner_, put_, take
from pfedla.core.settings import Natural
from pfedla.core.training import evaluate, sgd

PREFIX = "candidate/"


class FedFomo(Algorithm):
    name: ClassVar[str] = "fedfomo"
    summary: ClassVar[str] = "the own model and a few others', mixed by their held-out loss"
    personalizes_on_data: ClassVar[bool] = True
    cannot_join: ClassVar[str] = ""

    candidates: Natural = 5  # M: other clients' models sent to each client, at most all
    epsilon: Annotated[float, Field(ge=0, le=1)] = 0.3  # share of the candidates chosen at random, in the first round
    epsilon_decay: Annotated[float, Field(ge=0, le=1)] = 0.05  # taken off in every round
    validation_share: Annotated[float, Field(gt=0, le=0.9)] = 0.2  # of each client's training data, held out

    def held_out_share(self, download: Payload) -> float:
        return self.validation_share

    # Server

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {
            "models": copies(self.task.layers.parameters(self.task.initial()), num_clients),  # everyone's last trained
            "affinity": {"affinity": torch.zeros(num_clients, num_clients)},  # P[i, n]: how much n has helped i so far
        }

    def admit(self, server: ServerState, seed: int) -> ServerState:
        fresh = self.init_server(len(server["affinity"]["affinity"]) + 1, seed)
        return {group: into_corner_(fresh[group], part) for group, part in server.items()}

    def _choices(self, server: ServerState, cohort: Cohort) -> Tensor:
        """[cohort, M] ids of the models each client is sent: a slot is drawn with probability ε, else filled by affinity."""
        affinity = server["affinity"]["affinity"]
        num_clients = len(affinity)
        count = min(self.candidates, num_clients - 1)
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * (cohort.round - 1))
        rows = []
        for client in cohort.ids.tolist():
            draws = generator(cohort.seed, "candidates", cohort.round, client)
            shuffled = torch.randperm(num_clients, generator=draws)  # equal affinities are ordered by the seed
            best_first = shuffled[affinity[client, shuffled].argsort(descending=True, stable=True)].tolist()
            best_first.remove(client)
            at_random = (torch.rand(count, generator=draws) < epsilon).tolist()
            rows.append(
                [best_first.pop(int(torch.randint(len(best_first), (), generator=draws)) if r else 0) for r in at_random]
            )
        return torch.tensor(rows, dtype=torch.int64).view(len(rows), count)

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        """No tensors: a client starts from its own model. The candidates' always travel, so they are extras."""
        candidates = take(server["models"], self._choices(server, cohort))
        nothing = torch.zeros(len(cohort.ids), len(self.task.layers), dtype=torch.bool)
        return Payload({}, nothing, {PREFIX + name: value for name, value in candidates.items()})

    def upload_like(self, download: Payload) -> Payload:
        candidates = {name.removeprefix(PREFIX): value for name, value in download.extras.items()}
        count = len(next(iter(candidates.values())))
        own = {name: value.new_empty(value.shape[1:], device="meta") for name, value in candidates.items()}
        return Payload(own, torch.ones_like(download.sent), {"weights": torch.empty(count, device="meta")})

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        return take(server["models"], cohort.ids)  # a client starts from its own model, which is what it uploaded last

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        affinity = server["affinity"]["affinity"]
        weights = uploads.extras["weights"].to(affinity.dtype)
        # The choice is a function of what is here, so it need not travel.
        rows = affinity[cohort.ids].scatter_add(1, self._choices(server, cohort), weights)
        put_(server["models"], cohort.ids, uploads.tensors)
        put_(server["affinity"], cohort.ids, {"affinity": rows})
        return server

    # Client

    def init_client(self) -> ClientState:
        return self.task.initial()

    def _weights(self, client: ClientState, candidates: Params, count: int, data: LocalData) -> Tensor:
        """[M], signed: the fall of the held-out loss from the own model to each candidate, per distance between them."""
        if not count or not len(data.held_out_y):  # a client of few examples holds none out: it cannot tell, and keeps its own
            return torch.zeros(count, device=data.x.device)
        own_loss = evaluate(self.task, client, data.held_out_x, data.held_out_y)[1]
        # A candidate is judged with the client's own statistics: they would be used with it.
        falls, squares = [], []
        for number in range(count):
            candidate = take(candidates, number)
            loss = evaluate(self.task, {**client, **candidate}, data.held_out_x, data.held_out_y)[1]
            falls.append(own_loss - loss)
            squares.append(torch.stack([(value - client[name]).square().sum() for name, value in candidate.items()]).sum())
        fall, distance = torch.stack(falls), torch.stack(squares).sqrt()
        # Equal models (all are, in the first round) are 0/0, and a broken one has no loss: neither says anything.
        weights = fall / torch.where(distance > 0, distance, 1.0)
        return torch.where((distance > 0) & weights.isfinite() & self._can_judge(client), weights, 0.0)

    def _can_judge(self, client: ClientState) -> Tensor:
        """A client that never trained has no BatchNorm statistics to judge candidates with: it keeps its own model."""
        initial = self.task.layers.only_statistics(self.task.initial())
        if not initial:
            return torch.ones((), dtype=torch.bool, device=next(iter(client.values())).device)
        return ~torch.stack([(client[name] == value.to(client[name].device)).all() for name, value in initial.items()]).all()

    def _mixed(self, client: ClientState, download: Payload, data: LocalData) -> tuple[Params, Tensor]:
        """The own model moved towards the candidates that help, and the signed weights; if none does, the own model."""
        candidates = {name.removeprefix(PREFIX): value for name, value in download.extras.items()}
        count = len(next(iter(candidates.values()), ()))
        weights = self._weights(client, candidates, count, data)
        positive = weights.relu()
        total = positive.sum()
        share = positive / torch.where(total > 0, total, 1.0)
        moved = {
            name: client[name] + torch.tensordot(share.to(value.dtype), value - client[name], 1)
            for name, value in candidates.items()
            if count
        }
        return {**client, **moved}, weights

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        mixed, weights = self._mixed(client, download, data)
        model, loss = sgd(self.task, mixed, data, self.training)
        upload = Payload(self.task.layers.parameters(model), torch.ones_like(download.sent), {"weights": weights})
        return LocalResult(model, upload, model, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return self._mixed(client, download, data)[0]
