"""Seconds for one round of the fixed work: our engines, a textbook PyTorch loop, Flower's simulation, interleaved.

python benchmarks/bench_round.py --repeats 7
python benchmarks/bench_round.py --only CIFAR-10 --contenders textbook,threaded

Only ratios within one run mean anything: machines and minutes differ. Whoever else is at work on the machine
spoils the numbers (a loop on all threads suffers most), so every round comes with the share of the machine
that others took, and the quietest repeats are the ones that count.
"""

import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import tomllib
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fixed_work import DATASETS, Work, flop_per_sample, lay_out
from pfedla.runs.folder import describe_environment
from processes import Contender, machine_seconds

HERE = Path(__file__).parent
TEXTBOOK, FLOWER, GEMM = "textbook", "flower", "gemm"
LABELS = {
    TEXTBOOK: "textbook loop",
    "threaded": "pfedla, threaded",
    "compiled": "pfedla, threaded, compiled",
    "vectorized": "pfedla, vectorized",
    FLOWER: "Flower simulation",
}
QUIET = 0.08  # a repeat counts as undisturbed if others took no more of the machine
QUICK = {"clients": 2, "images": 28, "epochs": 1}


def measure(
    dataset: str, work: Work, names: list[str], repeats: int, wait: float, progress: Progress
) -> dict[str, Any]:
    """Run every contender on one data set, up to three times the repeats until as many are undisturbed."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "images.safetensors"
        kind = lay_out(dataset, work, data)
        contenders = []
        task = progress.add_task(f"{dataset}: starting", total=repeats + 1)
        for name in [*names, GEMM]:
            contenders.append(stack.enter_context(Contender(name, data, work)))
            contenders[-1].wait_until_ready()
        played: list[dict[str, Any]] = []  # by repeat
        while len(played) <= 3 * repeats and sum(map(undisturbed, played[1:])) < repeats:
            await_quiet(wait)
            repeat: dict[str, Any] = {"load_average": os.getloadavg()[0]}
            for contender in contenders:
                progress.update(task, description=f"{dataset}: {contender.name}")
                repeat[contender.name] = contender.play()
            played.append(repeat)
            if len(played) == 1 or undisturbed(repeat):  # the first one warms up
                progress.advance(task)
        progress.update(task, completed=repeats + 1, description=dataset)
        peaks = {contender.name: contender.peak_mib() for contender in contenders}
    counted = sorted(played[1:], key=others_share)[:repeats]
    return {
        "data": kind,
        "work": asdict(work),
        "flop_per_sample": flop_per_sample(work),
        "repeats_played": len(played) - 1,
        "undisturbed_repeats": sum(map(undisturbed, counted)),
        "load_average": [repeat["load_average"] for repeat in counted],
        "gemm_gflops": {
            threads: [repeat[GEMM]["gflops"][threads] for repeat in counted] for threads in counted[0][GEMM]["gflops"]
        },
        "contenders": {
            name: {"peak_mib": peaks[name]}
            | {key: [repeat[name].get(key) for repeat in counted] for key in ("seconds", "cpu_seconds", "others_share")}
            for name in names
        },
        "left_out_seconds": {
            name: [repeat[name]["seconds"] for repeat in played[1:] if repeat not in counted] for name in names
        },
    }


def others_share(repeat: dict[str, Any]) -> float:
    """Of the machine, the most that others took in one of a repeat's rounds."""
    return max(part.get("others_share", 0.0) for part in repeat.values() if isinstance(part, dict))


def undisturbed(repeat: dict[str, Any]) -> bool:
    return others_share(repeat) <= QUIET


def await_quiet(patience: float) -> None:
    """Until others leave the machine alone for half a second, or patience ends."""
    end = time.monotonic() + patience
    while time.monotonic() < end and (before := machine_seconds()) is not None:
        time.sleep(0.5)
        busy, idle = (now - then for now, then in zip(machine_seconds() or before, before, strict=True))
        if busy <= QUIET * (busy + idle):
            return


def rows(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by contender what tables and pictures show of a data set. Ratios are of rounds run in turn."""
    work = Work(**result["work"])
    seconds = {name: found["seconds"] for name, found in result["contenders"].items()}
    peak = statistics.median(list(result["gemm_gflops"].values())[-1]) * 1e9  # on all cores

    def ratios(name: str, other: str) -> list[float]:
        pairs = zip(seconds.get(other, []), seconds[name], strict=False)
        return sorted(theirs / own for theirs, own in pairs)

    found = {}
    for name, own in seconds.items():
        median = statistics.median(own)
        flops = work.samples * result["flop_per_sample"] / median
        found[name] = {
            "median": median,
            "samples_per_second": work.samples / median,
            "gemm_share": flops / peak,
            "peak_mib": result["contenders"][name]["peak_mib"],
            "x_textbook": ratios(name, TEXTBOOK),
            "x_flower": ratios(name, FLOWER),
        }
    return found


COLUMNS = ("contender", "s/round", "samples/s", "% of GEMM peak", "peak MiB", "x textbook", "x Flower")


def cells(name: str, row: dict[str, Any]) -> list[str]:
    def ratio(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ({values[0]:.2f}-{values[-1]:.2f})" if values else "-"

    return [
        LABELS[name],
        f"{row['median']:.2f}",
        f"{row['samples_per_second']:,.0f}",
        f"{100 * row['gemm_share']:.0f}",
        f"{row['peak_mib']:.0f}" if row["peak_mib"] else "-",
        ratio(row["x_textbook"]),
        ratio(row["x_flower"]),
    ]


def caption(result: dict[str, Any]) -> str:
    gflops = ", ".join(f"{statistics.median(v):.0f} on {threads}" for threads, v in result["gemm_gflops"].items())
    quiet = f"{result['undisturbed_repeats']} of {len(result['load_average'])} repeats undisturbed"
    return f"{result['data']} images; {quiet}; GEMM peak in GFLOP/s by threads: {gflops}; ratios above 1 are faster"


def peers() -> dict[str, Any]:
    return tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))


def peer_columns(report: dict[str, Any]) -> list[str]:
    first = "measured elsewhere, through their ratio to the textbook loop"
    return [first, *(text for dataset in report["results"] for text in (f"{dataset}: x textbook", "ours / theirs"))]


def peer_rows(report: dict[str, Any]) -> list[list[str]]:
    """A peer's ratio to the textbook loop, and what our fastest engine's is in terms of it, for each data set."""
    ours = {dataset: best(rows(result)) for dataset, result in report["results"].items()}
    table = []
    for peer, speeds in peers()["speed"].items():
        row = [peer]
        for dataset, own in ours.items():
            theirs = speeds.get(dataset)
            row += ["-", "-"] if theirs is None or own is None else [f"{theirs:.2f}", f"{own / theirs:.2f}"]
        table.append(row)
    return table


def best(found: dict[str, dict[str, Any]]) -> float | None:
    """The ratio of our faster engine to the textbook loop."""
    ratios = [found[name]["x_textbook"] for name in ("threaded", "vectorized") if name in found]
    return max((statistics.median(values) for values in ratios if values), default=None)


def show(report: dict[str, Any], console: Console) -> None:
    for dataset, result in report["results"].items():
        table = Table(*COLUMNS, title=f"{dataset}: one round", caption=caption(result), title_justify="left")
        for name, row in rows(result).items():
            table.add_row(*cells(name, row))
        console.print(table)
    table = Table(*peer_columns(report), caption=peers()["note"])
    for peer in peer_rows(report):
        table.add_row(*peer)
    console.print(table)
    for name, reason in report["skipped"].items():
        console.print(f"{LABELS[name]} was left out: {reason}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Speeds relative to the textbook loop; bars from least to most of the repeats."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    results, unreal = report["results"], " (tiny work: says nothing)" if report["quick"] else ""
    figure, panels = pyplot.subplots(
        1, len(results), figsize=(7 * len(results), 4.6), squeeze=False, layout="constrained"
    )
    for panel, (dataset, result) in zip(panels[0], results.items(), strict=True):
        bars = [
            (LABELS[name], row["x_textbook"], "tab:blue") for name, row in rows(result).items() if row["x_textbook"]
        ]
        bars += [(p, [v[dataset]], "tab:gray") for p, v in peers()["speed"].items() if dataset in v]
        for place, (_, values, colour) in enumerate(reversed(bars)):
            middle = statistics.median(values)
            spread = [[middle - values[0]], [values[-1] - middle]] if len(values) > 1 else None
            panel.barh(place, middle, xerr=spread, color=colour, capsize=3, error_kw={"lw": 1})
        panel.axvline(1, color="black", lw=0.8, ls=":")
        panel.set(title=f"{dataset} ({result['data']} images)", xlabel=f"speed, textbook loop = 1{unreal}")
        panel.set_yticks(range(len(bars)), [label for label, _, _ in reversed(bars)], fontsize=8)
        panel.barh([0], [0], color="tab:blue", label="measured here, interleaved")
        panel.barh([0], [0], color="tab:gray", label="measured elsewhere, by its ratio to the textbook loop")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def versions() -> dict[str, str]:
    packages = (name for name in ("flwr", "ray") if importlib.util.find_spec(name))
    return {name: importlib.metadata.version(name) for name in packages}


def main(
    repeats: Annotated[int, typer.Option(min=1, help="How many count; one before them warms up.")] = 7,
    only: Annotated[str, typer.Option(help=f"One data set: {', '.join(DATASETS)}.")] = "",
    contenders: Annotated[str, typer.Option(help=f"Names separated by commas, of {', '.join(LABELS)}.")] = ",".join(
        LABELS
    ),
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait before a repeat, at most, until others are quiet.")
    ] = 30,
    quick: Annotated[
        bool, typer.Option(help="Tiny work, to see that everything runs; its numbers mean nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for round.json and round.png.")] = HERE / "results",
) -> None:
    """Seconds per round of the fixed work, contenders interleaved."""
    names = contenders.split(",")
    if unknown := [name for name in names if name not in LABELS] or [
        name for name in [only] if name and name not in DATASETS
    ]:
        raise typer.BadParameter(f"{unknown[0]}: there are {', '.join([*LABELS, *DATASETS])}")
    skipped = {}
    if FLOWER in names and len(versions()) < 2:
        skipped[FLOWER] = "it is not installed (pip install -e '.[bench]')"
        names.remove(FLOWER)
    report: dict[str, Any] = {
        "quick": quick,
        "environment": describe_environment() | versions(),
        "started": time.strftime("%Y-%m-%d"),
        "skipped": skipped,
        "results": {},
    }
    with Progress(console=Console(stderr=True)) as progress:
        for dataset in [only] if only else DATASETS:
            work = Work(DATASETS[dataset][1], **(QUICK if quick else {}))
            report["results"][dataset] = measure(dataset, work, names, repeats, wait, progress)
    out.mkdir(parents=True, exist_ok=True)
    (out / "round.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(report, out / "round.png")
    console = Console(width=None if sys.stdout.isatty() else 150)
    show(report, console)
    console.print(f"written to {out / 'round.json'} and round.png", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
