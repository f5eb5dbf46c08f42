"""Write a personal model for use without pfedla: tensors, a program, and a description of both."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, first_line
from pfedla.core.files import write_tensors, write_text
from pfedla.core.layers import Layers
from pfedla.core.models import is_plain
from pfedla.core.tasks import task_of
from pfedla.core.trees import Tree, map_tree
from pfedla.data.scaling import describe_columns, feature_names
from pfedla.runs.folder import new_folder
from pfedla.runs.personal import PersonalClient
from pfedla.runs.prediction import PersonalModel

OUTPUTS = {
    "classification": "logits, one per class: softmax gives the probabilities",
    "multilabel": "logits, one per label: sigmoid gives the probabilities",
    "regression": "values, one per target",
    "survival": "the logarithm of the hazard ratio",
}


def export_personal(personal: PersonalClient, out: Path, *, merged: bool = False) -> list[Path]:
    """Write a plain state_dict, a torch.export program that takes raw inputs, and a description of both.

    Of a model with frozen tensors (LoRA) write the trained tensors alone; `merged` writes the whole model, with LoRA's
    adapters merged into their layers.
    """
    model, frozen = personal.model, Layers.of(personal.module).frozen
    description = describe_model(personal)
    if frozen and not merged:
        new_folder(out)
        paths = [out / "adapter.safetensors", out / "model.json"]
        write_tensors(paths[0], task_of(personal.module).initial())
        description["adapter"] = "the trained tensors by their names in the model; --merged writes the whole model"
    else:
        whole = PersonalModel(_merge(personal.module), model.outline, model.objective, model.scaling)
        program = make_program(whole, example_inputs(personal))
        new_folder(out)
        paths = [out / "state_dict.safetensors", out / "model.pt2", out / "model.json"]
        write_tensors(paths[0], whole.module.state_dict())
        torch.export.save(program, paths[1])
    write_text(paths[-1], json.dumps(description, indent=2, ensure_ascii=False) + "\n")
    return paths


def _merge(module: nn.Module) -> nn.Module:
    try:
        from pfedla.core.lora import merge_lora
    except ImportError:
        return module
    return merge_lora(module)


def make_program(model: PersonalModel, example: Tree) -> Any:
    """Return the model as a torch.export program for batches of any size."""
    sizes = map_tree(lambda part: {0: torch.export.Dim("batch", min=1)}, example)
    try:
        return torch.export.export(model, (example,), dynamic_shapes=(sizes,))
    except Exception as error:  # torch raises many kinds, also what the user's module raises
        raise PfedlaError(f"the model cannot be written as a program ({first_line(error)})") from error


def example_inputs(personal: PersonalClient) -> Tree:
    """Return two raw examples of zeros; images are float32 in the scale of the data."""
    shape, dtype = personal.federation.shape, personal.federation.dtype
    if is_plain(shape):
        return _zeros(shape, dtype)
    parts = shape.items() if isinstance(shape, dict) else enumerate(shape)
    found = {key: _zeros(sizes, dtype[key] if dtype else None) for key, sizes in parts}
    return found if isinstance(shape, dict) else tuple(found.values())


def _zeros(sizes: tuple[int, ...], dtype: Any) -> Tensor:
    kinds = {"float32": torch.float32, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
    return torch.zeros(2, *sizes, dtype=kinds.get(dtype or "float32", torch.float32))


def describe_model(personal: PersonalClient) -> dict[str, Any]:
    """Return what model.json holds: what goes in, in which order, and what comes out."""
    model, known = personal.model, personal.model.outline

    def describe(part: Tensor) -> dict[str, Any]:
        return {"shape": ["batch", *part.shape[1:]], "dtype": str(part.dtype).removeprefix("torch.")}

    takes = map_tree(describe, example_inputs(personal))
    if is_plain(known.shape):
        missing = "; NaN where a value is missing" if known.columns else ""
        takes["values"] = f"in the scale of the data file{missing}"
    found: dict[str, Any] = {"client": personal.name, "model": personal.experiment.model, "task": model.task}
    found |= {"input": takes, "output": OUTPUTS[model.task], "classes": known.outputs}
    if known.columns:
        found["columns"] = describe_columns(known.columns)
        if is_plain(known.shape):
            found["features"] = feature_names(known.columns, known.shape[0])
    found["normalisation_inside"] = {"mean": known.mean, "std": known.std}
    found["state_dict_input"] = "(x - mean) / std" if known.mean else "x as it is"
    if model.scaling:
        found["scaling_inside"] = model.scaling.to_lists()
        found["state_dict_input"] = "(x - centre) / scale, with fill in place of NaN"
    return found
