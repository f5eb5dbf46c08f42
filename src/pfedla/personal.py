"""Use the result: load a client's personal model from a run folder, evaluate it, take it out of the house."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pfedla.data import datasets
from pfedla.errors import PfedlaError, unknown
from pfedla.experiment import Experiment, build, read_toml
from pfedla.models import build_model, load_tensors, task_of
from pfedla.training import evaluate


@dataclass(frozen=True)
class PersonalModel:
    run: Path
    client: int
    module: nn.Module
    tensors: dict[str, Tensor]
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class RawInput(nn.Module):
    """A personal model with its normalisation inside: raw inputs in, logits out."""

    mean: Tensor
    std: Tensor

    def __init__(self, personal: PersonalModel) -> None:
        super().__init__()
        self.model = load_tensors(personal.module, personal.tensors)
        per_channel = (-1, *(1 for _ in personal.shape[1:])) if personal.mean else (1,)
        self.register_buffer("mean", torch.tensor(personal.mean or [0.0]).view(per_channel))
        self.register_buffer("std", torch.tensor(personal.std or [1.0]).view(per_channel))

    def forward(self, x: Tensor) -> Tensor:
        return self.model((x.to(torch.float32) - self.mean) / self.std)  # type: ignore[no-any-return]


def load_personal(run: Path, client: int) -> PersonalModel:
    """The personal model of one client; names, shapes and finiteness are checked against the run's model."""
    for name in ("experiment.toml", "federation.json", "result.json"):
        if not (run / name).exists():
            raise PfedlaError(f"{run} is not a finished run: it has no {name}")
    federation = json.loads((run / "federation.json").read_text(encoding="utf-8"))
    experiment = Experiment.parse(read_toml(run / "experiment.toml"))
    count = len(federation["clients"])
    if not 0 <= client < count:
        raise PfedlaError(f"client {client}: this run has clients 0 to {count - 1}")
    shape, classes = tuple(federation["shape"]), tuple(federation["classes"])
    module = build_model(experiment.model, shape, len(classes), torch.Generator())
    path = run / "models" / f"client-{client}.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PfedlaError(f"{path}: cannot be read ({error})") from None
    expected = task_of(module).initial()
    for name in sorted(expected.keys() | tensors.keys()):
        if name not in tensors or name not in expected:
            raise PfedlaError(f"{path}: tensor {name!r} is {'missing' if name in expected else 'not part of the model'}")
        found, wanted = tensors[name], expected[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise PfedlaError(f"{path}: {name} is {found.dtype} {tuple(found.shape)}, not {wanted.dtype} {tuple(wanted.shape)}")
        if found.is_floating_point() and not found.isfinite().all():
            raise PfedlaError(f"{path}: {name} holds numbers that are not finite")
    return PersonalModel(run, client, module, tensors, shape, classes, tuple(federation["mean"]), tuple(federation["std"]))


def evaluate_personal(personal: PersonalModel, data: Path | None) -> dict[str, Any]:
    """Accuracy of a personal model on the examples of a file, or on the client's own test split of the run."""
    if data is None:
        federation = build(Experiment.parse(read_toml(personal.run / "experiment.toml"))).federation
        x, y = federation.test[personal.client]
    else:
        x, y = _examples(personal, datasets.load_npz(data))
    model = RawInput(personal).eval()
    with torch.no_grad():
        correct, loss = evaluate(task_of(model), dict(model.named_parameters()) | dict(model.named_buffers()), x, y)
    return {"client": personal.client, "examples": len(y), "accuracy": correct.item() / len(y), "loss": loss.item()}


def _examples(personal: PersonalModel, dataset: datasets.Dataset) -> tuple[Tensor, Tensor]:
    """The rows of the file that are this client's (all, if it names no clients), labels as the run numbers them."""
    if dataset.x.shape[1:] != personal.shape:
        raise PfedlaError(f"{dataset.name}: examples of shape {dataset.x.shape[1:]}, the model takes {personal.shape}")
    for name in dataset.classes:
        if name not in personal.classes:
            raise unknown("class", name, personal.classes)
    renumber = np.array([personal.classes.index(name) for name in dataset.classes])
    rows = np.ones(len(dataset.y), bool)
    if dataset.client is not None:
        clients = json.loads((personal.run / "federation.json").read_text(encoding="utf-8"))["clients"]
        who = clients[personal.client]
        if who not in dataset.client_names:
            raise PfedlaError(f"{dataset.name} has no example of client {who!r}; it has: {', '.join(dataset.client_names)}")
        rows &= dataset.client == dataset.client_names.index(who)
    if dataset.test is not None:
        rows &= dataset.test
    if not rows.any():
        raise PfedlaError(f"{dataset.name} has no test example of this client")
    return torch.from_numpy(dataset.x[rows]), torch.from_numpy(renumber[dataset.y[rows]])


def export_personal(personal: PersonalModel, out: Path) -> list[Path]:
    """A plain state_dict (safetensors), a torch.export program that takes raw inputs, and a description of both."""
    if out.exists():
        raise PfedlaError(f"{out} exists already and is never overwritten; choose another folder with --out")
    program = RawInput(personal).eval()
    example = torch.zeros(2, *personal.shape)
    batch = torch.export.Dim("batch", min=1)
    exported = torch.export.export(program, (example,), dynamic_shapes=({0: batch},))
    out.mkdir(parents=True)
    paths = [out / "state_dict.safetensors", out / "model.pt2", out / "model.json"]
    state = load_tensors(personal.module, personal.tensors).state_dict()
    save_file({name: value.contiguous().clone() for name, value in state.items()}, paths[0])
    torch.export.save(exported, paths[1])
    description = {
        "client": personal.client,
        "input": {"shape": ["batch", *personal.shape], "dtype": "float32", "values": "as in the data files"},
        "output": "logits, one per class",
        "classes": personal.classes,
        "normalisation_inside": {"mean": personal.mean, "std": personal.std},
        "state_dict_normalisation": "state_dict.safetensors takes inputs that are normalised already: (x - mean) / std",
    }
    paths[2].write_text(json.dumps(description, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths
