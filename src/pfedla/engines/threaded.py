"""Each client on a thread of a pool, one intra-op thread each. Bit-identical for any number of threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

import torch

from pfedla.contracts import Algorithm, Answer, ClientState, Cohort, LocalTraining, Payload, Task
from pfedla.engines.client import Test
from pfedla.engines.clients import UNKNOWN, Outcome, SimulatedClients, attempt, own_row
from pfedla.errors import Stopped

R = TypeVar("R")


def for_one(task: Task, shape: tuple[int, ...], training: LocalTraining, compile: bool) -> Task:
    """The task in the form for one client at a time."""
    return task.compiled(shape, training) if compile else task.direct(shape)


class ThreadedEngine(SimulatedClients):
    _pool: ThreadPoolExecutor | None = None

    def _task(self, algorithm: Algorithm, shape: tuple[int, ...]) -> Task:
        return for_one(super()._task(algorithm, shape), shape, algorithm.training, self.compile)

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        def one(row: int, client: int) -> tuple[ClientState, Answer]:
            if self.stopping():
                raise Stopped
            epochs = self._epochs(cohort, client)
            return self.client(client).update(self._clients[client], own_row(downloads, row), cohort, epochs)

        return self._map(one, cohort)

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        def one(row: int, client: int) -> Test:
            return self.client(client).tested(self._personal(cohort, client, own_row(downloads, row)))

        return [UNKNOWN if isinstance(test, Exception) else test for test in self._map(one, cohort)]

    def _map(self, function: Callable[[int, int], R], cohort: Cohort) -> list[R | Exception]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "client", initializer=torch.set_num_threads, initargs=(1,))
        return list(self._pool.map(partial(attempt, function), range(len(cohort.ids)), cohort.ids.tolist()))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        super().__exit__(kind, error, trace)
