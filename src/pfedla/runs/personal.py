"""Use the result: load a client's personal model from a run folder, evaluate it, take it out of the house."""

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
from pfedla.core.files import read_json, read_object
from pfedla.core.models import build_model, outline
from pfedla.core.settings import AUTO
from pfedla.core.tasks import load_tensors, task_of
from pfedla.core.tensor_files import read_tensors
from pfedla.core.training import evaluate
from pfedla.data.federation import Federation, build_federation, digest_of, federation_of_one
from pfedla.data.npz import load_arrays
from pfedla.data.recipe import TEST_SHARE
from pfedla.runs.experiment import SITES, Experiment, read_toml
from pfedla.runs.folder import RESULT, new_folder

JOINED = "joined"  # the folder of those who came later

# FailFast: without it, a strange file of a few MB could be answered by GBs of error messages.
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
    test: list[Any]  # [clients, classes], only ever compared
    subset: str = ""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.shape) not in (1, 3):
            raise ValueError(f"shape has {len(self.shape)} numbers, not 1 or 3")
        if (len(self.mean), len(self.std)) not in ((0, 0), (self.shape[0], self.shape[0])):
            raise ValueError(
                f"{len(self.mean)} means and {len(self.std)} standard deviations for shape {self.shape}"
            )
        return self


@dataclass(frozen=True)
class PersonalModel:
    run: Path
    client: int | str  # its number; of one that joined later its place in the folder, joined/NAME
    module: nn.Module
    tensors: dict[str, Tensor]
    experiment: Experiment
    federation: FederationFile

    @property
    def name(self) -> str:
        return self.federation.clients[self.client] if isinstance(self.client, int) else self.client

    def joined(self) -> dict[str, Any]:
        """What is known of a client that joined later; nothing of one of the run's own."""
        return read_object(self.run / self.client / RESULT) if isinstance(self.client, str) else {}

    def site(self) -> dict[str, Any]:
        """What a site of a deployment knows of itself; nothing if the folder is not a site's."""
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


def _position(client: str, names: tuple[str, ...], joined: tuple[str, ...]) -> int | str:
    """A client by its name; by its number where no name is a number; or one that joined later."""
    if client in names:
        return names.index(client)
    if client in map(str, range(len(names))) and not any(name.isdecimal() for name in names):
        return int(client)
    if client in joined:
        return client
    raise unknown("client", client, [*names, *joined])


def read_run(run: Path) -> tuple[Experiment, FederationFile]:
    """What a finished run was made of, as its folder has it."""
    for name in ("experiment.toml", "federation.json", "result.json"):
        if not (run / name).exists():
            inside = sorted(path.parent.name for path in run.glob("*/result.json"))
            hint = f"; it holds runs: {', '.join(inside)}" if inside else ""
            raise PfedlaError(f"{run} is not a finished run: it has no {name}{hint}")
    try:
        federation = FederationFile.model_validate(read_json(run / "federation.json"))
    except ValidationError as error:
        problem = error.errors()[0]
        where = "".join(f"{part}: " for part in problem["loc"])
        raise PfedlaError(f"{run / 'federation.json'} is damaged: {where}{problem['msg']}") from None
    return Experiment.parse(read_toml(run / "experiment.toml")), federation


def load_personal(run: Path, client: str) -> PersonalModel:
    """The personal model of one client; names, shapes and finiteness are checked against the run's model."""
    experiment, federation = read_run(run)
    joined = tuple(f"{JOINED}/{path.parent.name}" for path in sorted(run.glob(f"{JOINED}/*/{RESULT}")))
    position = _position(client, federation.clients, joined)
    own = f"{position}/model" if isinstance(position, str) else f"models/client-{position}"
    model = experiment.model, federation.shape, len(federation.classes)
    # Two strange files must agree on the sizes before anything of that size is made.
    tensors = read_tensors(run / f"{own}.safetensors", task_of(outline(*model)).initial())
    module = build_model(*model, torch.Generator())
    return PersonalModel(run, position, module, tensors, experiment, federation)


def evaluate_personal(personal: PersonalModel, data: Path | None) -> dict[str, Any]:
    """Accuracy of a personal model on the examples of a file, or on the client's own test split of the run."""
    x, y = _own_test_split(personal) if data is None else _examples(personal, data)
    model = RawInput(personal).eval()
    with torch.no_grad():
        correct, loss = evaluate(
            task_of(model), dict(model.named_parameters()) | dict(model.named_buffers()), x, y
        )
    return {
        "client": personal.client,
        "examples": len(y),
        "accuracy": correct.item() / len(y),
        "loss": loss.item(),
    }


def _own_test_split(personal: PersonalModel) -> tuple[Tensor, Tensor]:
    if personal.experiment.data.dataset == SITES:
        raise PfedlaError("the site's data are its own: give a file or folder with --data")
    experiment = personal.experiment
    if isinstance(personal.client, str):
        joined = personal.joined()
        if not (isinstance(joined.get("data"), str) and isinstance(joined.get("digest"), str)):
            raise PfedlaError(
                f"{personal.client}/{RESULT} does not say on which examples it joined; give a file with --data"
            )
        data = Path(joined["data"])
        federation, _ = load_unseen(data, experiment, personal.federation)
        if joined["digest"] != digest_of(federation.train[0], federation.test[0]):
            raise PfedlaError(
                f"{data} is not what it was when {personal.name} joined; give a file with --data"
            )
        return federation.test[0]
    section, federation = build_federation(experiment.data, experiment.seed)
    federation, _ = federation.hold_back(experiment.unseen_clients, experiment.seed)
    known = personal.federation
    if site := personal.site():  # it knows of its own examples only
        unchanged = site.get("digest") == digest_of(
            federation.train[personal.client], federation.test[personal.client]
        )
    else:
        counts = federation.class_counts()[:, 1].tolist()
        unchanged = (federation.shape, federation.classes, counts) == (known.shape, known.classes, known.test)
    if not unchanged:
        raise PfedlaError(
            f"{section.dataset} is not what it was when the run was made; give a file with --data"
        )
    return federation.test[personal.client]


def load_unseen(path: Path, experiment: Experiment, known: FederationFile) -> tuple[Federation, str]:
    """Return a federation of the one client whose examples a file holds, normalised as the run's, and how it is split."""
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


def _examples(personal: PersonalModel, path: Path) -> tuple[Tensor, Tensor]:
    """The test rows of a file (its client's, if the run's clients are the file's), labels as the run numbers them."""
    dataset = load_arrays(path)
    known = personal.federation
    brought = (personal.site().get("data"), personal.joined().get("data"))
    if dataset.test is None and str(path.resolve()) in (
        personal.experiment.data.dataset,
        known.subset,
        *brought,
    ):
        raise PfedlaError(
            f"{path}: the run trained on these examples; mark a test split in the file, or leave --data out to test on the "
            "client's own split of a common data set"
        )
    dataset = dataset.match(known.shape, known.classes, pixels=bool(known.mean), whose="the model")
    rows = np.ones(len(dataset.y), bool) if dataset.test is None else dataset.test.copy()
    if (
        dataset.client is not None
        and personal.experiment.data.partition == "client"
        and personal.name in known.clients
    ):
        who = personal.name
        if who not in dataset.client_names:
            raise PfedlaError(
                f"{path} has no example of client {who!r}; it has: {', '.join(dataset.client_names)}"
            )
        rows &= dataset.client == dataset.client_names.index(who)
    if not rows.any():
        raise PfedlaError(f"{path} has no test example of this client")
    return torch.from_numpy(dataset.x[rows]), torch.from_numpy(dataset.y[rows])


def export_personal(personal: PersonalModel, out: Path) -> list[Path]:
    """A plain state_dict (safetensors), a torch.export program that takes raw inputs, and a description of both."""
    new_folder(out)
    data = personal.federation
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(
        RawInput(personal).eval(), (torch.zeros(2, *data.shape),), dynamic_shapes=({0: batch},)
    )
    paths = [out / "state_dict.safetensors", out / "model.pt2", out / "model.json"]
    state = load_tensors(personal.module, personal.tensors).state_dict()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, paths[0])
    torch.export.save(exported, paths[1])
    description = {
        "client": personal.name,
        "model": personal.experiment.model,
        "input": {
            "shape": ["batch", *data.shape],
            "dtype": "float32",
            "values": "in the scale of the data file",
        },
        "output": "logits, one per class",
        "classes": data.classes,
        "normalisation_inside": {"mean": data.mean, "std": data.std},
        "state_dict_input": "(x - mean) / std" if data.mean else "x as it is",
    }
    paths[2].write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths
