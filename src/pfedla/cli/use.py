"""The commands that train nothing: of runs (`pfedla report`, `evaluate`, …), methods and data sets (`pfedla data`)."""

import json
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Column, Table
from typer import Argument, Option, Typer

from pfedla.cli.options import File, Json, Quiet, Sets, answer, say, split_words, with_settings
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object
from pfedla.runs.experiment import Experiment, gather

data_app = Typer(help="Data sets and federations: list, fetch, show.", no_args_is_help=True)
PAGE_HELP = "File to write (default: report.html in the first folder)."
DATA_HELP = "A file with x, y, or of a run on a table a table (default: the client's own test split)."
MERGED_HELP = "Of a model with frozen tensors write all of it, LoRA merged (default: the trained tensors alone)."
EXPORT_HELP = "New folder for the files (default: RUN/export/client-<id>)."
Runs = Annotated[list[Path], Argument(help="Run folders. A comparison's folder means all its runs.", metavar="RUN…")]
RunPath = Annotated[Path, Argument(help="A run folder.", metavar="RUN")]
Client = Annotated[str, Option("--client", "-c", help="Whose model: 3, its name in your own data, or joined/NAME.")]


def report(runs: Runs, out: Annotated[Path | None, Option(help=PAGE_HELP)] = None) -> None:
    """Write one page that shows runs: curves, clients, who borrows which layer from whom. It opens offline.

    Example: pfedla report runs/first runs/local --out report.html
    """
    from pfedla.report.page import write_page

    path = write_page(_find_folders(runs), out or runs[0] / "report.html")
    say(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")


def watch(
    runs: Runs,
    host: Annotated[str, Option(help="Address. Any but 127.0.0.1 shows the runs to the network.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port (0: any free port).")] = 8642,
) -> None:
    """Serve the page of runs while they run; it refreshes itself. Ctrl-C stops the server, not the runs.

    Example: pfedla watch runs/first
    """
    from pfedla.report.page import Watcher

    with Watcher(_find_folders(runs), host, port) as server:
        address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        say(f"{address} shows {', '.join(map(str, runs))}; Ctrl-C stops it")
        server.serve_forever()


def algorithms(as_json: Json = False) -> None:
    """List the methods and their options, with defaults."""
    from pfedla.algorithms import ALGORITHMS, default_options

    defaults = {name: default_options(name) for name in ALGORITHMS}
    table = Table("algorithm", "what it does", "options (--set algorithm.…)")
    for name, kind in ALGORITHMS.items():
        chosen = "\n".join(f"{key} = {json.dumps(value)}" for key, value in defaults[name].items())
        table.add_row(name, kind.summary, chosen)
    answer(defaults, table, as_json=as_json)


def _find_folders(given: list[Path]) -> list[Path]:
    """Return the run folders. The folder of a comparison has no experiment.toml, its runs have."""
    found = []
    for path in given:
        inside = sorted(file.parent for file in path.glob("*/experiment.toml"))
        if (path / "comparison.json").exists():
            order = list(read_object(path / "comparison.json"))  # of the table
            inside.sort(key=lambda run: order.index(label) if (label := run.name.rpartition("-s")[0]) in order else -1)
        found += inside if inside and not (path / "experiment.toml").exists() else [path]
    return list(dict.fromkeys(found))


def evaluate(
    run: RunPath,
    client: Client,
    data: Annotated[Path | None, Option(help=DATA_HELP)] = None,
    predictions: Annotated[Path | None, Option(help="New file.csv for the prediction of each example.")] = None,
    as_json: Json = False,
) -> None:
    """Test a client's personal model on new examples, or on the client's own test split.

    Examples that the model was trained on are recognised by their content and refused.

    Example: pfedla evaluate runs/first --client north --data new.npz --predictions new.csv
    """
    from pfedla.report.reading import Metric
    from pfedla.runs.personal import evaluate_personal, load_personal

    personal = load_personal(run, client)
    result = evaluate_personal(personal, data, predictions)
    metric = Metric.of(result)
    others = [Metric.named(name) for name in result["metrics"] if name != metric.name]
    loss = "undefined" if result["loss"] is None else f"{result['loss']:.4f}"
    lines = [f"client {client} on {data or 'its test split'} ({result['examples']} examples):"]
    lines.append(f"{metric.label} {metric.show(result['score'])}, loss {loss}")
    lines += [f"{one.label} {one.show(result['metrics'][one.name])}" for one in others]
    lines += [f"predictions in {predictions}"] if predictions else []
    warning = ["OVERLAPPING clients: test examples may have trained other clients."]
    lines += warning * personal.experiment.data.overlapping
    answer(result, "\n".join(lines), as_json=as_json)


def export(
    run: RunPath,
    client: Client,
    out: Annotated[Path | None, Option(help=EXPORT_HELP)] = None,
    merged: Annotated[bool, Option("--merged", help=MERGED_HELP)] = False,
) -> None:
    """Export a personal model: a plain state_dict (safetensors) and a torch.export program for raw inputs."""
    from pfedla.core.files import safe_name
    from pfedla.runs.export import export_personal
    from pfedla.runs.personal import load_personal

    folder = out or run / "export" / f"client-{safe_name(client)}"
    say(*map(str, export_personal(load_personal(run, client), folder, merged=merged)))


def join(
    run: RunPath,
    data: Annotated[Path, Option(help="file.npz with the client's x, y and perhaps test (a ready test split).")],
    rounds: Annotated[int, Option(min=1, max=10**6, help="Rounds that the client trains for.")] = 10,
    name: Annotated[str | None, Option(help="What to call it: RUN/joined/NAME (default: the file's name).")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let an unseen client join a finished run: it gets a personal model, nobody else's changes.

    Example: pfedla join runs/first --data new.npz
    """
    from pfedla.report.tables import borrowed_lines, joined_table, traffic_line
    from pfedla.runs.joining import join_run

    warn = Console(stderr=True, highlight=False, markup=False, quiet=quiet or as_json, soft_wrap=True)
    folder, result = join_run(run, data, rounds=rounds, name=name, say=warn.print)
    examples = "{train} training and {test} test examples (split: {split})".format(**result["examples"])
    spent = f"{examples}; {traffic_line(result['traffic'])}; results in {folder}"
    hint = f"use its model: pfedla evaluate or export {run} --client {folder.relative_to(run)}"
    parts = (joined_table(result), *borrowed_lines(result), spent, hint)
    answer({"joined": str(folder), **result}, *parts, as_json=as_json, quiet=quiet)


def communication(
    dataset: Annotated[str, Option("--dataset", "-d", help="A name of `pfedla data list`: emnist, cifar10, …")],
    clients: Annotated[int, Option(min=1, max=10**9, help="Number of clients.")] = 10,
    rounds: Annotated[int, Option(min=1, max=10**9, help="Rounds.")] = 75,
    participation: Annotated[float, Option(help="Share of the clients in each round.")] = 1.0,
    retain: Annotated[str, Option(help="Layers that stay on the client always, separated by commas: fc3,fc1.")] = "",
    model: Annotated[str, Option(help="A name of `pfedla models`, or auto: by the data's shape.")] = "auto",
    upload: Annotated[
        str, Option(help="How uploads are encoded: none, float16, bfloat16, int8, topk, randk.")
    ] = "none",
    download: Annotated[str, Option(help="How downloads are encoded.")] = "none",
    share: Annotated[float, Option(help="Share of the numbers that topk and randk send.")] = 0.05,
    as_json: Json = False,
) -> None:
    """Compute what a run sends, in MiB (2^20 bytes), from the model alone. Retained layers save the download."""
    from pfedla.core.codecs import measure_layers
    from pfedla.core.contracts import num_participants
    from pfedla.core.layers import Layers
    from pfedla.core.models import model_for, outline
    from pfedla.core.rounds import MIB, plan_traffic
    from pfedla.data import datasets

    entry = datasets.find(dataset)
    participation = Experiment.parse({"participation": participation}).participation
    name = model_for(entry.shape) if model == "auto" else model
    module = outline(name, entry.shape, entry.num_outputs)
    layers, tensors = Layers.of(module), {key: value.detach() for key, value in module.named_parameters()}
    retained = layers.positions(split_words(retain))
    wire = Experiment.parse({"wire": {"upload": upload, "download": download, "share": share}}).wire
    ways = {"down": wire.download, "up": wire.upload}
    sizes = {way: measure_layers(layers, tensors, codec, wire.share) for way, codec in ways.items()}
    traffic = plan_traffic(layers, num_participants(clients, participation), rounds, retained, **sizes)
    down, up = traffic.down_bytes / MIB, traffic.up_bytes / MIB
    table = Table("layer", "parameters", "sent down", title=f"{name} on {dataset}", title_justify="left")
    for position, (layer, size) in enumerate(zip(layers.names, layers.num_parameters, strict=True)):
        table.add_row(layer, f"{size:,}", "no" if position in retained else "yes")
    table.add_row("all", f"{sum(layers.num_parameters):,}", "")
    text = f"{down + up:.2f} MiB in all: {down:.2f} down, {up:.2f} up"
    answer({"down_mib": down, "up_mib": up, "total_mib": down + up}, table, text, as_json=as_json)


@data_app.command("list")
def list_(as_json: Json = False) -> None:
    """List the data sets: what they are, which are here and where, how to get the others."""
    from pfedla.data.datasets import KNOWN, data_directory, state_of

    table, states = Table(Column("data set", no_wrap=True), "shape", "classes", "what", "here"), {}
    for name, entry in KNOWN.items():
        state, shape = state_of(name), "x".join(map(str, entry.shape))
        states[name] = {"here": state.here, "where": str(state.place or "")}
        classes = str(entry.num_classes) if entry.task == "classification" else entry.task
        table.add_row(name, shape, classes, entry.summary, state.says)
    table.add_row("file.npz", "any", "any", "arrays x, y; optionally client, test", "your own")
    table.add_row("file.csv", "any", "any", "a table (.csv, .tsv, .parquet): --label, --client", "your own")
    table.add_row("folder", "any", "any", "images: class/*.png or client/class/*.png (or .jpg)", "your own")
    hint = "`pfedla data fetch NAME` downloads a data set, or checks it if it is here."
    hint += f"\ndata directory: {data_directory()} (set PFEDLA_DATA_DIR to change it)"
    answer({"data_directory": str(data_directory()), "datasets": states}, table, hint, as_json=as_json)


@data_app.command()
def fetch(names: Annotated[list[str], Argument(help="Names of `pfedla data list`.", metavar="NAME…")]) -> None:
    """Download data sets from their official hosts, or check those that are here. EMNIST is one archive."""
    from pfedla.data import datasets

    known = {name: datasets.find(name) for name in names}  # all names are checked before the first is downloaded
    for name in known:
        dataset, downloaded = datasets.fetch(name, say)
        where = f"{'downloaded to' if downloaded else 'already in'} {datasets.state_of(name).place or 'the package'}"
        what = f"{len(dataset.classes)} classes" if dataset.task == "classification" else dataset.task
        say(f"{name}: {len(dataset.y):,} examples of {what}, checked; {where}")


@data_app.command()
@with_settings(
    only=("dataset", "label", "client", "drop", "missing", "task", "partition", "clients", "samples", "seed")
)
def show(
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    setting: Sets = None,
    out: Annotated[Path | None, Option(help="The figure: .png, .pdf, .svg (default: federation-….png).")] = None,
    as_json: Json = False,
) -> None:
    """Show a split: clients x classes as a table and a figure, how heterogeneous the clients are, what looks wrong.

    Takes what `pfedla run` takes, also a finished run's folder.

    Example: pfedla data show -d cifar10 --partition dirichlet --set data.beta=0.1
    """
    from pfedla.core.files import safe_name
    from pfedla.data.federation import build_federation
    from pfedla.report.figures import FORMATS, draw_federation
    from pfedla.report.tables import federation_table, shorten, statistics_line, where
    from pfedla.runs.build import choose_objective
    from pfedla.runs.folder import describe_federation

    if out and out.suffix.lower() not in FORMATS:
        raise PfedlaError(f"--out {out}: the figure must end in {', '.join(FORMATS)}")
    experiment = Experiment.parse(gather(file, given, setting or []))
    data, federation = build_federation(experiment.data, experiment.seed, task=experiment.task)
    described = describe_federation(federation, choose_objective(experiment, federation))
    name = f"{where(data.model_dump() | described)}, seed {experiment.seed}"
    split = f"{safe_name(Path(data.dataset).stem)}-{data.split_name}-s{experiment.seed}"
    path = draw_federation(described, name, out or Path(f"federation-{split}.png"))
    content = {"picture": str(path), "data": data.model_dump(), **described}
    text = statistics_line(described)
    if federation.task != "classification":
        text = f"{federation.task} of {', '.join(map(shorten, federation.outputs))}"
    text = "\n".join([text, *(f"warning: {warning}" for warning in federation.warnings), f"figure: {path}"])
    answer(content, federation_table(described, name), text, as_json=as_json)
