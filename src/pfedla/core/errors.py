"""What the user can put right: a sentence that names the thing and the choices."""

import difflib
import reprlib
from collections.abc import Iterable


class PfedlaError(ValueError):
    """A request that cannot be met; the command line prints it in one sentence and exits with 2."""


class NotApplicableError(PfedlaError):
    """The method makes no sense for this model or federation; `compare` prints a dash."""


class GaveUpError(PfedlaError):
    """Nothing that could be used came from any client for too long."""


class Stopped(Exception):  # noqa: N818 (nothing is wrong)
    """The run was asked to stop, and did."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> PfedlaError:
    """Names the thing, the nearest choice if one is near, and all choices."""
    names, asked = list(choices), shown(name)
    near = difflib.get_close_matches(asked.strip("'").lower(), names, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return PfedlaError(f"unknown {kind} {asked}{meant}; choose one of: {', '.join(names) or 'none'}")


def shown(value: object) -> str:
    """A value of a stranger's file as it stands in a sentence: cut where it is long or deep."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to write a whole number of more than 4,300 digits
        return f"a huge {type(value).__name__}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 120, 120, 60

AFFORDABLE = 2**36  # bytes (64 GiB)


def check_affordable(what: str, numbers: int, instead: str = "", instead_numbers: int = 0) -> None:
    """Refuse what would take absurdly much memory (float32) before any of it is taken; say what fits `instead`."""
    if 4 * numbers > AFFORDABLE:
        fits = instead and 4 * instead_numbers <= AFFORDABLE
        hint = f"; {instead} takes {4 * instead_numbers / 2**30:.1f} GiB" if fits else ""
        refused = f"{what} would take {4 * numbers >> 30:,} GiB of memory; more than {AFFORDABLE >> 30} is refused"
        raise PfedlaError(refused + hint)
