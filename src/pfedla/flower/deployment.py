"""A deployment: an experiment, what the sites' data must look like, and which key belongs to which client.

It travels as Flower's run configuration (flat, plain values). Server and sites read the same values, and
`flwr run --run-config` overrides them.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import ConfigDict, Field, ValidationError

from pfedla import __version__
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.settings import Section
from pfedla.flower.remote import RemoteFederation
from pfedla.runs.build import Built, build_around
from pfedla.runs.experiment import Experiment

Seconds = Annotated[float, Field(ge=1, allow_inf_nan=False)]


class DeploymentSettings(Section):
    """[deployment]: what does not belong to the experiment."""

    model_config = ConfigDict(strict=False)  # lists come as JSON
    version: str  # of pfedla, the same everywhere
    folder: str  # the run folder, on the server
    resume: bool = False  # the run in `folder`
    min_clients: Annotated[int, Field(ge=1)] = 1
    """Clients that must be online: with fewer a round waits, then the run stops."""
    wait: Seconds = 300.0
    """Seconds to wait for clients: for all of them at the start, later for min_clients."""
    round_timeout: Seconds = 3600.0
    """Seconds to wait for clients before a round continues without them."""
    shape: tuple[Annotated[int, Field(ge=1)], ...]  # of an example
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()  # of uint8 images, per channel; empty: examples are used as they are
    std: tuple[float, ...] = ()
    names: tuple[str, ...]  # of the clients
    keys: tuple[str, ...]  # client i is the node with the i-th public key (OpenSSH)

    def federation(self) -> RemoteFederation:
        """Return what is known of the federation before any client has joined: no numbers of examples."""
        unknown = torch.zeros(len(self.keys), dtype=torch.int64)
        known = self.model_dump(include={"shape", "classes", "mean", "std", "names"})
        return RemoteFederation(num_examples=unknown, **known)


class Deployment(NamedTuple):
    experiment: Experiment
    settings: DeploymentSettings

    def to_run_config(self) -> dict[str, Any]:
        """Return nested values, as in pyproject.toml; lists and tables inside a section become JSON text."""
        values = tomllib.loads(self.experiment.to_toml())
        values["deployment"] = self.settings.model_dump(mode="json")
        return {
            key: {name: _to_plain(one) for name, one in value.items()} if isinstance(value, dict) else _to_plain(value)
            for key, value in values.items()
        }

    @classmethod
    def from_run_config(cls, config: Mapping[str, Any]) -> "Deployment":
        """Read values that are nested (pyproject.toml) or flat (`section.key`, as Flower hands them over)."""
        values: dict[str, Any] = {}
        for key, value in config.items():
            section, _, name = key.rpartition(".")
            if isinstance(value, dict):
                values[key] = {name: _from_plain(one) for name, one in value.items()}
            else:
                (values.setdefault(section, {}) if section else values)[name] = _from_plain(value)
        try:
            settings = DeploymentSettings.model_validate(values.pop("deployment", {}))
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, ("deployment", *problem["loc"])))
            raise PfedlaError(f"{where} = {shown(problem['input'])} is not possible: {problem['msg']}") from None
        return cls(Experiment.parse(values), settings)

    def build(self) -> Built:
        """Return the method and a federation that nobody has joined; refuse what a deployment cannot do."""
        experiment, settings = self
        if experiment.faults.active or experiment.unseen_clients:
            key = "[faults]" if experiment.faults.active else "unseen_clients"
            raise PfedlaError(f"{key} is for simulations; leave it out of a deployment")
        if experiment.checkpoint.rounds != 1:
            raise PfedlaError("checkpoint.rounds must be 1 in a deployment: sites keep only their last states")
        if settings.version != __version__:
            raise PfedlaError(f"pfedla {__version__} is installed here, the federation runs {settings.version}")
        if len(set(settings.keys)) < len(settings.keys):
            raise PfedlaError("two clients have the same key")
        return build_around(experiment, settings.federation())

    @property
    def folder(self) -> Path:
        return Path(self.settings.folder)

    @property
    def num_clients(self) -> int:
        return len(self.settings.names)


def _to_plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _from_plain(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
