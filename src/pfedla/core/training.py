"""Local training and evaluation of one client; both run under torch.func.vmap."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from pfedla.core.contracts import LocalData
from pfedla.core.layers import Params
from pfedla.core.objectives import main_output
from pfedla.core.optimizers import Slots, advance
from pfedla.core.privacy import private_batches, private_gradient
from pfedla.core.settings import AUTO, Training
from pfedla.core.tasks import Only, Task
from pfedla.core.trees import Tree, map_tree, take_rows

EVALUATION_BATCH = 1024


def batch_bounds(num_examples: int, batch_size: int) -> Iterator[tuple[int, int]]:
    """Return the slices of one epoch. A last batch of one example joins the one before (BatchNorm)."""
    starts = list(range(0, num_examples, batch_size))
    if len(starts) > 1 and starts[-1] == num_examples - 1 and batch_size > 1:
        starts.pop()
    return pairwise([*starts, num_examples])


def batches(data: LocalData, training: Training, epochs: range | None = None) -> Iterator[tuple[Tree, Tensor]]:
    """Yield the batches in the drawn order, of all or some epochs; a straggler has fewer epochs."""
    assert not len(data.mechanism), "with [privacy] only `sgd` may train"
    for epoch in [one for one in range(len(data.order)) if epochs is None or one in epochs]:
        order = data.order[epoch]
        x, y = take_rows(data.x, order), data.y[order]  # one gather an epoch; a batch is then a view
        for start, stop in batch_bounds(len(y), training.batch_size):
            yield take_rows(x, slice(start, stop)), y[start:stop]


def sgd(
    task: Task,
    tensors: Params,
    data: LocalData,
    training: Training,
    *,
    epochs: range | None = None,
    only: Only = None,
    keep_statistics: bool = False,
    towards: Params | None = None,
    pull: float = 0.0,
) -> tuple[Params, Tensor]:
    """Run the optimiser of `training` over `batches`; return the trained tensors and the mean loss over the steps.

    `only` names the parameters that move; `keep_statistics` leaves BatchNorm's statistics as they are;
    `pull` adds pull/2 |parameters - towards|² to the objective, not to the loss that is returned.
    With [privacy] every gradient is private, and no loss is known (nan).
    """
    private = len(data.mechanism) > 0
    assert training.lr != AUTO
    slots, losses = Slots(), list[Tensor]()
    parameters, statistics = task.layers.parameters(tensors), task.layers.only_statistics(tensors)
    moving = {name: value for name, value in parameters.items() if only is None or name in only}
    extras = training.momentum or training.weight_decay or training.clip_norm or training.optimizer != "sgd"
    is_plain = not extras and only is None and towards is None and not keep_statistics and not private
    for x, y, *rest in private_batches(data, epochs) if private else batches(data, training, epochs):
        if is_plain:
            moving, loss, statistics = task.step(moving, statistics, x, y, training.lr)
        else:
            model = {**parameters, **moving}
            if private:
                gradients = private_gradient(task, model, x, y, is_drawn=rest[0], mechanism=data.mechanism, only=moving)
                loss = data.mechanism.new_full((), torch.nan)
            else:
                gradients, loss, updated = task.gradient(model, statistics, x, y, moving)
                statistics = statistics if keep_statistics else updated
            if towards is not None:
                gradients = {name: value + pull * (moving[name] - towards[name]) for name, value in gradients.items()}
            moving, slots = advance(training, moving, gradients, slots, len(losses) + 1)
        losses.append(loss)
    mean = torch.stack(losses).mean() if losses else next(iter(parameters.values())).new_zeros(())
    return {name: value.contiguous() for name, value in {**parameters, **moving, **statistics}.items()}, mean


def evaluate(task: Task, tensors: Params, x: Tree, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return a model's main outputs for all of one client's examples, and its loss."""
    pieces = [slice(start, start + EVALUATION_BATCH) for start in range(0, len(y), EVALUATION_BATCH)]
    found = [task.outputs(tensors, take_rows(x, piece)) for piece in pieces]
    outputs = map_tree(lambda *parts: torch.cat(parts), *found)
    return main_output(outputs), task.objective.loss(outputs, y)


def normalise(x: Tree, mean: Sequence[float], std: Sequence[float]) -> Tree:
    """Scale images channel by channel; without a `mean`, make floats float32 and keep integers."""
    if not mean:
        return map_tree(lambda part: part.float() if part.is_floating_point() else part, x)
    centre, scale = (torch.tensor(values, device=x.device).view(-1, 1, 1) for values in (mean, std))
    return (x.float() - centre) / scale
