"""FedBABU: the body is trained and averaged; the head stays at its random start until a client fine-tunes.

Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
"""

from pfedla.algorithms.finetune import FineTuned
from pfedla.algorithms.partial import PrivateByName
from pfedla.core.contracts import ClientState, LocalData, LocalResult, Payload
from pfedla.core.training import keep_and_send, sgd


class FedBABU(FineTuned, PrivateByName):
    name = "fedbabu"
    summary = "a shared body under a random head, fine-tuned before use"

    def local_update(self, client: ClientState, download: Payload, data: LocalData) -> LocalResult:
        start = {**download.tensors, **client}
        return keep_and_send(client, download, *sgd(self.task, start, data, self.training, only=download.tensors))
