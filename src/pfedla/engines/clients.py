"""What the simulating engines share: everybody's private state, data on the device, and which state counts."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from pfedla.contracts import (
    Algorithm,
    Answer,
    ClientMetrics,
    ClientState,
    Cohort,
    Failure,
    Params,
    Payload,
    Recalibrate,
    Task,
)
from pfedla.data.federation import Federation
from pfedla.engines.allocator import keep_freed_memory
from pfedla.engines.client import Client, Test, moved
from pfedla.errors import PfedlaError, Stopped
from pfedla.faults import Faults
from pfedla.tree import stack
from pfedla.uploads import NO_ANSWER

Outcome = tuple[ClientState, Answer] | Exception
UNKNOWN: Test = (torch.tensor(torch.nan), torch.tensor(torch.nan))
TRAINED = "__trained__"
NO_FAULTS = Faults()

R = TypeVar("R")


class SimulatedClients(ABC):
    """Implements the Engine contract; a subclass says how `local_update` and evaluation are mapped over clients."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, *, device: str = "cpu", threads: int = 0,
        recalibrate: Recalibrate = "unsampled", compile: bool = False, faults: Faults = NO_FAULTS,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.device = usable_device(device)
        self.compile = compile
        self.algorithm = dataclasses.replace(algorithm, task=self._task(algorithm, federation.shape))
        self.federation = federation
        self.threads = threads or os.cpu_count() or 1
        self.recalibrate = recalibrate
        self.faults = faults
        self.stopping = stopping  # asked before each client trains; if true it raises Stopped, and nobody's state has changed
        initial = self.algorithm.init_client()
        self._clients: list[ClientState] = [initial] * len(federation)  # states are never written into
        self._trained = torch.zeros(len(federation), dtype=torch.bool)
        self._pending: dict[int, ClientState] = {}

    def _task(self, algorithm: Algorithm, shape: tuple[int, ...]) -> Task:
        """The algorithm's task in the form that this engine runs."""
        return algorithm.task.to(self.device)

    @abstractmethod
    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        """Every client's private state after its local update and its answer, or what it raised, in the order of the cohort."""

    @abstractmethod
    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        """The test of every client's personal model, in the order of the cohort; UNKNOWN for one that raises."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: list[Answer | Failure] = [NO_ANSWER] * len(cohort.ids)
        answering = self.faults.answering(cohort).nonzero().squeeze(1)
        if len(answering) < len(answers):
            cohort, downloads = cohort.only(answering), downloads.rows(answering)
        attackers = set(self.faults.attacking(len(self.federation), cohort.seed).tolist())
        self._pending = {}
        outcomes = self._train(cohort, self._on_device(downloads)) if len(answering) else []
        for position, (row, client, outcome) in enumerate(zip(answering.tolist(), cohort.ids.tolist(), outcomes, strict=True)):
            bad = client in attackers and self.faults.attacks(cohort, client)
            if isinstance(outcome, Exception):
                answers[row] = Failure("raised", f"{type(outcome).__name__}: {outcome}".splitlines()[0], outcome)
                continue
            self._pending[client], answer = outcome
            answers[row] = self._attacked(cohort, client, downloads.rows(position), answer) if bad else answer
        return answers

    def _attacked(self, cohort: Cohort, client: int, download: Payload, answer: Answer) -> Answer:
        index = self.algorithm.task.layers.index
        start = {name: value.cpu() for name, value in self._clients[client].items()}
        start |= {name: value for name, value in download.tensors.items() if download.sent[index[name]]}
        return answer._replace(upload=self.faults.attacked(cohort, client, answer.upload, start))

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        tests = self._evaluate(cohort, self._on_device(downloads))
        metrics = [self.client(client).metrics(test) for client, test in zip(cohort.ids.tolist(), tests, strict=True)]
        return ClientMetrics(*(torch.tensor(column, dtype=torch.float64) for column in zip(*metrics, strict=True)))

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self._clients[client] = self._pending[client]
            self._trained[client] = True
        self._pending = {}

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        downloads = self._on_device(downloads)
        models = []
        for row, client in enumerate(cohort.ids.tolist()):
            model = attempt(self._personal, cohort, client, own_row(downloads, row))
            models.append({} if isinstance(model, Exception) else {name: value.cpu() for name, value in model.items()})
        return models

    def state(self) -> Params:
        """Everybody's private state, stacked, and who has trained."""
        stacked = {name: value.cpu() for name, value in stack(self._clients).items()}
        return {**stacked, TRAINED: self._trained.clone()}

    def load(self, state: Params) -> None:
        self._trained = state[TRAINED].clone()
        private = {name: value.to(self.device) for name, value in state.items() if name != TRAINED}
        # Copies, not views: they then lie in memory as fresh tensors do, and small products round the same way.
        self._clients = [
            {name: value[client].clone() for name, value in private.items()} for client in range(len(self.federation))
        ]

    def __enter__(self) -> Self:
        # One intra-op thread: the clients are the parallelism, and results do not depend on how a sum is cut up.
        self._outer_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.set_num_threads(self._outer_threads)

    def client(self, number: int) -> Client:
        train, test = self.federation.train[number], self.federation.test[number]
        return Client(number, train, test, self.federation, self.algorithm, self.device, self.recalibrate)

    def _epochs(self, cohort: Cohort, client: int) -> int:
        return self.faults.epochs(cohort, client, self.algorithm.training.epochs)

    def _personal(self, cohort: Cohort, client: int, download: Payload) -> Params:
        return self.client(client).personal(self._clients[client], bool(self._trained[client]), download, cohort)

    def _on_device(self, payload: Payload) -> Payload:
        return moved(payload, self.device)


def attempt(function: Callable[..., R], *args: object) -> R | Exception:
    """What a client's function returns, or what it raised: one client's failure is not the others'."""
    try:
        return function(*args)
    except Stopped:
        raise
    except Exception as error:
        return error


def own_row(payload: Payload, row: int) -> Payload:
    """One client's share, copied: small products round differently by where a number lies in memory, and a client's results
    must not depend on who else is in its cohort."""
    one = payload.rows(row)
    tensors, extras = ({name: v.clone() for name, v in part.items()} for part in (one.tensors, one.extras))
    return Payload(tensors, one.sent.clone(), extras)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None
    return device
