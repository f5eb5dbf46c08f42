"""Several algorithms on the same federation and seeds, in one table."""

import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from torch import nn

from pfedla.algorithms import ALGORITHMS, NamedClass, default_options, register, short_name
from pfedla.core.errors import GaveUpError, NotApplicableError, PfedlaError, shown, unknown
from pfedla.core.files import read_object, safe_name, write_text
from pfedla.data.federation import Federation
from pfedla.data.sources import load_data
from pfedla.report.figures import draw_comparison
from pfedla.report.methods import MethodTable
from pfedla.report.reading import read_result
from pfedla.report.rows import Row
from pfedla.report.significance import Analysis
from pfedla.runs.build import Built, build, build_around, check_federation
from pfedla.runs.experiment import FREE, Experiment, list_settings, nest, overlay, read_toml
from pfedla.runs.folder import EXPERIMENT, RESULT, RUNS, RunFolder, new_folder, number_folder
from pfedla.runs.progress import Display
from pfedla.runs.run import Run

PLAN = "comparison.toml"  # what the comparison was asked for; it can be resumed from its folder
CURVES = "learning_curves"
OF_ONE_METHOD = ("training", "tuned_trials")  # what the section of a method may hold beside its options


class ComparisonPlan(NamedTuple):
    """The runs of a comparison. All have been built once, so none can be refused any more."""

    build: Callable[[Experiment], Built]
    experiments: dict[tuple[str, int], Experiment]  # of the methods that apply, by label and seed
    reasons: dict[str, str]  # per label why the method does not apply; empty if it does
    folder: Path | None  # None: the results are returned only
    asked: dict[str, Any]  # what `PLAN` holds
    against: str  # the label that differences are to; empty: Local, else the first

    @property
    def total_rounds(self) -> int:
        return sum(experiment.rounds for experiment in self.experiments.values())


@dataclass(frozen=True, repr=False)
class Comparison:
    """The rows of a comparison in their order; `comparison["pfedla"]` is one. `print` shows the table."""

    rows: list[Row]
    folder: Path | None = None
    against: str = ""

    def __getitem__(self, name: str) -> Row:
        return {row.algorithm: row for row in self.rows}[name]

    def mean(self, name: str) -> float | None:
        """Return the mean score over clients and seeds."""
        found = self.analysis.summaries.get(name)
        return found.mean if found else None

    def error(self, name: str) -> float | None:
        """Return the standard error of the mean over seeds; None with one seed."""
        found = self.analysis.summaries.get(name)
        return found.se if found else None

    @cached_property
    def analysis(self) -> Analysis:
        """The statistics of the headline metric: means, differences with intervals and p-values, who is best."""
        return MethodTable(self.rows, self.against).analysis

    def table(self) -> str:
        """Return the table as Markdown."""
        return MethodTable(self.rows, self.against).to_markdown()

    __repr__ = table


def label_methods(names: Sequence[str]) -> dict[str, str]:
    """Return each method's label, of which no two are the same: its short name, else its whole name."""
    labels: dict[str, str] = {}
    for name in names:
        short = short_name(name)
        labels[name] = safe_name(name) if short in labels.values() else short
    return labels


def plan_comparison(
    values: Mapping[str, Any],
    names: Sequence[str],
    seeds: Sequence[int],
    out: Path | None = None,
    *,
    resume: bool = False,
    against: str = "",
    build_one: Callable[[Experiment], Built] | None = None,
    tuning: bool = False,
) -> ComparisonPlan:
    """Make one experiment per algorithm and seed. [algorithm] is for all that have its options, [pfedla] for pfedla.

    [pfedla] may also hold training settings of pfedla alone: [pfedla.training]. `against` is the method to which the
    others are compared: the label of one, or of one that is in the folder. `build_one` builds an experiment around data
    that are at hand; without it they are loaded, once for all. `tuning`: build on the validation federation.
    """
    labels = label_methods(names)
    against = labels.get(against, against)
    if against and against not in labels.values() and not (resume and out and any(out.glob(f"{against}-s*"))):
        raise unknown("method of this comparison (--against)", against, labels.values())
    sections = read_sections(values, labels)
    common = {key: value for key, value in values.items() if key not in sections}
    experiments, reasons, partition = dict[tuple[str, int], Experiment](), dict.fromkeys(labels.values(), ""), ""
    for (name, label), seed in itertools.product(labels.items(), seeds):
        options = {key: value for key, value in sections["algorithm"].items() if key in default_options(name)}
        own = {"name": name, **options, **sections.get(name, {}), **sections[label]}
        beside = {key: own.pop(key) for key in OF_ONE_METHOD if key in own}
        experiment = Experiment.parse(overlay(common, {"seed": seed, "algorithm": own, **beside}))
        if build_one is None:
            dataset = load_data(experiment.data, experiment.task)
            build_one = lambda one, dataset=dataset: build(one, dataset, validation=tuning)  # noqa: E731
        try:
            data = build_one(experiment).experiment.data  # the rest is not kept: all take too much memory
            partition = f"{safe_name(Path(data.dataset).stem)}-{data.split_name}"
            experiments[label, seed] = experiment
        except NotApplicableError as error:
            reasons[label] = str(error)
    if build_one is None or not experiments:
        raise PfedlaError(next(iter(reasons.values()), "give at least one algorithm and one seed"))
    asked = {**values, "methods": list(names), "seeds": list(seeds)}
    default = RUNS / f"{'tune' if tuning else 'compare'}-{partition}"
    folder = out or number_folder(default, resume=resume)
    return ComparisonPlan(build_one, experiments, reasons, folder, asked, against)


def read_sections(values: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the sections of options: [algorithm], and one per method under its label or its whole name."""
    names = ["algorithm", *ALGORITHMS, *labels, *labels.values(), *(key for key in values if ":" in key)]
    sections = {key: values.get(key, {}) for key in names}
    for key, section in sections.items():
        if not isinstance(section, Mapping):
            raise PfedlaError(f"{key} = {shown(section)}: [{key}] is a section")
    compared = ", ".join(labels.values())
    if unused := set(sections["algorithm"]).difference(*map(default_options, labels)):
        raise PfedlaError(f"none of {compared} has an option {', '.join(sorted(unused))}")
    if stray := [
        name for name, own in sections.items() if own and name not in ("algorithm", *labels, *labels.values())
    ]:
        raise PfedlaError(f"options for {', '.join(stray)}, which is not compared: {compared}")
    return sections


def run_comparison(
    plan: ComparisonPlan, display: Display | None = None, *, resume: bool = False, **options: Any
) -> list[Row]:
    """Run or resume every algorithm on every seed; leave their runs, a table and a picture. `options` as in `Run`."""
    root, display = plan.folder, display or Display(plan.total_rounds, quiet=True)
    if root is not None:
        open_folder(root, plan.asked, resume=resume)
    rows = {label: Row(label, not_applicable=reason) for label, reason in plan.reasons.items()}
    for (label, seed), experiment in plan.experiments.items():
        row = rows[label]
        display.begin(label, seed)
        folder = RunFolder(root / f"{label}-s{seed}", resume=resume) if root is not None else None
        try:
            row.results.append(Run(plan.build(experiment), folder, display=display, **options).complete())
            row.folders += [folder.path] if folder else []
        except GaveUpError as error:  # the others are worth having all the same
            display.say(str(error))
            row.gave_up[seed] = str(error)
    if not any(row.results for row in rows.values()):
        raise GaveUpError(next(reason for row in rows.values() for reason in row.gave_up.values()))
    if root is None:
        return list(rows.values())
    found = add_finished(root, rows, display.say) if resume else list(rows.values())
    write_comparison(MethodTable(found, plan.against), root)
    return found


def write_comparison(table: MethodTable, root: Path) -> None:
    """Write the table in all formats, its statistics and the learning curves."""
    draw_comparison(table, root / f"{CURVES}.png")
    content = {row.algorithm: row.content for row in table.rows}
    write_text(root / "comparison.json", json.dumps(content, indent=2) + "\n")
    write_text(root / "comparison.md", table.to_markdown(picture=f"{CURVES}.png"))
    write_text(root / "comparison.csv", table.to_csv())
    write_text(root / "comparison.tex", table.to_latex())
    write_text(root / "statistics.json", table.to_json())


def open_folder(root: Path, asked: dict[str, Any], *, resume: bool) -> None:
    """Make the folder of a comparison, or reopen it; keep what all its commands asked for."""
    if not (resume and root.is_dir()):
        new_folder(root)
    elif any(root.iterdir()) and not any(root.glob(f"*/{EXPERIMENT}")):
        raise PfedlaError(f"{root} is not a comparison: it holds no runs; choose another folder with --out")
    if (root / PLAN).exists():
        before = read_toml(root / PLAN)
        lists = {key: list(dict.fromkeys([*before.get(key, []), *asked[key]])) for key in ("methods", "seeds")}
        asked = overlay(before, asked) | lists
    write_text(root / PLAN, tomli_w.dumps(asked))


def add_finished(root: Path, rows: dict[str, Row], say: Callable[[str], None]) -> list[Row]:
    """Return the rows, and those of other finished runs in the folder with the same settings, in the old order."""
    done = {folder for row in rows.values() for folder in row.folders}
    sections = [one for one in read_toml(root / PLAN).values() if isinstance(one, Mapping)]
    own = {key for one in sections if isinstance(one.get("training"), Mapping) for key in one["training"]}
    settings = _comparable(min(done), own)
    for folder in sorted(path.parent for path in root.glob(f"*/{RESULT}")):
        label, result = folder.name.rpartition("-s")[0], read_result(folder / RESULT)
        if folder in done or result["seed"] in rows.get(label, Row(label)).gave_up:
            continue
        if _comparable(folder, own) != settings:
            say(f"{folder} is left out of the table: its settings are not those of the other runs")
            continue
        row = rows.setdefault(label, Row(label))
        row.results.append(result)
        row.folders.append(folder)
    try:
        before = list(read_object(root / "comparison.json"))
    except PfedlaError:  # it was stopped before it had a table
        before = []
    return [rows[label] for label in dict.fromkeys([*before, *rows]) if label in rows]


def _comparable(run: Path, own: set[str]) -> dict[str, Any]:
    """Return the settings that the runs of one table share; `own` are training settings that methods have alone."""
    experiment = Experiment.parse(read_toml(run))
    free = FREE | dict.fromkeys(("algorithm", "seed", "engine"), True)
    values = experiment.model_dump(exclude=free | {"training": own})
    return {**values, "data": {key: value for key, value in values["data"].items() if key != "samples_per_client"}}


def compare(
    federation: Federation,
    model: nn.Module,
    methods: Sequence[NamedClass],
    seeds: Sequence[int] = (0,),
    out: Path | str | None = None,
    *,
    against: str = "",
    resume: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> Comparison:
    """Train several methods on one federation and return their table; with `out` leave what `pfedla compare` leaves.

    `methods` are names or classes. Differences are to the method `against` (default: local, else the first).
    `settings` are those of `simulate`; an option goes to every method that has it, a dictionary of options to one:
    `compare(federation, model, ["local", Mine], mine={"strength": 2})`. A seed changes cohorts and batches, not the
    federation or the model, which are yours.
    """
    check_federation(federation)
    names = [register(method) for method in methods]
    known = [name for name, place in list_settings().items() if place.section not in ("data", "faults")]
    common = nest(
        {name: settings.pop(name) for name in known if name in settings and name not in ("seed", "algorithm")}
    )
    common["data"] = {"dataset": "arrays", "partition": "client"}
    common["model"] = f"{type(model).__module__}:{type(model).__qualname__}"
    sections = {key: settings.pop(key) for key in list(settings) if isinstance(settings[key], Mapping)}
    values = {**common, **sections, "algorithm": settings}

    def build_one(experiment: Experiment) -> Built:
        return build_around(experiment, federation, model)

    where = Path(out) if out is not None else None
    plan = plan_comparison(values, names, seeds, where, resume=resume, against=against, build_one=build_one)
    plan = plan._replace(folder=where)
    is_shown = sys.stderr.isatty() if progress is None else progress
    with Display(plan.total_rounds, quiet=not is_shown) as display:
        return Comparison(run_comparison(plan, display, resume=resume), where, plan.against)
