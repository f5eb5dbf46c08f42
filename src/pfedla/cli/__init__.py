"""The command line. torch is imported inside the commands, so that --help answers at once."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pfedla.cli.data_commands import data_app
from pfedla.cli.deploy import deploy_app
from pfedla.cli.join import join
from pfedla.cli.look import report, watch
from pfedla.cli.options import (
    Augment,
    BatchSize,
    CheckpointRounds,
    Clients,
    Compile,
    Dataset,
    Device,
    Engine,
    File,
    Json,
    LocalEpochs,
    Lr,
    Model,
    Out,
    Participation,
    Partition,
    Quiet,
    Resume,
    Rounds,
    Run,
    Samples,
    Setting,
    Threads,
    Track,
    out_console,
    whole_numbers,
    words_of,
)  # fmt: skip
from pfedla.cli.reproduce import reproduce
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.runs.interruption import EXIT_CODE, Interruption

app = typer.Typer(
    help="Personalised federated learning: learn how much of each layer to borrow from whom.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.command()(reproduce)
app.command()(report)
app.command()(watch)
app.command()(join)


@app.command()
def run(
    file: File = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="See `pfedla algorithms` (pfedla).")] = None,
    dataset: Dataset = None, partition: Partition = None, clients: Clients = None, samples: Samples = None,
    participation: Participation = None, rounds: Rounds = None, local_epochs: LocalEpochs = None, lr: Lr = None,
    batch_size: BatchSize = None, augment: Augment = None, model: Model = None,
    seed: Annotated[int | None, typer.Option(help="Every draw comes from it (default: 0).")] = None,
    engine: Engine = None, threads: Threads = None, device: Device = None, compile: Compile = None,
    out: Out = None, resume: Resume = False, checkpoint_rounds: CheckpointRounds = None, track: Track = "",
    setting: Setting = None, quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train one algorithm on a federation; leaves a run folder with numbers, personal models and pictures.

    Example: pfedla run -a pfedla -d fashion-mnist --clients 10 --rounds 30 --set algorithm.neighbours=5

    Ctrl-C or SIGTERM stops it where it can go on: pfedla run RUN --resume; with more --rounds it is extended.
    """
    given = locals()
    from pfedla.runs.experiment import Experiment, build
    from pfedla.runs.folder import RunFolder
    from pfedla.runs.overrides import gather
    from pfedla.runs.progress import Reporter
    from pfedla.runs.result import RUNS, folder_name, last_numbered, numbered, run_built
    from pfedla.runs.trackers import chosen

    trackers = chosen(words_of(track))
    built = build(Experiment.parse(gather(given)))
    named = RUNS / folder_name(built.experiment)
    if resume and out is None:
        out = file if file is not None and file.is_dir() else last_numbered(named)
    folder = RunFolder(out or numbered(named), resume=resume)
    with (
        Interruption(quiet or as_json) as interruption,
        Reporter(built.experiment.rounds, quiet or as_json, folder.path) as reporter,
    ):
        folder.stopping = interruption.wanted
        reporter.begin(built.experiment.algorithm.name, built.experiment.seed)
        result = run_built(built, folder, reporter, track=trackers)
    if as_json:
        print(json.dumps({"run": str(folder.path), **result}))
    elif not quiet:
        from pfedla.report.tables import failures_lines, result_table, traffic_line, warnings

        out_console.print(result_table(result))
        _print_lines(warnings([result]))
        seconds = f"{result['seconds']['total']:.1f} s"
        where = f"results and pictures in {folder.path}"
        out_console.print(f"{traffic_line(result['traffic'])}; {seconds}; {where}", soft_wrap=True)
        _print_lines(failures_lines(result))


@app.command()
def compare(
    file: File = None,
    algorithms: Annotated[
        str, typer.Option("--algorithms", "-a", help="Names separated by commas, or all.")
    ] = "all",
    seeds: Annotated[
        str | None, typer.Option(help="Seeds separated by commas; the table has mean ± std over them (default: 0).")
    ] = None,
    dataset: Dataset = None, partition: Partition = None, clients: Clients = None, samples: Samples = None,
    participation: Participation = None, rounds: Rounds = None, local_epochs: LocalEpochs = None, lr: Lr = None,
    batch_size: BatchSize = None, augment: Augment = None, model: Model = None, engine: Engine = None, threads: Threads = None,
    device: Device = None, compile: Compile = None, out: Out = None, resume: Resume = False,
    checkpoint_rounds: CheckpointRounds = None, track: Track = "",
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="As for run; algorithm.X=… goes to every method that has X, pfedla.X=… to pfedla alone."),
    ] = None,
    quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Train several algorithms on the same federation and seeds; one table, one picture.

    Example: pfedla compare -a local,fedavg,pfedla --seeds 0,1,2 --set pfedla.neighbours=5
    """
    given = locals()
    from pfedla.algorithms import ALGORITHMS
    from pfedla.report.tables import comparison_table, failures_lines, warnings
    from pfedla.runs.comparison import compare as compare_all
    from pfedla.runs.comparison import plan
    from pfedla.runs.overrides import gather
    from pfedla.runs.progress import Reporter
    from pfedla.runs.trackers import chosen

    trackers = chosen(words_of(track))
    values = gather(given, spread=True)
    names = list(ALGORITHMS) if algorithms == "all" else words_of(algorithms)
    numbers = whole_numbers("--seeds", str(values.get("seed", 0)) if seeds is None else seeds, "0,1,2")
    planned = plan(values, names, numbers, out, resume=resume)
    with (
        Interruption(quiet or as_json) as interruption,
        Reporter(planned.total_rounds, quiet or as_json, planned.folder) as reporter,
    ):
        rows = compare_all(planned, reporter, resume=resume, stopping=interruption.wanted, track=trackers)
    if as_json:
        print((planned.folder / "comparison.json").read_text(encoding="utf-8"))
    elif not quiet:
        out_console.print(comparison_table(rows))
        _print_lines(warnings([result for row in rows for result in row.results]))
        out_console.print("Test accuracy on every client's own data, mean and worst client, last round; MiB in all.")
        for row in rows:
            _print_lines([f"{row.algorithm}, seed {r['seed']}: {line}" for r in row.results for line in failures_lines(r)])
        first = [planned.folder / name for name in ("comparison.md", "learning_curves.png")]
        for path in [*first, *sorted(planned.folder.glob("*/*.png"))]:
            out_console.print(f"  {path}", soft_wrap=True)
    if any(row.gave_up for row in rows):
        raise typer.Exit(1)


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        out_console.print(line, soft_wrap=True)


@app.command()
def algorithms(as_json: Json = False) -> None:
    """The algorithms and their options, with defaults."""
    from pfedla.algorithms import ALGORITHMS, options_model

    defaults = {name: options_model(kind)().model_dump() for name, kind in ALGORITHMS.items()}
    if as_json:
        print(json.dumps(defaults))
        return
    table = Table("algorithm", "what it does", "options (--set algorithm.…)")
    for name, kind in ALGORITHMS.items():
        table.add_row(name, kind.summary, "\n".join(f"{key} = {json.dumps(value)}" for key, value in defaults[name].items()))
    out_console.print(table)


@app.command()
def communication(
    dataset: Annotated[str, typer.Option("--dataset", "-d", help="emnist, fashion-mnist, cifar10, …: see `pfedla data list`.")],
    clients: Annotated[int, typer.Option(min=1, max=10**9, help="Number of clients.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, max=10**9, help="Rounds.")] = 75,
    participation: Annotated[float, typer.Option(help="Share of the clients in each round.")] = 1.0,
    retain: Annotated[str, typer.Option(help="Layers kept at home in every round, separated by commas: fc3,fc1.")] = "",
    model: Annotated[str, typer.Option(help="cnn, cnn-bn, small-cnn, mlp, or auto: by the data's shape.")] = "auto",
    as_json: Json = False,
) -> None:
    """What a run sends, in MiB (2^20 bytes): computed from the model, no data needed. Retained layers save the download."""
    import torch

    from pfedla.core.layers import Layers
    from pfedla.core.models import build_model, model_for
    from pfedla.core.rounds import participants, planned_traffic
    from pfedla.data.datasets import known
    from pfedla.report.tables import MIB

    entry = known(dataset)
    if not 0 < participation <= 1:
        raise PfedlaError(f"participation = {participation} is not possible: it should be above 0 and at most 1")
    name = model_for(entry.shape) if model == "auto" else model
    layers = Layers.of(build_model(name, entry.shape, entry.num_classes, torch.Generator()))
    retained = layers.positions(words_of(retain))
    traffic = planned_traffic(layers, participants(clients, participation), rounds, retained)
    mebibytes = [count / MIB for count in (traffic.down_bytes, traffic.up_bytes, traffic.down_bytes + traffic.up_bytes)]
    if as_json:
        print(json.dumps(dict(zip(("down_mib", "up_mib", "total_mib"), mebibytes, strict=True))))
        return
    table = Table("layer", "parameters", "sent down", title=f"{name} on {dataset}", title_justify="left")
    for position, (layer, size) in enumerate(zip(layers.names, layers.num_parameters, strict=True)):
        table.add_row(layer, f"{size:,}", "no" if position in retained else "yes")
    table.add_row("all", f"{sum(layers.num_parameters):,}", "")
    out_console.print(table)
    down, up, total = mebibytes
    out_console.print(f"{total:.2f} MiB in all: {down:.2f} down, {up:.2f} up")


Client = Annotated[
    str, typer.Option("--client", "-c", help="Whose personal model: 3, its name in your own data, or joined/NAME.")
]


@app.command()
def evaluate(
    run: Run,
    client: Client,
    data: Annotated[Path | None, typer.Option(help="file.npz with x, y (default: the client's test split of the run).")] = None,
    as_json: Json = False,
) -> None:
    """Test a client's personal model on a file, or on the client's own test split."""
    from pfedla.runs.personal import evaluate_personal, load_personal

    personal = load_personal(run, client)
    result = evaluate_personal(personal, data)
    if as_json:
        print(json.dumps(result))
    else:
        where = data or "its test split"
        out_console.print(
            f"client {client} on {where}: accuracy {100 * result['accuracy']:.1f} %, loss {result['loss']:.4f} "
            f"({result['examples']} examples)",
            soft_wrap=True,
        )
        if personal.experiment.data.overlapping:
            out_console.print("OVERLAPPING clients: test examples may have trained other clients.")


@app.command()
def export(
    run: Run,
    client: Client,
    out: Annotated[Path | None, typer.Option(help="New folder for the files (default: RUN/export/client-<id>).")] = None,
) -> None:
    """Take a personal model out: a plain state_dict (safetensors) and a torch.export program for raw inputs."""
    from pfedla.core.files import safe_name
    from pfedla.runs.personal import export_personal, load_personal

    for path in export_personal(load_personal(run, client), out or run / "export" / f"client-{safe_name(client)}"):
        out_console.print(str(path), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        from pfedla import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Personalised federated learning: learn how much of each layer to borrow from whom."""


def main() -> None:
    try:
        app()
    except PfedlaError as error:
        Console(stderr=True, highlight=False).print(f"[bold red]pfedla:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2)
    except (Stopped, KeyboardInterrupt):
        sys.exit(EXIT_CODE)
    except (OSError, MemoryError) as error:  # a full disk, a folder that may not be written
        Console(stderr=True, highlight=False).print(
            f"[bold red]pfedla:[/] {escape(str(error) or 'out of memory')}", soft_wrap=True
        )
        sys.exit(1)
