"""Clients in this process: each on a thread of a pool, or clients of equal size stacked (vectorized.py).

A thread uses one intra-op thread. The numbers do not depend on how many threads there are.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, ClientState, Cohort, Failure, Params, Payload
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.faults import NO_FAULTS, choose_answering
from pfedla.core.layers import stack
from pfedla.core.settings import AUTO, EngineSettings, Faults, Recalibrate
from pfedla.core.uploads import NO_ANSWER
from pfedla.data.federation import Federation
from pfedla.engines.client import Client, Outcome, Test, keep_freed_memory, make_client, one_thread
from pfedla.engines.vectorized import evaluate_stacked, group_clients, update_stacked

R = TypeVar("R")
TRAINED = "__trained__"
# On a CPU stacking wins where a step is mostly Python: small networks without convolutions.
VECTORIZED_PARAMETERS = 2**16


def resolve_engine(settings: EngineSettings, module: nn.Module) -> EngineSettings:
    """Replace "auto" by the faster engine for this model and device; refuse what cannot be compiled.

    The choice follows a measured rule (docs/performance.md), not a timing: the same file gives the same bits.
    """
    name = settings.name
    if name == AUTO:
        convolves = any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules())
        small = sum(parameter.numel() for parameter in module.parameters()) <= VECTORIZED_PARAMETERS
        stacks = settings.device != "cpu" or (small and not convolves)
        name = "vectorized" if stacks and not settings.compile else "threaded"
    if settings.compile and (name != "threaded" or settings.device != "cpu"):
        raise PfedlaError(f"--compile needs the threaded engine on the cpu, not {name} on {settings.device}")
    if settings.compile and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise PfedlaError("--compile needs a C++ compiler: install g++ or clang++, or name one in $CXX")
    return settings.model_copy(update={"name": name})


class SimulatedEngine:
    """Implements Engine."""

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
        settings = resolve_engine(settings, algorithm.task.module)
        self.stacks, self.faults = settings.name == "vectorized", faults
        self.threads = 1 if self.stacks else settings.threads or os.cpu_count() or 1
        self.stopping = stopping  # asked before each client trains; if true, Stopped is raised, no state changes
        examples = list(zip(federation.train, federation.test, strict=True))
        first = make_client(algorithm, federation, examples[0], settings, recalibrate=recalibrate, faults=faults)
        self.clients = [replace(first, number=n, train=train, test=test) for n, (train, test) in enumerate(examples)]
        self.algorithm, self.device = first.algorithm, first.device
        self._pending: dict[int, ClientState] = {}

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: dict[int, Answer | Failure] = dict.fromkeys(cohort.ids.tolist(), NO_ANSWER)
        answering = choose_answering(self.faults, cohort)
        if not answering.all():
            cohort, downloads = cohort.only(answering), downloads.rows(answering)
        downloads = downloads.to(self.device)

        def train_group(rows: list[int], clients: list[Client]) -> list[Outcome]:
            if self.stopping():
                raise Stopped
            if self.stacks:
                return update_stacked(clients, downloads.rows(torch.tensor(rows)), cohort)
            return [clients[0].update(copy_row(downloads, rows[0]), cohort)]

        epochs = [self.clients[client].limit_epochs(cohort) for client in cohort.ids.tolist()]
        self._pending = {}
        for client, outcome in self._map("raised", train_group, cohort, epochs).items():
            if isinstance(outcome, Failure):
                answers[client] = outcome
            else:
                self._pending[client], answers[client] = outcome
        return list(answers.values())

    def evaluate(self, cohort: Cohort, downloads: Payload) -> tuple[ClientMetrics, dict[int, Failure]]:
        downloads = downloads.to(self.device)

        def test_group(rows: list[int], clients: list[Client]) -> list[Test]:
            pairs = zip(rows, clients, strict=True)
            models = [client.personalize(copy_row(downloads, row), cohort) for row, client in pairs]
            return evaluate_stacked(clients, stack(models)) if self.stacks else [clients[0].evaluate(models[0])]

        tests = self._map("evaluation raised", test_group, cohort, [0] * len(cohort.ids))
        failures = {client: test for client, test in tests.items() if isinstance(test, Failure)}
        metrics = [(torch.nan, torch.nan) if isinstance(test, Failure) else test for test in tests.values()]
        return ClientMetrics(*torch.tensor(metrics, dtype=torch.float64).T), failures

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        downloads, models = downloads.to(self.device), []
        for row, client in enumerate(cohort.ids.tolist()):
            model = attempt("", self.clients[client].personalize, copy_row(downloads, row), cohort)
            models.append({} if isinstance(model, Failure) else {name: value.cpu() for name, value in model.items()})
        return models

    def _map(
        self, reason: str, function: Callable[[list[int], list[Client]], Sequence[R]], cohort: Cohort, epochs: list[int]
    ) -> dict[int, R | Failure]:
        """Apply `function` to groups of rows and their clients; a group that raises is run client by client."""
        clients = [self.clients[client] for client in cohort.ids.tolist()]

        def run(rows: list[int]) -> Sequence[R | Failure]:
            found = attempt(reason, function, rows, [clients[row] for row in rows])
            if isinstance(found, Failure):
                return [found] if len(rows) == 1 else [run([row])[0] for row in rows]
            return found

        groups = group_clients(clients, epochs) if self.stacks else [[row] for row in range(len(clients))]
        found: dict[int, R | Failure] = {}
        for rows, outcomes in zip(groups, self._pool.map(run, groups), strict=True):
            found.update(zip(rows, outcomes, strict=True))
        return {client.number: found[row] for row, client in enumerate(clients)}

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self.clients[client] = replace(self.clients[client], state=self._pending[client], has_trained=True)

    def state(self) -> Params:
        """Return everybody's private state, stacked, and who has trained."""
        private = {name: value.cpu() for name, value in stack([client.state for client in self.clients]).items()}
        return {**private, TRAINED: torch.tensor([client.has_trained for client in self.clients])}

    def load(self, state: Params) -> None:
        for number, trained in enumerate(state[TRAINED].tolist()):
            own = {name: value[number].clone().to(self.device) for name, value in state.items() if name != TRAINED}
            self.clients[number] = replace(self.clients[number], state=own, has_trained=trained)

    def __enter__(self) -> Self:
        one_thread.__enter__()
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(self.threads, "client", initializer=partial(torch.set_num_threads, 1))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
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
    """Return one client's payload in memory of its own, as on another machine: kernels may round by alignment."""
    return payload.rows(row).map(torch.clone)
