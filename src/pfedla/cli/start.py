"""`pfedla new` and `pfedla models`: what one's own experiment starts from."""

import contextlib
import runpy
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument

from pfedla.cli.options import Json, Quiet, answer, say
from pfedla.core.errors import PfedlaError

COMMAND = "pfedla compare experiment.toml -a local,fedavg,method:ServerMomentum"
NEXT = f"next: cd {{folder}} && {COMMAND}"


def new(
    folder: Annotated[Path, Argument(help="New folder for the project.", metavar="DIR")], quiet: Quiet = False
) -> None:
    """Write a starter project with your own model, method and data; it runs at once.

    Example: pfedla new demo
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise PfedlaError(f"{folder} is a file; choose another folder") from None
    if any(folder.iterdir()):
        raise PfedlaError(f"{folder} is not empty and is never overwritten; choose another folder")
    for template in sorted(files("pfedla.cli").joinpath("starter").iterdir(), key=lambda one: one.name):
        text = template.read_text(encoding="utf-8")
        (folder / template.name.removesuffix(".txt")).write_text(text, encoding="utf-8")
    with contextlib.chdir(folder), contextlib.redirect_stdout(None):
        runpy.run_path("data.py")  # the example's data: the project runs at once
    if not quiet:
        say(f"written to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        say(NEXT.format(folder=folder))


def models(as_json: Json = False) -> None:
    """List the models: what they take and what they are. Your own: --model package.module:factory."""
    from pfedla.core.models import describe_models

    found, table = describe_models(), Table("model", "takes", "what it is")
    for name, about in found.items():
        table.add_row(name, about["takes"], about["summary"])
    answer(found, table, as_json=as_json)
