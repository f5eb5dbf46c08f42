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

from pfedla.report.reading import MIB, SPREAD, Values, honest_part

NOTE = (
    "Table: mean ± standard deviation over seeds. Differences: paired, in points, mean ± standard error (seeds). "
    "Bold: ahead of every other method by a paired t-test at 5 %, with at least three seeds."
)
COLUMNS: dict[str, Callable[[Values], Any]] = {
    "personal %": lambda result: honest_part(result)["accuracy"]["mean"],
    "after training %": lambda result: honest_part(result)["accuracy_after_training"]["mean"],
    "worst %": lambda result: honest_part(result)["accuracy"]["worst"],
    "down MiB": lambda result: result["traffic"]["down_bytes"] / MIB,
    "up MiB": lambda result: result["traffic"]["up_bytes"] / MIB,
    "s": lambda result: result["seconds"]["total"],
    "unseen %": lambda result: result["unseen"]["accuracy"]["mean"] if "unseen" in result else None,
    "unseen alone %": lambda result: result["unseen"]["accuracy_alone"]["mean"] if "unseen" in result else None,
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
        width = 10 if heading.endswith("%") else None  # "81.3 ± 12.0" stays on a line
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position, min_width=width)
    for line in lines[1:]:
        table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in line))
    return table


def mean_and_std(values: Collection[float]) -> tuple[float | None, float | None]:
    return statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def show_mean(values: Collection[float], digits: int = 1) -> str:
    return " ± ".join(f"{one:.{digits}f}" for one in mean_and_std(values) if one is not None) or "–"


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
    def accuracies(self) -> dict[int, float]:
        """The accuracy in % by seed; nothing for a method without a mean."""
        means = {result["seed"]: COLUMNS["personal %"](result) for result in self.results}
        return {} if self.outcome else {seed: 100 * mean for seed, mean in means.items() if mean is not None}

    @property
    def mib(self) -> float | None:
        """What was sent down and up, mean over the seeds."""
        return mean_and_std([COLUMNS["down MiB"](one) + COLUMNS["up MiB"](one) for one in self.results])[0]

    @property
    def content(self) -> Any:
        """What comparison.json holds: the results, or why there are none."""
        if self.not_applicable:
            return {"not_applicable": self.not_applicable}
        return {"results": self.results, "gave_up": self.gave_up} if self.gave_up else self.results

    def show(self, column: str) -> str:
        """Return the cell below one of COLUMNS."""
        values = [value for result in self.results if (value := COLUMNS[column](result)) is not None]
        if column.endswith("%"):
            return show_mean([100 * value for value in values])
        return f"{statistics.mean(values):.{1 if column == 's' else 2}f}"


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

    def __str__(self) -> str:
        return f"{self.mean:+.2f}{'' if self.error is None else f' ± {self.error:.2f}'} ({self.seeds})"


def compare(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Return ours − theirs over the seeds that both have; None if they have none in common."""
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    mean, std = mean_and_std(differences)
    error = None if std is None else std / math.sqrt(len(differences))
    return None if mean is None else Difference(mean, error, len(differences))


class Ranking(NamedTuple):
    first: str | None  # the row with the highest mean, of those with the most seeds
    best: str | None  # the same, if a paired t-test supports its lead over every other row
    differences: dict[str, Difference]  # to the first, of every row that has a seed in common with it


def rank(rows: Iterable[Row]) -> Ranking:
    values = {row.algorithm: row.accuracies for row in rows if row.accuracies}
    if not values:
        return Ranking(None, None, {})
    first = max(values, key=lambda name: (len(values[name]), statistics.mean(values[name].values())))
    found = {name: compare(one, values[first]) for name, one in values.items()}
    others = [difference for name, difference in found.items() if name != first]
    is_best = others and all(one and one.mean < 0 and one.is_supported for one in others)
    return Ranking(first, first if is_best else None, {name: one for name, one in found.items() if one})


def tabulate_comparison(rows: Sequence[Row]) -> tuple[list[list[str]], list[str]]:
    """Return the table, and notes: why methods have no mean and, with several seeds, the differences to the first."""
    first, best, differences = rank(rows)
    with_unseen = any("unseen" in result for row in rows for result in row.results)
    columns = [column for column in COLUMNS if with_unseen or not column.startswith("unseen")]
    lines, notes = [["algorithm", *columns]], list[str]()
    for row in rows:
        cells = [row.outcome, *"–" * (len(columns) - 1)] if row.outcome else [row.show(column) for column in columns]
        cells[0] = f"**{cells[0]}**" if row.algorithm == best else cells[0]
        lines.append([row.algorithm, *cells])
        notes += [f"{row.algorithm}: {row.not_applicable}"] if row.not_applicable else []
        notes += [f"{row.algorithm}, seed {seed}: {why}" for seed, why in row.gave_up.items()]
    if first is not None and any(len(row.results) + len(row.gave_up) > 1 for row in rows):
        notes += [f"{name} − {first}: {difference}" for name, difference in differences.items() if name != first]
        notes.append(NOTE)
    return lines, notes


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
    """Return what a reader must know beside the numbers: leaking test data, injected faults, attackers."""
    lines, first = [], results[0] if results else {}
    shares = sorted(round(100 * result["leaked_test_share"]) for result in results)
    if any(result["overlapping"] for result in results):
        leaked = " to ".join(map(str, dict.fromkeys((shares[0], shares[-1]))))
        lines.append(f"OVERLAPPING clients: {leaked} % of the test examples are training examples of another client.")
    if faults := first.get("faults"):
        lines.append(f"Injected FAULTS: {', '.join(f'{key} {value}' for key, value in faults.items())}.")
    if "attackers" in first:
        attack = f"{len(first['attackers'])} of {first['clients']} clients attack"
        lines.append(f"{attack}. Accuracies are of the honest ones.")
    return lines


def failures_lines(result: Values) -> list[str]:
    """Return which clients were left out of rounds, how often and why."""
    found = [(reason, -n, int(client)) for client, counts in result["failures"].items() for reason, n in counts.items()]
    lines = []
    for reason, group in groupby(sorted(found), key=itemgetter(0)):
        often = [(client, -n) for _, n, client in group]
        who = ", ".join(f"{client} ({n}x)" for client, n in often[:5]) + (", …" if len(often) > 5 else "")
        diverged = reason == "not finite" and "attack" not in result["faults"]
        hint = "; try a smaller --lr or uploads.norm_bound" if diverged else ""
        lines.append(f"left out {sum(n for _, n in often)} times: {reason}, client{'s' * (len(often) > 1)} {who}{hint}")
    return lines


def traffic_line(traffic: Mapping[str, int]) -> str:
    return f"traffic {traffic['down_bytes'] / MIB:.2f} MiB down, {traffic['up_bytes'] / MIB:.2f} MiB up"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def result_table(result: Values) -> Table:
    found = honest_part(result)
    rows = {"personal models": found["accuracy"], "after local training": found["accuracy_after_training"]}
    if unseen := result.get("unseen"):
        many = f"{len(unseen['clients'])} unseen clients"
        rows[f"{many}, as they join"] = unseen["accuracy_before"]
        rows[f"{many}, joined"] = unseen["accuracy"]
        rows[f"{many}, after local training"] = unseen["accuracy_after_training"]
        rows[f"{many}, had they trained alone"] = unseen["accuracy_alone"]
    lines = [[label, *(_percent(numbers[part]) for part in SPREAD)] for label, numbers in rows.items()]
    header = ["test accuracy, last round", "mean", "std", "10th percentile", "worst"]
    return terminal_table([header, *lines], f"{result['algorithm']} on {where(result)}")


def joined_table(result: Values) -> Table:
    """Return the accuracies of a client that joined a finished run."""
    labels = {
        "before": "personal model, as it joins",
        "after": f"personal model, after {result['rounds']} rounds",
        "after_training": "after its last local training",
        "alone": f"had it trained alone for {result['rounds_alone']} rounds",
    }
    lines = [[label, _percent(result["accuracy"][key])] for key, label in labels.items()]
    title = f"{result['name']} joins a run of {result['algorithm']}, {result['clients']} clients"
    return terminal_table([["test accuracy of the unseen client", ""], *lines], title)


def borrowed_lines(result: Values) -> list[str]:
    """Return the unseen client's self-weight and largest senders by layer; nothing without weights."""
    lines = []
    for layer, (*others, own) in result.get("alpha", {}).items():
        most = sorted(range(len(others)), key=lambda sender: -others[sender])[:3]
        senders = ", ".join(f"client {sender} {others[sender]:.2f}" for sender in most)
        lines.append(f"{layer}: self-weight {own:.2f}; most from {senders}")
    return lines


def shorten(name: str) -> str:
    """Cut a long name in the middle: long names often differ at their ends."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"


def federation_table(federation: Values, name: str) -> Table:
    """Return a table with a line per client: its sizes, and its classes by frequency."""
    lines = [["client", "train", "test", "classes", "examples of each class (training and test)"]]
    clients = list(zip(federation["clients"], federation["train"], federation["test"], strict=True))
    for client, train, test in clients[:TABLE_ROWS]:
        both = np.add(train, test)
        order = np.argsort(-both, kind="stable")[: np.count_nonzero(both)]
        parts = [f"{shorten(federation['classes'][label])}: {both[label]}" for label in order[:NAMED]]
        parts += [f"{len(order) - NAMED} more: {both[order[NAMED:]].sum()}"] if len(order) > NAMED else []
        lines.append([shorten(client), str(sum(train)), str(sum(test)), str(len(order)), ", ".join(parts)])
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
