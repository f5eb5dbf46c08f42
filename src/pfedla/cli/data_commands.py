"""`pfedla data`: list and fetch data sets, show a split."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from pfedla.cli.options import File, Json, Setting, answer, say, with_settings
from pfedla.core.errors import PfedlaError

data_app = typer.Typer(help="Data sets and federations: list, fetch, show.", no_args_is_help=True)


@data_app.command("list")
def list_(as_json: Json = False) -> None:
    """List the data sets: what they are, which are here and where, how to get the others."""
    from pfedla.data.datasets import KNOWN, data_directory, state_of

    table, states = Table(Column("data set", no_wrap=True), "shape", "classes", "what", "here"), {}
    for name, entry in KNOWN.items():
        state, shape = state_of(name), "x".join(map(str, entry.shape))
        states[name] = {"here": state.here, "where": str(state.place or "")}
        table.add_row(name, shape, str(entry.num_classes), entry.summary, state.says)
    table.add_row("file.npz", "any", "any", "arrays x, y; optionally client, test", "your own")
    hint = "`pfedla data fetch NAME` downloads a data set, or checks it if it is here."
    hint += f"\ndata directory: {data_directory()} (set PFEDLA_DATA_DIR to change it)"
    answer({"data_directory": str(data_directory()), "datasets": states}, table, hint, as_json=as_json)


@data_app.command()
def fetch(names: Annotated[list[str], typer.Argument(help="Names of `pfedla data list`.", metavar="NAME…")]) -> None:
    """Download data sets from their official hosts, or check those that are here. EMNIST is one archive."""
    from pfedla.data import datasets

    known = {name: datasets.find(name) for name in names}  # all names are checked before the first is downloaded
    for name in known:
        dataset, downloaded = datasets.fetch(name, say)
        where = f"{'downloaded to' if downloaded else 'already in'} {datasets.state_of(name).place or 'the package'}"
        say(f"{name}: {len(dataset.y):,} examples of {len(dataset.classes)} classes, checked; {where}")


@data_app.command()
@with_settings(only=("dataset", "partition", "clients", "samples", "seed"))
def show(
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    setting: Setting = None,
    out: Annotated[Path | None, typer.Option(help="The figure: .png, .pdf, .svg (default: federation-….png).")] = None,
    as_json: Json = False,
) -> None:
    """Show a split: clients x classes as a table and a figure, and how heterogeneous the clients are.

    Takes what `pfedla run` takes, also a finished run's folder.

    Example: pfedla data show -d cifar10 --partition dirichlet --set data.beta=0.1
    """
    from pfedla.core.files import safe_name
    from pfedla.data.federation import build_federation
    from pfedla.report.figures import FORMATS, draw_federation
    from pfedla.report.tables import federation_table, statistics_line, where
    from pfedla.runs.experiment import Experiment, gather
    from pfedla.runs.folder import describe_federation

    if out and out.suffix.lower() not in FORMATS:
        raise PfedlaError(f"--out {out}: the figure must end in {', '.join(FORMATS)}")
    experiment = Experiment.parse(gather(file, given, setting or []))
    data, federation = build_federation(experiment.data, experiment.seed)
    described = describe_federation(federation)
    name = f"{where(data.model_dump() | described)}, seed {experiment.seed}"
    split = f"{safe_name(Path(data.dataset).stem)}-{data.split_name}-s{experiment.seed}"
    path = draw_federation(described, name, out or Path(f"federation-{split}.png"))
    content = {"picture": str(path), "data": data.model_dump(), **described}
    text = f"{statistics_line(described)}\nfigure: {path}"
    answer(content, federation_table(described, name), text, as_json=as_json)
