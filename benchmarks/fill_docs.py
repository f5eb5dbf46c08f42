"""Put the tables of benchmarks/results/*.json into docs/performance.md, between their marks: no number is typed.

python benchmarks/fill_docs.py
"""

import json
import re
from pathlib import Path
from typing import Any

import bench_choice
import bench_phases
import bench_round

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"


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


def filled(text: str, mark: str, content: str) -> str:
    pattern = rf"(<!-- {mark} -->\n).*?(<!-- /{mark} -->)"
    text, count = re.subn(pattern, lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text, flags=re.S)
    assert count == 1, f"{PAGE} has no {mark}"
    return text


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for mark, make in (("round", round_tables), ("phases", phases_table), ("choice", choice_table)):
        report = HERE / "results" / f"{mark}.json"
        if report.exists():
            text = filled(text, mark, make(json.loads(report.read_text(encoding="utf-8"))))
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
