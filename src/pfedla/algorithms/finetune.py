"""FedAvg with fine-tuning: the global model, trained a little more on a client's own data before it is used there.

The usual second baseline of personalised federated learning; reported under its own name, because its training is FedAvg's
and only the model that is deployed differs.
"""

from typing import ClassVar, Literal

from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.contracts import ClientState, LocalData, Params, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import finite_or
from pfedla.core.settings import Positive
from pfedla.core.training import sgd


class FedAvgFineTuned(FedAvg):
    name: ClassVar[str] = "fedavg-ft"
    summary: ClassVar[str] = "FedAvg, fine-tuned on the client before use"
    personalizes_on_data: ClassVar[bool] = True

    fine_tuning_epochs: Positive | Literal["auto"] = "auto"  # auto: as many as the local budget

    def check(self, num_clients: int) -> None:
        if self._epochs() > self.training.local_epochs:
            raise PfedlaError(
                f"fine_tuning_epochs = {self._epochs()}, but the local budget is {self.training.local_epochs} epochs; use fewer"
            )

    def _epochs(self) -> int:
        return self.training.local_epochs if self.fine_tuning_epochs == "auto" else self.fine_tuning_epochs

    def personalize(self, client: ClientState, download: Payload, data: LocalData) -> Params:
        tuned, _ = sgd(self.task, download.tensors, data, self.training, epochs=range(self._epochs()))
        return finite_or(tuned, download.tensors)  # who breaks a model by fine-tuning does without
