"""What a user sees while a run goes: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pfedla.core.contracts import Failure
from pfedla.core.errors import Stopped, is_debugging
from pfedla.core.rounds import Round
from pfedla.core.uploads import NO_ANSWER


class Display:
    """Progress on standard error, so that standard output holds results only."""

    def __init__(
        self,
        total_rounds: int,
        *,
        quiet: bool = False,
        folder: Path | None = None,
        log: Path | None = None,
        hint: str = "",
    ) -> None:
        self.log = log  # a file that gets every line too
        self.hint = hint or (f"resume with --resume --out {folder}" if folder else "")  # how to continue after a stop
        self.console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
        self.total, self.done, self.run_here = total_rounds, 0, 0
        self.label, self.accuracy = "", "…"
        self.start = time.perf_counter()
        self._live: Progress | None = None
        if self.console.is_terminal and not quiet:
            self._live = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("rounds"),
                TextColumn("accuracy {task.fields[accuracy]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._live.add_task("starting", total=total_rounds, accuracy="…")

    def begin(self, name: str, seed: int) -> None:
        self.label = f"{name}, seed {seed}"
        if self._live:
            self._live.update(self._task, description=self.label, accuracy="…")

    def say(self, line: str) -> None:
        with suppress(OSError, SystemExit):  # rich's answer to a closed pipe; the run continues without a reader
            self.console.print(line, soft_wrap=True)
        if self.log:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def skip(self, rounds: int) -> None:
        """Count rounds that were run before."""
        self.done += rounds
        if self._live:
            self._live.update(self._task, advance=rounds)

    def show(self, round: int, accuracy: str) -> None:
        """Move the bar to a round of another process."""
        self.done = round
        if self._live:
            self._live.update(self._task, completed=round, accuracy=accuracy)

    def on_round(self, round: Round) -> None:
        self.done += 1
        self.run_here += 1
        if round.evaluation is not None:
            self.accuracy = f"{100 * round.evaluation.accuracy.nanmean():.1f} %"
        if self._live:
            self._live.update(self._task, advance=1, accuracy=self.accuracy)
        elif round.evaluation is not None:
            left = (time.perf_counter() - self.start) / self.run_here * (self.total - self.done)
            self.say(f"{self.label}: round {round.round}, accuracy {self.accuracy}, {left:.0f} s left")
        self._say_failures(f"round {round.round}: left out:", round.failures)
        self._say_failures(f"round {round.round}: not evaluated:", round.evaluation_failures)

    def _say_failures(self, what: str, failures: Mapping[int, Failure]) -> None:
        for reason, clients in group_by_reason(failures).items():
            first = failures[clients[0]]
            who = f"client{'s' if len(clients) > 1 else ''} {', '.join(map(str, clients))}"
            detail = f" (client {clients[0]}: {first.detail})" if first.detail else ""
            self.say(f"{what} {who}: {reason}{detail}")
            if first.error is not None and is_debugging():
                self.say("".join(traceback.format_exception(first.error)))

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if isinstance(error, (KeyboardInterrupt, Stopped)):
            self.say(f"stopped after {self.done} of {self.total} rounds{'; ' if self.hint else ''}{self.hint}")


def group_by_reason(failures: Mapping[int, Failure]) -> dict[str, list[int]]:
    """Group the clients by reason, without those that did not answer: with many clients that is every round."""
    grouped: dict[str, list[int]] = {}
    for client, failure in failures.items():
        if failure.reason != NO_ANSWER.reason:
            grouped.setdefault(failure.reason, []).append(client)
    return grouped
