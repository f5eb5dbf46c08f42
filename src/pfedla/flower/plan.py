"""What a deployment is: an experiment, what its sites' data must be, and whose key belongs to which client.

It travels as Flower's run configuration (flat, plain values), so that server and sites read the same and
`flwr run --run-config` can lay other values over it.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pfedla import __version__
from pfedla.core.errors import PfedlaError, shown
from pfedla.data.federation import Outline
from pfedla.runs.experiment import Built, Experiment, assembled

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Deployment(BaseModel):
    """[deployment]: what is not the experiment's."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    version: str  # of pfedla, the same everywhere
    folder: str  # the run folder, on the server
    resume: bool = False  # go on in it
    min_clients: Annotated[int, Field(ge=1)] = 1  # with fewer at hand the run waits, then stops
    wait: Seconds = 300.0  # seconds for clients: at the start for all of them, later for min_clients
    round_timeout: Seconds = 3600.0  # seconds after which a client that has not answered is left out of the round
    shape: tuple[Annotated[int, Field(ge=1)], ...]  # of an example
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # of uint8 images, per channel; empty: examples are floats, used as they are
    std: tuple[float, ...] = ()
    names: tuple[str, ...]  # of the clients
    keys: tuple[str, ...]  # client i is the node with the i-th public key (OpenSSH)

    def outline(self) -> Outline:
        """Without the numbers of examples: these come with the clients."""
        unknown = torch.zeros(len(self.keys), dtype=torch.int64)
        return Outline(self.shape, self.classes, unknown, self.mean, self.std, self.names)


class Plan(NamedTuple):
    experiment: Experiment
    deployment: Deployment

    def to_run_config(self) -> dict[str, Any]:
        """Nested, as it stands in pyproject.toml; what is a list or a table goes as JSON text."""
        values = tomllib.loads(self.experiment.to_toml())
        values["deployment"] = self.deployment.model_dump(mode="json")
        return {
            key: {name: _plain(one) for name, one in value.items()} if isinstance(value, dict) else _plain(value)
            for key, value in values.items()
        }

    @classmethod
    def of_run_config(cls, flat: Mapping[str, Any]) -> "Plan":
        values: dict[str, Any] = {}
        for key, value in flat.items():
            *section, name = key.split(".", 1)
            place = values.setdefault(section[0], {}) if section else values
            place[name] = _read(value)
        try:
            deployment = Deployment.model_validate(values.pop("deployment", {}))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("deployment", *problem["loc"])))
            raise PfedlaError(f"{where} = {shown(problem['input'])} is not possible: {problem['msg']}") from None
        return cls(Experiment.parse(values), deployment)

    def built(self, outline: Outline) -> Built:
        experiment = self.experiment
        if experiment.faults.active():
            raise PfedlaError("[faults] makes simulated clients fail on purpose; leave it out of a deployment")
        if experiment.unseen_clients:
            raise PfedlaError("unseen_clients keeps simulated clients out of a run; leave it out of a deployment")
        if experiment.checkpoint.rounds != 1:
            raise PfedlaError(
                "a deployment is saved after every round, or sites could not go back: leave checkpoint.rounds at 1"
            )
        if self.deployment.version != __version__:
            raise PfedlaError(f"here is pfedla {__version__}, the federation runs {self.deployment.version}: install the same")
        built = assembled(experiment, outline)
        if len(outline) > 1 and len(set(self.deployment.keys)) < len(outline):
            raise PfedlaError("two clients have the same key")
        return built

    @property
    def folder(self) -> Path:
        return Path(self.deployment.folder)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _read(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
