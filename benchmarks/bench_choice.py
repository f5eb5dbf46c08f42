"""Which engine is faster for which model, which `engine = "auto"` follows, and what compiling gains.

python benchmarks/bench_choice.py

One round of FedAvg on random examples, interleaved in one process. Ratios are to the threaded engine; above 1
is faster.
"""

import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pfedla.algorithms import create
from pfedla.core.contracts import Cohort
from pfedla.core.models import build_model
from pfedla.core.settings import EngineSettings, Training
from pfedla.core.tasks import task_of
from pfedla.data.federation import Examples, Federation
from pfedla.engines.simulated import SimulatedEngine
from pfedla.runs.folder import describe_environment

HERE = Path(__file__).parent
CLASSES = 10
CASES = [  # model, shape of an example, clients, training examples each
    ("mlp", (64,), 10, 126),
    ("mlp", (64,), 100, 126),
    ("mlp", (784,), 10, 420),
    ("small-cnn", (1, 8, 8), 10, 126),
    ("small-cnn", (1, 8, 8), 100, 126),
    ("cnn", (1, 28, 28), 10, 420),
    ("cnn-bn", (3, 32, 32), 10, 420),
]
WAYS = {
    "threaded": EngineSettings(name="threaded"),
    "compiled": EngineSettings(name="threaded", compile=True),
    "vectorized": EngineSettings(name="vectorized"),
}
COLUMNS = [
    "model",
    "parameters",
    "clients",
    "threaded, s/round",
    "vectorized: x threaded",
    "compiled: x threaded",
    "compiling, s",
]


def measure(model: str, shape: tuple[int, ...], clients: int, examples: int, repeats: int) -> dict[str, Any]:
    draws = torch.Generator().manual_seed(0)

    def some(count: int) -> Examples:
        return Examples(
            torch.randn(count, *shape, generator=draws), torch.randint(0, CLASSES, (count,), generator=draws)
        )

    train, test = ([some(count) for _ in range(clients)] for count in (examples, 1))
    federation = Federation(train, test, tuple(map(str, range(CLASSES))))
    module = build_model(model, shape, CLASSES, torch.Generator().manual_seed(0))
    algorithm = create("fedavg", task_of(module), Training(lr=0.01, local_epochs=2, batch_size=32))
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    downloads = algorithm.download(algorithm.init_server(clients, 0), cohort)
    engines, setting_up = {}, {}
    for way, settings in WAYS.items():
        start = time.perf_counter()
        engines[way] = SimulatedEngine(algorithm, federation, settings, recalibrate="never")
        setting_up[way] = time.perf_counter() - start
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(repeats + 1):  # the first one warms up
        for way, engine in engines.items():
            with engine:
                start = time.perf_counter()
                engine.train(cohort, downloads)
                seconds[way].append(time.perf_counter() - start)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    counted = {way: found[1:] for way, found in seconds.items()}
    return {
        "model": model,
        "shape": shape,
        "clients": clients,
        "examples": examples,
        "parameters": parameters,
        "seconds": counted,
        "compiling": setting_up["compiled"],
    }


def cells(found: dict[str, Any]) -> list[str]:
    seconds = found["seconds"]

    def ratio(way: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(seconds['threaded'], seconds[way], strict=True)):.2f}"

    shape = "x".join(map(str, found["shape"]))
    return [
        f"{found['model']}, {shape}",
        f"{found['parameters']:,}",
        str(found["clients"]),
        f"{statistics.median(seconds['threaded']):.3f}",
        ratio("vectorized"),
        ratio("compiled"),
        f"{found['compiling']:.0f}",
    ]


def main(
    repeats: Annotated[int, typer.Option(min=1, help="How many count; one before them warms up.")] = 7,
    quick: Annotated[bool, typer.Option(help="One tiny case, to see that everything runs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for choice.json.")] = HERE / "results",
) -> None:
    """Threaded, compiled and vectorized, for models of several sizes."""
    cases = [("mlp", (4,), 2, 8)] if quick else CASES
    results = []
    with Progress(console=Console(stderr=True)) as progress:
        for case in progress.track(cases, description="models"):
            results.append(measure(*case, repeats))
    out.mkdir(parents=True, exist_ok=True)
    report = {"environment": describe_environment(), "results": results}
    (out / "choice.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    table = Table(*COLUMNS)
    for found in results:
        table.add_row(*cells(found))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
