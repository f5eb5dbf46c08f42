"""`pfedla report` and `pfedla watch`: runs to look at."""

from pathlib import Path
from typing import Annotated

import typer

from pfedla.cli.options import out_console

Runs = Annotated[
    list[Path], typer.Argument(help="Run folders; a folder of `pfedla compare` stands for its runs.", metavar="RUN…")
]


def report(
    runs: Runs,
    out: Annotated[Path | None, typer.Option(help="File to write (default: report.html in the first folder).")] = None,
) -> None:
    """Write one page that shows runs: curves, clients, who borrows which layer from whom. It opens offline, anywhere.

    Example: pfedla report runs/first runs/local --out report.html
    """
    from pfedla.report.page import write_page

    path = write_page(_folders(runs), out or runs[0] / "report.html")
    out_console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def watch(
    runs: Runs,
    host: Annotated[
        str, typer.Option(help="Address to serve at; another than 127.0.0.1 shows the runs to the network.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any that is free).")] = 8642,
) -> None:
    """Serve the page of runs while they go on; it refreshes itself. Ctrl-C ends it, the runs go on.

    Example: pfedla watch runs/first
    """
    from pfedla.report.watch import Watcher

    with Watcher(_folders(runs), host, port) as server:
        shown = f"[{host}]" if ":" in host else host
        out_console.print(
            f"http://{shown}:{server.server_address[1]}/ shows {', '.join(map(str, runs))}; Ctrl-C ends it", soft_wrap=True
        )
        server.serve_forever()


def _folders(given: list[Path]) -> list[Path]:
    """A comparison's folder has no experiment of its own, its runs have."""
    found = []
    for path in given:
        inside = [] if (path / "experiment.toml").exists() else sorted(file.parent for file in path.glob("*/experiment.toml"))
        found += inside or [path]
    return list(dict.fromkeys(found))
