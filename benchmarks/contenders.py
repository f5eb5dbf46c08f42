"""One contender in its own process: `python contenders.py NAME DATA WORK THREADS` (0: as many as it takes).

For every line on standard input it runs a round and answers with a line of JSON that holds its seconds.
"""

import copy
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fixed_work import CLASSES, TextbookCNN, Work, loaders, mean_of, read_federation, train_textbook
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.models import build_model, model_for
from pfedla.core.rounds import run_rounds
from pfedla.core.settings import EngineSettings, Training
from pfedla.core.tasks import task_of
from pfedla.engines.simulated import SimulatedEngine

Play = Callable[[], Mapping[str, Any] | None]  # a round; what it returns is answered beside its seconds
Serve = Callable[[Play], None]

GEMM_SIZE, GEMM_PRODUCTS = 1024, 12


def textbook(data: Path, work: Work, threads: int, serve: Serve) -> None:
    """What a tutorial writes: one client after another on all threads that torch takes, then the mean of the models."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = TextbookCNN(work.shape, work.batch_norm)
    clients = loaders(data, work)

    def play() -> None:
        trained = []
        for loader in clients:
            local = copy.deepcopy(model)
            train_textbook(local, loader, work)
            trained.append(local.state_dict())
        model.load_state_dict(mean_of(trained))

    serve(play)


def ours(settings: EngineSettings, data: Path, work: Work, threads: int, serve: Serve) -> None:
    """Run FedAvg as every run does: download, train, check, aggregate, commit; nothing is evaluated."""
    federation = read_federation(data)
    module = build_model(model_for(work.shape), work.shape, CLASSES, torch.Generator().manual_seed(0))
    training = Training(lr=work.lr, local_epochs=work.epochs, batch_size=work.batch_size)
    algorithm = FedAvg(task=task_of(module), training=training)
    settings = settings.model_copy(update={"threads": threads})
    never = sys.maxsize
    with SimulatedEngine(algorithm, federation, settings, recalibrate="never") as clients:
        rounds = run_rounds(
            algorithm,
            clients,
            federation.num_examples,
            algorithm.init_server(work.clients, 0),
            rounds=range(1, never),
            participation=1.0,
            evaluate_every=never,
            seed=0,
        )

        def play() -> None:
            assert not next(rounds).failures

        serve(play)


def flower(data: Path, work: Work, threads: int, serve: Serve) -> None:
    from flower_contender import simulate  # only here: it is an extra

    simulate(data, work, serve)  # one thread a client, as many clients at a time as there are cores


def gemm(data: Path, work: Work, threads: int, serve: Serve) -> None:
    """What the machine can do: fp32 matrix products, the fastest of a few, on one thread and on all."""
    left, right = torch.rand(2, GEMM_SIZE, GEMM_SIZE)
    out = torch.empty_like(left)

    def fastest(count: int) -> float:
        torch.set_num_threads(count)
        seconds = []
        for _ in range(GEMM_PRODUCTS):
            start = time.perf_counter()
            torch.mm(left, right, out=out)
            seconds.append(time.perf_counter() - start)
        return 2 * GEMM_SIZE**3 / min(seconds) / 1e9

    serve(lambda: {"gflops": {str(count): fastest(count) for count in dict.fromkeys((1, os.cpu_count() or 1))}})


CONTENDERS: dict[str, Callable[[Path, Work, int, Serve], None]] = {
    "textbook": textbook,
    "threaded": partial(ours, EngineSettings(name="threaded")),
    "compiled": partial(ours, EngineSettings(name="threaded", compile=True)),
    "vectorized": partial(ours, EngineSettings(name="vectorized")),
    "flower": flower,
    "gemm": gemm,
}


def main(name: str, data: str, work: str, threads: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer

    def serve(play: Play) -> None:
        print(json.dumps({"ready": True}), file=answers)
        for _ in sys.stdin:
            start, cpu_start = time.perf_counter(), time.process_time()
            more = play() or {}
            spent = {"seconds": time.perf_counter() - start, "process_seconds": time.process_time() - cpu_start}
            print(json.dumps(spent | more), file=answers)

    CONTENDERS[name](Path(data), Work(**json.loads(work)), int(threads), serve)


if __name__ == "__main__":
    main(*sys.argv[1:])
