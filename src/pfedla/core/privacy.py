"""Training with sample-level differential privacy: batches by Poisson sampling, per-example gradients, clipping, noise.

What a step does is DP-SGD (Abadi et al., CCS 2016). What it costs is in accounting.py.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from pfedla.core.contracts import LocalData
from pfedla.core.errors import NotApplicableError, PfedlaError, first_line
from pfedla.core.layers import Params, rows_of
from pfedla.core.randomness import draw_from, draw_normal, draw_uniform
from pfedla.core.tasks import Only, Task
from pfedla.core.trees import Tree, map_tree, take_rows


class Mechanism(NamedTuple):
    """How one client's training is made private."""

    max_grad_norm: float
    noise_multiplier: float  # standard deviation of the noise, in units of max_grad_norm
    rate: float  # chance of each example to be in a batch
    steps: int  # of an epoch
    delta: float

    def to_tensor(self, num_examples: int) -> Tensor:
        """Return what `private_gradient` needs: the bound, the noise, the expected size of a batch."""
        return torch.tensor([self.max_grad_norm, self.noise_multiplier, self.rate * num_examples])


def sample_batches(
    mechanism: Mechanism, num_examples: int, epochs: int, draws: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw every example into every step's batch with the same chance, independently (Poisson sampling).

    Return the positions [epochs, steps, largest batch], filled up with zeros, and which of them are drawn. Without
    `draws` they come from the operating system.
    """
    chances = (draw_uniform(num_examples, draws) for _ in range(epochs * mechanism.steps))
    drawn = [(one < mechanism.rate).nonzero().flatten() for one in chances]
    order = nn.utils.rnn.pad_sequence([*drawn, torch.zeros(1, dtype=torch.int64)], batch_first=True)[:-1]
    sizes = torch.tensor([len(one) for one in drawn])
    is_drawn = torch.arange(order.shape[1]) < sizes.unsqueeze(1)
    shape = (epochs, mechanism.steps, order.shape[1])
    return order.view(shape), is_drawn.view(shape)


def align_batches(data: list[LocalData]) -> list[LocalData]:
    """Fill the batches of several clients up to the largest of all: stacked tensors have one shape."""
    most = max(one.order.shape[-1] for one in data)

    def fill(value: Tensor) -> Tensor:
        return nn.functional.pad(value, (0, most - value.shape[-1]))

    return [one._replace(order=fill(one.order), is_drawn=fill(one.is_drawn)) for one in data]


def private_batches(data: LocalData, epochs: range | None = None) -> Iterator[tuple[Tree, Tensor, Tensor]]:
    """Yield the batches of all or some epochs, and which of their rows count."""
    for epoch in [one for one in range(len(data.order)) if epochs is None or one in epochs]:
        for rows, is_drawn in zip(data.order[epoch], data.is_drawn[epoch], strict=True):
            yield take_rows(data.x, rows), data.y[rows], is_drawn


def example_gradients(task: Task, parameters: Params, x: Tree, y: Tensor, only: Only = None) -> Params:
    """Return the gradient of each example's own loss, stacked."""

    def of_one(x: Tree, y: Tensor) -> Params:
        one = map_tree(lambda part: part.unsqueeze(0), x)
        return Task.gradient(task, parameters, {}, one, y.unsqueeze(0), only)[0]

    return vmap(of_one, randomness="different")(x, y)


def private_gradient(
    task: Task, parameters: Params, x: Tree, y: Tensor, *, is_drawn: Tensor, mechanism: Tensor, only: Only = None
) -> Params:
    """Return the sum of the clipped gradients of the drawn examples, with noise, over the expected size of a batch."""
    bound, noise, expected = mechanism
    found = example_gradients(task, parameters, x, y, only)
    norm = torch.stack([rows_of(value).square().sum(1) for value in found.values()]).sum(0).sqrt()
    # An example whose gradient is not finite counts for nothing: else it would change everything.
    scale = torch.where(is_drawn & norm.isfinite(), (bound / (norm + 1e-6)).clamp(max=1.0), 0.0)
    gradients = {}
    for name, value in found.items():
        total = torch.tensordot(scale.to(value.dtype), value.nan_to_num(0.0, 0.0, 0.0), 1)
        gradients[name] = (total + (noise * bound).to(value.dtype) * draw_normal(total)) / expected.to(value.dtype)
    return gradients


def check_private(task: Task, batch: tuple[Tree, Tensor] | None = None) -> None:
    """Refuse a model or an objective whose training cannot be made private."""
    for name, part in task.module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            way_out = "use GroupNorm instead, as in --model resnet20-gn"
            raise NotApplicableError(
                f"[privacy]: {name} is a BatchNorm, which mixes the examples of a batch, so that no gradient is a "
                f"single example's; {way_out}, or a model without normalisation (cnn, small-cnn, mlp)"
            )
    if task.layers.statistics:
        names = ", ".join(sorted(task.layers.statistics))
        raise NotApplicableError(f"[privacy]: the model computes {names} from the data without noise; leave them out")
    if task.objective.name == "survival":
        raise NotApplicableError("[privacy]: in task survival no example has a loss of its own")
    if batch is None:
        return
    try:
        with draw_from(torch.Generator()):
            example_gradients(task, task.initial(), *batch)
    except Exception as error:  # whatever the user's module or vmap raises
        why = f"no gradients of single examples ({first_line(error)})"
        raise PfedlaError(f"[privacy]: the model gives {why}; use one without recurrent or stateful layers") from error
