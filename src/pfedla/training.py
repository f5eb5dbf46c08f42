"""Local SGD and evaluation of one client; both run under torch.func.vmap."""

from collections.abc import Container, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pfedla.augmentation import cropped
from pfedla.contracts import LocalData, LocalTraining, Task
from pfedla.tree import Params

EVALUATION_BATCH = 1024


def batch_bounds(num_examples: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Slices of one epoch. A last batch of a single example joins the one before: BatchNorm cannot take it alone."""
    start = 0
    while start < num_examples:
        stop = min(start + batch_size, num_examples)
        if num_examples - stop == 1 and batch_size > 1:
            stop = num_examples
        yield start, stop
        start = stop


def batches(data: LocalData, training: LocalTraining, epochs: range | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of the local budget in the drawn order, or of some of its epochs; a straggler's end early."""
    for epoch in range(len(data.order)) if epochs is None else epochs:
        if epoch >= len(data.order):
            return
        order = data.order[epoch]
        x, y = data.x[order], data.y[order]  # one gather an epoch; a batch is then a view
        if training.augment:
            x = cropped(x, data.crops[epoch])
        for start, stop in batch_bounds(len(y), training.batch_size):
            yield x[start:stop], y[start:stop]


def sgd(
    task: Task, tensors: Params, data: LocalData, training: LocalTraining, *, epochs: range | None = None,
    only: Container[str] | None = None, keep_statistics: bool = False, towards: Params | None = None, pull: float = 0.0,
) -> tuple[Params, Tensor]:  # fmt: skip
    """Plain SGD over `batches`; returns the trained tensors and the mean loss over the steps (without the pull).

    `only` names the parameters that move; `keep_statistics` leaves BatchNorm's running statistics as they are; `pull` adds
    pull/2 |parameters - towards|² to the objective.
    """
    tensors = {name: task.laid_out(value) for name, value in tensors.items()}
    parameters, statistics = task.layers.parameters(tensors), task.layers.only_statistics(tensors)
    moving = {name: value for name, value in parameters.items() if only is None or name in only}
    plain = only is None and towards is None and not keep_statistics
    losses = []
    for x, y in batches(data, training, epochs):
        if plain:
            moving, loss, statistics = task.step(moving, statistics, x, y, training.lr)
            losses.append(loss)
            continue
        gradients, loss, updated = task.gradient({**parameters, **moving}, statistics, x, y, moving)
        statistics = statistics if keep_statistics else updated
        if towards is not None:
            gradients = {name: value + pull * (moving[name] - towards[name]) for name, value in gradients.items()}
        moving = task.descended(moving, gradients, training.lr)
        losses.append(loss)
    mean = torch.stack(losses).mean() if losses else data.x.new_zeros(())
    return {name: value.contiguous() for name, value in {**parameters, **moving, **statistics}.items()}, mean


def evaluate(task: Task, tensors: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """How many examples of one client's data a model gets right, and its mean cross-entropy on them."""
    correct, loss = torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device)
    for start in range(0, len(y), EVALUATION_BATCH):
        logits, target = task.logits(tensors, x[start : start + EVALUATION_BATCH]), y[start : start + EVALUATION_BATCH]
        right = (logits.argmax(-1) == target) & logits.isfinite().all(-1)  # a broken model is never right
        correct = correct + right.sum()
        loss = loss + F.cross_entropy(logits, target, reduction="sum")
    return correct, loss / len(y)
