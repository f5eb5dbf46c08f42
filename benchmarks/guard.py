"""Has a round become slower? CPU seconds of our threaded engine's round as a multiple of a textbook loop's, on small work.

python benchmarks/guard.py            measures
python benchmarks/guard.py --record   measures, and makes it what tests/test_speed.py compares with

CPU time, not the clock: others on the machine then hardly matter. One thread each: threads that wait for each other burn
CPU time by chance. The least of interleaved repeats: whatever disturbs only ever adds.
"""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from fixed_work import DATASETS, Work, lay_out
from pfedla.runs.result import environment
from processes import Contender

RECORDED = Path(__file__).parent.parent / "tests" / "speed.json"
TOLERATED = 1.5  # times the recorded ratio
SMALL = {"clients": 4, "images": 130, "epochs": 1}


def measure(dataset: str, repeats: int) -> dict[str, float]:
    """The least CPU seconds of a round of ours, and of a slowed one of ours, each over those of the textbook loop."""
    work = Work(DATASETS[dataset][1], **SMALL)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        data = Path(folder) / "images.safetensors"
        lay_out(dataset, work, data, synthetic=True)
        # A process each: how an engine sets up threads and the allocator must not help the loop it is compared with.
        contenders = [
            stack.enter_context(Contender(name, data, work, threads=1)) for name in ("textbook", "threaded", "slowed")
        ]
        for contender in contenders:
            contender.wait_until_ready()
        seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
        for _ in range(repeats + 1):  # the first one warms up
            for contender in contenders:
                seconds[contender.name].append(contender.play()["process_seconds"])
    least = {name: min(found[1:]) for name, found in seconds.items()}
    return {"ratio": least["threaded"] / least["textbook"], "slowed": least["slowed"] / least["textbook"]}


def too_slow(ratio: float, recorded: float) -> bool:
    return ratio > TOLERATED * recorded


def main(
    record: Annotated[bool, typer.Option(help="Make what is measured now the reference.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How many count; one before them warms up.")] = 7,
) -> None:
    """CPU time of a round relative to a textbook loop's."""
    measured = {dataset: measure(dataset, repeats) for dataset in DATASETS}
    print(json.dumps(measured))
    if record:
        ratios = {dataset: round(found["ratio"], 3) for dataset, found in measured.items()}
        RECORDED.write_text(json.dumps({"ratio": ratios, "environment": environment()}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
