"""What a run folder's result.json and lines of rounds.jsonl must hold for tables and pictures to be made of them."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object

Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Client = Annotated[str, Field(pattern="^[0-9]{1,9}$")]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _Summary(_Part):
    mean: Share | None
    std: Share | None
    p10: Share | None
    worst: Share | None


class _Accuracies(_Part):
    accuracy: _Summary
    accuracy_after_training: _Summary


class _Unseen(_Accuracies):
    accuracy_before: _Summary
    accuracy_alone: _Summary


class _Traffic(_Part):
    down_bytes: Count
    up_bytes: Count


class _Seconds(_Part):
    total: Annotated[float, Field(ge=0, le=1e12)]


class _Result(_Accuracies):
    algorithm: str
    dataset: str
    partition: str
    subset: str
    overlapping: bool
    leaked_test_share: Share
    clients: Count
    rounds: Annotated[int, Field(ge=1)]
    seed: Count
    traffic: _Traffic
    seconds: _Seconds
    failures: dict[Client, dict[str, Count]]
    faults: dict[str, Any]
    attackers: list[Any] = []
    honest: _Accuracies | None = None
    unseen: _Unseen | None = None


class _Honest(_Part):
    accuracy: _Summary


class _Line(_Honest):
    round: Annotated[int, Field(ge=1)]
    accuracy_after_training: Share | None
    honest: _Honest | None = None


def read_result(path: Path) -> dict[str, Any]:
    """What result.json holds, as it was written."""
    content = read_object(path)
    try:
        _Result.model_validate(content)
    except ValidationError as error:
        problem = error.errors()[0]
        raise PfedlaError(
            f"{path} is damaged: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        ) from None
    return content


def round_of(line: str) -> int | None:
    """The round of a line of rounds.jsonl; None for one that was cut off or is damaged."""
    try:
        return _Line.model_validate_json(line).round
    except ValidationError:
        return None
