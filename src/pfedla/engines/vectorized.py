"""All clients of equal size as one stacked tensor (torch.func.vmap): for GPUs and small networks."""

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
from pfedla.core.tasks import copy_module
from pfedla.core.training import EVALUATION_BATCH, evaluate
from pfedla.engines.client import Outcome, SimulatedClients, Test, attempt, copy_row

R = TypeVar("R")
MEMORY_BOUND = 2**31  # bytes that stacked clients may take while they train, by an estimate
MODEL_COPIES = 6  # parameters before and after, gradients, states, uploads
ACTIVATION_COPIES = 4  # every module's output, what follows it without being a module, the gradients of both


class VectorizedEngine(SimulatedClients):
    @cached_property
    def _model_numbers(self) -> int:
        return sum(value.numel() for value in self.algorithm.task.initial().values())

    @cached_property
    def _step_numbers(self) -> int:
        """Estimate how many numbers a step keeps for one example."""
        outputs = 0

        def count(module: nn.Module, given: object, output: object) -> None:
            nonlocal outputs
            if isinstance(output, Tensor) and not list(module.children()):
                outputs += output.numel()

        module = copy_module(self.algorithm.task.module).eval()
        for part in module.modules():
            part.register_forward_hook(count)
        with torch.no_grad():
            module(self.client(0).test_data()[0][:1])
        return ACTIVATION_COPIES * outputs

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome]:
        epochs = [self._epochs(cohort, client) for client in cohort.ids.tolist()]
        outcomes: dict[int, Outcome] = {}
        for rows in self._groups(cohort, epochs):
            outcomes.update(isolate(lambda some: self._train_group(cohort, some, downloads, epochs), rows))
        return [outcomes[row] for row in range(len(cohort.ids))]

    def _train_group(
        self, cohort: Cohort, rows: list[int], downloads: Payload, epochs: list[int]
    ) -> dict[int, tuple[ClientState, Answer]]:
        if self.stopping():
            raise Stopped
        clients = [self.client(number) for number in cohort.ids[rows].tolist()]
        states = [self._clients[client.number] for client in clients]
        data = [
            client.local_data(
                cohort, downloads.rows(row), has_trained=bool(self._trained[client.number]), epochs=epochs[row]
            )
            for row, client in zip(rows, clients, strict=True)
        ]
        stacked_data = LocalData(*(torch.stack(field) for field in zip(*data, strict=True)))
        results: LocalResult = vmap(self.algorithm.local_update)(
            stack(states), downloads.rows(torch.tensor(rows)), stacked_data
        )
        tests = self._test(results.model, cohort.ids[rows].tolist())
        outcomes = {}
        for position, (row, client) in enumerate(zip(rows, clients, strict=True)):
            result = LocalResult(
                # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
                client={name: value[position].clone() for name, value in results.client.items()},
                upload=results.upload.rows(position),
                model=take(results.model, position),
                loss=results.loss[position],
            )
            outcomes[row] = result.client, client.answer(states[position], result, tests[position])
        return outcomes

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Exception]:
        def group(rows: list[int]) -> dict[int, Test]:
            clients = cohort.ids[rows].tolist()
            pairs = zip(rows, clients, strict=True)
            models = stack([self._personalize(cohort, client, copy_row(downloads, row)) for row, client in pairs])
            return dict(zip(rows, self._test(models, clients), strict=True))

        tests: dict[int, Test | Exception] = {}
        for rows in self._groups(cohort, [0] * len(cohort.ids)):
            tests.update(isolate(group, rows))
        return [tests[row] for row in range(len(cohort.ids))]

    def _groups(self, cohort: Cohort, epochs: list[int]) -> Iterator[list[int]]:
        """Yield the rows of clients that stack: equal sizes and epochs, only as many as fit in memory."""
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, client in enumerate(cohort.ids.tolist()):
            sizes = len(self.federation.train[client].y), len(self.federation.test[client].y)
            groups[*sizes, epochs[row]].append(row)
        for (train, test, _), rows in groups.items():
            # An epoch's order is a second copy of the data; a test batch may be larger than a training batch.
            batch = max(min(self.algorithm.training.batch_size, train), min(EVALUATION_BATCH, test))
            numbers = (2 * train + test) * math.prod(self.federation.shape)
            numbers += MODEL_COPIES * self._model_numbers + batch * self._step_numbers
            fit = max(1, MEMORY_BOUND // (4 * numbers))
            yield from (part.tolist() for part in torch.tensor(rows).tensor_split(-(-len(rows) // fit)))

    def _test(self, models: Params, clients: Sequence[int]) -> list[Test]:
        x, y = map(torch.stack, zip(*(self.client(client).test_data() for client in clients), strict=True))
        with torch.no_grad():
            correct, loss = vmap(lambda *one: evaluate(self.algorithm.task, *one))(models, x, y)
        return list(zip(correct, loss, strict=True))


def isolate(group: Callable[[list[int]], Mapping[int, R]], rows: list[int]) -> Mapping[int, R | Exception]:
    """Return a group's outcomes; if it raises, find the clients that raise alone and run it without them."""
    together = attempt(group, rows)
    if not isinstance(together, Exception):
        return together
    alone = {row: attempt(group, [row]) for row in rows}
    failed = {row: outcome for row, outcome in alone.items() if isinstance(outcome, Exception)}
    if not failed:  # it fails only together: too little memory, perhaps
        raise together
    others = [row for row in rows if row not in failed]
    return {**failed, **(group(others) if others else {})}
