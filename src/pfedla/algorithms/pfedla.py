"""pFedLA and HeurpFedLA: every client's model is a layer-wise mix of all clients' models, the weights learned.

Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, Algorithms 1 and 2.
Equations tied to names: Eq. 4 `_alpha`, Eq. 5-6 `mix`, Eq. 10-11 `LayerWeightHypernetwork.step`, Eq. 12 `_sent`.
"""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.func import vmap

from pfedla.algorithms.hypernetworks import (
    FreeLayerWeights,
    LayerWeightHypernetwork,
    Normalise,
    layer_gradient,
    normalise_or_own,
    unit_free,
)
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
from pfedla.core.errors import NotApplicableError, PfedlaError, check_affordable
from pfedla.core.layers import (
    append_mean_row,
    choose,
    copies,
    finite_rows,
    into_corner_,
    mix,
    mix_few,
    put_,
    take,
)
from pfedla.core.settings import Natural, Positive, Rate
from pfedla.core.training import sgd

HOLD_OUT, WISH = "hold-out", "wish."
CHUNK = 64  # clients whose weights are made at once: their hypernetworks are copied for it


class Pace(NamedTuple):
    """When alpha is learned."""

    warm_up: int  # rounds of a client before
    learning_rounds: int | Literal["all"]  # rounds of a client in which; then it stays


PACES = {"held-out": Pace(5, 10), "paper": Pace(0, "all")}


class PFedLA(Algorithm):
    name: ClassVar[str] = "pfedla"
    summary: ClassVar[str] = "per layer, a learned mix of all clients' models"
    cannot_join: ClassVar[str] = ""

    retained_layers: Natural = 0  # HeurpFedLA's k: layers of largest self-weight, kept at home
    weights: Literal["layer", "model"] = "layer"  # model: the same weights for all layers, to see what layers bring
    neighbours: Positive | Literal["all"] = "all"  # K: only the K largest weights are mixed
    hypernetwork: Literal["network", "compact"] = "network"  # compact: free logits, for many clients
    # Departs from the paper: the default is a rule of ours (docs/algorithms/pfedla.md has both measured).
    # What is "auto" is the rule's in PACES.
    rule: Literal["held-out", "paper"] = "held-out"  # how alpha is learned
    held_out: Annotated[float, Field(gt=0, le=0.9)] = 0.2  # of each client's training data, in rounds that learn from it
    warm_up: Natural | Literal["auto"] = "auto"  # rounds of a client before alpha is learned; auto: 5, rule paper 0
    learning_rounds: Positive | Literal["all", "auto"] = "auto"  # in which it is, then it stays; auto: 10, rule paper all
    hypernetwork_lr: Rate = 3.0  # of alpha's step; the paper states none
    embedding_size: Annotated[int, Field(ge=1, le=10_000)] = 100  # what the network form makes weights from
    hidden_size: Annotated[int, Field(ge=1, le=10_000)] = 100  # of the network form's trunk
    normalise: Normalise = "softmax"  # relu: the positive parts over their sum

    def check(self, num_clients: int) -> None:
        if self.retained_layers > len(self.task.layers):
            raise NotApplicableError(
                f"retained_layers = {self.retained_layers}, but the model has {len(self.task.layers)} layers: "
                + ", ".join(self.task.layers.names)
            )
        if self.neighbours != "all" and self.neighbours > num_clients:
            raise PfedlaError(f'neighbours = {self.neighbours}, but there are {num_clients} clients; use "all" or fewer')
        compact = self.model_copy(update={"hypernetwork": "compact"})
        what = f"the {self.hypernetwork} hypernetworks of {num_clients} clients"
        if self.hypernetwork == "network":
            what += f" with hidden_size = {self.hidden_size}"
        check_affordable(
            what, self.hypernetwork_numbers(num_clients),
            'hypernetwork = "compact"', compact.hypernetwork_numbers(num_clients),
        )  # fmt: skip

    # Server

    def hypernetwork_numbers(self, num_clients: int) -> int:
        return num_clients * self._hypernetwork(num_clients).num_parameters

    def _hypernetwork(self, num_clients: int) -> LayerWeightHypernetwork | FreeLayerWeights:
        num_layers = len(self.task.layers)
        if self.hypernetwork == "compact":
            return FreeLayerWeights(num_clients, num_layers, self.normalise)
        return LayerWeightHypernetwork(num_clients, num_layers, self.embedding_size, self.hidden_size, self.normalise)

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {
            "models": copies(self.task.layers.parameters(self.task.initial()), num_clients),  # Θ: everyone's last trained
            "hypernetworks": self._hypernetwork(num_clients).init(num_clients, generator(seed, "hypernetwork")),
            "progress": {"uploads": torch.zeros((), dtype=torch.int64)},
        }

    def admit(self, server: ServerState, seed: int) -> ServerState:
        """A hypernetwork as everyone's was at the start; the newcomer's weights are learned in each of its rounds."""
        count = _num_clients(server) + 1
        fresh = self._hypernetwork(count).init(count, generator(seed, "hypernetwork"))
        return {
            "models": append_mean_row(server["models"]),
            "hypernetworks": into_corner_(fresh, server["hypernetworks"]),
            "progress": {"uploads": torch.tensor(self.pace.warm_up * count)},
        }

    def _alpha(self, server: ServerState, ids: Tensor) -> Tensor:
        network = self._hypernetwork(_num_clients(server))
        pair = _never_alone(ids)
        return network.alpha(take(server["hypernetworks"], pair), pair)[: len(ids)]

    def alpha(self, server: ServerState) -> Tensor:
        return torch.cat([self._alpha(server, ids) for ids in torch.split(torch.arange(_num_clients(server)), CHUNK)])

    def _neighbours(self, alpha: Tensor, cohort: Cohort, count: int) -> tuple[Tensor, Tensor]:
        """Of every row of alpha the `count` largest weights, renormalised, and whose they are: [cohort, layers, count].

        The client itself is always the first of them.
        """
        weights, senders = [], []
        for row, client in zip(alpha, cohort.ids.tolist(), strict=True):
            rank = row.clone()
            rank[:, client] = torch.inf
            # Equal weights (the uniform start) are ordered by the seed, else everyone would mix the first K clients.
            draw = torch.rand(rank.shape, generator=generator(cohort.seed, "neighbours", cohort.round, client))
            shuffled = draw.argsort(-1)
            best = shuffled.gather(-1, rank.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True))[:, :count]
            weights.append(normalise_or_own(row.gather(-1, best), own=0))  # ReLU weights may all be zero
            senders.append(best)
        return torch.stack(weights), torch.stack(senders)

    def _sent(self, alpha: Tensor, cohort: Cohort) -> Tensor:
        """All layers but the k with the largest self-weight (Eq. 12); ties go to the layer nearest the output."""
        num_layers = alpha.shape[1]
        own = alpha[torch.arange(len(cohort.ids)), :, cohort.ids]
        from_the_output = own.flip(-1).argsort(dim=-1, descending=True, stable=True)
        retained = num_layers - 1 - from_the_output[:, : self.retained_layers]
        return torch.ones_like(own, dtype=torch.bool).scatter_(-1, retained, False)

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        alpha = self._alpha(server, cohort.ids)
        if self.neighbours == "all" or self.neighbours == alpha.shape[-1]:
            mixed = mix(alpha, server["models"], self.task.layers)
        else:
            mixed = mix_few(*self._neighbours(alpha, cohort, self.neighbours), server["models"], self.task.layers)
        # The mark is empty; its name tells the clients to hold examples out and send what these wish for.
        mark = {HOLD_OUT: torch.empty(len(cohort.ids), 0)} if self.rule == "held-out" and self._learns(server) else {}
        return Payload(mixed, self._sent(alpha, cohort), mark)

    def _learns(self, server: ServerState) -> bool:
        """Whether alpha is learned in the coming round, by how often a client has taken part on average."""
        pace, rounds = self.pace, server["progress"]["uploads"].item() / _num_clients(server)
        over = pace.learning_rounds != "all" and rounds >= pace.warm_up + pace.learning_rounds
        return rounds >= pace.warm_up and not over

    @property
    def pace(self) -> Pace:
        own = PACES[self.rule]
        return Pace(
            own.warm_up if self.warm_up == "auto" else self.warm_up,
            own.learning_rounds if self.learning_rounds == "auto" else self.learning_rounds,
        )

    def resolved_options(self) -> dict[str, object]:
        return self.pace._asdict()

    def notice(self, rounds: float) -> str:
        if rounds > self.pace.warm_up:
            return ""
        return (
            f"{self.name} learns no weights in this run: a client takes part in {rounds:g} rounds, and the first "
            f"{self.pace.warm_up} are its warm-up; use more rounds or a smaller algorithm.warm_up"
        )

    def held_out_share(self, download: Payload) -> float:
        return self.held_out if HOLD_OUT in download.extras else 0.0

    def upload_like(self, download: Payload) -> Payload:
        wish = {WISH + name: value for name, value in download.tensors.items()} if HOLD_OUT in download.extras else {}
        return Payload(download.tensors, torch.ones_like(download.sent), wish)  # a retained layer saves the download only

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        # A retained layer is the client's own, which is what it uploaded last.
        own, layers = take(server["models"], cohort.ids), self.task.layers
        choose_one = vmap(lambda sent, received, kept: choose(sent, received, kept, layers))
        return choose_one(downloads.sent, downloads.tensors, own)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        if self._learns(server):
            self._learn(server, cohort, downloads, uploads)
        put_(server["models"], cohort.ids, uploads.tensors)
        server["progress"]["uploads"] += len(cohort.ids)
        return server

    def _learn(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> None:
        layers, models, ours = self.task.layers, server["models"], self.rule == "held-out"
        if ours:
            delta = {name: uploads.extras[WISH + name] for name in uploads.tensors}
        else:
            delta = {name: value - downloads.tensors[name] for name, value in uploads.tensors.items()}
        # At the snapshot the mix was made of: with the new θ_i the self-weight would be inflated by |Δθ_i|².
        wish, sent, rate = layer_gradient(delta, models, layers), downloads.sent.unsqueeze(-1), self.hypernetwork_lr
        if ours:
            wish = unit_free(wish, delta, downloads.tensors, models, layers, downloads.sent)
            rate *= wish.shape[-1]  # the slope of a uniform softmax is one over the number of senders
        # A retained layer's mix was not used, so its weights do not move; a retained Δ would be against the wrong start.
        wish = torch.where(sent, wish, 0.0)
        if self.weights == "model":
            wish = torch.where(sent, wish.sum(1, keepdim=True), 0.0)
        pair = _never_alone(cohort.ids)
        before = take(server["hypernetworks"], pair)
        wish = wish.expand(len(pair), -1, -1)
        network = self._hypernetwork(wish.shape[-1])
        stepped = network.step(before, pair, wish, rate, tamed=ours)
        # A finite but huge upload can overflow g; that client's weights then stay as they were.
        sound = finite_rows(stepped, len(pair))[: len(cohort.ids)].nonzero().squeeze(1)
        put_(server["hypernetworks"], cohort.ids[sound], take(stepped, sound))

    # Client

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return initial if self.retained_layers else self.task.layers.only_statistics(initial)

    def init_newcomer(self, server: ServerState) -> ClientState:
        own = take(server["models"], _num_clients(server) - 1)  # where it retains layers, it starts with the server's
        return {name: own.get(name, value) for name, value in self.init_client().items()}

    def _start(self, client: ClientState, download: Payload) -> Params:
        statistics = self.task.layers.only_statistics(client)
        if not self.retained_layers:
            return {**download.tensors, **statistics}
        return {**choose(download.sent, download.tensors, client, self.task.layers), **statistics}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        start = self._start(client, download)
        model, loss = sgd(self.task, start, data, self.training)
        wish = self._wish(start, data) if HOLD_OUT in download.extras else {}
        upload = Payload(self.task.layers.parameters(model), torch.ones_like(download.sent), wish)
        return LocalResult({name: model[name] for name in client}, upload, model, loss)

    def _wish(self, start: Params, data: LocalData) -> Params:
        """Which way the start should move for the held-out examples; nowhere if there are too few for BatchNorm."""
        layers = self.task.layers
        parameters = layers.parameters(start)
        if len(data.held_out_y) < 2:
            return {WISH + name: torch.zeros_like(value) for name, value in parameters.items()}
        laid_out = {name: self.task.laid_out(value) for name, value in parameters.items()}
        gradient, _, _ = self.task.gradient(laid_out, layers.only_statistics(start), data.held_out_x, data.held_out_y)
        return {WISH + name: -value.contiguous() for name, value in gradient.items()}

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return self._start(client, download)


def _num_clients(server: ServerState) -> int:
    return len(next(iter(server["models"].values())))


def _never_alone(ids: Tensor) -> Tensor:
    """One client's hypernetwork alone would round differently than among others, so it is taken twice."""
    return ids.repeat(2) if len(ids) == 1 else ids


class HeurpFedLA(PFedLA):
    """pFedLA that keeps the most personal layers at home and saves their download (Algorithm 2)."""

    name: ClassVar[str] = "heurpfedla"
    summary: ClassVar[str] = "pFedLA with the k most personal layers kept at home"

    retained_layers: Natural = 1  # k: layers of largest self-weight, kept at home
