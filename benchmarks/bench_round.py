"""Seconds for one round of local training, our engines beside a textbook PyTorch loop, interleaved in one process.

The fixed work: 10 clients, 420 training images each (synthetic), 2 local epochs, batch 32, plain SGD, the paper's CNN.
Only the ratios within one run mean anything; machines and minutes differ.
"""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pfedla.algorithms import create
from pfedla.contracts import LocalTraining
from pfedla.data.federation import Examples, Federation
from pfedla.engines import ENGINES, create_engine
from pfedla.models import build_model, model_for
from pfedla.results import environment
from pfedla.rounds import everyone
from pfedla.tasks import task_of

CLIENTS, IMAGES, TEST_IMAGES, EPOCHS, BATCH, LR, REPEATS = 10, 420, 180, 2, 32, 0.01, 5
SHAPES = {"Fashion-MNIST": (1, 28, 28), "CIFAR-10": (3, 32, 32)}
RESULTS = Path(__file__).parent / "results"


def synthetic(shape: tuple[int, ...]) -> Federation:
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        x = torch.randint(0, 256, (count, *shape), generator=draws, dtype=torch.uint8)
        return Examples(x, torch.randint(0, 10, (count,), generator=draws))

    train, test = ([examples(count) for _ in range(CLIENTS)] for count in (IMAGES, TEST_IMAGES))
    return Federation(train, test, tuple("0123456789"), mean=(127.5,) * shape[0], std=(73.9,) * shape[0])


def textbook(federation: Federation, module: nn.Module) -> Callable[[], None]:
    """What a tutorial would write: DataLoader, optimizer, one client after another, all intra-op threads; then the mean."""
    data = [TensorDataset(federation.normalised(examples.x), examples.y) for examples in federation.train]

    def round() -> None:
        trained = []
        for client in data:
            model = build_model(model_for(federation.shape), federation.shape, 10, torch.Generator())
            model.load_state_dict(module.state_dict())
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            for _ in range(EPOCHS):
                for x, y in DataLoader(client, BATCH, shuffle=True):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()
            trained.append(model.state_dict())
        {name: torch.stack([state[name].float() for state in trained]).mean(0) for name in trained[0]}

    return round


def ours(engine: str, federation: Federation, module: nn.Module) -> Callable[[], None]:
    """One round of FedAvg: download, train (with the test of the trained models), aggregate."""
    algorithm = create("fedavg", task_of(module), LocalTraining(LR, EPOCHS, BATCH))
    clients = create_engine(engine, algorithm, federation, device="cpu", threads=0, recalibrate="never")
    server = algorithm.init_server(CLIENTS, 0)
    cohort = everyone(federation.num_examples, 1, 0)

    def round() -> None:
        with clients:
            downloads = algorithm.download(server, cohort)
            trained = clients.train(cohort, downloads)
            algorithm.aggregate(server, cohort, downloads, trained.uploads)

    return round


def main() -> None:
    console = Console()
    report: dict[str, dict[str, list[float]]] = {}
    for name, shape in SHAPES.items():
        federation = synthetic(shape)
        module = build_model(model_for(shape), shape, 10, torch.Generator().manual_seed(0))
        contenders = {"textbook loop": textbook(federation, module)}
        contenders |= {engine: ours(engine, federation, module) for engine in ENGINES}
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        with console.status(f"{name}: {REPEATS} interleaved repeats"):
            for repeat in range(REPEATS + 1):
                for contender, round in contenders.items():
                    start = time.perf_counter()
                    round()
                    if repeat:  # the first one warms up
                        seconds[contender].append(time.perf_counter() - start)
        report[name] = seconds
        table = Table("contender", "median s/round", "fastest", "slowest", "samples/s", "x textbook", title=name)
        base = statistics.median(seconds["textbook loop"])
        for contender, times in seconds.items():
            median = statistics.median(times)
            numbers = (median, min(times), max(times), CLIENTS * IMAGES * EPOCHS / median, base / median)
            table.add_row(contender, *(f"{value:.{0 if value > 100 else 2}f}" for value in numbers))
        console.print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "round.json"
    path.write_text(json.dumps({"environment": environment(), "seconds_per_round": report}, indent=2) + "\n")
    console.print(f"written to {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else f"written to {path}")


if __name__ == "__main__":
    main()
