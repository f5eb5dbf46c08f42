"""Results as tables, for terminals and as Markdown. A seed draws the federation: methods are compared seed by seed."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from scipy.special import stdtrit

from pfedla.report.reading import MIB, SPREAD, Metric, Values, honest_part

NOTE = (
    "Table: mean ± standard deviation over seeds. Differences: paired{in_points}, mean ± standard error (seeds). "
    "Bold: ahead of every other method by a paired t-test at 5 %, with at least three seeds."
)
SCORES: dict[str, Callable[[Values], Any]] = {
    "personal": lambda result: honest_part(result)["score"]["mean"],
    "after training": lambda result: honest_part(result)["score_after_training"]["mean"],
    "worst": lambda result: honest_part(result)["score"]["worst"],
    "unseen": lambda result: result["unseen"]["score"]["mean"] if "unseen" in result else None,
    "unseen alone": lambda result: result["unseen"]["score_alone"]["mean"] if "unseen" in result else None,
}
COSTS: dict[str, Callable[[Values], float]] = {
    "down MiB": lambda result: result["traffic"]["down_bytes"] / MIB,
    "up MiB": lambda result: result["traffic"]["up_bytes"] / MIB,
    "s": lambda result: result["seconds"]["total"],
}
Lines = Sequence[Sequence[str]]  # a table: the first line is its header; a cell between two ** is bold
TABLE_ROWS, NAMED, LONGEST = 40, 5, 20  # clients in a table, classes named of each, characters of a name


def markdown_table(lines: Lines) -> str:
    body = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def terminal_table(lines: Lines, title: str | None = None, notes: Sequence[str] = ()) -> Table:
    table = Table(title=title, caption="\n".join(notes) or None, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for position, heading in enumerate(lines[0]):
        width = 10 if heading.endswith(("%", "better)")) else None  # "81.3 ± 12.0" stays on a line
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position, min_width=width)
    for line in lines[1:]:
        table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in line))
    return table


def mean_and_std(values: Collection[float]) -> tuple[float | None, float | None]:
    return statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def show_mean(numbers: Collection[float], metric: Metric, digits: int = 1) -> str:
    """Return mean ± standard deviation of scores times the metric's factor."""
    return " ± ".join(metric.show_number(one, digits) for one in mean_and_std(numbers) if one is not None) or "–"


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

    @property
    def scores(self) -> dict[int, float]:
        """The score by seed, an accuracy in %; nothing for a method without a mean."""
        means = {result["seed"]: SCORES["personal"](result) for result in self.results}
        factor = self.metric.factor
        return {} if self.outcome else {seed: factor * mean for seed, mean in means.items() if mean is not None}

    @property
    def mib(self) -> float | None:
        """What was sent down and up, mean over the seeds."""
        return mean_and_std([COSTS["down MiB"](one) + COSTS["up MiB"](one) for one in self.results])[0]

    @property
    def content(self) -> Any:
        """What comparison.json holds: the results, or why there are none."""
        if self.not_applicable:
            return {"not_applicable": self.not_applicable}
        return {"results": self.results, "gave_up": self.gave_up} if self.gave_up else self.results

    def show(self, column: str) -> str:
        """Return the cell below one of SCORES or COSTS."""
        if column in COSTS:
            return f"{statistics.mean(map(COSTS[column], self.results)):.{1 if column == 's' else 2}f}"
        values = [value for result in self.results if (value := SCORES[column](result)) is not None]
        return show_mean([self.metric.factor * value for value in values], self.metric)


class Difference(NamedTuple):
    """Mean difference over the seeds that both methods have."""

    mean: float
    error: float | None  # standard error of the mean; None with one seed
    seeds: int

    @property
    def is_supported(self) -> bool:
        """Whether a paired t-test over at least three seeds rejects "no difference" at 5 % (two-sided)."""
        critical = float(stdtrit(self.seeds - 1, 0.975))
        return self.error is not None and self.seeds >= 3 and abs(self.mean) > critical * self.error

    def show(self, metric: Metric) -> str:
        digits = metric.digits(2)
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.mean:+.{digits}f}{error} ({self.seeds})"


def compare(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return ours − theirs over the seeds that both have; None if they have none in common."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    mean, std = mean_and_std(differences)
    error = None if std is None else std / math.sqrt(len(differences))
    return None if mean is None else Difference(mean, error, len(differences))


class Ranking(NamedTuple):
    first: str | None  # the row with the best mean, of those with the most seeds
    best: str | None  # the same, if a paired t-test supports its lead over every other row
    differences: dict[str, Difference]  # to the first, of every row that has a seed in common with it


def rank(rows: Iterable[Row]) -> Ranking:
    ranked = [row for row in rows if row.scores]
    if not ranked:
        return Ranking(None, None, {})
    values, sign = {row.algorithm: row.scores for row in ranked}, ranked[0].metric.sign
    first = max(values, key=lambda name: (len(values[name]), sign * statistics.mean(values[name].values())))
    found = {name: compare(one, values[first]) for name, one in values.items()}
    others = [difference for name, difference in found.items() if name != first]
    is_best = others and all(one and sign * one.mean < 0 and one.is_supported for one in others)
    return Ranking(first, first if is_best else None, {name: one for name, one in found.items() if one})


def tabulate_comparison(rows: Sequence[Row]) -> tuple[list[list[str]], list[str]]:
    """Return the table, and notes: why methods have no mean and, with several seeds, the differences to the first."""
    first, best, differences = rank(rows)
    results = [result for row in rows for result in row.results]
    metric = Metric.of(results[0]) if results else Metric()
    with_unseen = [column for column in SCORES if column.startswith("unseen")] * any("unseen" in one for one in results)
    columns = ["personal", "after training", "worst", *COSTS, *with_unseen]
    heads = [metric.heading, *(column + metric.unit * (column in SCORES) for column in columns[1:])]
    lines, notes = [["algorithm", *heads]], list[str]()
    for row in rows:
        cells = [row.outcome, *"–" * (len(columns) - 1)] if row.outcome else [row.show(column) for column in columns]
        cells[0] = f"**{cells[0]}**" if row.algorithm == best else cells[0]
        lines.append([row.algorithm, *cells])
        notes += [f"{row.algorithm}: {row.not_applicable}"] if row.not_applicable else []
        notes += [f"{row.algorithm}, seed {seed}: {why}" for seed, why in row.gave_up.items()]
    if first is not None and any(len(row.results) + len(row.gave_up) > 1 for row in rows):
        notes += [f"{name} − {first}: {one.show(metric)}" for name, one in differences.items() if name != first]
        notes.append(NOTE.format(in_points=", in points" * metric.percent))
    if baseline := _average_baseline(results, metric):
        lines.append([baseline.pop("name"), *(baseline.get(column, "–") for column in columns)])
    return lines, notes


def _average_baseline(results: Sequence[Values], metric: Metric) -> dict[str, str]:
    """Return the row of the best constant answer (majority class, mean) over the seeds; nothing if there is none."""
    by_seed = {result["seed"]: result["baseline"] for result in results if result.get("baseline")}
    shown = {}
    for column, key in {"personal": "mean", "worst": "worst"}.items():
        found = [one["score"][key] for one in by_seed.values()]
        shown[column] = show_mean([metric.factor * value for value in found if value is not None], metric)
    return {"name": next(iter(by_seed.values()))["name"], **shown} if by_seed else {}


def comparison_markdown(rows: Sequence[Row]) -> str:
    lines, notes = tabulate_comparison(rows)
    notes += warnings([result for row in rows for result in row.results])
    return "\n".join([markdown_table(lines), "", *(f"- {note}" for note in notes)]) + "\n"


def where(result: Mapping[str, Any]) -> str:
    """Return the federation's name in tables and figures. It always names a subset and a leak."""
    subset = f" (subset {Path(result['subset']).name})" if result["subset"] else ""
    leak = f", overlapping ({100 * result['leaked_test_share']:.0f} % leak)" if result["overlapping"] else ""
    clients = result["clients"] if isinstance(result["clients"], int) else len(result["clients"])
    return f"{Path(result['dataset']).name}{subset}, {result['partition']}{leak}, {clients} clients"


def warnings(results: Sequence[Values]) -> list[str]:
    """Return what a reader must know beside the numbers: leaking test data, undefined scores, faults, attackers."""
    lines, first = [], results[0] if results else {}
    shares = sorted(round(100 * result["leaked_test_share"]) for result in results)
    if any(result["overlapping"] for result in results):
        leaked = " to ".join(map(str, dict.fromkeys((shares[0], shares[-1]))))
        lines.append(f"OVERLAPPING clients: {leaked} % of the test examples are training examples of another client.")
    if undefined := max((result["score"]["per_client"].count(None) for result in results), default=0):
        label, clients = Metric.of(first).label, f"{undefined} of {first['clients']} clients"
        lines.append(f"No {label} for {clients}, for example as a class is absent there. Means are over the others.")
    if faults := first.get("faults"):
        lines.append(f"Injected FAULTS: {', '.join(f'{key} {value}' for key, value in faults.items())}.")
    if "attackers" in first:
        attack = f"{len(first['attackers'])} of {first['clients']} clients attack"
        lines.append(f"{attack}. Scores are of the honest ones.")
    return lines


def failures_lines(result: Values, names: Sequence[str]) -> list[str]:
    """Return which clients (`names` are all clients') were left out of rounds, how often and why."""
    found = [(reason, -n, int(client)) for client, counts in result["failures"].items() for reason, n in counts.items()]
    lines = []
    for reason, group in groupby(sorted(found), key=itemgetter(0)):
        often = [(names[client] if client < len(names) else client, -n) for _, n, client in group]
        who = ", ".join(f"{client} ({n}x)" for client, n in often[:5]) + (", …" if len(often) > 5 else "")
        diverged = reason == "not finite" and "attack" not in result["faults"]
        hint = "; try a smaller --lr or uploads.norm_bound" if diverged else ""
        lines.append(f"left out {sum(n for _, n in often)} times: {reason}, client{'s' * (len(often) > 1)} {who}{hint}")
    return lines


def traffic_line(traffic: Mapping[str, int]) -> str:
    return f"traffic {traffic['down_bytes'] / MIB:.2f} MiB down, {traffic['up_bytes'] / MIB:.2f} MiB up"


def result_table(result: Values) -> Table:
    found, metric = honest_part(result), Metric.of(result)
    rows = {"personal models": found["score"], "after local training": found["score_after_training"]}
    if unseen := result.get("unseen"):
        many = f"{len(unseen['clients'])} unseen clients"
        rows[f"{many}, as they join"] = unseen["score_before"]
        rows[f"{many}, joined"] = unseen["score"]
        rows[f"{many}, after local training"] = unseen["score_after_training"]
        rows[f"{many}, had they trained alone"] = unseen["score_alone"]
    if baseline := result["baseline"]:
        rows[f"baseline: {baseline['name']}"] = baseline["score"]
    lines = [[label, *(metric.show(numbers[part]) for part in SPREAD)] for label, numbers in rows.items()]
    header = [f"test {metric.label}, last round", "mean", "std", metric.percentile, "worst"]
    notes = [] if metric.higher_is_better else [f"{metric.label}: lower is better"]
    return terminal_table([header, *lines], f"{result['algorithm']} on {where(result)}", notes)


def metrics_table(result: Values) -> list[Table]:
    """Return a table of all metrics of the personal models, in a list; an empty one if there is only the headline."""
    lines = [["personal models, all metrics", "mean", "std", "worst", "clients"]]
    for name, spread in result["metrics"].items():
        metric, values = Metric.named(name), spread["per_client"]
        defined = f"{sum(value is not None for value in values)} of {len(values)}"
        lines.append([metric.description, *(metric.show(spread[key]) for key in ("mean", "std", "worst")), defined])
    note = "clients: how many have a value; a metric is undefined where, for example, a class is absent"
    return [terminal_table(lines, notes=[note])] if len(lines) > 2 else []


def joined_table(result: Values) -> Table:
    """Return the scores of a client that joined a finished run."""
    metric = Metric.of(result)
    labels = {
        "before": "personal model, as it joins",
        "after": f"personal model, after {result['rounds']} rounds",
        "after_training": "after its last local training",
        "alone": f"had it trained alone for {result['rounds_alone']} rounds",
    }
    lines = [[label, metric.show(result["score"][key])] for key, label in labels.items()]
    title = f"{result['name']} joins a run of {result['algorithm']}, {result['clients']} clients"
    return terminal_table([[f"test {metric.description} of the unseen client", ""], *lines], title)


def borrowed_lines(result: Values) -> list[str]:
    """Return the unseen client's self-weight and largest senders by layer; nothing without weights."""
    lines = []
    for layer, (*others, own) in result.get("alpha", {}).items():
        most = sorted(range(len(others)), key=lambda sender: -others[sender])[:3]
        senders = ", ".join(f"client {result['senders'][sender]} {others[sender]:.2f}" for sender in most)
        lines.append(f"{layer}: self-weight {own:.2f}; most from {senders}")
    return lines


def shorten(name: str) -> str:
    """Cut a long name in the middle: long names often differ at their ends."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"


def federation_table(federation: Values, name: str) -> Table:
    """Return a table with a line per client: its sizes, and its classes by frequency."""
    is_survival = federation["task"]["name"] == "survival"
    heads = ["events", "outcomes"] if is_survival else ["classes", "examples of each class"]
    lines = [["client", "train", "test", heads[0], f"{heads[1]} (training and test)"]]
    clients = list(zip(federation["clients"], federation["train"], federation["test"], strict=True))
    for client, train, test in clients[:TABLE_ROWS]:
        both = np.add(train, test)
        order = np.argsort(-both, kind="stable")[: np.count_nonzero(both)]
        parts = [f"{shorten(federation['classes'][label])}: {both[label]}" for label in order[:NAMED]]
        parts += [f"{len(order) - NAMED} more: {both[order[NAMED:]].sum()}"] if len(order) > NAMED else []
        kinds = f"{100 * both[1] / both.sum():.0f} %" if is_survival else str(len(order))
        lines.append([shorten(client), str(sum(train)), str(sum(test)), kinds, ", ".join(parts)])
    more = len(clients) - TABLE_ROWS
    table = terminal_table(lines, name, [f"and {more} more clients, all of them in the figure"] if more > 0 else [])
    table.columns[-1].justify = "left"
    return table


def statistics_line(federation: Values) -> str:
    numbers, leaked = federation["statistics"], federation["leaked_test_share"]
    entropy, most = numbers["label_entropy_bits"]["mean"], np.log2(len(federation["classes"]))
    line = f"{numbers['classes_per_client']['mean']:.1f} classes a client, label entropy {entropy:.2f} of {most:.2f} "
    line += f"bits, mean distance between two clients {numbers['mean_pairwise_distance']:.2f} (0 alike, 1 no class "
    line += "in common)"
    return line + (f"; OVERLAPPING: {100 * leaked:.0f} % of the test examples train another client" if leaked else "")
