"""FedAvg on some of the layers, the base of many methods, and what these methods share."""

import math
from typing import ClassVar

import torch
from torch import nn

from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState, all_sent
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.layers import Layers, Params, append_mean_row, put_, repeat, stack, weighted_mean
from pfedla.core.settings import Auto, Training
from pfedla.core.training import keep_and_send, sgd


class PartialFedAvg(Algorithm):
    """FedAvg on the layers that are not private. A method names the private ones or trains in its own way.

    The private layers and the statistics are the client's state; everything else travels and is averaged.
    """

    cannot_join = ""  # an unseen client gets the shared layers and trains what is private
    sends_statistics: ClassVar[bool] = False  # True: they travel and are averaged, as in FedAvg

    def private_layers(self) -> list[int]:
        """Return the positions of the layers that stay on the client."""
        return []

    def share(self, tensors: Params) -> Params:
        """Return the tensors that travel."""
        layers, private = self.task.layers, self.private_layers()
        kept = {name for name in tensors if layers.index[name] in private}
        kept |= set() if self.sends_statistics else layers.statistics
        return {name: value for name, value in tensors.items() if name not in kept}

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"model": self.share(self.task.initial())}

    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        sent = all_sent(len(cohort.ids), self.task.layers)
        sent[:, self.private_layers()] = False
        return Payload(repeat(server["model"], len(sent)), sent)

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        return {"model": weighted_mean(uploads.tensors, cohort.num_examples)}

    def init_client(self) -> ClientState:
        initial = self.task.initial()
        return {name: value for name, value in initial.items() if name not in self.share(initial)}

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        trained = sgd(self.task, {**download.tensors, **client}, data, self.training)
        return keep_and_send(client, download, *trained)

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        return {**download.tensors, **client}


class PrivateByName(PartialFedAvg):
    """Abstract: FedAvg whose private layers are an option."""

    private: str = "head"
    """The private layers: "head" (the last Linear layer) or names, separated by commas; "" for none."""

    def check(self, num_clients: int) -> None:
        self.private_layers()

    def private_layers(self) -> list[int]:
        layers, private = self.task.layers, self.private
        if private == "head":
            found = [layer for layer, kind in enumerate(layers.kinds) if issubclass(kind, nn.Linear)][-1:]
        else:
            found = layers.positions(name.strip() for name in private.split(",") if name.strip())
        if len(set(found)) == len(layers) or (private == "head" and not found):
            problem = "is the whole model" if found else "is the last Linear layer, and the model has none"
            raise NotApplicableError(f'private = "{private}" {problem}')
        return found


class KeptModels(PartialFedAvg):
    """Abstract: the server keeps everyone's last trained parameters, stacked."""

    def init_server(self, num_clients: int, seed: int) -> ServerState:
        return {"models": stack([self.share(self.task.initial())] * num_clients)}

    def admit(self, server: ServerState, seed: int) -> ServerState:
        return {**server, "models": append_mean_row(server["models"])}

    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        put_(server["models"], cohort.ids, uploads.tensors)
        return server


def add_prefix(prefix: str, tensors: Params) -> Params:
    return {prefix + name: value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Params) -> Params:
    """Return the tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def draw_linear(name: str, inputs: int, outputs: int, draws: torch.Generator) -> Params:
    """Draw a Linear layer as torch does."""
    bound, shapes = 1 / math.sqrt(inputs), {"weight": (outputs, inputs), "bias": (outputs,)}
    return {f"{name}.{part}": bound * (2 * torch.rand(shape, generator=draws) - 1) for part, shape in shapes.items()}


def resolve_epochs(option: str, epochs: int | Auto, training: Training) -> range:
    """Return the first epochs of the local budget that an option asks for, "auto" for all; refuse more."""
    budget = training.local_epochs
    if epochs != "auto" and epochs > budget:
        raise PfedlaError(f"{option} = {epochs}, but the local budget is {budget} epochs; use fewer")
    return range(budget if epochs == "auto" else epochs)


def check_pull(option: str, pull: float, lr: float, rate: str = "the learning rate", below: int = 1) -> None:
    """Refuse a pull with which every step would throw the model past the one that it is pulled to."""
    if lr * pull >= below:
        raise PfedlaError(f"{option} = {pull:g} times {rate} = {lr:g} should be below {below}; lower it")


def check_layers(option: str, count: int, layers: Layers) -> None:
    if count > len(layers):
        raise NotApplicableError(f"{option} = {count}, but the model has {len(layers)}: {', '.join(layers.names)}")
