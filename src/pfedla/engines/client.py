"""What one client does with its data, and what the simulating engines share: everybody's private state."""

import ctypes
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from pfedla.core.contracts import (
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
    generator,
)
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.faults import Faults
from pfedla.core.layers import is_finite, stack
from pfedla.core.settings import EngineSettings, Recalibrate
from pfedla.core.tasks import ClassificationTask
from pfedla.core.training import draw_crops, evaluate, normalise
from pfedla.core.uploads import NO_ANSWER
from pfedla.data.federation import Examples, Federation

Test = tuple[Tensor, Tensor]  # number of examples right, mean loss
Outcome = tuple[ClientState, Answer] | Exception
CPU = torch.device("cpu")
RECALIBRATION_EXAMPLES = 2048
NO_DATA = LocalData(torch.empty(0), torch.empty(0), torch.empty(0))
TRAINED = "__trained__"
NO_FAULTS = Faults()

R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client's own side, the same in a thread and at a site."""

    number: int  # every draw comes from it
    train: Examples
    test: Examples
    mean: tuple[float, ...]  # of uint8 images, per channel; empty: examples are used as they are
    std: tuple[float, ...]
    algorithm: Algorithm  # its task in the form that is run, on the device
    device: torch.device = CPU
    recalibrate: Recalibrate = "unsampled"

    def update(
        self, state: ClientState, download: Payload, cohort: Cohort, *, has_trained: bool, epochs: int | None = None
    ) -> tuple[ClientState, Answer]:
        """Train for a round, or for the first of its epochs; return the private state after it and what is sent."""
        data = self.local_data(cohort, download, has_trained=has_trained, epochs=epochs)
        result = self.algorithm.local_update(state, download, data)
        return result.client, self.answer(state, result, self.evaluate(result.model))

    def answer(self, before: ClientState, result: LocalResult, test: Test) -> Answer:
        after = result.client
        kinds = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in (before, after)]
        if kinds[0] != kinds[1]:
            raise PfedlaError("the private state has changed its names, shapes or dtypes")
        finite = is_finite(result.model) and is_finite(after)
        return Answer(move(result.upload, CPU), result.loss.cpu(), *self.metrics(test), finite)

    def metrics(self, test: Test) -> tuple[float, float]:
        """Return accuracy and loss."""
        correct, loss = test
        return correct.item() / len(self.test.y), loss.item()

    def evaluate(self, model: Params) -> Test:
        with torch.no_grad():
            return evaluate(self.algorithm.task, model, *self.test_data())

    def personalize(self, state: ClientState, download: Payload, cohort: Cohort, *, has_trained: bool) -> Params:
        """Return the personal model. A client that never trained has its statistics estimated on a copy."""
        algorithm = self.algorithm
        data = NO_DATA._replace(has_trained=torch.tensor(has_trained, device=self.device))
        if algorithm.personalizes_on_data:
            data = self.local_data(cohort, download, has_trained=has_trained)
        model = algorithm.personalize(state, download, data)
        estimates = self.recalibrate == "always" or (self.recalibrate == "unsampled" and not has_trained)
        if not algorithm.task.layers.statistics or not estimates:
            return model
        x = self.train.x
        if len(x) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x = x[torch.linspace(0, len(x) - 1, RECALIBRATION_EXAMPLES).long()]
        with torch.no_grad():
            recalibrated: Params = algorithm.task.recalibrate(model, self._inputs(x))
        return recalibrated

    def split(self, seed: int, share: float) -> tuple[Examples, Examples]:
        """Return what a client trains on, and the share that it holds out for validation: fixed once, by the seed."""
        x, y = self.train
        held_out = min(int(len(y) * share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:
            return Examples(x, y), Examples(x[:0], y[:0])
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, self.number))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return Examples(x[kept], y[kept]), Examples(x[apart], y[apart])

    def local_data(
        self, cohort: Cohort, download: Payload, *, has_trained: bool, epochs: int | None = None
    ) -> LocalData:
        """Return all that a client trains on in a round, or in the first of its epochs."""
        examples, held_out = self.split(cohort.seed, self.algorithm.held_out_share(download))
        draws = generator(cohort.seed, "batches", cohort.round, self.number)
        training = self.algorithm.training
        order = torch.stack([torch.randperm(len(examples.y), generator=draws) for _ in range(training.local_epochs)])
        # A stream of its own: with and without crops, the batches are the same.
        count = len(examples.y) if training.augment else 0
        crops = draw_crops(training.local_epochs, count, generator(cohort.seed, "crops", cohort.round, self.number))
        return LocalData(
            x=self._inputs(examples.x),
            y=examples.y.to(self.device),
            order=order[:epochs].to(self.device),
            crops=crops[:epochs].to(self.device),
            held_out_x=self._inputs(held_out.x),
            held_out_y=held_out.y.to(self.device),
            has_trained=torch.tensor(has_trained, device=self.device),
        )

    def test_data(self) -> tuple[Tensor, Tensor]:
        return self._inputs(self.test.x), self.test.y.to(self.device)

    def _inputs(self, x: Tensor) -> Tensor:
        inputs: Tensor = self.algorithm.task.lay_out(normalise(x.to(self.device), self.mean, self.std))
        return inputs


class SimulatedClients(ABC):
    """Implements the Engine contract; a subclass says how local updates and evaluation are mapped over clients."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        settings: EngineSettings = EngineSettings(),  # noqa: B008 (frozen)
        *,
        recalibrate: Recalibrate = "unsampled",
        faults: Faults = NO_FAULTS,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings = settings
        self.device = usable_device(settings.device)
        self.mean, self.std = federation.mean, federation.std
        example = normalise(federation.train[0].x[:1].to(self.device), self.mean, self.std)[0]
        self.algorithm = algorithm.model_copy(update={"task": self._prepare(algorithm, example)})
        self.federation = federation
        self.threads = settings.threads or os.cpu_count() or 1
        self.recalibrate = recalibrate
        self.faults = faults if faults.active else None
        self.stopping = stopping  # asked before each client trains; if true, Stopped is raised and no state has changed
        self._num_clients = len(federation)
        initial = self.algorithm.init_client()
        self._clients: list[ClientState] = [initial] * self._num_clients  # states are never written into
        self._trained = torch.zeros(self._num_clients, dtype=torch.bool)
        self._pending: dict[int, ClientState] = {}

    def _prepare(self, algorithm: Algorithm, example: Tensor) -> ClassificationTask:
        """Return the algorithm's task in the form that this engine runs."""
        task: ClassificationTask = algorithm.task.to(self.device)
        return task

    @abstractmethod
    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        """Return every client's private state after its update and its answer, or what it raised, in cohort order."""

    @abstractmethod
    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Exception]:
        """Test every client's personal model; return what it raised for one that fails."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: list[Answer | Failure] = [NO_ANSWER] * len(cohort.ids)
        answering = torch.arange(len(cohort.ids))
        if self.faults is not None:
            answering = self.faults.answering(cohort).nonzero().squeeze(1)
            cohort, downloads = cohort.only(answering), downloads.rows(answering)
        self._pending = {}
        outcomes = self._train(cohort, move(downloads, self.device)) if len(answering) else []
        for position, (row, client) in enumerate(zip(answering.tolist(), cohort.ids.tolist(), strict=True)):
            outcome = outcomes[position]
            if isinstance(outcome, Exception):
                answers[row] = failure_of("raised", outcome)
                continue
            self._pending[client], answer = outcome
            answers[row] = answer if self.faults is None else self._attack(cohort, client, downloads.rows(position), answer)
        return answers

    def _attack(self, cohort: Cohort, client: int, download: Payload, answer: Answer) -> Answer:
        """Return what the client sends: its answer, or in place of it what an attacker sends."""
        assert self.faults is not None
        attackers = self.faults.attacking(self._num_clients, cohort.seed).tolist()
        if client not in attackers or not self.faults.attacks(cohort, client):
            return answer
        index = self.algorithm.task.layers.index
        start = {name: value.cpu() for name, value in self._clients[client].items()}
        start |= {name: value for name, value in download.tensors.items() if download.sent[index[name]]}
        return answer._replace(upload=self.faults.attacked(cohort, client, answer.upload, start))

    def evaluate(self, cohort: Cohort, downloads: Payload) -> tuple[ClientMetrics, dict[int, Failure]]:
        metrics, failures = [], {}
        tests = self._evaluate(cohort, move(downloads, self.device))
        for client, test in zip(cohort.ids.tolist(), tests, strict=True):
            if isinstance(test, Exception):
                failures[client] = failure_of("evaluation raised", test)
                metrics.append((torch.nan, torch.nan))
            else:
                metrics.append(self.client(client).metrics(test))
        columns = (torch.tensor(column, dtype=torch.float64) for column in zip(*metrics, strict=True))
        return ClientMetrics(*columns), failures

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self._clients[client] = self._pending[client]
            self._trained[client] = True
        self._pending = {}

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        downloads = move(downloads, self.device)
        models = []
        for row, client in enumerate(cohort.ids.tolist()):
            model = attempt(self._personalize, cohort, client, downloads.rows(row))
            models.append({} if isinstance(model, Exception) else {name: v.cpu() for name, v in model.items()})
        return models

    def state(self) -> Params:
        """Return everybody's private state, stacked, and who has trained."""
        stacked = {name: value.cpu() for name, value in stack(self._clients).items()}
        return {**stacked, TRAINED: self._trained.clone()}

    def load(self, state: Params) -> None:
        self._trained = state[TRAINED].clone()
        private = {name: value.to(self.device) for name, value in state.items() if name != TRAINED}
        # Clones: a client's state must not keep everybody's alive, and kernels may round by how a tensor is aligned.
        self._clients = [
            {name: value[client].clone() for name, value in private.items()} for client in range(self._num_clients)
        ]

    def __enter__(self) -> Self:
        # One intra-op thread: the clients are the parallelism, and results do not depend on how a sum is split.
        one_thread.acquire()
        keep_freed_memory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        one_thread.release()

    def client(self, number: int) -> Client:
        return Client(
            number=number,
            train=self.federation.train[number],
            test=self.federation.test[number],
            mean=self.mean,
            std=self.std,
            algorithm=self.algorithm,
            device=self.device,
            recalibrate=self.recalibrate,
        )

    def _epochs(self, cohort: Cohort, client: int) -> int:
        budget = self.algorithm.training.local_epochs
        return budget if self.faults is None else self.faults.epochs(cohort, client, budget)

    def _personalize(self, cohort: Cohort, client: int, download: Payload) -> Params:
        has_trained = bool(self._trained[client])
        return self.client(client).personalize(self._clients[client], download, cohort, has_trained=has_trained)


def attempt(function: Callable[..., R], *args: object) -> R | Exception:
    """Return what a client's function returns, or what it raised: one client's failure is not the others'."""
    try:
        return function(*args)
    except Stopped:
        raise
    except Exception as error:
        return error


def failure_of(reason: str, error: Exception) -> Failure:
    return Failure(reason, f"{type(error).__name__}: {error}".splitlines()[0], error)


def move(payload: Payload, device: torch.device) -> Payload:
    """Return the payload on the device, in memory of its own: kernels may round by how a tensor is aligned."""
    tensors, extras = ({n: v.to(device) for n, v in part.items()} for part in (payload.tensors, payload.extras))
    return Payload(tensors, payload.sent.to(device), extras)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None
    return device


class _OneThread:
    """torch's number of intra-op threads is global: set to one by the first engine, restored after the last."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 1

    def acquire(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.set_num_threads(self._before)


one_thread = _OneThread()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step.

    A training step allocates and frees a few MiB; if they are returned to the system, each step faults its pages in
    again, which costs up to a third of a small CNN's step. Holds for the whole process; does nothing elsewhere.
    """
    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt if sys.platform == "linux" else None
    except (AttributeError, OSError):  # another C library
        return
    if mallopt:
        mallopt(mmap_threshold, 2**25)  # the largest that every glibc takes
        mallopt(trim_threshold, 2**28)
