"""READ FIRST: the values that travel, what an algorithm is, what an engine is. rounds.py runs them."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol

import torch
from pydantic import ConfigDict, SkipValidation
from torch import Tensor

from pfedla.core.layers import Layers
from pfedla.core.layers import Params as Params  # re-exported: an algorithm imports its types from here
from pfedla.core.search import Space
from pfedla.core.settings import Section, Training, WireSettings
from pfedla.core.tasks import Task as Task
from pfedla.core.trees import Tree

ServerState = dict[str, Params]  # named groups of tensors
ClientState = Params  # one client's private tensors: statistics, retained layers


def generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """Return a fresh random stream for one purpose of one client in one round: no draw depends on another."""
    digest = hashlib.sha256(f"{seed}/{purpose}/{round}/{client}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # torch takes 63 bits


def num_participants(num_clients: int, participation: float) -> int:
    return max(1, int(participation * num_clients + 0.5))


class Cohort(NamedTuple):
    """The clients that take part in a round. All its draws come from (seed, purpose, round, client)."""

    round: int
    seed: int
    ids: Tensor  # [cohort], ascending
    num_examples: Tensor  # [cohort], training examples

    @classmethod
    def everyone(cls, num_examples: Tensor, round: int, seed: int) -> "Cohort":
        return cls(round, seed, ids=torch.arange(len(num_examples)), num_examples=num_examples)

    @classmethod
    def sample(cls, num_examples: Tensor, round: int, participation: float, seed: int) -> "Cohort":
        """Draw a random share of the clients, at least one, in ascending order."""
        order = torch.randperm(len(num_examples), generator=generator(seed, "cohort", round))
        ids = order[: num_participants(len(num_examples), participation)].sort().values
        return cls.everyone(num_examples, round, seed).only(ids)

    def only(self, rows: Tensor) -> "Cohort":
        return self._replace(ids=self.ids[rows], num_examples=self.num_examples[rows])


class Payload(NamedTuple):
    """What crosses the wire, in either direction; on the server it is stacked over the cohort."""

    tensors: Params  # of the model; one travels if its layer is sent
    sent: Tensor  # bool per layer
    extras: Params = {}  # noqa: RUF012 (never written into). Not of the model; they always travel

    def map(self, change: Callable[[Tensor], Tensor]) -> "Payload":
        tensors, extras = ({n: change(v) for n, v in part.items()} for part in (self.tensors, self.extras))
        return Payload(tensors, change(self.sent), extras=extras)

    def rows(self, index: Tensor | int) -> "Payload":
        return self.map(lambda value: value[index])

    def to(self, device: torch.device | str) -> "Payload":
        return self.map(lambda value: value.to(device))


class LocalData(NamedTuple):
    """One client's training data. Batches are slices of `order[epoch]`, never padded: that would spoil BatchNorm."""

    x: Tree = torch.empty(0)
    y: Tensor = torch.empty(0)
    order: Tensor = torch.empty(0)  # [epochs, examples]
    held_out_x: Tree = torch.empty(0)  # of the training data, the same in every round; see held_out_share
    held_out_y: Tensor = torch.empty(0)
    has_trained: Tensor = torch.tensor(False)  # whether an upload of this client has been accepted before
    # With [privacy]: `order` is [epochs, steps, largest batch], and these say what private_gradient makes of it.
    is_drawn: Tensor = torch.empty(0)  # of the same shape: which places of `order` are filled
    mechanism: Tensor = torch.empty(0)  # largest norm, noise multiplier, expected size of a batch


class LocalResult(NamedTuple):
    client: ClientState
    upload: Payload
    model: Params  # the locally trained model, as the client would use it right after training
    loss: Tensor  # mean training loss over the local steps


class ClientMetrics(NamedTuple):
    """Per client, in the order of the cohort; nan for a client without a value."""

    score: Tensor  # the headline metric of the task
    loss: Tensor
    others: Params = {}  # noqa: RUF012 (never written into). Every metric of the task, where they were asked for


class Answer(NamedTuple):
    """What one client sent back, unchecked: rounds.py decides whether it is used."""

    upload: Payload
    training_loss: Tensor
    score: float  # of the trained model, on the client's own test data
    loss: float
    finite: bool  # whether the trained model and the private state are finite


class Failure(NamedTuple):
    reason: str  # why a client has no part in a round's result: one of a few, so that they can be counted
    detail: str = ""
    error: Exception | None = None  # what it raised


class Algorithm(Section, ABC):
    """Both sides of a method in one class. Its fields beside `task` and `training` are the hyper-parameters.

    An author writes six functions: three of the server, on values stacked over the cohort, and three of one client. The
    rest is optional. State goes in and comes out, none is kept in `self`, so that two values are a checkpoint.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)  # strict and frozen, as all settings
    name: ClassVar[str]
    summary: ClassVar[str]
    task: SkipValidation[Task]  # pydantic does not look at it
    training: Training
    wire: WireSettings = WireSettings()  # how its messages are encoded; see codecs.py
    search: ClassVar[Space] = {}  # option -> what `pfedla tune` chooses from, beside the learning rate
    uses_lr: ClassVar[bool] = True  # whether the learning rate of [training] matters
    personalizes_on_data: ClassVar[bool] = False  # whether `personalize` looks at `data`; else it may be empty
    cannot_join: ClassVar[str] = "it has no rule for a client that joins after its run"  # empty: `admit` is one

    @abstractmethod
    def init_server(self, num_clients: int, seed: int) -> ServerState: ...

    @abstractmethod
    def download(self, server: ServerState, cohort: Cohort) -> Payload: ...

    @abstractmethod
    def aggregate(self, server: ServerState, cohort: Cohort, downloads: Payload, uploads: Payload) -> ServerState:
        """Return the next server state; may write into the tensors of `server`, after everything that can fail."""

    @abstractmethod
    def init_client(self) -> ClientState:
        """Return one client's private state before its first round; the same for all."""

    @abstractmethod
    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        """Train one client for one round; must run under torch.func.vmap."""

    @abstractmethod
    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        """Return the model this client would deploy now: parameters and statistics."""

    def check(self, num_clients: int) -> None:
        """Raise NotApplicableError if the method does not fit, PfedlaError for a wrong option."""

    def upload_like(self, download: Payload) -> Payload:
        """Return a payload with the upload's names, shapes, dtypes and sent layers; numbers are ignored."""
        return Payload(download.tensors, download.sent)

    def starts(self, server: ServerState, cohort: Cohort, downloads: Payload) -> Params:
        """Return where each client's training began, stacked: an update's length is measured from there."""
        return downloads.tensors

    def held_out_share(self, download: Payload) -> float:
        """Return the share of its training data that a client holds out in this round."""
        return 0.0

    def count_epochs(self) -> tuple[int, int]:
        """Return over how many epochs of its data a client trains in a round, and for a personal model."""
        return self.training.local_epochs, 0

    def alpha(self, server: ServerState) -> Tensor | None:
        """Return the weights [receivers, layers, senders] of all clients, if the method has them."""
        return None

    def notice(self, rounds: float) -> str:
        """Return what a user should know if a client trains in `rounds` rounds on average."""
        return ""

    def admit(self, server: ServerState, seed: int) -> ServerState:
        """Return a copy of `server` with one extra row for an unseen client; only that row changes in its rounds."""
        return server

    def init_unseen(self, server: ServerState, initial: ClientState) -> ClientState:
        """Return the private state of the client that `admit` added; `initial` is from `init_client`."""
        return initial


class Engine(Protocol):
    """Where the clients live: a thread pool, one stacked tensor, or other machines."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        """Return what came back from each client of the cohort, unchecked; one may fail alone."""

    def commit(self, accepted: Tensor) -> None:
        """Advance the private state of the accepted clients (ids); the others keep theirs."""

    def evaluate(
        self, cohort: Cohort, downloads: Payload, *, whole: bool = False
    ) -> tuple[ClientMetrics, dict[int, Failure]]:
        """Test the personal models on the clients' own test data; return also the failures by id. Change nothing.

        `whole`: compute every metric of the task, not only the headline.
        """

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        """Return the personal models; an empty one for a client that fails."""

    def state(self) -> Params: ...
    def load(self, state: Params) -> None: ...


def all_sent(count: int, layers: Layers) -> Tensor:
    return torch.ones(count, len(layers), dtype=torch.bool)
