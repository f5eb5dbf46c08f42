"""Use the result: load a client's personal model from a run folder, evaluate it, export it."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from pydantic import BaseModel, FailFast, Field, ValidationError, model_validator
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, shown, unknown
from pfedla.core.files import read_object, read_tensors, write_tensors, write_text
from pfedla.core.models import outline
from pfedla.core.tasks import task_of
from pfedla.core.training import evaluate
from pfedla.data.dataset import load_arrays
from pfedla.data.federation import Examples, Federation, build_federation, digest_of, federation_of_one, normalise
from pfedla.runs.experiment import SITES, Experiment, read_toml
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT, new_folder

JOINED = "joined"  # the folder of the clients that joined after the run
GIVE_A_FILE = "give a file with --data"

# FailFast: an untrusted file could otherwise be answered by gigabytes of error messages.
Names = Annotated[tuple[str, ...], FailFast()]


class FederationFile(BaseModel):
    """federation.json of a run folder."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], FailFast()]
    classes: Names
    mean: Annotated[tuple[Annotated[float, Field(ge=0, le=255)], ...], FailFast()]  # of uint8 images, per channel
    std: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=255)], ...], FailFast()]
    clients: Names
    subset: str = ""
    fingerprint: str = ""  # empty where it is not known

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        sizes, channels = (len(self.mean), len(self.std)), self.shape[:-2]  # a feature vector has none
        if len(self.shape) not in (1, 3) or sizes not in ((0, 0), channels * 2):
            raise ValueError(f"shape {self.shape} with {sizes[0]} means and {sizes[1]} standard deviations")
        return self


@dataclass(frozen=True, kw_only=True)
class PersonalModel:
    run: Path
    client: int | str  # its number; joined/NAME for one that joined after the run
    module: nn.Module  # in eval mode
    experiment: Experiment
    federation: FederationFile

    @property
    def name(self) -> str:
        return self.federation.clients[self.client] if isinstance(self.client, int) else self.client

    def describe_own_data(self) -> dict[str, Any]:
        """Return what the folder says of the data of a joined client or a site; nothing for a simulated client."""
        path = self.run / ("site.json" if isinstance(self.client, int) else f"{self.client}/{RESULT}")
        return read_object(path) if path.exists() else {}


class RawInput(nn.Module):
    """A personal model with its normalisation inside: raw inputs in, logits out."""

    def __init__(self, personal: PersonalModel) -> None:
        super().__init__()
        self.model, self.data = personal.module, personal.federation

    def forward(self, x: Tensor) -> Tensor:
        return self.model(normalise(x.float(), self.data.mean, self.data.std))  # type: ignore[no-any-return]


def read_run(run: Path) -> tuple[Experiment, FederationFile]:
    """Return the experiment and the federation of a finished run."""
    for name in (EXPERIMENT, FEDERATION, RESULT):
        if not (run / name).exists():
            inside = sorted(path.parent.name for path in run.glob(f"*/{RESULT}"))
            hint = f"; it holds runs: {', '.join(inside)}" if inside else ""
            raise PfedlaError(f"{run} is not a finished run: it has no {name}{hint}")
    try:
        federation = FederationFile.model_validate(read_object(run / FEDERATION))
    except ValidationError as error:
        problem = error.errors()[0]
        raise PfedlaError(f"{run / FEDERATION} is damaged: {problem['loc']}: {problem['msg']}") from None
    return Experiment.parse(read_toml(run)), federation


def load_personal(run: Path, client: str) -> PersonalModel:
    """Load one client's personal model; check names, shapes and finiteness against the run's model."""
    experiment, federation = read_run(run)
    number = _find(client, federation.clients)
    joined = [f"{JOINED}/{path.parent.name}" for path in sorted(run.glob(f"{JOINED}/*/{RESULT}"))]
    if number is None and client not in joined:
        raise unknown("client", client, [*federation.clients, *joined])
    file = f"{client}/model" if number is None else f"models/client-{number}"
    module = outline(experiment.model, federation.shape, len(federation.classes))
    # Two untrusted files must agree on the sizes before anything of that size is made.
    tensors = read_tensors(run / f"{file}.safetensors", task_of(module).initial())
    module.load_state_dict(tensors, assign=True)
    found = client if number is None else number
    return PersonalModel(run=run, client=found, module=module.eval(), experiment=experiment, federation=federation)


def _find(client: str, names: tuple[str, ...]) -> int | None:
    """Return the number of a client that is given by its name, or by its number (unless names are numbers)."""
    if client not in names and not any(name.isdecimal() for name in names):
        names = tuple(map(str, range(len(names))))
    return names.index(client) if client in names else None


def evaluate_personal(personal: PersonalModel, data: Path | None) -> dict[str, Any]:
    """Test a personal model on the examples of a file, or on the client's own test split of the run."""
    x, y = _load_test_split(personal) if data is None else _load_examples(personal, data)
    model = RawInput(personal).eval()
    with torch.no_grad():
        correct, loss = evaluate(task_of(model), model.state_dict(), x, y)
    accuracy = correct.item() / len(y)
    return {"client": personal.client, "examples": len(y), "accuracy": accuracy, "loss": loss.item()}


def _load_test_split(personal: PersonalModel) -> Examples:
    """Split the client's data again; refuse data that have changed since."""
    experiment, known, client = personal.experiment, personal.federation, personal.client
    own, source = personal.describe_own_data(), experiment.data.dataset
    if source == SITES:
        raise PfedlaError(f"only the site has its data: {GIVE_A_FILE} (a folder will do)")
    if isinstance(client, int):
        _, federation = build_federation(experiment.data, experiment.seed)
        federation, _ = federation.hold_back(experiment.unseen_clients, experiment.seed)
    else:
        source = str(own.get("data", ""))
        if not source:
            raise PfedlaError(f"{client}/{RESULT} does not name the client's data; {GIVE_A_FILE}")
        client, (federation, _) = 0, load_unseen(Path(source), experiment, known)
    if own:  # it knows its own examples only
        same = own.get("digest") == digest_of(federation.train[client], federation.test[client])
    else:
        same = known.fingerprint in ("", federation.fingerprint())
    if not same:
        raise PfedlaError(f"{source} has changed since the model was made; {GIVE_A_FILE}")
    return federation.test[client]


def load_unseen(path: Path, experiment: Experiment, known: FederationFile) -> tuple[Federation, str]:
    """Return a federation of the one client whose examples a file holds, and how they are split.

    The examples are normalised as the run's.
    """
    if str(path.resolve()) in (experiment.data.dataset, known.subset):
        raise PfedlaError(f"{path}: the run is made of these examples; an unseen client brings its own")
    dataset = load_arrays(path).match(known.shape, known.classes, pixels=bool(known.mean), whose="the run")
    if len(dataset.client_names) > 1:
        names = shown(dataset.client_names)
        raise PfedlaError(f"{path} holds examples of several clients, {names}; give a file of each")
    dataset = replace(dataset, mean=known.mean, std=known.std)
    name = dataset.client_names[0] if dataset.client_names else path.stem
    if dataset.test is not None:
        return federation_of_one(dataset, name, experiment.seed), "the file's own"
    return federation_of_one(dataset, name, experiment.seed, experiment.data.test_share), "as the run's"


def _load_examples(personal: PersonalModel, path: Path) -> Examples:
    """Read the test rows of a file, labels numbered as in the run.

    If the run's clients are the file's, only the rows of this client.
    """
    dataset, known, section = load_arrays(path), personal.federation, personal.experiment.data
    trained_on = (section.dataset, known.subset, personal.describe_own_data().get("data"))
    if dataset.test is None and str(path.resolve()) in trained_on:
        fix = "mark a test split in the file, or leave --data out to test on the client's own split"
        raise PfedlaError(f"{path}: the run trained on these examples; {fix}")
    dataset = dataset.match(known.shape, known.classes, pixels=bool(known.mean), whose="the model")
    rows = np.ones(len(dataset.y), bool) if dataset.test is None else dataset.test.copy()
    if dataset.client is not None and section.partition == "client" and isinstance(personal.client, int):
        if personal.name not in dataset.client_names:
            raise unknown(f"client of {path}", personal.name, dataset.client_names)
        rows &= dataset.client == dataset.client_names.index(personal.name)
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
    write_tensors(paths[0], personal.module.state_dict())
    torch.export.save(exported, paths[1])
    description = {
        "client": personal.name,
        "model": personal.experiment.model,
        "input": {"shape": ["batch", *data.shape], "dtype": "float32", "values": "in the scale of the data file"},
        "output": "logits, one per class",
        "classes": data.classes,
        "normalisation_inside": {"mean": data.mean, "std": data.std},
        "state_dict_input": "(x - mean) / std" if data.mean else "x as it is",
    }
    write_text(paths[2], json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return paths
