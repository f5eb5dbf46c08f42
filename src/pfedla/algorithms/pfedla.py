"""pFedLA and HeurpFedLA: every client's model is a layer-wise mix of all models, with learned weights.

Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022, Algorithms 1 and 2.
Where the equations are: Eq. 4 `LayerWeightHypernetwork.alpha`, Eq. 5-6 `mix` in core/layers.py, Eq. 10-11
`layer_gradient` and `LayerWeightHypernetwork.step`, Eq. 12 `sent_layers`.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from pfedla.core.contracts import (
    Algorithm,
    ClientState,
    Cohort,
    LocalData,
    LocalResult,
    Payload,
    ServerState,
    generator,
)
from pfedla.core.errors import NotApplicableError, PfedlaError, check_affordable
from pfedla.core.layers import (
    Layers,
    Params,
    append_mean_row,
    choose,
    copies,
    finite_rows,
    inner_products,
    into_corner_,
    mix,
    mix_few,
    put_,
    take,
)
from pfedla.core.settings import Natural, Positive, Rate
from pfedla.core.training import sgd

WIDTH = 100  # of the embedding and of the trunk's layers
TRUNK_DEPTH = 3
DAMPED_TRUNK = 0.1  # learning rate of trunk and embedding in a damped step, against the heads'
CHUNK = 64  # clients whose weights are computed at once: their hypernetworks are copied for it


def layer_gradient(delta: Params, models: Params, layers: Layers) -> Tensor:
    """Return g[i, layer, j] = <delta_i, model_j> over the tensors of the layer; both arguments are stacked.

    It is the gradient of <delta_i, sum_j alpha[i, layer, j] model_j> with respect to alpha, in closed form.

    >>> layers = Layers.of(torch.nn.Linear(1, 1, bias=False))
    >>> models = {"weight": torch.tensor([[[3.0]], [[5.0]]])}
    >>> layer_gradient({"weight": torch.tensor([[[2.0]]])}, models, layers)
    tensor([[[ 6., 10.]]])
    """
    return inner_products(delta, models, layers)


@dataclass(frozen=True)
class LayerWeightHypernetwork:
    """An embedding, a trunk of three Linear+ReLU, a Linear head per layer, softmax over the senders (Eq. 4).

    All clients' hypernetworks live in stacked tensors.

    >>> network = LayerWeightHypernetwork(num_senders=3, num_layers=2)
    >>> tensors = network.init(num_clients=3, generator=torch.Generator().manual_seed(0))
    >>> network.alpha(tensors)[0]  # the heads start at zero: every weight is 1/3
    tensor([[0.3333, 0.3333, 0.3333],
            [0.3333, 0.3333, 0.3333]])
    >>> gradient = torch.tensor([0.0, 1.0, 0.0]).expand(3, 2, 3)  # more of sender 1 for every client
    >>> tensors = network.step(tensors, gradient, lr=0.1)
    >>> network.alpha(tensors)[0, 0].argmax().item()
    1
    """

    num_senders: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        """The numbers of one client's embedding, trunk and heads."""
        return WIDTH + TRUNK_DEPTH * WIDTH * (WIDTH + 1) + self.num_layers * self.num_senders * (WIDTH + 1)

    def init(self, num_clients: int, generator: torch.Generator) -> Params:
        """Draw one start for all clients (only their data break the symmetry), with heads of zero."""
        one: Params = {"embedding": torch.randn(WIDTH, generator=generator)}
        bound = 1 / math.sqrt(WIDTH)  # as nn.Linear starts
        for depth in range(TRUNK_DEPTH):
            one[f"trunk{depth}.weight"] = bound * (2 * torch.rand(WIDTH, WIDTH, generator=generator) - 1)
            one[f"trunk{depth}.bias"] = bound * (2 * torch.rand(WIDTH, generator=generator) - 1)
        heads = {
            "heads.weight": untouched_zeros(num_clients, self.num_layers, self.num_senders, WIDTH),
            "heads.bias": untouched_zeros(num_clients, self.num_layers, self.num_senders),
        }
        return copies(one, num_clients) | heads

    def alpha(self, tensors: Params) -> Tensor:
        """Return the weights [clients, layers, senders] of stacked hypernetworks."""
        return heads_of(tensors, features_of(tensors)).softmax(-1)

    def step(self, tensors: Params, gradient: Tensor, lr: float, *, damped: bool = False) -> Params:
        """Move along `gradient` = dObjective/dalpha times the Jacobian (Eq. 10-11).

        The equations leave the sign open. It is plus: an update points down the client's loss.
        `damped`: the logits move as in the compact form, trunk and embedding a tenth as fast. Otherwise the
        weights move ever faster once they move, because the trunk's output grows with the heads.
        """
        body = {name: value.detach().requires_grad_() for name, value in tensors.items() if "heads" not in name}
        traced = features_of(body)
        features, weight, bias = traced.detach(), tensors["heads.weight"], tensors["heads.bias"]
        slope = slope_of(heads_of(tensors, features), gradient)
        pull = (slope.flatten(1).unsqueeze(1) @ weight.flatten(1, 2)).squeeze(1)
        ascent = torch.autograd.grad((traced * pull).sum(), list(body.values()))
        if damped:
            share = 1 / (1 + features.square().sum(-1))  # the features multiply the step of a logit by the inverse
            slope = slope * per_client(share, slope)
            ascent = tuple(part * per_client(DAMPED_TRUNK * share, part) for part in ascent)
        moved = {name: value.detach() + lr * part for (name, value), part in zip(body.items(), ascent, strict=True)}
        # The heads' gradient is an outer product that addcmul need not hold in memory.
        moved["heads.weight"] = torch.addcmul(weight, slope.unsqueeze(-1), features[:, None, None], value=lr)
        moved["heads.bias"] = bias + lr * slope
        return moved


@dataclass(frozen=True)
class FreeLayerWeights:
    """The compact form: one free logit per (client, layer, sender) in place of the network."""

    num_senders: int
    num_layers: int

    @property
    def num_parameters(self) -> int:
        return self.num_layers * self.num_senders

    def init(self, num_clients: int, generator: torch.Generator | None = None) -> Params:
        return {"logits": untouched_zeros(num_clients, self.num_layers, self.num_senders)}

    def alpha(self, tensors: Params) -> Tensor:
        return tensors["logits"].softmax(-1)

    def step(self, tensors: Params, gradient: Tensor, lr: float, *, damped: bool = False) -> Params:
        return {"logits": tensors["logits"] + lr * slope_of(tensors["logits"], gradient)}


def features_of(tensors: Params) -> Tensor:
    """Return the trunk's output [clients, WIDTH]."""
    hidden = tensors["embedding"]
    for depth in range(TRUNK_DEPTH):
        weight, bias = tensors[f"trunk{depth}.weight"], tensors[f"trunk{depth}.bias"]
        hidden = F.relu((weight @ hidden.unsqueeze(-1)).squeeze(-1) + bias)
    return hidden


def heads_of(tensors: Params, features: Tensor) -> Tensor:
    """Return the logits [clients, layers, senders]."""
    weight, bias = tensors["heads.weight"], tensors["heads.bias"]
    return (weight.flatten(1, 2) @ features.unsqueeze(-1)).view_as(bias) + bias


def slope_of(logits: Tensor, gradient: Tensor) -> Tensor:
    """Return dObjective/dlogits from dObjective/dalpha, where alpha is the softmax of the logits."""
    alpha, gradient = logits.softmax(-1), gradient.to(logits.dtype)
    return alpha * (gradient - (alpha * gradient).sum(-1, keepdim=True))


def untouched_zeros(*shape: int) -> Tensor:
    """Return zeros that take up memory only once they are written to, unlike torch's own."""
    return torch.from_numpy(np.zeros(shape, np.float32))


def per_client(numbers: Tensor, value: Tensor) -> Tensor:
    """Return one number per client in a shape that broadcasts against a stacked value."""
    return numbers.view(-1, *[1] * (value.ndim - 1))


def nearest(alpha: Tensor, cohort: Cohort, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest weights of a row, renormalised, and their senders: [cohort, layers, count].

    The client itself is always the first of them.
    """
    weights, senders = [], []
    for row, client in zip(alpha, cohort.ids.tolist(), strict=True):
        rank = row.clone()
        rank[:, client] = torch.inf
        # Equal weights (the uniform start) are ordered by the seed; else everyone would mix the first K.
        draw = torch.rand(rank.shape, generator=generator(cohort.seed, "neighbours", cohort.round, client))
        shuffled = draw.argsort(-1)
        order = rank.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True)
        best = shuffled.gather(-1, order)[:, :count]
        chosen = row.gather(-1, best)
        total = chosen.sum(-1, keepdim=True)
        weights.append(torch.where(total > 0, chosen / total, 1.0))  # zero: K = 1 and the own weight has underflowed
        senders.append(best)
    return torch.stack(weights), torch.stack(senders)


def sent_layers(alpha: Tensor, cohort: Cohort, num_retained: int) -> Tensor:
    """Return [cohort, layers]: all layers but those with the largest self-weights (Eq. 12).

    Ties go to the layer nearest the output.
    """
    num_layers = alpha.shape[1]
    own = alpha[torch.arange(len(cohort.ids)), :, cohort.ids]
    from_the_output = own.flip(-1).argsort(dim=-1, descending=True, stable=True)
    retained = num_layers - 1 - from_the_output[:, :num_retained]
    return torch.ones_like(own, dtype=torch.bool).scatter_(-1, retained, False)


class LearnedMix(Algorithm):
    """Abstract: mix all clients' models layer by layer; a method says from what the weights are learned."""

    cannot_join: ClassVar[str] = ""
    damped: ClassVar[bool] = False  # see LayerWeightHypernetwork.step

    neighbours: Positive | Literal["all"] = "all"
    """K: mix only the K clients with the largest weights, per layer."""
    hypernetwork: Literal["network", "compact"] = "network"
    """compact: free logits in place of the network, for many clients."""
    hypernetwork_lr: Rate = 3.0
    """Learning rate of the hypernetwork. The paper does not state it."""
    weights: Literal["layer", "model"] = "layer"
    """model: the same weights for all layers, to measure what layer-wise weights contribute."""

    @property
    def num_retained(self) -> int:
        """The layers that a client retains."""
        return 0

    @abstractmethod
    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor | None:
        """Return [cohort, layers, clients], along which alpha moves; None if it stays in this round."""

    def check(self, num_clients: int) -> None:
        layers = self.task.layers.names
        if self.num_retained > len(layers):
            names = ", ".join(layers)
            raise NotApplicableError(
                f"retained_layers = {self.num_retained}, but the model has {len(layers)} layers: {names}"
            )
        if self.neighbours != "all" and self.neighbours > num_clients:
            raise PfedlaError(
                f'neighbours = {self.neighbours}, but there are {num_clients} clients; use "all" or fewer'
            )
        compact = FreeLayerWeights(num_clients, len(layers))
        check_affordable(
            f"the {self.hypernetwork} hypernetworks of {num_clients} clients",
            num_clients * self._network(num_clients).num_parameters,
            'hypernetwork = "compact"',
            num_clients * compact.num_parameters,
        )

    # Server

    def _network(self, num_clients: int) -> LayerWeightHypernetwork | FreeLayerWeights:
        form = FreeLayerWeights if self.hypernetwork == "compact" else LayerWeightHypernetwork
        return form(num_clients, len(self.task.layers))

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {
            "models": copies(self.task.layers.parameters(self.task.initial()), num_clients),  # Θ: the last trained ones
            "hypernetworks": self._network(num_clients).init(num_clients, generator(seed, "hypernetwork")),
            "progress": {"uploads": torch.zeros((), dtype=torch.int64)},  # accepted so far
        }

    def admit(self, server: ServerState, seed: int) -> ServerState:
        count = num_clients(server) + 1
        fresh = self._network(count).init(count, generator(seed, "hypernetwork"))
        return {
            "models": append_mean_row(server["models"]),
            "hypernetworks": into_corner_(fresh, server["hypernetworks"]),
            "progress": {"uploads": server["progress"]["uploads"].clone()},
        }

    def alpha(self, server: ServerState) -> Tensor:
        every = torch.arange(num_clients(server))
        return torch.cat([self._alpha(server, ids) for ids in torch.split(every, CHUNK)])

    def _alpha(self, server: ServerState, ids: Tensor) -> Tensor:
        return self._network(num_clients(server)).alpha(take(server["hypernetworks"], ids))

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        alpha, models, layers = self._alpha(server, cohort.ids), server["models"], self.task.layers
        if self.neighbours == "all" or self.neighbours == alpha.shape[-1]:
            mixed = mix(alpha, models, layers)
        else:
            mixed = mix_few(*nearest(alpha, cohort, self.neighbours), models, layers)
        return Payload(mixed, sent_layers(alpha, cohort, self.num_retained))

    def upload_like(self, download: Payload) -> Payload:
        return Payload(download.tensors, torch.ones_like(download.sent))  # a retained layer saves the download only

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        # A retained layer is the client's own, which is what it uploaded last.
        own, layers = take(server["models"], cohort.ids), self.task.layers
        choose_one = vmap(lambda sent, received, kept: choose(sent, received, kept, layers))
        started: Params = choose_one(downloads.sent, downloads.tensors, own)
        return started

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        # At the snapshot that was mixed: the new θ_i would inflate the self-weight by |Δθ_i|².
        gradient = self.gradient(server, downloads, uploads)
        stepped = None if gradient is None else self._step(server, cohort.ids, downloads.sent, gradient)
        put_(server["models"], cohort.ids, uploads.tensors)
        if stepped is not None:
            # A huge upload can overflow the gradient; that client's weights then stay as they were.
            sound = finite_rows(stepped, len(cohort.ids)).nonzero().squeeze(1)
            put_(server["hypernetworks"], cohort.ids[sound], take(stepped, sound))
        server["progress"]["uploads"] += len(cohort.ids)
        return server

    def _step(self, server: ServerState, ids: Tensor, sent: Tensor, gradient: Tensor) -> Params:
        # A retained layer's mix was not used, so its weights do not move in this round.
        used = sent.unsqueeze(-1)
        gradient = torch.where(used, gradient, 0.0)
        if self.weights == "model":
            gradient = torch.where(used, gradient.sum(1, keepdim=True), 0.0)
        network, before = self._network(gradient.shape[-1]), take(server["hypernetworks"], ids)
        return network.step(before, gradient, self.hypernetwork_lr, damped=self.damped)

    # Client

    def init_client(self) -> ClientState:
        initial: ClientState = self.task.initial()
        return initial if self.num_retained else self.task.layers.only_statistics(initial)

    def init_unseen(self, server: ServerState, initial: ClientState) -> ClientState:
        own = take(server["models"], num_clients(server) - 1)  # for the layers that it retains
        return {name: own.get(name, value) for name, value in initial.items()}

    def _start(self, client: ClientState, download: Payload) -> Params:
        layers = self.task.layers
        received = choose(download.sent, download.tensors, client, layers) if self.num_retained else download.tensors
        return {**received, **layers.only_statistics(client)}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = sgd(self.task, self._start(client, download), data, self.training)
        # Departs from the paper: clients send θ_i in place of Δθ_i, so that θ_i is exact on the server.
        upload = Payload(self.task.layers.parameters(model), torch.ones_like(download.sent))
        return LocalResult({name: model[name] for name in client}, upload, model, loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return self._start(client, download)


def gradient_of_updates(method: LearnedMix, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor:
    """Return the gradient of the paper: <Δθ_i, θ_j> per layer (Eq. 10-11).

    A retained layer's part is meaningless, and `LearnedMix` ignores it.
    """
    # Departs from the paper: the factor m_i/M of Eq. 7 is left out; it would only scale client i's own step.
    delta = {name: value - downloads.tensors[name] for name, value in uploads.tensors.items()}
    return layer_gradient(delta, server["models"], method.task.layers)


class PFedLA(LearnedMix):
    """Algorithm 1."""

    name: ClassVar[str] = "pfedla"
    summary: ClassVar[str] = "per layer, a learned mix of all clients' models"

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor:
        return gradient_of_updates(self, server, downloads, uploads)


class HeurpFedLA(LearnedMix):
    """Algorithm 2: clients retain their most personal layers, which saves the download of these."""

    name: ClassVar[str] = "heurpfedla"
    summary: ClassVar[str] = "pFedLA with the k most personal layers retained on the client"

    retained_layers: Natural = 1
    """k: the layers with the largest self-weight are not sent; the client continues with its own."""

    @property
    def num_retained(self) -> int:
        return self.retained_layers

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor:
        return gradient_of_updates(self, server, downloads, uploads)


def num_clients(server: ServerState) -> int:
    return len(next(iter(server["models"].values())))
