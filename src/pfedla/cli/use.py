"""`pfedla evaluate`, `export`, `join` and `communication`."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pfedla.cli.options import Json, Quiet, RunPath, out_console, split_words
from pfedla.core.errors import PfedlaError

Client = Annotated[
    str, typer.Option("--client", "-c", help="Whose personal model: 3, its name in your own data, or joined/NAME.")
]


def evaluate(
    run: RunPath,
    client: Client,
    data: Annotated[
        Path | None, typer.Option(help="file.npz with x, y (default: the client's test split of the run).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Test a client's personal model on a file, or on the client's own test split."""
    from pfedla.runs.personal import evaluate_personal, load_personal

    personal = load_personal(run, client)
    result = evaluate_personal(personal, data)
    if as_json:
        print(json.dumps(result))
        return
    numbers = f"accuracy {100 * result['accuracy']:.1f} %, loss {result['loss']:.4f} ({result['examples']} examples)"
    out_console.print(f"client {client} on {data or 'its test split'}: {numbers}", soft_wrap=True)
    if personal.experiment.data.overlapping:
        out_console.print("OVERLAPPING clients: test examples may have trained other clients.")


def export(
    run: RunPath,
    client: Client,
    out: Annotated[
        Path | None, typer.Option(help="New folder for the files (default: RUN/export/client-<id>).")
    ] = None,
) -> None:
    """Export a personal model: a plain state_dict (safetensors) and a torch.export program for raw inputs."""
    from pfedla.core.files import safe_name
    from pfedla.runs.personal import export_personal, load_personal

    for path in export_personal(load_personal(run, client), out or run / "export" / f"client-{safe_name(client)}"):
        out_console.print(str(path), soft_wrap=True)


def join(
    run: RunPath,
    data: Annotated[Path, typer.Option(help="file.npz with the client's x, y and perhaps test (a ready test split).")],
    rounds: Annotated[int, typer.Option(min=1, max=10**6, help="Rounds that the client trains for.")] = 10,
    name: Annotated[
        str | None, typer.Option(help="What to call it: RUN/joined/NAME (default: the file's name).")
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Let an unseen client join a finished run: it gets a personal model, nobody else's changes.

    Example: pfedla join runs/first --data new.npz
    """
    from pfedla.report.tables import borrowed_lines, joined_table, traffic_line
    from pfedla.runs.joining import join_run

    warn = Console(stderr=True, highlight=False, markup=False, quiet=quiet or as_json)
    folder, result = join_run(run, data, rounds=rounds, name=name, say=lambda line: warn.print(line, soft_wrap=True))
    if as_json:
        print(json.dumps({"joined": str(folder), **result}))
        return
    if not quiet:
        out_console.print(joined_table(result))
        examples = "{train} training and {test} test examples (split: {split})".format(**result["examples"])
        lines = [
            *borrowed_lines(result),
            f"{examples}; {traffic_line(result['traffic'])}; results in {folder}",
            f"use its model: pfedla evaluate or export {run} --client {folder.relative_to(run)}",
        ]
        for line in lines:
            out_console.print(line, soft_wrap=True)


def communication(
    dataset: Annotated[
        str, typer.Option("--dataset", "-d", help="emnist, fashion-mnist, cifar10, …: see `pfedla data list`.")
    ],
    clients: Annotated[int, typer.Option(min=1, max=10**9, help="Number of clients.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, max=10**9, help="Rounds.")] = 75,
    participation: Annotated[float, typer.Option(help="Share of the clients in each round.")] = 1.0,
    retain: Annotated[
        str, typer.Option(help="Layers that stay on the client in every round, separated by commas: fc3,fc1.")
    ] = "",
    model: Annotated[str, typer.Option(help="cnn, cnn-bn, small-cnn, mlp, or auto: by the data's shape.")] = "auto",
    as_json: Json = False,
) -> None:
    """Compute what a run sends, in MiB (2^20 bytes), from the model alone. Retained layers save the download."""
    import torch

    from pfedla.core.layers import Layers
    from pfedla.core.models import build_model, model_for
    from pfedla.core.rounds import MIB, num_participants, plan_traffic
    from pfedla.data import datasets

    entry = datasets.find(dataset)
    if not 0 < participation <= 1:
        raise PfedlaError(f"participation = {participation} is not possible: it should be above 0 and at most 1")
    name = model_for(entry.shape) if model == "auto" else model
    layers = Layers.of(build_model(name, entry.shape, entry.num_classes, torch.Generator()))
    retained = layers.positions(split_words(retain))
    traffic = plan_traffic(layers, num_participants(clients, participation), rounds, retained)
    down, up = traffic.down_bytes / MIB, traffic.up_bytes / MIB
    if as_json:
        print(json.dumps({"down_mib": down, "up_mib": up, "total_mib": down + up}))
        return
    table = Table("layer", "parameters", "sent down", title=f"{name} on {dataset}", title_justify="left")
    for position, (layer, size) in enumerate(zip(layers.names, layers.num_parameters, strict=True)):
        table.add_row(layer, f"{size:,}", "no" if position in retained else "yes")
    table.add_row("all", f"{sum(layers.num_parameters):,}", "")
    out_console.print(table)
    out_console.print(f"{down + up:.2f} MiB in all: {down:.2f} down, {up:.2f} up")
