"""Each client on a thread of a pool, one intra-op thread each. Bit-identical for any number of threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from pfedla.core.contracts import Algorithm, Answer, ClientState, Cohort, Payload
from pfedla.core.errors import Stopped
from pfedla.core.tasks import ClassificationTask, CompiledTask, DirectTask
from pfedla.engines.client import Outcome, SimulatedClients, Test, attempt, copy_row

R = TypeVar("R")


class ThreadedEngine(SimulatedClients):
    _pool: ThreadPoolExecutor | None = None

    def _prepare(self, algorithm: Algorithm, example: Tensor) -> ClassificationTask:
        module = super()._prepare(algorithm, example).module
        if self.settings.compile:
            return CompiledTask(module, example, algorithm.training)
        return DirectTask(module, example)

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        def one(row: int, client: int) -> tuple[ClientState, Answer]:
            if self.stopping():
                raise Stopped
            return self.client(client).update(
                self._clients[client],
                copy_row(downloads, row),
                cohort,
                has_trained=bool(self._trained[client]),
                epochs=self._epochs(cohort, client),
            )

        return self._map(one, cohort)

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Exception]:
        def one(row: int, client: int) -> Test:
            return self.client(client).evaluate(self._personalize(cohort, client, copy_row(downloads, row)))

        return self._map(one, cohort)

    def _map(self, function: Callable[[int, int], R], cohort: Cohort) -> list[R | Exception]:
        if self._pool is None:
            initializer = partial(torch.set_num_threads, 1)
            self._pool = ThreadPoolExecutor(self.threads, "client", initializer=initializer)
        return list(self._pool.map(partial(attempt, function), range(len(cohort.ids)), cohort.ids.tolist()))

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        super().__exit__(*error)
