"""Several methods on the same federations and seeds: their table in Markdown, CSV, LaTeX and JSON, and its caption."""

import csv
import io
import json
import statistics
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from pfedla.report.reading import Metric, Values
from pfedla.report.rows import AVERAGES, COSTS, Row, show_estimate, show_mean
from pfedla.report.significance import LEVEL, RANKED, TESTED, Analysis, Difference, Summary, analyse, smallest_p
from pfedla.report.tables import escape_latex, latex_table, markdown_table, warnings, where

BETTER = "better than Local and FedAvg %"
ESTIMATE = "± is the standard error over seeds. Worst, percentile and spread (standard deviation) are over clients."
TINY = 0.001  # a smaller p-value is shown as <0.001


def show_difference(difference: Difference, metric: Metric) -> str:
    return f"{metric.factor * difference.mean:+.{metric.digits(2)}f}"


def show_interval(difference: Difference, metric: Metric) -> str:
    if difference.low is None or difference.high is None:
        return "–"
    low, high = (f"{metric.factor * end:+.{metric.digits(2)}f}" for end in (difference.low, difference.high))
    return f"[{low}, {high}]"


def show_p(p: float | None) -> str:
    return "–" if p is None else f"<{TINY}" if p < TINY else f"{p:.3f}"


class MethodTable:
    """The rows of a comparison with their statistics. `against` is the reference of the differences (see analyse)."""

    def __init__(self, rows: Sequence[Row], against: str = "") -> None:
        self.rows, self.against = list(rows), against
        self.results = [result for row in rows for result in row.results]
        self.metric = Metric.of(self.results[0]) if self.results else Metric()

    def analyse(self, metric: Metric) -> Analysis:
        return analyse({row.algorithm: row.read_scores(metric.name) for row in self.rows}, metric.sign, self.against)

    @cached_property
    def analysis(self) -> Analysis:
        """The statistics of the headline metric."""
        return self.analyse(self.metric)

    @cached_property
    def analyses(self) -> dict[Metric, Analysis]:
        """The statistics of every metric, the headline first."""
        names = dict.fromkeys(name for result in self.results for name in result.get("metrics", {}))
        others = [Metric.named(name) for name in names if name != self.metric.name]
        return {self.metric: self.analysis} | {metric: self.analyse(metric) for metric in others}

    @property
    def has_seeds(self) -> bool:
        return any(len(row.results) + len(row.gave_up) > 1 for row in self.rows)

    # Tables. The first line is the header; a cell between two ** is bold.

    def tabulate(self) -> list[list[str]]:
        """Return the main table: scores, costs and, in the last row, the best constant answer."""
        with_unseen = [name for name in AVERAGES if "unseen" in name and any("unseen" in one for one in self.results)]
        columns = ["after training", *COSTS, *with_unseen]
        heads = [column + self.metric.unit * (column in AVERAGES) for column in columns]
        lines = [["algorithm", self.metric.heading, *self._spread_heads(), *heads]]
        for row in self.rows:
            cells = ["–" if row.outcome else row.show(column) for column in columns]
            lines.append([row.algorithm, self.show_score(row), *self.spread_cells(row.algorithm), *cells])
        return lines + self._baseline(len(lines[0]))

    def tabulate_differences(self) -> list[list[str]]:
        """Return the differences to the reference; only a header without several seeds or both baselines."""
        share = [BETTER] * self.has_shares
        lines = [[f"against {self.analysis.reference}", *self._difference_heads(), *share, "seeds"]]
        for name, one in self.analysis.differences.items() if self.has_seeds or share else []:
            lines.append([name, *self._difference_cells(name), *self.share_cell(name), str(one.seeds)])
        return lines

    def tabulate_statistics(self) -> list[list[str]]:
        """Return one table of scores and differences, without the costs."""
        first, *others = self._difference_heads()
        lines = [["algorithm", self.metric.heading, *self._spread_heads(), *[BETTER] * self.has_shares]]
        lines[0] += [f"{first} to {self.analysis.reference}", *others]
        for name, row in ((row.algorithm, row) for row in self.rows):
            cells = [*self.spread_cells(name), *self.share_cell(name), *self._difference_cells(name)]
            lines.append([name, self.show_score(row), *cells])
        return lines

    def show_score(self, row: Row, digits: int = 1) -> str:
        """Return mean ± standard error, bold for the best and those not significantly worse; or why there is none."""
        summary = self.analysis.summaries.get(row.algorithm)
        if summary is None:
            return row.outcome or "–"
        factor = self.metric.factor
        error = None if summary.se is None else factor * summary.se
        shown = show_estimate(factor * summary.mean, error, self.metric, digits)
        return f"**{shown}**" if row.algorithm in self.analysis.bold else shown

    @property
    def has_shares(self) -> bool:
        return any(one.share_better is not None for one in self.analysis.summaries.values())

    def _spread_heads(self) -> list[str]:
        return [f"worst{self.metric.unit}", self.metric.percentile + self.metric.unit, "spread"]

    def spread_cells(self, name: str) -> list[str]:
        summary = self.analysis.summaries.get(name)
        if summary is None:
            return ["–", "–", "–"]
        values = (summary.worst, summary.p10, summary.spread)
        return [self.metric.show_number(self.metric.factor * value) for value in values]

    def share_cell(self, name: str) -> list[str]:
        summary = self.analysis.summaries.get(name)
        share = summary.share_better if summary else None
        return ["–" if share is None else f"{100 * share:.0f}"] * self.has_shares

    def _difference_heads(self) -> list[str]:
        return [f"difference{' in points' * self.metric.percent}", "95 % interval", "p (Holm)"]

    def _difference_cells(self, name: str) -> list[str]:
        one = self.analysis.differences.get(name)
        if one is None:
            return ["reference" if name == self.analysis.reference else "–", "–", "–"]
        return [show_difference(one, self.metric), show_interval(one, self.metric), show_p(one.p_corrected)]

    def _baseline(self, width: int) -> list[list[str]]:
        """Return the row of the best constant answer (majority class, mean) over the seeds, if there is one."""
        by_seed = {result["seed"]: result["baseline"] for result in self.results if result.get("baseline")}
        if not by_seed:
            return []
        found = {key: [one["score"][key] for one in by_seed.values()] for key in ("mean", "worst", "p10", "std")}
        scaled = {key: [self.metric.factor * one for one in some if one is not None] for key, some in found.items()}
        shown = [self.metric.show_number(statistics.mean(some)) if some else "–" for some in scaled.values()]
        name, mean = next(iter(by_seed.values()))["name"], show_mean(scaled["mean"], self.metric)
        line = [name, mean, *shown[1:]]
        return [line + ["–"] * (width - len(line))]

    # What a reader must know beside the numbers

    def notes(self) -> list[str]:
        lines = [f"{row.algorithm}: {row.not_applicable}" for row in self.rows if row.not_applicable]
        lines += [f"{row.algorithm}, seed {n}: {why}" for row in self.rows for n, why in row.gave_up.items()]
        lines += [note] if (note := self.describe_tuning()) else []
        return lines + self.describe_statistics()

    def describe_statistics(self) -> list[str]:
        """Return how the numbers were computed; nothing without several seeds."""
        if not self.has_seeds or not self.analysis.summaries:
            return []
        found = [*self.analysis.differences.values(), *self.analysis.to_best.values()]
        tested = [one for one in found if one.p is not None]
        if not tested:
            return [ESTIMATE, f"Differences are paired over the seeds. Below {TESTED} seeds: no test, nothing bold."]
        families = (self.analysis.differences, self.analysis.to_best)
        count = max(sum(one.p is not None for one in family.values()) for family in families)
        how = {"paired t": f"a paired t-test ({TESTED} to {RANKED - 1} seeds)", "Wilcoxon": "Wilcoxon's test"}
        used = " or ".join(name for test, name in how.items() if any(one.test == test for one in tested))
        lines = [
            ESTIMATE,
            "Differences are paired over the seeds, with a bootstrap interval over the seeds. "
            f"p: {used}, Holm-corrected over {count} methods.",
            f"Bold: the best, and those not significantly worse at {100 * LEVEL:.0f} % (corrected).",
        ]
        if any(one.seeds < 5 for one in tested):
            lines.append("The interval covers about 75 % with three seeds and 86 % with four.")
        if all(smallest_p(one) * count >= LEVEL for one in tested):
            lines.append(f"No p can fall below {100 * LEVEL:.0f} % with these seeds and {count} methods: add seeds.")
        return lines

    def describe_tuning(self) -> str:
        """Return "tuned, n trials each" where options were chosen on validation data."""
        trials = {row.algorithm: row.tuned_trials for row in self.rows if row.results}
        if not any(trials.values()):
            return ""
        if len(set(trials.values())) == 1:
            return f"tuned, {next(iter(trials.values()))} trials each"
        return "tuned: " + ", ".join(f"{name} {count} trials" for name, count in trials.items())

    def caption(self) -> str:
        """Return what was run: metric, data, clients, seeds, rounds, learning rate, local epochs."""
        if not self.results:
            return ""
        first, experiments = self.results[0], [one for row in self.rows for one in row.experiments]
        seeds = sorted({result["seed"] for result in self.results})
        listed = f"{len(seeds)} seeds" if len(seeds) > 10 else f"seed{'s' * (len(seeds) > 1)} {join(seeds)}"
        parts = [f"Test {self.metric.description} of the personal models, mean of clients", where(first), listed]
        parts.append(f"rounds {join({result['rounds'] for result in self.results})}")
        for key, name in {"lr": "learning rate", "local_epochs": "local epochs"}.items():
            values = {one["training"][key] for one in experiments if key in one.get("training", {})}
            parts += [f"{name} {join(values)}"] if values else []
        return "; ".join([*parts, *filter(None, [self.describe_tuning()])]) + "."

    # Files

    def to_markdown(self, picture: str = "") -> str:
        parts = [markdown_table(self.tabulate())]
        parts += [markdown_table(lines)] if len(lines := self.tabulate_differences()) > 1 else []
        parts.append("\n".join(f"- {note}" for note in self.notes() + warnings(self.results)))
        parts += [f"![Learning curves]({picture})", self.caption()] if picture else []
        return "\n\n".join(filter(None, parts)) + "\n"

    def to_latex(self) -> str:
        caption = " ".join([self.caption(), *self.describe_statistics()])
        inside = [r"\centering", rf"\caption{{{escape_latex(caption)}}}", latex_table(self.tabulate_statistics())]
        return "\n".join([r"\begin{table}", *inside, r"\end{table}", ""])

    def to_csv(self) -> str:
        """Return a line per method and metric; numbers are as in result.json, an accuracy is a fraction."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        tested = ("mean", "low", "high", "p", "p_corrected", "test", "seeds")
        heads = ["difference", *tested[1:-1], "paired_seeds"]
        writer.writerow(["method", "metric", *Summary._fields, "against", *heads])
        for metric, analysis in self.analyses.items():
            for name, summary in analysis.summaries.items():
                one = analysis.differences.get(name)
                cells = [getattr(one, key, None) for key in tested]
                writer.writerow([name, metric.name, *summary, analysis.reference, *cells])
        return text.getvalue()

    def to_json(self) -> str:
        return json.dumps({metric.name: describe(one) for metric, one in self.analyses.items()}, indent=2) + "\n"


def describe(analysis: Analysis) -> Values:
    """Return what statistics.json holds of a metric."""
    tables = ("summaries", "differences", "to_best")
    parts = {key: {name: one._asdict() for name, one in getattr(analysis, key).items()} for key in tables}
    return {"reference": analysis.reference, "best": analysis.best, "bold": analysis.bold, **parts}


def join(values: Collection[Any]) -> str:
    return ", ".join(map(str, sorted(values)))
