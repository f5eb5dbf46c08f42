"""What one client does with its data, and what the simulating engines share."""

import ctypes
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeVar

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
    Task,
    generator,
)
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.faults import choose_answering, choose_attackers, falsify, happens, limit_epochs
from pfedla.core.layers import is_finite, stack
from pfedla.core.settings import EngineSettings, Faults, Recalibrate
from pfedla.core.tasks import DirectTask
from pfedla.core.training import draw_crops, evaluate, normalise
from pfedla.core.uploads import NO_ANSWER
from pfedla.data.federation import Examples, Federation, Outline

Test = tuple[float, float]  # accuracy, mean loss
Outcome = tuple[ClientState, Answer]
CPU = torch.device("cpu")
RECALIBRATION_EXAMPLES = 2048
TRAINED = "__trained__"
NO_FAULTS = Faults()
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client's own side, the same in a thread and at a site."""

    number: int  # every draw comes from it
    train: Examples
    test: Examples
    outline: Outline  # says how examples are normalised
    algorithm: Algorithm  # its task in the form that is run, on the device
    state: ClientState  # private; never written into
    has_trained: bool = False
    recalibrate: Recalibrate = "unsampled"
    device: torch.device = CPU

    def update(self, download: Payload, cohort: Cohort, epochs: int | None = None) -> Outcome:
        """Train for a round, or its first epochs; return the private state after it and what is sent."""
        result = self.algorithm.local_update(self.state, download, self.local_data(cohort, download, epochs))
        return result.client, self.answer(result, self.evaluate(result.model))

    def answer(self, result: LocalResult, test: Test) -> Answer:
        kinds = ({n: (v.shape, v.dtype) for n, v in state.items()} for state in (self.state, result.client))
        if next(kinds) != next(kinds):
            raise PfedlaError("local_update changed the names, shapes or dtypes of the private state")
        finite = is_finite(result.model) and is_finite(result.client)
        return Answer(result.upload.to(CPU), result.loss.cpu(), accuracy=test[0], loss=test[1], finite=finite)

    def evaluate(self, model: Params) -> Test:
        with torch.no_grad():
            correct, loss = evaluate(self.algorithm.task, model, *self.test_data())
        return correct.item() / len(self.test.y), loss.item()

    def personalize(self, download: Payload, cohort: Cohort) -> Params:
        """Return the personal model; estimate the statistics of a client that never trained."""
        has_trained = torch.tensor(self.has_trained, device=self.device)
        data = LocalData(x=torch.empty(0), y=torch.empty(0), order=torch.empty(0), has_trained=has_trained)
        if self.algorithm.personalizes_on_data:
            data = self.local_data(cohort, download)
        model = self.algorithm.personalize(self.state, download, data)
        estimates = self.recalibrate == "always" or (self.recalibrate == "unsampled" and not self.has_trained)
        if not self.algorithm.task.layers.statistics or not estimates:
            return model
        x = self.train.x
        if len(x) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x = x[torch.linspace(0, len(x) - 1, RECALIBRATION_EXAMPLES).long()]
        with torch.no_grad():
            return self.algorithm.task.recalibrate(model, self._inputs(x))

    def split(self, seed: int, share: float) -> tuple[Examples, Examples]:
        """Return what a client trains on, and the share that it holds out, fixed by the seed."""
        x, y = self.train
        held_out = min(int(len(y) * share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:
            return self.train, Examples(x[:0], y[:0])
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, self.number))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return Examples(x[kept], y[kept]), Examples(x[apart], y[apart])

    def local_data(self, cohort: Cohort, download: Payload, epochs: int | None = None) -> LocalData:
        """Return all that a client trains on in a round, or in the first of its epochs."""
        examples, held_out = self.split(cohort.seed, self.algorithm.held_out_share(download))
        training, count = self.algorithm.training, len(examples.y)
        # Two streams: with and without crops, the batches are the same.
        batches, moves = (generator(cohort.seed, what, cohort.round, self.number) for what in ("batches", "crops"))
        order = torch.stack([torch.randperm(count, generator=batches) for _ in range(training.local_epochs)])
        crops = draw_crops(training.local_epochs, count if training.augment else 0, moves)
        return LocalData(
            x=self._inputs(examples.x),
            y=examples.y.to(self.device),
            order=order[:epochs].to(self.device),
            crops=crops[:epochs].to(self.device),
            held_out_x=self._inputs(held_out.x),
            held_out_y=held_out.y.to(self.device),
            has_trained=torch.tensor(self.has_trained, device=self.device),
        )

    def test_data(self) -> tuple[Tensor, Tensor]:
        return self._inputs(self.test.x), self.test.y.to(self.device)

    def _inputs(self, x: Tensor) -> Tensor:
        return self.algorithm.task.lay_out(normalise(x.to(self.device), self.outline.mean, self.outline.std))


def make_client(
    algorithm: Algorithm,
    outline: Outline,
    examples: tuple[Examples, Examples],
    *,
    number: int,
    device: torch.device,
    recalibrate: Recalibrate,
) -> Client:
    """Return a client that is alone on its machine, or in its process; `examples`: for training and for its test."""
    train, test = examples
    example = outline.normalise(train.x[:1].to(device))[0]
    direct = DirectTask(algorithm.task.to(device).module, example)
    algorithm = algorithm.model_copy(update={"task": direct})
    return Client(
        number=number,
        train=train,
        test=test,
        outline=outline,
        algorithm=algorithm,
        state=algorithm.init_client(),
        recalibrate=recalibrate,
        device=device,
    )


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
        self.settings, self.device = settings, usable_device(settings.device)
        example = normalise(federation.train[0].x[:1].to(self.device), federation.mean, federation.std)[0]
        self.algorithm = algorithm.model_copy(update={"task": self._prepare(algorithm, example)})
        self.faults = faults if faults.active else None
        self.stopping = stopping  # asked before each client trains; if true, Stopped is raised, no state changes
        initial = self.algorithm.init_client()
        self.clients = [
            Client(
                number=number,
                train=train,
                test=test,
                outline=federation,
                algorithm=self.algorithm,
                state=initial,
                recalibrate=recalibrate,
                device=self.device,
            )
            for number, (train, test) in enumerate(zip(federation.train, federation.test, strict=True))
        ]
        self._pending: dict[int, ClientState] = {}

    def _prepare(self, algorithm: Algorithm, example: Tensor) -> Task:
        """Return the algorithm's task in the form that this engine runs."""
        return algorithm.task.to(self.device)

    @abstractmethod
    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome | Failure]:
        """Return every client's private state after its update, and its answer."""

    @abstractmethod
    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Failure]:
        """Test every client's personal model."""

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: dict[int, Answer | Failure] = dict.fromkeys(cohort.ids.tolist(), NO_ANSWER)
        if self.faults:
            answering = choose_answering(self.faults, cohort).nonzero().squeeze(1)
            cohort, downloads = cohort.only(answering), downloads.rows(answering)
        outcomes = self._train(cohort, downloads.to(self.device)) if len(cohort.ids) else []
        self._pending = {}
        for client, outcome in zip(cohort.ids.tolist(), outcomes, strict=True):
            if isinstance(outcome, Failure):
                answers[client] = outcome
            else:
                self._pending[client], answers[client] = outcome
        return list((self._falsify(self.faults, cohort, downloads, answers) if self.faults else answers).values())

    def _falsify(
        self, faults: Faults, cohort: Cohort, downloads: Payload, answers: dict[int, Answer | Failure]
    ) -> dict[int, Answer | Failure]:
        attackers, index = choose_attackers(faults, len(self.clients), cohort.seed), self.algorithm.task.layers.index
        for row, client in enumerate(cohort.ids.tolist()):
            answer, sent = answers[client], downloads.sent[row]
            attacks = client in attackers and happens(faults.attack_rate, cohort, "attack", client)
            if attacks and isinstance(answer, Answer):
                start = {name: value.cpu() for name, value in self.clients[client].state.items()}
                start |= {name: value[row] for name, value in downloads.tensors.items() if sent[index[name]]}
                answers[client] = answer._replace(upload=falsify(faults, cohort, client, answer.upload, start))
        return answers

    def evaluate(self, cohort: Cohort, downloads: Payload) -> tuple[ClientMetrics, dict[int, Failure]]:
        tests = dict(zip(cohort.ids.tolist(), self._evaluate(cohort, downloads.to(self.device)), strict=True))
        failures = {client: test for client, test in tests.items() if isinstance(test, Failure)}
        metrics = [(torch.nan, torch.nan) if isinstance(test, Failure) else test for test in tests.values()]
        return ClientMetrics(*torch.tensor(metrics, dtype=torch.float64).T), failures

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self.clients[client] = replace(self.clients[client], state=self._pending[client], has_trained=True)

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        downloads, models = downloads.to(self.device), []
        for row, client in enumerate(cohort.ids.tolist()):
            model = attempt("", self.clients[client].personalize, copy_row(downloads, row), cohort)
            models.append({} if isinstance(model, Failure) else {name: value.cpu() for name, value in model.items()})
        return models

    def state(self) -> Params:
        """Return everybody's private state, stacked, and who has trained."""
        private = {name: value.cpu() for name, value in stack([client.state for client in self.clients]).items()}
        return {**private, TRAINED: torch.tensor([client.has_trained for client in self.clients])}

    def load(self, state: Params) -> None:
        for number, trained in enumerate(state[TRAINED].tolist()):
            own = {name: value[number].clone().to(self.device) for name, value in state.items() if name != TRAINED}
            self.clients[number] = replace(self.clients[number], state=own, has_trained=trained)

    def _epochs(self, cohort: Cohort, client: int) -> int:
        budget = self.algorithm.training.local_epochs
        return limit_epochs(self.faults, cohort, client, budget) if self.faults else budget

    def __enter__(self) -> Self:
        one_thread.__enter__()
        keep_freed_memory()
        return self

    def __exit__(self, *error: object) -> None:
        one_thread.__exit__()


def attempt(reason: str, function: Callable[..., R], *args: object) -> R | Failure:
    """Return what a client's function returns, or a failure: one client's is not the others'."""
    try:
        return function(*args)
    except Stopped:
        raise
    except Exception as error:
        return Failure(reason, f"{type(error).__name__}: {error}".splitlines()[0], error=error)


def copy_row(payload: Payload, row: int) -> Payload:
    """Return one client's payload in memory of its own, as a client on another machine has it.

    Kernels may round by how a tensor is aligned, and a view would keep the whole cohort's tensors alive.
    """
    return payload.rows(row).map(torch.clone)


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
    """One intra-op thread while anybody is inside: clients are the parallelism, and sums are always split alike.

    torch keeps the number per thread, and one for new threads. All restore what the first one found.
    """

    lock, users, before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self.lock:
            self.before = self.before if self.users else torch.get_num_threads()
            self.users += 1
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            torch.set_num_threads(self.before)


one_thread = _OneThread()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: else each step faults its pages in again, up to a third of a small CNN's step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD of <malloc.h>; the largest that every glibc takes
        mallopt(-1, 2**28)  # M_TRIM_THRESHOLD
