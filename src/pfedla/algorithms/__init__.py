"""The registry: every algorithm by its name, built from plain options."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from pfedla.algorithms.apfl import APFL
from pfedla.algorithms.ditto import Ditto
from pfedla.algorithms.fedala import FedALA
from pfedla.algorithms.fedamp import FedAMP
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedbabu import FedBABU
from pfedla.algorithms.fedbn import FedBN
from pfedla.algorithms.fedfomo import FedFomo
from pfedla.algorithms.fedper import FedPer
from pfedla.algorithms.fedprox import FedProx
from pfedla.algorithms.fedrep import FedRep
from pfedla.algorithms.finetune import FedAvgFineTuned
from pfedla.algorithms.lgfedavg import LGFedAvg
from pfedla.algorithms.local import Local
from pfedla.algorithms.perfedavg import PerFedAvg
from pfedla.algorithms.pfedhn import PFedHN
from pfedla.algorithms.pfedla import HeurpFedLA, PFedLA
from pfedla.algorithms.pfedla_heldout import PFedLAHeldOut
from pfedla.algorithms.pfedme import PFedMe
from pfedla.algorithms.similarity import LayerSimilarity, ModelSimilarity
from pfedla.core.contracts import Algorithm, Task
from pfedla.core.errors import NotApplicableError, PfedlaError, shown, unknown
from pfedla.core.settings import Training

_GLOBAL = (Local, FedAvg, FedAvgFineTuned, FedProx)
_PARTIAL = (FedBN, FedPer, FedRep, FedBABU, LGFedAvg)
_PERSONAL = (PerFedAvg, PFedMe, PFedHN, Ditto, APFL, FedALA)
_MIXED = (FedFomo, FedAMP, LayerSimilarity, ModelSimilarity, PFedLA, HeurpFedLA, PFedLAHeldOut)
ALGORITHMS: dict[str, type[Algorithm]] = {kind.name: kind for kind in (*_GLOBAL, *_PARTIAL, *_PERSONAL, *_MIXED)}


def find(name: str) -> type[Algorithm]:
    if name not in ALGORITHMS:
        raise unknown("algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


@cache
def options_model(kind: type[Algorithm]) -> type[BaseModel]:
    """Return the hyper-parameters of an algorithm: their types, bounds, defaults and descriptions."""
    fields = {name: field for name, field in kind.model_fields.items() if name not in Algorithm.model_fields}
    own: dict[str, Any] = {name: (field.rebuild_annotation(), field) for name, field in fields.items()}
    return create_model(kind.__name__, __config__=ConfigDict(extra="forbid", strict=True), **own)


def default_options(name: str) -> dict[str, Any]:
    return {key: field.default for key, field in options_model(find(name)).model_fields.items()}


def resolve_options(name: str, options: Mapping[str, object]) -> dict[str, Any]:
    """Return all options of an algorithm: the given ones, checked, and the defaults of the others."""
    model = options_model(find(name))
    try:
        return model.model_validate(dict(options)).model_dump()
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            raise unknown(f"option of {name}", option, model.model_fields) from None
        raise PfedlaError(f"algorithm.{option} = {shown(options[option])}: {problem['msg'].lower()}") from None


def check_joining(method: Algorithm) -> None:
    """Raise NotApplicableError for a method that no client can join after its run."""
    if why := method.cannot_join:
        able = ", ".join(name for name, kind in ALGORITHMS.items() if not kind.cannot_join)
        raise NotApplicableError(f"no client can join a run of {method.name}: {why}; it can with: {able}")


def create(name: str, task: Task, training: Training, options: Mapping[str, object] | None = None) -> Algorithm:
    return find(name)(task=task, training=training, **resolve_options(name, options or {}))
