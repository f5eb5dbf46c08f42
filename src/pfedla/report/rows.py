"""A row of a comparison: the results of one method over the seeds, and why some are missing."""

import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pfedla.report import reading
from pfedla.report.reading import MIB, Metric, Values, honest_part
from pfedla.report.significance import Scores, standard_error

AVERAGES: dict[str, Callable[[Values], Any]] = {
    "after training": lambda result: honest_part(result)["score_after_training"]["mean"],
    "unseen": lambda result: result["unseen"]["score"]["mean"] if "unseen" in result else None,
    "unseen alone": lambda result: result["unseen"]["score_alone"]["mean"] if "unseen" in result else None,
}
COSTS: dict[str, Callable[[Values], float]] = {
    "down MiB": lambda result: result["traffic"]["down_bytes"] / MIB,
    "up MiB": lambda result: result["traffic"]["up_bytes"] / MIB,
    "s": lambda result: result["seconds"]["total"],
}


def show_mean(numbers: Collection[float], metric: Metric, digits: int = 1) -> str:
    """Return mean ± standard error of scores times the metric's factor."""
    if not numbers:
        return "–"
    return show_estimate(statistics.mean(numbers), standard_error(list(numbers)), metric, digits)


def show_estimate(mean: float, error: float | None, metric: Metric, digits: int = 1) -> str:
    return " ± ".join(metric.show_number(one, digits) for one in (mean, error) if one is not None)


@dataclass
class Row:
    """One method over the seeds: its results, and the seeds on which it gave up."""

    algorithm: str
    results: list[Values] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of the results
    gave_up: dict[int, str] = field(default_factory=dict)  # seed -> why
    not_applicable: str = ""  # why

    @property
    def outcome(self) -> str:
        """What a table shows in place of a mean: a method that gave up on a seed has none."""
        if self.gave_up:
            return f"gave up on {len(self.gave_up)} of {len(self.gave_up) + len(self.results)} seeds"
        return "" if self.results else "–" if self.not_applicable else "not run"

    @property
    def metric(self) -> Metric:
        return Metric.of(self.results[0]) if self.results else Metric()

    def read_scores(self, metric: str) -> Scores:
        """Return the score of every client by seed, None for an attacker; nothing for a method without a mean."""
        found = {}
        for result in self.results if not self.outcome else []:
            is_headline = metric == Metric.of(result).name
            part = result["score"] if is_headline else result.get("metrics", {}).get(metric, {"per_client": []})
            out = set(result.get("attackers", []))
            found[result["seed"]] = [None if n in out else score for n, score in enumerate(part["per_client"])]
        return found

    @property
    def scores(self) -> dict[int, float]:
        """The mean score by seed, an accuracy in %; nothing for a method without a mean."""
        known = {seed: [one for one in scores if one is not None] for seed, scores in self.headline_scores.items()}
        return {seed: self.metric.factor * statistics.mean(scores) for seed, scores in known.items() if scores}

    @property
    def headline_scores(self) -> Scores:
        return self.read_scores(self.metric.name)

    @property
    def after_training(self) -> float | None:
        """The mean score right after local training, over the seeds."""
        known = [AVERAGES["after training"](one) for one in self.results if "score_after_training" in one]
        return statistics.mean(known) if known and None not in known else None

    @property
    def mib(self) -> float | None:
        """What was sent down and up, mean over the seeds."""
        sent = [COSTS["down MiB"](one) + COSTS["up MiB"](one) for one in self.results]
        return statistics.mean(sent) if sent else None

    @property
    def tuned_trials(self) -> int:
        return max((result.get("tuned_trials", 0) for result in self.results), default=0)

    @property
    def experiments(self) -> list[Values]:
        """The settings of the results, where they are known."""
        if self.folders:
            return [reading.read_experiment(folder) for folder in self.folders]
        return [result["experiment"] for result in self.results if "experiment" in result]

    @property
    def content(self) -> Any:
        """What comparison.json holds: the results, or why there are none."""
        if self.not_applicable:
            return {"not_applicable": self.not_applicable}
        return {"results": self.results, "gave_up": self.gave_up} if self.gave_up else self.results

    def show(self, column: str) -> str:
        """Return the cell below one of AVERAGES or COSTS."""
        if column in COSTS:
            return f"{statistics.mean(map(COSTS[column], self.results)):.{1 if column == 's' else 2}f}"
        values = [value for result in self.results if (value := AVERAGES[column](result)) is not None]
        return show_mean([self.metric.factor * value for value in values], self.metric)
