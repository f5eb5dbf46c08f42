"""Each client on a thread of a pool, one intra-op thread each. Bit-identical for any number of threads."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from pfedla.contracts import ClientMetrics, Cohort, LocalResult, Payload, Trained
from pfedla.engines.clients import SimulatedClients
from pfedla.training import evaluate
from pfedla.tree import Params, stack

R = TypeVar("R")


class ThreadedEngine(SimulatedClients):
    _pool: ThreadPoolExecutor | None = None

    def train(self, cohort: Cohort, downloads: Payload) -> Trained:
        downloads = self._on_device(downloads)

        def one(row: int) -> tuple[LocalResult, tuple[Tensor, Tensor]]:
            client = int(cohort.ids[row])
            data = self._local_data(cohort, client)
            result = self.algorithm.local_update(self._clients[client], downloads.rows(row), data)
            return result, self._test(result.model, client)

        results, tests = zip(*self._map(one, range(len(cohort.ids))), strict=True)
        self._pending = {int(client): result.client for client, result in zip(cohort.ids, results, strict=True)}
        uploads = Payload(
            {name: value.cpu() for name, value in stack([result.upload.tensors for result in results]).items()},
            torch.stack([result.upload.sent for result in results]).cpu(),
        )
        return Trained(cohort, uploads, torch.stack([result.loss for result in results]).cpu(), _metrics(tests))

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        downloads = self._on_device(downloads)

        def one(row: int) -> tuple[Tensor, Tensor]:
            client = int(cohort.ids[row])
            return self._test(self._personal(client, downloads.rows(row)), client)

        return _metrics(self._map(one, range(len(cohort.ids))))

    def _test(self, model: Params, client: int) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return evaluate(self.algorithm.task, model, *self._test_data(client))

    def _map(self, function: Callable[[int], R], rows: Iterable[int]) -> list[R]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "client", initializer=torch.set_num_threads, initargs=(1,))
        return list(self._pool.map(function, rows))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        super().__exit__(kind, error, trace)


def _metrics(tests: Iterable[tuple[Tensor, Tensor]]) -> ClientMetrics:
    accuracy, loss = zip(*tests, strict=True)
    return ClientMetrics(torch.stack(accuracy).cpu(), torch.stack(loss).cpu())
