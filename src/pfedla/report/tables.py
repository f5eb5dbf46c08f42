"""Results as tables: for the terminal, and as Markdown."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

MIB = 2**20
COLUMNS = ("personal %", "after training %", "worst %", "down MiB", "up MiB", "s")
UNSEEN_COLUMNS = ("unseen %", "unseen alone %")  # of clients that joined after the run


@dataclass
class Row:
    """One algorithm's results over the seeds; none, and the reason, if it does not apply or gave up."""

    algorithm: str
    results: list[dict[str, Any]]
    reason: str = ""
    gave_up: bool = False

    def cells(self, columns: Sequence[str] = COLUMNS) -> list[str]:
        if not self.results:
            return ["–"] * len(columns)
        keys = ("accuracy", "accuracy_alone") if len(columns) > len(COLUMNS) else ()
        unseen = [_spread([result["unseen"][key]["mean"] for result in self.results if "unseen" in result]) for key in keys]
        return [
            _spread([counted(result)["accuracy"]["mean"] for result in self.results]),
            _spread([counted(result)["accuracy_after_training"]["mean"] for result in self.results]),
            _spread([counted(result)["accuracy"]["worst"] for result in self.results]),
            f"{statistics.mean(result['traffic']['down_bytes'] for result in self.results) / MIB:.2f}",
            f"{statistics.mean(result['traffic']['up_bytes'] for result in self.results) / MIB:.2f}",
            f"{statistics.mean(result['seconds']['total'] for result in self.results):.1f}",
            *unseen,
        ]


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    return COLUMNS + (UNSEEN_COLUMNS if any("unseen" in result for row in rows for result in row.results) else ())


def _spread(fractions: list[float | None]) -> str:
    """Mean over the seeds in per cent, with their standard deviation if there are several."""
    known = [100 * value for value in fractions if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):.1f}"
    return f"{mean} ± {statistics.stdev(known):.1f}" if len(known) > 1 else mean


def comparison_markdown(rows: list[Row]) -> str:
    columns = _columns(rows)
    lines = [["algorithm", *columns], ["---", *["---:"] * len(columns)]]
    lines += [[row.algorithm, *row.cells(columns)] for row in rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
    return table + "".join(f"\n{line}\n" for line in warnings([result for row in rows for result in row.results]))


def comparison_table(rows: list[Row]) -> Table:
    table = Table("algorithm", caption_justify="left")
    table.columns[0].no_wrap = True
    columns = _columns(rows)
    for heading in columns:
        table.add_column(heading, justify="right", min_width=10 if heading.endswith("%") else None)
    for row in rows:
        table.add_row(row.algorithm, *row.cells(columns))
    table.caption = "\n".join(f"– {row.algorithm}: {row.reason}" for row in rows if row.reason) or None
    return table


def where(result: Mapping[str, Any]) -> str:
    """The federation as every table and picture names it: a subset and a leak between clients are never left unsaid."""
    subset = f" (subset {Path(result['subset']).name})" if result["subset"] else ""
    leak = f", overlapping ({100 * result['leaked_test_share']:.0f} % leak)" if result["overlapping"] else ""
    clients = result["clients"] if isinstance(result["clients"], int) else len(result["clients"])
    return f"{Path(result['dataset']).name}{subset}, {result['partition']}{leak}, {clients} clients"


def counted(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where a result's accuracies are: those of the honest clients, if some attack."""
    honest: Mapping[str, Any] = result.get("honest", result)
    return honest


def warnings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader must know beside the numbers: test data that leak, faults on purpose, clients that attack."""
    lines = []
    if any(result["overlapping"] for result in results):
        lines.append(_leak_line(results))
    faults = results[0].get("faults") if results else None
    if faults:
        lines.append(f"FAULTS on purpose: {', '.join(f'{key} {value}' for key, value in faults.items())}.")
    if results and "attackers" in results[0]:
        attackers, clients = len(results[0]["attackers"]), results[0]["clients"]
        lines.append(f"{attackers} of {clients} clients attack; accuracies are of the {clients - attackers} honest ones.")
    return lines


def failures_lines(result: Mapping[str, Any]) -> list[str]:
    """Who was left out of rounds, how often and why; nothing if nobody was."""
    reasons: dict[str, dict[str, int]] = {}
    for client, counts in result["failures"].items():
        for reason, times in counts.items():
            reasons.setdefault(reason, {})[client] = times
    lines = []
    for reason, times in sorted(reasons.items()):
        often = sorted(times, key=lambda client: (-times[client], int(client)))
        who = ", ".join(f"{client} ({times[client]}x)" for client in often[:5]) + (", …" if len(often) > 5 else "")
        hint = (
            "; a smaller --lr or uploads.norm_bound may help"
            if reason == "not finite" and "attack" not in result["faults"]
            else ""
        )
        lines.append(f"left out {sum(times.values())} times: {reason}, client{'s' if len(often) > 1 else ''} {who}{hint}")
    return lines


def _leak_line(results: Sequence[Mapping[str, Any]]) -> str:
    """Overlapping federations, one per seed."""
    shares = sorted({f"{100 * result['leaked_test_share']:.0f}" for result in results}, key=int)
    leaked = shares[0] if len(shares) == 1 else f"{shares[0]} to {shares[-1]}"
    return f"OVERLAPPING clients: {leaked} % of the test examples are training examples of another client."


def result_table(result: dict[str, Any]) -> Table:
    title = f"{result['algorithm']} on {where(result)}"
    table = Table(title=title, title_justify="left")
    table.add_column("test accuracy, last round")
    for heading in ("mean", "std", "lowest tenth", "worst"):
        table.add_column(heading, justify="right")
    rows = [("personal models", counted(result)["accuracy"])]
    rows += [("after local training", counted(result)["accuracy_after_training"])]
    if unseen := result.get("unseen"):
        many = f"{len(unseen['clients'])} unseen"
        rows += [(f"{many}, as they join", unseen["accuracy_before"]), (f"{many}, joined", unseen["accuracy"])]
        rows += [(f"{many}, after local training", unseen["accuracy_after_training"])]
        rows += [(f"{many}, had they trained alone", unseen["accuracy_alone"])]
    for label, numbers in rows:
        table.add_row(label, *(_percent(numbers[part]) for part in ("mean", "std", "p10", "worst")))
    return table


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def joined_table(result: Mapping[str, Any]) -> Table:
    """A newcomer's accuracies."""
    title = f"{result['name']} joins a run of {result['algorithm']}, {result['clients']} clients"
    table = Table(title=title, title_justify="left")
    table.add_column("test accuracy of the newcomer")
    table.add_column("", justify="right")
    labels = {
        "before": "personal model, as it joins",
        "after": f"personal model, after {result['rounds']} rounds",
        "after_training": "after its last local training",
        "alone": f"had it trained alone for {result['rounds_alone']} rounds",
    }
    for key, label in labels.items():
        table.add_row(label, _percent(result["accuracy"][key]))
    return table


def borrowed_lines(result: Mapping[str, Any]) -> list[str]:
    """Per layer the newcomer's self-weight, and from whom it takes most; nothing for a method without alpha."""
    lines = []
    for layer, row in result.get("alpha", {}).items():
        *others, own = row
        most = sorted(range(len(others)), key=lambda sender: -others[sender])[:3]
        senders = ", ".join(f"client {sender} {others[sender]:.2f}" for sender in most)
        lines.append(f"{layer}: its own {own:.2f}; most from {senders}")
    return lines


def traffic_line(traffic: dict[str, int]) -> str:
    return f"traffic {traffic['down_bytes'] / MIB:.2f} MiB down, {traffic['up_bytes'] / MIB:.2f} MiB up"
