"""`pfedla run`, `compare` and `algorithms`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pfedla.cli.options import (
    File,
    Json,
    Out,
    Quiet,
    Resume,
    Setting,
    Track,
    out_console,
    parse_numbers,
    split_words,
    with_settings,
)
from pfedla.runs.interruption import Interruption


@with_settings()
def run(
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    setting: Setting = None,
    out: Out = None,
    resume: Resume = False,
    track: Track = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train one method on a federation; leave a run folder with numbers, personal models and pictures.

    Example: pfedla run -a pfedla -d fashion-mnist --clients 10 --rounds 30 --set algorithm.neighbours=5

    Ctrl-C or SIGTERM stops it; `pfedla run RUN --resume` continues, and with more --rounds extends it.
    """
    from pfedla.runs.build import build
    from pfedla.runs.experiment import Experiment, gather
    from pfedla.runs.folder import RUNS, RunFolder, folder_name, number_folder
    from pfedla.runs.progress import Display
    from pfedla.runs.run import Run
    from pfedla.runs.trackers import check_trackers

    trackers = check_trackers(split_words(track))
    built = build(Experiment.parse(gather(file, given, setting or [])))
    experiment, default = built.experiment, RUNS / folder_name(built.experiment)
    if resume and out is None:
        out = file if file is not None and file.is_dir() else number_folder(default, resume=True)
    folder = RunFolder(out or number_folder(default), resume=resume)
    quietly = quiet or as_json
    with (
        Interruption(quietly) as interruption,
        Display(experiment.rounds, quiet=quietly, hint=f"resume with --resume --out {folder.path}") as display,
    ):
        display.begin(experiment.algorithm.name, experiment.seed)
        result = Run(built, folder, display=display, stopping=interruption.wanted, track=trackers).complete()
    if as_json:
        print(json.dumps({"run": str(folder.path), **result}))
    elif not quiet:
        _print_result(result, folder.path)


def _print_result(result: dict[str, Any], folder: Path) -> None:
    from pfedla.report.tables import failures_lines, result_table, traffic_line, warnings

    out_console.print(result_table(result))
    seconds = f"{result['seconds']['total']:.1f} s"
    summary = f"{traffic_line(result['traffic'])}; {seconds}; results and pictures in {folder}"
    for line in [*warnings([result]), summary, *failures_lines(result)]:
        out_console.print(line, soft_wrap=True)


@with_settings(without=("algorithm", "seed"))
def compare(
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help="Names separated by commas, or all.", rich_help_panel="Method")
    ] = "all",
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds separated by commas; differences are paired over them.", rich_help_panel="Run"),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="As for run; algorithm.X=… goes to every method that has X, pfedla.X=… to pfedla alone.",
            rich_help_panel="Method",
        ),
    ] = None,
    out: Out = None,
    resume: Resume = False,
    track: Track = "",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train several methods on the same federation and seeds; one table, one picture.

    Example: pfedla compare -a local,fedavg,pfedla --seeds 0,1,2 --set pfedla.neighbours=5
    """
    from pfedla.algorithms import ALGORITHMS
    from pfedla.runs.comparison import compare as run_comparison
    from pfedla.runs.comparison import plan_comparison
    from pfedla.runs.experiment import gather
    from pfedla.runs.progress import Display
    from pfedla.runs.trackers import check_trackers

    trackers = check_trackers(split_words(track))
    values = gather(file, given, setting or [], spread=True)
    names = list(ALGORITHMS) if algorithms == "all" else split_words(algorithms)
    numbers = parse_numbers("--seeds", str(values.get("seed", 0)) if seeds is None else seeds, "0,1,2")
    plan = plan_comparison(values, names, numbers, out, resume=resume)
    quietly = quiet or as_json
    with (
        Interruption(quietly) as interruption,
        Display(plan.total_rounds, quiet=quietly, hint=f"resume with --resume --out {plan.folder}") as display,
    ):
        rows = run_comparison(plan, display, resume=resume, stopping=interruption.wanted, track=trackers)
    if as_json:
        print((plan.folder / "comparison.json").read_text(encoding="utf-8"))
    elif not quiet:
        _print_comparison(rows, plan.folder)
    if any(row.gave_up for row in rows):
        raise typer.Exit(1)


def _print_comparison(rows: list[Any], folder: Path) -> None:
    from pfedla.report.tables import comparison_table, failures_lines, warnings

    out_console.print(comparison_table(rows))
    lines = warnings([result for row in rows for result in row.results])
    lines.append("Test accuracy on every client's own data, mean and worst client, last round; MiB in all.")
    for row in rows:
        lines += [f"{row.algorithm}, seed {r['seed']}: {line}" for r in row.results for line in failures_lines(r)]
    pictures = [folder / "comparison.md", folder / "learning_curves.png", *sorted(folder.glob("*/*.png"))]
    for line in [*lines, *(f"  {path}" for path in pictures)]:
        out_console.print(line, soft_wrap=True)


def algorithms(as_json: Json = False) -> None:
    """List the methods and their options, with defaults."""
    from pfedla.algorithms import ALGORITHMS, default_options

    defaults = {name: default_options(name) for name in ALGORITHMS}
    if as_json:
        print(json.dumps(defaults))
        return
    table = Table("algorithm", "what it does", "options (--set algorithm.…)")
    for name, kind in ALGORITHMS.items():
        options = "\n".join(f"{key} = {json.dumps(value)}" for key, value in defaults[name].items())
        table.add_row(name, kind.summary, options)
    out_console.print(table)
