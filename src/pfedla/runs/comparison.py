"""Several algorithms on the same federation and seeds, in one table."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pfedla.algorithms import ALGORITHMS, default_options
from pfedla.core.errors import GaveUpError, NotApplicableError, PfedlaError, shown
from pfedla.core.files import safe_name, write_text
from pfedla.data import datasets
from pfedla.data.dataset import Dataset
from pfedla.report.figures import draw_comparison
from pfedla.report.tables import Row, comparison_markdown
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment, overlay
from pfedla.runs.folder import EXPERIMENT, RUNS, RunFolder, new_folder, number_folder
from pfedla.runs.progress import Display
from pfedla.runs.run import Run


class ComparisonPlan(NamedTuple):
    """The runs of a comparison. All have been built once, so none can be refused any more."""

    dataset: Dataset
    experiments: list[Experiment]  # of the methods that apply, one per algorithm and seed
    reasons: dict[str, str]  # per algorithm why it does not apply; empty if it does
    folder: Path

    @property
    def total_rounds(self) -> int:
        return sum(experiment.rounds for experiment in self.experiments)


def plan_comparison(
    values: Mapping[str, Any], names: list[str], seeds: list[int], out: Path | None = None, *, resume: bool = False
) -> ComparisonPlan:
    """Make one experiment per algorithm and seed. [algorithm] is for all that have its options, [pfedla] for pfedla."""
    sections = {key: values.get(key, {}) for key in ("algorithm", *ALGORITHMS)}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise PfedlaError(f"{key} = {shown(section)}: [{key}] is a section")
    if unused := set(sections["algorithm"]).difference(*map(default_options, names)):
        raise PfedlaError(f"none of {', '.join(names)} has an option {', '.join(sorted(unused))}")
    if stray := [name for name in ALGORITHMS if sections[name] and name not in names]:
        raise PfedlaError(f"options for {', '.join(stray)}, which is not compared: {', '.join(names)}")
    common = {key: value for key, value in values.items() if key not in sections}
    experiments, reasons = [], dict.fromkeys(names, "")
    dataset, partition = None, ""
    for name, seed in itertools.product(names, seeds):
        options = {key: value for key, value in sections["algorithm"].items() if key in default_options(name)}
        own = {"seed": seed, "algorithm": {"name": name, **options, **sections[name]}}
        experiment = Experiment.parse(overlay(common, own))
        dataset = dataset or datasets.load(experiment.data.dataset)
        try:
            partition = build(experiment, dataset).experiment.data.split_name  # not kept: all take too much memory
            experiments.append(experiment)
        except NotApplicableError as error:
            reasons[name] = str(error)
    if dataset is None or not experiments:
        raise PfedlaError(next(iter(reasons.values()), "give at least one algorithm and one seed"))
    folder = out or number_folder(RUNS / f"compare-{safe_name(dataset.name)}-{partition}", resume=resume)
    return ComparisonPlan(dataset=dataset, experiments=experiments, reasons=reasons, folder=folder)


def compare(plan: ComparisonPlan, display: Display | None = None, *, resume: bool = False, **options: Any) -> list[Row]:
    """Run or resume every algorithm on every seed; leave their runs, a table and a picture. `options` as in `Run`."""
    root, display = plan.folder, display or Display(plan.total_rounds, quiet=True)
    if not (resume and root.is_dir()):
        new_folder(root)
    elif any(root.iterdir()) and not any(root.glob(f"*/{EXPERIMENT}")):
        raise PfedlaError(f"{root} is not a comparison: it holds no runs; choose another folder with --out")
    rows = {name: Row(name, not_applicable=reason) for name, reason in plan.reasons.items()}
    for experiment in plan.experiments:
        row, seed = rows[experiment.algorithm.name], experiment.seed
        display.begin(row.algorithm, seed)
        folder = RunFolder(root / f"{row.algorithm}-s{seed}", resume=resume)
        try:
            row.results.append(Run(build(experiment, plan.dataset), folder, display=display, **options).complete())
            row.folders.append(folder.path)
        except GaveUpError as error:  # the others are worth having all the same
            display.say(str(error))
            row.gave_up[seed] = str(error)
    found = list(rows.values())
    if not any(row.results for row in found):
        raise GaveUpError(next(reason for row in found for reason in row.gave_up.values()))
    draw_comparison(found, root / "learning_curves.png")
    write_text(root / "comparison.md", comparison_markdown(found))
    write_text(root / "comparison.json", json.dumps({row.algorithm: row.content for row in found}, indent=2) + "\n")
    return found
