"""Statistics over seeds: paired differences, tests, intervals, Holm's correction, who is best."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from scipy import stats

from pfedla.report import significance
from pfedla.report.significance import (
    Scores,
    analyse,
    compare,
    correct,
    find_p,
    interval,
    pair,
    rank_signs,
    share_better,
    standard_error,
    summarise,
)


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def draw_methods(rng: np.random.Generator, seeds: int, shifts: list[float], clients: int = 20) -> list[Scores]:
    """Draw methods on the same federations: what they share cancels; a seed moves all clients of a method at once."""
    shared = rng.normal(0.7, 0.1, (seeds, 1)) + rng.normal(0, 0.05, clients)
    made = []
    for shift in shifts:
        luck, noise = rng.normal(0, 0.02, (seeds, 1)), rng.normal(0, 0.01, (seeds, clients))
        made.append(dict(enumerate((shared + shift + luck + noise).tolist())))
    return made


@pytest.mark.parametrize("seeds", [5, 10])
def test_equal_methods_are_rarely_called_different_and_a_shift_is_found(seeds: int) -> None:
    rng, false, naive, found = np.random.default_rng(0), 0, 0, 0
    for _ in range(400):
        ours, theirs, better = draw_methods(rng, seeds, [0, 0, 0.1])
        false += find_p(pair(ours, theirs))[0] < 0.05
        gaps = np.subtract(list(ours.values()), list(theirs.values())).ravel()
        naive += stats.ttest_1samp(gaps, 0).pvalue < 0.05  # as if clients were independent
        found += find_p(pair(better, theirs))[0] < 0.05
    assert false <= 0.07 * 400
    assert naive > 0.3 * 400
    assert found > 0.95 * 400


def test_the_best_method_is_bold_and_a_bad_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(significance, "interval", lambda differences: None)  # not needed, and slow
    rng, kept, bad, several = np.random.default_rng(0), 0, 0, 0
    for _ in range(200):
        drawn = draw_methods(rng, 10, [0.002, 0, 0, 0, -0.2])
        bold = analyse(dict(zip("abcde", drawn, strict=True)), sign=1).bold
        kept, bad, several = kept + ("a" in bold), bad + ("e" in bold), several + (len(bold) > 1)
    assert kept >= 0.95 * 200
    assert bad == 0
    assert several > 0.8 * 200


def test_holm_by_hand() -> None:
    found = correct({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})
    assert correct({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert correct({}) == {}


def test_signed_ranks_are_scipys_and_exact_with_ties() -> None:
    rng = np.random.default_rng(0)
    for size in (6, 9, 12):
        values = rng.normal(0.5, 1, size)
        assert rank_signs(values) == pytest.approx(stats.wilcoxon(values, method="exact").pvalue)
    tied = np.array([1, 1, 1, -1, 2, 2])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1)  # all 64
    sums = (stats.rankdata(np.abs(tied))[:, None] * (signs > 0)).sum(0)
    total = stats.rankdata(np.abs(tied))[tied > 0].sum()
    assert rank_signs(tied) == pytest.approx(2 * min((sums >= total).mean(), (sums <= total).mean()))
    assert rank_signs(np.array([1, 2, 3, 4, 5, 6])) == 2 / 64


def test_the_test_depends_on_the_number_of_seeds() -> None:
    values = np.array([0.01, 0.02, 0.04, 0.03, 0.05, -0.01])
    assert [find_p(values[:count])[1] for count in (2, 3, 5, 6)] == ["", "paired t", "paired t", "Wilcoxon"]
    assert find_p(values[:2])[0] is None
    assert find_p(values[:5])[0] == pytest.approx(stats.ttest_rel(values[:5], np.zeros(5)).pvalue)


def test_the_interval_is_scipys_and_covers() -> None:
    values = np.array([1.0, 2.0, 4.0, 2.5, 3.0])
    options: dict[str, Any] = {"method": "percentile", "n_resamples": 9_999, "random_state": np.random.default_rng(0)}
    # Student's 2.776 times √(5/4) is the normal quantile of 99.81 %.
    expected = stats.bootstrap((values,), np.mean, confidence_level=0.998092, **options).confidence_interval
    assert interval(values) == pytest.approx(tuple(expected), rel=1e-3)
    assert interval(values[:3]) == (1.0, 4.0)  # no wider than the seeds
    assert interval(values[:2]) is None
    rng = np.random.default_rng(1)
    ends = [interval(rng.normal(size=10)) or pytest.fail("no interval") for _ in range(200)]
    assert sum(low <= 0 <= high for low, high in ends) >= 0.92 * 200


def test_clients_without_a_value_are_left_out_pairwise() -> None:
    ours: Scores = {0: [0.5, None, 0.9], 1: [0.4, 0.6, None], 2: [None, 0.1, None], 7: [1, 1, 1]}
    theirs: Scores = {0: [0.3, 0.7, 0.8], 1: [0.3, None, 0.2], 2: [0.5, None, 0.5], 8: [0, 0, 0]}
    assert pair(ours, theirs) == pytest.approx([(0.2 + 0.1) / 2, 0.1])  # seed 2 has no client in common
    difference = compare(ours, theirs)
    assert difference is not None
    assert (difference.mean, difference.seeds, difference.low, difference.p) == (pytest.approx(0.125), 2, None, None)
    assert compare({0: [0.5]}, {1: [0.5]}) is None
    assert compare({0: [None]}, {0: [0.5]}) is None


def test_equal_differences_and_single_sites() -> None:
    for count in (3, 5, 8):
        same: Scores = {seed: [0.1 * seed + 0.1] for seed in range(count)}  # one site
        more: Scores = {seed: [0.1 * seed + 0.3] for seed in range(count)}
        zero, gap = compare(same, same), compare(more, same)
        assert zero is not None
        assert gap is not None
        assert (zero.mean, zero.low, zero.high, zero.p) == (0, 0, 0, 1)
        assert (gap.low, gap.high) == (pytest.approx(0.2), pytest.approx(0.2))
        assert gap.p == 2 / 2**count  # of the signs: there is no spread to measure by
    assert analyse({"a": {0: [0.5]}, "b": {0: [0.6]}}, sign=1).bold == []
    assert analyse({}, sign=1).best == analyse({"a": {0: [None]}}, sign=1).best == ""


def test_a_summary_by_hand_in_both_directions() -> None:
    scores: Scores = {0: [1.0, 2.0, None, 3.0], 1: [4.0, 6.0, 8.0, None]}
    up, down = summarise(scores, 1), summarise(scores, -1)
    assert (up.seeds, up.mean, up.se) == (2, 4.0, pytest.approx(2.0))  # means 2 and 6
    assert (up.worst, down.worst) == ((1 + 4) / 2, (3 + 8) / 2)
    assert (up.p10, down.p10) == (pytest.approx((1.2 + 4.4) / 2), pytest.approx((2.8 + 7.6) / 2))
    assert up.spread == pytest.approx((np.std([1, 2, 3]) + np.std([4, 6, 8])) / 2)
    assert standard_error([1.0]) is None


def test_the_share_that_is_better_off() -> None:
    local: Scores = {0: [0.5, 0.5, None, 0.5], 1: [0.5] * 4}
    fedavg: Scores = {0: [0.6, 0.4, 0.4, 0.4], 1: [0.5] * 4}
    ours: Scores = {0: [0.55, 0.55, 0.9, 0.5], 1: [0.6, 0.4, 0.6, None], 2: [1, 1, 1, 1]}
    assert share_better(ours, [local, fedavg], 1) == 3 / 6  # of the six clients with all three scores
    assert share_better(ours, [local, fedavg], -1) == 1 / 6
    found = analyse({"Local": local, "FedAvg": fedavg, "ours": ours}, sign=1).summaries
    assert [one.share_better for one in found.values()] == [None, None, 0.5]
    assert analyse({"Local": local, "ours": ours}, sign=1).summaries["ours"].share_better is None


def test_the_reference_and_the_direction() -> None:
    methods: dict[str, Scores] = {
        name: {seed: [mean + 0.1 * seed + wobble * seed**2] for seed in range(5)}
        for name, mean, wobble in (("far", 2.0, 0.001), ("local", 1.5, 0.002), ("near", 1.0, 0), ("few", 0.5, 0))
    }
    del methods["few"][3], methods["few"][4]  # type: ignore[attr-defined]
    found = analyse(methods, sign=-1)
    assert (found.reference, found.best, found.bold) == ("local", "near", ["near", "few"])  # of those with most seeds
    assert found.differences["near"].mean == pytest.approx(-0.5 - 0.002 * 6)
    assert analyse(methods, sign=1).best == "far"
    assert analyse(methods, sign=-1, against="near").differences.keys() == {"far", "local", "few"}
    del methods["local"]
    assert analyse(methods, sign=-1).reference == "far"
