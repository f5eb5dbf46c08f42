"""One client's own side: its data and all that it makes of them. The same in a thread, in a worker and at a site."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedla.augmentation import draw_crops
from pfedla.contracts import Algorithm, Answer, ClientState, Cohort, LocalData, LocalResult, Params, Payload, Recalibrate
from pfedla.data.federation import Examples, Outline
from pfedla.errors import PfedlaError
from pfedla.seeds import generator
from pfedla.training import evaluate
from pfedla.tree import is_finite

Test = tuple[Tensor, Tensor]  # examples right, mean loss
CPU = torch.device("cpu")
RECALIBRATION_EXAMPLES = 2048
NO_DATA = LocalData(*[torch.empty(0)] * len(LocalData._fields))


@dataclass(frozen=True)
class Client:
    number: int  # every draw comes from it
    train: Examples
    test: Examples
    outline: Outline
    algorithm: Algorithm  # its task in the form that is run, on the device
    device: torch.device = CPU
    recalibrate: Recalibrate = "unsampled"

    def update(
        self, state: ClientState, download: Payload, cohort: Cohort, epochs: int | None = None
    ) -> tuple[ClientState, Answer]:
        """A round of local training, or of the first of its epochs: the private state after it, and what is sent."""
        result = self.algorithm.local_update(state, download, self.local_data(cohort, download, epochs))
        return result.client, self.answer(state, result, self.tested(result.model))

    def answer(self, before: ClientState, result: LocalResult, test: Test) -> Answer:
        after = result.client
        kinds = [{name: (value.shape, value.dtype) for name, value in state.items()} for state in (before, after)]
        if kinds[0] != kinds[1]:
            raise PfedlaError("the private state has changed its names, shapes or dtypes")
        finite = is_finite(result.model) and is_finite(after)
        return Answer(moved(result.upload, CPU), result.loss.cpu(), *self.metrics(test), finite)

    def metrics(self, test: Test) -> tuple[float, float]:
        """Accuracy and loss."""
        correct, loss = test
        return correct.item() / len(self.test.y), loss.item()

    def tested(self, model: Params) -> Test:
        with torch.no_grad():
            return evaluate(self.algorithm.task, model, *self.test_data())

    def personal(self, state: ClientState, trained: bool, download: Payload, cohort: Cohort) -> Params:
        """The personal model; a client that never trained has no statistics of its own, they are estimated on a copy."""
        data = self.local_data(cohort, download) if self.algorithm.personalizes_on_data else NO_DATA
        model = self.algorithm.personalize(state, download, data)
        if not self.algorithm.task.layers.statistics or self.recalibrate == "never":
            return model
        return self._recalibrated(model) if self.recalibrate == "always" or not trained else model

    def _recalibrated(self, model: Params) -> Params:
        x = self.train.x
        if len(x) > RECALIBRATION_EXAMPLES:  # evenly spaced: the examples may be in the order of their classes
            x = x[torch.linspace(0, len(x) - 1, RECALIBRATION_EXAMPLES).long()]
        with torch.no_grad():
            return self.algorithm.task.recalibrated(model, self._inputs(x))

    def split(self, seed: int, share: float) -> tuple[Examples, Examples]:
        """What a client trains on, and the share of it that it holds out for validation: fixed once, by the seed."""
        x, y = self.train
        held_out = min(int(len(y) * share), max(0, len(y) - 2))  # BatchNorm needs two to train on
        if not held_out:
            return Examples(x, y), Examples(x[:0], y[:0])
        order = torch.randperm(len(y), generator=generator(seed, "held-out", 0, self.number))
        kept, apart = order[held_out:].sort().values, order[:held_out].sort().values
        return Examples(x[kept], y[kept]), Examples(x[apart], y[apart])

    def local_data(self, cohort: Cohort, download: Payload, epochs: int | None = None) -> LocalData:
        """All that a client trains on in a round, or the first of its epochs."""
        examples, held_out = self.split(cohort.seed, self.algorithm.held_out_share(download))
        draws = generator(cohort.seed, "batches", cohort.round, self.number)
        training = self.algorithm.training
        order = torch.stack([torch.randperm(len(examples.y), generator=draws) for _ in range(training.epochs)])
        # A stream of its own: with and without crops, the batches are the same.
        shaken = len(examples.y) if training.augment else 0
        crops = draw_crops(training.epochs, shaken, generator(cohort.seed, "crops", cohort.round, self.number))
        return LocalData(
            x=self._inputs(examples.x), y=examples.y.to(self.device),
            order=order[:epochs].to(self.device), crops=crops[:epochs].to(self.device),
            held_out_x=self._inputs(held_out.x), held_out_y=held_out.y.to(self.device),
        )  # fmt: skip

    def test_data(self) -> tuple[Tensor, Tensor]:
        return self._inputs(self.test.x), self.test.y.to(self.device)

    def _inputs(self, x: Tensor) -> Tensor:
        return self.algorithm.task.laid_out(self.outline.normalised(x.to(self.device)))


def moved(payload: Payload, device: torch.device) -> Payload:
    tensors, extras = ({name: v.to(device) for name, v in part.items()} for part in (payload.tensors, payload.extras))
    return Payload(tensors, payload.sent.to(device), extras)
