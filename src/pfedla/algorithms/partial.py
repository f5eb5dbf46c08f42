"""FedAvg on some of the layers, the base of many methods, and what these methods check."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from pfedla.core.contracts import Algorithm, ClientState, Cohort, LocalData, LocalResult, Payload, ServerState
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.layers import Layers, Params, repeat, weighted_mean
from pfedla.core.settings import Auto, Training
from pfedla.core.training import sgd


class PartialFedAvg(Algorithm):
    """FedAvg on the layers that are not private. A method names the private ones or trains in its own way.

    The private layers and the statistics are the client's state. Everything else travels and is averaged.
    """

    cannot_join: ClassVar[str] = ""  # an unseen client gets the shared layers and trains what is private
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
        sent = torch.ones(len(cohort.ids), len(self.task.layers), dtype=torch.bool)
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


def keep_and_send(client: ClientState, download: Payload, model: Params, loss: Tensor) -> LocalResult:
    """Return the result of a client that keeps the tensors of its state and uploads those it received."""
    kept, sent = ({name: model[name] for name in names} for names in (client, download.tensors))
    return LocalResult(client=kept, upload=Payload(sent, download.sent), model=model, loss=loss)


def add_prefix(prefix: str, tensors: Params) -> Params:
    return {prefix + name: value for name, value in tensors.items()}


def strip_prefix(prefix: str, tensors: Params) -> Params:
    """Return the tensors whose names begin with `prefix`, under the rest of their names."""
    return {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}


def find_private(private: str, layers: Layers) -> list[int]:
    """Return the layers that an option `private` names: "head" is the last Linear layer, "" is none."""
    if private != "head":
        found = layers.positions(name.strip() for name in private.split(",") if name.strip())
    else:
        found = [layer for layer, kind in enumerate(layers.kinds) if issubclass(kind, nn.Linear)][-1:]
        if not found:
            raise NotApplicableError('private = "head" is the last Linear layer, and the model has none')
    if len(set(found)) == len(layers):
        raise NotApplicableError(f'private = "{private}" is the whole model: no layer would be shared')
    return found


def resolve_epochs(option: str, epochs: int | Auto, training: Training) -> range:
    """Return the first epochs of the local budget that an option asks for, "auto" for all; refuse more."""
    budget = training.local_epochs
    if epochs != "auto" and epochs > budget:
        raise PfedlaError(f"{option} = {epochs}, but the local budget is {budget} epochs; use fewer")
    return range(budget if epochs == "auto" else epochs)


def check_pull(option: str, pull: float, lr: float) -> None:
    """Refuse a pull with which every step would throw the model past the one that it is pulled to."""
    if lr * pull >= 1:
        raise PfedlaError(f"{option} = {pull:g} times the learning rate {lr:g} should be below 1; lower it")
