"""Results as tables, for the terminal and as Markdown.

A table is a list of lines of text, the first its header. A cell between two ** is bold.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.report.paired import compare, find_first, find_supported_first
from pfedla.report.reading import SPREAD

MIB = 2**20
Result = Mapping[str, Any]
COLUMNS = ("personal %", "after training %", "worst %", "down MiB", "up MiB", "s")
UNSEEN_COLUMNS = ("unseen %", "unseen alone %")  # clients that joined after the run
NOTE = (
    "Table: mean ± standard deviation over seeds. Differences: paired, in points, mean ± standard error (seeds). "
    "Bold: ahead of every other method by a paired t-test at 5 %, with at least three seeds."
)


@dataclass
class Row:
    """One algorithm in a comparison: its results by seed, and the seeds on which it gave up."""

    algorithm: str
    results: list[dict[str, Any]] = field(default_factory=list)
    folders: list[Path] = field(default_factory=list)  # of the results
    gave_up: dict[int, str] = field(default_factory=dict)  # seed -> why
    not_applicable: str = ""  # why

    @property
    def num_seeds(self) -> int:
        return len(self.results) + len(self.gave_up)

    @property
    def outcome(self) -> str:
        """What a table shows in place of a mean: a method that gave up on a seed has none."""
        if self.gave_up:
            return f"gave up on {len(self.gave_up)} of {self.num_seeds} seeds"
        return "" if self.results else "–"

    @property
    def reasons(self) -> list[str]:
        applies = [f"{self.algorithm}, seed {seed}: {why}" for seed, why in self.gave_up.items()]
        return [f"{self.algorithm}: {self.not_applicable}"] if self.not_applicable else applies

    def accuracies(self) -> dict[int, float]:
        """Return the accuracy in % by seed; nothing for a method without a mean."""
        means = {result["seed"]: accuracies(result)["accuracy"]["mean"] for result in self.results}
        return {} if self.outcome else {seed: 100 * mean for seed, mean in means.items() if mean is not None}

    def cells(self, *, with_unseen: bool) -> list[str]:
        """Return the cells below COLUMNS and UNSEEN_COLUMNS."""
        if self.outcome:
            return [self.outcome, *["–"] * (len(COLUMNS) - 1 + len(UNSEEN_COLUMNS) * with_unseen)]
        found = [accuracies(result) for result in self.results]
        unseen = [result["unseen"] for result in self.results if "unseen" in result]
        down, up = (statistics.mean(one["traffic"][way] for one in self.results) for way in ("down_bytes", "up_bytes"))
        cells = [
            _spread(one["accuracy"]["mean"] for one in found),
            _spread(one["accuracy_after_training"]["mean"] for one in found),
            _spread(one["accuracy"]["worst"] for one in found),
            f"{down / MIB:.2f}",
            f"{up / MIB:.2f}",
            f"{statistics.mean(result['seconds']['total'] for result in self.results):.1f}",
        ]
        keys = ("accuracy", "accuracy_alone") if with_unseen else ()
        return [*cells, *(_spread(one[key]["mean"] for one in unseen) for key in keys)]


def comparison_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of a comparison."""
    supported = find_supported_first({row.algorithm: row.accuracies() for row in rows})
    with_unseen = any("unseen" in result for row in rows for result in row.results)
    lines = [["algorithm", *COLUMNS, *UNSEEN_COLUMNS * with_unseen]]
    for row in rows:
        first, *others = row.cells(with_unseen=with_unseen)
        lines.append([row.algorithm, f"**{first}**" if row.algorithm == supported else first, *others])
    return lines


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """Return why methods have no mean and, with several seeds, the paired differences to the first."""
    notes = [reason for row in rows for reason in row.reasons]
    by_seed = {row.algorithm: row.accuracies() for row in rows}
    first = find_first(by_seed)
    if first is not None and any(row.num_seeds > 1 for row in rows):
        pairs = {name: compare(values, by_seed[first]) for name, values in by_seed.items() if name != first}
        notes += [f"{name} − {first}: {difference}" for name, difference in pairs.items() if difference]
        notes.append(NOTE)
    return notes


def comparison_markdown(rows: Sequence[Row]) -> str:
    notes = [*comparison_notes(rows), *warnings([result for row in rows for result in row.results])]
    return "\n".join([markdown_table(comparison_lines(rows)), "", *(f"- {note}" for note in notes)]) + "\n"


def comparison_table(rows: Sequence[Row]) -> Table:
    table = terminal_table(comparison_lines(rows))
    for column in table.columns[1:]:
        column.min_width = 10 if str(column.header).endswith("%") else None
    table.caption = "\n".join(comparison_notes(rows)) or None
    return table


def comparison_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what comparison.json holds: by algorithm the results, or why there are none."""
    content: dict[str, Any] = {row.algorithm: row.results for row in rows}
    for row in rows:
        if row.not_applicable:
            content[row.algorithm] = {"not_applicable": row.not_applicable}
        elif row.gave_up:
            content[row.algorithm] = {
                "results": row.results,
                "gave_up": {str(k): why for k, why in row.gave_up.items()},
            }
    return content


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    body = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def terminal_table(lines: Sequence[Sequence[str]], title: str | None = None) -> Table:
    table = Table(
        title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False
    )
    for position, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position)
    for line in lines[1:]:
        table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in line))
    return table


def _spread(fractions: Iterable[float | None]) -> str:
    """Return the mean over the seeds in %, with their standard deviation if there are several."""
    known = [100 * value for value in fractions if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):.1f}"
    return f"{mean} ± {statistics.stdev(known):.1f}" if len(known) > 1 else mean


def where(result: Result) -> str:
    """Return the federation's name in tables and figures. It always names a subset and a leak."""
    subset = f" (subset {Path(result['subset']).name})" if result["subset"] else ""
    leak = f", overlapping ({100 * result['leaked_test_share']:.0f} % leak)" if result["overlapping"] else ""
    clients = result["clients"] if isinstance(result["clients"], int) else len(result["clients"])
    return f"{Path(result['dataset']).name}{subset}, {result['partition']}{leak}, {clients} clients"


def accuracies(result: Result) -> Result:
    """Return the part of a result that has its accuracies: the honest clients', if some attack."""
    honest: Result = result.get("honest", result)
    return honest


def warnings(results: Sequence[Result]) -> list[str]:
    """Return what a reader must know beside the numbers: leaking test data, injected faults, attackers."""
    lines = []
    if any(result["overlapping"] for result in results):
        shares = sorted(round(100 * result["leaked_test_share"]) for result in results)
        leaked = f"{shares[0]}" if shares[0] == shares[-1] else f"{shares[0]} to {shares[-1]}"
        lines.append(f"OVERLAPPING clients: {leaked} % of the test examples are training examples of another client.")
    if results and (faults := results[0].get("faults")):
        lines.append(f"Injected FAULTS: {', '.join(f'{key} {value}' for key, value in faults.items())}.")
    if results and "attackers" in results[0]:
        attackers, clients = len(results[0]["attackers"]), results[0]["clients"]
        lines.append(f"{attackers} of {clients} clients attack. Accuracies are of the honest ones.")
    return lines


def failures_lines(result: Result) -> list[str]:
    """Return which clients were left out of rounds, how often and why."""
    reasons: dict[str, dict[str, int]] = {}
    for client, counts in result["failures"].items():
        for reason, times in counts.items():
            reasons.setdefault(reason, {})[client] = times
    lines = []
    for reason, times in sorted(reasons.items()):
        often = sorted(times, key=lambda client: (-times[client], int(client)))
        who = ", ".join(f"{client} ({times[client]}x)" for client in often[:5]) + (", …" if len(often) > 5 else "")
        diverged = reason == "not finite" and "attack" not in result["faults"]
        hint = "; try a smaller --lr or uploads.norm_bound" if diverged else ""
        lines.append(f"left out {sum(times.values())} times: {reason}, client{'s' * (len(often) > 1)} {who}{hint}")
    return lines


def result_table(result: Result) -> Table:
    rows = {
        "personal models": accuracies(result)["accuracy"],
        "after local training": accuracies(result)["accuracy_after_training"],
    }
    if unseen := result.get("unseen"):
        many = f"{len(unseen['clients'])} unseen clients"
        rows[f"{many}, as they join"] = unseen["accuracy_before"]
        rows[f"{many}, joined"] = unseen["accuracy"]
        rows[f"{many}, after local training"] = unseen["accuracy_after_training"]
        rows[f"{many}, had they trained alone"] = unseen["accuracy_alone"]
    lines = [[label, *(_percent(numbers[part]) for part in SPREAD)] for label, numbers in rows.items()]
    header = ["test accuracy, last round", "mean", "std", "10th percentile", "worst"]
    return terminal_table([header, *lines], f"{result['algorithm']} on {where(result)}")


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def joined_table(result: Result) -> Table:
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


def borrowed_lines(result: Result) -> list[str]:
    """Return the unseen client's self-weight and largest senders by layer; nothing without weights."""
    lines = []
    for layer, (*others, own) in result.get("alpha", {}).items():
        most = sorted(range(len(others)), key=lambda sender: -others[sender])[:3]
        senders = ", ".join(f"client {sender} {others[sender]:.2f}" for sender in most)
        lines.append(f"{layer}: self-weight {own:.2f}; most from {senders}")
    return lines


def traffic_line(traffic: Mapping[str, int]) -> str:
    return f"traffic {traffic['down_bytes'] / MIB:.2f} MiB down, {traffic['up_bytes'] / MIB:.2f} MiB up"
