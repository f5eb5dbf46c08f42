"""All clients of one size as one stacked tensor (torch.func.vmap): for GPUs and small nets."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch.func import vmap

from pfedla.contracts import Cohort, LocalData, LocalResult, Params, Payload
from pfedla.engines.clients import SimulatedClients, Test
from pfedla.training import evaluate
from pfedla.tree import stack, take


class VectorizedEngine(SimulatedClients):
    def _train(self, cohort: Cohort, downloads: Payload) -> list[tuple[LocalResult, Test]]:
        answers: dict[int, tuple[LocalResult, Test]] = {}
        for rows, clients in self._groups(cohort):
            data = zip(*(self._local_data(cohort, client) for client in clients), strict=True)
            states = stack([self._clients[client] for client in clients])
            results: LocalResult = vmap(self.algorithm.local_update)(
                states, downloads.rows(torch.tensor(rows)), LocalData(*map(torch.stack, data))
            )
            tests = self._test(results.model, clients)
            for position, row in enumerate(rows):
                # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
                state = {name: value[position].clone() for name, value in results.client.items()}
                upload, model = results.upload.rows(position), take(results.model, position)
                answers[row] = LocalResult(state, upload, model, results.loss[position]), tests[position]
        return [answers[row] for row in range(len(cohort.ids))]

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        answers: dict[int, Test] = {}
        for rows, clients in self._groups(cohort):
            pairs = zip(rows, clients, strict=True)
            models = stack([self._personal(cohort, client, downloads.rows(row)) for row, client in pairs])
            answers.update(zip(rows, self._test(models, clients), strict=True))
        return [answers[row] for row in range(len(cohort.ids))]

    def _groups(self, cohort: Cohort) -> Iterator[tuple[list[int], list[int]]]:
        """Rows and ids of the clients that stack: equal training and test sizes."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        ids = cohort.ids.tolist()
        for row, client in enumerate(ids):
            groups[len(self.federation.train[client].y), len(self.federation.test[client].y)].append(row)
        for rows in groups.values():
            yield rows, [ids[row] for row in rows]

    def _test(self, models: Params, clients: Sequence[int]) -> list[Test]:
        x, y = map(torch.stack, zip(*(self._test_data(client) for client in clients), strict=True))
        with torch.no_grad():
            correct, loss = vmap(lambda *one: evaluate(self.algorithm.task, *one))(models, x, y)
        return list(zip(correct, loss, strict=True))
