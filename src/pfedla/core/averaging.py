"""Robust means: what a server makes of many uploads of which up to a quarter, or nearly half, may be wrong.

trimmed, median: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018. krum: Blanchard et al., NeurIPS 2017.
"""

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pfedla.core.layers import Params, rows_of, take

Averaging = Literal["mean", "trimmed", "median", "krum"]
WRONG = 0.25  # share of the clients that `trimmed` and `krum` tolerate, rounded up, but never half


def robust_mean(stacked: Params, kind: Averaging) -> Params:
    """Average over the client axis, every client counting the same; of counters take the largest that is left.

    Unweighted, because a client states its number of examples itself. Of two clients every kind is the plain mean.
    """
    count = len(next(iter(stacked.values()))) if stacked else 0
    most = max(0, count - 1) // 2
    cut = most if kind == "median" else min(math.ceil(WRONG * count), most)
    if kind == "krum":
        stacked, cut = take(stacked, choose_central(stacked, count - cut - 2)), 0

    def average(value: Tensor) -> Tensor:
        wide = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        ordered = torch.from_numpy(np.sort(wide.numpy(), axis=0))  # up to 15 times as fast as torch.sort
        left = ordered[cut : len(ordered) - cut]
        return left.mean(0).to(value.dtype) if value.is_floating_point() else left[-1]

    return {name: average(value) for name, value in stacked.items()}


def choose_central(stacked: Params, neighbours: int) -> Tensor:
    """Return the row whose nearest others are nearest, and its ties: two rows may be nearest to each other."""
    rows = (rows_of(value).double() for value in stacked.values() if value.is_floating_point())
    products = torch.stack([part @ part.T for part in rows]).sum(0)
    squares = products.diagonal()
    distances = (squares + squares[:, None]) - (products + products.T)  # the same both ways, bit for bit
    distances.fill_diagonal_(-torch.inf)  # sorted first, and left out
    score = distances.sort(1).values[:, 1 : 1 + max(1, neighbours)].sum(1)
    return (score == score.min()).nonzero().squeeze(1)
