"""pFedMe: which model is the personal one, and what the local budget is."""

import torch
import torch.nn.functional as F
from conftest import NORMS, Parabola, TinyNet, assert_same, budget, personal_models, play, toy_federation

from pfedla.algorithms.pfedme import PERSONAL, PFedMe
from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.core.layers import take
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation


def parabola(**options) -> PFedMe:
    return PFedMe(task=Parabola(), training=budget(0.1, 1, 1), **options)


def tiny(batch_norm: bool = False, dtype: torch.dtype = torch.float32, **options) -> PFedMe:
    return PFedMe(task=task_of(TinyNet(batch_norm, dtype)), training=budget(0.1, 2, 5), **options)


def test_a_round_starts_from_the_common_model_not_from_the_last_personal_one() -> None:
    algorithm = parabola()
    first = algorithm.local_update(algorithm.init_client(), Parabola.download(0.0), Parabola.data(4, 8))
    again = algorithm.local_update(first.client, Parabola.download(0.0), Parabola.data(4, 8))
    assert_same(first.client, again.client)


def test_the_server_mixes_by_hand() -> None:
    """Mean weighted by examples: (10 · 1 + 30 · 5) / 40 = 4; w = (1 − β) 2 + β 4."""
    cohort = Cohort(1, 0, torch.tensor([1, 4]), torch.tensor([10, 30]))
    uploads = Payload({"weight": torch.tensor([[[1.0]], [[5.0]]], dtype=torch.float64)}, torch.ones(2, 1).bool())
    for beta, expected in ((1.0, 4.0), (0.25, 2.5), (2.0, 6.0)):
        algorithm = parabola(server_mix=beta)
        server = {"model": Parabola.download(2.0).tensors}
        after = algorithm.aggregate(server, cohort, algorithm.download(server, cohort), uploads)
        assert after["model"]["weight"].item() == expected


def test_the_gradient_steps_are_those_of_the_common_budget() -> None:
    """11 batches, K = 5: with an equal budget every fifth batch is used, five times; without, all are."""
    data = Parabola.data(*range(11))
    for equal, used in ((True, [0, 5, 10]), (False, list(range(11)))):
        algorithm = parabola(equal_budget=equal)
        algorithm.local_update(algorithm.init_client(), Parabola.download(0.0), data)
        assert algorithm.task.seen == [[batch] for batch in used for _ in range(5)]
    algorithm = parabola(inner_steps=1)
    algorithm.local_update(algorithm.init_client(), Parabola.download(0.0), data)
    assert len(algorithm.task.seen) == 11


@NORMS
def test_a_clients_round_equals_a_textbook_loop(batch_norm: bool) -> None:
    """The slow twin: torch.optim.SGD on the loss plus the penalty, in float64."""
    algorithm = tiny(batch_norm, torch.float64, personal_lr=0.05, eta=0.02, inner_steps=3)
    x, y = toy_federation((20,)).train[0]
    data = LocalData(x.double(), y, torch.stack([torch.arange(20), torch.arange(20).roll(7)]))
    shared = algorithm.share(algorithm.task.initial())
    sent = torch.ones(len(algorithm.task.layers)).bool()
    result = algorithm.local_update(algorithm.init_client(), Payload(shared, sent), data)

    module = TinyNet(batch_norm, torch.float64).train()
    w = [value.detach().clone() for value in module.parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    budget = [order[start:stop] for order in data.order for start, stop in batch_bounds(20, 5)]
    for rows in budget[::3]:
        for _ in range(3):
            optimizer.zero_grad()
            away = sum((theta - own).square().sum() for theta, own in zip(module.parameters(), w, strict=True))
            (F.cross_entropy(module(data.x[rows]), y[rows]) + 15 / 2 * away).backward()
            optimizer.step()
        w = [own - 0.02 * 15 * (own - theta.detach()) for own, theta in zip(w, module.parameters(), strict=True)]
    assert_same(result.model, {name: value.detach() for name, value in module.state_dict().items()}, tolerance=1e-12)
    assert_same(result.upload.tensors, dict(zip(dict(module.named_parameters()), w, strict=True)), tolerance=1e-12)


@NORMS
def test_the_personal_model_is_theta_neither_the_common_nor_the_initial_one(
    federation: Federation, batch_norm: bool
) -> None:
    algorithm = tiny(batch_norm)
    played, clients = play(algorithm, federation, participation=0.5, rounds=range(1, 2))
    server, took_part = played[0].server, played[0].cohort.ids.tolist()
    assert 0 < len(took_part) < len(federation)
    for client, model in enumerate(personal_models(algorithm, federation, played, clients)):
        for name in ("fc1.weight", "fc2.weight", "fc2.bias"):  # before BatchNorm a bias has no gradient
            own = take(clients, client)[PERSONAL + name]
            assert torch.equal(model[name], own if client in took_part else server["model"][name])
            assert not torch.equal(own, server["model"][name])
