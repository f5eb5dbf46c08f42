"""What a layer is, and the primitives of layer-wise aggregation: the mix, and its transpose.

A layer is one module's weight and bias. A BatchNorm module is a layer of its own: its γ and β are mixed, its running
statistics (`Layers.statistics`) stay on the client unless an algorithm sends them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from pfedla.errors import unknown
from pfedla.tree import Params, by_blocks

REGISTER = 64  # bytes, of the widest vector registers


@dataclass(frozen=True)
class Layers:
    """Which layer each tensor of a model belongs to.

    >>> layers = Layers.of(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    >>> layers.names, layers.num_parameters
    (('0', '2'), (15, 8))
    """

    names: tuple[str, ...]
    index: Mapping[str, int]  # tensor name -> position in `names`
    statistics: frozenset[str]  # the tensors that are not trained: buffers, and parameters that are frozen
    num_parameters: tuple[int, ...]  # per layer, statistics left out
    kinds: tuple[type[nn.Module], ...]  # per layer, of its module

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        names: list[str] = []
        sizes: list[int] = []
        kinds: list[type[nn.Module]] = []
        index: dict[str, int] = {}
        seen: set[int] = set()
        statistics: set[str] = set()
        orphans: list[str] = []  # statistics before any layer: they go with the first
        for module_name, part in module.named_modules():
            prefix = f"{module_name}." if module_name else ""
            own = {prefix + name: p for name, p in part.named_parameters(recurse=False) if id(p) not in seen}
            seen.update(map(id, own.values()))  # a tied weight counts once, where it first stands
            trained = [name for name, parameter in own.items() if parameter.requires_grad]
            if trained:
                names.append(module_name or "(root)")
                sizes.append(sum(own[name].numel() for name in trained))
                kinds.append(type(part))
                index.update(dict.fromkeys(trained, len(names) - 1))
            rest = [name for name in own if name not in trained]
            rest += [prefix + name for name, _ in part.named_buffers(recurse=False)]
            statistics.update(rest)
            if names:
                index.update(dict.fromkeys(rest, len(names) - 1))
            else:
                orphans += rest
        index.update(dict.fromkeys(orphans, 0))
        return cls(tuple(names), index, frozenset(statistics), tuple(sizes), tuple(kinds))

    def __len__(self) -> int:
        return len(self.names)

    def positions(self, names: Iterable[str]) -> list[int]:
        """Positions of layers given by name; an unknown name is refused with the choices."""
        found = []
        for name in names:
            if name not in self.names:
                raise unknown("layer", name, self.names)
            found.append(self.names.index(name))
        return found

    def parameters(self, tensors: Params) -> Params:
        return {name: value for name, value in tensors.items() if name not in self.statistics}

    def only_statistics(self, tensors: Params) -> Params:
        return {name: value for name, value in tensors.items() if name in self.statistics}


def mix(alpha: Tensor, models: Params, layers: Layers, receivers: Tensor | None = None) -> Params:
    """Layer-wise aggregation: receiver i gets, of each layer, the senders' tensors weighted by alpha[i, layer, :].

    alpha: [receivers, layers, senders]; models: stacked over the senders; the result is stacked over the receivers (Eq. 5-6).
    `receivers` are their ids, if they are not all of 0, 1, 2, …: each then gets what it would get among all, bit for bit.

    >>> layers = Layers.of(nn.Linear(1, 1))
    >>> two = {"weight": torch.tensor([[[0.0]], [[4.0]]]), "bias": torch.tensor([[1.0], [3.0]])}
    >>> {name: value.item() for name, value in mix(torch.tensor([[[0.25, 0.75]]]), two, layers).items()}
    {'weight': 3.0, 'bias': 2.5}
    """
    mixed: Params = {}
    for part, ids in _with_places(models, len(alpha), receivers):

        def mix_part(rows: Params, part: Params = part) -> Params:
            weights = rows["alpha"]
            return {name: weights[:, layers.index[name]].to(value.dtype) @ value.flatten(1) for name, value in part.items()}

        mixed |= by_blocks(mix_part, {"alpha": alpha}, ids, large=_is_large(part))
    return {name: mixed[name].view(-1, *value.shape[1:]) for name, value in models.items()}


def mix_few(weights: Tensor, senders: Tensor, models: Params, layers: Layers) -> Params:
    """`mix` where a receiver takes of each layer only a few senders' tensors, and only theirs are read.

    weights, senders: [receivers, layers, few]; one receiver at a time, so that none depends on the others.
    """
    mixed = {name: value.new_empty(len(weights), *value.shape[1:]) for name, value in models.items()}
    for row in range(len(weights)):
        for name, value in models.items():
            layer = layers.index[name]
            # A copy of the weights: small products round differently by where their numbers lie.
            mixed[name][row] = torch.tensordot(weights[row, layer].to(value.dtype).clone(), value[senders[row, layer]], 1)
    return mixed


def inner_products(rows: Params, models: Params, layers: Layers, ids: Tensor | None = None) -> Tensor:
    """[rows, layers, models]: the inner product of each row with each model, over the tensors of a layer: one GEMM a tensor.

    `ids` are the rows' clients, if they are not all of 0, 1, 2, …, as `receivers` of `mix`.
    """
    some = next(iter(rows.values()))
    found = some.new_zeros(len(some), len(layers), len(next(iter(models.values()))))

    def products(block: Params) -> Params:
        total = found.new_zeros(len(next(iter(block.values()))), *found.shape[1:])
        for name, value in block.items():
            total[:, layers.index[name]] += value.flatten(1) @ models[name].flatten(1).T
        return {"products": total}

    for part, places in _with_places(rows, len(some), ids):
        found += by_blocks(products, part, places, large=_is_large({name: models[name] for name in part}))["products"]
    return found


def _is_large(models: Params) -> bool:
    """Whether a product with them takes longer than starting threads."""
    return sum(value.numel() for value in models.values()) > 2**22


def _with_places(stacked: Params, count: int, ids: Tensor | None) -> list[tuple[Params, Tensor]]:
    """The tensors in parts, each with the numbers that give `count` rows their places in a block (tree.by_blocks).

    Rows that begin at multiples of a vector register round the same in every place, so these are packed as they come: ten
    participants of a thousand are one block, where their ids would make two or three. Other rows' places are their ids'.
    """
    parts: dict[bool, Params] = {}
    for name, value in stacked.items():
        parts.setdefault(value[0].numel() * value.element_size() % REGISTER == 0, {})[name] = value
    as_they_come = torch.arange(count)
    return [(part, as_they_come if aligned or ids is None else ids) for aligned, part in parts.items()]


def choose(sent: Tensor, received: Params, own: Params, layers: Layers) -> Params:
    """One client's model: the received tensor where its layer was sent, else the client's own."""
    return {name: torch.where(sent[layers.index[name]], value, own[name]) for name, value in received.items()}
