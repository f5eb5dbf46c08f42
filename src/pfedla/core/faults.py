"""Faults on purpose: clients that stay away, run out of time or send wrong updates, drawn from the seed."""

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch import Tensor

from pfedla.core.contracts import Cohort, Payload, generator
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Params
from pfedla.core.settings import AUTO, Auto, Chance, Section

Attack = Literal["none", "nan", "noise", "sign-flip", "scale"]
ATTACKS: tuple[Attack, ...] = get_args(Attack)


class Faults(Section):
    """What goes wrong on purpose, drawn from the seed. By default nothing."""

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Chance that a client of the cohort does not answer, each round."""
    stragglers: Chance = 0.0
    """Chance that a client does only some of its local epochs, each round."""
    attack: Attack = "none"
    """What the attackers send in place of their update."""
    attackers: Chance = 0.0
    """Share of the clients that attack, the same ones in every round."""
    attack_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Chance that an attacker attacks, each round."""
    attack_scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Auto = AUTO
    """sign-flip, scale: factor of the update; noise: size relative to it. auto: 1, for scale 10."""

    @property
    def active(self) -> dict[str, Any]:
        """What differs from a run in which nothing goes wrong."""
        return self.model_dump(exclude_defaults=True)

    @property
    def factor(self) -> float:
        if self.attack_scale != AUTO:
            return self.attack_scale
        return 10.0 if self.attack == "scale" else 1.0

    def check(self, num_clients: int, local_epochs: int) -> None:
        if self.stragglers and local_epochs < 2:
            raise PfedlaError(
                "faults.stragglers: with one local epoch nobody can do fewer; set local_epochs to 2 or more"
            )
        if (self.attack == "none") != (self.attackers == 0):
            raise PfedlaError(
                f"faults.attack = {self.attack!r} and faults.attackers = {self.attackers}: give what is sent "
                f"({', '.join(ATTACKS[1:])}) and the share of the clients that send it, or neither"
            )
        if self.attackers and not len(self.choose_attackers(num_clients, 0)):
            raise PfedlaError(f"faults.attackers = {self.attackers} of {num_clients} clients is nobody")

    def choose_attackers(self, num_clients: int, seed: int) -> Tensor:
        """Return the ids of the attackers, ascending."""
        count = int(self.attackers * num_clients + 0.5)
        return torch.randperm(num_clients, generator=generator(seed, "attackers"))[:count].sort().values

    def choose_answering(self, cohort: Cohort) -> Tensor:
        """Return for each client of the cohort whether it answers in this round."""
        return torch.tensor([not _happens(self.dropout, cohort, "dropout", client) for client in cohort.ids.tolist()])

    def limit_epochs(self, cohort: Cohort, client: int, budget: int) -> int:
        """Return how many of its local epochs a client has time for in this round."""
        if not _happens(self.stragglers, cohort, "straggler", client):
            return budget
        return int(torch.randint(1, budget, (), generator=generator(cohort.seed, "epochs", cohort.round, client)))

    def attacks(self, cohort: Cohort, client: int) -> bool:
        """Return whether a client, if it is an attacker, attacks in this round."""
        return _happens(self.attack_rate, cohort, "attack", client)

    def falsify(self, cohort: Cohort, client: int, upload: Payload, start: Params) -> Payload:
        """Return what an attacker sends instead of `upload`; its training began at `start`, or at zero."""
        draws = generator(cohort.seed, "noise", cohort.round, client)
        tensors = {
            name: self._falsify_tensor(value, start.get(name, torch.zeros_like(value)), draws)
            for name, value in upload.tensors.items()
        }
        extras = upload.extras
        if self.attack == "nan":
            extras = {name: self._falsify_tensor(value, value, draws) for name, value in extras.items()}
        return Payload(tensors, upload.sent, extras=extras)

    def _falsify_tensor(self, trained: Tensor, start: Tensor, draws: torch.Generator) -> Tensor:
        if not trained.is_floating_point():
            return trained
        if self.attack == "nan":
            return torch.full_like(trained, torch.nan)
        update = trained - start
        if self.attack == "noise":
            noise = torch.randn(trained.shape, generator=draws).to(trained)
            return start + self.factor * update.square().mean().sqrt() * noise
        return start + (self.factor if self.attack == "scale" else -self.factor) * update


def _happens(chance: float, cohort: Cohort, purpose: str, client: int) -> bool:
    return (
        chance > 0 and float(torch.rand((), generator=generator(cohort.seed, purpose, cohort.round, client))) < chance
    )
