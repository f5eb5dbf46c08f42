"""What the user can put right: a sentence that names the thing and the choices."""

import difflib
from collections.abc import Iterable


class PfedlaError(ValueError):
    """A request that cannot be met; the command line prints it in one sentence and exits with 2."""


class NotApplicableError(PfedlaError):
    """The method makes no sense for this model or federation; `compare` prints a dash."""


class Stopped(Exception):  # noqa: N818 (nothing is wrong)
    """The run was asked to stop, and did."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> PfedlaError:
    """Names the thing, the nearest choice if one is near, and all choices."""
    names = list(choices)
    near = difflib.get_close_matches(str(name).lower(), names, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return PfedlaError(f"unknown {kind} {name!r}{meant}; choose one of: {', '.join(names) or 'none'}")
