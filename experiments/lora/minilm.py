"""MiniLM-L6 (BERT, 22.6 million numbers) in two parts: lower layers that are computed once, upper layers that adapt."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

LOWER, UPPER = 4, 2  # layers
SIZE, HEADS, INNER, EPSILON = 384, 12, 1536, 1e-12  # of MiniLM-L6


class Block(nn.Module):
    """One layer of BERT: attention and a feed-forward network, each with a residual and LayerNorm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.attention_norm, self.norm = nn.LayerNorm(SIZE, eps=EPSILON), nn.LayerNorm(SIZE, eps=EPSILON)
        self.inner, self.outer = nn.Linear(SIZE, INNER), nn.Linear(INNER, SIZE)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        parts = (part(hidden) for part in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None, :])
        hidden = self.attention_norm(hidden + self.dense(attended.transpose(-3, -2).flatten(-2)))
        return self.norm(hidden + self.outer(F.gelu(self.inner(hidden))))  # type: ignore[no-any-return]


class Lower(nn.Module):
    """The embeddings and the first layers: token ids to hidden states."""

    def __init__(self, layers: int = LOWER) -> None:
        super().__init__()
        self.words, self.positions, self.types = (
            nn.Embedding(30522, SIZE),
            nn.Embedding(512, SIZE),
            nn.Embedding(2, SIZE),
        )
        self.norm = nn.LayerNorm(SIZE, eps=EPSILON)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.norm(self.words(ids) + self.positions(positions) + self.types(torch.zeros_like(ids)))
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden  # type: ignore[no-any-return]


class Upper(nn.Module):
    """The last layers, the mean over the tokens, and a linear classifier: the model of the federation."""

    def __init__(self, layers: int = UPPER) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(SIZE, 2)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden, mask)
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]


NAMES = {  # of the tensors in model.safetensors
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "dense": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm": "output.LayerNorm",
}


def load_encoder(folder: Path, seed: int = 0) -> tuple[Lower, Upper]:
    """Return the pretrained lower and upper parts; the head is drawn from `seed`."""
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(seed)
    lower, upper = Lower(), Upper()
    for number, block in enumerate([*lower.layers, *upper.layers]):
        for ours, theirs in NAMES.items():
            for part in ("weight", "bias"):
                block.get_submodule(ours).get_parameter(part).data.copy_(
                    tensors[f"encoder.layer.{number}.{theirs}.{part}"]
                )
    for ours, theirs in {"words": "word", "positions": "position", "types": "token_type"}.items():
        lower.get_submodule(ours).get_parameter("weight").data.copy_(tensors[f"embeddings.{theirs}_embeddings.weight"])
    for part in ("weight", "bias"):
        lower.norm.get_parameter(part).data.copy_(tensors[f"embeddings.LayerNorm.{part}"])
    return lower.eval(), upper
