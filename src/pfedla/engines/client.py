"""What one client does with its data, and what the simulating engines share: everybody's private state."""

import ctypes
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
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
NO_DATA = LocalData(x=torch.empty(0), y=torch.empty(0), order=torch.empty(0))
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
        """Train for a round, or its first epochs; return the private state after it and what is sent."""
        data = self.local_data(cohort, download, has_trained=has_trained, epochs=epochs)
        result = self.algorithm.local_update(state, download, data)
        return result.client, self.answer(state, result, self.evaluate(result.model))

    def answer(self, before: ClientState, result: LocalResult, test: Test) -> Answer:
        states = (before, result.client)
        kinds = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in states]
        if kinds[0] != kinds[1]:
            raise PfedlaError("local_update changed the names, shapes or dtypes of the private state")
        accuracy, loss = self.metrics(test)
        return Answer(
            upload=move(result.upload, CPU),
            training_loss=result.loss.cpu(),
            accuracy=accuracy,
            loss=loss,
            finite=is_finite(result.model) and is_finite(result.client),
        )

    def metrics(self, test: Test) -> tuple[float, float]:
        """Return accuracy and loss."""
        correct, loss = test
        return correct.item() / len(self.test.y), loss.item()

    def evaluate(self, model: Params) -> Test:
        with torch.no_grad():
            return evaluate(self.algorithm.task, model, *self.test_data())

    def personalize(self, state: ClientState, download: Payload, cohort: Cohort, *, has_trained: bool) -> Params:
        """Return the personal model; estimate the statistics of a client that never trained."""
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
        """Return what a client trains on, and the share that it holds out, fixed by the seed."""
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
        training, count = self.algorithm.training, len(examples.y)
        order = torch.stack([torch.randperm(count, generator=draws) for _ in range(training.local_epochs)])
        # A stream of its own: with and without crops, the batches are the same.
        draws = generator(cohort.seed, "crops", cohort.round, self.number)
        crops = draw_crops(training.local_epochs, count if training.augment else 0, draws)
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
    """Implements Engine; a subclass says how local updates and evaluation are mapped over the clients."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        settings: EngineSettings,
        *,
        recalibrate: Recalibrate = "unsampled",
        faults: Faults = NO_FAULTS,
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings = settings
        self.device = usable_device(settings.device)
        example = normalise(federation.train[0].x[:1].to(self.device), federation.mean, federation.std)[0]
        self.algorithm = algorithm.model_copy(update={"task": self._prepare(algorithm, example)})
        self.federation = federation
        self.threads = settings.threads or os.cpu_count() or 1
        self.recalibrate = recalibrate
        self.faults = faults
        self.stopping = stopping  # asked before each client trains; if true, Stopped is raised, no state changes
        initial = self.algorithm.init_client()
        self._clients: list[ClientState] = [initial] * len(federation)  # states are never written into
        self._trained = torch.zeros(len(federation), dtype=torch.bool)
        self._pending: dict[int, ClientState] = {}

    def _prepare(self, algorithm: Algorithm, example: Tensor) -> ClassificationTask:
        """Return the algorithm's task in the form that this engine runs."""
        task: ClassificationTask = algorithm.task.to(self.device)
        return task

    @abstractmethod
    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        """Return every client's private state after its update and its answer, or what it raised."""

    @abstractmethod
    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Exception]:
        """Test every client's personal model; return what it raised for one that fails."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: list[Answer | Failure] = [NO_ANSWER] * len(cohort.ids)
        answering = self.faults.choose_answering(cohort).nonzero().squeeze(1)
        if len(answering) < len(answers):
            cohort, downloads = cohort.only(answering), downloads.rows(answering)
        attackers = set(self.faults.choose_attackers(len(self.federation), cohort.seed).tolist())
        self._pending = {}
        outcomes = self._train(cohort, move(downloads, self.device)) if len(answering) else []
        for position, (client, outcome) in enumerate(zip(cohort.ids.tolist(), outcomes, strict=True)):
            if isinstance(outcome, Exception):
                answers[answering[position]] = failure_of("raised", outcome)
                continue
            self._pending[client], answer = outcome
            if client in attackers and self.faults.attacks(cohort, client):
                answer = self._falsify(cohort, client, downloads.rows(position), answer)
            answers[answering[position]] = answer
        return answers

    def _falsify(self, cohort: Cohort, client: int, download: Payload, answer: Answer) -> Answer:
        index = self.algorithm.task.layers.index
        start = {name: value.cpu() for name, value in self._clients[client].items()}
        start |= {name: value for name, value in download.tensors.items() if download.sent[index[name]]}
        return answer._replace(upload=self.faults.falsify(cohort, client, answer.upload, start))

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
            model = attempt(self._personalize, cohort, client, copy_row(downloads, row))
            models.append({} if isinstance(model, Exception) else {name: v.cpu() for name, v in model.items()})
        return models

    def state(self) -> Params:
        """Return everybody's private state, stacked, and who has trained."""
        stacked = {name: value.cpu() for name, value in stack(self._clients).items()}
        return {**stacked, TRAINED: self._trained.clone()}

    def load(self, state: Params) -> None:
        self._trained = state[TRAINED].clone()
        private = Payload({name: v.to(self.device) for name, v in state.items() if name != TRAINED}, self._trained)
        self._clients = [copy_row(private, client).tensors for client in range(len(self.federation))]

    def __enter__(self) -> Self:
        # One intra-op thread: the clients are the parallelism, and results do not depend on how a sum is
        # split.
        one_thread.acquire()
        keep_freed_memory()
        return self

    def __exit__(self, *error: object) -> None:
        one_thread.release()

    def client(self, number: int) -> Client:
        return Client(
            number=number,
            train=self.federation.train[number],
            test=self.federation.test[number],
            mean=self.federation.mean,
            std=self.federation.std,
            algorithm=self.algorithm,
            device=self.device,
            recalibrate=self.recalibrate,
        )

    def _epochs(self, cohort: Cohort, client: int) -> int:
        return self.faults.limit_epochs(cohort, client, self.algorithm.training.local_epochs)

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
    return Failure(reason, f"{type(error).__name__}: {error}".splitlines()[0], error=error)


def move(payload: Payload, device: torch.device) -> Payload:
    tensors = {name: value.to(device) for name, value in payload.tensors.items()}
    extras = {name: value.to(device) for name, value in payload.extras.items()}
    return Payload(tensors, payload.sent.to(device), extras=extras)


def copy_row(payload: Payload, row: int) -> Payload:
    """Return one client's payload in memory of its own, as a client on another machine has it.

    Kernels may round by how a tensor is aligned, and a view would keep the whole cohort's tensors alive.
    """
    one = payload.rows(row)
    tensors, extras = ({name: v.clone() for name, v in part.items()} for part in (one.tensors, one.extras))
    return Payload(tensors, one.sent.clone(), extras=extras)


def usable_device(name: str) -> torch.device:
    """Return the device, or refuse one that does not work here."""
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None
    return device


class _OneThread:
    """One intra-op thread while an engine is active. torch keeps the number per thread and for new threads.

    Engines in two threads at once each set their own thread's number; all restore what the first one found.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, 1

    def acquire(self) -> None:
        with self._lock:
            self._before = self._before if self._users else torch.get_num_threads()
            self._users += 1
            torch.set_num_threads(1)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            torch.set_num_threads(self._before)


one_thread = _OneThread()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, in the whole process; do nothing elsewhere.

    A training step allocates and frees a few MiB; if they are returned to the system, each step faults its
    pages in again, which costs up to a third of a small CNN's step.
    """
    trim_threshold, mmap_threshold = -1, -3  # <malloc.h>
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt if sys.platform == "linux" else None
    except (AttributeError, OSError):  # another C library
        return
    if mallopt:
        mallopt(mmap_threshold, 2**25)  # the largest that every glibc takes
        mallopt(trim_threshold, 2**28)
