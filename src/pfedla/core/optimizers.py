"""SGD with momentum and AdamW as functions of tensors: they run under vmap, and start afresh in every round."""

import math

import torch
from torch import Tensor

from pfedla.core.errors import NotApplicableError
from pfedla.core.layers import Params
from pfedla.core.settings import Training

Slots = dict[str, Params]  # what an optimiser remembers of each parameter
BETAS, EPSILON = (0.9, 0.999), 1e-8  # AdamW's, as in torch


def is_plain_sgd(training: Training) -> bool:
    """Tell whether a step is SGD and nothing else."""
    return training.optimizer == "sgd" and not (training.momentum or training.weight_decay or training.clip_norm)


def clip(gradients: Params, most: float) -> Params:
    """Scale the gradients so that their common norm is at most `most`."""
    norm = torch.stack([value.square().sum() for value in gradients.values()]).sum().sqrt()
    share = (most / (norm + 1e-6)).clamp(max=1.0)
    return {name: value * share.to(value.dtype) for name, value in gradients.items()}


def advance(training: Training, values: Params, gradients: Params, slots: Slots, step: int) -> tuple[Params, Slots]:
    """Take step number `step` (from 1) of the optimiser; as torch.optim's."""
    if training.clip_norm:
        gradients = clip(gradients, training.clip_norm)
    rule = _adamw if training.optimizer == "adamw" else _momentum
    moved: Params = {}
    kept: Slots = {}
    for name, value in values.items():
        moved[name], kept[name] = rule(training, value, gradients[name], slots.get(name, {}), step)
    return moved, kept


def _momentum(training: Training, value: Tensor, gradient: Tensor, slot: Params, step: int) -> tuple[Tensor, Params]:
    if training.weight_decay:
        gradient = torch.add(gradient, value, alpha=training.weight_decay)
    if not training.momentum:
        return torch.add(value, gradient, alpha=-training.learning_rate), slot
    velocity = torch.add(gradient, slot["velocity"], alpha=training.momentum) if slot else gradient
    direction = torch.add(gradient, velocity, alpha=training.momentum) if training.nesterov else velocity
    return torch.add(value, direction, alpha=-training.learning_rate), {"velocity": velocity}


def _adamw(training: Training, value: Tensor, gradient: Tensor, slot: Params, step: int) -> tuple[Tensor, Params]:
    (first, second), lr = BETAS, training.learning_rate
    mean = slot["mean"].lerp(gradient, 1 - first) if slot else (1 - first) * gradient
    square = gradient * gradient
    square = slot["square"].lerp(square, 1 - second) if slot else square.mul_(1 - second)
    bias = math.sqrt(1 - second**step)
    root = square.sqrt().add_(EPSILON * bias)
    kept = value * (1 - lr * training.weight_decay) if training.weight_decay else value
    return torch.addcdiv(kept, mean, root, value=-lr * bias / (1 - first**step)), {"mean": mean, "square": square}


def learning_rate_at(training: Training, round: int, rounds: int) -> float:
    """Return the learning rate of a round (from 1) of a run of `rounds`: warm-up, then the schedule."""
    lr = training.learning_rate
    if round <= training.warm_up_rounds:
        return lr * round / (training.warm_up_rounds + 1)
    if training.schedule == "cosine":
        progress = min(1.0, (round - 1 - training.warm_up_rounds) / max(1, rounds - training.warm_up_rounds))
        return lr * (1 + math.cos(math.pi * progress)) / 2
    return lr * training.decay ** ((round - 1) // training.decay_every) if training.schedule == "step" else lr


def check_plain(name: str, training: Training) -> None:
    """Refuse an optimiser for a method whose steps are its own."""
    if not is_plain_sgd(training):
        raise NotApplicableError(f"{name} has steps of its own: use plain sgd (no momentum, weight decay, clipping)")
