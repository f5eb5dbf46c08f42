"""Which of a client's training examples validate its options, so that its test examples need not."""

import numpy as np

from pfedla.data.dataset import Array
from pfedla.data.partition import Random, round_table

SHARE = 0.25
FEWEST = 3  # examples that a client needs: two to train on (BatchNorm), one to validate


def split_rows(strata: Array, rng: Random) -> tuple[Array, Array]:
    """Split a client's training rows, by class or event, into those to train on and those to validate on."""
    counts = np.bincount(strata)
    some = np.where(counts > 1, counts, 0)  # what occurs once is trained on
    total = max(1, round(SHARE * int(some.sum())))
    some = some if some.any() else counts  # unless everything does: then one example validates
    quota = round_table(some[None] * (total / some.sum()), np.array([total]))[0]
    order = rng.permutation(len(strata))
    position = np.empty_like(order)  # of a row among those of its class
    for label in range(len(counts)):
        rows = order[strata[order] == label]
        position[rows] = np.arange(len(rows))
    validates = position < quota[strata]
    return np.flatnonzero(~validates), np.flatnonzero(validates)
