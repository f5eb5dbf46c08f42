"""The commands that train: `pfedla run`, `compare` and `reproduce`."""

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from pfedla.cli.options import File, Output, Quiet, Sets, option, parse_ints, say, split_words, watching, with_settings
from pfedla.core.errors import GaveUpError, PfedlaError, Stopped, shown, unknown
from pfedla.core.settings import AUTO
from pfedla.runs.experiment import Experiment, gather, nest, overlay, read_toml
from pfedla.runs.trackers import check_trackers

RUNS, BUDGETS = Path("runs/reproduce"), ("grid", "paper")
ALGORITHMS_HELP = "Names or package.module:Class, separated by commas (default: all)."
SEEDS_HELP = "Seeds separated by commas. Differences are paired over them; tests need three, better ten."
AGAINST_HELP = "The method that differences are to (default: local if it is compared, else the first)."
TRIALS_HELP = "Trials of each method, its defaults the first of them."
RESUME_TUNING_HELP = "Resume the tuning in --out (or the latest of the default name); start a new one if there is none."
EXCLUDE_HELP = "A client (name or number) that takes no part from the next round on (repeatable)."
FROM_HELP = "With --resume: continue after this round, or the last before it that is kept; drop what came later."
SPREAD_HELP = "As for run; algorithm.X=… goes to every method that has X, pfedla.X=… to pfedla alone."


@with_settings()
def run(
    given: dict[str, Any],
    output: Output,
    file: File = None,
    setting: Sets = None,
    exclude: Annotated[list[str] | None, option("Run", EXCLUDE_HELP)] = None,
    from_round: Annotated[int | None, option("Output", FROM_HELP, "--from", min=1)] = None,
) -> None:
    """Train one method on a federation; leave a run folder with numbers, personal models and pictures.

    Example: pfedla run -a pfedla -d fashion-mnist --clients 10 --rounds 30 --set algorithm.neighbours=5

    Ctrl-C or SIGTERM stops it; `pfedla run RUN --resume` continues, and with more --rounds extends it.
    """
    from pfedla.runs.build import build
    from pfedla.runs.folder import RUNS, RunFolder, folder_name, number_folder
    from pfedla.runs.run import Run

    trackers = check_trackers(split_words(output.track))
    left_out = {"exclude": dict.fromkeys(exclude, AUTO)} if exclude else {}
    built = build(Experiment.parse(overlay(gather(file, given, setting or []), left_out)))
    experiment, out, default = built.experiment, output.out, RUNS / folder_name(built.experiment)
    if output.resume and out is None:
        out = file if file is not None and file.is_dir() else number_folder(default, resume=True)
    folder = RunFolder(out or number_folder(default), resume=output.resume, from_round=from_round)
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
    seeds: Annotated[str | None, option("Run", SEEDS_HELP)] = None,
    against: Annotated[str, option("Method", AGAINST_HELP)] = "",
    setting: Annotated[list[str] | None, option("Method", SPREAD_HELP, "--set")] = None,
) -> None:
    """Train several methods on the same federation and seeds; one table, one picture.

    Example: pfedla compare -a local,fedavg,pfedla --seeds 0,1,2 --set pfedla.neighbours=5
    """
    from pfedla.report import tables
    from pfedla.report.methods import MethodTable
    from pfedla.report.reading import client_names
    from pfedla.runs import comparison

    trackers = check_trackers(split_words(output.track))
    values, names, numbers, out = _read_request(file, given, setting or [], algorithms, seeds, output)
    plan = comparison.plan_comparison(values, names, numbers, out, resume=output.resume, against=against)
    assert plan.folder is not None
    hint = f"resume with --resume --out {plan.folder}"
    with watching(plan.total_rounds, quiet=output.quiet or output.as_json, hint=hint) as (display, signals):
        rows = comparison.run_comparison(plan, display, resume=output.resume, stopping=signals.wanted, track=trackers)
    if output.as_json:
        print((plan.folder / "comparison.json").read_text(encoding="utf-8"))
    elif not output.quiet:
        table = MethodTable(rows, plan.against)
        found = [lines for lines in (table.tabulate(), table.tabulate_differences()) if len(lines) > 1]
        say(*map(tables.terminal_table, found), *table.notes(), *tables.warnings(table.results))
        say("Test scores on every client's own data, mean and worst client, last round; MiB in all.")
        for row in rows:
            for one, place in zip(row.results, row.folders, strict=True):
                lines = tables.failures_lines(one, client_names(place))
                say(*(f"{row.algorithm}, seed {one['seed']}: {line}" for line in lines))
        pictures = [plan.folder / f"{comparison.CURVES}.png", *sorted(plan.folder.glob("*/*.png"))]
        say(*(f"  {path}" for path in [plan.folder / "comparison.md", plan.folder / "comparison.tex", *pictures]))
    if any(row.gave_up for row in rows):
        raise Exit(1)


@with_settings(without=("algorithm", "seed"))
def tune(
    given: dict[str, Any],
    file: File = None,
    algorithms: Annotated[str | None, option("Method", ALGORITHMS_HELP, "--algorithms", "-a")] = None,
    trials: Annotated[int, option("Run", TRIALS_HELP)] = 10,
    seeds: Annotated[
        str | None,
        option("Run", "Seeds; a trial's value is their mean. Use one unless the data have a fixed test split."),
    ] = None,
    setting: Annotated[list[str] | None, option("Method", SPREAD_HELP, "--set")] = None,
    out: Annotated[Path | None, option("Output", "Folder for the results; must not exist (default: runs/…).")] = None,
    resume: Annotated[bool, option("Output", RESUME_TUNING_HELP, "--resume")] = False,
    quiet: Quiet = False,
) -> None:
    """Choose learning rates and options on validation examples, with as many trials for each method.

    Example: pfedla tune -a fedrep,pfedla,ditto -d digits --trials 10 --out runs/tuning

    A quarter of every client's training examples validates; test examples are left out.

    The first trial of a method is its defaults. Then: pfedla compare runs/tuning/tuned.toml

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
    path = tuning.write_tuned(plan.folder, found, comparison.label_methods(names), numbers)
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
    names: Annotated[
        list[str] | None, Argument(help="Tables or figures (default: list them).", metavar="NAME…")
    ] = None,
    dataset: Annotated[str, Option("--dataset", "-d", help="Only these data sets, separated by commas.")] = "",
    methods: Annotated[str, Option("--methods", "-a", help="Only these rows or algorithms, separated by commas.")] = "",
    clients: Annotated[str, Option(help="Only the columns with this number of clients: 10 or 100.")] = "",
    rounds: Annotated[int | None, Option(min=1, help="Rounds (default: as in grid.toml).")] = None,
    seeds: Annotated[str, Option(help="Seeds, separated by commas (default: as in grid.toml).")] = "",
    budget: Annotated[
        str, Option(help="grid: as in grid.toml; paper: the paper's rounds and epochs, days more.")
    ] = "grid",
    status: Annotated[bool, Option("--status", help="Show what is done, running and left; train nothing.")] = False,
    accounting_only: Annotated[bool, Option("--accounting-only", help="Compute the traffic; train nothing.")] = False,
    check: Annotated[
        bool, Option("--check", help="Repeat a random cell per table that ran on this CPU model.")
    ] = False,
    jobs: Annotated[int, Option(min=0, max=1024, help="Runs at once, each in a process (0: one per core).")] = 0,
    runs: Annotated[Path, Option(help="Folder of the runs; finished runs in it are not repeated.")] = RUNS,
    out: Annotated[
        Path | None, Option(help="Folder for OUT/NAME: tables, figure, results.json (default: RUNS).")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run what is missing of tables or figures of the paper, then write them beside the paper's numbers.

    Example: pfedla reproduce table1 table2 --dataset fashion-mnist --clients 10

    Runs are one queue, at low priority. Ctrl-C stops it, a kill costs what was run since the last checkpoint; the same
    command continues. Tables share runs: what is in OUT is not repeated. OUT/NAME/results.json grows run by run.
    """
    from pfedla.report.tables import terminal_table
    from pfedla.reproduction import campaign
    from pfedla.reproduction.grid import Wanted, list_cells, list_names, load_grid

    if not names:
        grids = {one: load_grid(one) for one in list_names()}
        lines = [[one, grid.title, str(len(list_cells(grid)))] for one, grid in grids.items()]
        say(terminal_table([["name", "what", "runs"], *lines]))
        return
    if accounting_only:
        _account(names)
        return
    chosen: dict[str, Any] = {"datasets": split_words(dataset), "methods": split_words(methods), "rounds": rounds}
    chosen |= {"clients": parse_ints("--clients", clients, "10"), "seeds": parse_ints("--seeds", seeds, "0,1,2")}
    if budget not in BUDGETS:
        raise unknown("--budget", budget, BUDGETS)
    wanted = Wanted(**chosen, paper_budget=budget == "paper")
    tables = campaign.plan_tables(names, wanted, out or runs)
    queue, jobs = campaign.plan_queue(tables), jobs or os.cpu_count() or 1
    if status:
        lines = campaign.describe_status(queue, runs)
        say(terminal_table(lines, notes=["hours on one core; divide them by the number of --jobs"]))
        return
    if check:
        for table in tables:
            _check(table, quiet)
        return
    _run_queue(tables, queue, runs, jobs, quiet)


def _run_queue(tables: list[Any], queue: list[Any], runs: Path, jobs: int, quiet: bool) -> None:
    from pfedla.reproduction.campaign import run_queue

    stopped = None
    try:
        total = sum(cell.experiment.rounds for _, cell in queue)
        with watching(total, quiet=quiet, hint="the same command continues") as (display, signals):
            run_queue(queue, runs, display, signals.wanted, jobs)
    except (Stopped, GaveUpError) as error:
        stopped = error  # what is done is shown first
    for table in tables:
        _show_table(table, runs, quiet)
    if stopped:
        raise stopped


def _account(names: list[str]) -> None:
    from pfedla.report.tables import terminal_table
    from pfedla.reproduction import paper_results
    from pfedla.reproduction.grid import load_grid, load_paper

    for name in names:
        grid = load_grid(name)
        if grid.form != "retained":
            raise PfedlaError(f"{name} has no accounting; table3 has")
        say(terminal_table(paper_results.account(grid, load_paper(name)), grid.title))


def _show_table(table: Any, runs: Path, quiet: bool) -> None:
    """Write what is known of a table: results.json, tables, figure."""
    from pfedla.report.tables import terminal_table
    from pfedla.reproduction import paper_results
    from pfedla.reproduction.grid import load_paper

    summary, paper, folder = table.write_summary(runs), load_paper(table.name), table.folder
    paths = paper_results.write_tables(summary, paper, folder) + paper_results.write_figures(summary, paper, folder)
    if any("score" in cell for cell in summary["cells"]) and not quiet:
        say(*(terminal_table(*one) for one in paper_results.list_tables(summary, paper)))
    if not quiet:
        say(*(f"  {path}" for path in paths))


def _check(table: Any, quiet: bool) -> None:
    """Repeat one cell in a temporary folder, and compare it with results.json."""
    from pfedla.reproduction import campaign, summaries
    from pfedla.reproduction.grid import list_cells

    path = table.folder / summaries.SUMMARY
    stored = [one for one in summaries.read_cells(path) if "score" in one.content]
    cells = list_cells(table.grid, table.wanted)
    found = [(cell, one.content) for cell in cells if (one := summaries.match(cell, stored))]
    here = [(cell, content) for cell, content in found if summaries.ran_here(content)]
    if not here:
        made = sorted({f"torch {one['run_by']['torch']}, {one['run_by'].get('cpu_model')}" for _, one in found})
        reason = f"on this torch and CPU model, but on: {'; '.join(made)}" if made else "(--out names their folder)"
        raise PfedlaError(f"{path} has none of the cells that were asked for {reason}")
    cell, before = random.choice(here)
    with tempfile.TemporaryDirectory() as place, watching(cell.experiment.rounds, quiet=quiet) as (display, signals):
        campaign.run_cells([(table, cell)], Path(place), display, signals.wanted)
        again = summaries.summarise_cell(Path(place) / cell.folder, cell, table.grid)
    what = f"{table.name}: {cell.row}, {cell.column}, seed {cell.experiment.seed}"
    if differs := ", ".join(summaries.list_differences(before, again)):
        raise PfedlaError(f"{what}: {differs} differ from {path}; was {before['run_by']}, is {again.get('run_by')}")
    say(f"{what}: every number is the same as in {path}")
