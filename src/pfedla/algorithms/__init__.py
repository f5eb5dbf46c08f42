"""The registry: every algorithm by its name, built from plain options."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pfedla.core.contracts import Algorithm, Task
from pfedla.core.errors import NotApplicableError, PfedlaError, invalid
from pfedla.core.files import safe_name
from pfedla.core.plugins import find_named
from pfedla.core.settings import Training

# Modules in the order in which their methods are listed. A method is a class that has a `name` of its own.
MODULES = "local fedavg fedprox fedbn fedper fedrep fedbabu lgfedavg perfedavg pfedme pfedhn ditto apfl fedala fedfomo"
MODULES += " fedamp similarity fedsa_lora pfedla pfedla_heldout"
# Whose clients touch their data through `sgd` alone: with [privacy] all that they send, and all that follows from it,
# is private. The others send or keep more: losses, gradients, weights of their own.
PRIVATE = "local fedavg fedprox fedper fedrep fedbabu lg-fedavg ditto fedamp layer-similarity model-similarity"
PRIVATE += " fedsa-lora pfedhn pfedla heurpfedla fedavg-ft"
ALGORITHMS: dict[str, type[Algorithm]] = {}
for module in MODULES.split():
    for kind in vars(import_module(f"{__name__}.{module}")).values():
        if isinstance(kind, type) and issubclass(kind, Algorithm) and "name" in vars(kind):
            ALGORITHMS[kind.name] = kind


NamedClass = str | type[Algorithm]
OWN: dict[str, type[Algorithm]] = {}  # classes that a caller passed, by "package.module:Class"


def register(kind: NamedClass) -> str:
    """Return the name under which `find` finds a method; a class of the caller's need not be importable."""
    if isinstance(kind, str):
        return kind
    place = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', kind)}"
    OWN[place] = _check_class(place, kind)
    return place


def find(name: NamedClass) -> type[Algorithm]:
    """Return a method: registered, installed as an entry point, "package.module:Class", or the class itself."""
    name = register(name)
    if isinstance(name, str) and name in ALGORITHMS:
        return ALGORITHMS[name]
    return _check_class(name, OWN.get(name) or find_named("algorithm", name, ALGORITHMS))


def _check_class(place: str, kind: Any) -> type[Algorithm]:
    """Refuse what is no finished algorithm; name and describe one that does not do so itself."""
    if not isinstance(kind, type):
        raise PfedlaError(f"algorithm {place!r} should be a class, not {kind!r:.80}")
    if not issubclass(kind, Algorithm):
        raise PfedlaError(f"algorithm {place!r}: {kind.__name__} is not a subclass of pfedla.core.contracts.Algorithm")
    if missing := ", ".join(sorted(kind.__abstractmethods__)):
        raise PfedlaError(f"algorithm {place!r}: {kind.__name__} has no {missing}")
    for field in kind.model_fields:
        if any(callable(vars(base).get(field)) for base in kind.__mro__):
            raise PfedlaError(f"algorithm {place!r}: the option {field!r} hides a function of that name; rename it")
    if "name" not in vars(kind):  # an inherited one is another method's
        kind.name = kind.__name__.lower()
    if "summary" not in vars(kind):
        kind.summary = (vars(kind).get("__doc__") or kind.__name__).strip().partition("\n")[0].rstrip(".")
    return kind


def short_name(name: NamedClass) -> str:
    """Return what a method is called in tables and folders: its `name`, unless a registered method has that one."""
    if name in ALGORITHMS:
        return str(name)
    short = safe_name(find(name).name)
    return safe_name(register(name)) if short in ALGORITHMS else short


def options_model(name: NamedClass) -> type[BaseModel]:
    """Return the hyper-parameters of an algorithm: their types, bounds, defaults and descriptions."""
    return _options_of(find(name))


@cache
def _options_of(kind: type[Algorithm]) -> type[BaseModel]:
    fields = {key: field for key, field in kind.model_fields.items() if key not in Algorithm.model_fields}
    own: dict[str, Any] = {key: (field.rebuild_annotation(), field) for key, field in fields.items()}
    return create_model(kind.name, __config__=ConfigDict(extra="forbid", strict=True), **own)


def default_options(name: NamedClass) -> dict[str, Any]:
    """Return the options and their defaults; an option without a default must be given."""
    fields = options_model(name).model_fields
    return {
        key: None if field.is_required() else field.get_default(call_default_factory=True)
        for key, field in fields.items()
    }


def resolve_options(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return all options of an algorithm: the given ones, checked, and the defaults of the others."""
    model = options_model(name)
    try:
        return model.model_validate(dict(options)).model_dump()
    except ValidationError as error:
        raise invalid(error, model.model_fields, prefix="algorithm.") from None


def check_joining(method: Algorithm) -> None:
    """Raise NotApplicableError for a method that no client can join after its run."""
    if why := method.cannot_join:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if not kind.cannot_join)
        raise NotApplicableError(f"no client can join a run of {method.name}: {why}; it can with: {able}")


def check_privacy(method: Algorithm) -> None:
    """Raise NotApplicableError for a method whose client does more with its data than private training covers."""
    if type(method) not in (ALGORITHMS[name] for name in PRIVATE.split()):
        able = ", ".join(sorted(PRIVATE.split()))
        why = "uses its clients' data in other ways than by private training"
        raise NotApplicableError(f"[privacy] does not cover {method.name}, which {why}; it covers {able}")


def create(name: str, task: Task, training: Training, options: Mapping[str, object] | None = None) -> Algorithm:
    resolved = resolve_options(name, options or {})
    return find(name)(task=task, training=training, **resolved)
