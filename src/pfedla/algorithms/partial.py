"""FedAvg on some of the layers, the base of many methods, and what these methods share."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from pfedla.core.averaging import Averaging, robust_mean
from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState, all_sent
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.layers import Layers, Params, into_corner_, mix, num_clients, put_, repeat, stack, take, weighted_mean
from pfedla.core.settings import Auto, Training
from pfedla.core.training import sgd

Trained = tuple[Params, Tensor]  # a model and the mean loss of its training


class PartialSharing(Algorithm):
    """Abstract: the client of FedAvg on the layers that are not private: these, and the statistics, are its state."""

    cannot_join = ""  # an unseen client gets the shared layers and trains what is private
    sends_statistics: ClassVar[bool] = False  # True: they travel and are averaged, as in FedAvg

    def private_layers(self) -> list[int]:
        return []

    def check(self, num_clients: int) -> None:
        self.private_layers()  # raises if the model does not have them
        check_pull(self.pull(), self.training.learning_rate)

    def share(self, tensors: Params) -> Params:
        """Return the tensors that travel."""
        layers, private = self.task.layers, self.private_layers()
        sent = tensors if self.sends_statistics else layers.parameters(tensors)
        return {name: value for name, value in sent.items() if layers.index[name] not in private}

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return {name: value for name, value in initial.items() if name not in self.share(initial)}

    def start(self, client: ClientState, download: Payload) -> Params:
        """Return the model from which a client trains: what it received, and the rest of its own."""
        return download.tensors | client | download.tensors  # in the order of the model

    def pull(self) -> float:
        return 0.0  # how strongly training is pulled towards the received model

    def train(self, start: Params, received: Params, data: LocalData) -> Trained:
        pull = self.pull()
        return sgd(self.task, start, data, self.training, towards=received if pull else None, pull=pull)

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        model, loss = self.train(self.start(client, download), download.tensors, data)
        kept = {name: model.get(name, value) for name, value in client.items()}
        names, sent, _ = self.upload_like(download)
        return LocalResult(kept, Payload({name: model[name] for name in names}, sent), model=model, loss=loss)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return self.start(client, download)


class PartialFedAvg(PartialSharing):
    """FedAvg on the layers that are not private."""

    averaging: Averaging = "mean"
    """How the server averages the clients' models. mean: weighted by the number of examples; robust, all clients
    counting the same: trimmed (of each number the middle half), median, krum (the most central model)."""

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"model": self.share(self.task.initial())}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        sent = all_sent(len(cohort.ids), self.task.layers)
        sent[:, self.private_layers()] = False
        return Payload(repeat(server["model"], len(sent)), sent)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return {"model": self.average(uploads.tensors, cohort.num_examples)}

    def average(self, stacked: Params, weights: Tensor) -> Params:
        return weighted_mean(stacked, weights) if self.averaging == "mean" else robust_mean(stacked, self.averaging)


class PrivateByName(PartialFedAvg):
    """Abstract: FedAvg whose private layers are an option."""

    private: str = "head"
    """The private layers: "head" (the last Linear layer) or names, separated by commas; "" for none."""

    def private_layers(self) -> list[int]:
        layers, private = self.task.layers, self.private
        linears = [layer for layer, kind in enumerate(layers.kinds) if issubclass(kind, nn.Linear)]
        names = [name.strip() for name in private.split(",") if name.strip()]
        found = linears[-1:] if private == "head" else layers.positions(names)
        if len(set(found)) == len(layers) or (private == "head" and not found):
            problem = "is the whole model" if found else "is the last Linear layer, and the model has none"
            raise NotApplicableError(f'private = "{private}" {problem}')
        return found


class KeptModels(PartialSharing):
    """Abstract: the server keeps everyone's last trained parameters, stacked."""

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"models": stack([self.share(self.task.initial())] * num_clients)}

    def admit(self, server: ServerState, seed: int) -> ServerState:
        larger = self.init_server(num_clients(server) + 1, seed)
        return {group: into_corner_(larger[group], part) for group, part in server.items()}

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        return vmap(self.start)(take(server["models"], cohort.ids), downloads)  # what it was not sent, it uploaded

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        put_(server["models"], cohort.ids, uploads.tensors)
        return server


class MixedModels(KeptModels):
    """Abstract: a client gets a mix of everyone's models."""

    @abstractmethod
    def weigh(self, server: ServerState, ids: Tensor) -> Tensor:
        """Return the weights of the clients `ids`, [receivers, layers, clients]; a row sums to one."""

    def alpha(self, server: ServerState) -> Tensor:
        return self.weigh(server, torch.arange(num_clients(server)))

    def admit(self, server: ServerState, seed: int) -> ServerState:
        larger = super().admit(server, seed)
        for name, value in server["models"].items():
            larger["models"][name][-1] = value.mean(0)
        return larger

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        mixed = mix(self.weigh(server, cohort.ids), server["models"], self.task.layers)
        return Payload(mixed, all_sent(len(cohort.ids), self.task.layers))


def add_prefix(prefix: str, tensors: Params) -> Params:
    return {prefix + name: value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Params) -> Params:
    """Return the tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def draw_linears(sizes: dict[str, tuple[int, int]], draws: torch.Generator) -> Params:
    """Draw Linear layers as torch does; the sizes are of inputs and outputs."""
    drawn = {}
    for name, (inputs, outputs) in sizes.items():
        for part, shape in {"weight": (outputs, inputs), "bias": (outputs,)}.items():
            drawn[f"{name}.{part}"] = 1 / inputs**0.5 * (2 * torch.rand(shape, generator=draws) - 1)
    return drawn


def resolve_epochs(option: str, epochs: int | Auto, training: Training) -> range:
    """Return the first epochs of the local budget that an option asks for, "auto" for all; refuse more."""
    budget = training.local_epochs
    if epochs != "auto" and epochs > budget:
        raise PfedlaError(f"{option} = {epochs}, but the local budget is {budget} epochs; use fewer")
    return range(budget if epochs == "auto" else epochs)


def check_pull(penalty: float, lr: float, rate: str = "the learning rate", below: int = 1) -> None:
    """Refuse a penalty with which every step would throw the model past the one that it is pulled to."""
    if lr * penalty >= below:
        raise PfedlaError(f"penalty = {penalty:g} times {rate} = {lr:g} should be below {below}; lower it")


def check_layers(option: str, count: int, layers: Layers) -> None:
    if count > len(layers):
        raise NotApplicableError(f"{option} = {count}, but the model has {len(layers)}: {', '.join(layers.names)}")
