"""FedFomo: the weights by hand, the choice of candidates, the held-out split, and Local as its limit."""

import copy
from math import log
from typing import Any

import pytest
import torch
from conftest import NORMS, NOTHING, TinyNet, assert_same, budget, engine_for, personal_models, play, toy_federation
from torch import nn
from torch.func import vmap

from pfedla.algorithms.fedfomo import FedFomo
from pfedla.algorithms.local import Local
from pfedla.core.contracts import Cohort, LocalData, Payload, ServerState
from pfedla.core.layers import stack
from pfedla.core.rounds import payload_bytes
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation


def fedfomo(batch_norm: bool = False, **options: Any) -> FedFomo:
    return FedFomo(task=task_of(TinyNet(batch_norm)), training=budget(0.1, 2, 5), **options)


def cohort_of(*ids: int, round: int = 1, seed: int = 0) -> Cohort:
    return Cohort(round, seed, torch.tensor(ids), torch.full((len(ids),), 10))


def with_affinity(algorithm: FedFomo, affinity: list[list[float]]) -> ServerState:
    server = algorithm.init_server(len(affinity), seed=0)
    return {**server, "affinity": {"affinity": torch.tensor(affinity)}}


# The client. One weight per class, one example x = 1 of class 0: the loss is log(1 + exp(b - a)).

HAND = FedFomo(task=task_of(nn.Linear(1, 2, bias=False)), training=budget(1e-30, 1, 5))
X, Y = torch.ones(1, 1), torch.zeros(1).long()
ONE = LocalData(X, Y, torch.zeros(1, 1).long(), held_out_x=X, held_out_y=Y)


def models(*pairs: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(pairs).unsqueeze(-1)


def sent(*pairs: tuple[float, float]) -> Payload:
    return Payload({}, torch.tensor([False]), {"candidate/weight": models(*pairs)})


OWN = {"weight": models((0.0, 0.0))[0]}  # loss log 2


def test_the_weights_by_hand_and_negative_ones_are_cut() -> None:
    download = sent((log(3), 0.0), (0.0, log(3)), (log(7), 0.0))  # losses log 4/3, log 4, log 8/7
    result = HAND.local_update(OWN, download, ONE)
    by_hand = [log(2 / (4 / 3)) / log(3), log(2 / 4) / log(3), log(2 / (8 / 7)) / log(7)]
    torch.testing.assert_close(result.upload.extras["weights"], torch.tensor(by_hand))
    assert by_hand[1] < 0
    first, last = by_hand[0] / (by_hand[0] + by_hand[2]), by_hand[2] / (by_hand[0] + by_hand[2])
    expected = models((first * log(3) + last * log(7), 0.0))[0]
    torch.testing.assert_close(result.model["weight"], expected)  # the rate is tiny: training changes nothing
    torch.testing.assert_close(HAND.personalize(OWN, download, ONE)["weight"], expected)
    assert_same(result.client, result.model)
    assert_same(result.upload.tensors, result.model)
    assert result.upload.sent.tolist() == [True]


def test_from_the_start_of_the_last_training_by_hand() -> None:
    """reference = "start": the trained model (log 3, 0) is a candidate beside the received (log 7, 0)."""
    algorithm = HAND.model_copy(update={"reference": "start"})
    client = {"weight": models((log(3), 0.0))[0], "start/weight": OWN["weight"]}
    result = algorithm.local_update(client, sent((log(7), 0.0)), ONE)
    received, own = log(2 / (8 / 7)) / log(7), log(2 / (4 / 3)) / log(3)
    torch.testing.assert_close(result.upload.extras["weights"], torch.tensor([received]))  # its own is not sent
    mixed = models(((received * log(7) + own * log(3)) / (received + own), 0.0))[0]
    torch.testing.assert_close(result.client, {"weight": mixed, "start/weight": mixed})
    worse = {"weight": models((-1.0, 0.0))[0], "start/weight": OWN["weight"]}
    assert_same(algorithm.personalize(worse, sent((-2.0, 0.0)), ONE), OWN)  # training did not help: undone


@pytest.mark.parametrize(
    ("own", "candidates", "signs"),
    [
        ((0.0, 0.0), [(0.0, 1.0), (-2.0, 0.0)], [-1, -1]),  # none helps
        ((0.3, -0.2), [(0.3, -0.2), (0.3, -0.2)], [0, 0]),  # equal models: 0/0
        ((0.0, 0.0), [(-3e38, 3e38), (-1.0, 0.0)], [0, -1]),  # a broken one
    ],
)
def test_without_a_candidate_that_helps_the_own_model_is_kept(own: tuple, candidates: list, signs: list) -> None:
    client = {"weight": models(own)[0]}
    assert_same(HAND.personalize(client, sent(*candidates), ONE), client)
    weights = HAND.local_update(client, sent(*candidates), ONE).upload.extras["weights"]
    assert weights.sign().tolist() == signs


def test_without_held_out_data_the_own_model_is_kept() -> None:
    nothing = ONE._replace(held_out_x=torch.empty(0, 1), held_out_y=torch.empty(0).long())
    result = HAND.local_update(OWN, sent((log(3), 0.0), (1.0, 0.0)), nothing)
    assert result.upload.extras["weights"].tolist() == [0.0, 0.0]
    assert_same(result.model, OWN, tolerance=1e-20)
    played, _ = play(fedfomo(), toy_federation((4, 9, 4)))  # of 4 examples none is held out
    assert not played[-1].failures


def test_the_mix_of_a_net_with_batchnorm_against_a_plain_loop() -> None:
    """float64, under vmap: candidates are judged in eval mode with the client's own statistics."""
    task = task_of(TinyNet(batch_norm=True, dtype=torch.float64))
    algorithm = FedFomo(task=task, training=budget(0.1, 1, 5))
    draws = torch.Generator().manual_seed(1)

    def noisy(count: int, names: set[str]) -> dict:
        initial = {n: v.expand(count, *v.shape) for n, v in task.initial().items() if n in names}
        return {n: v + 0.5 * torch.rand(v.shape, generator=draws).double() for n, v in initial.items()}

    floats = {n for n, v in task.initial().items() if v.is_floating_point()}
    parameters = set(task.layers.parameters(task.initial()))
    clients = {**noisy(2, floats), "bn.num_batches_tracked": torch.tensor([3, 4])}
    others = stack([noisy(4, parameters) for _ in range(2)])
    x, y = torch.randn(2, 6, 6, generator=draws).double(), torch.randint(3, (2, 6), generator=draws)
    trained = torch.tensor([True, True])
    order = torch.zeros(2, 1, 6).long()
    data = LocalData(x, y, order, held_out_x=x, held_out_y=y, has_trained=trained)
    data = data._replace(is_drawn=torch.zeros(len(x), 0), mechanism=torch.zeros(len(x), 0))
    download = Payload({}, torch.zeros(2, 3).bool(), {f"candidate/{n}": v for n, v in others.items()})
    mixed, weights = vmap(algorithm._mix)(clients, download, data)
    for i in range(2):

        def loss(model: dict, i: int = i) -> torch.Tensor:
            module = TinyNet(batch_norm=True, dtype=torch.float64).eval()
            module.load_state_dict(model)
            return nn.functional.cross_entropy(module(x[i]), y[i]).detach()

        own = {n: v[i] for n, v in clients.items()}
        raw = []
        for m in range(4):
            other = {n: others[n][i, m] for n in parameters}
            distance = sum(float((other[n] - own[n]).square().sum()) for n in parameters) ** 0.5
            raw.append(float(loss(own) - loss({**own, **other})) / distance)
        torch.testing.assert_close(weights[i], torch.tensor(raw, dtype=torch.float64), rtol=1e-9, atol=1e-12)
        total = sum(max(w, 0.0) for w in raw)
        assert total > 0
        for n in own.keys() - parameters:
            assert torch.equal(mixed[n][i], own[n])
        for n in parameters:
            step = sum(max(w, 0.0) / total * (others[n][i, m] - own[n]) for m, w in enumerate(raw))
            torch.testing.assert_close(mixed[n][i], own[n] + step, rtol=1e-9, atol=1e-12)


# The server.


def test_a_client_is_never_its_own_candidate_and_no_candidate_comes_twice() -> None:
    for epsilon in (0.0, 0.5, 1.0):
        algorithm = fedfomo(candidates=3, epsilon=epsilon, epsilon_decay=0.0)
        own_best = with_affinity(algorithm, (10 * torch.eye(6)).tolist())
        for round in range(1, 20):
            choices = algorithm._choose(own_best, cohort_of(0, 2, 5, round=round))
            assert choices.shape == (3, 3)
            for client, row in zip((0, 2, 5), choices.tolist(), strict=True):
                assert client not in row
                assert len(set(row)) == 3


def test_epsilon_zero_takes_the_largest_affinity_ties_by_the_seed() -> None:
    algorithm = fedfomo(candidates=2, epsilon=0.0)
    server = with_affinity(algorithm, [[9.0, -1.0, 3.0, 1.0], [0.0] * 4, [5.0, 4.0, 0.0, 4.5], [0.0] * 4])
    assert algorithm._choose(server, cohort_of(0, 2)).tolist() == [[2, 3], [0, 3]]
    ties = {tuple(algorithm._choose(server, cohort_of(1, round=r))[0].tolist()) for r in range(1, 100)}
    assert ties == {(0, 2), (0, 3), (2, 0), (2, 3), (3, 0), (3, 2)}


def test_epsilon_falls_by_the_decay_every_round() -> None:
    algorithm = fedfomo(candidates=1, epsilon=1.0, epsilon_decay=0.4)
    server = with_affinity(algorithm, [[0.0, 1.0, 0.0, 0.0, 0.0]] * 5)
    for round, epsilon in ((1, 1.0), (2, 0.6), (3, 0.2), (4, 0.0), (9, 0.0)):
        cohorts = (cohort_of(0, round=round, seed=seed) for seed in range(400))
        best = sum(algorithm._choose(server, cohort).item() == 1 for cohort in cohorts)
        assert best / 400 == pytest.approx(1 - epsilon + epsilon / 4, abs=0.08 if epsilon else 0)


def test_signed_weights_are_added_in_the_rows_of_the_cohort_only() -> None:
    algorithm = fedfomo(candidates=2, epsilon=0.0)
    start = [[0.0, -1.0, 3.0, 1.0], [0.5] * 4, [5.0, 4.0, 0.0, 4.5], [0.25] * 4]
    server, cohort = with_affinity(algorithm, start), cohort_of(0, 2)
    downloads, before = algorithm.download(server, cohort), copy.deepcopy(server["models"])
    uploads = {name: torch.full((2, *value.shape[1:]), 2.0) for name, value in server["models"].items()}
    weights = torch.tensor([[0.5, -2.0], [-0.25, 1.0]])  # for (2, 3) and (0, 3)
    answer = Payload(uploads, torch.ones(2, 2).bool(), {"weights": weights})
    after = algorithm.aggregate(server, cohort, downloads, answer)
    expected = [[0.0, -1.0, 3.5, -1.0], start[1], [4.75, 4.0, 0.0, 5.5], start[3]]
    assert after["affinity"]["affinity"].tolist() == expected
    for name, value in after["models"].items():
        assert (value[[0, 2]] == 2.0).all()
        assert torch.equal(value[[1, 3]], before[name][[1, 3]])


def test_the_candidates_sent_are_the_models_chosen_and_each_is_charged() -> None:
    algorithm = fedfomo(batch_norm=True, candidates=3)
    server, cohort = algorithm.init_server(6, 0), cohort_of(1, 4)
    draws = torch.Generator().manual_seed(0)
    server["models"] = {n: torch.randn(v.shape, generator=draws) for n, v in server["models"].items()}
    downloads = algorithm.download(server, cohort)
    choices = algorithm._choose(server, cohort)
    assert not downloads.tensors
    assert not downloads.sent.any()
    for name, value in server["models"].items():
        assert torch.equal(downloads.extras[f"candidate/{name}"], value[choices])
    assert payload_bytes(downloads, algorithm.task.layers).tolist() == [3 * 63 * 4] * 2


# The whole.


def test_the_held_out_split_is_fixed_once_and_apart_from_training_and_test(federation: Federation) -> None:
    with engine_for(fedfomo(), federation, threads=1, recalibrate="never") as engine:
        for client, (x, y) in enumerate(federation.train):
            cohorts = (Cohort.everyone(federation.num_examples, round, 0) for round in (1, 7))
            one = engine.clients[client]
            first, later = (one.local_data(cohort, NOTHING) for cohort in cohorts)
            assert torch.equal(first.held_out_x, later.held_out_x)
            assert torch.equal(first.held_out_y, later.held_out_y)
            assert torch.equal(first.x, later.x)
            parts = first.x, first.held_out_x, federation.test[client].x
            kept, apart, test = ({tuple(row) for row in part.tolist()} for part in parts)
            assert len(apart) == int(0.2 * len(y)) > 0
            assert not kept & apart
            assert kept | apart == {tuple(row) for row in x.tolist()}
            assert not apart & test


class LocalOnTheRest(Local):
    def held_out_share(self, download: Payload) -> float:
        return 0.2


@NORMS
@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_without_candidates_it_is_local_on_the_same_split(
    federation: Federation, batch_norm: bool, engine: str
) -> None:
    alone = fedfomo(batch_norm, candidates=0)
    local = LocalOnTheRest(task=alone.task, training=alone.training)
    how = {"participation": 0.5, "engine": engine}
    (one, clients), (other, others) = (play(a, federation, **how) for a in (alone, local))
    assert_same(clients, others)
    assert torch.equal(one[-1].evaluation.loss, other[-1].evaluation.loss)
    assert one[-1].traffic.down_bytes == 0


def test_without_statistics_of_its_own_a_client_cannot_judge(federation: Federation) -> None:
    """BatchNorm: one that never trained keeps its own model; after one round it judges."""
    algorithm = fedfomo(batch_norm=True, validation_share=0.4)
    played, clients = play(algorithm, federation, participation=0.5, rounds=range(1, 4))
    models = personal_models(algorithm, federation, played, clients)
    never = [i for i in range(6) if not any(i in one.cohort.ids for one in played)]
    initial = algorithm.task.initial()
    for client in never:
        assert_same(models[client], initial)
    assert never
    assert played[-1].server["affinity"]["affinity"].any()
