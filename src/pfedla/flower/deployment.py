"""A deployment travels as Flower's run configuration: server and sites read the same, `--run-config` overrides it."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from flwr.common.config import unflatten_dict
from pydantic import ConfigDict, Field, ValidationError, field_validator

from pfedla import __version__
from pfedla.core.errors import PfedlaError, invalid
from pfedla.core.files import parse_json
from pfedla.core.settings import Section
from pfedla.data.dataset import Column
from pfedla.data.federation import Outline
from pfedla.data.scaling import Scaling
from pfedla.runs.build import Built, build_around
from pfedla.runs.experiment import Experiment

Seconds = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
OUTLINE = ("shape", "classes", "mean", "std", "names", "targets")
JSON = (*OUTLINE, "keys", "class_counts", "columns", "scaling", "exclude")


class Deployment(Section):
    """An experiment, what the sites' data must look like, and which key belongs to which client."""

    model_config = ConfigDict(strict=False)  # lists become tuples
    experiment: Experiment
    version: str  # of pfedla, the same everywhere
    folder: Path  # the run folder, on the server
    order_key: Path  # on the server: signs what it sends
    address: str = ""  # of the gate, host:port
    resume: bool = False  # the run in `folder`
    from_round: Annotated[int, Field(ge=0)] = 0  # resume after this round; 0: after the last
    exclude: tuple[str, ...] = ()  # clients that take no part from the next round on: their names or numbers
    min_clients: Annotated[int, Field(ge=1)] = 1  # that must be online: with fewer a round waits, then the run stops
    wait: Seconds = 300.0  # for clients: for all of them at the start, later for min_clients
    round_timeout: Seconds = 3600.0  # until a round continues without clients that do not answer
    shape: Sizes | dict[str, tuple[int, ...]]  # of an example
    classes: tuple[str, ...]
    targets: tuple[str, ...] = ()  # the outputs of a task without classes
    task: str = "classification"
    vocabulary: int = 0
    mean: tuple[float, ...] = ()  # of uint8 images, per channel; empty: examples are used as they are
    std: tuple[float, ...] = ()
    names: tuple[str, ...]  # of the clients
    keys: tuple[str, ...]  # client i is the node with the i-th public key (OpenSSH)
    class_counts: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of a public data set, as in `Outline`
    fingerprint: str = ""  # of a public data set
    columns: tuple[Column, ...] = ()  # of a public table
    scaling: tuple[dict[str, tuple[float, ...]], ...] = ()  # of each client of public data, as in federation.json

    @field_validator(*JSON, mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        return parse_json(value.encode()) if isinstance(value, str) else value

    def to_run_config(self) -> dict[str, Any]:
        """Return nested values, as in pyproject.toml. Flower takes no lists: they become JSON."""
        values = self.model_dump(mode="json", exclude={"experiment"})
        plain = {key: json.dumps(value) if isinstance(value, list) else value for key, value in values.items()}
        return {**tomllib.loads(self.experiment.to_toml()), "deployment": plain}

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> Self:
        """Read values that are nested (pyproject.toml) or flat (`section.key`, as Flower hands them over)."""
        values = unflatten_dict(dict(config))
        settings = values.pop("deployment", {})
        try:
            return cls(experiment=Experiment.parse(values), **settings)
        except ValidationError as error:
            raise invalid(error, prefix="deployment.") from None

    def build(self) -> Built:
        """Return the method and a federation that nobody has joined; refuse what a deployment cannot do."""
        if self.experiment.faults.model_dump(exclude_defaults=True) or self.experiment.unseen_clients:
            raise PfedlaError("[faults] and unseen_clients are for simulations; leave them out of a deployment")
        if self.experiment.checkpoint.rounds != 1:
            raise PfedlaError("checkpoint.rounds must be 1 in a deployment: sites keep only their last states")
        if self.version != __version__:
            raise PfedlaError(f"pfedla {__version__} is installed here, the federation runs {self.version}")
        nobody = torch.zeros(len(self.keys), dtype=torch.int64)  # a client has no examples until it joins
        known: dict[str, Any] = {key: getattr(self, key) for key in OUTLINE} | {"known_fingerprint": self.fingerprint}
        known |= {"task": self.task, "vocabulary": self.vocabulary, "columns": self.columns}
        known["scaling"] = tuple(map(Scaling.from_lists, self.scaling)) or None
        known["known_counts"] = np.array(self.class_counts) if self.class_counts else None
        return build_around(self.experiment, Outline(num_examples=nobody, **known))
