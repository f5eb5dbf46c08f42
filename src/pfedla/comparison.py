"""Several algorithms on the same federation and seeds, in one table."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedla.algorithms import ALGORITHMS, find, options_model
from pfedla.communication import MIB
from pfedla.data import datasets
from pfedla.errors import NotApplicableError, PfedlaError
from pfedla.experiment import Experiment, build, overlay
from pfedla.report.figures import draw_comparison
from pfedla.results import RunFolder, numbered, run_built
from pfedla.rounds import Round

COLUMNS = ("personal model %", "after training %", "worst client %", "down MiB", "up MiB", "seconds")


@dataclass(frozen=True)
class Row:
    """One algorithm's results over the seeds; none, and the reason, if it does not apply."""

    algorithm: str
    results: list[dict[str, Any]]
    reason: str = ""

    def cells(self) -> list[str]:
        if not self.results:
            return ["–"] * len(COLUMNS)
        return [
            _spread([_percent(result["accuracy"]["mean"]) for result in self.results]),
            _spread([_percent(result["accuracy_after_training"]["mean"]) for result in self.results]),
            _spread([_percent(result["accuracy"]["worst"]) for result in self.results]),
            f"{statistics.mean(result['traffic']['down_bytes'] for result in self.results) / MIB:.2f}",
            f"{statistics.mean(result['traffic']['up_bytes'] for result in self.results) / MIB:.2f}",
            f"{statistics.mean(result['seconds']['total'] for result in self.results):.1f}",
        ]


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def _spread(values: list[float | None]) -> str:
    """Mean over the seeds, with their standard deviation if there are several."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):.1f}"
    return f"{mean} ± {statistics.stdev(known):.1f}" if len(known) > 1 else mean


@dataclass(frozen=True)
class Comparison:
    folder: Path
    rows: list[Row]
    picture: Path | None

    def markdown(self) -> str:
        lines = [["algorithm", *COLUMNS], ["---", *["---:"] * len(COLUMNS)]]
        lines += [[row.algorithm, *row.cells()] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plan(values: Mapping[str, Any], names: list[str], seeds: list[int]) -> Iterator[tuple[str, int, Experiment]]:
    """One experiment per algorithm and seed. [algorithm] options go to the methods that have them, [pfedla] to pfedla."""
    common = {key: value for key, value in values.items() if key not in (*ALGORITHMS, "algorithm")}
    shared = {key: value for key, value in values.get("algorithm", {}).items() if key != "name"}
    having = {name: set(options_model(find(name)).model_fields) for name in names}
    if lost := set(shared) - set().union(*having.values()):
        raise PfedlaError(f"none of {', '.join(names)} has an option {', '.join(sorted(lost))}")
    if stray := [name for name in ALGORITHMS if name in values and name not in names]:
        raise PfedlaError(f"options for {', '.join(stray)}, which is not among the compared: {', '.join(names)}")
    for name in names:
        options = {key: value for key, value in shared.items() if key in having[name]} | dict(values.get(name, {}))
        for seed in seeds:
            yield name, seed, Experiment.parse(overlay(common, {"seed": seed, "algorithm": {"name": name, **options}}))


def compare(
    values: Mapping[str, Any], names: list[str], seeds: list[int], out: Path | None = None,
    on_start: Callable[[str, int], None] | None = None, on_round: Callable[[Round], None] | None = None,
) -> Comparison:  # fmt: skip
    """Run every algorithm on every seed. All are checked before the first one runs."""
    planned = list(plan(values, names, seeds))
    dataset = datasets.load(planned[0][2].data.dataset)
    reasons: dict[str, str] = {}
    for name, _, experiment in planned:
        try:
            resolved = build(experiment, dataset).experiment
        except NotApplicableError as error:
            reasons[name] = str(error)
    if len(reasons) == len(set(names)):
        raise PfedlaError(next(iter(reasons.values())))
    root = RunFolder(out or numbered(Path("runs") / f"compare-{dataset.name}-{resolved.data.partition}")).path
    rows = {name: Row(name, [], reasons.get(name, "")) for name in names}
    folders: dict[str, list[Path]] = {}
    for name, seed, experiment in planned:
        if name in reasons:
            continue
        if on_start is not None:
            on_start(name, seed)
        folder = RunFolder(root / f"{name}-s{seed}")
        rows[name].results.append(run_built(build(experiment, dataset), folder, on_round))
        folders.setdefault(name, []).append(folder.path)
    comparison = Comparison(root, list(rows.values()), draw_comparison(folders, root / "learning_curves.png"))
    (root / "comparison.md").write_text(comparison.markdown(), encoding="utf-8")
    content = {row.algorithm: row.results or {"not_applicable": row.reason} for row in comparison.rows}
    (root / "comparison.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return comparison
