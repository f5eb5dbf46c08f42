"""Each client on a thread of a pool, one intra-op thread each. Bit-identical for any number of threads."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import torch
from torch import Tensor

from pfedla.core.contracts import Algorithm, Cohort, Failure, Payload, Task
from pfedla.core.errors import Stopped
from pfedla.core.tasks import CompiledTask, DirectTask
from pfedla.engines.client import Client, Outcome, SimulatedClients, Test, attempt, copy_row

R = TypeVar("R")


class ThreadedEngine(SimulatedClients):
    def _prepare(self, algorithm: Algorithm, example: Tensor) -> Task:
        module = algorithm.task.to(self.device).module
        if self.settings.compile:
            return CompiledTask(module, example, algorithm.training)
        return DirectTask(module, example)

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome | Failure]:
        def train_one(row: int, client: Client) -> Outcome:
            if self.stopping():
                raise Stopped
            return client.update(copy_row(downloads, row), cohort, self._epochs(cohort, client.number))

        return self._map("raised", train_one, cohort)

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Failure]:
        def test_one(row: int, client: Client) -> Test:
            return client.evaluate(client.personalize(copy_row(downloads, row), cohort))

        return self._map("evaluation raised", test_one, cohort)

    def _map(self, reason: str, function: Callable[[int, Client], R], cohort: Cohort) -> list[R | Failure]:
        clients = [self.clients[number] for number in cohort.ids.tolist()]
        return list(self._pool.map(partial(attempt, reason, function), range(len(clients)), clients))

    def __enter__(self) -> Self:
        threads = self.settings.threads or os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(threads, "client", initializer=partial(torch.set_num_threads, 1))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().__exit__(*error)
