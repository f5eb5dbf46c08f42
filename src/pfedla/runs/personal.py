"""Use the result: load a client's personal model from a run folder, evaluate it, export it."""

import json
from dataclasses import replace
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
from pfedla.core.training import evaluate, normalise
from pfedla.data.dataset import load_arrays
from pfedla.data.federation import Examples, Federation, build_federation, digest_of, federation_of_one
from pfedla.runs.experiment import SITES, Experiment, read_toml
from pfedla.runs.folder import EXPERIMENT, FEDERATION, RESULT, new_folder

JOINED = "joined"  # the folder of the clients that joined after the run
GIVE_A_FILE = "give a file with --data"


class FederationFile(BaseModel):
    """federation.json of a run folder. FailFast: an untrusted one could be answered by gigabytes of messages."""

    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], FailFast()]
    classes: Annotated[tuple[str, ...], FailFast()]
    mean: Annotated[tuple[Annotated[float, Field(ge=0, le=255)], ...], FailFast()]  # of uint8 images, per channel
    std: Annotated[tuple[Annotated[float, Field(ge=1e-6, le=255)], ...], FailFast()]
    clients: Annotated[tuple[str, ...], FailFast()]
    subset: str = ""
    fingerprint: str = ""  # empty where it is not known

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        sizes, channels = (len(self.mean), len(self.std)), self.shape[:-2]  # a feature vector has none
        if len(self.shape) not in (1, 3) or sizes not in ((0, 0), channels * 2):
            raise ValueError(f"shape {self.shape} with {sizes[0]} means and {sizes[1]} standard deviations")
        return self


class PersonalModel(nn.Module):
    """A client's model with its normalisation inside: raw inputs in, logits out."""

    def __init__(self, run: Path, client: int | str, experiment: Experiment, federation: FederationFile) -> None:
        """Load the model of a client: its number, or joined/NAME for one that joined after the run."""
        super().__init__()
        self.client, self.experiment, self.federation = client, experiment, federation
        self.name, model, about = str(client), f"{client}/model.safetensors", f"{client}/{RESULT}"
        if isinstance(client, int):
            self.name, model, about = federation.clients[client], f"models/client-{client}.safetensors", "site.json"
        # What the folder says of the data of a joined client or a site; nothing for a simulated client.
        self.own_data = read_object(run / about) if (run / about).exists() else {}
        self.module = outline(experiment.model, federation.shape, len(federation.classes))
        # Two untrusted files must agree on the sizes before anything of that size is made.
        tensors = read_tensors(run / model, task_of(self.module).initial())
        self.module.load_state_dict(tensors, assign=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(normalise(x.float(), self.federation.mean, self.federation.std))  # type: ignore[no-any-return]


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
    """Load the model of a client that is given by its name, or by its number unless names are numbers."""
    experiment, federation = read_run(run)
    names = federation.clients
    joined = [f"{JOINED}/{path.parent.name}" for path in sorted(run.glob(f"{JOINED}/*/{RESULT}"))]
    found: dict[str, int | str] = {name: name for name in joined}
    if not any(name.isdecimal() for name in names):
        found |= {str(number): number for number in range(len(names))}
    found |= {name: number for number, name in enumerate(names)}
    if client not in found:
        raise unknown("client", client, [*names, *joined])
    return PersonalModel(run, found[client], experiment, federation).eval()


def evaluate_personal(personal: PersonalModel, data: Path | None) -> dict[str, Any]:
    """Test a personal model on the examples of a file, or on the client's own test split of the run."""
    x, y = _load_test_split(personal) if data is None else _load_examples(personal, data)
    with torch.no_grad():
        correct, loss = evaluate(task_of(personal), personal.state_dict(), x, y)
    return {"client": personal.client, "examples": len(y), "accuracy": correct.item() / len(y), "loss": loss.item()}


def _load_test_split(personal: PersonalModel) -> Examples:
    """Split the client's data again; refuse data that have changed since."""
    experiment, known, own = personal.experiment, personal.federation, personal.own_data
    if experiment.data.dataset == SITES:
        raise PfedlaError(f"only the site has its data: {GIVE_A_FILE} (a folder will do)")
    if isinstance(personal.client, int):
        client, source = personal.client, experiment.data.dataset
        _, federation = build_federation(experiment.data, experiment.seed)
        federation, _ = federation.hold_back(experiment.unseen_clients, experiment.seed)
    elif source := str(own.get("data", "")):
        client, (federation, _) = 0, load_unseen(Path(source), experiment, known)
    else:
        raise PfedlaError(f"{personal.client}/{RESULT} does not name the client's data; {GIVE_A_FILE}")
    train, test = federation.train[client], federation.test[client]
    # A joined client or a site knows its own examples only.
    same = own.get("digest") == digest_of(train, test) if own else known.fingerprint in ("", federation.fingerprint())
    if not same:
        raise PfedlaError(f"{source} has changed since the model was made; {GIVE_A_FILE}")
    return test


def load_unseen(path: Path, experiment: Experiment, known: FederationFile) -> tuple[Federation, str]:
    """Return a federation of the one client in a file, normalised as the run's, and how its examples are split."""
    if str(path.resolve()) in (experiment.data.dataset, known.subset):
        raise PfedlaError(f"{path}: the run is made of these examples; an unseen client brings its own")
    dataset = load_arrays(path).match(known.shape, known.classes, pixels=bool(known.mean), whose="the run")
    name, *others = dataset.client_names or (path.stem,)
    if others:
        raise PfedlaError(f"{path} holds examples of several clients, {shown([name, *others])}; give a file of each")
    dataset = replace(dataset, mean=known.mean, std=known.std)
    if dataset.test is not None:
        return federation_of_one(dataset, name, experiment.seed), "the file's own"
    return federation_of_one(dataset, name, experiment.seed, experiment.data.test_share), "as the run's"


def _load_examples(personal: PersonalModel, path: Path) -> Examples:
    """Read the test rows of a file; of one that holds the run's clients, only the rows of this client."""
    dataset, known, section = load_arrays(path), personal.federation, personal.experiment.data
    trained_on = (section.dataset, known.subset, personal.own_data.get("data"))
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
    exported = torch.export.export(personal, (example,), dynamic_shapes=(sizes,))
    paths = [out / "state_dict.safetensors", out / "model.pt2", out / "model.json"]
    write_tensors(paths[0], personal.module.state_dict())
    torch.export.save(exported, paths[1])
    takes = {"shape": ["batch", *data.shape], "dtype": "float32", "values": "in the scale of the data file"}
    description = {"client": personal.name, "model": personal.experiment.model, "input": takes}
    description |= {"output": "logits, one per class", "classes": data.classes}
    description["normalisation_inside"] = {"mean": data.mean, "std": data.std}
    description["state_dict_input"] = "(x - mean) / std" if data.mean else "x as it is"
    write_text(paths[2], json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return paths
