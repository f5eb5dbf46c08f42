"""Paired comparisons over seeds: a seed draws the federation, so methods are compared seed by seed."""

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from scipy.special import stdtr

LEVEL = 0.05  # of the two-sided paired t-test
FEWEST_SEEDS = 3
BySeed = Mapping[int, float]  # seed -> accuracy in %


class Difference(NamedTuple):
    """Mean difference over the seeds that both methods have."""

    mean: float
    error: float | None  # standard error of the mean; None with one seed
    seeds: int

    @property
    def is_supported(self) -> bool:
        """Whether a paired t-test over at least three seeds rejects "no difference" at 5 %."""
        if self.error is None or self.seeds < FEWEST_SEEDS:
            return False
        if not self.error:
            return self.mean != 0
        return bool(2 * stdtr(self.seeds - 1, -abs(self.mean / self.error)) < LEVEL)

    def __str__(self) -> str:
        return f"{self.mean:+.2f}{'' if self.error is None else f' ± {self.error:.2f}'} ({self.seeds})"


def compare(ours: BySeed, theirs: BySeed) -> Difference | None:
    """Return ours − theirs over the seeds that both have; None if they have none in common."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    count = len(differences)
    error = statistics.stdev(differences) / math.sqrt(count) if count > 1 else None
    return Difference(statistics.mean(differences), error, count)


def find_first(rows: Mapping[str, BySeed]) -> str | None:
    """Return the row with the highest mean, of those with the most seeds."""
    most = max(map(len, rows.values()), default=0)
    means = {row: statistics.mean(values.values()) for row, values in rows.items() if len(values) == most > 0}
    return max(means, key=lambda row: means[row]) if means else None


def find_supported_first(rows: Mapping[str, BySeed]) -> str | None:
    """Return the first row if it is ahead of every other row and the test supports each of these leads."""
    first = find_first(rows)
    leads = [compare(rows[first], values) for row, values in rows.items() if first and row != first and values]
    return first if leads and all(lead and lead.mean > 0 and lead.is_supported for lead in leads) else None
