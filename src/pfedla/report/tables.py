"""Results as tables, for the terminal and as Markdown.

A table is a list of lines of text, the first its header. A cell between two ** is bold.
"""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.report.paired import compare, find_first, find_supported_first
from pfedla.report.reading import MIB, SPREAD, Array, Values, honest_part

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
TABLE_ROWS = 40  # of a federation
NAMED = 5  # classes of a client that are named in the table
LONGEST = 20  # characters of a name


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    body = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def terminal_table(lines: Sequence[Sequence[str]], title: str | None = None, notes: Sequence[str] = ()) -> Table:
    table = Table(title=title, caption="\n".join(notes) or None, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for position, heading in enumerate(lines[0]):
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position)
    for line in lines[1:]:
        table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in line))
    return table


def mean_and_std(values: Collection[float]) -> tuple[float | None, float | None]:
    return statistics.mean(values) if values else None, statistics.stdev(values) if len(values) > 1 else None


def show_mean(values: Collection[float], digits: int = 1) -> str:
    """Return the mean, with the standard deviation if there are several values."""
    return " ± ".join(f"{one:.{digits}f}" for one in mean_and_std(values) if one is not None) or "–"


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


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
        means = {result["seed"]: honest_part(result)["accuracy"]["mean"] for result in self.results}
        return {} if self.outcome else {seed: 100 * mean for seed, mean in means.items() if mean is not None}

    def show(self, column: str) -> str:
        """Return the cell below one of COLUMNS."""
        values = [value for result in self.results if (value := COLUMNS[column](result)) is not None]
        if column.endswith("%"):
            return show_mean([100 * value for value in values])
        return f"{statistics.mean(values):.{1 if column == 's' else 2}f}"


def comparison_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Return the table of a comparison."""
    supported = find_supported_first({row.algorithm: row.accuracies for row in rows})
    with_unseen = any("unseen" in result for row in rows for result in row.results)
    columns = [column for column in COLUMNS if with_unseen or not column.startswith("unseen")]
    lines = [["algorithm", *columns]]
    for row in rows:
        cells = [row.outcome, *"–" * (len(columns) - 1)] if row.outcome else [row.show(column) for column in columns]
        cells[0] = f"**{cells[0]}**" if row.algorithm == supported else cells[0]
        lines.append([row.algorithm, *cells])
    return lines


def comparison_notes(rows: Sequence[Row]) -> list[str]:
    """Return why methods have no mean and, with several seeds, the paired differences to the first."""
    notes = []
    for row in rows:
        notes += [f"{row.algorithm}: {row.not_applicable}"] if row.not_applicable else []
        notes += [f"{row.algorithm}, seed {seed}: {why}" for seed, why in row.gave_up.items()]
    by_seed = {row.algorithm: row.accuracies for row in rows}
    first = find_first(by_seed)
    if first is not None and any(len(row.results) + len(row.gave_up) > 1 for row in rows):
        pairs = {name: compare(values, by_seed[first]) for name, values in by_seed.items() if name != first}
        notes += [f"{name} − {first}: {difference}" for name, difference in pairs.items() if difference]
        notes.append(NOTE)
    return notes


def comparison_markdown(rows: Sequence[Row]) -> str:
    notes = [*comparison_notes(rows), *warnings([result for row in rows for result in row.results])]
    return "\n".join([markdown_table(comparison_lines(rows)), "", *(f"- {note}" for note in notes)]) + "\n"


def comparison_table(rows: Sequence[Row]) -> Table:
    table = terminal_table(comparison_lines(rows), notes=comparison_notes(rows))
    for column in table.columns[1:]:
        column.min_width = 10 if str(column.header).endswith("%") else None
    return table


def comparison_json(rows: Sequence[Row]) -> Values:
    """Return what comparison.json holds: by algorithm the results, or why there are none."""
    content: Values = {}
    for row in rows:
        gave_up = {str(seed): why for seed, why in row.gave_up.items()}
        content[row.algorithm] = {"results": row.results, "gave_up": gave_up} if gave_up else row.results
        if row.not_applicable:
            content[row.algorithm] = {"not_applicable": row.not_applicable}
    return content


def where(result: Mapping[str, Any]) -> str:
    """Return the federation's name in tables and figures. It always names a subset and a leak."""
    subset = f" (subset {Path(result['subset']).name})" if result["subset"] else ""
    leak = f", overlapping ({100 * result['leaked_test_share']:.0f} % leak)" if result["overlapping"] else ""
    clients = result["clients"] if isinstance(result["clients"], int) else len(result["clients"])
    return f"{Path(result['dataset']).name}{subset}, {result['partition']}{leak}, {clients} clients"


def warnings(results: Sequence[Values]) -> list[str]:
    """Return what a reader must know beside the numbers: leaking test data, injected faults, attackers."""
    lines, first = [], results[0] if results else {}
    if any(result["overlapping"] for result in results):
        shares = sorted(round(100 * result["leaked_test_share"]) for result in results)
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


def traffic_line(traffic: Mapping[str, int]) -> str:
    return f"traffic {traffic['down_bytes'] / MIB:.2f} MiB down, {traffic['up_bytes'] / MIB:.2f} MiB up"


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
    found, alone = result["accuracy"], f"had it trained alone for {result['rounds_alone']} rounds"
    lines = [
        ["test accuracy of the unseen client", ""],
        ["personal model, as it joins", _percent(found["before"])],
        [f"personal model, after {result['rounds']} rounds", _percent(found["after"])],
        ["after its last local training", _percent(found["after_training"])],
        [alone, _percent(found["alone"])],
    ]
    return terminal_table(lines, f"{result['name']} joins a run of {result['algorithm']}, {result['clients']} clients")


def borrowed_lines(result: Values) -> list[str]:
    """Return the unseen client's self-weight and largest senders by layer; nothing without weights."""
    lines = []
    for layer, (*others, own) in result.get("alpha", {}).items():
        most = sorted(range(len(others)), key=lambda sender: -others[sender])[:3]
        senders = ", ".join(f"client {sender} {others[sender]:.2f}" for sender in most)
        lines.append(f"{layer}: self-weight {own:.2f}; most from {senders}")
    return lines


def count_examples(federation: Values) -> Array:
    """Return the number of examples [clients, 2 (train, test), classes]."""
    return np.stack([np.array(federation["train"]), np.array(federation["test"])], axis=1)


def shorten(name: str) -> str:
    """Cut a long name in the middle: long names often differ at their ends."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}…{name[-8:]}"


def federation_table(federation: Values, name: str) -> Table:
    """Return a table with a line per client: its sizes, and its classes by frequency."""
    counts = count_examples(federation)
    lines = [["client", "train", "test", "classes", "examples of each class (training and test)"]]
    for client, (train, test) in list(zip(federation["clients"], counts, strict=True))[:TABLE_ROWS]:
        both = train + test
        order = [label for label in np.argsort(-both, kind="stable") if both[label]]
        parts = [f"{shorten(federation['classes'][label])}: {both[label]}" for label in order[:NAMED]]
        parts += [f"{len(order) - NAMED} more: {both[order[NAMED:]].sum()}"] if len(order) > NAMED else []
        lines.append([shorten(client), str(train.sum()), str(test.sum()), str(len(order)), ", ".join(parts)])
    more = len(counts) - TABLE_ROWS
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
