"""Bytes on the wire: the tensors of the sent layers, nothing else."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pfedla.contracts import Answer, Failure, Payload
from pfedla.layers import Layers

FLOAT_BYTES = 4


def payload_bytes(payload: Payload, layers: Layers) -> Tensor:
    """Bytes per client of a stacked payload."""
    total = torch.zeros(len(payload.sent), dtype=torch.int64)
    for name, value in payload.tensors.items():
        total += payload.sent[:, layers.index[name]] * (value[0].numel() * value.element_size())
    for value in payload.extras.values():
        total += value[0].numel() * value.element_size()
    return total


def answer_bytes(answer: Answer | Failure) -> int:
    """Bytes of one client's upload as it came, used or not."""
    if isinstance(answer, Failure) or not isinstance(answer.upload, Payload):
        return 0
    parts = (part for part in (answer.upload.tensors, answer.upload.extras) if isinstance(part, dict))
    tensors = (value for part in parts for value in part.values() if isinstance(value, Tensor))
    return sum(value.numel() * value.element_size() for value in tensors)


@dataclass(frozen=True)
class Traffic:
    """Bytes so far. Evaluation is counted apart: it is the experimenter's doing, not the method's."""

    down_bytes: int = 0
    up_bytes: int = 0
    evaluation_bytes: int = 0

    def plus(self, *, down: int = 0, up: int = 0, evaluation: int = 0) -> "Traffic":
        return Traffic(self.down_bytes + down, self.up_bytes + up, self.evaluation_bytes + evaluation)


def planned_traffic(layers: Layers, participants: int, rounds: int, retained: list[int]) -> Traffic:
    """Traffic of a run that always retains the same layers (Table 3): retained layers save the download only."""
    model = sum(layers.num_parameters) * FLOAT_BYTES
    kept = sum(layers.num_parameters[layer] for layer in set(retained)) * FLOAT_BYTES
    return Traffic(down_bytes=participants * rounds * (model - kept), up_bytes=participants * rounds * model)
