"""Read run folders without torch: result.json, rounds.jsonl, alpha.safetensors, federation.json. Formats 1 to 3."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, FailFast, Field, ValidationError, create_model
from safetensors import SafetensorError, safe_open

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, parse_json, parse_toml, read_bytes, read_object, sha256

Array = npt.NDArray[Any]
Values = dict[str, Any]
MIB = 2**20
LARGEST_LINES, LARGEST_ALPHA = 2**28, 2**29  # bytes of rounds.jsonl and of alpha.safetensors
SPREAD = ("mean", "std", "p10", "worst")  # over clients
Share = Annotated[float, Field(ge=0, le=1)]
Score = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Round = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
Failures = dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], dict[str, Count]]


def _shape(fields: Values) -> Any:
    """Return a model that checks these keys and ignores others; (type, default) makes a key optional."""
    made: Values = {name: kind if isinstance(kind, tuple) else (kind, ...) for name, kind in fields.items()}
    return create_model("Shape", __config__=ConfigDict(strict=True), **made)


_SPREAD, _TRAFFIC = dict.fromkeys(SPREAD, Score | None), {"down_bytes": Count, "up_bytes": Count}
_Spread, _PerClient = _shape(_SPREAD), _shape(_SPREAD | {"per_client": list[Score | None]})
_SCORES = dict.fromkeys(("score", "score_after_training"), _Spread)
_Unseen = _shape(_SCORES | {"score_before": _Spread, "score_alone": _Spread, "clients": list[Any]})
_Task = _shape({"name": str, "metric": str, "higher_is_better": bool, "percent": bool})
_Privacy = _shape({"epsilon": _shape({"max": float | None}), "delta": list[float]})
_Result = _shape(
    {"format": (Annotated[int, Field(ge=1, le=3)], 1)}  # a file of format 1 does not name it
    | dict.fromkeys(("algorithm", "dataset", "partition", "subset"), str)
    | dict.fromkeys(("clients", "seed", "refused_uploads"), Count)
    | dict.fromkeys(_SCORES, _PerClient)
    | {"task": _Task, "metrics": dict[str, _PerClient]}  # type: ignore[valid-type]
    | {"baseline": _shape({"name": str, "score": _PerClient}) | None}
    | {"rounds": Round, "overlapping": bool, "leaked_test_share": Share, "failures": Failures, "faults": Values}
    | {"traffic": _shape(_TRAFFIC), "seconds": _shape({"total": Seconds, "phases": dict[str, Seconds]})}
    | {"tuned_trials": (Count, 0), "warnings": (list[str], []), "norm_bounds": (Values, {})}
    | {"excluded": (dict[str, Round], {}), "privacy": (_Privacy | None, None)}
    | {"attackers": (list[Any], []), "honest": (_shape(_SCORES) | None, None), "unseen": (_Unseen | None, None)}
)
_Round = _shape(
    _TRAFFIC
    | {"round": Round, "loss": float | None, "training_loss": float | None, "seconds": dict[str, Seconds]}
    | {"cohort": list[Count], "retained": dict[str, Count], "failures": Failures}
    | {"score": _Spread, "score_after_training": Score | None}
    | {"honest": (_shape({"score": _Spread}) | None, None)}
)
_Counts = Annotated[list[Annotated[list[Count], FailFast()]], FailFast()]
_Names = Annotated[list[str], FailFast()]
_Federation = _shape({"clients": _Names, "classes": _Names, "train": _Counts, "test": (_Counts, [])})
_Experiment = _shape(
    {"seed": Count, "rounds": Round, "algorithm": _shape({"name": str})}
    | {"data": _shape({"dataset": str, "partition": (str, "")}), "training": (Values, {})}
)
_Alpha = _shape({"layers": list[str], "rounds": Annotated[list[Count], FailFast()]})
_Sums = _shape({"sha256": (dict[str, str], {})})
_OLD_TASK = {"name": "classification", "metric": "accuracy", "higher_is_better": True, "percent": True}
_KNOWN = {  # metric -> its label, whether higher is better, whether it is shown as a percentage
    "accuracy": ("accuracy", True, True),
    "balanced_accuracy": ("balanced accuracy", True, True),
    "macro_f1": ("macro F1", True, False),
    "auroc": ("AUROC", True, False),
    "auprc": ("AUPRC", True, False),
    "brier": ("Brier score", False, False),
    "ece": ("calibration error", False, False),
    "rmse": ("RMSE", False, False),
    "mae": ("MAE", False, False),
    "r2": ("R²", True, False),
    "c_index": ("c-index", True, False),
    "loss": ("loss", False, False),
}


class Metric(NamedTuple):
    """How a score is called, shown and compared. A score is as files have it: an accuracy is a fraction."""

    name: str = "accuracy"
    higher_is_better: bool = True
    percent: bool = True

    @classmethod
    def of(cls, found: Values) -> Self:
        """Return the headline metric of a result or a federation; without a task (old files) it is accuracy."""
        task = found.get("task", _OLD_TASK)
        return cls(task["metric"], task["higher_is_better"], task["percent"])

    @classmethod
    def named(cls, name: str) -> Self:
        """Return another metric of a task by its name alone."""
        return cls(name, *_KNOWN.get(name, ("", True, False))[1:])

    @property
    def label(self) -> str:
        return _KNOWN[self.name][0] if self.name in _KNOWN else self.name.replace("_", " ")

    @property
    def heading(self) -> str:
        """The head of a column: accuracy %, AUROC, RMSE (lower is better)."""
        return self.label + self.unit + self._direction

    @property
    def description(self) -> str:
        """The metric in a text: accuracy, RMSE (lower is better)."""
        return self.label + self._direction

    @property
    def _direction(self) -> str:
        return "" if self.higher_is_better else " (lower is better)"

    @property
    def axis(self) -> str:
        """The label of an axis: test accuracy (%), test RMSE."""
        return f"test {self.label} (%)" if self.percent else f"test {self.label}"

    @property
    def percentile(self) -> str:
        """What `p10` of a spread is: a tenth of the clients are worse."""
        return "10th percentile" if self.higher_is_better else "90th percentile"

    @property
    def unit(self) -> str:
        return " %" if self.percent else ""

    @property
    def factor(self) -> int:
        """From a score to the number that is shown."""
        return 100 if self.percent else 1

    @property
    def sign(self) -> int:
        """A score times this is higher where it is better."""
        return 1 if self.higher_is_better else -1

    def show(self, score: float | None) -> str:
        """Return 91.3 %, 0.913, 1234 or, where it is undefined, a dash."""
        return "–" if score is None else self.show_number(self.factor * score) + self.unit

    def show_number(self, number: float, digits: int = 1) -> str:
        """Return a score times `factor` without its unit; `digits` are of percentages."""
        return f"{number:.4g}" if abs(number) >= 100 and not self.percent else f"{number:.{self.digits(digits)}f}"

    def digits(self, of_percentages: int) -> int:
        return of_percentages if self.percent else 3


def upgrade(found: Values) -> Values:
    """Return a result, a line or a cell with the names of format 3, in which `accuracy` is `score`."""
    names = (key.replace("accuracy", "score", 1) if key.startswith("accuracy") else key for key in found)
    renamed = dict(zip(names, found.values(), strict=True))
    inner = {key: upgrade(renamed[key]) for key in ("honest", "unseen") if isinstance(renamed.get(key), dict)}
    return renamed | inner


def task_of_run(run: Path) -> Values:
    """Return the task of a run, finished or not: its name, metric, higher_is_better, percent."""
    path = run / "federation.json"
    task: Values = read_object(path).get("task", _OLD_TASK) if path.exists() else _OLD_TASK
    _check(_Task.model_validate, task, path)
    return task


def check_sum(run: Path, name: str) -> None:
    """Refuse a file of a finished run that is not as the run left it; old results hold no checksums."""
    result = run / "result.json"
    if not result.exists():
        return
    content = read_object(result)
    _check(_Sums.model_validate, content, result)
    if (expected := content.get("sha256", {}).get(name)) is None:
        return
    check_size(run / name)
    if sha256(run / name) != expected:
        raise PfedlaError(f"{run / name} is damaged or was changed: its SHA-256 is not the one in {result.name}")


def _check(validate: Callable[[Any], Any], content: Any, path: Path) -> None:
    try:
        validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise PfedlaError(f"{path} is damaged: {'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None


def read_federation(run: Path) -> Values:
    """Return federation.json with its clients, classes and counts checked."""
    path = run / "federation.json"
    content = read_object(path)
    _check(_Federation.model_validate, content, path)
    check_sum(run, path.name)
    known = {len(content["clients"])}, {len(content["classes"])}
    for counts in (content["train"], content.get("test", [])):
        if counts and ({len(counts)}, {*map(len, counts)}) != known:
            raise PfedlaError(f"{path} is damaged: its counts are not of its clients and classes")
    return content


def client_names(run: Path) -> list[str]:
    return list(read_federation(run)["clients"])


def read_result(path: Path) -> Values:
    """Return the checked content of a result.json. The algorithm has its present name."""
    content = upgrade({"task": _OLD_TASK, "metrics": {}, "baseline": None, "tuned_trials": 0} | read_object(path))
    _check(_Result.model_validate, content, path)
    if "format" not in content and (path.parent / "experiment.toml").exists():
        content["algorithm"] = read_experiment(path.parent)["algorithm"]["name"]
    return content


def _parse_line(line: bytes) -> Any:
    content = parse_json(line)
    return upgrade(content) if isinstance(content, dict) else content


def split_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end; a last one that is still being written, or was cut off, is left out."""
    content = read_bytes(path, LARGEST_LINES) if path.exists() else b""
    return content.split(b"\n")[:-1]


def round_of(line: bytes) -> int | None:
    """Return the round of a line of rounds.jsonl; None for a line that was cut off or is damaged."""
    try:
        return int(_Round.model_validate(_parse_line(line)).round)
    except ValueError:  # also pydantic's ValidationError
        return None


def read_rounds(run: Path) -> list[Values]:
    """Return the evaluated rounds so far. A last line that is still being written is left out."""
    path, found = run / "rounds.jsonl", []
    for number, line in enumerate(split_lines(path), 1):
        try:
            content = _parse_line(line)
        except ValueError as error:
            raise PfedlaError(f"{path} is damaged: line {number}: {error}") from None
        _check(_Round.model_validate, content, path)
        found.append(content)
    return found


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
    check_size(path, LARGEST_ALPHA)
    check_sum(run, path.name)
    try:
        with safe_open(path, framework="numpy") as file:
            layers = parse_json(file.metadata()["layers"].encode())
            alpha, rounds = file.get_tensor("alpha"), file.get_tensor("rounds").tolist()
        _check(_Alpha.model_validate, {"layers": layers, "rounds": rounds}, path)
        shape = (len(rounds), alpha.shape[1], len(layers), alpha.shape[1])
        if alpha.shape != shape or 0 in shape or not np.isfinite(alpha).all():
            raise ValueError(f"weights of shape {alpha.shape}, or not finite")
    except PfedlaError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise PfedlaError(f"{path} is damaged: {error!r:.200}") from None
    return Alpha(alpha, layers, rounds)


def read_experiment(run: Path) -> Values:
    """Return experiment.toml as it was written, but with the algorithm's present name."""
    path = run / "experiment.toml"
    if not path.exists():
        raise PfedlaError(f"{run} is not a run folder: it has no {path.name}")
    experiment = parse_toml(path)
    _check(_Experiment.model_validate, experiment, path)
    if experiment["algorithm"].get("rule") == "held-out":  # in format 1 this rule was an option of pfedla
        experiment["algorithm"]["name"] = "pfedla-heldout"
    return experiment


def honest_part(result: Values) -> Values:
    """Return the part of a result or line that has its scores: the honest clients', if some attack."""
    return dict(result.get("honest", result))


def flatten(values: Values) -> Values:
    """Return the settings of an experiment as section.key -> value."""
    flat: Values = {}
    for key, value in values.items():
        flat |= {f"{key}.{inner}": one for inner, one in value.items()} if isinstance(value, dict) else {key: value}
    return flat
