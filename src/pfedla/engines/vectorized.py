"""All clients of one size as one stacked tensor (torch.func.vmap): for GPUs and small nets."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch.func import vmap

from pfedla.contracts import Cohort, LocalData, LocalResult, Params, Payload
from pfedla.engines.clients import UNKNOWN, Outcome, SimulatedClients, Test, attempt, own_row
from pfedla.errors import Stopped
from pfedla.training import evaluate
from pfedla.tree import stack, take

R = TypeVar("R")


class VectorizedEngine(SimulatedClients):
    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        epochs = [self._epochs(cohort, client) for client in cohort.ids.tolist()]
        outcomes: dict[int, Outcome] = {}
        for rows in self._groups(cohort, epochs):
            outcomes.update(self._without_culprits(lambda some: self._train_group(cohort, some, downloads, epochs), rows))
        return [outcomes[row] for row in range(len(cohort.ids))]

    def _train_group(
        self, cohort: Cohort, rows: list[int], downloads: Payload, epochs: list[int]
    ) -> dict[int, tuple[LocalResult, Test]]:
        if self.stopping():
            raise Stopped
        clients = cohort.ids[rows].tolist()
        data = zip(*(self._local_data(cohort, client, epochs[rows[0]]) for client in clients), strict=True)
        states = stack([self._clients[client] for client in clients])
        results: LocalResult = vmap(self.algorithm.local_update)(
            states, downloads.rows(torch.tensor(rows)), LocalData(*map(torch.stack, data))
        )
        tests = self._test(results.model, clients)
        answers = {}
        for position, row in enumerate(rows):
            # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
            state = {name: value[position].clone() for name, value in results.client.items()}
            upload, model = results.upload.rows(position), take(results.model, position)
            answers[row] = LocalResult(state, upload, model, results.loss[position]), tests[position]
        return answers

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        def group(rows: list[int]) -> dict[int, Test]:
            clients = cohort.ids[rows].tolist()
            pairs = zip(rows, clients, strict=True)
            models = stack([self._personal(cohort, client, own_row(downloads, row)) for row, client in pairs])
            return dict(zip(rows, self._test(models, clients), strict=True))

        tests: dict[int, Test | Exception] = {}
        for rows in self._groups(cohort, [0] * len(cohort.ids)):
            tests.update(self._without_culprits(group, rows))
        return [UNKNOWN if isinstance(test := tests[row], Exception) else test for row in range(len(cohort.ids))]

    def _without_culprits(self, group: Callable[[list[int]], Mapping[int, R]], rows: list[int]) -> Mapping[int, R | Exception]:
        """A group's outcomes. If it raises, each client is tried alone, and the group again without those who raise."""
        together = attempt(group, rows)
        if not isinstance(together, Exception):
            return together
        alone = {row: attempt(group, [row]) for row in rows}
        culprits: dict[int, R | Exception] = {row: tried for row, tried in alone.items() if isinstance(tried, Exception)}
        innocent = [row for row in rows if row not in culprits]
        if not culprits:  # only together it cannot be done: too little memory, perhaps
            raise together
        return {**culprits, **(group(innocent) if innocent else {})}

    def _groups(self, cohort: Cohort, epochs: list[int]) -> Iterable[list[int]]:
        """Rows of the clients that stack: equal training and test sizes, equally many epochs."""
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, client in enumerate(cohort.ids.tolist()):
            groups[len(self.federation.train[client].y), len(self.federation.test[client].y), epochs[row]].append(row)
        return groups.values()

    def _test(self, models: Params, clients: Sequence[int]) -> list[Test]:
        x, y = map(torch.stack, zip(*(self._test_data(client) for client in clients), strict=True))
        with torch.no_grad():
            correct, loss = vmap(lambda *one: evaluate(self.algorithm.task, *one))(models, x, y)
        return list(zip(correct, loss, strict=True))
