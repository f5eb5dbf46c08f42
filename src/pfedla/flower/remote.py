"""What the server knows of a federation whose clients keep their data."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pfedla.core.errors import PfedlaError
from pfedla.data.federation import Outline

Count = Annotated[int, Field(ge=0, lt=2**40)]
Size = Annotated[int, Field(ge=1, lt=2**40)]


class SiteInfo(BaseModel):
    """What a site tells when it joins; class counts and digest only if its data are of a public data set."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
    train: Size
    test: Size
    digest: Annotated[str, Field(max_length=64)] = ""
    train_counts: list[Count] | None = None
    test_counts: list[Count] | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any], num_classes: int) -> Self:
        """Check what came from a site; it is untrusted."""
        try:
            info = cls.model_validate(dict(told))
        except ValidationError as error:
            problem = error.errors()[0]
            raise PfedlaError(f"its answer is invalid: {problem['loc'][0]}: {problem['msg']}") from None
        for size, counts in ((info.train, info.train_counts), (info.test, info.test_counts)):
            if counts is not None and (len(counts) != num_classes or sum(counts) != size):
                raise PfedlaError("its answer is invalid: the class counts do not fit the number of examples")
        return info


class RemoteFederation(Outline):
    """A federation whose numbers of examples are zero until a client joins."""

    def __init__(self, **known: Any) -> None:
        super().__init__(**known)
        self.joined: dict[int, SiteInfo] = {}

    def admit(self, client: int, info: SiteInfo) -> None:
        self.joined[client] = info
        self.num_examples[client] = info.train

    def class_counts(self) -> np.ndarray[Any, Any] | None:
        counts = [(info.train_counts, info.test_counts) for info in self._everybody()]
        return np.array(counts) if counts and all(None not in pair for pair in counts) else None

    def fingerprint(self) -> str:
        digests = [info.digest for info in self._everybody()]
        return self.fingerprint_of(digests) if digests and all(digests) else ""

    def _everybody(self) -> list[SiteInfo]:
        return [self.joined[client] for client in range(len(self))] if len(self.joined) == len(self) else []
