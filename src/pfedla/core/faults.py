"""Faults on purpose: clients that stay away, run out of time or send wrong updates, drawn from the seed."""

from typing import get_args

import torch
from torch import Tensor

from pfedla.core.contracts import Cohort, Payload, generator
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Params
from pfedla.core.settings import AUTO, Attack, Faults

NO_FAULTS = Faults()


def check_faults(faults: Faults, num_clients: int, local_epochs: int, task: str) -> None:
    if faults.stragglers and local_epochs < 2:
        raise PfedlaError("faults.stragglers: with one local epoch nobody can do fewer; set local_epochs to 2 or more")
    if (faults.attack == "none") != (faults.attackers == 0):
        given = f"faults.attack = {faults.attack!r} and faults.attackers = {faults.attackers}"
        kinds = ", ".join(get_args(Attack)[1:])
        raise PfedlaError(f"{given}: give what is sent ({kinds}) and the share of the clients that send it, or neither")
    if faults.attack_until != "end" and faults.attack_until < faults.attack_from:
        raise PfedlaError(
            f"faults.attack_until = {faults.attack_until} is before faults.attack_from = {faults.attack_from}"
        )
    if faults.attackers and not len(choose_attackers(faults, num_clients, 0)):
        raise PfedlaError(f"faults.attackers = {faults.attackers} of {num_clients} clients is nobody")
    if faults.attack == "label-flip" and task != "classification":
        raise PfedlaError(f"faults.attack = 'label-flip' is for classification, and the task is {task}; choose another")


def happens(chance: float, cohort: Cohort, purpose: str, client: int) -> bool:
    draws = generator(cohort.seed, purpose, cohort.round, client)
    return chance > 0 and float(torch.rand((), generator=draws)) < chance


def choose_answering(faults: Faults, cohort: Cohort) -> Tensor:
    return torch.tensor([not happens(faults.dropout, cohort, "dropout", client) for client in cohort.ids.tolist()])


def limit_epochs(faults: Faults, cohort: Cohort, client: int, budget: int) -> int:
    """Return how many of its local epochs a client has time for in this round."""
    if not happens(faults.stragglers, cohort, "straggler", client):
        return budget
    return int(torch.randint(1, budget, (), generator=generator(cohort.seed, "epochs", cohort.round, client)))


def choose_attackers(faults: Faults, num_clients: int, seed: int) -> Tensor:
    order = torch.randperm(num_clients, generator=generator(seed, "attackers"))
    return order[: int(faults.attackers * num_clients + 0.5)].sort().values


def is_attacking(faults: Faults, cohort: Cohort, client: int, num_clients: int) -> bool:
    last = cohort.round if faults.attack_until == "end" else faults.attack_until
    attacks = faults.attack_from <= cohort.round <= last and happens(faults.attack_rate, cohort, "attack", client)
    return attacks and client in choose_attackers(faults, num_clients, cohort.seed)


def falsify(faults: Faults, cohort: Cohort, client: int, upload: Payload, start: Params) -> Payload:
    """Return what an attacker sends instead of `upload`; `start` is where its training began, of a name not there zero.

    Labels are flipped before training, in `Client.local_data`. For "initial", `start` is the initial model.
    """
    attack, draws = faults.attack, generator(cohort.seed, "noise", cohort.round, client)
    scale = faults.attack_scale if faults.attack_scale != AUTO else 10.0 if attack == "scale" else 1.0

    def change(value: Tensor, begin: Tensor) -> Tensor:
        if not value.is_floating_point() or attack == "label-flip":
            return value
        if attack in ("initial", "free-rider"):
            return begin
        if attack == "nan":
            return torch.full_like(value, torch.nan)
        update = value - begin
        if attack == "noise":
            return begin + scale * update.square().mean().sqrt() * torch.randn(value.shape, generator=draws).to(value)
        return begin + (scale if attack == "scale" else -scale) * update

    tensors = {n: change(value, start.get(n, torch.zeros_like(value))) for n, value in upload.tensors.items()}
    extras = {n: change(value, value) if attack == "nan" else value for n, value in upload.extras.items()}
    return Payload(tensors, upload.sent, extras=extras)
