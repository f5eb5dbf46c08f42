"""`pfedla run` and `compare`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pfedla.cli.options import File, Output, Setting, option, parse_numbers, say, split_words, watching, with_settings
from pfedla.runs.experiment import Experiment, gather
from pfedla.runs.trackers import check_trackers

SPREAD_HELP = "As for run; algorithm.X=… goes to every method that has X, pfedla.X=… to pfedla alone."


@with_settings()
def run(given: dict[str, Any], output: Output, file: File = None, setting: Setting = None) -> None:
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
        display.begin(experiment.algorithm.name, experiment.seed)
        result = Run(built, folder, display=display, stopping=signals.wanted, track=trackers).complete()
    print_result(result, folder.path, quiet=output.quiet, as_json=output.as_json)


def print_result(result: dict[str, Any], folder: Path, *, quiet: bool, as_json: bool) -> None:
    from pfedla.report.tables import failures_lines, result_table, traffic_line, warnings

    if as_json:
        print(json.dumps({"run": str(folder), **result}))
    elif not quiet:
        spent = f"{traffic_line(result['traffic'])}; {result['seconds']['total']:.1f} s"
        say(result_table(result), *warnings([result]))
        say(f"{spent}; results and pictures in {folder}", *failures_lines(result))


@with_settings(without=("algorithm", "seed"))
def compare(
    given: dict[str, Any],
    output: Output,
    file: File = None,
    algorithms: Annotated[str, option("Method", "Names separated by commas, or all.", "--algorithms", "-a")] = "all",
    seeds: Annotated[str | None, option("Run", "Seeds separated by commas; differences are paired over them.")] = None,
    setting: Annotated[list[str] | None, option("Method", SPREAD_HELP, "--set")] = None,
) -> None:
    """Train several methods on the same federation and seeds; one table, one picture.

    Example: pfedla compare -a local,fedavg,pfedla --seeds 0,1,2 --set pfedla.neighbours=5
    """
    from pfedla.algorithms import ALGORITHMS
    from pfedla.runs import comparison

    trackers = check_trackers(split_words(output.track))
    values = gather(file, given, setting or [], spread=True)
    names = list(ALGORITHMS) if algorithms == "all" else split_words(algorithms)
    numbers = parse_numbers("--seeds", str(values.get("seed", 0)) if seeds is None else seeds, "0,1,2")
    plan = comparison.plan_comparison(values, names, numbers, output.out, resume=output.resume)
    hint = f"resume with --resume --out {plan.folder}"
    with watching(plan.total_rounds, quiet=output.quiet or output.as_json, hint=hint) as (display, signals):
        rows = comparison.compare(plan, display, resume=output.resume, stopping=signals.wanted, track=trackers)
    if output.as_json:
        print((plan.folder / "comparison.json").read_text(encoding="utf-8"))
    elif not output.quiet:
        _print_comparison(rows, plan.folder)
    if any(row.gave_up for row in rows):
        raise typer.Exit(1)


def _print_comparison(rows: list[Any], folder: Path) -> None:
    from pfedla.report.tables import failures_lines, tabulate_comparison, terminal_table, warnings

    lines, notes = tabulate_comparison(rows)
    say(terminal_table(lines, notes=notes), *warnings([result for row in rows for result in row.results]))
    say("Test accuracy on every client's own data, mean and worst client, last round; MiB in all.")
    for row in rows:
        say(*(f"{row.algorithm}, seed {r['seed']}: {line}" for r in row.results for line in failures_lines(r)))
    pictures = [folder / "comparison.md", folder / "learning_curves.png", *sorted(folder.glob("*/*.png"))]
    say(*(f"  {path}" for path in pictures))
