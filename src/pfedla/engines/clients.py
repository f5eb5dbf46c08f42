"""What the two simulating engines share: everybody's private state, data on the device, and which state counts."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor

from pfedla.augmentation import draw_crops
from pfedla.contracts import (
    Algorithm,
    Answer,
    ClientMetrics,
    ClientState,
    Cohort,
    Failure,
    LocalData,
    LocalResult,
    Params,
    Payload,
    Recalibrate,
    Task,
)
from pfedla.data.federation import Examples, Federation
from pfedla.engines.allocator import keep_freed_memory
from pfedla.errors import PfedlaError, Stopped
from pfedla.faults import Faults
from pfedla.seeds import generator
from pfedla.tree import is_finite, stack
from pfedla.uploads import NO_ANSWER

Test = tuple[Tensor, Tensor]  # examples right, mean loss
Outcome = tuple[LocalResult, Test] | Exception
UNKNOWN: Test = (torch.tensor(torch.nan), torch.tensor(torch.nan))
TRAINED = "__trained__"
RECALIBRATION_EXAMPLES = 2048
CPU = torch.device("cpu")
NO_FAULTS = Faults()
NO_DATA = LocalData(*[torch.empty(0)] * len(LocalData._fields))

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
        """Every client's local update and the test of its trained model, or what it raised, in the order of the cohort."""

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
            answer = attempt(self._answer, cohort, client, downloads.rows(position), outcome, bad)
            if isinstance(answer, Exception):
                answers[row] = Failure("raised", f"{type(answer).__name__}: {answer}".splitlines()[0], answer)
            else:
                answers[row] = answer
        return answers

    def _answer(self, cohort: Cohort, client: int, download: Payload, outcome: Outcome, attacks: bool) -> Answer:
        if isinstance(outcome, Exception):
            raise outcome
        result, test = outcome
        before, after = self._clients[client], result.client
        kinds = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in (before, after)]
        if kinds[0] != kinds[1]:
            raise PfedlaError("the private state has changed its names, shapes or dtypes")
        upload = _moved(result.upload, CPU)
        if attacks:
            index = self.algorithm.task.layers.index
            start = {name: value.cpu() for name, value in before.items()}
            start |= {name: value for name, value in download.tensors.items() if download.sent[index[name]]}
            upload = self.faults.attacked(cohort, client, upload, start)
        answer = Answer(upload, result.loss.cpu(), *self._metrics(client, test), is_finite(result.model) and is_finite(after))
        self._pending[client] = after
        return answer

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        tests = self._evaluate(cohort, self._on_device(downloads))
        metrics = [self._metrics(client, test) for client, test in zip(cohort.ids.tolist(), tests, strict=True)]
        return ClientMetrics(*(torch.tensor(column, dtype=torch.float64) for column in zip(*metrics, strict=True)))

    def _metrics(self, client: int, test: Test) -> tuple[float, float]:
        """Accuracy and loss."""
        correct, loss = test
        return correct.item() / len(self.federation.test[client].y), loss.item()

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

    # For one client

    def _split(self, client: int, seed: int) -> tuple[Examples, Examples]:
        """What a client trains on, and what it holds out of it for validation: fixed once, by the seed."""
        x, y = self.federation.train[client]
        held_out = min(int(len(y) * self.algorithm.held_out_share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:
            return Examples(x, y), Examples(x[:0], y[:0])
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, client))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return Examples(x[kept], y[kept]), Examples(x[apart], y[apart])

    def _local_data(self, cohort: Cohort, client: int, epochs: int | None = None) -> LocalData:
        """All that a client trains on in a round, or the first of its epochs."""
        examples, held_out = self._split(client, cohort.seed)
        draws = generator(cohort.seed, "batches", cohort.round, client)
        training = self.algorithm.training
        order = torch.stack([torch.randperm(len(examples.y), generator=draws) for _ in range(training.epochs)])
        # A stream of its own: with and without crops, the batches are the same.
        shaken = len(examples.y) if training.augment else 0
        crops = draw_crops(training.epochs, shaken, generator(cohort.seed, "crops", cohort.round, client))
        return LocalData(
            x=self._inputs(examples.x), y=examples.y.to(self.device),
            order=order[:epochs].to(self.device), crops=crops[:epochs].to(self.device),
            held_out_x=self._inputs(held_out.x), held_out_y=held_out.y.to(self.device),
        )  # fmt: skip

    def _epochs(self, cohort: Cohort, client: int) -> int:
        return self.faults.epochs(cohort, client, self.algorithm.training.epochs)

    def _test_data(self, client: int) -> tuple[Tensor, Tensor]:
        examples = self.federation.test[client]
        return self._inputs(examples.x), examples.y.to(self.device)

    def _inputs(self, x: Tensor) -> Tensor:
        return self.algorithm.task.laid_out(self.federation.normalised(x.to(self.device)))

    def _personal(self, cohort: Cohort, client: int, download: Payload) -> Params:
        """The personal model; a client that never trained has no statistics of its own, they are estimated on a copy."""
        data = self._local_data(cohort, client) if self.algorithm.personalizes_on_data else NO_DATA
        model = self.algorithm.personalize(self._clients[client], download, data)
        return self._recalibrated(model, client) if self._needs_recalibration(client) else model

    def _needs_recalibration(self, client: int) -> bool:
        if not self.algorithm.task.layers.statistics or self.recalibrate == "never":
            return False
        return self.recalibrate == "always" or not self._trained[client]

    def _recalibrated(self, model: Params, client: int) -> Params:
        x = self.federation.train[client].x
        if len(x) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x = x[torch.linspace(0, len(x) - 1, RECALIBRATION_EXAMPLES).long()]
        with torch.no_grad():
            return self.algorithm.task.recalibrated(model, self._inputs(x))

    def _on_device(self, payload: Payload) -> Payload:
        return _moved(payload, self.device)


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


def _moved(payload: Payload, device: torch.device) -> Payload:
    tensors, extras = ({name: v.to(device) for name, v in part.items()} for part in (payload.tensors, payload.extras))
    return Payload(tensors, payload.sent.to(device), extras)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None
    return device
