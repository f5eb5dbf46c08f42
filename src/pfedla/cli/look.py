"""`pfedla report` and `pfedla watch`: show runs."""

from pathlib import Path
from typing import Annotated

import typer

from pfedla.cli.options import out_console

Runs = Annotated[
    list[Path], typer.Argument(help="Run folders. A comparison's folder means all its runs.", metavar="RUN…")
]
Out = Annotated[Path | None, typer.Option(help="File to write (default: report.html in the first folder).")]
Host = Annotated[str, typer.Option(help="Address to serve at. Any but 127.0.0.1 shows the runs to the network.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port (0: any free port).")]


def report(runs: Runs, out: Out = None) -> None:
    """Write one page that shows runs: curves, clients, who borrows which layer from whom. It opens offline.

    Example: pfedla report runs/first runs/local --out report.html
    """
    from pfedla.report.page import write_page

    path = write_page(_find_folders(runs), out or runs[0] / "report.html")
    out_console.print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)


def watch(runs: Runs, host: Host = "127.0.0.1", port: Port = 8642) -> None:
    """Serve the page of runs while they run; it refreshes itself. Ctrl-C stops the server, not the runs.

    Example: pfedla watch runs/first
    """
    from pfedla.report.watch import Watcher

    with Watcher(_find_folders(runs), host, port) as server:
        address = f"http://{f'[{host}]' if ':' in host else host}:{server.server_address[1]}/"
        out_console.print(f"{address} shows {', '.join(map(str, runs))}; Ctrl-C stops it", soft_wrap=True)
        server.serve_forever()


def _find_folders(given: list[Path]) -> list[Path]:
    """Return the run folders. The folder of a comparison has no experiment.toml, its runs have."""
    found = []
    for path in given:
        is_run = (path / "experiment.toml").exists()
        found += ([] if is_run else sorted(file.parent for file in path.glob("*/experiment.toml"))) or [path]
    return list(dict.fromkeys(found))
