"""The clients of an experiment that stay away from its run and join when it is over, each alone."""

import math

import torch
from torch import Tensor

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.runs.experiment import Built
from pfedla.core.files import write_tensors
from pfedla.runs.joining import Terms, join, last_state
from pfedla.runs.folder import RunFolder

NAMES = {  # in a result, of the accuracies of joining.Joined
    "after": "accuracy", "before": "accuracy_before", "after_training": "accuracy_after_training", "alone": "accuracy_alone",
}  # fmt: skip


def join_unseen(built: Built, folder: RunFolder) -> tuple[int, dict[str, Tensor]]:
    """How many rounds each played after the run, and their accuracies, nan where there is none; leaves their models."""
    assert built.unseen is not None
    experiment, num_clients = built.experiment, len(built.federation)
    progress = last_state(folder.checkpoints, built.algorithm, num_clients, experiment.seed)
    accuracies = torch.full((len(built.unseen), len(NAMES)), torch.nan, dtype=torch.float64)
    models, rounds = folder.path / "models", 0
    models.mkdir(exist_ok=True)
    for number, name in enumerate(built.unseen.names):
        if folder.stopping():
            raise Stopped
        target = models / f"unseen-{number}.safetensors"
        target.unlink(missing_ok=True)
        newcomer, terms = built.unseen.only([number]), Terms.of(experiment, progress)
        try:
            joined = join(built.algorithm, progress.server, newcomer, num_clients, terms)
        except PfedlaError as error:  # the others are worth having all the same
            folder.say(f"unseen client {name}: {error}")
            continue
        write_tensors(target, joined.model)
        rounds, found = joined.rounds, joined.accuracies()
        numbers = [math.nan if (value := found[key]) is None else value for key in NAMES]
        accuracies[number] = torch.tensor(numbers, dtype=torch.float64)
        folder.say(f"unseen client {name} joins: accuracy {100 * joined.before:.1f} %, then {100 * joined.after:.1f} %")
    return rounds, dict(zip(NAMES.values(), accuracies.T, strict=True))
