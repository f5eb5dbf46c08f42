"""pFedLA, HeurpFedLA: Ma et al., "Layer-wised Model Aggregation for Personalized Federated Learning", CVPR 2022."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import vjp, vmap

from pfedla.algorithms.partial import MixedModels, check_layers, draw_linears
from pfedla.core.contracts import ClientState, Cohort, Params, Payload, ServerState, generator
from pfedla.core.errors import PfedlaError, check_affordable
from pfedla.core.layers import (
    choose,
    finite_rows,
    inner_products,
    mix,
    mix_few,
    num_clients,
    put_,
    replace_rows,
    row_norms,
    stack,
    take,
)
from pfedla.core.search import Range, Space
from pfedla.core.settings import Natural, Positive, Rate

WIDTH = 100  # of the embedding and of the trunk's layers
TRUNK_DEPTH = 3
DAMPED_TRUNK = 0.1  # learning rate of trunk and embedding in a damped step, against the heads'
FAR = 3.0  # a model so many times as long as is usual is left out; of honest clients none was longer than 1.5 times
CHUNK = 64  # clients whose weights are computed at once: their hypernetworks are copied for it
# In a download, if keep_below is set. The server's copy of a client's layer may be old, so the server mixes the others'
# and the client adds its own, times its self-weight.
OWN, KEEP = "own weight", "keep"  # by layer: the self-weight; whether the layer is not uploaded in this round
# g[i, layer, j] = <delta_i, model_j> is the gradient of <delta_i, sum_j alpha[i, layer, j] model_j> by alpha.
layer_gradient = inner_products


@dataclass(frozen=True)
class LayerWeightHypernetwork:
    """An embedding, a trunk of three Linear+ReLU, a Linear head per layer, softmax over the senders (Eq. 4).

    All clients' networks live in stacked tensors. The compact form is one free logit per client, layer and sender.

    >>> network = LayerWeightHypernetwork(num_senders=3, num_layers=2)
    >>> tensors = network.init(num_clients=3, generator=torch.Generator().manual_seed(0))
    >>> network.alpha(tensors)[0, 0]  # the heads start at zero: every weight is 1/3
    tensor([0.3333, 0.3333, 0.3333])
    >>> gradient = torch.tensor([0.0, 1.0, 0.0]).expand(3, 2, 3)  # more of sender 1 for every client
    >>> network.alpha(network.step(tensors, gradient, lr=0.1))[0, 0].argmax().item()
    1
    """

    num_senders: int
    num_layers: int
    compact: bool = False

    @property
    def num_parameters(self) -> int:  # of one client
        logits = self.num_layers * self.num_senders
        return logits if self.compact else WIDTH + TRUNK_DEPTH * WIDTH * (WIDTH + 1) + logits * (WIDTH + 1)

    def init(self, num_clients: int, generator: torch.Generator) -> Params:
        """Draw one start for all clients (only their data break the symmetry), with logits of zero."""
        shape = num_clients, self.num_layers, self.num_senders
        zeros = {"logits": shape} if self.compact else {"heads.weight": (*shape, WIDTH), "heads.bias": shape}
        # Of numpy, because they take up memory only once they are written to, unlike torch's.
        heads = {name: torch.from_numpy(np.zeros(size, np.float32)) for name, size in zeros.items()}
        if self.compact:
            return heads
        body = {"embedding": torch.randn(WIDTH, generator=generator)}
        body |= draw_linears({f"trunk{depth}": (WIDTH, WIDTH) for depth in range(TRUNK_DEPTH)}, generator)
        return stack([body] * num_clients) | heads

    def alpha(self, tensors: Params, senders: Tensor | None = None) -> Tensor:
        """Return the weights [clients, layers, senders]; of some senders only, if a mask of them is given."""
        logits = tensors["logits"] if self.compact else apply_heads(tensors, apply_trunk(tensors))
        return (logits if senders is None else logits.masked_fill(~senders, -torch.inf)).softmax(-1)

    def step(self, tensors: Params, gradient: Tensor, lr: float, *, damped: bool = False) -> Params:
        """Move along `gradient` = dObjective/dalpha times the Jacobian (Eq. 10-11)."""
        # The equations leave the sign open. It is plus: an update points down the client's loss.
        if self.compact:
            return {"logits": tensors["logits"] + lr * softmax_slope(tensors["logits"], gradient)}
        body, weight = {n: v for n, v in tensors.items() if "heads" not in n}, tensors["heads.weight"]
        features, pull_back = vjp(apply_trunk, body)[:2]
        slope = softmax_slope(apply_heads(tensors, features), gradient)
        (ascent,) = pull_back((slope.flatten(1).unsqueeze(1) @ weight.flatten(1, 2)).squeeze(1))
        if damped:  # the logits move as in the compact form; else the body grows with the heads, and all accelerates
            share = 1 / (1 + features.square().sum(-1))  # the features multiply the step of a logit by the inverse
            slope = vmap(torch.mul)(slope, share)
            ascent = {name: vmap(torch.mul)(part, DAMPED_TRUNK * share) for name, part in ascent.items()}
        moved = {name: value + lr * ascent[name] for name, value in body.items()}
        # The heads' gradient is an outer product that addcmul need not hold in memory.
        moved["heads.weight"] = torch.addcmul(weight, slope.unsqueeze(-1), features[:, None, None], value=lr)
        moved["heads.bias"] = tensors["heads.bias"] + lr * slope
        return moved


def apply_trunk(tensors: Params) -> Tensor:
    """Return the features [clients, WIDTH]."""
    hidden = tensors["embedding"]
    for depth in range(TRUNK_DEPTH):
        weight, bias = tensors[f"trunk{depth}.weight"], tensors[f"trunk{depth}.bias"]
        hidden = ((weight @ hidden.unsqueeze(-1)).squeeze(-1) + bias).relu()
    return hidden


def apply_heads(tensors: Params, features: Tensor) -> Tensor:
    """Return the logits [clients, layers, senders]."""
    weight, bias = tensors["heads.weight"], tensors["heads.bias"]
    return (weight.flatten(1, 2) @ features.unsqueeze(-1)).view_as(bias) + bias


def softmax_slope(logits: Tensor, gradient: Tensor) -> Tensor:
    """Return dObjective/dlogits from dObjective/dalpha, where alpha is the softmax of the logits."""
    alpha, gradient = logits.softmax(-1), gradient.to(logits.dtype)
    return alpha * (gradient - (alpha * gradient).sum(-1, keepdim=True))


def nearest(alpha: Tensor, cohort: Cohort, count: int) -> tuple[Tensor, Tensor]:
    """Return the largest weights of each row, its own always among them, and their senders: [cohort, layers, count]."""
    # Equal weights (the uniform start) are ordered by the seed; else everyone would mix the first K.
    streams = (generator(cohort.seed, "neighbours", cohort.round, client) for client in cohort.ids.tolist())
    shuffled = torch.stack([torch.rand(alpha.shape[1:], generator=draws) for draws in streams]).argsort(-1)
    rank = alpha.clone()
    rank[torch.arange(len(alpha)), :, cohort.ids] = torch.inf
    order = rank.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True)[..., :count]
    senders = shuffled.gather(-1, order)
    weights = alpha.gather(-1, senders)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 1.0), senders  # zero: K = 1 and the own weight has underflowed


def sent_layers(alpha: Tensor, cohort: Cohort, num_retained: int) -> Tensor:
    """Return [cohort, layers]: all but those with the largest self-weights (Eq. 12), in a tie nearest the output."""
    own = alpha[torch.arange(len(cohort.ids)), :, cohort.ids]
    from_the_output = own.flip(-1).argsort(dim=-1, descending=True, stable=True)
    retained = alpha.shape[1] - 1 - from_the_output[:, :num_retained]
    return torch.ones_like(own, dtype=torch.bool).scatter_(-1, retained, False)


class LearnedMix(MixedModels):
    """Abstract: pFedLA; a method may retain layers, or learn the weights from another gradient."""

    damped: ClassVar[bool] = False  # see LayerWeightHypernetwork.step
    search: ClassVar[Space] = {"hypernetwork_lr": Range(0.1, 10)}
    neighbours: Positive | Literal["all"] = "all"
    """K: mix only the K clients with the largest weights, per layer."""
    hypernetwork: Literal["network", "compact"] = "network"
    """compact: free logits in place of the network, for many clients."""
    hypernetwork_lr: Rate = 3.0
    """Learning rate of the hypernetwork. The paper does not state it."""
    weights: Literal["layer", "model"] = "layer"
    """model: the same weights for all layers, to measure what layer-wise weights contribute."""
    keep_below: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A client does not upload a layer to which every other client gives less weight than this. 0: it uploads all."""
    ask_every: Positive = 10
    """With keep_below, a layer is uploaded at least once in so many rounds of its client."""

    @property
    def num_retained(self) -> int:
        return getattr(self, "retained_layers", 0)  # the option of a method that has it

    def check(self, num_clients: int) -> None:
        check_layers("retained_layers", self.num_retained, self.task.layers)
        if self.neighbours != "all" and self.neighbours > num_clients:
            raise PfedlaError(f"neighbours = {self.neighbours}, but there are {num_clients} clients; use fewer")
        numbers = num_clients * self._network(num_clients).num_parameters
        hint = "" if self.hypernetwork == "compact" else '; try hypernetwork = "compact"'
        check_affordable(f"the hypernetworks of {num_clients} clients", numbers, hint)

    def _network(self, num_clients: int) -> LayerWeightHypernetwork:
        return LayerWeightHypernetwork(num_clients, len(self.task.layers), compact=self.hypernetwork == "compact")

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        hypernetworks = self._network(num_clients).init(num_clients, generator(seed, "hypernetwork"))
        progress = {"uploads": torch.zeros((), dtype=torch.int64)}  # accepted so far
        state = {**super().init_server(num_clients, seed), "hypernetworks": hypernetworks, "progress": progress}
        if self.keep_below:  # for how many rounds of its client a layer has not been uploaded
            state["kept"] = {"rounds": torch.zeros(num_clients, len(self.task.layers), dtype=torch.int64)}
        return state

    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        return self._weigh(server, ids, self._find_sound(server))

    def _weigh(self, server: ServerState, ids: Tensor, sound: Tensor) -> Tensor:
        network, parts = self._network(num_clients(server)), torch.split(ids, CHUNK)
        # A sender that is left out has no weight, the others share it. Were there none, a client has its own model.
        masks = [sound if sound.any() else F.one_hot(some, len(sound)).bool().unsqueeze(1) for some in parts]
        pairs = zip(parts, masks, strict=True)
        return torch.cat([network.alpha(take(server["hypernetworks"], some), mask) for some, mask in pairs])

    def _find_sound(self, server: ServerState) -> Tensor:
        """Return which models are finite and at most FAR times as long as the median, or as the initial model."""
        norms, (start,) = row_norms(server["models"]), row_norms(stack([self.share(self.task.initial())]))
        trained = norms[~torch.isclose(norms, start)]  # with few participants, most models are the initial one at first
        usual = torch.maximum(trained.nanmedian(), start) if len(trained) else start  # short models make none long
        return norms.isfinite() & ((norms <= FAR * usual) | (usual == 0))

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        sound, extras = self._find_sound(server), Params()
        alpha, what = self._weigh(server, cohort.ids, sound), (replace_rows(server["models"], sound), self.task.layers)
        weights, senders, mixes_all = alpha, torch.arange(alpha.shape[-1]), self.neighbours in ("all", alpha.shape[-1])
        if not mixes_all:
            weights, senders = nearest(alpha, cohort, int(self.neighbours))
        if self.keep_below:
            is_own = senders == cohort.ids[:, None, None]
            extras = {OWN: (weights * is_own).sum(-1), KEEP: self._find_kept(server, cohort, sound)}
            weights = weights.masked_fill(is_own, 0.0)
        mixed = mix(weights, *what) if mixes_all else mix_few(weights, senders, *what)
        return Payload(mixed, sent_layers(alpha, cohort, self.num_retained), extras)

    def _find_kept(self, server: ServerState, cohort: Cohort, sound: Tensor) -> Tensor:
        """Return [cohort, layers]: which layers nobody else borrows, unless it is time to ask for them again."""
        everyone = torch.arange(num_clients(server))
        alpha = self._weigh(server, everyone, sound)
        alpha[everyone, :, everyone] = 0.0
        is_borrowed = alpha.amax(0).T[cohort.ids] >= self.keep_below
        return ~is_borrowed & (server["kept"]["rounds"][cohort.ids] + 1 < self.ask_every)

    def upload_like(self, download: Payload) -> Payload:
        # Departs from the paper: clients send θ_i in place of Δθ_i, so that θ_i is exact on the server.
        everything = torch.ones_like(download.sent)  # a retained layer saves the download only
        return Payload(download.tensors, ~download.extras[KEEP] if KEEP in download.extras else everything)

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor | None:
        """Return [cohort, layers, clients], along which alpha moves: <Δθ_i, θ_j> (Eq. 10-11). None: it stays."""
        # Departs from the paper: the factor m_i/M of Eq. 7 is left out; it would only scale client i's own step.
        delta = {name: value - downloads.tensors[name] for name, value in uploads.tensors.items()}
        return layer_gradient(delta, server["models"], self.task.layers)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        if self.keep_below:  # the whole mix, with the client's own part
            downloads = downloads._replace(tensors=self.starts(server, cohort, downloads))
        # At the snapshot that was mixed: the new θ_i would inflate the self-weight by |Δθ_i|².
        mixed = {**server, "models": replace_rows(server["models"], self._find_sound(server))}
        gradient, ids = self.gradient(mixed, downloads, uploads), cohort.ids
        if gradient is not None:
            # A retained layer's mix was not used, so its weights do not move in this round.
            used = downloads.sent.unsqueeze(-1)
            gradient = torch.where(used, gradient, 0.0)
            if self.weights == "model":
                gradient = torch.where(used, gradient.sum(1, keepdim=True), 0.0)
            network, before = self._network(num_clients(server)), take(server["hypernetworks"], ids)
            stepped = network.step(before, gradient, self.hypernetwork_lr, damped=self.damped)
            # A huge upload can overflow the gradient, or the logits; that client's weights then stay as they were.
            sound = (finite_rows(stepped) & finite_rows({"alpha": network.alpha(stepped)})).nonzero().squeeze(1)
            put_(server["hypernetworks"], ids[sound], take(stepped, sound))
        server["progress"]["uploads"] += len(ids)
        uploads = self._note_kept(server, cohort, uploads) if self.keep_below else uploads
        return super().aggregate(server, cohort, downloads, uploads)

    def _note_kept(self, server: ServerState, cohort: Cohort, uploads: Payload) -> Payload:
        """Count, in place, the rounds that layers were kept; return the uploads with the old copies of these."""
        kept = server["kept"]["rounds"]
        kept[cohort.ids] = torch.where(uploads.sent, 0, kept[cohort.ids] + 1)
        fill = vmap(lambda sent, new, old: choose(sent, new, old, self.task.layers))
        return uploads._replace(tensors=fill(uploads.sent, uploads.tensors, take(server["models"], cohort.ids)))

    def init_client(self) -> ClientState:
        return self.task.initial() if self.num_retained or self.keep_below else super().init_client()

    def init_unseen(self, server: ServerState, initial: ClientState) -> ClientState:
        own = take(server["models"], num_clients(server) - 1)  # for the layers that it retains
        return {name: own.get(name, value) for name, value in initial.items()}

    def start(self, client: ClientState, download: Payload) -> Params:
        layers, received = self.task.layers, download.tensors
        if OWN in download.extras:
            weights = {name: download.extras[OWN][layers.index[name]].to(v.dtype) for name, v in received.items()}
            received = {name: value + weights[name] * client[name] for name, value in received.items()}
        used = choose(download.sent, received, client, layers) if self.num_retained else received
        return {**used, **layers.only_statistics(client)}


class PFedLA(LearnedMix):  # Algorithm 1
    name = "pfedla"
    summary = "per layer, a learned mix of all clients' models"


class HeurpFedLA(LearnedMix):  # Algorithm 2
    name = "heurpfedla"
    summary = "pFedLA with the k most personal layers retained on the client"
    retained_layers: Natural = 1
    """k: the layers with the largest self-weight are not sent; the client continues with its own."""
