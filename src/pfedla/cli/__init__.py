"""The command line. torch is imported inside the commands, so that --help answers at once."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.markup import escape
from typer import Exit, Option, Typer

from pfedla import __version__
from pfedla.cli.deploy import deploy_app, site_app
from pfedla.cli.start import models, new
from pfedla.cli.train import compare, reproduce, run, tune
from pfedla.cli.use import algorithms, communication, data_app, evaluate, export, join, report, watch
from pfedla.core import plugins
from pfedla.core.errors import GaveUpError, PfedlaError, Stopped, first_line, is_debugging
from pfedla.runs.interruption import EXIT_CODE

HELP = {"help_option_names": ["-h", "--help"]}
app = Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)
GROUPS = {
    "Train": (new, run, compare, tune, algorithms, models),
    "Look": (report, watch),
    "Use": (evaluate, export, join),
}
GROUPS["Reproduce"] = (reproduce, communication)
for _group, _commands in GROUPS.items():
    for _command in _commands:
        app.command(rich_help_panel=_group)(_command)
app.add_typer(deploy_app, name="deploy", rich_help_panel="Deploy")
app.add_typer(site_app, name="site", rich_help_panel="Deploy")
app.add_typer(data_app, name="data", rich_help_panel="Data")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise Exit


Debug = Annotated[bool, Option("--debug", help="Show tracebacks (or PFEDLA_DEBUG=1).")]
Version = Annotated[bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")]


@app.callback()
def top(version: Version = False, debug: Debug = False) -> None:
    """Personalised federated learning: learn how much of each layer to borrow from whom."""


def main() -> None:
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ["PFEDLA_DEBUG"] = "1"
    plugins.SEARCH[:] = [str(Path.cwd())]  # where own code is imported from, if any is asked for
    try:
        app()
    except (Stopped, KeyboardInterrupt):
        sys.exit(EXIT_CODE)
    except Exception as error:  # OSError: a full disk, a folder that may not be written
        where = plugins.locate(error)
        is_known = isinstance(error, (PfedlaError, OSError, MemoryError))
        if not is_known and not where:
            raise  # a bug of ours
        if is_debugging():
            traceback.print_exc()
        text = escape(str(error) or "out of memory")
        if not is_known:  # the user's own code
            text = escape(f"{type(error).__name__}: {first_line(error)}{where}; --debug shows the traceback")
        Console(stderr=True, highlight=False).print(f"[bold red]pfedla:[/] {text}", soft_wrap=True)
        sys.exit(1 if isinstance(error, (GaveUpError, OSError, MemoryError)) else 2)
