"""What the clients' training has released, with [privacy]: planned before a run, counted while it runs.

A client counts as trained in every round in which it was asked to, also if its answer was lost, refused or cut short.
The count is a part of the run's state: a round that is run again after a kill draws the same noise and counts once.
"""

import math
from typing import Any

import torch

from pfedla.core.accounting import design, spent
from pfedla.core.contracts import Algorithm, Cohort
from pfedla.core.privacy import Mechanism
from pfedla.core.rounds import Round
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunState


def plan_epochs(experiment: Experiment, method: Algorithm, num_clients: int) -> list[int]:
    """Return how many epochs each client trains in the whole run: the seed says in which rounds it takes part."""
    training, personal = method.count_epochs()
    rounds, nobody = torch.zeros(num_clients, dtype=torch.int64), torch.zeros(num_clients, dtype=torch.int64)
    for round in range(1, experiment.rounds + 1):
        rounds[Cohort.sample(nobody, round, experiment.participation, experiment.seed).ids] += 1
    evaluations = -(-experiment.rounds // experiment.evaluate_every)  # the last round is always evaluated
    return (training * rounds + personal * evaluations).tolist()


class Releases:
    """What a run's clients release by training. Without [privacy] there is nothing to say."""

    def __init__(self, experiment: Experiment, method: Algorithm, num_examples: torch.Tensor) -> None:
        """`num_examples`: of each client; in a deployment zero until it joins."""
        self.experiment, self.method, self._sizes = experiment, method, num_examples
        self.is_on = experiment.privacy.is_on
        self._planned: tuple[list[int], list[Mechanism]] = ([], [])

    def mechanisms(self) -> list[Mechanism]:
        """Return how each client is protected, as far as its number of examples is known."""
        sizes, batch = self._sizes.tolist(), self.method.training.batch_size
        if self.is_on and self._planned[0] != sizes:
            epochs = plan_epochs(self.experiment, self.method, len(sizes))
            pairs = zip(sizes, epochs, strict=True)
            self._planned = sizes, [design(self.experiment.privacy, size, batch, planned) for size, planned in pairs]
        return self._planned[1]

    def count(self, state: RunState, round: Round) -> None:
        """Count one more round."""
        state.evaluations += round.evaluation is not None
        for client in (*round.cohort.ids.tolist(), *round.failures):
            state.asked[client] = state.asked.get(client, 0) + 1

    def spent(self, state: RunState) -> dict[str, Any]:
        """Return the epsilon of each client so far, and the largest; None where there is no bound."""
        training, personal = self.method.count_epochs()
        found = [
            spent(mechanism, training * state.asked.get(client, 0) + personal * state.evaluations)
            for client, mechanism in enumerate(self.mechanisms())
        ]
        return describe(found)

    def conclude(self, state: RunState) -> dict[str, Any]:
        """Return what result.json holds."""
        if not self.is_on:
            return {}
        columns = {key: [getattr(one, key) for one in self.mechanisms()] for key in ("noise_multiplier", "delta")}
        about = {"max_grad_norm": self.experiment.privacy.max_grad_norm, "accountant": "rdp", **columns}
        return {"privacy": {**self.spent(state), **about}}


def describe(values: list[float]) -> dict[str, Any]:
    finite = [value if math.isfinite(value) else None for value in values]
    return {"epsilon": {"max": None if None in finite else max(values), "per_client": finite}}
