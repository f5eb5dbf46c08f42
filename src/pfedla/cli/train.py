"""The commands that train: `pfedla run`, `compare` and `reproduce`."""

import json
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from pfedla.cli.options import File, Output, Quiet, Sets, option, parse_ints, say, split_words, watching, with_settings
from pfedla.core.errors import PfedlaError, Stopped, shown
from pfedla.runs.experiment import Experiment, gather, nest, overlay, read_toml
from pfedla.runs.trackers import check_trackers

RUNS = Path("runs/reproduce")
ALGORITHMS_HELP = "Names or package.module:Class, separated by commas (default: all)."
TRIALS_HELP = "Trials of each method, its defaults the first of them."
RESUME_TUNING_HELP = "Resume the tuning in --out (or the latest of the default name); start a new one if there is none."
SPREAD_HELP = "As for run; algorithm.X=… goes to every method that has X, pfedla.X=… to pfedla alone."


@with_settings()
def run(given: dict[str, Any], output: Output, file: File = None, setting: Sets = None) -> None:
    """Train one method on a federation; leave a run folder with numbers, personal models and pictures.

    Example: pfedla run -a pfedla -d fashion-mnist --clients 10 --rounds 30 --set algorithm.neighbours=5

    Ctrl-C or SIGTERM stops it; `pfedla run RUN --resume` continues, and with more --rounds extends it.
    """
    from pfedla.runs.build import build
    from pfedla.runs.folder import RUNS, RunFolder, folder_name, number_folder
    from pfedla.runs.run import Run

    trackers = check_trackers(split_words(output.track))
    built = build(Experiment.parse(gather(file, given, setting or [])))
    experiment, out, default = built.experiment, output.out, RUNS / folder_name(built.experiment)
    if output.resume and out is None:
        out = file if file is not None and file.is_dir() else number_folder(default, resume=True)
    folder = RunFolder(out or number_folder(default), resume=output.resume)
    hint = f"resume with --resume --out {folder.path}"
    with watching(experiment.rounds, quiet=output.quiet or output.as_json, hint=hint) as (display, signals):
        display.begin(built.algorithm.name, experiment.seed)
        result = Run(built, folder, display=display, stopping=signals.wanted, track=trackers).complete()
    print_result(result, folder.path, quiet=output.quiet, as_json=output.as_json)


def print_result(result: dict[str, Any], folder: Path, *, quiet: bool, as_json: bool) -> None:
    from pfedla.report.reading import client_names
    from pfedla.report.tables import failures_lines, metrics_table, result_table, traffic_line, warnings

    if as_json:
        print(json.dumps({"run": str(folder), **result}))
    elif not quiet:
        spent = f"{traffic_line(result['traffic'])}; {result['seconds']['total']:.1f} s"
        say(result_table(result), *metrics_table(result), *warnings([result]))
        say(f"{spent}; results and pictures in {folder}", *failures_lines(result, client_names(folder)))


@with_settings(without=("algorithm", "seed"))
def compare(
    given: dict[str, Any],
    output: Output,
    file: File = None,
    algorithms: Annotated[str | None, option("Method", ALGORITHMS_HELP, "--algorithms", "-a")] = None,
    seeds: Annotated[str | None, option("Run", "Seeds separated by commas; differences are paired over them.")] = None,
    setting: Annotated[list[str] | None, option("Method", SPREAD_HELP, "--set")] = None,
) -> None:
    """Train several methods on the same federation and seeds; one table, one picture.

    Example: pfedla compare -a local,fedavg,pfedla --seeds 0,1,2 --set pfedla.neighbours=5
    """
    from pfedla.report import tables
    from pfedla.report.reading import client_names
    from pfedla.runs import comparison

    trackers = check_trackers(split_words(output.track))
    values, names, numbers, out = _read_request(file, given, setting or [], algorithms, seeds, output)
    plan = comparison.plan_comparison(values, names, numbers, out, resume=output.resume)
    assert plan.folder is not None
    hint = f"resume with --resume --out {plan.folder}"
    with watching(plan.total_rounds, quiet=output.quiet or output.as_json, hint=hint) as (display, signals):
        rows = comparison.run_comparison(plan, display, resume=output.resume, stopping=signals.wanted, track=trackers)
    if output.as_json:
        print((plan.folder / "comparison.json").read_text(encoding="utf-8"))
    elif not output.quiet:
        table, notes = tables.tabulate_comparison(rows)
        warnings = tables.warnings([result for row in rows for result in row.results])
        say(tables.terminal_table(table, notes=notes), *warnings)
        say("Test scores on every client's own data, mean and worst client, last round; MiB in all.")
        for row in rows:
            for one, place in zip(row.results, row.folders, strict=True):
                lines = tables.failures_lines(one, client_names(place))
                say(*(f"{row.algorithm}, seed {one['seed']}: {line}" for line in lines))
        pictures = [plan.folder / "learning_curves.png", *sorted(plan.folder.glob("*/*.png"))]
        say(*(f"  {path}" for path in [plan.folder / "comparison.md", *pictures]))
    if any(row.gave_up for row in rows):
        raise Exit(1)


@with_settings(without=("algorithm", "seed"))
def tune(
    given: dict[str, Any],
    file: File = None,
    algorithms: Annotated[str | None, option("Method", ALGORITHMS_HELP, "--algorithms", "-a")] = None,
    trials: Annotated[int, option("Run", TRIALS_HELP)] = 10,
    seeds: Annotated[str | None, option("Run", "Seeds separated by commas; a trial's value is their mean.")] = None,
    setting: Annotated[list[str] | None, option("Method", SPREAD_HELP, "--set")] = None,
    out: Annotated[Path | None, option("Output", "Folder for the results; must not exist (default: runs/…).")] = None,
    resume: Annotated[bool, option("Output", RESUME_TUNING_HELP, "--resume")] = False,
    quiet: Quiet = False,
) -> None:
    """Choose learning rates and options on validation examples, with as many trials for each method.

    Example: pfedla tune -a fedrep,pfedla,ditto -d digits --trials 10 --out runs/tuning

    A quarter of every client's training examples validates; test examples are left out.

    The first trial of a method is its defaults. Then: pfedla compare runs/tuning/tuned.toml --seeds 0,1,2

    Ctrl-C stops it; the same command with --resume continues, and with more --trials extends it.
    """
    from pfedla.report.tables import terminal_table
    from pfedla.runs import comparison, tuning

    tuning.check_optuna()
    if trials < 1:
        raise PfedlaError(f"--trials {trials}: every method needs at least one")
    values, names, numbers, out = _read_request(file, given, setting or [], algorithms, seeds, Output(out))
    plan = comparison.plan_comparison(values, names, numbers, out, resume=resume, tuning=True)
    assert plan.folder is not None
    experiments = [(label, one) for (label, seed), one in plan.experiments.items() if seed == numbers[0]]
    hint = f"the same command with --resume --out {plan.folder} continues"
    with watching(trials * plan.total_rounds, quiet=quiet, hint=hint) as (display, signals):
        how = {"display": display, "stopping": signals.wanted, "build_one": plan.build, "resume": resume}
        found = tuning.tune(experiments, trials, plan.folder, seeds=numbers, **how)
    path = tuning.write_tuned(plan.folder, found, comparison.label_methods(names))
    if not quiet:
        lines, notes = tuning.tabulate_tuning(found)
        notes += [f"{label}: {reason}" for label, reason in plan.reasons.items() if reason]
        table = terminal_table(lines, notes=notes)
        table.columns[-1].justify = "left"
        say(table, "Scores on validation examples, mean over clients and seeds, last round.")
        say(*(f"  {plan.folder / name}" for name in (tuning.TUNING, tuning.PICTURE)), f"  pfedla compare {path}")


def _read_request(
    file: Path | None, given: dict[str, Any], sets: list[str], algorithms: str | None, seeds: str | None, output: Output
) -> tuple[dict[str, Any], list[str], list[int], Path | None]:
    """Return the settings, methods, seeds and folder of a comparison; of one that is resumed what its folder says."""
    from pfedla.algorithms import ALGORITHMS
    from pfedla.runs.comparison import PLAN

    out = output.out
    if output.resume and file is not None and (file / PLAN).exists():
        out, file = out or file, file / PLAN
    before = read_toml(file) if file is not None else {}
    listed: dict[str, Any] = {key: before.pop(key) for key in ("methods", "seeds") if key in before}
    for key, kind in {"methods": str, "seeds": int}.items():
        if not isinstance(found := listed.get(key, []), list) or not all(type(one) is kind for one in found):
            raise PfedlaError(f"{file}: {key} = {shown(found)}: it should be a list")
    names, numbers = listed.get("methods") or list(ALGORITHMS), listed.get("seeds", [])
    if algorithms is not None:
        names = list(ALGORITHMS) if algorithms == "all" else split_words(algorithms)
    if "methods" in listed:  # of a comparison or a tuning: with sections of methods that may not be compared now
        methods = {*ALGORITHMS, *listed["methods"]}
        before = {key: value for key, value in before.items() if key in names or key not in methods}
        values = overlay(before, gather(None, given, sets, spread=True))
    else:
        values = gather(file, given, sets, spread=True)
        values.pop("seeds", None)
    if seeds is not None or not numbers:
        numbers = parse_ints("--seeds", str(values.get("seed", 0)) if seeds is None else seeds, "0,1,2")
    _check_own_training(values, given)
    return values, names, numbers, out


def _check_own_training(values: dict[str, Any], given: dict[str, Any]) -> None:
    """Refuse an option that the training settings of a single method would override."""
    asked = nest({name: value for name, value in given.items() if value is not None}).get("training", {})
    for method, section in values.items():
        own = section.get("training", {}) if isinstance(section, dict) else {}
        if both := ", ".join(key for key in asked if isinstance(own, dict) and key in own):
            raise PfedlaError(f"[{method}.training] has a {both} of its own: leave out the option, or change the file")


def reproduce(
    name: Annotated[str | None, Argument(help="Which table or figure (default: list them).", metavar="NAME")] = None,
    dataset: Annotated[str, Option("--dataset", "-d", help="Only these data sets, separated by commas.")] = "",
    methods: Annotated[str, Option("--methods", "-a", help="Only these rows or algorithms, separated by commas.")] = "",
    clients: Annotated[str, Option(help="Only the columns with this number of clients: 10 or 100.")] = "",
    rounds: Annotated[int | None, Option(min=1, help="Rounds (default: as in grid.toml).")] = None,
    seeds: Annotated[str, Option(help="Seeds, separated by commas (default: as in grid.toml).")] = "",
    paper_budget: Annotated[bool, Option("--paper-budget", help="The paper's budget: days on a CPU.")] = False,
    accounting_only: Annotated[bool, Option("--accounting-only", help="Compute the traffic; train nothing.")] = False,
    check: Annotated[bool, Option("--check", help="Repeat one random cell of OUT that ran on this CPU model.")] = False,
    runs: Annotated[Path, Option(help="Folder of the runs; finished runs in it are not repeated.")] = RUNS,
    out: Annotated[Path | None, Option(help="Folder for tables, figure and results.json (default: RUNS/NAME).")] = None,
    quiet: Quiet = False,
) -> None:
    """Run what is missing of a table or figure of the paper, then write it beside the paper's numbers.

    Example: pfedla reproduce table1 --dataset fashion-mnist --clients 10 --seeds 0,1,2

    Ctrl-C stops it; the same command continues. Tables share runs: a run whose numbers are in OUT or in a
    folder beside it is not repeated.
    """
    from pfedla.report.tables import terminal_table
    from pfedla.reproduction import campaign, paper_results
    from pfedla.reproduction.campaign import Wanted, list_cells, list_names, load_grid, load_paper

    if name is None:
        grids = {one: load_grid(one) for one in list_names()}
        lines = [[one, grid.title, str(len(list_cells(grid)))] for one, grid in grids.items()]
        say(terminal_table([["name", "what", "runs"], *lines]))
        return
    grid = load_grid(name)
    if accounting_only:
        if grid.form != "retained":
            raise PfedlaError(f"{name} has no accounting; table3 and effect_of_k have")
        say(terminal_table(paper_results.account(grid, load_paper(name)), grid.title))
        return
    numbers = {"clients": parse_ints("--clients", clients, "10"), "seeds": parse_ints("--seeds", seeds, "0,1,2")}
    chosen: dict[str, Any] = {"datasets": split_words(dataset), "methods": split_words(methods), **numbers}
    wanted = Wanted(**chosen, rounds=rounds, paper_budget=paper_budget)
    folder, cells = out or runs / name, list_cells(grid, wanted)
    if check:
        _check(grid, cells, folder / campaign.SUMMARY, quiet)
        return
    stopped = None
    try:
        total = sum(cell.experiment.rounds for cell in cells)
        with watching(total, quiet=quiet, hint="the same command continues") as (display, signals):
            campaign.run_missing(runs, cells, display, signals.wanted, campaign.find_stored(folder, grid))
    except Stopped as error:
        stopped = error  # what is done is shown first
    summary, paper = campaign.write_summary(runs, name, grid, wanted, folder), load_paper(name)
    paths = paper_results.write_tables(summary, paper, folder) + paper_results.write_figures(summary, paper, folder)
    if summary["cells"] and not quiet:
        notes = [paper_results.explain(summary), *paper_results.describe_columns(summary)]
        say(terminal_table(paper_results.tabulate(summary, paper), summary["title"], notes))
    if not quiet:
        say(*(f"  {path}" for path in paths))
    if stopped:
        raise stopped


def _check(grid: Any, cells: list[Any], path: Path, quiet: bool) -> None:
    """Repeat one cell in a temporary folder, and compare it with results.json."""
    from pfedla.reproduction import campaign

    stored = [one for one in campaign.read_cells(path) if "score" in one.content]
    found = [(cell, one.content) for cell in cells if (one := campaign.match(cell, stored))]
    here = [(cell, content) for cell, content in found if campaign.ran_here(content)]
    if not here:
        made = sorted({f"torch {one['run_by']['torch']}, {one['run_by'].get('cpu_model')}" for _, one in found})
        reason = f"on this torch and CPU model, but on: {'; '.join(made)}" if made else "(--out names its folder)"
        raise PfedlaError(f"{path} has none of the cells that were asked for {reason}")
    cell, before = random.choice(here)
    with tempfile.TemporaryDirectory() as place, watching(cell.experiment.rounds, quiet=quiet) as (display, signals):
        campaign.run_missing(Path(place), [cell], display, signals.wanted)
        again = campaign.summarise_cell(Path(place) / cell.folder, cell, grid)
    what = f"{cell.row}, {cell.column}, seed {cell.experiment.seed}"
    if differs := ", ".join(campaign.list_differences(before, again)):
        raise PfedlaError(f"{what}: {differs} differ from {path}; was {before['run_by']}, is {again.get('run_by')}")
    say(f"{what}: every number is the same as in {path}")
