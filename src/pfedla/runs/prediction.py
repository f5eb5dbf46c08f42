"""A client's model as people use it: raw examples in; labels, probabilities or numbers out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.models import is_plain
from pfedla.core.objectives import OBJECTIVES, Objective, main_output, probabilities
from pfedla.core.training import EVALUATION_BATCH, normalise
from pfedla.core.trees import Tree, arguments, length, map_tree, take_rows
from pfedla.data.dataset import Array, Dataset, dataset_of
from pfedla.data.federation import Examples, Outline
from pfedla.data.frames import encode
from pfedla.data.scaling import Scaling
from pfedla.data.sources import is_frame


def find_client(names: Sequence[str], client: int | str) -> int:
    """Return the number of a client that is given by its number, or by its name. "3" is a number unless names are."""
    if isinstance(client, int | np.integer) and 0 <= client < len(names):
        return int(client)
    if client in names:
        return names.index(str(client))
    if isinstance(client, str) and client.isdecimal() and not any(name.isdecimal() for name in names):
        return find_client(names, int(client))
    raise unknown("client", client, names)


class PersonalModel(nn.Module):
    """A client's model with its scaling and normalisation inside: raw inputs in, the model's main output out."""

    def __init__(
        self, module: nn.Module, outline: Outline, objective: Objective, scaling: Scaling | None = None
    ) -> None:
        super().__init__()
        self.module, self.outline, self.objective = module, outline, objective
        for name in Scaling._fields:
            self.register_buffer(name, getattr(scaling, name) if scaling else None)
        self.eval()

    @property
    def scaling(self) -> Scaling | None:
        return None if self.fill is None else Scaling(self.fill, self.centre, self.scale)  # type: ignore[arg-type]

    def forward(self, x: Tree) -> Tensor:
        """Map raw inputs (a tree is one argument) to logits, values or the log of the risk."""
        return main_output(self._call(x))

    def _call(self, x: Tree, *, raw: bool = True) -> Tree:
        x = self.scaling.apply(x) if raw and self.scaling else x
        positional, named = arguments(normalise(x, self.outline.mean, self.outline.std))
        return self.module(*positional, **named)

    def arrange(self, x: Any, y: Any = None) -> Dataset:
        """Return raw arrays, tensors or a frame as examples in the form that the federation was made from."""
        known = self.outline
        if is_frame(x):
            if not known.columns:
                raise PfedlaError("x is a table, the run was made of arrays; give arrays of the same form")
            x, _ = encode("x", x.rename(columns=str).reset_index(drop=True), known.columns)
        else:
            x = _to_array(x) if is_plain(known.shape) else map_tree(_to_array, x)
        task = "classification" if y is None else known.task
        y = np.full(length(x), known.classes[0]) if y is None else _to_array(y)
        dataset = dataset_of("x", x, y, task=task, columns=known.columns)
        return dataset.match(known.shape, known.classes, pixels=bool(known.mean), whose="the model", task=task)

    @torch.no_grad()
    def outputs(self, x: Tree, *, raw: bool = True) -> Tree:
        """Return the outputs for all examples; those of a federation (`raw` false) are scaled already."""
        pieces = [slice(start, start + EVALUATION_BATCH) for start in range(0, length(x), EVALUATION_BATCH)]
        found = [self._call(take_rows(x, piece), raw=raw) for piece in pieces]
        return map_tree(lambda *parts: torch.cat(parts), *found)

    def measure(self, examples: Examples, *, raw: bool = True) -> tuple[Tensor, dict[str, Any]]:
        """Return the main outputs, and the score (the headline metric), the loss and all metrics; nan: undefined."""
        outputs, objective = self.outputs(examples.x, raw=raw), self.objective
        main, loss = main_output(outputs), float(objective.loss(outputs, examples.y))
        score = objective.score(main, loss, examples.y)
        return main, {"score": score, "loss": loss, "metrics": objective.measure(main, examples.y)}

    def predict(self, x: Any) -> Array:
        """Return the predicted class of each example, the 0 or 1 of each label, the number, or the risk."""
        return self.to_predictions(self._answer(x))

    def predict_proba(self, x: Any) -> Array:
        """Return the probability of each class, or of each label: [examples, classes or labels]."""
        found = self.to_probabilities(self._answer(x))
        if found is None:
            raise PfedlaError(f"a model for {self.task} gives no probabilities; use predict")
        return found

    def score(self, x: Any, y: Any) -> float:
        """Return the headline metric for labelled examples: accuracy as a fraction, RMSE, …"""
        return float(self.measure(to_examples(self.arrange(x, y)))[1]["score"])

    def _answer(self, x: Any) -> Tensor:
        return main_output(self.outputs(map_tree(torch.from_numpy, self.arrange(x).x)))

    @property
    def task(self) -> str:
        """One of the built-in tasks: an objective of one's own has the task of its data."""
        return self.objective.name if self.objective.name in OBJECTIVES else self.outline.task

    def to_probabilities(self, outputs: Tensor) -> Array | None:
        """Return the probabilities that outputs stand for; None where the task has none."""
        values = outputs.numpy()
        if self.task == "classification":
            return probabilities(values[:, : len(self.outline.classes)])
        return 1 / (1 + np.exp(-values.astype(np.float64))) if self.task == "multilabel" else None

    def to_predictions(self, outputs: Tensor) -> Array:
        values = outputs.numpy()
        if self.task == "classification":
            return np.asarray(to_labels(self.outline.classes)[values[:, : len(self.outline.classes)].argmax(1)])
        if self.task == "multilabel":
            return (values > 0).astype(np.int64)
        return values.reshape(len(values)) if values.size == len(values) else values


def to_examples(dataset: Dataset) -> Examples:
    return Examples(map_tree(torch.from_numpy, dataset.x), torch.from_numpy(dataset.y))


def to_labels(classes: Sequence[str]) -> Array:
    """Return the classes as the user has them: whole numbers or truth values if all are such, else names."""
    if all(name.removeprefix("-").isdecimal() and str(int(name)) == name for name in classes):
        return np.array([int(name) for name in classes])
    return np.array([name == "True" for name in classes] if {*classes} <= {"False", "True"} else classes)


def _to_array(values: Any) -> Array:
    try:
        return np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    except ValueError as error:  # a ragged list
        raise PfedlaError(f"not an array of numbers: {error}") from None
