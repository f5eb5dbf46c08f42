"""Which runs belong in one table: their federations and budgets agree, and methods meet on the same seeds."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pfedla.report import reading
from pfedla.report.methods import MethodTable
from pfedla.report.reading import Values, flatten
from pfedla.report.rows import Row

METHOD = ("algorithm", "training")  # what may differ between rows
FREE = {"seed", "checkpoint", "engine", "tuned_trials", *METHOD}  # what may differ between runs


@dataclass
class Group:
    """Runs of one setting, by method and seed."""

    setting: str
    prints: dict[int, str] = field(default_factory=dict)  # fingerprint of the federation by seed
    rows: dict[str, Row] = field(default_factory=dict)  # by the method's settings

    def add(self, method: str, run: Path, result: Values) -> bool:
        """Add a run, unless the seed has another federation here, or the method has this seed."""
        seed, row = result["seed"], self.rows.get(method, Row(result["algorithm"]))
        # Where a server does not know the fingerprint, the federation equals no other.
        fingerprint = reading.read_federation(run).get("fingerprint") or str(run)
        if self.prints.get(seed, fingerprint) != fingerprint or any(one["seed"] == seed for one in row.results):
            return False
        self.rows[method], self.prints[seed] = row, fingerprint
        row.results.append(result)
        row.folders.append(run)
        return True


def group_runs(runs: Sequence[Path]) -> list[MethodTable]:
    """Return a table of methods for each setting of the finished runs."""
    groups: list[Group] = []
    for run in runs:
        if not (run / "result.json").exists():
            continue
        experiment, result = reading.read_experiment(run), reading.read_result(run / "result.json")
        data = {key: value for key, value in experiment["data"].items() if key != "samples_per_client"}
        budget = {key: value for key, value in experiment["training"].items() if key != "lr"}
        common = {key: value for key, value in experiment.items() if key not in FREE}
        common |= {"data": data, "training": budget}
        shape = [result["task"], len(result["score"]["per_client"])]
        setting = json.dumps([common, shape], sort_keys=True, default=str)
        method = json.dumps({key: experiment.get(key) for key in METHOD}, sort_keys=True, default=str)
        fitting = (group for group in groups if group.setting == setting and group.add(method, run, result))
        if next(fitting, None) is None:
            groups.append(Group(setting))
            groups[-1].add(method, run, result)
    for group in groups:
        name_rows(group.rows)
    return [MethodTable(list(group.rows.values())) for group in groups]


def name_rows(rows: dict[str, Row]) -> None:
    """Tell rows of the same algorithm apart by the settings in which they differ."""
    settings = {method: flatten(json.loads(method)) for method in rows}
    names = {method: row.algorithm for method, row in rows.items()}
    for method, row in rows.items():
        same = [settings[other] for other in rows if names[other] == names[method]]
        keys = [key for key in sorted(set().union(*same)) if len({str(one.get(key)) for one in same}) > 1]
        words = [f"{key.partition('.')[2]} {settings[method].get(key, '–')}" for key in keys]
        row.algorithm += f" ({', '.join(words)})" if words else ""
