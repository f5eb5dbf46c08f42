"""What one client does with its data, the same in a thread and at a site."""

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pfedla.core import codecs
from pfedla.core.contracts import Algorithm, Answer, ClientState, Cohort, LocalData, LocalResult, Payload, generator
from pfedla.core.errors import PfedlaError
from pfedla.core.faults import NO_FAULTS, falsify, is_attacking, limit_epochs
from pfedla.core.layers import Params, is_finite
from pfedla.core.objectives import Objective
from pfedla.core.optimizers import learning_rate_at
from pfedla.core.privacy import Mechanism, sample_batches
from pfedla.core.randomness import draw_from
from pfedla.core.settings import EngineSettings, Faults, Recalibrate
from pfedla.core.tasks import CompiledTask, DirectTask, Task
from pfedla.core.training import evaluate, normalise
from pfedla.core.trees import map_tree, take_rows
from pfedla.data.federation import Examples, Outline

Test = tuple[float, float, dict[str, float]]  # score, loss, and every metric where they were asked for
Outcome = tuple[ClientState, Answer]
Split = tuple[Examples, Examples]  # training and test examples
RECALIBRATION_EXAMPLES = 2048
UPDATE, PERSONAL = "private update", "private personal model"  # what private training is for: each draws for itself


@dataclass(frozen=True, kw_only=True)
class Client:
    number: int = 0  # every draw comes from it
    train: Examples
    test: Examples
    outline: Outline  # says how examples are normalised
    algorithm: Algorithm  # its task in the form that is run, on the device
    state: ClientState  # private; never written into
    has_trained: bool = False
    device: torch.device
    recalibrate: Recalibrate = "unsampled"
    faults: Faults = NO_FAULTS
    rounds: int = 1  # of the run, for the schedule of the learning rate
    mechanism: Mechanism | None = None  # of private training
    secret: bool = False  # whether its noise and its batches come from the operating system

    def update(self, download: Payload, cohort: Cohort) -> Outcome:
        """Train for a round; return the private state after it and what is sent."""
        download = self.unpack(download, cohort)
        data = self.local_data(cohort, download, self.limit_epochs(cohort))
        with drawing([self], cohort):
            result = self.method_at(cohort.round).local_update(self.own_state, download, data)
        return self.conclude(result, self.evaluate(result.model), download, cohort)

    @property
    def own_state(self) -> ClientState:
        """The method's part of the private state."""
        return codecs.drop_private(self.state) if encodes(self.algorithm) else self.state

    def unpack(self, download: Payload, cohort: Cohort) -> Payload:
        """Return what a message of the server holds."""
        if self.algorithm.wire.download == "none":
            return download
        return codecs.unpack_download(self.algorithm, self.state, download, cohort, self.number)

    def method_at(self, round: int) -> Algorithm:
        """Return the algorithm with the learning rate of a round."""
        method, training = self.algorithm, self.algorithm.training
        if training.schedule == "constant" and not training.warm_up_rounds:
            return method
        lr = learning_rate_at(training, round, self.rounds)
        return method.model_copy(update={"training": training.model_copy(update={"lr": lr})})

    def limit_epochs(self, cohort: Cohort) -> int:
        budget = self.algorithm.training.local_epochs
        return limit_epochs(self.faults, cohort, self.number, budget) if self.faults.stragglers else budget

    def attacks(self, cohort: Cohort) -> bool:
        return self.faults.attackers > 0 and is_attacking(self.faults, cohort, self.number, len(self.outline))

    def conclude(self, result: LocalResult, test: Test, download: Payload, cohort: Cohort) -> Outcome:
        """Return the private state after training and the answer, which an attacker falsifies."""
        own = self.own_state
        kinds = [{name: (v.shape, v.dtype) for name, v in state.items()} for state in (own, result.client)]
        if kinds[0] != kinds[1]:
            raise PfedlaError("local_update changed the names, shapes or dtypes of the private state")
        finite, upload = is_finite(result.model) and is_finite(result.client), result.upload.to("cpu")
        if self.attacks(cohort):
            task = self.algorithm.task
            received = {name: v for name, v in download.tensors.items() if download.sent[task.layers.index[name]]}
            start = task.initial() if self.faults.attack == "initial" else {**own, **received}
            start = {name: value.cpu() for name, value in start.items()}
            upload = falsify(self.faults, cohort, self.number, upload, start)
        state = result.client
        if encodes(self.algorithm):
            links, upload = codecs.pack_upload(self.algorithm, self.state, download, upload, cohort, self.number)
            state = {**state, **{name: value.to(self.device) for name, value in links.items()}}
        return state, Answer(upload, result.loss.cpu(), score=test[0], loss=test[1], finite=finite)

    def evaluate(self, model: Params, *, whole: bool = False) -> Test:
        with torch.no_grad(), drawing([self]):
            x, y = self.prepare(self.test)
            outputs, loss = evaluate(self.algorithm.task, model, x, y)
        return judge(self.algorithm.task.objective, outputs, loss, y, whole=whole)

    def personalize(self, download: Payload, cohort: Cohort) -> Params:
        """Return the personal model; estimate the statistics of a client that never trained."""
        download = self.unpack(download, cohort)
        data = LocalData(has_trained=torch.tensor(self.has_trained, device=self.device))
        if self.algorithm.personalizes_on_data:
            data = self.local_data(cohort, download, purpose=PERSONAL)
        with drawing([self], cohort, purpose=PERSONAL):
            model = self.method_at(cohort.round).personalize(self.own_state, download, data)
        estimates = self.recalibrate == "always" or (self.recalibrate == "unsampled" and not self.has_trained)
        if not self.algorithm.task.layers.statistics or not estimates:
            return model
        x, y = self.train
        if len(y) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x, y = pick(self.train, torch.linspace(0, len(y) - 1, RECALIBRATION_EXAMPLES).long())
        with torch.no_grad():
            return self.algorithm.task.recalibrate(model, self.prepare(Examples(x, y)).x)

    def local_data(
        self, cohort: Cohort, download: Payload, epochs: int | None = None, *, purpose: str = UPDATE
    ) -> LocalData:
        """Return all that a client trains on in a round, or in the first of its epochs."""
        examples, held_out = self._hold_out(cohort.seed, self.algorithm.held_out_share(download))
        budget, private = self.algorithm.training.local_epochs, {}
        if self.mechanism is None:
            draws = generator(cohort.seed, "batches", cohort.round, self.number)
            order = torch.stack([torch.randperm(len(examples.y), generator=draws) for _ in range(budget)])
        else:  # independent of those of the other purpose
            stream = None if self.secret else generator(cohort.seed, f"{purpose} batches", cohort.round, self.number)
            order, is_drawn = sample_batches(self.mechanism, len(examples.y), budget, stream)
            private = {"is_drawn": is_drawn[:epochs], "mechanism": self.mechanism.to_tensor(len(examples.y))}
            private = {key: value.to(self.device) for key, value in private.items()}
        order = order[:epochs].to(self.device)
        (x, y), (held_out_x, held_out_y) = map(self.prepare, (examples, held_out))
        if self.faults.attack == "label-flip" and self.attacks(cohort):
            y, held_out_y = (len(self.outline.outputs) - 1 - labels for labels in (y, held_out_y))
        data = LocalData(x, y, order=order, held_out_x=held_out_x, held_out_y=held_out_y, **private)
        return data._replace(has_trained=torch.tensor(self.has_trained, device=self.device))

    def _hold_out(self, seed: int, share: float) -> tuple[Examples, Examples]:
        """Return what a client trains on, and the share that it holds out, fixed by the seed."""
        y = self.train.y
        held_out = min(int(len(y) * share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:  # no copy: float data may be large
            return self.train, pick(self.train, slice(0))
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, self.number))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return pick(self.train, kept), pick(self.train, apart)

    def prepare(self, examples: Examples) -> Examples:
        """Return examples on the device, normalised, in the layout that the task runs fastest."""
        x = map_tree(lambda part: part.to(self.device), examples.x)
        x = normalise(x, self.outline.mean, self.outline.std)
        return Examples(map_tree(self.algorithm.task.lay_out, x), examples.y.to(self.device))


def encodes(algorithm: Algorithm) -> bool:
    return algorithm.wire.upload != "none" or algorithm.wire.download != "none"


def drawing(
    clients: Sequence[Client], cohort: Cohort | None = None, *, purpose: str = UPDATE
) -> AbstractContextManager[None]:
    """Let private training and random layers (dropout) draw from a stream per client and round, or per client."""
    is_private = clients[0].mechanism is not None and cohort is not None
    if not clients[0].algorithm.task.draws and not is_private:
        return nullcontext()
    seed, round = (cohort.seed, cohort.round) if cohort else (0, 0)
    name = purpose if is_private else "model"
    streams = [generator(seed, name, round, client.number) for client in clients]
    return draw_from(*streams, secret=is_private and clients[0].secret)


def pick(examples: Examples, rows: torch.Tensor | slice) -> Examples:
    return Examples(take_rows(examples.x, rows), examples.y[rows])


def judge(objective: Objective, outputs: torch.Tensor, loss: torch.Tensor, y: torch.Tensor, *, whole: bool) -> Test:
    """Return how good one client's outputs are; `whole`: by every metric."""
    mean = loss.item()
    return float(objective.score(outputs, mean, y)), mean, objective.measure(outputs, y) if whole else {}


def make_client(algorithm: Algorithm, outline: Outline, examples: Split, settings: EngineSettings) -> Client:
    """Return a client whose task is in the form that the engine of the settings runs fastest."""
    device, (train, test) = usable_device(settings.device), examples
    task: Task = algorithm.task.to(device)
    some = pick(train, torch.zeros(2, dtype=torch.int64))
    x, y = outline.normalise(map_tree(lambda part: part.to(device), some.x)), some.y.to(device)
    if settings.compile:
        task = CompiledTask(task.module, task.objective, x, y, algorithm.training)
    elif settings.name == "threaded":
        task = DirectTask(task.module, task.objective, x)
    else:
        task.try_out(x)
    method = algorithm.model_copy(update={"task": task})
    state = {**method.init_client(), **codecs.init_private(method)}
    return Client(train=train, test=test, outline=outline, algorithm=method, state=state, device=device)


def usable_device(name: str) -> torch.device:
    """Return the device, or refuse one that does not work here."""
    try:
        float(torch.zeros(1, device=name))
        return torch.device(name)
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None


class _OneThread:
    """One intra-op thread while anybody is inside: clients are the parallelism, and sums are always split alike."""

    # torch keeps the number per thread, and one for new threads. All restore what the first one found.
    lock, users, before = threading.Lock(), 0, 1

    def __enter__(self) -> None:
        with self.lock:
            self.before = self.before if self.users else torch.get_num_threads()
            self.users += 1
            torch.set_num_threads(1)

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.users -= 1
            torch.set_num_threads(self.before)


one_thread = _OneThread()


def keep_freed_memory() -> None:
    """Make glibc keep freed memory: else each step faults its pages in again, up to a third of a small CNN's step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD of <malloc.h>; the largest that every glibc takes
        mallopt(-1, 2**28)  # M_TRIM_THRESHOLD
