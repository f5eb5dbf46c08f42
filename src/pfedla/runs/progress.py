"""What a user sees while a run goes: a live bar on a terminal, plain lines elsewhere, nothing if quiet."""

import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from pfedla.core.contracts import Failure
from pfedla.core.errors import Stopped, is_debugging
from pfedla.core.rounds import NO_ANSWER, Round, finite_mean
from pfedla.report.reading import Metric


class Display:
    """Progress on standard error, so that standard output holds results only."""

    def __init__(self, total_rounds: int, *, quiet: bool = False, log: Path | None = None, hint: str = "") -> None:
        self.log, self.hint = log, hint  # a file that gets every line too; how to continue after a stop
        self.total, self.skipped, self.start = total_rounds, 0, time.perf_counter()
        self.console = Console(stderr=True, quiet=quiet, highlight=False, markup=False)
        self.metric, self.names = Metric(), list[str]()  # of the run that is shown; names of its clients
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "rounds {task.fields[score]}")
        is_live = self.console.is_terminal and not quiet
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, disable=not is_live)
        self.bar.add_task("starting", total=total_rounds, score="…")
        self._task = self.bar.tasks[0]

    def begin(self, name: str, seed: int) -> None:
        self.bar.update(self._task.id, description=f"{name}, seed {seed}", score="…")

    def say(self, line: str) -> None:
        with suppress(OSError, SystemExit):  # rich's answer to a closed pipe; the run continues without a reader
            self.console.print(line, soft_wrap=True)
        if self.log:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def skip(self, rounds: int) -> None:
        """Count rounds that were run before."""
        self.skipped += rounds
        self.bar.advance(self._task.id, rounds)

    def show(self, done: float, score: float | None) -> str:
        """Move the bar to a round; return how its score is shown."""
        shown = f"{self.metric.label} {self.metric.show(score)}"
        self.bar.update(self._task.id, completed=done, score=shown)
        return shown

    def follow(self, description: str, done: float) -> None:
        """Show how far other processes are; without a terminal, say it when the description changes."""
        if self.bar.disable and description != self._task.description:
            self.say(description)
        self.bar.update(self._task.id, description=description, completed=done, score="")

    def on_round(self, round: Round) -> None:
        task, done = self._task, self._task.completed + 1
        self.bar.advance(task.id)
        if round.evaluation is not None:
            shown = self.show(done, finite_mean(round.evaluation.score))
            if self.bar.disable:
                left = (time.perf_counter() - self.start) / (done - self.skipped) * (self.total - done)
                self.say(f"{task.description}: round {round.round}, {shown}, {left:.0f} s left")
        self._say_failures(f"round {round.round}: left out:", round.failures)
        self._say_failures(f"round {round.round}: not evaluated:", round.evaluation_failures)

    def _say_failures(self, what: str, failures: Mapping[int, Failure]) -> None:
        """Say why clients failed, but not which did not answer: with many clients that is every round."""
        reasons = dict.fromkeys(failure.reason for failure in failures.values() if failure.reason != NO_ANSWER.reason)
        for reason in reasons:
            clients = [client for client, failure in failures.items() if failure.reason == reason]
            first = failures[clients[0]]
            who = f"client{'s' if len(clients) > 1 else ''} {', '.join(map(self._name, clients))}"
            detail = f" (client {self._name(clients[0])}: {first.detail})" if first.detail else ""
            self.say(f"{what} {who}: {reason}{detail}")
            if first.error is not None and is_debugging():
                self.say("".join(traceback.format_exception(first.error)))

    def _name(self, client: int) -> str:
        return self.names[client] if client < len(self.names) else str(client)

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.bar.stop()
        if isinstance(error, (KeyboardInterrupt, Stopped)):
            hint = f"; {self.hint}" if self.hint else ""
            self.say(f"stopped after {self._task.completed:.0f} of {self.total} rounds{hint}")
