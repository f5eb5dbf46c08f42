"""Inputs and outputs of a model: a tensor, or a tuple or dict of them with one leading axis. Imports no torch."""

from collections.abc import Callable
from typing import Any

Tree = Any  # a tensor or array, or a tuple or dict of them


def map_tree(function: Callable[..., Any], *trees: Tree) -> Tree:
    """Apply `function` to the corresponding leaves of trees of one structure."""
    first = trees[0]
    if isinstance(first, dict):
        return {key: map_tree(function, *(tree[key] for tree in trees)) for key in first}
    if type(first) in (tuple, list):
        return tuple(map_tree(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves in order, without their names."""
    found: list[Any] = []
    map_tree(found.append, tree)
    return found


def first_leaf(tree: Tree) -> Any:
    return leaves(tree)[0]


def length(tree: Tree) -> int:
    return len(first_leaf(tree))


def take_rows(tree: Tree, index: Any) -> Tree:
    """Return some of the examples: `index` is a slice or a tensor of positions."""
    return map_tree(lambda part: part[index], tree)


def arguments(tree: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return how a module is called: model(x), model(*x) for a tuple, model(**x) for a dict."""
    if isinstance(tree, dict):
        return (), tree
    return (tree if isinstance(tree, tuple) else (tree,)), {}
