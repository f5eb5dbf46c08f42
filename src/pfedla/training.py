"""Local SGD and evaluation of one client; both run under torch.func.vmap."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad_and_value

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


def sgd(task: Task, tensors: Params, data: LocalData, training: LocalTraining) -> tuple[Params, Tensor]:
    """Plain SGD over `data.order`; returns the trained tensors and the mean loss over the steps."""
    parameters, statistics = task.layers.parameters(tensors), task.layers.only_statistics(tensors)
    gradient = grad_and_value(task.loss, has_aux=True)
    losses = []
    for epoch, order in enumerate(data.order.unbind(0)):
        x, y = data.x[order], data.y[order]  # one gather an epoch; a batch is then a view
        if training.augment:
            x = cropped(x, data.crops[epoch])
        for start, stop in batch_bounds(len(y), training.batch_size):
            gradients, (loss, statistics) = gradient(parameters, statistics, x[start:stop], y[start:stop])
            parameters = {name: torch.add(value, gradients[name], alpha=-training.lr) for name, value in parameters.items()}
            losses.append(loss)
    return {**parameters, **statistics}, torch.stack(losses).mean()


def evaluate(task: Task, tensors: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """How many examples of one client's data a model gets right, and its mean cross-entropy on them."""
    correct, loss = torch.zeros((), dtype=torch.int64, device=x.device), torch.zeros((), device=x.device)
    for start in range(0, len(y), EVALUATION_BATCH):
        logits, target = task.logits(tensors, x[start : start + EVALUATION_BATCH]), y[start : start + EVALUATION_BATCH]
        right = (logits.argmax(-1) == target) & logits.isfinite().all(-1)  # a broken model is never right
        correct = correct + right.sum()
        loss = loss + F.cross_entropy(logits, target, reduction="sum")
    return correct, loss / len(y)
