"""What a layer is, stacked tensors, and the primitive of layer-wise aggregation: the mix.

A layer is one module's weight and bias; a BatchNorm module is a layer of its own. A model's tensors are trained (mixed
and sent), statistics (buffers, which stay on the client unless a method sends them), or frozen (parameters without a
gradient and constant buffers: one shared copy, never sent, mixed or saved per client).
"""

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, unknown

Params = dict[str, Tensor]  # by name; "stacked": the same names, one leading client axis


@dataclass(frozen=True)
class Layers:
    """Which layer each tensor of a model belongs to."""

    names: tuple[str, ...]
    index: Mapping[str, int]  # name of a trained tensor or statistic -> position in `names`
    statistics: frozenset[str]  # the buffers that training may change
    frozen: frozenset[str]  # the parameters that are not trained, and the constant buffers
    num_parameters: Sequence[int]  # per layer, trained ones only
    kinds: Sequence[type[nn.Module]]  # per layer, of its module

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        parameters = dict(module.named_parameters())  # a tied weight once, where it first stands
        trained = {name: value for name, value in parameters.items() if value.requires_grad}
        constants = set(constant_buffers(module))
        buffers = [name for name, _ in module.named_buffers() if name not in constants]
        modules = [name for name, _ in module.named_modules()]
        places = {name: modules.index(name.rpartition(".")[0]) for name in (*trained, *buffers)}
        starts = sorted({places[name] for name in trained})  # the layers among the modules
        # A buffer of a module without trained parameters goes with the layer before it, or the first.
        index = {name: max(0, bisect(starts, place) - 1) for name, place in places.items()}
        names = tuple(modules[start] or "(root)" for start in starts)
        kinds = [type(module.get_submodule(modules[start])) for start in starts]
        sizes = [0] * len(starts)
        for name, value in trained.items():
            sizes[index[name]] += value.numel()
        statistics, frozen = frozenset(buffers), frozenset(parameters.keys() - trained.keys() | constants)
        return cls(names=names, index=index, statistics=statistics, frozen=frozen, num_parameters=sizes, kinds=kinds)

    def __len__(self) -> int:
        return len(self.names)

    def positions(self, names: Iterable[str]) -> list[int]:
        names = list(names)
        for name in set(names) - set(self.names):
            raise unknown("layer", name, self.names)
        return [self.names.index(name) for name in names]

    def parameters(self, tensors: Params) -> Params:
        return {name: value for name, value in tensors.items() if name not in self.statistics}

    def only_statistics(self, tensors: Params) -> Params:
        return {name: value for name, value in tensors.items() if name in self.statistics}


def constant_buffers(module: nn.Module) -> Iterator[str]:
    """Yield the buffers that no training changes: those that are not saved, and a module's integers without floats."""
    # Integers beside floats are a counter (BatchNorm's); alone they are positions or indices, as in BERT or Swin.
    for prefix, part in module.named_modules():
        own, unsaved = dict(part.named_buffers(recurse=False)), part._non_persistent_buffers_set
        counts = any(value.is_floating_point() for name, value in own.items() if name not in unsaved)
        for name, value in own.items():
            if name in unsaved or not (counts or value.is_floating_point()):
                yield f"{prefix}.{name}".removeprefix(".")


def mix(alpha: Tensor, models: Params, layers: Layers) -> Params:
    """Mix models layer by layer (Eq. 5-6): receiver i gets the senders' tensors weighted by alpha[i, layer].

    alpha: [receivers, layers, senders]; models: stacked over the senders; the result: over the receivers.
    >>> layers = Layers.of(nn.Linear(1, 1))
    >>> two = {"weight": torch.tensor([[[0.0]], [[4.0]]]), "bias": torch.tensor([[1.0], [3.0]])}
    >>> {name: value.item() for name, value in mix(torch.tensor([[[0.25, 0.75]]]), two, layers).items()}
    {'weight': 3.0, 'bias': 2.5}
    """
    mixed: Params = {}
    for name, value in models.items():
        if not value.is_floating_point():
            raise PfedlaError(f"mix: {name} is {value.dtype}; only floating-point tensors can be mixed")
        weights = alpha[:, layers.index[name]].to(value.dtype)
        mixed[name] = (weights @ rows_of(value)).view(len(alpha), *value.shape[1:])
    return mixed


def mix_few(weights: Tensor, senders: Tensor, models: Params, layers: Layers) -> Params:
    """Mix only a few senders per receiver and layer; weights, senders: [receivers, layers, few]."""
    mixed = {name: value.new_empty(len(weights), *value.shape[1:]) for name, value in models.items()}
    for row in range(len(weights)):
        for name, value in models.items():
            layer = layers.index[name]
            mixed[name][row] = torch.tensordot(weights[row, layer].to(value.dtype), value[senders[row, layer]], 1)
    return mixed


def inner_products(rows: Params, models: Params, layers: Layers) -> Tensor:
    """Return [rows, layers, models]: the inner products of rows and models, layer by layer."""
    some, model = next(iter(rows.values())), next(iter(models.values()))
    found = some.new_zeros(len(some), len(layers), len(model))
    for name, value in rows.items():
        found[:, layers.index[name]] += rows_of(value) @ rows_of(models[name]).T
    return found


def choose(sent: Tensor, received: Params, own: Params, layers: Layers) -> Params:
    """Return one client's model: the received tensor where its layer was sent, else the client's own."""
    return {name: torch.where(sent[layers.index[name]], value, own[name]) for name, value in received.items()}


def rows_of(stacked: Tensor) -> Tensor:
    """Flatten everything but the client axis; a stacked scalar becomes a column."""
    return stacked.reshape(len(stacked), -1)


def take(stacked: Params, index: Tensor | int) -> Params:
    """Return the rows of `index`; a number takes one client's row as a view, without the axis."""
    return {name: value[index] for name, value in stacked.items()}


def put_(stacked: Params, index: Tensor, rows: Params) -> None:
    """Write `rows` into the rows of `index`, in place: all models are too large to copy every round."""
    for name, value in stacked.items():
        value.index_copy_(0, index, rows[name])


def stack(trees: Sequence[Params]) -> Params:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]} if trees else {}


def repeat(tree: Params, count: int) -> Params:
    """Return `count` equal rows, as views of one."""
    return {name: value.expand(count, *value.shape) for name, value in tree.items()}


def into_corner_(larger: Params, smaller: Params) -> Params:
    """Write tensors into larger ones of the same names, where all indices begin; return the larger."""
    for name, value in smaller.items():
        larger[name][tuple(map(slice, value.shape))] = value
    return larger


def weighted_mean(stacked: Params, weights: Tensor) -> Params:
    """Average over the client axis by `weights` of any sum; of integers (counters) take the largest."""

    def average(value: Tensor) -> Tensor:
        return ((weights / weights.sum()).to(value.dtype) @ rows_of(value)).view(value.shape[1:])

    return {name: average(v) if v.is_floating_point() else v.amax(0) for name, v in stacked.items()}


def finite_rows(stacked: Params) -> Tensor:
    """Return for each row whether all its numbers are finite."""
    return torch.stack([rows_of(value).isfinite().all(1) for value in stacked.values()]).all(0)


def row_norms(stacked: Params) -> Tensor:
    """Return each row's norm over all tensors, in float32: infinite if its square overflows."""
    norms = [torch.linalg.vector_norm(rows_of(value).float(), dim=1) for value in stacked.values()]
    return torch.stack(norms).square().sum(0).sqrt()


def replace_rows(stacked: Params, sound: Tensor) -> Params:
    """Return the rows with the mean of the sound ones in the places of the others, unless none is sound."""
    if sound.all() or not sound.any():
        return stacked
    replaced = {name: value.clone() for name, value in stacked.items()}
    for value in replaced.values():
        value[~sound] = value[sound].mean(0)
    return replaced


def finite_or(tree: Params, other: Params) -> Params:
    """Return `tree` if all its numbers are finite, else `other`; runs under torch.func.vmap."""
    finite = torch.stack([value.isfinite().all() for value in tree.values()]).all()
    return {name: torch.where(finite, value, other[name]) for name, value in tree.items()}


def is_finite(tree: Params) -> bool:
    return all(bool(value.isfinite().all()) for value in tree.values())


def num_clients(server: Mapping[str, Params]) -> int:
    """Return how many models a server keeps, stacked, under "models"."""
    return len(next(iter(server["models"].values())))
