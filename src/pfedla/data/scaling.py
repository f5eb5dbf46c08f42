"""Standardise features by the training examples of a client or of all, and fill in what is missing."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pfedla.data.dataset import Array, Column

WILD, WILD_RATIO = 1e4, 1e3  # a column this large, or this many times the median column, is named in a warning


class Scaling(NamedTuple):
    """How the raw features of a client become the model's inputs; each [features]."""

    fill: Tensor  # in place of NaN
    centre: Tensor
    scale: Tensor

    def apply(self, x: Tensor) -> Tensor:
        return (torch.where(x.isnan(), self.fill, x) - self.centre) / self.scale

    def to_lists(self) -> dict[str, list[float]]:
        return {key: value.tolist() for key, value in self._asdict().items()}

    @classmethod
    def from_lists(cls, lists: Mapping[str, Sequence[float]]) -> "Scaling":
        return cls(*(torch.tensor(lists[key], dtype=torch.float32) for key in cls._fields))

    @classmethod
    def measure(cls, x: Array, numeric: Array, *, standardise: bool) -> "Scaling":
        """Return the scaling by these examples [n, features]; one-hot features stay as they are."""
        there = np.isfinite(x)
        count = np.maximum(there.sum(0), 1)
        mean = np.where(there, x, 0).sum(0, dtype=np.float64) / count
        std = np.sqrt((np.where(there, x - mean, 0) ** 2).sum(0, dtype=np.float64) / count)
        std = np.where(std > 1e-6 * np.abs(mean), std, 1.0)  # a constant feature is only centred
        on = numeric & standardise
        values = (np.where(numeric, mean, 0), np.where(on, mean, 0), np.where(on, std, 1))
        return cls(*(torch.from_numpy(value.astype(np.float32)) for value in values))


def feature_names(columns: Sequence[Column], count: int) -> list[str]:
    """Return the name of each feature: a column, column=category, or its number where there are no columns."""
    if not columns:
        return list(map(str, range(count)))
    spread = [
        [f"{one.name}={name}" for name in one.categories] if one.kind == "category" else [one.name] for one in columns
    ]
    return [name for names in spread for name in names]


def is_numeric(columns: Sequence[Column], count: int) -> Array:
    """Return for each feature whether it is a number, not part of a one-hot category."""
    if not columns:
        return np.ones(count, bool)
    return np.repeat([one.kind == "number" for one in columns], [len(one.categories) or 1 for one in columns])


def find_wild(name: str, x: Array, columns: Sequence[Column]) -> list[str]:
    """Return a warning for the features whose scale is far from 1, or from that of the other features."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (np.atleast_1d(of(x, 0, dtype=np.float64)) for of in (np.nanmean, np.nanstd))
    size = np.maximum(np.abs(mean), std)
    wild = (size > WILD) | (size > WILD_RATIO * np.median(size[size > 0] if size.any() else size))
    if not (found := np.flatnonzero(wild & (size > 1))).size:
        return []
    names, first = feature_names(columns, x.shape[1]), found[0]
    others = f" (and {found.size - 1} more)" if found.size > 1 else ""
    what = f"column {names[first]}{others} has mean {mean[first]:.3g} and standard deviation {std[first]:.3g}"
    return [f"{name}: {what}; training may fail: use --standardise site, or scale it"]


def describe_columns(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the columns as federation.json holds them."""
    return [{key: value for key, value in one._asdict().items() if value} for one in columns]


def parse_columns(described: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    return tuple(Column(**{**one, "categories": tuple(one.get("categories", ()))}) for one in described)
