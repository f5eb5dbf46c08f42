"""Clients in this process: each on a thread (bit-identical for any number of them), or equal sizes stacked (vmap)."""

import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap

from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, ClientState, Cohort, Failure, LocalData, Payload
from pfedla.core.errors import PfedlaError, Stopped, first_line
from pfedla.core.faults import choose_answering
from pfedla.core.layers import Params, stack, take
from pfedla.core.plugins import locate
from pfedla.core.privacy import Mechanism, align_batches
from pfedla.core.randomness import draw_from
from pfedla.core.rounds import NO_ANSWER
from pfedla.core.settings import AUTO, EngineSettings
from pfedla.core.tasks import Task, copy_module
from pfedla.core.training import EVALUATION_BATCH, evaluate
from pfedla.core.trees import Tree, arguments, leaves, map_tree
from pfedla.data.federation import Federation
from pfedla.engines.client import (
    Client,
    Outcome,
    Test,
    drawing,
    judge,
    keep_freed_memory,
    make_client,
    one_thread,
    pick,
)

R = TypeVar("R")
GroupFunction = Callable[[list[Client], Payload], Sequence[R]]
TRAINED = "__trained__"
# On a CPU stacking wins where a step is mostly Python: small networks without convolutions.
VECTORIZED_PARAMETERS = 2**16
SLOW_STACKED = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention)  # measured to be slower so
SAME_SIZE = 4  # clients of one size, on average: a stack of one takes 3.5 times as long as a thread (four hospitals)
MEMORY_BOUND = 2**31  # bytes that stacked clients may take while they train, by an estimate
MODEL_COPIES = 6  # parameters before and after, gradients, states, uploads
ACTIVATION_COPIES = 4  # every module's output, what follows it without being a module, the gradients of both


def resolve_engine(
    settings: EngineSettings, task: Task, x: Tree = None, y: Any = None, sizes: Sequence[int] = ()
) -> tuple[EngineSettings, str]:
    """Replace "auto" by the faster engine for this model and device; return also what a user should know of it.

    A batch `x`, `y` tries the model through vmap: what cannot be stacked, or is slower so, is run in threads. `sizes`
    are the clients' numbers of examples.
    """
    name, note = settings.name, ""
    if name == AUTO:  # by a measured rule (docs/performance.md), not a timing: the same file gives the same bits
        slow = any(isinstance(part, SLOW_STACKED) for part in task.module.modules())
        small = sum(parameter.numel() for parameter in task.module.parameters()) <= VECTORIZED_PARAMETERS
        few = len(sizes) < SAME_SIZE * len(set(sizes))  # only clients of one size are stacked
        stacks = settings.device != "cpu" or (small and not slow and not few)
        name = "vectorized" if stacks and not settings.compile else "threaded"
    if name == "vectorized" and x is not None:
        problem, reason = find_obstacle(task, x, y)
        if problem == "cannot be stacked" and settings.name == "vectorized":
            raise PfedlaError(f"the model {problem} ({reason}); use the threaded engine")
        if problem and settings.name == AUTO:
            name, note = "threaded", f"clients are trained in threads: the model {problem} ({reason})"
    if settings.compile and (name != "threaded" or settings.device != "cpu"):
        raise PfedlaError(f"--compile needs the threaded engine on the cpu, not {name} on {settings.device}")
    if settings.compile and not any(map(shutil.which, (os.environ.get("CXX") or "g++", "clang++"))):
        raise PfedlaError("--compile needs a C++ compiler: install g++ or clang++, or name one in $CXX")
    return settings.model_copy(update={"name": name}), note


def find_obstacle(task: Task, x: Tree, y: Tensor) -> tuple[str, str]:
    """Train and test two stacked clients; return what is wrong with that and why, or nothing."""
    initial = {name: torch.stack([value, value]) for name, value in task.initial().items()}
    parameters, statistics = task.layers.parameters(initial), task.layers.only_statistics(initial)
    x, y = stack_trees([x, x]), torch.stack([y, y])
    try:
        with warnings.catch_warnings(record=True) as caught, draw_from(torch.Generator(), torch.Generator()):
            warnings.simplefilter("always")
            vmap(task.gradient, randomness="different")(parameters, statistics, x, y)
            with torch.no_grad():  # other kernels than in training
                vmap(task.outputs, randomness="different")(initial, x)
    except Exception as error:  # whatever the user's module or vmap raises
        return "cannot be stacked", first_line(error)
    slow = [first_line(one.message) for one in caught if "performance drop" in str(one.message)]  # type: ignore[arg-type]
    return ("is slower stacked", slow[0].partition(". ")[0]) if slow else ("", "")


class SimulatedEngine:
    """Implements Engine."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        settings: EngineSettings,
        *,
        mechanisms: Sequence[Mechanism] = (),
        **known: Any,
    ) -> None:
        """`known`: recalibrate and faults, as in `Client`; `mechanisms`: of private training, one per client."""
        settings, _ = resolve_engine(settings, algorithm.task)
        self.stacks = settings.name == "vectorized"
        self.threads = 1 if self.stacks else settings.threads or os.cpu_count() or 1
        # Asked before each client trains; if it says so, Stopped is raised and no state changes.
        self.stopping: Callable[[], bool] = lambda: False
        examples = list(zip(federation.train, federation.test, strict=True))
        first = replace(make_client(algorithm, federation, examples[0], settings), **known)
        self.clients = [replace(first, number=n, train=train, test=test) for n, (train, test) in enumerate(examples)]
        if mechanisms:
            pairs = zip(self.clients, mechanisms, strict=True)
            self.clients = [replace(client, mechanism=mechanism) for client, mechanism in pairs]
        self.algorithm, self.device, self.faults = first.algorithm, first.device, first.faults
        self._numbers = count_numbers(first) if self.stacks else (0, 0)
        self._pending: dict[int, ClientState] = {}

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers: dict[int, Answer | Failure] = dict.fromkeys(cohort.ids.tolist(), NO_ANSWER)
        if self.faults.dropout:
            answering = choose_answering(self.faults, cohort)
            cohort, downloads = cohort.only(answering), downloads.rows(answering)

        def train_group(clients: list[Client], downloads: Payload) -> list[Outcome]:
            if self.stopping():
                raise Stopped
            if self.stacks:
                return update_stacked(clients, downloads, cohort)
            return [clients[0].update(downloads.rows(0), cohort)]

        outcomes = self._map("raised", train_group, cohort, downloads, training=True)
        self._pending = {client: one[0] for client, one in outcomes.items() if not isinstance(one, Failure)}
        answers |= {client: one if isinstance(one, Failure) else one[1] for client, one in outcomes.items()}
        return list(answers.values())

    def evaluate(
        self, cohort: Cohort, downloads: Payload, *, whole: bool = False
    ) -> tuple[ClientMetrics, dict[int, Failure]]:
        def test_group(clients: list[Client], downloads: Payload) -> list[Test]:
            models = personalize_group(clients, downloads, cohort)
            if self.stacks:
                return evaluate_stacked(clients, stack(models), whole=whole)
            return [clients[0].evaluate(models[0], whole=whole)]

        tests = self._map("evaluation raised", test_group, cohort, downloads)
        failures = {client: test for client, test in tests.items() if isinstance(test, Failure)}
        found = [(torch.nan, torch.nan, {}) if isinstance(test, Failure) else test for test in tests.values()]
        names = [metric.name for metric in self.algorithm.task.objective.metrics] if whole else []
        columns = {name: [test[2].get(name, torch.nan) for test in found] for name in names}
        others = {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
        metrics = torch.tensor([test[:2] for test in found], dtype=torch.float64)
        score, loss = metrics.T
        return ClientMetrics(score, loss, others), failures

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        found = self._map("", partial(personalize_group, cohort=cohort), cohort, downloads)
        models: list[Params] = [{} if isinstance(one, Failure) else one for one in found.values()]
        return [{name: value.cpu() for name, value in model.items()} for model in models]

    def _map(
        self, reason: str, function: GroupFunction[R], cohort: Cohort, downloads: Payload, *, training: bool = False
    ) -> dict[int, R | Failure]:
        """Apply `function` to groups of clients and their downloads; a group that raises is run client by client."""
        clients, downloads = [self.clients[client] for client in cohort.ids.tolist()], downloads.to(self.device)

        def run(rows: list[int]) -> Sequence[R | Failure]:
            try:
                # A copy in memory of its own, as on another machine: kernels may round by alignment.
                return function([clients[row] for row in rows], downloads.rows(torch.tensor(rows)))
            except Stopped:
                raise
            except Exception as error:
                if len(rows) > 1:
                    return [run([row])[0] for row in rows]
                detail = f"{type(error).__name__}: {error}".splitlines()[0]
                return [Failure(reason, detail + locate(error), error=error)]

        groups = [[row] for row in range(len(clients))]
        if self.stacks:
            epochs = [client.limit_epochs(cohort) if training else 0 for client in clients]
            groups = group_clients(clients, epochs, *self._numbers)
        found: dict[int, R | Failure] = {}
        for rows, outcomes in zip(groups, self._pool.map(run, groups), strict=True):
            found.update(zip(rows, outcomes, strict=True))
        return {client.number: found[row] for row, client in enumerate(clients)}

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self.clients[client] = replace(self.clients[client], state=self._pending[client], has_trained=True)

    def state(self) -> Params:
        """Return everybody's private state, stacked, and who has trained."""
        private = {name: value.cpu() for name, value in stack([client.state for client in self.clients]).items()}
        return {**private, TRAINED: torch.tensor([client.has_trained for client in self.clients])}

    def load(self, state: Params) -> None:
        for number, trained in enumerate(state[TRAINED].tolist()):
            own = {name: value[number].clone().to(self.device) for name, value in state.items() if name != TRAINED}
            self.clients[number] = replace(self.clients[number], state=own, has_trained=trained)

    def __enter__(self) -> Self:
        one_thread.__enter__()
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(self.threads, "client", initializer=partial(torch.set_num_threads, 1))
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        one_thread.__exit__()


def personalize_group(clients: list[Client], downloads: Payload, cohort: Cohort) -> list[Params]:
    return [client.personalize(downloads.rows(row), cohort) for row, client in enumerate(clients)]


def group_clients(clients: list[Client], epochs: list[int], per_model: int, per_example: int) -> list[list[int]]:
    """Return the positions of the clients that stack: equal sizes and epochs, as many as fit in memory."""
    groups: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(client.train.y), len(client.test.y), epochs[position]].append(position)
    parts: list[list[int]] = []
    for (train, test, _), positions in groups.items():
        # An epoch's order is a second copy of the data; a test batch may be larger than a training batch.
        batch = max(min(clients[0].algorithm.training.batch_size, train), min(EVALUATION_BATCH, test))
        # Private training has a gradient per example, and batches of which some are larger than others.
        copies = 2 * min(clients[0].algorithm.training.batch_size, train) if clients[0].mechanism else 1
        data = (2 * train + test) * sum(part[0].numel() for part in leaves(clients[0].train.x))
        fit = max(1, MEMORY_BOUND // (4 * (data + copies * per_model + batch * per_example)))
        parts += [part.tolist() for part in torch.tensor(positions).tensor_split(-(-len(positions) // fit))]
    return parts


def count_numbers(client: Client) -> tuple[int, int]:
    """Estimate how many numbers a client's training takes for its model, and for each example of a batch."""
    task, outputs = client.algorithm.task, list[object]()
    module = copy_module(task.module).eval()
    for part in module.modules():
        part.register_forward_hook(lambda part, given, output: outputs.append(output))
    with torch.no_grad():
        positional, named = arguments(client.prepare(pick(client.test, slice(1))).x)
        module(*positional, **named)
    activations = sum(output.numel() for output in outputs if isinstance(output, Tensor))
    return MODEL_COPIES * sum(value.numel() for value in task.initial().values()), ACTIVATION_COPIES * activations


def update_stacked(clients: list[Client], downloads: Payload, cohort: Cohort) -> list[Outcome]:
    """Train clients of equal size and epochs at once."""
    epochs = clients[0].limit_epochs(cohort)
    if clients[0].algorithm.wire.download != "none":
        received = [client.unpack(downloads.rows(row), cohort) for row, client in enumerate(clients)]
        downloads = downloads._replace(tensors=stack([one.tensors for one in received]))
    data = [client.local_data(cohort, downloads.rows(row), epochs) for row, client in enumerate(clients)]
    data = align_batches(data) if clients[0].mechanism else data
    stacked = LocalData(*(stack_trees(parts) for parts in zip(*data, strict=True)))
    states = stack([client.own_state for client in clients])
    with drawing(clients, cohort):
        update = clients[0].method_at(cohort.round).local_update
        results = vmap(update, randomness="different")(states, downloads, stacked)
    outcomes = []
    for row, (client, test) in enumerate(zip(clients, evaluate_stacked(clients, results.model), strict=True)):
        # A clone: the client's state outlives the round, a view would keep the whole cohort's alive.
        state = {name: value[row].clone() for name, value in results.client.items()}
        model, upload, loss = take(results.model, row), results.upload.rows(row), results.loss[row]
        result = results._replace(client=state, upload=upload, model=model, loss=loss)
        outcomes.append(client.conclude(result, test, downloads.rows(row), cohort))
    return outcomes


def evaluate_stacked(clients: list[Client], models: Params, *, whole: bool = False) -> list[Test]:
    """Test clients of equal size at once."""
    task = clients[0].algorithm.task
    x, y = (stack_trees(parts) for parts in zip(*(client.prepare(client.test) for client in clients), strict=True))
    with torch.no_grad(), drawing(clients):
        found = vmap(partial(evaluate, task), randomness="different")(models, x, y)
    return [judge(task.objective, *one, whole=whole) for one in zip(*found, y, strict=True)]


def stack_trees(trees: Sequence[Tree]) -> Tree:
    return map_tree(lambda *parts: torch.stack(parts), *trees)
