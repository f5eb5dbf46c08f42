"""LoRA: a frozen model in which low-rank adapters of some Linear layers, and the head, are trained.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. A and B are modules of their own, so a
method that works layer by layer (pFedLA, FedSA-LoRA) treats them as two layers.
"""

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, unknown

HEAD = "head"  # the last Linear layer


class Factor(nn.Module):
    """A or B: a matrix that is applied to the last axis. Not an nn.Linear, so that it is never taken for the head."""

    def __init__(self, weight: Tensor, *, trained: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class LoRALinear(nn.Module):
    """A Linear layer plus alpha/rank · B A. B starts at zero, so the layer starts as the one it wraps."""

    def __init__(
        self, base: nn.Linear, rank: int, alpha: float, draws: torch.Generator, *, freeze_a: bool = False
    ) -> None:
        super().__init__()
        self.base, self.scale = base, alpha / rank
        # Gaussian, as in the paper; with the variance of the authors' code, which draws from U(-1/√in, 1/√in).
        a = torch.randn(rank, base.in_features, generator=draws) / (3 * base.in_features) ** 0.5
        self.lora_a = Factor(a.to(base.weight), trained=not freeze_a)
        self.lora_b = Factor(base.weight.new_zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_b(self.lora_a(x))  # type: ignore[no-any-return]

    @property
    def weight(self) -> Tensor:
        """The merged weight, for modules that read it and do not call the layer, as nn.MultiheadAttention does."""
        return self.base.weight + self.scale * (self.lora_b.weight @ self.lora_a.weight)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias


def lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Iterable[str],
    *,
    freeze_a: bool = False,
    trained: str | Iterable[str] = HEAD,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of `model` that trains only low-rank adapters of its `targets`, and the layers `trained`.

    `targets` are names of Linear layers, or the ends of names: "query" is every layer whose name ends in ".query". In
    `trained`, "head" is the last Linear layer. All other parameters are frozen and share their memory with `model`.
    `freeze_a` keeps A at its random start (FFA-LoRA). A is drawn from `seed`.
    """
    linears = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    chosen = _match(targets, linears)
    full = _resolve_trained(model, [trained] if isinstance(trained, str) else list(trained), list(linears))
    for name in chosen:
        if inside := [part for part in full if name == part or name.startswith(f"{part}.")]:
            raise PfedlaError(f"lora: {name} is a target, but {inside[0]} is trained in full; choose one of the two")
        if not 1 <= rank <= min(linears[name].weight.shape):
            sizes = f"{linears[name].in_features} inputs and {linears[name].out_features} outputs"
            raise PfedlaError(f"lora: rank = {rank} is not possible: {name} has {sizes}")
    if not alpha > 0:
        raise PfedlaError(f"lora: alpha = {alpha} is not possible: it should be greater than 0")
    whole = {id(value) for part in full for value in model.get_submodule(part).parameters()}
    copied = _copy(model, trained=whole)
    draws = torch.Generator().manual_seed(seed)
    for name in chosen:
        base = copied.get_submodule(name)
        assert isinstance(base, nn.Linear)
        copied.set_submodule(name, LoRALinear(base, rank, alpha, draws, freeze_a=freeze_a))
    return copied


def merge_lora(model: nn.Module) -> nn.Module:
    """Return a copy with every adapter merged into its Linear layer: plain modules, with the names they had before."""
    merged = _copy(model, trained={id(value) for value in model.parameters() if value.requires_grad})
    for name, part in list(merged.named_modules()):
        if isinstance(part, LoRALinear):
            part.base.weight = nn.Parameter(part.weight.detach(), requires_grad=False)
            merged.set_submodule(name, part.base)
    return merged


def _match(targets: Iterable[str], linears: Iterable[str]) -> list[str]:
    """Return the Linear layers, in their order, whose names are or end in one of `targets`."""
    wanted = [targets] if isinstance(targets, str) else list(targets)
    for target in wanted:
        if not any(f".{name}".endswith(f".{target}") for name in linears):
            raise unknown("LoRA target", target, linears)
    found = [name for name in linears if any(f".{name}".endswith(f".{target}") for target in wanted)]
    if not found or "" in found:
        what = "the model itself is a Linear layer" if "" in found else "targets is empty"
        raise PfedlaError(f"lora: {what}; choose Linear layers inside a model: {', '.join(filter(None, linears))}")
    return found


def _resolve_trained(model: nn.Module, names: list[str], linears: list[str]) -> list[str]:
    modules = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in modules and name != HEAD:
            raise unknown("layer", name, modules)
    return [linears[-1] if name == HEAD and HEAD not in modules else name for name in names]


def _copy(model: nn.Module, trained: set[int]) -> nn.Module:
    """Return a copy in which only the parameters of these ids are trained; the others share their memory."""
    memo = {}
    for value in model.parameters():
        data = value.detach()
        memo[id(value)] = nn.Parameter(data.clone(), True) if id(value) in trained else nn.Parameter(data, False)
    return copy.deepcopy(model, memo)
