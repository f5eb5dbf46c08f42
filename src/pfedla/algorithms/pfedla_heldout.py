"""pFedLA with weights learned from held-out data: our own rule, not the paper's.

The weights move down each client's loss on training examples that it holds out, in place of along its update Δθ_i.
The gradient travels as a count sketch. Then the weights are frozen. Why: docs/algorithms/pfedla-heldout.md.
"""

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from pfedla.algorithms.partial import add_prefix, strip_prefix
from pfedla.algorithms.pfedla import CHUNK, LearnedMix
from pfedla.core.averaging import Averaging, robust_mean
from pfedla.core.contracts import ClientState, Cohort, LocalData, LocalResult, Payload, ServerState, generator
from pfedla.core.layers import Layers, Params, num_clients, repeat, row_norms, rows_of, stack, take
from pfedla.core.search import Choice, Space
from pfedla.core.settings import Natural, Positive

HOLD_OUT = "hold out"  # in a download: this round, train without the held-out examples
HASH = "sketch hash"  # in a download: send the held-out gradient, sketched with these constants [layers, 4]
GRADIENT = "held-out gradient/"  # in an upload, by layer
PRIME = 2**31 - 1
AVERAGE, ROUNDS = "average/", "rounds in the average"  # in the private state: the moving average of the trained models
DECAY = 8  # after n rounds, the last n/DECAY have two thirds of the weight
RISEN = 1.3  # usual lengths: an update so long shows that what the client receives has become worse,
IN_A_ROW = 3  # if it lasts for so many rounds: a single one is noise
FOLLOW, MEASURED = 0.05, 5  # share by which the usual length follows; rounds until it is known
SMALLEST_DISTANCE = 1e-4  # of models, against their norm, that is more than rounding
Sketch = Positive | Literal["exact"]


class PFedLAHeldOut(LearnedMix):
    name = "pfedla-heldout"
    summary = "pFedLA whose weights are learned from held-out data (ours)"
    damped = True
    search: ClassVar[Space] = {**LearnedMix.search, "learning_rounds": Choice((5, 10, 20, "all"))}
    retained_layers: Natural = 0
    """k: the layers with the largest self-weight are not sent, as in HeurpFedLA."""
    held_out: Annotated[float, Field(gt=0, le=0.9)] = 0.2
    """Share of each client's training data that is held out until the weights are frozen."""
    warm_up: Natural = 5
    """Rounds per client, on average, before the weights are learned."""
    averaging: Averaging = "mean"
    """What everybody receives during the warm-up: the mean of all models (mean), or a robust one, as in fedavg."""
    learning_rounds: Positive | Literal["all"] = 10
    """Rounds per client, on average, in which they are learned. Then they are frozen."""
    sketch: Sketch = 256
    """Numbers per layer in which the held-out gradient travels. exact: the gradient itself."""
    min_held_out: Annotated[int, Field(ge=2, le=10**6)] = 20
    """Fewest held-out examples whose gradient is sent; with fewer a client sends zeros and keeps its weights."""
    personal: Literal["mix", "average"] = "mix"
    """The personal model. mix: what the server would send now. average: a moving average of the client's trained
    models."""

    def notice(self, rounds: float) -> str:
        early = f"a client takes part in {rounds:g} rounds, and the first {self.warm_up} are its warm-up"
        text = f"{self.name} learns no weights in this run: {early}; use more rounds or a smaller algorithm.warm_up"
        return text if rounds <= self.warm_up else ""

    def admit(self, server: ServerState, seed: int) -> ServerState:
        learning = torch.tensor(self.warm_up * (num_clients(server) + 1))  # the unseen client learns in all its rounds
        return {**super().admit(server, seed), "progress": {"uploads": learning}}

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        # While the weights are frozen: how long each client's updates usually are, and in how many rounds it was
        # measured; in how many rounds in a row they were long; at how many uploads learning was reopened last.
        watch = {name: torch.zeros(num_clients) for name in ("length", "rounds")}
        watch |= {name: torch.zeros((), dtype=torch.int64) for name in ("risen", "reopened")}
        return {**super().init_server(num_clients, seed), "watch": watch}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        uploads, reopened = server["progress"]["uploads"], server["watch"]["reopened"]
        rounds, since = (count.item() / num_clients(server) for count in (uploads, reopened))  # of a client, on average
        frozen = self.learning_rounds != "all" and rounds >= max(self.warm_up, since) + self.learning_rounds
        extras = {} if frozen else {HOLD_OUT: torch.ones(len(cohort.ids), dtype=torch.bool)}
        if not frozen and rounds >= self.warm_up:
            extras[HASH] = draw_hash(cohort.seed, cohort.round, len(self.task.layers)).expand(len(cohort.ids), -1, -1)
        payload = super().download(server, cohort)
        payload = payload._replace(extras=payload.extras | extras)
        if rounds >= self.warm_up or self.averaging == "mean":
            return payload
        model = robust_mean(server["models"], self.averaging)  # to which no client adds its own
        return Payload(repeat(model, len(cohort.ids)), payload.sent, extras)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        is_frozen = HOLD_OUT not in downloads.extras
        starts = self.starts(server, cohort, downloads) if is_frozen else {}
        server = super().aggregate(server, cohort, downloads, uploads)
        if is_frozen:
            lengths = row_norms({name: value - starts[name] for name, value in uploads.tensors.items()})
            if watch_lengths(server["watch"], cohort.ids, lengths):
                server["watch"]["reopened"].copy_(server["progress"]["uploads"])
                # From uniform weights: small ones, which an honest client may have by now, would grow slowly.
                count = num_clients(server)
                fresh = self._network(count).init(count, generator(cohort.seed, "hypernetwork"))
                server = {**server, "hypernetworks": fresh}
        return server

    def held_out_share(self, download: Payload) -> float:
        return self.held_out if HOLD_OUT in download.extras else 0.0

    def upload_like(self, download: Payload) -> Payload:
        expected, layers, extras = super().upload_like(download), self.task.layers, {}
        for name, size in zip(layers.names, layers.num_parameters, strict=True) if HASH in download.extras else ():
            extras[GRADIENT + name] = torch.empty(size if self.sketch == "exact" else min(size, self.sketch))
        return expected._replace(extras=extras)

    def gradient(self, server: ServerState, downloads: Payload, uploads: Payload) -> Tensor | None:
        """Return minus the inner products of the held-out gradients and the models, sketched, normalised per client."""
        if HASH not in downloads.extras:
            return None
        layers, models, count = self.task.layers, server["models"], num_clients(server)
        # Relative to the mean model: softmax does not see it, and a shorter vector has a smaller error as a sketch.
        means = {name: value.mean(0, keepdim=True) for name, value in models.items()}
        products, squares = [], []
        for layer, (name, constants) in enumerate(zip(layers.names, downloads.extras[HASH][0], strict=True)):
            mean, gradient = layer_rows(means, layers, layer), uploads.extras[GRADIENT + name]
            sketches, spread = [], torch.zeros(())
            for rows in torch.split(torch.arange(count), CHUNK):  # to bound the memory
                apart = layer_rows(take(models, rows), layers, layer) - mean
                sketches.append(count_sketch(apart, constants, self.sketch))
                spread += apart.square().sum() / count
            products.append(-gradient @ torch.cat(sketches).T)
            away = (layer_rows(downloads.tensors, layers, layer) - mean).square().sum(1) + spread
            squares.append(torch.stack([gradient.square().sum(1), away, mean.square().sum().expand_as(away)]))
        # Squared, over the layers sent: the gradient, the way from the start to a sender (their mean), the mean model.
        norm, distance, size = torch.where(downloads.sent, torch.stack(squares, -1), 0.0).sum(-1)
        # Models that differ by rounding alone, as all do before any has trained, carry no information.
        informative = (norm > 0) & (distance > SMALLEST_DISTANCE**2 * size)
        # About the cosine of minus the gradient and the way to each sender, times the number of senders (the slope of a
        # uniform softmax is one over it), so that one learning rate serves every data set.
        scale = torch.where(informative, count / (norm.sqrt() * distance.sqrt()), 0.0)
        return torch.stack(products, 1) * scale[:, None, None]

    def init_client(self) -> ClientState:
        own = super().init_client()
        if self.personal == "mix":
            return own
        average = {name: widen(value) for name, value in self.task.initial().items()}
        return {**own, **add_prefix(AVERAGE, average), ROUNDS: torch.zeros(())}

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        mixed = self.start(client, download)
        if self.personal == "mix":
            return mixed
        average = {name: value.to(mixed[name].dtype) for name, value in strip_prefix(AVERAGE, client).items()}
        return {name: torch.where(client[ROUNDS] > 0, average[name], value) for name, value in mixed.items()}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        result, layers = super().local_update(client, download, data), self.task.layers
        if self.personal == "average":
            result = result._replace(client={**result.client, **update_average(client, result.model)})
        if HASH not in download.extras:
            return result
        start, extras = self.start(client, download), {}
        parameters, statistics = layers.parameters(start), layers.only_statistics(start)
        gradient = {name: torch.zeros_like(value) for name, value in parameters.items()}
        if len(data.held_out_y) >= self.min_held_out:  # else it would tell too much of each
            gradient, _, _ = self.task.gradient(parameters, statistics, data.held_out_x, data.held_out_y)
            gradient = hide_length(gradient)
        for layer, (name, constants) in enumerate(zip(layers.names, download.extras[HASH], strict=True)):
            row = layer_rows(stack([gradient]), layers, layer)
            extras[GRADIENT + name] = count_sketch(row, constants, self.sketch)[0]
        return result._replace(upload=result.upload._replace(extras=extras))


def watch_lengths(watch: Params, ids: Tensor, lengths: Tensor) -> bool:
    """Return whether updates have been long in several rounds in a row, of two clients and more than a tenth each time.

    What is usual is noted in place, and forgotten if so. An update of length zero says nothing.
    """
    ids, lengths = ids[lengths > 0], lengths[lengths > 0]
    usual, rounds = watch["length"][ids], watch["rounds"][ids]
    has_risen = int(((lengths > RISEN * usual) & (rounds >= MEASURED)).sum()) > max(1, len(ids) / 10)
    watch["risen"].copy_((watch["risen"] + 1) * has_risen)
    if watch["risen"] == IN_A_ROW:
        for name in ("length", "rounds", "risen"):
            watch[name].zero_()
        return True
    watch["length"][ids] = torch.lerp(usual, lengths, (1 / (rounds + 1)).clamp(min=FOLLOW))
    watch["rounds"][ids] = rounds + 1
    return False


def hide_length(gradient: Params) -> Params:
    """Scale a gradient to a length in [1, 2): the server uses its direction only.

    The factor is a power of two, which leaves every digit of the numbers, and so of the weights, as it was.
    """
    length = torch.stack([value.float().square().sum() for value in gradient.values()]).sum().sqrt()
    sound = (length > 0) & length.isfinite()
    factor = torch.exp2(-torch.where(sound, length, 1.0).log2().floor())
    return {name: value * factor.to(value.dtype) for name, value in gradient.items()}


def widen(value: Tensor) -> Tensor:
    """Return numbers as float32, in which small steps are not lost; a count stays as it is."""
    return value.float() if value.is_floating_point() else value


def update_average(client: ClientState, trained: Params) -> ClientState:
    """Return the moving average of a client's trained models after one more round, and its number of rounds."""
    # Polynomial-decay averaging (Shamir and Zhang, ICML 2013): the window grows with the run.
    share, moved = DECAY / (DECAY + client[ROUNDS]), dict(trained)  # a count of batches is not averaged
    for name, value in strip_prefix(AVERAGE, client).items():
        if value.is_floating_point():
            moved[name] = torch.lerp(value, widen(trained[name]), share)
    return {**add_prefix(AVERAGE, moved), ROUNDS: client[ROUNDS] + 1}


def layer_rows(stacked: Params, layers: Layers, layer: int) -> Tensor:
    """Return a layer's parameters side by side, in the order of the model: [rows, numbers], float32."""
    names = [name for name, at in layers.index.items() if at == layer and name not in layers.statistics]
    return torch.cat([rows_of(stacked[name]).float() for name in names], 1)


def draw_hash(seed: int, round: int, num_layers: int) -> Tensor:
    """Draw the constants [layers, 4] of one hash per layer. The server sends them: both sides hash alike."""
    draws = (generator(seed, "sketch", round, layer) for layer in range(num_layers))
    return torch.stack([torch.randint(PRIME, (4,), generator=one) for one in draws])


def count_sketch(rows: Tensor, constants: Tensor, size: Sketch) -> Tensor:
    """Return the count sketch [rows, size]: every number goes into a random bucket with a random sign."""
    # Inner products of sketches are unbiased, with a standard error of at most |x| |y| sqrt(2 / size).
    if size == "exact" or rows.shape[1] <= size:
        return rows
    position, hashed = torch.arange(rows.shape[1], device=rows.device), constants[0]
    for constant in constants[1:]:  # bucket and sign are a hash of the position: a random polynomial of degree 3
        hashed = (hashed * position + constant) % PRIME
    sign, bucket = 1.0 - 2.0 * (hashed % 2), hashed // 2 % size
    return rows.new_zeros(len(rows), size).index_add(1, bucket, rows * sign)
