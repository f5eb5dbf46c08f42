"""Write the tables of results/ and benchmarks/results/ into the documents, between their marks.

python benchmarks/fill_docs.py

A page asks for a table with a pair of comments, <!-- name --> and <!-- /name -->; TABLES says what it gets.
"""

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from pfedla.report.methods import MethodTable
from pfedla.report.reading import Metric
from pfedla.report.rows import Row, show_mean
from pfedla.report.significance import compare
from pfedla.report.tables import markdown_table
from pfedla.reproduction.attack_results import DRAWN, NOTE, collect_attacks, describe_data, tabulate_attacks
from pfedla.reproduction.paper_figures import average_by_distance, collect_weights
from pfedla.reproduction.site_results import SITES_NOTE, known_columns, tabulate_sites
from pfedla.reproduction.summaries import collect_rows, read_summary

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"(<!-- (?P<name>[a-z]+) -->\n).*?(<!-- /(?P=name) -->)", re.S)
README_COLUMNS = {
    "Fashion-MNIST, 4 classes per client": ("table1", "Fashion-MNIST"),
    "Fashion-MNIST, 2 dominant classes": ("table2", "Fashion-MNIST"),
    "CIFAR-10, 4 classes per client": ("table1", "CIFAR-10"),
    "CIFAR-10, 2 dominant classes": ("table2", "CIFAR-10"),
}
README_ROWS = ("Local", "FedAvg", "FedAvg + fine-tuning", "FedRep", "pFedLA", "pFedLA held-out")
SPLITS = {"table1": "few classes", "table2": "dominant"}
RULES = ("pFedLA", "pFedLA held-out")
OURS = ("pFedLA", "HeurpFedLA", "pFedLA held-out", "HeurpFedLA held-out")


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / name).read_text(encoding="utf-8").splitlines()]


def read_results(name: str) -> dict[str, Any]:
    path = ROOT / "results" / name / "results.json"
    return read_summary(path) if path.exists() else {"columns": [], "rows": [], "cells": []}  # not run yet


def show_seeds(row: Row) -> str:
    """Return mean ± standard error (number of seeds)."""
    return f"{show_mean(row.scores.values(), row.metric)} ({len(row.scores)})" if row.scores else "–"


def show_gap(ours: Row, theirs: Row, *, bold: bool = False) -> str:
    """Return the paired difference, its interval and the number of seeds."""
    found = compare(ours.headline_scores, theirs.headline_scores)
    if found is None:
        return "not run"
    ends = "" if found.low is None or found.high is None else f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
    shown = f"{100 * found.mean:+.1f}{ends} ({found.seeds})".replace("-", "−")
    return f"**{shown}**" if bold else shown


def readme_table() -> str:
    lines = [[""], *([row] for row in README_ROWS)]
    differences = [[f"*pFedLA held-out − {other}*"] for other in ("Local", "FedRep")]
    for heading, (table, column) in README_COLUMNS.items():
        rows = collect_rows(read_results(table)).get(column)
        if rows is None or not rows["Local"].results:
            continue
        lines[0].append(heading)
        for line in lines[1:]:
            line.append(show_seeds(rows[line[0]]))
        for line, other in zip(differences, ("Local", "FedRep"), strict=True):
            line.append(show_gap(rows["pFedLA held-out"], rows[other]))
    return markdown_table([*lines, *differences])


def choosing_table() -> str:
    """Tables 1 and 2 in one, seed 0: the mean, and the worst client."""
    header, lines = [""], dict[str, list[str]]()
    for table, split in SPLITS.items():
        summary = read_results(table)
        cells = {(one["column"], one["row"]): one for one in summary["cells"] if one["seed"] == 0 and "score" in one}
        for column in dict.fromkeys(column for column, _ in cells):
            header.append(f"{column}, {split}")
            for row in summary["rows"]:
                found = cells.get((column, row), {}).get("score")
                shown = f"{100 * found['mean']:.1f} ({100 * found['worst']:.1f})" if found else "–"
                lines.setdefault(row, []).append(shown)
    return markdown_table([header, *([row, *line] for row, line in lines.items() if set(line) != {"–"})])


def standing_table() -> str:
    """By column of Tables 1 and 2: the first, and the paired difference of each of our methods to it."""
    lines = [["", "first", *OURS]]
    for table, split in SPLITS.items():
        for column, rows in collect_rows(read_results(table)).items():
            analysis = MethodTable(list(rows.values())).analysis
            if not analysis.best:
                continue
            first = rows[analysis.best]
            line = [f"{column}, {split}", f"{analysis.best} {show_seeds(first)}"]
            for row in OURS:
                is_worse = row in analysis.to_best and analysis.to_best[row].is_significant
                line.append("first" if row == analysis.best else show_gap(rows[row], first, bold=is_worse))
            lines.append(line)
    return markdown_table(lines)


def claims_table() -> str:
    """What the paper claims, and in how many columns it holds here, for its rule and for ours."""
    columns = {(table, column): rows for table in SPLITS for column, rows in collect_rows(read_results(table)).items()}
    non_iid_2 = {place: rows for place, rows in columns.items() if place[0] == "table2"}
    lines = [["claim", *(f"`{row}`" for row in ("pfedla", "pfedla-heldout")), "command: `pfedla reproduce …`"]]
    for claim, other, places, tables in (
        ("pFedLA is better than Local", "Local", columns, "`table1 table2`"),
        ("pFedLA is better than FedAvg", "FedAvg", columns, "`table1 table2`"),
        ("pFedLA is better than FedRep with dominant classes", "FedRep", non_iid_2, "`table2`"),
    ):
        found = [judge([(rows[row], rows[other]) for rows in places.values()]) for row in RULES]
        lines.append([claim, *found, tables])
    retained = [judge([(rows[f"Heur{row}"], rows[row]) for rows in columns.values()], more_than=-1.0) for row in RULES]
    lines.append(["HeurpFedLA loses less than a point to pFedLA", *retained, "`table1 table2`"])
    falling, own = [judge_heatmap(row) for row in RULES], [judge_layers(columns.values(), row) for row in RULES]
    lines.append(["The weights fall with the number of shared classes", *falling, "`figure_weight_heatmap`"])
    similar = [judge_evolution(row) for row in RULES]
    claim = "The target takes more from the same labels than from similar ones, and from these than from others"
    lines.append([claim, *similar, "`figure_weight_evolution`"])
    lines.append(["Shallow layers are shared, deep layers personal", *own, "`table1 table2`"])
    best = [judge_neighbours(prefix) for prefix in ("", "held-out, ")]
    lines.append(["Five or seven neighbours are better than four, nine or all", *best, "`effect_of_neighbours`"])
    return markdown_table(lines)


def judge_heatmap(row: str) -> str:
    """Return in how many data sets a row's weights fall up to distance 3; beyond it, no class is shared."""
    summary, found = read_results("figure_weight_heatmap"), []
    for panel in collect_weights(summary):
        if panel.cells[0]["row"] == row:
            weights = average_by_distance(panel.map(summary["layers"][panel.cells[0]["column"]]))
            found.append(all(near > far for near, far in pairwise(weights[:4])))
    return count_columns(found)


def judge_evolution(row: str) -> str:
    panels = [
        panel for panel in collect_weights(read_results("figure_weight_evolution")) if panel.cells[0]["row"] == row
    ]
    found = []
    for panel in panels:
        _, *weights = (values[-1].mean() for values in panel.by_period().values())  # without the client's own
        found.append(all(near > far for near, far in pairwise(weights)))
    return count_columns(found)


def judge_layers(columns: Iterable[dict[str, Row]], row: str) -> str:
    """Return in how many columns the self-weights of convolutions are below those of the fully connected layers."""
    found, means = [], []
    for rows in columns:
        kept = [cell["self_weights"] for cell in rows[row].results if "self_weights" in cell]
        if kept:
            last = {
                name: statistics.mean(one["values"][-1][at] for one in kept)
                for at, name in enumerate(kept[0]["layers"])
            }
            shallow, deep = (
                statistics.mean(weight for name, weight in last.items() if name.startswith(kind))
                for kind in ("conv", "fc")
            )
            found.append(shallow < deep)
            means.append((shallow, deep))
    shown = "; self-weights " + ", ".join(
        f"{shallow:.2f} < {deep:.2f}" if shallow < deep else f"{shallow:.2f} > {deep:.2f}" for shallow, deep in means
    )
    return count_columns(found) + shown * bool(found)


def judge_neighbours(prefix: str) -> str:
    found = []
    for rows in collect_rows(read_results("effect_of_neighbours")).values():
        scores = {
            row: max(entry.scores.values())
            for row, entry in rows.items()
            if row.startswith(f"{prefix}K") and entry.scores
        }
        if len(scores) == 5:
            found.append(max(scores, key=scores.__getitem__) in (f"{prefix}K = 5", f"{prefix}K = 7"))
    return count_columns(found)


def count_columns(holds: list[bool]) -> str:
    if not holds:
        return "not run"
    word = "yes" if all(holds) else "partly" if any(holds) else "no"
    return f"{word}: {sum(holds)} of {len(holds)} columns"


def judge(pairs: list[tuple[Row, Row]], more_than: float = 0.0) -> str:
    """Return yes, no or partly: in how many columns the difference of two rows is more than so many points."""
    found = [compare(ours.headline_scores, theirs.headline_scores) for ours, theirs in pairs]
    gaps = [100 * one.mean for one in found if one is not None]
    shown = f", {min(gaps):+.1f} to {max(gaps):+.1f} points".replace("-", "−") if gaps else ""
    return count_columns([gap > more_than for gap in gaps]) + shown


def tuning_table() -> str:
    """A row per trial, a column per partition and learning rate: accuracy, and the self-weights of the layers."""
    return trials_table(
        "tuning.jsonl", lambda one: one["partition"] + (f", learning rate {one['lr']:g}" if "lr" in one else "")
    )


def rule_table() -> str:
    return trials_table("rule.jsonl", lambda one: f"{one['dataset']}, {one['partition']}")


def trials_table(name: str, label: Callable[[dict[str, Any]], str]) -> str:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in read_lines(name):
        found.setdefault(line["trial"], {})[label(line)] = line
    settings = list(dict.fromkeys(setting for trial in found.values() for setting in trial))
    lines = [["", *settings]]
    for trial, by_setting in found.items():
        lines.append([f"`{trial}`", *(show_trial(by_setting.get(setting)) for setting in settings)])
    return markdown_table(lines)


def show_trial(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if "failed" in line:
        return "diverged"
    weights = " ".join(f"{weight:.2f}" for weight in line.get("self_weights", {}).values())
    return f"{100 * line['accuracy']:.1f}" + (f"; {weights}" if weights else "")


JOINING_ROWS = {  # label -> key in joining.jsonl, local epochs of the unseen client
    "Local": ("local", 50),
    "FedAvg": ("fedavg", 0),
    "FedAvg + fine-tuning": ("fedavg-ft 5", 5),
    "FedAvg, fine-tuned for the whole budget": ("fedavg-ft 50", 50),
    "pFedLA held-out, before training": ("pfedla-heldout before", 0),
    "pFedLA held-out, joined": ("pfedla-heldout after", 50),
    "pFedLA held-out, after its last local training": ("pfedla-heldout after_training", 50),
}


def joining_table() -> str:
    """By setting: mean accuracy of the unseen clients ± standard error over seeds."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for line in read_lines("joining.jsonl"):
        settings.setdefault(f"{line['dataset']}, `{line['partition']}`", []).append(line)
    lines = [["", *settings, "local epochs of the unseen client"], *([row] for row in JOINING_ROWS)]
    seen = ["*seen clients: FedAvg, pFedLA held-out*"]
    for some in settings.values():
        for line in lines[1:]:
            key, _ = JOINING_ROWS[line[0]]
            line.append(show_mean([100 * statistics.mean(one["accuracy"][key]) for one in some], Metric()))
        methods = ("fedavg", "pfedla-heldout")
        means = [100 * statistics.mean(line["took_part"][name] for line in some) for name in methods]
        seen.append(", ".join(f"{mean:.1f}" for mean in means))
    for line in lines[1:]:
        line.append(str(JOINING_ROWS[line[0]][1]))
    return markdown_table([*lines, [*seen, ""]])


def round_table() -> str:
    import bench_round

    report, parts = read_json(HERE / "results" / "round.json"), []
    for dataset, result in report["results"].items():
        body = [bench_round.cells(name, row) for name, row in bench_round.rows(result).items()]
        table = markdown_table([list(bench_round.COLUMNS), *body])
        parts.append(f"**{dataset}**\n\n{table}\n\n{bench_round.caption(result)}.")
    peers = markdown_table([bench_round.peer_columns(report), *bench_round.peer_rows(report)])
    return "\n\n".join([*parts, f"{peers}\n\n{bench_round.peers()['note']}"])


def phases_table() -> str:
    import bench_phases

    runs = read_json(HERE / "results" / "phases.json")["runs"]
    return markdown_table([bench_phases.columns(), *(bench_phases.cells(name, found) for name, found in runs.items())])


def choice_table() -> str:
    import bench_choice

    results = read_json(HERE / "results" / "choice.json")["results"]
    return markdown_table([bench_choice.COLUMNS, *(bench_choice.cells(found) for found in results)])


def server_table() -> str:
    report = read_json(HERE / "results" / "server.json")
    sizes = (10, 100, 500, 1_000, 10_000)
    cells: dict[str, dict[int, str]] = {}
    for one in report["steps"]:
        median = 1e3 * statistics.median(one["seconds"])
        cells.setdefault(one["label"], {})[one["clients"]] = f"{median:,.0f} / {one['peak_bytes'] / 2**30:.2f}"
    header = ["median ms / peak GiB", *(f"N = {size:,}" for size in sizes)]
    body = [[label, *(found.get(size, "") for size in sizes)] for label, found in cells.items()]
    whole = report["simulation"]
    return (
        f"{markdown_table([header, *body])}\n\nA whole simulation of {whole['rounds']} rounds, 10 of "
        f'{whole["clients"]:,} clients with the paper\'s CNN, `hypernetwork = "compact"`, `neighbours = 5`, '
        "all personal models evaluated and kept: "
        f"{whole['seconds']:.0f} s, {whole['peak_bytes'] / 2**30:.2f} GiB at its peak."
    )


def attack_tables(name: str) -> str:
    """What the attacks of benchmarks/privacy found, a table per data set."""
    sys.path.append(str(HERE / "privacy"))  # its scripts import each other
    import report

    return str(report.TABLES[name](read_lines(f"{name}.jsonl")))


def sites_tables() -> str:
    """A table per data set: every site against training alone."""
    parts = []
    for column, rows in known_columns(read_results("sites")).items():
        parts.append(f"### {column}\n\n{markdown_table(tabulate_sites(rows))}")
    return "\n\n".join([*parts, SITES_NOTE])


def attacks_tables() -> str:
    """A table per data set: what honest clients keep, with a fifth of the clients attacking."""
    summary, parts = read_results("attacks"), []
    for data, attacks in collect_attacks(summary).items():
        lines = tabulate_attacks(attacks, summary["rows"], DRAWN)
        parts.append(f"**{data}**: {describe_data(attacks)}\n\n{markdown_table(lines)}")
    return "\n\n".join([*parts, NOTE])


TABLES: dict[str, Callable[[], str]] = {
    "attacks": attacks_tables,
    "sites": sites_tables,
    "tables": readme_table,
    "choosing": choosing_table,
    "standing": standing_table,
    "claims": claims_table,
    "tuning": tuning_table,
    "rule": rule_table,
    "joining": joining_table,
    "round": round_table,
    "phases": phases_table,
    "choice": choice_table,
    "server": server_table,
    "inversion": partial(attack_tables, "inversion"),
    "membership": partial(attack_tables, "membership"),
}


def result_table(page: Path) -> str:
    """The table and the figures of an experiment, for its README."""
    name = page.parent.name
    folder = ROOT / "results" / name
    if not (folder / "table.md").exists():
        return "Not run yet."
    parts = [(folder / "table.md").read_text(encoding="utf-8").strip()]
    pictures = {"figure": name, "self_weights": "Self-weights over the rounds"}
    parts += [
        f"![{text}](../../results/{name}/{file}.png)"
        for file, text in pictures.items()
        if (folder / f"{file}.png").exists()
    ]
    return "\n\n".join(parts)


def fill(page: Path) -> str:
    """Return a page with all of its tables written anew."""

    def replace(found: re.Match[str]) -> str:
        table = result_table(page) if found["name"] == "result" else TABLES[found["name"]]()
        return f"{found[1]}\n{table}\n\n{found[3]}"

    return MARK.sub(replace, page.read_text(encoding="utf-8"))


def list_pages() -> list[Path]:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").glob("*/README.md")]
    return [page for page in pages if MARK.search(page.read_text(encoding="utf-8"))]


def main() -> None:
    for page in list_pages():
        page.write_text(fill(page), encoding="utf-8")


if __name__ == "__main__":
    main()
