"""Statistics over seeds. The seed is the unit: the clients of a seed share data, draws and models."""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Scores = Mapping[int, Sequence[float | None]]  # by seed: every client's score, None where it is undefined
Array = npt.NDArray[Any]
LEVEL = 0.05
TESTED, RANKED = 3, 6  # seeds from which differences are tested, and from which by ranks: 2 / 2^5 > 5 %
RESAMPLES = 9_999
BASELINES = {"local", "fedavg"}


class Summary(NamedTuple):
    """One method. `worst`, `p10` and `spread` are over the clients, averaged over the seeds."""

    seeds: int
    mean: float
    se: float | None  # standard error over seeds; None with one seed
    worst: float
    p10: float  # a tenth of the clients are worse
    spread: float  # standard deviation
    share_better: float | None  # of clients that are better off than with both Local and FedAvg


class Difference(NamedTuple):
    """Paired difference of two methods, over the seeds that both have and the clients where both are defined."""

    mean: float
    seeds: int
    low: float | None  # 95 % interval
    high: float | None
    p: float | None
    test: str  # by which p was found
    p_corrected: float | None = None  # p after Holm's correction over the methods of the table

    @property
    def is_significant(self) -> bool:
        return self.p_corrected is not None and self.p_corrected < LEVEL


class Analysis(NamedTuple):
    """One metric of all methods that have scores."""

    summaries: dict[str, Summary]
    reference: str  # what `differences` are to
    differences: dict[str, Difference]  # of every other method that has a seed in common with the reference
    best: str  # the best mean of those with the most seeds; empty: no method has scores
    to_best: dict[str, Difference]
    bold: list[str]  # the best, and those that are not significantly worse; empty where nothing could be tested


def analyse(methods: Mapping[str, Scores], sign: int, against: str = "") -> Analysis:
    """Compare methods in one metric; `sign` is -1 where lower is better.

    `against` is the reference of the differences; without one it is Local, else the first method.
    """
    known = {name: kept for name, scores in methods.items() if (kept := _drop_undefined(scores))}
    if not known:
        return Analysis({}, against, {}, "", {}, [])
    two = [scores for name, scores in known.items() if name.casefold() in BASELINES]
    summaries = {}
    for name, scores in known.items():
        is_compared = len(two) == len(BASELINES) and name.casefold() not in BASELINES
        summaries[name] = summarise(scores, sign, share_better(scores, two, sign) if is_compared else None)
    best = max(summaries, key=lambda name: (summaries[name].seeds, sign * summaries[name].mean))
    to_best = compare_all(known, best)
    worse = {name for name, one in to_best.items() if one.is_significant and sign * one.mean < 0}
    tested = [best, *(name for name, one in to_best.items() if one.p is not None)]
    bold = [name for name in known if name in tested and name not in worse] if len(tested) > 1 else []
    reference = against or next((name for name in known if name.casefold() == "local"), next(iter(known)))
    return Analysis(summaries, reference, compare_all(known, reference), best, to_best, bold)


def _drop_undefined(scores: Scores) -> Scores:
    """Leave out the seeds on which no client has a score."""
    return {seed: values for seed, values in scores.items() if any(value is not None for value in values)}


def summarise(scores: Scores, sign: int, share: float | None = None) -> Summary:
    seeds = [np.array([value for value in values if value is not None]) for values in scores.values()]
    means = [float(values.mean()) for values in seeds]
    worst = [sign * (sign * values).min() for values in seeds]
    p10 = [sign * np.quantile(sign * values, 0.1) for values in seeds]
    spread = [values.std() for values in seeds]
    return Summary(
        len(means),
        mean=float(np.mean(means)),
        se=standard_error(means),
        worst=float(np.mean(worst)),
        p10=float(np.mean(p10)),
        spread=float(np.mean(spread)),
        share_better=share,
    )


def standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None for a single value."""
    return float(stats.sem(values)) if len(values) > 1 else None


def share_better(scores: Scores, others: Sequence[Scores], sign: int) -> float | None:
    """Return the share of clients, over all seeds, that are better off than with each of `others`."""
    better: list[bool] = []
    for seed in set(scores).intersection(*others):
        found = sign * np.array([scores[seed], *(one[seed] for one in others)], float)  # [methods, clients]
        found = found[:, ~np.isnan(found).any(0)]
        better += (found[0] > found[1:].max(0)).tolist()
    return sum(better) / len(better) if better else None


def compare_all(methods: Mapping[str, Scores], reference: str) -> dict[str, Difference]:
    """Return each method's difference to the reference, p-values corrected over these methods."""
    theirs = methods.get(reference, {})
    found = {name: compare(ours, theirs) for name, ours in methods.items() if name != reference}
    known = {name: one for name, one in found.items() if one is not None}
    corrected = correct({name: one.p for name, one in known.items() if one.p is not None})
    return {name: one._replace(p_corrected=corrected.get(name)) for name, one in known.items()}


def compare(ours: Scores, theirs: Scores) -> Difference | None:
    """Return ours − theirs; None if they have no seed in common."""
    differences = pair(ours, theirs)
    if not len(differences):
        return None
    low, high = interval(differences) or (None, None)
    return Difference(float(differences.mean()), len(differences), low, high, *find_p(differences))


def pair(ours: Scores, theirs: Scores) -> Array:
    """Return the difference of each common seed: of the means over the clients where both are defined."""
    found = []
    for seed in sorted(ours.keys() & theirs.keys()):
        gaps = np.array(ours[seed], float) - np.array(theirs[seed], float)
        found += [np.nanmean(gaps)] if not np.isnan(gaps).all() else []
    return np.array(found)


def interval(differences: Array) -> tuple[float, float] | None:
    """Return a 95 % interval of the mean difference, by resampling whole seeds; None below three seeds."""
    if (count := len(differences)) < TESTED:
        return None
    # Percentile, at the level by which it is as wide as Student's (Hesterberg 2015). Coverage of 95 % intervals for
    # normal differences, simulated for 3, 4, 5, 7 and 10 seeds: so 75, 86, 92, 93 and 96 %; the plain percentile 75,
    # 81, 82, 87 and 91 %; BCa 71, 81, 81, 87 and 91 %. No bootstrap leaves the range of the seeds' differences.
    wide = np.sqrt(count / (count - 1)) * stats.t.ppf(1 - LEVEL / 2, count - 1)
    options = {"n_resamples": RESAMPLES, "random_state": np.random.default_rng(0), "method": "percentile"}
    level = float(1 - 2 * stats.norm.sf(wide))
    found = stats.bootstrap((differences,), np.mean, confidence_level=level, **options).confidence_interval
    return float(found.low), float(found.high)


def find_p(differences: Array) -> tuple[float | None, str]:
    """Return the two-sided p-value of "no difference", and the test; None below three seeds."""
    differences, count = np.round(differences, 12), len(differences)  # equal ones are ties
    if count < TESTED:
        return None, ""
    if count >= RANKED or np.ptp(differences) == 0:  # t has no scale where all differences are equal
        return rank_signs(differences), "Wilcoxon"
    return float(stats.ttest_1samp(differences, 0).pvalue), "paired t"


def rank_signs(differences: Array) -> float:
    """Return the exact p-value of Wilcoxon's signed-rank test; scipy's is not exact where differences are tied."""
    moved = differences[differences != 0]
    doubled = np.rint(2 * stats.rankdata(np.abs(moved))).astype(int)  # tied ranks are halves
    chances = np.ones(1)  # of every sum of the positive ranks
    for rank in doubled:
        chances = np.convolve(chances, np.bincount([0, rank]) / 2)
    total = int(doubled[moved > 0].sum())
    return min(1.0, 2 * float(min(chances[: total + 1].sum(), chances[total:].sum())))


def correct(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values after Holm's step-down correction: the chance of any false difference is at most the level."""
    largest, found = 0.0, {}
    for position, (name, p) in enumerate(sorted(p_values.items(), key=itemgetter(1))):
        largest = max(largest, min(1.0, p * (len(p_values) - position)))
        found[name] = largest
    return found


def smallest_p(difference: Difference) -> float:
    """Return the smallest p-value that the test of a difference can have."""
    return 2.0 ** (1 - difference.seeds) if difference.test == "Wilcoxon" else 0.0
