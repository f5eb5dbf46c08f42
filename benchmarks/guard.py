"""Has a round become slower? CPU time of a round of the threaded engine relative to a textbook loop, on small work.

python benchmarks/guard.py

CPU time, because other processes hardly change it. One thread each, because waiting threads burn CPU time by chance.
The least of interleaved repeats, because a disturbance only ever adds. Compare with the ratio before your change.
"""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fixed_work import DATASETS, Work, lay_out
from processes import Contender

SMALL = {"clients": 4, "images": 130, "epochs": 1}


def measure(dataset: str, repeats: int) -> float:
    """Return the least CPU seconds of our round over those of the textbook loop."""
    work = Work(DATASETS[dataset][1], **SMALL)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "images.safetensors"
        lay_out(dataset, work, data, synthetic=True)
        # A process each: how an engine sets up threads and the allocator must not help the loop it is compared with.
        names = ("textbook", "threaded")
        contenders = [stack.enter_context(Contender(name, data, work, threads=1)) for name in names]
        for contender in contenders:
            contender.wait_until_ready()
        rounds = [[contender.play()["process_seconds"] for contender in contenders] for _ in range(repeats + 1)]
    textbook, threaded = (min(seconds) for seconds in zip(*rounds[1:], strict=True))  # the first round warms up
    return threaded / textbook


def main(repeats: Annotated[int, typer.Option(min=1, help="How many count; one before them warms up.")] = 7) -> None:
    """CPU time of a round relative to a textbook loop's."""
    print(json.dumps({dataset: round(measure(dataset, repeats), 3) for dataset in DATASETS}))


if __name__ == "__main__":
    typer.run(main)
