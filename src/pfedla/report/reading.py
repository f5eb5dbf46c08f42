"""Read run folders without torch: result.json, rounds.jsonl, alpha.safetensors, federation.json. Formats 1 and 2."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, ValidationError, create_model
from safetensors import SafetensorError, safe_open

from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object

Array = npt.NDArray[Any]
Values = dict[str, Any]
MIB = 2**20
SPREAD = ("mean", "std", "p10", "worst")  # over clients
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Round = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Failures = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], dict[str, Count]]


def _shape(fields: Values) -> Any:
    """Return a model that checks these keys and ignores others; (type, default) makes a key optional."""
    made: Values = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model("Shape", __config__=ConfigDict(strict=True), **made)


_SPREAD, _TRAFFIC = dict.fromkeys(SPREAD, Share | None), {"down_bytes": Count, "up_bytes": Count}
_Spread, _PerClient = _shape(_SPREAD), _shape(_SPREAD | {"per_client": list[Share | None]})
_ACCURACIES = dict.fromkeys(("accuracy", "accuracy_after_training"), _Spread)
_Unseen = _shape(_ACCURACIES | {"accuracy_before": _Spread, "accuracy_alone": _Spread, "clients": list[Any]})
_Result = _shape(
    {"format": (Annotated[int, Field(ge=1, le=2)], 1)}  # a file of format 1 does not name it
    | dict.fromkeys(("algorithm", "dataset", "partition", "subset"), str)
    | dict.fromkeys(("clients", "seed", "refused_uploads"), Count)
    | dict.fromkeys(_ACCURACIES, _PerClient)
    | {"rounds": Round, "overlapping": bool, "leaked_test_share": Share, "failures": Failures, "faults": Values}
    | {"traffic": _shape(_TRAFFIC), "seconds": _shape({"total": Seconds, "phases": dict[str, Seconds]})}
    | {"attackers": (list[Any], []), "honest": (_shape(_ACCURACIES) | None, None), "unseen": (_Unseen | None, None)}
)
_Round = _shape(
    _TRAFFIC
    | {"round": Round, "loss": float | None, "training_loss": float | None, "seconds": dict[str, Seconds]}
    | {"cohort": list[Count], "retained": dict[str, Count], "failures": Failures}
    | {"accuracy": _Spread, "accuracy_after_training": Share | None}
    | {"honest": (_shape({"accuracy": _Spread}) | None, None)}
)


def _check(validate: Callable[[Any], Any], content: Any, path: Path) -> None:
    try:
        validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise PfedlaError(f"{path} is damaged: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def read_result(path: Path) -> Values:
    """Return the checked content of a result.json. The algorithm has its present name."""
    content = read_object(path)
    _check(_Result.model_validate, content, path)
    if "format" not in content and (path.parent / "experiment.toml").exists():
        content["algorithm"] = read_experiment(path.parent)["algorithm"]["name"]
    return content


def round_of(line: str) -> int | None:
    """Return the round of a line of rounds.jsonl; None for a line that was cut off or is damaged."""
    try:
        return int(_Round.model_validate_json(line).round)
    except ValidationError:
        return None


def read_rounds(run: Path) -> list[Values]:
    """Return the evaluated rounds so far. A last line that is still being written is left out."""
    path = run / "rounds.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    for line in lines:
        _check(_Round.model_validate_json, line, path)
    return [json.loads(line) for line in lines]


class Alpha(NamedTuple):
    values: Array  # [snapshots, receivers, layers, senders]
    layers: list[str]
    rounds: list[int]  # of the snapshots; 0 is the start

    @property
    def own(self) -> Array:
        """The self-weights [snapshots, layers, clients]."""
        return np.diagonal(self.values, axis1=1, axis2=3)


def read_alpha(run: Path) -> Alpha | None:
    """Return the weights of a run; None for a method without weights."""
    path = run / "alpha.safetensors"
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            layers = json.loads(file.metadata()["layers"])
            return Alpha(file.get_tensor("alpha"), layers, file.get_tensor("rounds").tolist())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise PfedlaError(f"{path} is damaged: {error!r:.200}") from None


def read_experiment(run: Path) -> Values:
    """Return experiment.toml as it was written, but with the algorithm's present name."""
    try:
        experiment = tomllib.loads((run / "experiment.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PfedlaError(f"{run} is not a run folder: experiment.toml: {error}") from None
    if experiment.get("algorithm", {}).get("rule") == "held-out":  # in format 1 this rule was an option of pfedla
        experiment["algorithm"]["name"] = "pfedla-heldout"
    return experiment


def honest_part(result: Values) -> Values:
    """Return the part of a result or line that has its accuracies: the honest clients', if some attack."""
    return dict(result.get("honest", result))


def flatten(values: Values) -> Values:
    """Return the settings of an experiment as section.key -> value."""
    flat: Values = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat
