"""All clients of equal size as one stacked tensor (torch.func.vmap): for GPUs and small networks."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from pfedla.core.contracts import Cohort, Failure, LocalData, LocalResult, Params, Payload
from pfedla.core.errors import Stopped
from pfedla.core.layers import stack, take
from pfedla.core.tasks import copy_module
from pfedla.core.training import EVALUATION_BATCH, evaluate
from pfedla.engines.client import Client, Outcome, SimulatedClients, Test, attempt, copy_row

R = TypeVar("R")
MEMORY_BOUND = 2**31  # bytes that stacked clients may take while they train, by an estimate
MODEL_COPIES = 6  # parameters before and after, gradients, states, uploads
ACTIVATION_COPIES = 4  # every module's output, what follows it without being a module, the gradients of both


class VectorizedEngine(SimulatedClients):
    @cached_property
    def _numbers(self) -> tuple[int, int]:
        """Estimate how many numbers a client takes while it trains: its models, and each example of a step."""
        module, outputs = copy_module(self.algorithm.task.module).eval(), list[object]()
        for part in module.modules():
            if not list(part.children()):
                part.register_forward_hook(lambda part, given, output: outputs.append(output))
        with torch.no_grad():
            module(self.clients[0].test_data()[0][:1])
        activations = sum(output.numel() for output in outputs if isinstance(output, Tensor))
        parameters = sum(value.numel() for value in self.algorithm.task.initial().values())
        return MODEL_COPIES * parameters, ACTIVATION_COPIES * activations

    def _train(self, cohort: Cohort, downloads: Payload) -> list[Outcome | Failure]:
        epochs = [self._epochs(cohort, client) for client in cohort.ids.tolist()]

        def train_group(rows: list[int]) -> list[Outcome]:
            if self.stopping():
                raise Stopped
            clients = [self.clients[number] for number in cohort.ids[rows].tolist()]
            pairs = zip(rows, clients, strict=True)
            data = [client.local_data(cohort, downloads.rows(row), epochs[row]) for row, client in pairs]
            return self._update(clients, downloads.rows(torch.tensor(rows)), data)

        return self._map("raised", train_group, cohort, epochs)

    def _update(self, clients: list[Client], downloads: Payload, data: list[LocalData]) -> list[Outcome]:
        stacked = LocalData(*map(torch.stack, zip(*data, strict=True)))
        states = stack([client.state for client in clients])
        results: LocalResult = vmap(self.algorithm.local_update)(states, downloads, stacked)
        outcomes = []
        for row, (client, test) in enumerate(zip(clients, self._test(results.model, clients), strict=True)):
            # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
            state = {name: value.clone() for name, value in take(results.client, row).items()}
            model, upload = take(results.model, row), results.upload.rows(row)
            result = LocalResult(client=state, upload=upload, model=model, loss=results.loss[row])
            outcomes.append((state, client.answer(result, test)))
        return outcomes

    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test | Failure]:
        def test_group(rows: list[int]) -> list[Test]:
            clients = [self.clients[number] for number in cohort.ids[rows].tolist()]
            pairs = zip(rows, clients, strict=True)
            models = [client.personalize(copy_row(downloads, row), cohort) for row, client in pairs]
            return self._test(stack(models), clients)

        return self._map("evaluation raised", test_group, cohort, [0] * len(cohort.ids))

    def _test(self, models: Params, clients: list[Client]) -> list[Test]:
        x, y = map(torch.stack, zip(*(client.test_data() for client in clients), strict=True))
        with torch.no_grad():
            correct, loss = vmap(lambda *one: evaluate(self.algorithm.task, *one))(models, x, y)
        return list(zip((correct.double() / y.shape[1]).tolist(), loss.tolist(), strict=True))

    def _map(
        self, reason: str, function: Callable[[list[int]], list[R]], cohort: Cohort, epochs: list[int]
    ) -> list[R | Failure]:
        """Apply `function` to the rows of clients that stack: equal sizes and epochs, as many as fit in memory."""
        groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for row, number in enumerate(cohort.ids.tolist()):
            train, test = self.clients[number].train, self.clients[number].test
            groups[len(train.y), len(test.y), epochs[row]].append(row)
        found: dict[int, R | Failure] = {}
        for (train, test, _), rows in groups.items():
            # An epoch's order is a second copy of the data; a test batch may be larger than a training batch.
            batch = max(min(self.algorithm.training.batch_size, train), min(EVALUATION_BATCH, test))
            models, per_example = self._numbers
            numbers = (2 * train + test) * math.prod(self.clients[0].outline.shape) + models + batch * per_example
            fit = max(1, MEMORY_BOUND // (4 * numbers))
            for part in torch.tensor(rows).tensor_split(-(-len(rows) // fit)):
                found |= isolate(reason, function, part.tolist())
        return [found[row] for row in range(len(cohort.ids))]


def isolate(reason: str, function: Callable[[list[int]], Sequence[R]], rows: list[int]) -> dict[int, R | Failure]:
    """Return a group's outcomes; if it raises, find the clients that raise alone and run it without them."""
    together = attempt(reason, function, rows)
    if not isinstance(together, Failure):
        return dict(zip(rows, together, strict=True))
    alone = {row: attempt(reason, function, [row]) for row in rows}
    found: dict[int, R | Failure] = {row: one for row, one in alone.items() if isinstance(one, Failure)}
    if not found and together.error:  # it fails only together: too little memory, perhaps
        raise together.error
    others = [row for row in rows if row not in found]
    found.update(zip(others, function(others) if others else [], strict=True))
    return found
