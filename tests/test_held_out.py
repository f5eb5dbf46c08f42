"""pfedla-heldout: weights learned from examples that are not trained on, with gradients sent as sketches."""

import copy
import math
from itertools import chain
from math import prod

import pytest
import torch
import torch.nn.functional as F
from conftest import SIZES, TinyNet, assert_same, budget, engine_for, make, play, received
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfedla import federation_of, simulate
from pfedla.algorithms import create, partial, pfedla_heldout
from pfedla.algorithms.pfedla import LayerWeightHypernetwork, apply_trunk
from pfedla.algorithms.pfedla_heldout import GRADIENT, HASH, IN_A_ROW, MEASURED, count_sketch, draw_hash, watch_lengths
from pfedla.core.contracts import Algorithm, Cohort, LocalData, Params, Payload, ServerState
from pfedla.core.faults import choose_attackers
from pfedla.core.models import build_model
from pfedla.core.rounds import payload_bytes
from pfedla.core.settings import Faults
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation

PARTS = ("weight", "bias")
UNIFORM = torch.full((6, 2, 6), 1 / 6)


def test_until_the_weights_are_frozen_no_held_out_example_is_trained_on(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the warm-up; afterwards all examples are."""
    trained: list[tuple[set, set]] = []  # by client and round: what it trained on, what it held out

    def record(task: object, tensors: Params, data: LocalData, *rest: object, **how: object) -> tuple[Params, Tensor]:
        trained.append(({*map(tuple, data.x.tolist())}, {*map(tuple, data.held_out_x.tolist())}))
        return train(task, tensors, data, *rest, **how)

    train = partial.sgd
    monkeypatch.setattr(partial, "sgd", record)
    play(make("pfedla-heldout", warm_up=2, learning_rounds=2), federation, rounds=range(1, 7), threads=1)
    examples = {*chain.from_iterable(map(tuple, one.x.tolist()) for one in federation.train)}
    before, after = trained[: 4 * 6], trained[4 * 6 :]
    held_out = set.union(*(apart for _, apart in trained))
    assert len(held_out) == sum(int(0.2 * len(one.y)) for one in federation.train)
    for number in range(4):
        used = set.union(*(used for used, _ in before[6 * number : 6 * number + 6]))
        assert used == examples - held_out
    assert all(set.union(*(used for used, _ in after[first : first + 6])) == examples for first in (0, 6))
    assert not any(apart for _, apart in after)


def test_a_client_sends_the_gradient_of_what_it_holds_out(federation: Federation) -> None:
    """The slow twin: autograd of the plain module at what the client was sent."""
    algorithm = make("pfedla-heldout")
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    with engine_for(algorithm, federation) as engine:
        downloads = algorithm.download(algorithm.init_server(6, 0), cohort)
        answers = engine.train(cohort, downloads)
        for client in (1, 3):  # of 14 and 20 examples
            data = engine.clients[client].local_data(cohort, downloads.rows(client))
            start = {name: value.clone().requires_grad_() for name, value in downloads.rows(client).tensors.items()}
            F.cross_entropy(functional_call(TinyNet(), start, (data.held_out_x,)), data.held_out_y).backward()
            sent = torch.cat([answers[client].upload.extras[GRADIENT + layer] for layer in ("fc1", "fc2")])
            due = torch.cat([start[f"{layer}.{part}"].grad.flatten() for layer in ("fc1", "fc2") for part in PARTS])
            # Of a length in [1, 2), which says nothing of the gradient's own.
            torch.testing.assert_close(sent, due * 2.0 ** -math.floor(math.log2(due.norm())))
            assert 1 <= sent.norm() < 2
    few = answers[0].upload.extras  # of 9 examples it holds out one, too few for BatchNorm
    assert not any(value.any() for value in few.values())


def test_a_gradient_of_too_few_examples_is_not_sent_and_the_weights_of_that_client_stay(federation: Federation) -> None:
    algorithm = make("pfedla-heldout", min_held_out=3)  # of 20 examples a fifth is 4, of 14 it is 2
    ran, _ = play(algorithm, federation, rounds=range(1, 4))
    alpha = algorithm.alpha(ran[-1].server)
    moved = (alpha != UNIFORM).flatten(1).any(1)
    assert moved.tolist() == [size == 20 for size in SIZES]


def test_to_hide_the_length_of_the_gradient_leaves_the_weights_bit_for_bit(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for hide in (pfedla_heldout.hide_length, lambda gradient: gradient):
        monkeypatch.setattr(pfedla_heldout, "hide_length", hide)
        algorithm = make("pfedla-heldout", sketch=8)
        ran, _ = play(algorithm, federation, rounds=range(1, 5))
        runs.append(algorithm.alpha(ran[-1].server))
    assert torch.equal(*runs)
    assert not torch.equal(runs[0], UNIFORM)


def one_round(algorithm: Algorithm, federation: Federation, server: ServerState, round: int) -> tuple:
    cohort = Cohort.everyone(federation.num_examples, round, 0)
    downloads = algorithm.download(server, cohort)
    with engine_for(algorithm, federation) as engine:
        return cohort, downloads, received(engine, cohort, downloads).uploads


def test_the_weights_move_down_the_held_out_loss_and_nothing_else_moves_them(federation: Federation) -> None:
    algorithm = make("pfedla-heldout", hypernetwork="compact", hypernetwork_lr=1e-3)
    server = play(algorithm, federation, rounds=range(1, 3))[0][-1].server
    cohort, downloads, uploads = one_round(algorithm, federation, server, 3)
    after = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, uploads)
    with engine_for(algorithm, federation) as engine:
        for client in (1, 3, 4):
            data = engine.clients[client].local_data(cohort, downloads)
            losses = []
            for hypernetworks in (server["hypernetworks"], after["hypernetworks"]):
                mixed = algorithm.download({**server, "hypernetworks": hypernetworks}, cohort).rows(client).tensors
                logits = functional_call(TinyNet(), mixed, (data.held_out_x,))
                losses.append(F.cross_entropy(logits, data.held_out_y).item())
            assert losses[1] < losses[0]
    elsewhere = uploads._replace(tensors={name: value + 1 for name, value in uploads.tensors.items()})
    same = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, elsewhere)
    assert_same(same["hypernetworks"], after["hypernetworks"])


@pytest.mark.parametrize("form", ["network", "compact"])
def test_equal_models_leave_the_weights_uniform(federation: Federation, form: str) -> None:
    """All start from one initialisation: in the first round they differ by rounding alone."""
    algorithm = make("pfedla-heldout", hypernetwork=form)
    played, _ = play(algorithm, federation, rounds=range(1, 3))
    assert torch.equal(algorithm.alpha(played[0].server), UNIFORM)
    assert not torch.equal(algorithm.alpha(played[1].server), UNIFORM)


def test_the_weights_stay_before_and_after_they_are_learned(federation: Federation) -> None:
    algorithm = make("pfedla-heldout", warm_up=2, learning_rounds=1)
    played, _ = play(algorithm, federation, rounds=range(1, 6))
    alphas = [algorithm.alpha(one.server) for one in played]
    assert torch.equal(alphas[0], alphas[1])
    assert not torch.equal(alphas[1], alphas[2])
    assert torch.equal(alphas[2], alphas[4])
    model = 6 * 4 * 53
    # While they are learned, the gradient goes up too: the layers of this net are too small to be sketched.
    assert [one.traffic.up_bytes for one in played] == [model, 2 * model, 4 * model, 5 * model, 6 * model]
    few, _ = play(algorithm, federation, rounds=range(1, 11), participation=0.5)
    halves = [one.traffic.up_bytes * 2 // model for one in few]
    assert halves == [1, 2, 3, 4, 6, 8, 9, 10, 11, 12]  # half take part: every phase lasts twice as long


def test_the_gradient_is_a_normalised_inner_product_with_the_way_to_each_sender(federation: Federation) -> None:
    """The slow twin: differences of whole models, one pair at a time, in float64."""
    algorithm = make("pfedla-heldout", retained_layers=1, sketch="exact")
    server, layers = play(algorithm, federation, rounds=range(1, 3))[0][-1].server, algorithm.task.layers
    _, downloads, uploads = one_round(algorithm, federation, server, 3)
    sent = torch.tensor([[True, True], *[[True, False]] * 5])
    found = algorithm.gradient(server, downloads._replace(sent=sent), uploads)

    def flat(tensors: Params, row: int, layer: str) -> Tensor:
        return torch.cat([tensors[f"{layer}.{part}"][row].double().flatten() for part in ("weight", "bias")])

    for i in (1, 3):
        counted = [name for name, one in zip(layers.names, sent[i], strict=True) if one]
        gradients = {name: uploads.extras[GRADIENT + name][i].double() for name in layers.names}
        norm = torch.cat([gradients[name] for name in counted]).norm()
        ways = {
            n: [flat(server["models"], j, n) - flat(downloads.tensors, i, n) for j in range(6)] for n in layers.names
        }
        distance = sum(torch.stack(ways[name]).square().sum(1) for name in counted).mean().sqrt()
        for layer, name in enumerate(layers.names):
            slopes = torch.stack([-gradients[name] @ way for way in ways[name]]) / (norm * distance)
            expected = 6 * (slopes - slopes.mean())
            torch.testing.assert_close(found[i, layer].double(), expected, rtol=1e-3, atol=1e-4)
    larger = uploads._replace(extras={name: 1000 * value for name, value in uploads.extras.items()})
    torch.testing.assert_close(algorithm.gradient(server, downloads._replace(sent=sent), larger), found)
    nothing = uploads._replace(extras={name: 0 * value for name, value in uploads.extras.items()})
    assert not algorithm.gradient(server, downloads, nothing).any()


def test_a_damped_step_moves_the_logits_as_the_compact_form_and_the_trunk_a_tenth_as_fast() -> None:
    network, free = (LayerWeightHypernetwork(3, 2, compact) for compact in (False, True))
    tensors = {name: value.double() for name, value in network.init(2, torch.Generator().manual_seed(0)).items()}
    gradient = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1)).double()
    compact = free.step({"logits": torch.zeros(2, 2, 3, dtype=torch.float64)}, gradient, 0.5)
    moved = network.step(tensors, gradient, 0.5, damped=True)
    torch.testing.assert_close(network.alpha(moved), free.alpha(compact))  # with heads of zero the trunk is still
    plain, damped = (network.step(moved, gradient, 0.5, damped=damped) for damped in (False, True))
    share = 0.1 / (1 + apply_trunk(moved).square().sum(-1))
    for name in ("embedding", "trunk1.weight"):
        steps = [after[name] - moved[name] for after in (damped, plain)]
        torch.testing.assert_close(steps[0], steps[1] * share.view(-1, *[1] * (steps[1].ndim - 1)))


def test_a_run_that_ends_before_the_weights_are_learned_says_so() -> None:
    algorithm = make("pfedla-heldout", warm_up=5)
    assert "algorithm.warm_up" in algorithm.notice(5.0)
    assert algorithm.notice(5.1) == ""
    assert make("pfedla").notice(1.0) == ""


# The sketch


def test_inner_products_of_sketches_are_unbiased_and_as_accurate_as_promised() -> None:
    draws, size = torch.Generator().manual_seed(0), 32
    x, y = torch.randn(2, 1, 5000, generator=draws) + torch.arange(5000) / 2500  # not centred, not alike
    hashes = [draw_hash(0, round, 1)[0] for round in range(400)]
    errors = torch.stack([(count_sketch(x, c, size) * count_sketch(y, c, size)).sum() - (x * y).sum() for c in hashes])
    bound = x.norm() * y.norm() * (2 / size) ** 0.5
    assert errors.std() < 1.1 * bound
    assert errors.mean().abs() < 4 * bound / len(hashes) ** 0.5


def test_a_sketch_is_the_same_under_vmap_and_small_layers_go_as_they_are() -> None:
    rows, constants = torch.randn(4, 300), draw_hash(0, 3, 2)[1]
    together = count_sketch(rows, constants, 64)
    one_by_one = vmap(lambda row, c: count_sketch(row.unsqueeze(0), c, 64)[0])(rows, constants.expand(4, -1))
    torch.testing.assert_close(together, one_by_one)
    assert together.shape == (4, 64)
    assert count_sketch(rows, constants, 300) is rows
    assert count_sketch(rows, constants, "exact") is rows
    assert not torch.equal(draw_hash(0, 3, 2), draw_hash(0, 4, 2))
    assert not torch.equal(draw_hash(0, 3, 2), draw_hash(1, 3, 2))


def test_a_sketch_larger_than_every_layer_equals_the_exact_gradient_and_a_smaller_one_is_near(
    federation: Federation,
) -> None:
    alphas = []
    for sketch in ("exact", 256, 16):
        algorithm = make("pfedla-heldout", sketch=sketch, learning_rounds="all")
        alphas.append(algorithm.alpha(play(algorithm, federation, rounds=range(1, 6))[0][-1].server))
    exact, large, small = alphas
    assert torch.equal(exact, large)
    assert not torch.equal(exact, small)
    assert torch.corrcoef(torch.stack([exact.flatten(), small.flatten()]))[0, 1] > 0.6


def test_the_sketch_adds_one_and_a_half_percent_to_the_upload() -> None:
    task = task_of(build_model("cnn", (1, 28, 28), 10, torch.Generator()))
    for sketch, share in ((256, 0.015), ("exact", 1.0)):
        algorithm = create("pfedla-heldout", task, budget(0.1, 1, 8), {"warm_up": 0, "sketch": sketch})
        downloads = algorithm.download(algorithm.init_server(2, 0), Cohort.everyone(torch.tensor([9, 9]), 1, 0))
        expected = vmap(algorithm.upload_like)(downloads)
        plain = Payload(expected.tensors, expected.sent)
        surcharge = payload_bytes(expected, task.layers) / payload_bytes(plain, task.layers) - 1
        torch.testing.assert_close(surcharge, torch.full((2,), share), rtol=0.02, atol=0)
        hashes = downloads.extras[HASH]
        assert hashes.shape == (2, 5, 4)
        assert torch.equal(hashes[0], hashes[1])
        assert pfedla_heldout.HOLD_OUT in downloads.extras


def test_the_personal_model_may_be_the_average_of_the_trained_ones(federation: Federation) -> None:
    """Compare with the weighted sum of all trained models."""
    algorithm = make("pfedla-heldout", personal="average")
    server, trained = algorithm.init_server(6, 0), []
    with engine_for(algorithm, federation) as engine:
        for number in range(1, 5):
            cohort = Cohort.everyone(federation.num_examples, number, 0)
            downloads = algorithm.download(server, cohort)
            if number == 1:  # who has not trained yet deploys the mix
                for client, model in enumerate(engine.personal_models(cohort, downloads)):
                    assert_same(model, downloads.rows(client).tensors)
            accepted = received(engine, cohort, downloads)
            trained.append(accepted.uploads.tensors)
            server = algorithm.aggregate(server, cohort, downloads, accepted.uploads)
            engine.commit(cohort.ids)
        personal = engine.personal_models(cohort, algorithm.download(server, cohort))
    # After n rounds share 8 / (8 + n) of the next goes in, and each takes its part from those before.
    shares = [8 / (8 + n) for n in range(4)]
    weights = [share * prod(1 - later for later in shares[n + 1 :]) for n, share in enumerate(shares)]
    assert sum(weights) == pytest.approx(1)
    for client in range(6):
        for name, value in personal[client].items():
            expected = sum(w * one[name][client] for w, one in zip(weights, trained, strict=True))
            torch.testing.assert_close(value, expected)


# Weights that notice


def test_learning_is_reopened_when_the_updates_of_some_clients_become_long() -> None:
    """More than a tenth of them, in three rounds in a row; clients measured for a few rounds only do not count."""
    everyone, usual = torch.arange(10), torch.linspace(1, 2, 10)
    known = {"length": usual, "rounds": torch.full((10,), float(MEASURED)), "risen": torch.tensor(0)}

    def watch(*rounds: Tensor, ids: Tensor = everyone, **changed: Tensor) -> tuple[list[bool], dict[str, Tensor]]:
        state = {name: value.clone() for name, value in (known | changed).items()}
        return [watch_lengths(state, ids, lengths) for lengths in rounds], state

    new = {name: torch.zeros_like(value) for name, value in known.items()}
    found, state = watch(*[usual] * MEASURED, **new)
    assert not any(found)
    assert_same(state, known, 1e-6)
    one, two = usual.clone(), usual.clone()
    one[3], two[3:5] = 100.0, 4.0
    assert watch(one, one, one)[0] == [False] * 3  # one client alone is believed nothing
    assert watch(two, two, usual, two, two)[0] == [False] * 5
    assert watch(1.25 * usual, 1.25 * usual, 1.25 * usual)[0] == [False] * 3
    assert watch(two, two, two, rounds=torch.full((10,), MEASURED - 3.0))[0] == [False] * 3
    found, state = watch(two, two, two)
    assert found == [False, False, True]
    assert not any(value.any() for value in state.values())
    few = torch.tensor([1, 4])
    assert watch(usual[few], ids=few)[1]["length"][1] == usual[1]
    found, state = watch(1.2 * usual[few], ids=few, rounds=torch.full((10,), 40.0))
    torch.testing.assert_close(state["length"][few], 1.01 * usual[few])  # it follows slowly
    found, state = watch(torch.zeros(10))
    assert_same(state, known)


def test_when_learning_is_reopened_clients_hold_out_and_send_gradients_again(federation: Federation) -> None:
    algorithm = make("pfedla-heldout", learning_rounds=1)
    server = play(algorithm, federation, rounds=range(1, 4))[0][-1].server
    everyone, sent = Cohort.everyone(federation.num_examples, 4, 0), {"hold out", HASH}
    assert not algorithm.download(server, everyone).extras
    usual = {"length": torch.full((6,), 1e-6), "rounds": torch.full((6,), float(MEASURED))}
    server["watch"] |= usual | {"risen": torch.tensor(IN_A_ROW - 1)}
    cohort, downloads, uploads = one_round(algorithm, federation, server, 4)
    server["hypernetworks"]["heads.bias"].normal_(generator=torch.Generator().manual_seed(0))
    server = algorithm.aggregate(server, cohort, downloads, uploads)
    torch.testing.assert_close(algorithm.alpha(server), torch.full_like(algorithm.alpha(server), 1 / 6))
    for round, expected in ((5, sent), (6, set())):  # for one round, as at first
        cohort, downloads, uploads = one_round(algorithm, federation, server, round)
        assert downloads.extras.keys() == expected
        before = algorithm.alpha(server)
        server = algorithm.aggregate(server, cohort, downloads, uploads)
        assert torch.equal(before, algorithm.alpha(server)) != bool(expected)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("share", [0.2, 0.4])
def test_clients_that_turn_hostile_late_lose_their_weight(seed: int, share: float) -> None:
    """At round 20 of 60, five rounds after the weights were frozen: the others end within two points."""
    x, y = load_digits(return_X_y=True)
    federation = federation_of((x / 16).astype("float32"), y, partition="dominant", clients=10, seed=seed)
    faults = Faults(attack="sign-flip", attackers=share, attack_from=20)
    attackers = choose_attackers(faults, 10, seed).tolist()
    honest = [client for client in range(10) if client not in attackers]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    clean, hit = (
        simulate(federation, model, "pfedla-heldout", rounds=60, lr=0.05, seed=seed, faults=one)
        for one in (None, faults)
    )
    assert hit.accuracy[honest].mean() > clean.accuracy[honest].mean() - 0.02
    assert hit.alpha is not None
    assert hit.alpha[honest][:, :, attackers].sum(-1).mean() < share / 4
    assert not clean.failures
