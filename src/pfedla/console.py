"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfedla.rounds import Round


class Reporter:
    """Progress on standard error, so that standard output holds results only."""

    def __init__(self, total_rounds: int, quiet: bool, folder: Path | None = None) -> None:
        self.folder = folder
        self.console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
        self.total, self.done = total_rounds, 0
        self.label, self.accuracy = "", "…"
        self.start = time.perf_counter()
        self._live: Progress | None = None
        if self.console.is_terminal and not quiet:
            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds"),
                TextColumn("accuracy {task.fields[accuracy]}"), TimeRemainingColumn(), console=self.console,
            )  # fmt: skip
            self._task = self._live.add_task("starting", total=total_rounds, accuracy="…")

    def begin(self, name: str, seed: int) -> None:
        self.label = f"{name}, seed {seed}"
        if self._live:
            self._live.update(self._task, description=self.label, accuracy="…")

    def on_round(self, played: Round) -> None:
        self.done += 1
        if played.evaluation is not None:
            self.accuracy = f"{100 * played.evaluation.accuracy.mean():.1f} %"
        if self._live:
            self._live.update(self._task, advance=1, accuracy=self.accuracy)
        elif played.evaluation is not None:
            left = (time.perf_counter() - self.start) / self.done * (self.total - self.done)
            self.console.print(
                f"{self.label}: round {played.round}, accuracy {self.accuracy}, {left:.0f} s left", soft_wrap=True
            )
        if len(played.refused):
            who = ", ".join(map(str, played.refused.tolist()))
            self.console.print(f"round {played.round}: refused uploads that are not finite, of clients {who}", soft_wrap=True)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        if isinstance(error, KeyboardInterrupt):
            kept = f"; what was written is in {self.folder}" if self.folder and self.folder.exists() else ""
            self.console.print(f"interrupted after {self.done} of {self.total} rounds{kept}", soft_wrap=True)
