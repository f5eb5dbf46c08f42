"""What a person sees while a run goes on: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfedla.core.contracts import Failure
from pfedla.core.errors import Stopped
from pfedla.core.rounds import Round
from pfedla.core.uploads import NO_ANSWER

ROUND_LINE = re.compile(r"(.+): round (\d+), accuracy (.+), \d+ s left")


class Reporter:
    """Progress on standard error, so that standard output holds results only."""

    def __init__(
        self, total_rounds: int, quiet: bool, folder: Path | None = None, log: Path | None = None, again: str = ""
    ) -> None:
        self.folder, self.log = folder, log  # the log: a file that gets every line too
        self.again = again  # how a person goes on with what was stopped, if not by --resume in the folder
        self.console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
        self.total, self.done, self.played = total_rounds, 0, 0
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

    def say(self, line: str) -> None:
        with suppress(OSError, SystemExit):  # rich's answer to a closed pipe; the run goes on though nobody listens any more
            self.console.print(line, soft_wrap=True)
        if self.log:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def skip(self, rounds: int) -> None:
        """These rounds were played before."""
        self.done += rounds
        if self._live:
            self._live.update(self._task, advance=rounds)

    def on_round(self, played: Round) -> None:
        self.done += 1
        self.played += 1
        if played.evaluation is not None:
            self.accuracy = f"{100 * played.evaluation.accuracy.nanmean():.1f} %"
        if self._live:
            self._live.update(self._task, advance=1, accuracy=self.accuracy)
        elif played.evaluation is not None:
            left = (time.perf_counter() - self.start) / self.played * (self.total - self.done)
            self.say(f"{self.label}: round {played.round}, accuracy {self.accuracy}, {left:.0f} s left")  # ROUND_LINE
        for reason, clients in by_reason(played.failures).items():
            who = f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
            detail = f" (client {clients[0]}: {first})" if (first := played.failures[clients[0]].detail) else ""
            self.say(f"round {played.round}: {who} left out: {reason}{detail}")

    def relay(self, line: str) -> None:
        """A line of the reporter of another process: on a terminal a round moves the bar instead."""
        played = ROUND_LINE.fullmatch(line)
        if played and self._live:
            self._live.update(self._task, description=played[1], completed=int(played[2]), accuracy=played[3])
        else:
            self.say(line)
        self.done = int(played[2]) if played else self.done

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        if isinstance(error, (KeyboardInterrupt, Stopped)):
            kept = f"; --resume goes on in {self.folder}" if self.folder and self.folder.exists() else ""
            kept = f"; {self.again}" if self.again else kept
            self.say(f"stopped after {self.done} of {self.total} rounds{kept}")


def by_reason(failures: Mapping[int, Failure]) -> dict[str, list[int]]:
    """The clients of each reason, but for those who simply did not answer: with many clients that is every round."""
    grouped: dict[str, list[int]] = {}
    for client, failure in failures.items():
        if failure.reason != NO_ANSWER.reason:
            grouped.setdefault(failure.reason, []).append(client)
    return grouped
