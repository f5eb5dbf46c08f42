"""All clients of one size as one stacked tensor (torch.func.vmap): for GPUs and small nets."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from pfedla.contracts import ClientMetrics, Cohort, LocalData, Payload, Trained
from pfedla.engines.clients import SimulatedClients
from pfedla.training import evaluate
from pfedla.tree import Params, stack


class VectorizedEngine(SimulatedClients):
    def train(self, cohort: Cohort, downloads: Payload) -> Trained:
        downloads = self._on_device(downloads)
        uploads: dict[int, Payload] = {}
        losses: dict[int, Tensor] = {}
        tests: dict[int, tuple[Tensor, Tensor]] = {}
        self._pending = {}
        for rows, clients in self._groups(cohort):
            data = LocalData(*map(torch.stack, zip(*(self._local_data(cohort, client) for client in clients), strict=True)))
            states = stack([self._clients[client] for client in clients])
            result = vmap(self.algorithm.local_update)(states, downloads.rows(torch.tensor(rows)), data)
            accuracy, loss = self._test(result.model, clients)
            for position, (row, client) in enumerate(zip(rows, clients, strict=True)):
                # Clones: a view would keep the whole cohort's states alive.
                self._pending[client] = {name: value[position].clone() for name, value in result.client.items()}
                uploads[row] = result.upload.rows(position)
                losses[row] = result.loss[position]
                tests[row] = accuracy[position], loss[position]
        order = range(len(cohort.ids))
        sent = Payload(
            {name: value.cpu() for name, value in stack([uploads[row].tensors for row in order]).items()},
            torch.stack([uploads[row].sent for row in order]).cpu(),
        )
        return Trained(cohort, sent, torch.stack([losses[row] for row in order]).cpu(), _metrics(tests))

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        downloads = self._on_device(downloads)
        tests: dict[int, tuple[Tensor, Tensor]] = {}
        for rows, clients in self._groups(cohort):
            models = stack([self._personal(client, downloads.rows(row)) for row, client in zip(rows, clients, strict=True)])
            accuracy, loss = self._test(models, clients)
            tests.update({row: (accuracy[position], loss[position]) for position, row in enumerate(rows)})
        return _metrics(tests)

    def _groups(self, cohort: Cohort) -> Iterator[tuple[list[int], list[int]]]:
        """Rows and ids of the clients that stack: equal training and test sizes."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        ids = cohort.ids.tolist()
        for row, client in enumerate(ids):
            groups[len(self.federation.train[client].y), len(self.federation.test[client].y)].append(row)
        for rows in groups.values():
            yield rows, [ids[row] for row in rows]

    def _test(self, models: Params, clients: Sequence[int]) -> tuple[Tensor, Tensor]:
        x, y = map(torch.stack, zip(*(self._test_data(client) for client in clients), strict=True))
        with torch.no_grad():
            return vmap(lambda model, inputs, labels: evaluate(self.algorithm.task, model, inputs, labels))(models, x, y)


def _metrics(tests: dict[int, tuple[Tensor, Tensor]]) -> ClientMetrics:
    accuracy, loss = zip(*(tests[row] for row in range(len(tests))), strict=True)
    return ClientMetrics(torch.stack(accuracy).cpu(), torch.stack(loss).cpu())
