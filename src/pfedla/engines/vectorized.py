"""Clients of equal size as one stacked tensor (torch.func.vmap): for GPUs and small networks."""

import math
from collections import defaultdict

import torch
from torch import Tensor
from torch.func import vmap

from pfedla.core.contracts import Cohort, LocalData, LocalResult, Params, Payload
from pfedla.core.layers import stack, take
from pfedla.core.tasks import Task, copy_module
from pfedla.core.training import EVALUATION_BATCH, evaluate
from pfedla.engines.client import Client, Outcome, Test

MEMORY_BOUND = 2**31  # bytes that stacked clients may take while they train, by an estimate
MODEL_COPIES = 6  # parameters before and after, gradients, states, uploads
ACTIVATION_COPIES = 4  # every module's output, what follows it without being a module, the gradients of both


def group_clients(clients: list[Client], epochs: list[int]) -> list[list[int]]:
    """Return the positions of the clients that stack: equal sizes and epochs, as many as fit in memory."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(client.train.y), len(client.test.y), epochs[position]].append(position)
    if not clients:
        return []
    task, batch_size = clients[0].algorithm.task, clients[0].algorithm.training.batch_size
    per_example = ACTIVATION_COPIES * count_activations(task, clients[0].test_data()[0][:1])
    per_model = MODEL_COPIES * sum(value.numel() for value in task.initial().values())
    parts: list[list[int]] = []
    for (train, test, _), positions in groups.items():
        # An epoch's order is a second copy of the data; a test batch may be larger than a training batch.
        batch = max(min(batch_size, train), min(EVALUATION_BATCH, test))
        data = (2 * train + test) * math.prod(clients[0].outline.shape)
        fit = max(1, MEMORY_BOUND // (4 * (data + per_model + batch * per_example)))
        parts += [part.tolist() for part in torch.tensor(positions).tensor_split(-(-len(positions) // fit))]
    return parts


def count_activations(task: Task, x: Tensor) -> int:
    """Return how many numbers the parts of a model put out."""
    module, outputs = copy_module(task.module).eval(), list[object]()
    for part in module.modules():
        if not list(part.children()):
            part.register_forward_hook(lambda part, given, output: outputs.append(output))
    with torch.no_grad():
        module(x)
    return sum(output.numel() for output in outputs if isinstance(output, Tensor))


def update_stacked(clients: list[Client], downloads: Payload, cohort: Cohort) -> list[Outcome]:
    """Train clients of equal size and epochs at once."""
    data = [
        client.local_data(cohort, downloads.rows(row), client.limit_epochs(cohort))
        for row, client in enumerate(clients)
    ]
    stacked = LocalData(*map(torch.stack, zip(*data, strict=True)))
    states = stack([client.state for client in clients])
    results: LocalResult = vmap(clients[0].algorithm.local_update)(states, downloads, stacked)
    outcomes = []
    for row, (client, test) in enumerate(zip(clients, evaluate_stacked(clients, results.model), strict=True)):
        result = LocalResult(
            # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
            client={name: value[row].clone() for name, value in results.client.items()},
            upload=results.upload.rows(row),
            model=take(results.model, row),
            loss=results.loss[row],
        )
        outcomes.append(client.conclude(result, test, downloads.rows(row), cohort))
    return outcomes


def evaluate_stacked(clients: list[Client], models: Params) -> list[Test]:
    """Test clients of equal size at once."""
    x, y = map(torch.stack, zip(*(client.test_data() for client in clients), strict=True))
    with torch.no_grad():
        correct, loss = vmap(lambda *one: evaluate(clients[0].algorithm.task, *one))(models, x, y)
    return list(zip((correct.double() / y.shape[1]).tolist(), loss.tolist(), strict=True))
