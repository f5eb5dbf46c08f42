"""What the two simulating engines share: everybody's private state, data on the device, and which state counts."""

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from pfedla.augmentation import draw_crops
from pfedla.contracts import (
    Algorithm,
    ClientMetrics,
    ClientState,
    Cohort,
    LocalData,
    LocalResult,
    Params,
    Payload,
    Recalibrate,
    Trained,
)
from pfedla.data.federation import Examples, Federation
from pfedla.errors import PfedlaError
from pfedla.seeds import generator
from pfedla.tree import is_finite, stack

Test = tuple[Tensor, Tensor]  # examples right, mean loss
TRAINED = "__trained__"
RECALIBRATION_EXAMPLES = 2048
NO_DATA = LocalData(*[torch.empty(0)] * len(LocalData._fields))


class SimulatedClients(ABC):
    """Implements the Engine contract; a subclass says how `local_update` and evaluation are mapped over clients."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, *, device: str = "cpu", threads: int = 0,
        recalibrate: Recalibrate = "unsampled",
    ) -> None:  # fmt: skip
        self.device = usable_device(device)
        self.algorithm = dataclasses.replace(algorithm, task=algorithm.task.to(self.device))
        self.federation = federation
        self.threads = threads or os.cpu_count() or 1
        self.recalibrate = recalibrate
        initial = self.algorithm.init_client()
        self._clients: list[ClientState] = [initial] * len(federation)  # states are never written into
        self._trained = torch.zeros(len(federation), dtype=torch.bool)
        self._pending: dict[int, ClientState] = {}

    @abstractmethod
    def _train(self, cohort: Cohort, downloads: Payload) -> list[tuple[LocalResult, Test]]:
        """Every client's local update and the test of its trained model, in the order of the cohort."""

    @abstractmethod
    def _evaluate(self, cohort: Cohort, downloads: Payload) -> list[Test]:
        """The test of every client's personal model, in the order of the cohort."""

    def train(self, cohort: Cohort, downloads: Payload) -> Trained:
        results, tests = zip(*self._train(cohort, self._on_device(downloads)), strict=True)
        self._pending = {client: result.client for client, result in zip(cohort.ids.tolist(), results, strict=True)}
        uploads = Payload(
            {name: value.cpu() for name, value in stack([result.upload.tensors for result in results]).items()},
            torch.stack([result.upload.sent for result in results]).cpu(),
            {name: value.cpu() for name, value in stack([result.upload.extras for result in results]).items()},
        )
        losses = torch.stack([result.loss for result in results]).cpu()
        finite = torch.tensor([is_finite(result.model) and is_finite(result.client) for result in results])
        return Trained(cohort, uploads, losses, self._metrics(cohort, tests), finite)

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        return self._metrics(cohort, self._evaluate(cohort, self._on_device(downloads)))

    def _metrics(self, cohort: Cohort, tests: Sequence[Test]) -> ClientMetrics:
        correct, loss = (torch.stack(values).cpu().double() for values in zip(*tests, strict=True))
        return ClientMetrics(correct / torch.tensor([len(self.federation.test[i].y) for i in cohort.ids]), loss)

    def commit(self, accepted: Tensor) -> None:
        for client in accepted.tolist():
            self._clients[client] = self._pending[client]
            self._trained[client] = True
        self._pending = {}

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        downloads = self._on_device(downloads)
        models = [self._personal(cohort, client, downloads.rows(row)) for row, client in enumerate(cohort.ids.tolist())]
        return [{name: value.cpu() for name, value in model.items()} for model in models]

    def state(self) -> Params:
        """Everybody's private state, stacked, and who has trained."""
        stacked = {name: value.cpu() for name, value in stack(self._clients).items()}
        return {**stacked, TRAINED: self._trained.clone()}

    def load(self, state: Params) -> None:
        self._trained = state[TRAINED].clone()
        private = {name: value.to(self.device) for name, value in state.items() if name != TRAINED}
        # Copies, not views: they then lie in memory as fresh tensors do, and small products round the same way.
        self._clients = [
            {name: value[client].clone() for name, value in private.items()} for client in range(len(self.federation))
        ]

    def __enter__(self) -> Self:
        # One intra-op thread: the clients are the parallelism, and results do not depend on how a sum is cut up.
        self._outer_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.set_num_threads(self._outer_threads)

    # For one client

    def _split(self, client: int, seed: int) -> tuple[Examples, Examples]:
        """What a client trains on, and what it holds out of it for validation: fixed once, by the seed."""
        x, y = self.federation.train[client]
        held_out = min(int(len(y) * self.algorithm.held_out_share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:
            return Examples(x, y), Examples(x[:0], y[:0])
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, client))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return Examples(x[kept], y[kept]), Examples(x[apart], y[apart])

    def _local_data(self, cohort: Cohort, client: int) -> LocalData:
        examples, held_out = self._split(client, cohort.seed)
        draws = generator(cohort.seed, "batches", cohort.round, client)
        training = self.algorithm.training
        order = torch.stack([torch.randperm(len(examples.y), generator=draws) for _ in range(training.epochs)])
        # A stream of its own: with and without crops, the batches are the same.
        shaken = len(examples.y) if training.augment else 0
        crops = draw_crops(training.epochs, shaken, generator(cohort.seed, "crops", cohort.round, client))
        return LocalData(
            x=self._inputs(examples.x), y=examples.y.to(self.device), order=order.to(self.device), crops=crops.to(self.device),
            held_out_x=self._inputs(held_out.x), held_out_y=held_out.y.to(self.device),
        )  # fmt: skip

    def _test_data(self, client: int) -> tuple[Tensor, Tensor]:
        examples = self.federation.test[client]
        return self._inputs(examples.x), examples.y.to(self.device)

    def _inputs(self, x: Tensor) -> Tensor:
        return self.federation.normalised(x.to(self.device))

    def _personal(self, cohort: Cohort, client: int, download: Payload) -> Params:
        """The personal model; a client that never trained has no statistics of its own, they are estimated on a copy."""
        data = self._local_data(cohort, client) if self.algorithm.personalizes_on_data else NO_DATA
        model = self.algorithm.personalize(self._clients[client], download, data)
        return self._recalibrated(model, client) if self._needs_recalibration(client) else model

    def _needs_recalibration(self, client: int) -> bool:
        if not self.algorithm.task.layers.statistics or self.recalibrate == "never":
            return False
        return self.recalibrate == "always" or not self._trained[client]

    def _recalibrated(self, model: Params, client: int) -> Params:
        x = self.federation.train[client].x
        if len(x) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x = x[torch.linspace(0, len(x) - 1, RECALIBRATION_EXAMPLES).long()]
        with torch.no_grad():
            return self.algorithm.task.recalibrated(model, self._inputs(x))

    def _on_device(self, payload: Payload) -> Payload:
        tensors, extras = ({name: v.to(self.device) for name, v in part.items()} for part in (payload.tensors, payload.extras))
        return Payload(tensors, payload.sent.to(self.device), extras)


def usable_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        float(torch.zeros(1, device=device))
    except Exception as error:  # every backend raises its own kind
        reason = str(error).splitlines()[0]
        raise PfedlaError(f"device {name!r} cannot be used here ({reason}); cpu always can") from None
    return device
