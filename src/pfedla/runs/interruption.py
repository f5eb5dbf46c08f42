"""Ctrl-C and SIGTERM: the first asks a run to stop where it can be continued, the second stops it at once."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

EXIT_CODE = 130
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []  # a terminal that is closed


class Interruption:
    """While it is entered, `wanted()` tells whether a signal has come."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._wanted = False
        self.at_once: Callable[[], object] = lambda: None  # what a second signal must still see to
        self._before: dict[signal.Signals, Any] = {}

    def wanted(self) -> bool:
        return self._wanted

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (
            self._wanted
        ):  # at once: without waiting for clients at work. What is on disk is whole at any moment.
            self.at_once()
            if os.isatty(2):
                _say(SHOW_CURSOR)
            os._exit(EXIT_CODE)
        self._wanted = True
        if not self.quiet:
            _say(
                b"\nstopping: the state is saved when the clients at work are done; once more stops at once\n"
            )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            wanted = [
                *SIGNALS,
                *(number for number in HANGUP if signal.getsignal(number) == signal.SIG_DFL),
            ]  # not under nohup
            self._before = {number: signal.signal(number, self._handle) for number in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _say(message: bytes) -> None:
    """Not through a buffer, the signal may have come while it was being written to; and though nobody may be reading."""
    with suppress(OSError):
        os.write(2, message)
