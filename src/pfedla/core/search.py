"""What `pfedla tune` may choose from: ranges and choices, declared by a method. Knows no optimiser."""

from collections.abc import Mapping
from typing import NamedTuple


class Range(NamedTuple):
    """All numbers between two bounds, drawn evenly on a log scale; `whole` ones evenly."""

    low: float
    high: float
    whole: bool = False


class Choice(NamedTuple):
    """One of a few values, in no order."""

    values: tuple[str | int | float | bool, ...]


class Epochs(NamedTuple):
    """A whole number of epochs: at least one, and `spare` fewer than the local budget at most."""

    spare: int = 0

    def within(self, local_epochs: int) -> Range:
        return Range(1, local_epochs - self.spare, whole=True)


Space = Mapping[str, Range | Choice | Epochs]  # by option
LR_SPAN = Range(0.3, 30)  # every method's learning rate, in units of the one that it has by default
