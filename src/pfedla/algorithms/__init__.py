"""The registry: every algorithm by its name, built from plain options."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pfedla.core.contracts import Algorithm, Task
from pfedla.core.errors import NotApplicableError, invalid, unknown
from pfedla.core.settings import Training

# Modules in the order in which their methods are listed. A method is a class that has a `name` of its own.
MODULES = "local fedavg fedprox fedbn fedper fedrep fedbabu lgfedavg perfedavg pfedme pfedhn ditto apfl fedala fedfomo"
MODULES += " fedamp similarity pfedla pfedla_heldout"
ALGORITHMS: dict[str, type[Algorithm]] = {}
for module in MODULES.split():
    for kind in vars(import_module(f"{__name__}.{module}")).values():
        if isinstance(kind, type) and issubclass(kind, Algorithm) and "name" in vars(kind):
            ALGORITHMS[kind.name] = kind


@cache
def options_model(name: str) -> type[BaseModel]:
    """Return the hyper-parameters of an algorithm: their types, bounds, defaults and descriptions."""
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    fields = {key: field for key, field in ALGORITHMS[name].model_fields.items() if key not in Algorithm.model_fields}
    own: dict[str, Any] = {key: (field.rebuild_annotation(), field) for key, field in fields.items()}
    return create_model(name, __config__=ConfigDict(extra="forbid", strict=True), **own)


def default_options(name: str) -> dict[str, Any]:
    return {key: field.default for key, field in options_model(name).model_fields.items()}


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


def create(name: str, task: Task, training: Training, options: Mapping[str, object] | None = None) -> Algorithm:
    resolved = resolve_options(name, options or {})
    return ALGORITHMS[name](task=task, training=training, **resolved)
