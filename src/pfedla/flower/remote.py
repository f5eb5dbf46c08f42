"""What the server knows of a federation whose clients keep their data."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pfedla.core.errors import PfedlaError, shown
from pfedla.data.federation import Outline
from pfedla.data.own import Array
from pfedla.flower.plan import Deployment

Count = Annotated[int, Field(ge=0, lt=2**40)]
Size = Annotated[int, Field(ge=1, lt=2**40)]


class Joined(BaseModel):
    """What a client tells when it joins. Class counts and digest only if its data are a part of a common data set."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    train: Size
    test: Size
    digest: Annotated[str, Field(max_length=64)] = ""
    train_counts: list[Count] | None = None
    test_counts: list[Count] | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        for size, counts in ((self.train, self.train_counts), (self.test, self.test_counts)):
            if counts is not None and sum(counts) != size:
                raise ValueError("its examples and those of its classes are not as many")
        return self

    @classmethod
    def of(cls, told: Mapping[str, Any], num_classes: int) -> Self:
        try:
            joined = cls.model_validate(dict(told))
        except ValidationError as error:
            problem = error.errors()[0]
            where = "".join(f"{part}: " for part in problem["loc"])
            raise PfedlaError(f"what it tells cannot be right: {where}{problem['msg']}, {shown(problem['input'])}") from None
        if any(counts is not None and len(counts) != num_classes for counts in (joined.train_counts, joined.test_counts)):
            raise PfedlaError(f"what it tells cannot be right: it does not have {num_classes} classes")
        return joined


class RemoteFederation(Outline):
    """The numbers of examples are zero until a client joins."""

    def __init__(self, deployment: Deployment) -> None:
        known = deployment.outline()
        super().__init__(known.shape, known.classes, known.num_examples, known.mean, known.std, known.names)
        self.joined: dict[int, Joined] = {}

    def admit(self, client: int, joined: Joined) -> None:
        self.joined[client] = joined
        self.num_examples[client] = joined.train

    def class_counts(self) -> Array | None:
        counts = [(one.train_counts, one.test_counts) for one in self._all()]
        return np.array(counts) if counts and all(None not in pair for pair in counts) else None

    def fingerprint(self) -> str:
        digests = [one.digest for one in self._all()]
        return self.fingerprint_of(digests) if digests and all(digests) else ""

    def _all(self) -> list[Joined]:
        return [self.joined[client] for client in range(len(self))] if len(self.joined) == len(self) else []
