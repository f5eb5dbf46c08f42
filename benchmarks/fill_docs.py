"""Put the tables of benchmarks/results and results into the documents, between their marks: no number is typed.

python benchmarks/fill_docs.py
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import bench_choice
import bench_phases
import bench_round
from pfedla.reproduction.paper_tables import Entry, best, compared, entries, repeated, shown

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGE = ROOT / "docs" / "performance.md"
RULE_PAGE = ROOT / "docs" / "algorithms" / "pfedla.md"
README_COLUMNS = {
    f"{data}, {split}": (table, data)
    for data in ("Fashion-MNIST", "CIFAR-10")
    for table, split in (("table1", "four classes each"), ("table2", "two prevail"))
}
README_ROWS = ("Local", "FedAvg", "FedRep", "pFedLA", "HeurpFedLA")
TUNING_PAGE = ROOT / "docs" / "reproduction.md"
JOINING_PAGE = ROOT / "docs" / "joining.md"
CHOOSING_PAGE = ROOT / "docs" / "choosing.md"
CHOOSING = {"table1": "few classes each", "table2": "some prevail"}
OURS = ("pFedLA", "HeurpFedLA")
TRAFFIC_OF = "Fashion-MNIST, 10 clients, some prevail"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def round_tables(report: dict[str, Any]) -> str:
    parts = []
    for dataset, result in report["results"].items():
        body = [bench_round.cells(name, row) for name, row in bench_round.rows(result).items()]
        parts.append(f"**{dataset}**\n\n{table(list(bench_round.COLUMNS), body)}\n\n{bench_round.caption(result)}.")
    parts.append(f"{table(bench_round.peer_columns(report), bench_round.peer_rows(report))}\n\n{bench_round.peers()['note']}")
    return "\n\n".join(parts)


def phases_table(report: dict[str, Any]) -> str:
    return table(bench_phases.columns(), [bench_phases.cells(name, found) for name, found in report["runs"].items()])


def choice_table(report: dict[str, Any]) -> str:
    return table(bench_choice.COLUMNS, [bench_choice.cells(found) for found in report["results"]])


def server_table(report: dict[str, Any]) -> str:
    sizes = (10, 100, 500, 1_000, 10_000)
    cells: dict[str, dict[int, str]] = {}
    for one in report["steps"]:
        median = 1e3 * statistics.median(one["seconds"])
        cell = f"{median:,.0f} / {one['peak_bytes'] / 2**30:.2f}"
        cells.setdefault(one["label"], {})[one["clients"]] = cell
    header = ["median ms / peak GiB", *(f"N = {size:,}" for size in sizes)]
    body = table(header, [[label, *(found.get(size, "") for size in sizes)] for label, found in cells.items()])
    whole = report["simulation"]
    return (
        f"{body}\n\nA whole simulation of {whole['rounds']} rounds, 10 of {whole['clients']:,} clients with the paper's CNN, "
        f'`hypernetwork = "compact"`, `neighbours = 5`, all personal models evaluated and kept: {whole["seconds"]:.0f} s, '
        f"{whole['peak_bytes'] / 2**30:.2f} GiB at its peak."
    )


def trials_table(lines: list[dict[str, Any]]) -> str:
    """A row per trial, a column per setting; of several seeds the mean."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    settings: list[str] = []
    for line in lines:
        where = f"{line['dataset']}, {line['partition']}: {line['rounds']} rounds, {line['local_epochs']} local epochs"
        where += f", learning rate {line['lr']:g}" if "lr" in line else ""
        settings.append(where)
        found.setdefault(line["trial"], {}).setdefault(where, []).append(line)
    settings = list(dict.fromkeys(settings))
    header = ["", *settings]
    rows = []
    for trial, columns in found.items():
        cells = [f"`{trial}`"]
        for where in settings:
            some = columns.get(where, [])
            if not some:
                cells.append("")
                continue
            if any("failed" in line for line in some):
                cells.append("diverged")
                continue
            own = zip(*(line.get("self_weights", {}).values() for line in some), strict=True)
            weights = " ".join(f"{statistics.mean(layer):.2f}" for layer in own)
            seeds = f" ({len(some)} seeds)" if len(some) > 1 else ""
            accuracy = 100 * statistics.mean(line["accuracy"] for line in some)
            cells.append(f"{accuracy:.1f}{seeds}" + (f"; {weights}" if weights else ""))
        rows.append(cells)
    return table(header, rows)


def results(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "results" / name / "results.json").read_text(encoding="utf-8"))
    return content


def readme_table() -> str:
    """Of Tables 1 and 2, what the README shows: seed 0, ten clients."""
    shown: dict[str, list[str]] = {row: [] for row in README_ROWS}
    for name, data in README_COLUMNS.values():
        cells = results(name)["cells"]
        found = {cell["row"]: cell for cell in cells if (cell["column"], cell["seed"]) == (f"{data}, 10 clients", 0)}
        for row in README_ROWS:
            accuracy, traffic = found[row]["accuracy"], found[row]["traffic"]
            down, up = (f"{traffic[way] / 2**20:.0f}" for way in ("down_bytes", "up_bytes"))
            shown[row].append(f"{100 * accuracy['mean']:.1f} (worst {100 * accuracy['worst']:.1f}; {down} / {up})")
    return table(["", *README_COLUMNS], [[row, *cells] for row, cells in shown.items()])


def choosing_table() -> str:
    """Tables 1 and 2 in one, without the paper's numbers, and the traffic of one column; of the seeds that all have."""
    header, shown, traffic = [""], dict[str, list[str]](), dict[str, str]()
    for name, split in CHOOSING.items():
        summary = results(name)
        played = [cell for cell in compared(summary)["cells"] if "accuracy" in cell]  # else the method does not fit the model
        for column in (column for column in summary["columns"] if any(cell["column"] == column for cell in played)):
            header.append(f"{column}, {split}")
            for row in summary["rows"]:
                some = [cell for cell in played if (cell["row"], cell["column"]) == (row, column)]
                shown.setdefault(row, []).append("{:.1f} ({:.1f})".format(*means(some, "accuracy", 1e2)) if some else "–")
                if header[-1] == TRAFFIC_OF:
                    traffic[row] = "{:.0f} / {:.0f}".format(*means(some, "traffic", 2**-20)) if some else "–"
    return table([*header, f"MiB down / up, {TRAFFIC_OF}"], [[row, *cells, traffic[row]] for row, cells in shown.items()])


def verdict(first: Entry, ours: Entry) -> str:
    """Whether ours is first, or within one standard deviation (over seeds, of the first) of it."""
    behind = (first.mean or 0) - (ours.mean or 0)
    if behind <= 0:
        return "first"
    if first.std is None:
        return f"{behind:.1f} behind; no deviation from one seed"
    return f"{behind:.1f} behind, " + ("within" if behind <= first.std else "more than") + " one deviation"


def standings() -> dict[tuple[str, str], tuple[str, Entry, str, Entry]]:
    """By table and column: the first and its entry, the better of ours and its entry; of the rows with most seeds."""
    found = {}
    for name in CHOOSING:
        summary = results(name)
        for column, rows in (entries(compared(summary)) | entries(repeated(summary))).items():
            own = {row: rows[row].mean or 0 for row in OURS if row in rows}
            first, ours = best(rows), max(own, key=own.__getitem__)
            if first is not None:
                found[name, column] = (first, rows[first], ours, rows[ours])
    return found


def standing_table() -> str:
    rows = []
    for (name, column), (first, highest, ours, entry) in standings().items():
        there = [f"{first} {shown(highest)}", f"{ours} {shown(entry)}", str(len(highest.seeds)), verdict(highest, entry)]
        rows.append([f"{column}, {CHOOSING[name]}", *there])
    return table(["", "first", "the better of pFedLA and HeurpFedLA", "seeds", "stands"], rows)


def means(cells: list[dict[str, Any]], what: str, unit: float) -> list[float]:
    """The mean and worst accuracy, or the bytes down and up, over seeds."""
    keys = {"accuracy": ("mean", "worst"), "traffic": ("down_bytes", "up_bytes")}[what]
    return [unit * statistics.mean(cell[what][key] for cell in cells) for key in keys]


JOINING_ROWS = {  # what the page says, of what is in joining.jsonl
    "Local": ("local", 50), "FedAvg": ("fedavg", 0), "FedAvg + fine-tuning": ("fedavg-ft 5", 5),
    "FedAvg, fine-tuned for the whole budget": ("fedavg-ft 50", 50), "pFedLA, as it joins": ("pfedla before", 0),
    "pFedLA, joined": ("pfedla after", 50), "pFedLA, after its last local training": ("pfedla after_training", 50),
}  # fmt: skip


def joining_table(lines: list[dict[str, Any]]) -> str:
    """Newcomers by setting: the mean over seeds of the mean of a seed's newcomers, ± over seeds; the best in bold."""
    settings: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        settings.setdefault(f"{line['dataset']}, `{line['partition']}`", []).append(line)
    means = {
        row: [[100 * statistics.mean(line["accuracy"][key]) for line in some] for some in settings.values()]
        for row, (key, _) in JOINING_ROWS.items()
    }
    best = [max(statistics.mean(of[column]) for of in means.values()) for column in range(len(settings))]
    rows = []
    for row, of in means.items():
        cells = [row]
        for seeds, highest in zip(of, best, strict=True):
            mean = f"{statistics.mean(seeds):.1f}"
            mean = f"**{mean}**" if statistics.mean(seeds) == highest else mean
            cells.append(f"{mean} ± {statistics.stdev(seeds):.1f}")
        rows.append([*cells, str(JOINING_ROWS[row][1])])
    took_part = ["*those who took part: FedAvg, pFedLA*"]
    for some in settings.values():
        both = (100 * statistics.mean(line["took_part"][name] for line in some) for name in ("fedavg", "pfedla"))
        took_part.append(", ".join(f"{mean:.1f}" for mean in both))
    return table(["", *settings, "local epochs of the newcomer"], [*rows, [*took_part, ""]])


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "results" / name).read_text(encoding="utf-8").splitlines()]


def filled(page: Path, mark: str, content: str) -> None:
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    text = page.read_text(encoding="utf-8")
    text, count = re.subn(pattern, lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text, flags=re.S)
    assert count == 1, f"{page} has no {mark}"
    page.write_text(text, encoding="utf-8")


def main() -> None:
    for mark, make in (("round", round_tables), ("phases", phases_table), ("choice", choice_table), ("server", server_table)):
        report = HERE / "results" / f"{mark}.json"
        if report.exists():
            filled(PAGE, mark, make(json.loads(report.read_text(encoding="utf-8"))))
    for page, mark in ((RULE_PAGE, "validation"), (TUNING_PAGE, "tuning")):
        filled(page, mark, trials_table(read_lines(f"{mark}.jsonl")))
    filled(JOINING_PAGE, "joining", joining_table(read_lines("joining.jsonl")))
    filled(ROOT / "README.md", "tables", readme_table())
    filled(CHOOSING_PAGE, "choosing", choosing_table())
    filled(TUNING_PAGE, "standing", standing_table())
    for result in sorted((ROOT / "results").glob("*/table.md")):
        readme = ROOT / "experiments" / result.parent.name / "README.md"
        picture = f"![{result.parent.name}](../../results/{result.parent.name}/figure.png)"
        filled(readme, "result", f"{result.read_text(encoding='utf-8').strip()}\n\n{picture}")


if __name__ == "__main__":
    main()
