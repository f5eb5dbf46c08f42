"""Several algorithms on the same federation and seeds, in one table."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfedla.algorithms import ALGORITHMS, find, options_model
from pfedla.runs.progress import Reporter
from pfedla.data import datasets
from pfedla.data.own import Dataset
from pfedla.core.errors import GaveUpError, NotApplicableError, PfedlaError, shown
from pfedla.runs.experiment import Experiment, build
from pfedla.core.files import safe_name, write_text
from pfedla.runs.overrides import overlay
from pfedla.report.figures import draw_comparison
from pfedla.report.tables import Row, comparison_markdown
from pfedla.runs.result import RUNS, last_numbered, numbered, run_built
from pfedla.runs.folder import EXPERIMENT, RunFolder, new_folder


@dataclass(frozen=True)
class Plan:
    """What a comparison will run. All of it has been built once, so nothing in it can be refused any more."""

    dataset: Dataset
    experiments: list[Experiment]  # of the methods that apply, one per algorithm and seed
    reasons: dict[str, str]  # per algorithm why it does not apply; empty if it does
    folder: Path

    @property
    def total_rounds(self) -> int:
        return sum(experiment.rounds for experiment in self.experiments)


def plan(
    values: Mapping[str, Any], names: list[str], seeds: list[int], out: Path | None = None, *, resume: bool = False
) -> Plan:
    """One experiment per algorithm and seed. Options in [algorithm] go to the methods that have them, in [pfedla] to pfedla.

    Without `out` the folder is a new one, or with `resume` the last there is.
    """
    sections = {key: values.get(key, {}) for key in ("algorithm", *ALGORITHMS)}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise PfedlaError(f"{key} = {shown(section)} is not possible: [{key}] is a section")
    having = {name: set(options_model(find(name)).model_fields) for name in names}
    if lost := set(sections["algorithm"]) - set().union(*having.values()):
        raise PfedlaError(f"none of {', '.join(names)} has an option {', '.join(sorted(lost))}")
    if stray := [name for name in ALGORITHMS if sections[name] and name not in names]:
        raise PfedlaError(f"options for {', '.join(stray)}, which is not among the compared: {', '.join(names)}")
    common = {key: value for key, value in values.items() if key not in sections}
    experiments, reasons = [], dict.fromkeys(names, "")
    dataset, partition = None, ""
    for name in names:
        shared = {key: value for key, value in sections["algorithm"].items() if key in having[name]}
        for seed in seeds:
            own = {"seed": seed, "algorithm": {"name": name, **shared, **sections[name]}}
            experiment = Experiment.parse(overlay(common, own))
            dataset = dataset or datasets.load(experiment.data.dataset)
            try:
                partition = build(experiment, dataset).experiment.data.split_name
            except NotApplicableError as error:
                reasons[name] = str(error)
            else:
                experiments.append(experiment)
    if dataset is None or not experiments:
        raise PfedlaError(next(iter(reasons.values()), "give at least one algorithm and one seed"))
    named = RUNS / f"compare-{safe_name(dataset.name)}-{partition}"
    return Plan(dataset, experiments, reasons, out or (last_numbered(named) if resume else numbered(named)))


def compare(
    planned: Plan, reporter: Reporter | None = None, *, resume: bool = False, stopping: Callable[[], bool] = lambda: False,
    track: Sequence[str] = (),
) -> list[Row]:  # fmt: skip
    """Run every algorithm on every seed; leaves a folder with their runs, one table and one picture.

    With `resume`, runs that are finished in the folder are taken as they are and one that is not goes on.
    """
    reporter = reporter or Reporter(planned.total_rounds, quiet=True)
    root = planned.folder
    if not (resume and root.is_dir()):
        new_folder(root)
    elif any(root.iterdir()) and not any(root.glob(f"*/{EXPERIMENT}")):
        raise PfedlaError(f"{root} is no comparison: it holds no runs; choose another folder with --out")
    rows = {name: Row(name, [], reason) for name, reason in planned.reasons.items()}
    folders: dict[str, list[Path]] = {}
    for experiment in planned.experiments:
        name, seed = experiment.algorithm.name, experiment.seed
        reporter.begin(name, seed)
        folder = RunFolder(root / f"{name}-s{seed}", resume=resume)
        folder.stopping = stopping
        try:
            rows[name].results.append(run_built(build(experiment, planned.dataset), folder, reporter, track=track))
        except GaveUpError as error:  # the others are worth having all the same
            reporter.say(str(error))
            rows[name].reason = f"seed {seed}: {error}"
            rows[name].gave_up = True
        else:
            folders.setdefault(name, []).append(folder.path)
    if not folders:
        raise PfedlaError(next(row.reason for row in rows.values() if row.gave_up))
    draw_comparison(folders, root / "learning_curves.png")
    write_text(root / "comparison.md", comparison_markdown(list(rows.values())))
    content = {
        row.algorithm: row.results or {"gave_up" if row.gave_up else "not_applicable": row.reason} for row in rows.values()
    }
    write_text(root / "comparison.json", json.dumps(content, indent=2) + "\n")
    return list(rows.values())
