"""All clients of one size as one stacked tensor (torch.func.vmap): for GPUs and small nets."""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from pfedla.core.contracts import Answer, ClientState, Cohort, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import Stopped
from pfedla.core.layers import stack, take
from pfedla.core.training import EVALUATION_BATCH, evaluate
from pfedla.engines.client import Outcome, SimulatedClients, Test, attempt

R = TypeVar("R")
MEMORY_BOUND = 2**31  # bytes that stacked clients may take while they train, as far as it can be told beforehand
MODEL_COPIES = 6  # parameters before and after, gradients, states, uploads
ACTIVATION_COPIES = 4  # every module's output, what follows it without being a module, and the gradients of both


class VectorizedEngine(SimulatedClients):
    @cached_property
    def _model_numbers(self) -> int:
        return sum(value.numel() for value in self.algorithm.task.initial().values())

    @cached_property
    def _step_numbers(self) -> int:
        """What a step keeps for one example, about."""
        outputs = 0

        def count(module: nn.Module, given: object, output: object) -> None:
            nonlocal outputs
            if isinstance(output, Tensor) and not list(module.children()):
                outputs += output.numel()

        module = copy.deepcopy(self.algorithm.task.module)
        for part in module.modules():
            part.register_forward_hook(count)
        with torch.no_grad():
            x, _ = self.client(0).test_data()
            module.eval()(x[:1].expand(2, *x.shape[1:]))
        return ACTIVATION_COPIES * outputs // 2

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        epochs = [self._epochs(cohort, client) for client in cohort.ids.tolist()]
        outcomes: dict[int, Outcome] = {}
        for rows in self._groups(cohort, epochs):
            outcomes.update(self._without_culprits(lambda some: self._train_group(cohort, some, downloads, epochs), rows))
        return [outcomes[row] for row in range(len(cohort.ids))]

    def _train_group(
        self, cohort: Cohort, rows: list[int], downloads: Payload, epochs: list[int]
    ) -> dict[int, tuple[ClientState, Answer]]:
        if self.stopping():
            raise Stopped
        clients = cohort.ids[rows].tolist()
        data = zip(*(self._local_data(cohort, downloads, client, epochs[rows[0]]) for client in clients), strict=True)
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
            result = LocalResult(state, upload, model, results.loss[position])
            client = clients[position]
            answers[row] = state, self.client(client).answer(self._clients[client], result, tests[position])
        return answers

    def _local_data(self, cohort: Cohort, downloads: Payload, client: int, epochs: int) -> LocalData:
        has_trained = bool(self._trained[client])
        return self.client(client).local_data(cohort, downloads, has_trained=has_trained, epochs=epochs)

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Exception]:
        def group(rows: list[int]) -> dict[int, Test]:
            clients = cohort.ids[rows].tolist()
            pairs = zip(rows, clients, strict=True)
            models = stack([self._personalize(cohort, client, downloads.rows(row)) for row, client in pairs])
            return dict(zip(rows, self._test(models, clients), strict=True))

        tests: dict[int, Test | Exception] = {}
        for rows in self._groups(cohort, [0] * len(cohort.ids)):
            tests.update(self._without_culprits(group, rows))
        return [tests[row] for row in range(len(cohort.ids))]

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

    def _groups(self, cohort: Cohort, epochs: list[int]) -> Iterator[list[int]]:
        """Rows of the clients that stack: equal training and test sizes, equally many epochs; only as many as fit in memory."""
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, client in enumerate(cohort.ids.tolist()):
            groups[len(self.federation.train[client].y), len(self.federation.test[client].y), epochs[row]].append(row)
        for (train, test, _), rows in groups.items():
            # Every epoch's order is gathered from the data while these are there too; a test batch may be the larger one.
            batch = max(min(self.algorithm.training.batch_size, train), min(EVALUATION_BATCH, test))
            example = math.prod(self.federation.shape)
            numbers = (2 * train + test) * example + MODEL_COPIES * self._model_numbers + batch * self._step_numbers
            fit = max(1, MEMORY_BOUND // (4 * numbers))
            chunks = -(-len(rows) // fit)
            yield from (part.tolist() for part in torch.tensor(rows).tensor_split(chunks))

    def _test(self, models: Params, clients: Sequence[int]) -> list[Test]:
        x, y = map(torch.stack, zip(*(self.client(client).test_data() for client in clients), strict=True))
        with torch.no_grad():
            correct, loss = vmap(lambda *one: evaluate(self.algorithm.task, *one))(models, x, y)
        return list(zip(correct, loss, strict=True))
