"""Tables in terminals, Markdown and LaTeX; the tables of a run and of a federation."""

import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from pfedla.report.reading import MIB, SPREAD, Metric, Values, honest_part

Lines = Sequence[Sequence[str]]  # a table: the first line is its header; a cell between two ** is bold
LATEX = {character: "\\" + character for character in "%&_#${}"} | {"\\": r"\textbackslash{}", "<": "$<$", "²": "$^2$"}
LATEX |= {"±": r"$\pm$", "–": "--", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
TABLE_ROWS, NAMED, LONGEST = 40, 5, 20  # clients in a table, classes named of each, characters of a name


def markdown_table(lines: Lines) -> str:
    body = [lines[0], ["---", *["---:"] * (len(lines[0]) - 1)], *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


def terminal_table(lines: Lines, title: str | None = None, notes: Sequence[str] = ()) -> Table:
    table = Table(title=title, caption="\n".join(notes) or None, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    for position, heading in enumerate(lines[0]):
        estimates = [line[position] for line in lines[1:] if {"±", "["} & {*line[position]}]  # each on one line
        width = max(map(len, estimates), default=None)
        table.add_column(heading, justify="right" if position else "left", no_wrap=not position, min_width=width)
    for line in lines[1:]:
        table.add_row(*(Text(cell.strip("*"), style="bold" if cell.startswith("**") else "") for cell in line))
    return table


def latex_table(lines: Lines) -> str:
    """Return a tabular with booktabs."""
    header, *body = (" & ".join(map(_latex_cell, line)) + r" \\" for line in lines)
    begin = r"\begin{tabular}{l" + "c" * (len(lines[0]) - 1) + "}"
    return "\n".join([begin, r"\toprule", header, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])


def _latex_cell(cell: str) -> str:
    text = escape_latex(cell.strip("*"))
    return rf"\textbf{{{text}}}" if cell.startswith("**") else text


def escape_latex(text: str) -> str:
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", "".join(LATEX.get(character, character) for character in text))


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
    if changed := [one for one in results if len(one.get("norm_bounds", {})) > 1]:
        lines.append(f"uploads.norm_bound was CHANGED within {len(changed)} of {len(results)} runs (see result.json).")
    if faults := first.get("faults"):
        lines.append(f"Injected FAULTS: {', '.join(f'{key} {value}' for key, value in faults.items())}.")
    for method, privacy in {one["algorithm"]: one["privacy"] for one in results if one.get("privacy")}.items():
        epsilon, deltas = privacy["epsilon"]["max"], privacy["delta"]
        spent = "no bound on ε" if epsilon is None else f"ε at most {epsilon:.3g}, δ at most {max(deltas):.2g}"
        lines.append(f"{method}: differentially private training, {spent} for an example.")
    for client, start in {pair: None for result in results for pair in result.get("excluded", {}).items()}:
        lines.append(f"Client {client} took no part from round {start} on. It is still tested.")
    if "attackers" in first:
        attack = f"{len(first['attackers'])} of {first['clients']} clients attack"
        lines.append(f"{attack}. Scores are of the honest ones.")
    lines += dict.fromkeys(warning for result in results for warning in result.get("warnings", []))
    return lines


def failures_lines(result: Values, names: Sequence[str]) -> list[str]:
    """Return which clients (`names` are all clients') were left out of rounds, how often and why."""
    found = [(reason, -n, int(client)) for client, counts in result["failures"].items() for reason, n in counts.items()]
    lines = []
    for reason, group in groupby(sorted(found), key=itemgetter(0)):
        often = [(names[client] if client < len(names) else client, -n) for _, n, client in group]
        who = ", ".join(f"{client} ({n}x)" for client, n in often[:5]) + (", …" if len(often) > 5 else "")
        diverged = reason in ("not finite", "values too large", "norm too large") and "attack" not in result["faults"]
        hint = "; try a smaller --lr" if diverged else ""
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
