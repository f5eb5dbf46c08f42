"""The architectures of the registry (core/models.py). Each takes the shape of an example and the number of outputs."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = Any  # of one example: (channels, height, width), (features,), or a tuple or dict of shapes
WIDTH, HEADS, DROPOUT = 64, 4, 0.1  # of the transformers


class PaperCNN(nn.Module):
    """Two 5x5 convolutions (16, 32), each with 2x2 max-pooling, then 120-84-classes, as in the paper's Table 3."""

    def __init__(self, shape: Shape, num_outputs: int, batch_norm: bool) -> None:
        super().__init__()
        channels, height, width = shape
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.bn1 = nn.BatchNorm2d(16) if batch_norm else nn.Identity()
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.bn2 = nn.BatchNorm2d(32) if batch_norm else nn.Identity()
        self.fc1 = nn.Linear(32 * rows * columns, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        # ReLU after the pooling gives the same numbers (it is monotone) on a quarter of the values.
        x = F.relu(F.max_pool2d(self.bn1(self.conv1(x)), 2))
        x = F.relu(F.max_pool2d(self.bn2(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
    """For images too small for the paper's CNN: two padded 3x3 convolutions (16, 32), then 64-classes."""

    def __init__(self, shape: Shape, num_outputs: int) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * (height // 4) * (width // 4), 64)
        self.fc2 = nn.Linear(64, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """For feature vectors, also of integers (images are flattened): 64-64-classes."""

    def __init__(self, shape: Shape, num_outputs: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(math.prod(shape), 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x.flatten(1).to(self.fc1.weight.dtype)))
        return self.fc3(F.relu(self.fc2(x)))  # type: ignore[no-any-return]


class LinearModel(nn.Module):
    """One linear layer: logistic, linear or Cox regression; images are flattened."""

    def __init__(self, shape: Shape, num_outputs: int) -> None:
        super().__init__()
        self.fc = nn.Linear(math.prod(shape), num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.flatten(1).to(self.fc.weight.dtype))  # type: ignore[no-any-return]


class ResNet20(nn.Module):
    """ResNet-20 for small images (He et al. 2016): stages of 16, 32 and 64 channels, plain shortcuts."""

    def __init__(self, shape: Shape, num_outputs: int, group_norm: bool) -> None:
        super().__init__()
        widths = [16] * 3 + [32] * 3 + [64] * 3
        self.conv = nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)
        self.norm = make_norm(16, group_norm)
        pairs = zip([16, *widths], widths, strict=False)
        self.blocks = nn.Sequential(*(ResidualBlock(inputs, width, group_norm) for inputs, width in pairs))
        self.head = nn.Linear(64, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; where the channels double, it takes every second pixel."""

    def __init__(self, inputs: int, width: int, group_norm: bool) -> None:
        super().__init__()
        self.stride, self.extra = width // inputs, width - inputs
        self.conv1 = nn.Conv2d(inputs, width, 3, stride=self.stride, padding=1, bias=False)
        self.norm1 = make_norm(width, group_norm)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = make_norm(width, group_norm)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return F.relu(inner + shortcut)


def make_norm(channels: int, group_norm: bool) -> nn.Module:
    """Return BatchNorm, or GroupNorm with eight channels in a group."""
    return nn.GroupNorm(channels // 8, channels) if group_norm else nn.BatchNorm2d(channels)


class TransformerBlock(nn.Module):
    """Self-attention and a two-layer perceptron, each after LayerNorm and beside a shortcut (pre-norm)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x), mask))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))  # type: ignore[no-any-return]

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return softmax(q k / √d) v per head. Plain products, as fused attention has no rule under torch.func.vmap."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class VisionTransformer(nn.Module):
    """Patches (about 8x8 of them), four transformer blocks of width 64 with four heads, the mean of the tokens."""

    def __init__(self, shape: Shape, num_outputs: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        channels, height, width = shape
        patch = max(2, -(-min(height, width) // 8))
        self.patches = nn.Conv2d(channels, WIDTH, patch, stride=patch)
        self.positions = nn.Embedding((height // patch) * (width // patch), WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(WIDTH, HEADS, dropout) for _ in range(4)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.positions.weight
        return self.head(self.norm(self.blocks(self.dropout(tokens))).mean(1))  # type: ignore[no-any-return]


class TextTransformer(nn.Module):
    """Token and position embeddings, two transformer blocks of width 64 with four heads, the mean of the tokens."""

    def __init__(self, shape: Shape, num_outputs: int, vocabulary: int, dropout: float = DROPOUT) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(text_length(shape), WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(TransformerBlock(WIDTH, HEADS, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[-1]])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(masked_mean(self.norm(x), mask))  # type: ignore[no-any-return]


class TextLSTM(nn.Module):
    """Token embeddings of width 64, an LSTM of 64 units from left to right, the mean of its outputs."""

    def __init__(self, shape: Shape, num_outputs: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, num_outputs)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x, _ = self.lstm(self.tokens(ids))
        return self.head(masked_mean(x, mask))  # type: ignore[no-any-return]


def text_length(shape: Shape) -> int:
    return int((shape["ids"] if isinstance(shape, Mapping) else shape)[0])


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """Average [examples, tokens, width] over the tokens of each example that are not padding."""
    if mask is None:
        return x.mean(1)
    weights = mask.to(x.dtype).unsqueeze(-1)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1)
