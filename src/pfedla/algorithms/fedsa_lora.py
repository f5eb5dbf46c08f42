"""FedSA-LoRA: Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning", ICLR 2025."""

from pfedla.algorithms.partial import PrivateByName
from pfedla.core.errors import NotApplicableError


class FedSALoRA(PrivateByName):
    name = "fedsa-lora"
    summary = "of LoRA's two factors A is averaged and B stays on the client"
    private: str = "head"
    """The private layers beside B: "head" (the last Linear layer) or names, separated by commas; "" for none."""

    def private_layers(self) -> list[int]:
        names = self.task.layers.names
        a, b = (
            [at for at, name in enumerate(names) if part in name.lower().split(".")] for part in ("lora_a", "lora_b")
        )
        if not a or not b:
            missing = "lora_a" if b else "lora_b"
            raise NotApplicableError(
                f"FedSA-LoRA shares A and keeps B of LoRA, and the model trains no {missing} layer"
            )
        return sorted({*b, *super().private_layers()})
