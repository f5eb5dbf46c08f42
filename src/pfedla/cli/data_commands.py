"""`pfedla data`: list and fetch data sets, show a split."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pfedla.cli.options import File, Json, Setting, out_console, with_settings
from pfedla.core.errors import PfedlaError

data_app = typer.Typer(help="Data sets and federations: list, fetch, show.", no_args_is_help=True)


def say(text: str) -> None:
    out_console.print(text, soft_wrap=True)


@data_app.command("list")
def list_(as_json: Json = False) -> None:
    """List the data sets: what they are, which are here and where, how to get the others."""
    from pfedla.data.datasets import KNOWN, state_of
    from pfedla.data.sources import data_directory

    states = {name: state_of(name) for name in KNOWN}
    if as_json:
        rows = {name: {"here": state.here, "where": str(state.place or "")} for name, state in states.items()}
        print(json.dumps({"data_directory": str(data_directory()), "datasets": rows}))
        return
    table = Table("data set", "shape", "classes", "what", "here")
    for name, entry in KNOWN.items():
        shape, state = "x".join(map(str, entry.shape)), states[name]
        table.add_row(name, shape, str(entry.num_classes), entry.summary, state.says)
    table.add_row("file.npz", "any", "any", "arrays x, y; optionally client, test", "your own")
    table.columns[0].no_wrap = True
    out_console.print(table)
    say("`pfedla data fetch NAME` downloads a data set, or checks it if it is here.")
    say(f"data directory: {data_directory()} (set PFEDLA_DATA_DIR to change it)")


@data_app.command()
def fetch(names: Annotated[list[str], typer.Argument(help="Names of `pfedla data list`.", metavar="NAME…")]) -> None:
    """Download data sets from their official hosts, checked against the published checksums.

    What is here already is checked and left alone. One EMNIST archive holds all its six splits.
    """
    from pfedla.data import datasets

    for name in names:
        datasets.find(name)  # a misspelt second name is refused before the first is downloaded
    for name in names:
        dataset, place, downloaded = datasets.fetch(name, say)
        what = f"{len(dataset.y):,} examples of {len(dataset.classes)} classes"
        where = f"{'downloaded to' if downloaded else 'already in'} {place}" if place else "in the package"
        say(f"{name}: {what}, checked; {where}")


@data_app.command()
@with_settings(only=("dataset", "partition", "clients", "samples", "seed"))
def show(
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    setting: Setting = None,
    out: Annotated[
        Path | None, typer.Option(help="The figure: .png, .pdf or .svg (default: federation-….png).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a split: clients x classes as a table and a figure, and how heterogeneous the clients are.

    Takes what `pfedla run` takes, also a finished run's folder.

    Example: pfedla data show -d cifar10 --partition dirichlet --set data.beta=0.1
    """
    from pfedla.core.files import safe_name
    from pfedla.data.federation import build_federation
    from pfedla.report.figures import FORMATS, draw_federation
    from pfedla.report.tables import federation_table, statistics_line
    from pfedla.report.tables import where as federation_name
    from pfedla.runs.experiment import Experiment, gather
    from pfedla.runs.folder import describe_federation

    if out is not None and out.suffix.lower() not in FORMATS:
        raise PfedlaError(f"--out {out}: the figure must end in {', '.join(FORMATS)}")
    experiment = Experiment.parse(gather(file, given, setting or []))
    data, federation = build_federation(experiment.data, experiment.seed)
    described = describe_federation(federation)
    stem = safe_name(Path(data.dataset).stem)
    name = f"{federation_name(data.model_dump() | described)}, seed {experiment.seed}"
    default = Path(f"federation-{stem}-{data.split_name}-s{experiment.seed}.png")
    path = draw_federation(described, name, out or default)
    if as_json:
        print(json.dumps({"picture": str(path), "data": data.model_dump(), **described}))
        return
    out_console.print(federation_table(described, name))
    say(statistics_line(described))
    say(f"figure: {path}")
