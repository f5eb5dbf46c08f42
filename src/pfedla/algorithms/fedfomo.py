"""FedFomo: Zhang et al., "Personalized Federated Learning with First Order Model Optimization", ICLR 2021, sec. 3."""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pfedla.algorithms.partial import KeptModels, add_prefix, strip_prefix
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Payload, ServerState, all_sent, generator
from pfedla.core.layers import Params, put_, rows_of, take
from pfedla.core.search import Choice, Space
from pfedla.core.settings import Chance, Natural
from pfedla.core.training import evaluate, sgd

PREFIX = "candidate/"
START = "start/"  # before the name of a parameter: of the model that the last training started from


class FedFomo(KeptModels):
    name = "fedfomo"
    summary = "the own model and a few others', mixed by their held-out loss"
    personalizes_on_data = True
    search: ClassVar[Space] = {"candidates": Choice((2, 5, 10)), "validation_share": Choice((0.1, 0.2, 0.3))}
    candidates: Natural = 5
    """M, how many other clients' models each client is sent, at most all."""
    epsilon: Chance = 0.3
    """ε, the chance that a candidate is chosen at random, in the first round."""
    epsilon_decay: Chance = 0.05
    """How much is taken off ε in every round."""
    validation_share: Annotated[float, Field(gt=0, le=0.9)] = 0.2
    """Share of each client's training data that is held out to judge the candidates."""
    reference: Literal["trained", "start"] = "trained"
    """The model θ_i that candidates are compared with. trained: the client's own. start: the one that its
    last training started from, with the trained model among the candidates, as in the authors' code."""

    def held_out_share(self, download: Payload) -> float:
        return self.validation_share

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        affinity = {"affinity": torch.zeros(num_clients, num_clients)}  # [i, n]: how n has helped i
        return {**super().init_server(num_clients, seed), "affinity": affinity}

    def _choose(self, server: ServerState, cohort: Cohort) -> Tensor:
        """Return [cohort, M] ids of the models to send: drawn with probability ε, else by affinity P."""
        affinity = server["affinity"]["affinity"]
        epsilon = self.epsilon - self.epsilon_decay * (cohort.round - 1)
        choices = torch.empty(len(cohort.ids), min(self.candidates, len(affinity) - 1), dtype=torch.int64)
        for row, client in enumerate(cohort.ids.tolist()):
            draws = generator(cohort.seed, "candidates", cohort.round, client)
            shuffled = torch.randperm(len(affinity), generator=draws)  # equal affinities are ordered by the seed
            best_first = shuffled[affinity[client, shuffled].argsort(descending=True, stable=True)].tolist()
            best_first.remove(client)
            for place, at_random in enumerate(torch.rand(choices.shape[1], generator=draws) < epsilon):
                position = int(torch.randint(len(best_first), (), generator=draws)) if at_random else 0
                choices[row, place] = best_first.pop(position)
        return choices

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        """Return the candidates as extras, which always travel, and no tensors of the model."""
        candidates = take(server["models"], self._choose(server, cohort))
        return Payload({}, ~all_sent(len(cohort.ids), self.task.layers), add_prefix(PREFIX, candidates))

    def upload_like(self, download: Payload) -> Payload:
        weights = torch.empty(len(next(iter(download.extras.values()))))
        return Payload(self.share(self.task.initial()), torch.ones_like(download.sent), {"weights": weights})

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        choices = self._choose(server, cohort)  # a function of the server's state: it need not travel
        rows = server["affinity"]["affinity"][cohort.ids].scatter_add(1, choices, uploads.extras["weights"])
        put_(server["affinity"], cohort.ids, {"affinity": rows})
        return super().aggregate(server, cohort, downloads, uploads)

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return initial | (add_prefix(START, self.share(initial)) if self.reference == "start" else {})

    def _weigh(self, reference: Params, candidates: Params, data: LocalData) -> Tensor:
        """Return w_n = (L(θ_i) - L(θ_n)) / |θ_n - θ_i|: how far candidates lower the held-out loss, per distance."""
        count, held_out = len(next(iter(candidates.values()))), (data.held_out_x, data.held_out_y)
        if not count or not len(data.held_out_y):  # a client of few examples holds none out and cannot judge
            return torch.zeros(count, device=data.x.device)
        # A candidate is judged with the client's own statistics.
        losses = [evaluate(self.task, reference | take(candidates, number), *held_out)[1] for number in range(count)]
        falls = evaluate(self.task, reference, *held_out)[1] - torch.stack(losses)
        gaps = [rows_of(value - reference[name]).square() for name, value in candidates.items()]
        distance = torch.stack([gap.sum(1, dtype=falls.dtype) for gap in gaps], 1).sum(1).sqrt()
        weights = falls / torch.where(distance > 0, distance, 1.0)
        # A client that never trained has no statistics to judge with.
        able = data.has_trained if self.task.layers.statistics else True
        return torch.where((distance > 0) & weights.isfinite() & able, weights, 0.0)

    def _mix(self, client: ClientState, download: Payload, data: LocalData) -> tuple[Params, Tensor]:
        """Return θ_i + Σ max(w_n, 0)/Σ max(w, 0) (θ_n - θ_i), and the w_n of the received candidates."""
        candidates = strip_prefix(PREFIX, download.extras)
        reference = {name: value for name, value in client.items() if not name.startswith(START)}
        if self.reference == "start":
            candidates = {name: torch.cat([value, client[name][None]]) for name, value in candidates.items()}
            reference |= strip_prefix(START, client)
        weights = self._weigh(reference, candidates, data)
        total = weights.relu().sum()
        share = weights.relu() / torch.where(total > 0, total, 1.0)
        for name, value in candidates.items():
            reference[name] = reference[name] + torch.tensordot(share.to(value.dtype), value - reference[name], 1)
        return reference, weights[:-1] if self.reference == "start" else weights

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        mixed, weights = self._mix(client, download, data)
        model, loss = sgd(self.task, mixed, data, self.training)
        upload = Payload(self.share(model), torch.ones_like(download.sent), {"weights": weights.float()})
        state = model | (add_prefix(START, self.share(mixed)) if self.reference == "start" else {})
        return LocalResult(state, upload, model=model, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return self._mix(client, download, data)[0]
