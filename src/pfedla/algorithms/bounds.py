"""The kinds of numbers that options are. All have an end: torch has no rate beyond float32, Python prints no huge integer."""

from typing import Annotated

from pydantic import Field

Rate = Annotated[float, Field(gt=0, le=1e38, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=0, le=1e38, allow_inf_nan=False)]  # a rate that may be zero
Positive = Annotated[int, Field(ge=1, le=10**6)]
Natural = Annotated[int, Field(ge=0, le=10**6)]
