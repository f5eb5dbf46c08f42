"""Stacked dictionaries: the same names, one leading client axis."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Params = dict[str, Tensor]
BLOCK = 16  # rows

R = TypeVar("R")


def take(stacked: Params, index: Tensor | int) -> Params:
    """The rows of `index`; a number takes one client's and drops the axis (a view, not a copy)."""
    return {name: value[index] for name, value in stacked.items()}


def put_(stacked: Params, index: Tensor, rows: Params) -> None:
    """Write `rows` into the rows of `index`, in place: what a server keeps of all clients is too large to copy every round."""
    for name, value in stacked.items():
        value.index_copy_(0, index, rows[name])


def stack(trees: Sequence[Params]) -> Params:
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]} if trees else {}


def repeat(tree: Params, count: int) -> Params:
    """`count` equal rows, as views of one."""
    return {name: value.expand(count, *value.shape) for name, value in tree.items()}


def copies(tree: Params, count: int) -> Params:
    """`count` equal rows, each in memory of its own."""
    return {name: value.clone() for name, value in repeat(tree, count).items()}


def with_row(stacked: Params, row: Params) -> Params:
    """The same and one more row, the last; a copy."""
    return {name: torch.cat([value, row[name].unsqueeze(0)]) for name, value in stacked.items()}


def with_mean_row(stacked: Params) -> Params:
    """The last row is the plain mean of the others: what stands for a client that has no model yet."""
    return with_row(stacked, {name: value.mean(0) for name, value in stacked.items()})


def into_corner_(larger: Params, smaller: Params) -> Params:
    """Write tensors into larger ones of the same names, where all indices begin."""
    for name, value in smaller.items():
        larger[name][tuple(map(slice, value.shape))] = value
    return larger


def weighted_mean(stacked: Params, weights: Tensor) -> Params:
    """Mean over the client axis; `weights` need not sum to one. Integers are counters: the largest is taken, never a mean."""
    share = weights / weights.sum()
    return {
        name: (share.to(value.dtype) @ value.flatten(1)).view(value.shape[1:]) if value.is_floating_point() else value.amax(0)
        for name, value in stacked.items()
    }


def by_blocks(function: Callable[[Params], Params], rows: Params, ids: Tensor, *, large: bool = False) -> Params:
    """`function` of stacked rows, called on BLOCK of them at a time, each in a place that its id decides, the others zero.

    A product of more or fewer rows takes other paths through the library and rounds differently, and a row may round by its
    place too, but never by what stands in the other rows; so a client's row comes out the same whoever else is asked for.
    There are as few blocks as the places allow; if they are `large`, and a product takes one thread, as in the engines, there
    is a block a core.
    """
    places = ids % BLOCK
    blocks = _earlier_equal(places)

    def of(block: int) -> tuple[Tensor, Params]:
        here = (blocks == block).nonzero().squeeze(1)
        filled = {name: value.new_zeros(BLOCK, *value.shape[1:]) for name, value in rows.items()}
        put_(filled, places[here], take(rows, here))
        return here, take(function(filled), places[here])

    result: Params = {}
    for here, part in _map(of, range(int(blocks.max()) + 1 if len(ids) else 1), large):
        result = result or {name: value.new_empty(len(ids), *value.shape[1:]) for name, value in part.items()}
        put_(result, here, part)
    return result


def _map(function: Callable[[int], R], numbers: range, large: bool) -> Iterator[R]:
    cores = os.cpu_count() or 1
    if not large or len(numbers) == 1 or cores == 1 or torch.get_num_threads() > 1:
        yield from map(function, numbers)
    else:
        with ThreadPoolExecutor(cores, "block", initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(function, numbers)


def _earlier_equal(values: Tensor) -> Tensor:
    """For each of a few small numbers how many equal ones stand before it."""
    order = values.argsort(stable=True)
    counts = values.bincount()
    firsts = counts.cumsum(0) - counts
    return torch.empty_like(values).index_copy(0, order, torch.arange(len(values)) - firsts[values[order]])


def finite_rows(stacked: Params, count: int) -> Tensor:
    """For each of `count` rows whether all its numbers are finite."""
    finite = torch.ones(count, dtype=torch.bool)
    for value in stacked.values():
        if value.is_floating_point():
            finite &= value.flatten(1).isfinite().all(1)
    return finite


def finite_or(tree: Params, other: Params) -> Params:
    """`tree` if all its numbers are finite, else `other`; runs under torch.func.vmap."""
    finite = torch.stack([value.isfinite().all() for value in tree.values()]).all()
    return {name: torch.where(finite, value, other[name]) for name, value in tree.items()}


def is_finite(tree: Params) -> bool:
    return all(bool(value.isfinite().all()) for value in tree.values() if value.is_floating_point())
