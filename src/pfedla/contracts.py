"""READ FIRST: the values that travel, what an algorithm is, what an engine is.

A round of any algorithm is the same few lines (rounds.py). An algorithm is server functions on stacked values (the
same names, one leading client axis) and client functions written for *one* client. An engine is where the clients
live. State goes in and comes out; nothing is hidden in `self`, so evaluation cannot change anything and saving two
values (server, clients) is a checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pfedla.layers import Layers
from pfedla.tree import Params, take

__all__ = [
    "Algorithm", "Answer", "ClientMetrics", "ClientState", "Cohort", "Engine", "Failure", "LocalData", "LocalResult",
    "LocalTraining", "Params", "Payload", "Recalibrate", "ServerState", "Task",
]  # fmt: skip

ServerState = dict[str, Params]  # named groups of tensors
ClientState = Params  # one client's private tensors: statistics, retained layers
Recalibrate = Literal["unsampled", "never", "always"]


class Cohort(NamedTuple):
    """Who takes part in a round. Every draw of a round comes from (seed, purpose, round, client)."""

    round: int
    seed: int
    ids: Tensor  # [cohort], ascending
    num_examples: Tensor  # [cohort], training examples

    def only(self, rows: Tensor) -> "Cohort":
        return self._replace(ids=self.ids[rows], num_examples=self.num_examples[rows])


class Payload(NamedTuple):
    """What crosses the wire, either way. A tensor travels if its layer is sent; stacked over the cohort on the server."""

    tensors: Params
    sent: Tensor  # bool per layer
    extras: Params = {}  # noqa: RUF012 (never written into) what is no tensor of the model; always travels

    def rows(self, index: Tensor | int) -> "Payload":
        return Payload(take(self.tensors, index), self.sent[index], take(self.extras, index))


class LocalData(NamedTuple):
    """One client's training data, ready for use. `order[epoch]` is the order of the examples; a batch is a slice of it.

    Departs from padded batches with masks: a padded row would spoil BatchNorm's statistics. Clients of one size stack.
    """

    x: Tensor
    y: Tensor
    order: Tensor  # [epochs, examples]
    crops: Tensor = torch.empty(0)  # [epochs, examples, 3], see augmentation.py; [epochs, 0, 3]: images are used as they are
    held_out_x: Tensor = torch.empty(0)  # held out of the *training* data, the same in every round; empty unless asked for
    held_out_y: Tensor = torch.empty(0)


class LocalResult(NamedTuple):
    client: ClientState
    upload: Payload
    model: Params  # the locally trained model, as the client would use it right after training
    loss: Tensor  # mean training loss over the local steps


class ClientMetrics(NamedTuple):
    """Per client, in the order of the cohort."""

    accuracy: Tensor
    loss: Tensor


class Answer(NamedTuple):
    """What came back from one client, as it came: uploads.py decides whether it is used."""

    upload: Payload
    training_loss: Tensor
    accuracy: float  # of the trained model, on the client's own test data
    loss: float
    finite: bool  # whether the trained model and the private state are


class Failure(NamedTuple):
    """Why a client has no part in a round's result."""

    reason: str  # one of a few, so that they can be counted
    detail: str = ""
    error: Exception | None = None  # what it raised


@dataclass(frozen=True)
class LocalTraining:
    """The local budget, common to all methods: plain SGD."""

    lr: float
    epochs: int
    batch_size: int
    augment: bool = False  # random crop and flip of the training images


class Task(Protocol):
    """A model and its loss, as functions of its tensors (parameters and statistics under their state_dict names)."""

    @property
    def layers(self) -> Layers: ...
    @property
    def module(self) -> nn.Module: ...
    def to(self, device: torch.device) -> "Task": ...
    def direct(self, shape: tuple[int, ...]) -> "Task":
        """The same task for one client at a time, faster; it need not run under torch.func.vmap. `shape` is of one example."""
        ...

    def compiled(self, shape: tuple[int, ...], training: "LocalTraining") -> "Task":
        """The same with the steps of this training compiled."""
        ...

    def initial(self) -> Params:
        """The common initialisation (a copy)."""
        ...

    def loss(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Params]:
        """Training loss, and the statistics after this batch; the inputs are left alone."""
        ...

    def gradient(
        self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, only: Container[str] | None = None
    ) -> tuple[Params, Tensor, Params]:
        """The loss's gradient by the parameters (or by some), the loss, and the statistics after this batch."""
        ...

    def descended(self, parameters: Params, gradients: Params, lr: float) -> Params: ...
    def step(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, lr: float) -> tuple[Params, Tensor, Params]:
        """One step of SGD: the parameters after it, the loss, and the statistics."""
        ...

    def laid_out(self, value: Tensor) -> Tensor:
        """Images or weights as the model likes them in memory."""
        ...

    def logits(self, tensors: Params, x: Tensor) -> Tensor: ...
    def recalibrated(self, tensors: Params, x: Tensor) -> Params:
        """The same model with its statistics estimated anew from `x`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Both sides of a method in one class. Its fields beside `task` and `training` are the hyper-parameters."""

    name: ClassVar[str]
    summary: ClassVar[str]
    personalizes_on_data: ClassVar[bool] = False  # whether `personalize` looks at `data`; else it may be empty
    cannot_join: ClassVar[str] = "it has no rule for a client that comes after its run"  # empty: `admitted` is one
    task: Task
    training: LocalTraining

    def check(self, num_clients: int) -> None:  # noqa: B027 (most methods fit everywhere)
        """Refuse what cannot work: NotApplicableError if the method does not fit, PfedlaError for a wrong value."""

    @abstractmethod
    def init_server(self, num_clients: int, seed: int) -> ServerState: ...
    @abstractmethod
    def download(self, server: ServerState, cohort: Cohort) -> Payload:
        """What each client of the cohort is sent, stacked."""

    def upload_like(self, download: Payload) -> Payload:
        """What a client that was sent this must answer with: names, shapes, dtypes and layers; the numbers say nothing."""
        return Payload(download.tensors, download.sent)

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        """Where each client's training began, stacked: what the length of an update is measured from."""
        return downloads.tensors

    @abstractmethod
    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        """The next server state from those who answered; `downloads` is what these clients were sent.

        May consume `server`: write into its tensors, after all that can fail. Who needs the old state copies it before.
        """

    @abstractmethod
    def init_client(self) -> ClientState:
        """One client's private state before its first round; the same for all."""

    @abstractmethod
    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        """One client's round; must run under torch.func.vmap."""

    @abstractmethod
    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """The model this client would deploy now: parameters and statistics; `data` are its training data."""

    def admitted(self, server: ServerState, seed: int) -> ServerState:
        """A finished run's state with a place for one newcomer: the last row of all that is kept by client; leaves `server`.

        What grows so moves in the newcomer's rounds, in that row alone; everything else stays (joining.py sees to it).
        """
        return server

    def init_newcomer(self, server: ServerState) -> ClientState:
        """A newcomer's private state before its first round; `server` has admitted it."""
        return self.init_client()

    def decided(self) -> dict[str, object]:
        """What the options that are "auto" come to, for the record of a run."""
        return {}

    def notice(self, rounds: float) -> str:
        """What a person should know before a run in which a client takes part in so many rounds, on average."""
        return ""

    def held_out_share(self, download: Payload) -> float:
        """The share of its training data that a client which is sent this holds out; which examples is fixed once."""
        return 0.0

    def alpha(self, server: ServerState) -> Tensor | None:
        """[clients, layers, clients], i receives and j sends, for methods that learn it."""
        return None


class Engine(Protocol):
    """Where the clients live: a thread pool, one stacked tensor, or other machines."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        """What came back from each client of the cohort, unchecked; a client that fails fails alone."""
        ...

    def commit(self, accepted: Tensor) -> None:
        """The state of the accepted clients (ids) advances; the others' stays as it was before `train`."""
        ...

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        """The personal models on the clients' own test data, nan for a client that fails; changes nothing."""
        ...

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        """Empty for a client that fails."""
        ...

    def state(self) -> Params: ...
    def load(self, state: Params) -> None: ...


def all_sent(count: int, layers: Layers) -> Tensor:
    return torch.ones(count, len(layers), dtype=torch.bool)
