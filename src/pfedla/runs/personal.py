"""Use the result: load a client's personal model from a run folder, evaluate it, export it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import BaseModel, FailFast, Field, ValidationError, model_validator
from safetensors.torch import save_file
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import read_json, read_object, read_tensors, write_text
from pfedla.core.layers import Params
from pfedla.core.models import build_model, outline
from pfedla.core.settings import AUTO
from pfedla.core.tasks import load_tensors, task_of
from pfedla.core.training import evaluate
from pfedla.data.federation import Examples, Federation, build_federation, digest_of, federation_of_one
from pfedla.data.formats import load_arrays
from pfedla.data.recipe import TEST_SHARE
from pfedla.runs.experiment import SITES, Experiment, read_toml
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT, new_folder

JOINED = "joined"  # the folder of the clients that joined after the run
GIVE_A_FILE = "give a file with --data"

# FailFast: an untrusted file could otherwise be answered by gigabytes of error messages.
Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], FailFast()]
Names = Annotated[tuple[str, ...], FailFast()]
Means = Annotated[tuple[Annotated[float, Field(ge=0, le=255)], ...], FailFast()]
Spreads = Annotated[tuple[Annotated[float, Field(ge=1e-6, le=255)], ...], FailFast()]


class FederationFile(BaseModel):
    """federation.json of a run folder."""

    shape: Shape
    classes: Names
    mean: Means  # of uint8 images, per channel; empty: inputs are used as they are
    std: Spreads
    clients: Names
    test: list[Any]  # [clients, classes], only compared
    subset: str = ""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if len(self.shape) not in (1, 3):
            raise ValueError(f"shape has {len(self.shape)} numbers, not 1 or 3")
        if (len(self.mean), len(self.std)) not in ((0, 0), (self.shape[0], self.shape[0])):
            numbers = f"{len(self.mean)} means and {len(self.std)} standard deviations"
            raise ValueError(f"{numbers} for shape {self.shape}")
        return self


@dataclass(frozen=True, kw_only=True)
class PersonalModel:
    run: Path
    client: int | str  # its number; joined/NAME for one that joined after the run
    module: nn.Module
    tensors: Params
    experiment: Experiment
    federation: FederationFile

    @property
    def name(self) -> str:
        return self.federation.clients[self.client] if isinstance(self.client, int) else self.client

    def joined(self) -> dict[str, Any]:
        """Return the result of a client that joined after the run; nothing for a client of the run."""
        return read_object(self.run / self.client / RESULT) if isinstance(self.client, str) else {}

    def site(self) -> dict[str, Any]:
        """Return what a site of a deployment knows of itself; nothing if the folder is not a site's."""
        return read_object(self.run / "site.json") if (self.run / "site.json").exists() else {}


class RawInput(nn.Module):
    """A personal model with its normalisation inside: raw inputs in, logits out."""

    mean: Tensor
    std: Tensor

    def __init__(self, personal: PersonalModel) -> None:
        super().__init__()
        self.model = load_tensors(personal.module, personal.tensors)
        data = personal.federation
        per_channel = (-1, *(1 for _ in data.shape[1:])) if data.mean else (1,)
        self.register_buffer("mean", torch.tensor(data.mean or [0.0]).view(per_channel))
        self.register_buffer("std", torch.tensor(data.std or [1.0]).view(per_channel))

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x.to(torch.float32) - self.mean) / self.std)  # type: ignore[no-any-return]


def _find(client: str, names: tuple[str, ...], joined: tuple[str, ...]) -> int | str:
    """Find a client by its name, by its number (unless names are numbers), or as joined/NAME."""
    if client in names:
        return names.index(client)
    if client in map(str, range(len(names))) and not any(name.isdecimal() for name in names):
        return int(client)
    if client in joined:
        return client
    raise unknown("client", client, [*names, *joined])


def read_run(run: Path) -> tuple[Experiment, FederationFile]:
    """Return the experiment and the federation of a finished run."""
    for name in (EXPERIMENT, FEDERATION, RESULT):
        if not (run / name).exists():
            inside = sorted(path.parent.name for path in run.glob(f"*/{RESULT}"))
            hint = f"; it holds runs: {', '.join(inside)}" if inside else ""
            raise PfedlaError(f"{run} is not a finished run: it has no {name}{hint}")
    try:
        federation = FederationFile.model_validate(read_json(run / FEDERATION))
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{part}: " for part in problem["loc"])
        raise PfedlaError(f"{run / FEDERATION} is damaged: {where}{problem['msg']}") from None
    return Experiment.parse(read_toml(run)), federation


def load_personal(run: Path, client: str) -> PersonalModel:
    """Load one client's personal model; check names, shapes and finiteness against the run's model."""
    experiment, federation = read_run(run)
    joined = tuple(f"{JOINED}/{path.parent.name}" for path in sorted(run.glob(f"{JOINED}/*/{RESULT}")))
    found = _find(client, federation.clients, joined)
    file = f"{found}/model" if isinstance(found, str) else f"models/client-{found}"
    model = experiment.model, federation.shape, len(federation.classes)
    # Two untrusted files must agree on the sizes before anything of that size is made.
    tensors = read_tensors(run / f"{file}.safetensors", task_of(outline(*model)).initial())
    module = build_model(*model, torch.Generator())
    return PersonalModel(
        run=run, client=found, module=module, tensors=tensors, experiment=experiment, federation=federation
    )


def evaluate_personal(personal: PersonalModel, data: Path | None) -> dict[str, Any]:
    """Test a personal model on the examples of a file, or on the client's own test split of the run."""
    x, y = _load_test_split(personal) if data is None else _load_examples(personal, data)
    model = RawInput(personal).eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        correct, loss = evaluate(task_of(model), tensors, x, y)
    accuracy = correct.item() / len(y)
    return {"client": personal.client, "examples": len(y), "accuracy": accuracy, "loss": loss.item()}


def _load_test_split(personal: PersonalModel) -> Examples:
    experiment, client = personal.experiment, personal.client
    if experiment.data.dataset == SITES:
        raise PfedlaError(f"only the site has its data: {GIVE_A_FILE} (a folder will do)")
    if isinstance(client, str):
        return _load_joined_split(personal)
    section, federation = build_federation(experiment.data, experiment.seed)
    federation, _ = federation.hold_back(experiment.unseen_clients, experiment.seed)
    known = personal.federation
    if site := personal.site():  # it knows its own examples only
        same = site.get("digest") == digest_of(federation.train[client], federation.test[client])
    else:
        counts = federation.class_counts()[:, 1].tolist()
        same = (federation.shape, federation.classes, counts) == (known.shape, known.classes, known.test)
    if not same:
        raise PfedlaError(f"{section.dataset} has changed since the run was made; {GIVE_A_FILE}")
    return federation.test[client]


def _load_joined_split(personal: PersonalModel) -> Examples:
    joined = personal.joined()
    if not (isinstance(joined.get("data"), str) and isinstance(joined.get("digest"), str)):
        where = f"{personal.client}/{RESULT}"
        raise PfedlaError(f"{where} does not name the examples that the client joined with; {GIVE_A_FILE}")
    data = Path(joined["data"])
    federation, _ = load_unseen(data, personal.experiment, personal.federation)
    if joined["digest"] != digest_of(federation.train[0], federation.test[0]):
        raise PfedlaError(f"{data} has changed since {personal.name} joined; {GIVE_A_FILE}")
    return federation.test[0]


def load_unseen(path: Path, experiment: Experiment, known: FederationFile) -> tuple[Federation, str]:
    """Return a federation of the one client whose examples a file holds, and how they are split.

    The examples are normalised as the run's.
    """
    if str(path.resolve()) in (experiment.data.dataset, known.subset):
        raise PfedlaError(f"{path}: the run is made of these examples; an unseen client brings its own")
    dataset = load_arrays(path).match(known.shape, known.classes, pixels=bool(known.mean), whose="the run")
    if len(dataset.client_names) > 1:
        names = ", ".join(dataset.client_names[:5]) + (", …" if len(dataset.client_names) > 5 else "")
        raise PfedlaError(f"{path} holds examples of several clients ({names}); give a file of each")
    dataset = replace(dataset, mean=known.mean, std=known.std)
    name = dataset.client_names[0] if dataset.client_names else path.stem
    if dataset.test is not None:
        return federation_of_one(dataset, name, experiment.seed), "the file's own"
    share = TEST_SHARE if experiment.data.test_share == AUTO else experiment.data.test_share
    return federation_of_one(dataset, name, experiment.seed, share), f"{share:.0%} for test, as the run's"


def _load_examples(personal: PersonalModel, path: Path) -> Examples:
    """Read the test rows of a file, labels numbered as in the run.

    If the run's clients are the file's, only the rows of this client.
    """
    dataset, known, who = load_arrays(path), personal.federation, personal.name
    section = personal.experiment.data
    trained_on = (section.dataset, known.subset, personal.site().get("data"), personal.joined().get("data"))
    if dataset.test is None and str(path.resolve()) in trained_on:
        fix = "mark a test split in the file, or leave --data out to test on the client's own split"
        raise PfedlaError(f"{path}: the run trained on these examples; {fix}")
    dataset = dataset.match(known.shape, known.classes, pixels=bool(known.mean), whose="the model")
    rows = np.ones(len(dataset.y), bool) if dataset.test is None else dataset.test.copy()
    if dataset.client is not None and section.partition == "client" and who in known.clients:
        if who not in dataset.client_names:
            names = ", ".join(dataset.client_names)
            raise PfedlaError(f"{path} has no example of client {who!r}; it has: {names}")
        rows &= dataset.client == dataset.client_names.index(who)
    if not rows.any():
        raise PfedlaError(f"{path} has no test example of this client")
    return Examples(torch.from_numpy(dataset.x[rows]), torch.from_numpy(dataset.y[rows]))


def export_personal(personal: PersonalModel, out: Path) -> list[Path]:
    """Write a plain state_dict, a torch.export program that takes raw inputs, and a description of both."""
    new_folder(out)
    data = personal.federation
    example, sizes = torch.zeros(2, *data.shape), {0: torch.export.Dim("batch", min=1)}
    exported = torch.export.export(RawInput(personal).eval(), (example,), dynamic_shapes=(sizes,))
    paths = [out / "state_dict.safetensors", out / "model.pt2", out / "model.json"]
    state = load_tensors(personal.module, personal.tensors).state_dict()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, paths[0])
    torch.export.save(exported, paths[1])
    shape = ["batch", *data.shape]
    description = {
        "client": personal.name,
        "model": personal.experiment.model,
        "input": {"shape": shape, "dtype": "float32", "values": "in the scale of the data file"},
        "output": "logits, one per class",
        "classes": data.classes,
        "normalisation_inside": {"mean": data.mean, "std": data.std},
        "state_dict_input": "(x - mean) / std" if data.mean else "x as it is",
    }
    write_text(paths[2], json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return paths
