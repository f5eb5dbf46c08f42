"""Errors that the user can fix: each names what is wrong, where, and the choices."""

import difflib
import os
import re
import reprlib
from collections.abc import Iterable

from pydantic import ValidationError

AFFORDABLE = 2**36  # bytes (64 GiB)


class PfedlaError(ValueError):
    """A request that cannot be met; the command line prints it in one sentence and exits with 2."""


class NotApplicableError(PfedlaError):
    """The method makes no sense for this model or federation; `compare` prints a dash."""


class GaveUpError(PfedlaError):
    """No client has sent or evaluated anything usable for too long."""


class InUseError(PfedlaError):
    """Another process works in the same run folder."""


class Stopped(Exception):  # noqa: N818 (nothing is wrong)
    """The run was asked to stop, and did."""


def is_debugging() -> bool:
    """Return whether tracebacks are shown: `--debug` or PFEDLA_DEBUG=1."""
    return os.environ.get("PFEDLA_DEBUG", "") not in ("", "0")


def suggest(name: str, choices: Iterable[str]) -> str:
    """Return " (did you mean …?)" with the nearest choice, or "" if none is near; of equals the longest beginning."""
    asked, known = name.strip("'").lower(), {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(asked, known, n=3)
    if not near:
        return ""

    def rank(one: str) -> tuple[float, int]:
        return difflib.SequenceMatcher(None, one, asked).ratio(), len(os.path.commonprefix([one, asked]))  # noqa: RUF071

    return f" (did you mean {known[max(near, key=rank)]!r}?)"


def unknown(kind: str, name: object, choices: Iterable[str]) -> PfedlaError:
    """Return an error that names the thing, the nearest choice if one is near, and all choices."""
    names, asked = list(choices), shown(name)
    return PfedlaError(f"unknown {kind} {asked}{suggest(asked, names)}; choose one of: {', '.join(names) or 'none'}")


def invalid(error: ValidationError, known: Iterable[str] = (), *, prefix: str = "", depth: int = 1) -> PfedlaError:
    """Return the first thing that pydantic refuses: its key (`depth` parts), its value, and what it should be."""
    problems = error.errors()
    loc, value = problems[0]["loc"][:depth], problems[0]["input"]
    key = prefix + ".".join(map(str, loc))
    if problems[0]["type"] == "extra_forbidden":
        return unknown("key", key, [prefix + name for name in known])
    # A union ("auto" or a number) reports each of its members.
    same = [other["msg"] for other in problems if other["loc"][:depth] == loc]
    messages = dict.fromkeys(message.removeprefix("Input should be ").lower() for message in same)
    choices = [word for message in messages for word in re.findall("'([^']+)'", message)]
    meant = suggest(value, choices) if isinstance(value, str) else ""
    return PfedlaError(f"{key} = {shown(value)} is not possible{meant}: it should be {' or '.join(messages)}")


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, or its type."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def shown(value: object) -> str:
    """Return a value as it is quoted in an error: cut where it is long or deep."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 3, 120, 120, 60
    return short.repr(value)


def check_affordable(what: str, numbers: int, hint: str = "") -> None:
    """Refuse what would take too much memory (float32) before it is allocated."""
    if 4 * numbers > AFFORDABLE:
        raise PfedlaError(f"{what} would take {4 * numbers >> 30:,} GiB, more than {AFFORDABLE >> 30}{hint}")
