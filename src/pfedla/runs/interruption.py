"""Ctrl-C and SIGTERM: the first asks a run to stop where it can be resumed, the second stops it at once."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

EXIT_CODE = 130
SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it
STOPPING = b"\nstopping: the clients at work finish first; press again to stop at once\n"


class Interruption:
    """While it is entered, `wanted()` says whether a signal has come."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self._wanted = quiet, False
        self.at_once: Callable[[], object] = lambda: None  # called before a second signal ends the process
        self._before: dict[signal.Signals, Any] = {}

    def wanted(self) -> bool:
        return self._wanted

    def _handle(self, number: int, frame: object) -> None:
        is_second, self._wanted = self._wanted, True
        with suppress(OSError):  # nobody may read it; not through the buffer, which may be in use
            if not self.quiet and (not is_second or os.isatty(2)):
                os.write(2, SHOW_CURSOR if is_second else STOPPING)
        if is_second:  # do not wait for the clients at work: what is on disk is whole at any moment
            self.at_once()
            os._exit(EXIT_CODE)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # SIGHUP: the terminal was closed; under nohup it is ignored, and stays so.
                if number != signal.SIGHUP or signal.getsignal(number) == signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
