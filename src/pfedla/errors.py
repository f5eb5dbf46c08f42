"""What the user can put right: a sentence that names the thing and the choices."""

from collections.abc import Iterable


class PfedlaError(ValueError):
    """A request that cannot be met; the command line prints it in one sentence and exits with 2."""


class NotApplicableError(PfedlaError):
    """The method makes no sense for this model or federation; `compare` prints a dash."""


def unknown(kind: str, name: object, choices: Iterable[str]) -> PfedlaError:
    return PfedlaError(f"unknown {kind} {name!r}; choose one of: {', '.join(choices)}")
