"""Where the time of a whole `pfedla run` goes: local training, server, evaluation, records, checkpoints, and the rest.

python benchmarks/bench_phases.py --rounds 5

The seconds of the rounds are those every run writes into its result.json; start-up and end are told by the
clock outside and the times at which the run's files appeared.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fixed_work import DATASETS
from pfedla.data.datasets import state_of
from pfedla.runs.folder import describe_environment
from processes import machine_seconds

HERE = Path(__file__).parent
PHASES = ("train", "evaluate", "server", "record", "checkpoint")  # of a round
AROUND = ("start", "fingerprint", "finish", "pictures")  # once a run
CADENCES = {"checkpoint every round": 1, "checkpoints by default": 0}
OVERHEAD_GOAL, EVALUATION_GOAL = 0.03, 0.08  # of a round: neither training nor evaluation, and evaluation


def measure(dataset: str, checkpoint_rounds: int, rounds: int, local_epochs: int, options: list[str]) -> dict[str, Any]:
    """A run of pFedLA with ten clients by phase, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [
            sys.executable,
            "-c",
            "from pfedla.cli import main; main()",
            "run",
            "-a",
            "pfedla",
            "-d",
            dataset,
            "--clients",
            "10",
            "--rounds",
            str(rounds),
            "--local-epochs",
            str(local_epochs),
            "--checkpoint-every",
            str(checkpoint_rounds),
            "--out",
            str(run),
            "--quiet",
            *options,
        ]
        before, cpu_before, start = machine_seconds(), os.times(), time.time()
        subprocess.run(command, check=True)
        end = time.time()
        result = json.loads((run / "result.json").read_text(encoding="utf-8"))
        at = {name: (run / name).stat().st_mtime for name in ("experiment.toml", "environment.json", "result.json")}
    phases = {phase: result["seconds"]["phases"][phase] for phase in PHASES}
    played = at["result.json"] - at["environment.json"]
    around = {
        "start": at["experiment.toml"] - start,  # Python and torch, reading the data, cutting them into clients
        "fingerprint": at["environment.json"] - at["experiment.toml"],
        "finish": played - sum(phases.values()),  # the first state; personal models and alpha, made and written
        "pictures": end - at["result.json"],
    }
    found = {"rounds": rounds, "seconds": end - start, "phases": phases, "around": around}
    if before is not None and (now := machine_seconds()) is not None:
        own = sum(os.times()[2:4]) - sum(cpu_before[2:4])
        busy, idle = now[0] - before[0], now[1] - before[1]
        found["others_share"] = max(0.0, busy - own) / (busy + idle)
    return found


def shares(found: dict[str, Any]) -> dict[str, float]:
    """Of the rounds' time: each phase; all that is neither training nor evaluation."""
    total = sum(found["phases"].values())
    by_phase = {phase: seconds / total for phase, seconds in found["phases"].items()}
    return by_phase | {"overhead": 1 - by_phase["train"] - by_phase["evaluate"]}


SHOWN, SHOWN_AROUND = ("train", "evaluate", "overhead"), ("start", "pictures")


def columns() -> list[str]:
    return ["", "s/round", *(f"{key} %" for key in SHOWN), *(f"{part} s" for part in SHOWN_AROUND)]


def cells(name: str, found: dict[str, Any]) -> list[str]:
    seconds, share = sum(found["phases"].values()) / found["rounds"], shares(found)
    shown = [f"{100 * share[key]:.2f}" for key in SHOWN]
    return [name, f"{seconds:.2f}", *shown, *(f"{found['around'][key]:.2f}" for key in SHOWN_AROUND)]


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(
        *columns(),
        title=f"pFedLA, 10 clients, {report['local_epochs']} epochs: a round by phase, and what a run takes once",
        caption="Overhead: all that is neither training nor evaluation. Goals: "
        f"overhead at most {100 * OVERHEAD_GOAL:.0f} %, evaluation every round at most {100 * EVALUATION_GOAL:.0f} %.",
    )
    for name, found in report["runs"].items():
        table.add_row(*cells(name, found))
    console.print(table)


def draw(report: dict[str, Any], path: Path) -> None:
    """A bar for each run: the phases of an average round, and beside it all but training, which dwarfs them."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    runs = report["runs"]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 1.4 + 0.6 * len(runs)), sharey=True, layout="constrained")
    for panel, phases in zip(panels, (PHASES, PHASES[1:]), strict=True):
        left = [0.0] * len(runs)
        for phase in phases:
            widths = [100 * shares(found)[phase] for found in runs.values()]
            panel.barh(list(runs), widths, left=left, color=f"C{PHASES.index(phase)}", label=phase)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        panel.set_xlabel("% of a round" if "train" in phases else "% of a round, all but training")
    panels[0].invert_yaxis()
    figure.suptitle(f"pFedLA, 10 clients, {report['local_epochs']} local epochs")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each run.")] = 5,
    only: Annotated[str, typer.Option(help=f"One data set: {', '.join(DATASETS)}.")] = "",
    quick: Annotated[
        bool, typer.Option(help="Tiny work, to see that everything runs; its numbers mean nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for phases.json and phases.png.")] = HERE / "results",
) -> None:
    """A whole run by phase."""
    if only and only not in DATASETS:
        raise typer.BadParameter(f"{only}: there are {', '.join(DATASETS)}")
    console = Console(width=None if sys.stdout.isatty() else 150)
    datasets = {name: DATASETS[name][0] for name in ([only] if only else DATASETS)}
    if quick:
        datasets = {"digits": "digits"}
    local_epochs = 1 if quick else 10
    runs: dict[str, Any] = {}
    for label, name in datasets.items():
        if not state_of(name).here:  # synthetic images would not be the run that users have
            console.print(f"{label} was left out: it is not in the data directory (pfedla data fetch {name})")
            continue
        for cadence, every in track(CADENCES.items(), label, console=Console(stderr=True)):
            runs[f"{label}, {cadence}"] = measure(
                name, every, rounds, local_epochs, ["--samples", "40"] if quick else []
            )
    report = {"quick": quick, "environment": describe_environment(), "local_epochs": local_epochs, "runs": runs}
    out.mkdir(parents=True, exist_ok=True)
    (out / "phases.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if runs:
        draw(report, out / "phases.png")
        show(report, console)
    console.print(f"written to {out / 'phases.json'}", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
