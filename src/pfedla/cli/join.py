"""`pfedla join`: a client that comes when the run is over."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pfedla.cli.options import Json, Quiet, Run, out_console


def join(
    run: Run,
    data: Annotated[Path, typer.Option(help="file.npz with the newcomer's x, y and perhaps test (a ready test split).")],
    rounds: Annotated[int, typer.Option(min=1, max=10**6, help="Rounds that the newcomer plays.")] = 10,
    name: Annotated[str | None, typer.Option(help="What to call it: RUN/joined/NAME (default: the file's name).")] = None,
    quiet: Quiet = False, as_json: Json = False,
) -> None:  # fmt: skip
    """Take a new client into a finished run: it gets a personal model, nobody else's changes.

    Example: pfedla join runs/first --data new.npz
    """
    from pfedla.report.tables import borrowed_lines, joined_table, traffic_line
    from pfedla.runs.joining import join_run

    warn = Console(stderr=True, highlight=False, markup=False, quiet=quiet or as_json)
    folder, result = join_run(run, data, rounds=rounds, name=name, say=lambda line: warn.print(line, soft_wrap=True))
    if as_json:
        print(json.dumps({"joined": str(folder), **result}))
    elif not quiet:
        out_console.print(joined_table(result))
        for line in borrowed_lines(result):
            out_console.print(line, soft_wrap=True)
        examples = "{train} training and {test} test examples (split: {split})".format(**result["examples"])
        out_console.print(f"{examples}; {traffic_line(result['traffic'])}; results in {folder}", soft_wrap=True)
        out_console.print(f"pfedla evaluate or export {run} --client {folder.relative_to(run)} takes its model", soft_wrap=True)
