"""pFedLA's own rule: weights learned from examples that are held out of training, in its first rounds after a warm-up."""

import copy

import pytest
import torch
import torch.nn.functional as F
from conftest import HELD_OUT, TinyNet, engine_for, make, play
from torch.func import functional_call

from pfedla.algorithms.hypernetworks import LayerWeightHypernetwork, layer_gradient, unit_free
from pfedla.core.contracts import Payload
from pfedla.core.rounds import everyone
from pfedla.data.federation import Federation
from pfedla.runs.experiment import Experiment, build


def test_a_client_sends_the_gradient_of_what_it_did_not_train_on(federation: Federation) -> None:
    """The slow twin: autograd of the plain module at what the client was sent."""
    algorithm = make("pfedla", **HELD_OUT)
    cohort = everyone(federation.num_examples, 1, 0)
    with engine_for(algorithm, federation, threads=1, recalibrate="never") as engine:
        downloads = algorithm.download(algorithm.init_server(6, 0), cohort)
        answers = engine.train(cohort, downloads)
        for client in (1, 3):  # of 14 and 20 examples
            data = engine.client(client).local_data(cohort, downloads.rows(client))
            assert len(data.held_out_y) == int(0.2 * len(federation.train[client].y)) >= 2
            assert len(data.y) + len(data.held_out_y) == len(federation.train[client].y)
            start = {name: value.clone().requires_grad_() for name, value in downloads.rows(client).tensors.items()}
            F.cross_entropy(functional_call(TinyNet(), start, (data.held_out_x,)), data.held_out_y).backward()
            for name, value in start.items():
                torch.testing.assert_close(answers[client].upload.extras[f"wish.{name}"], -value.grad)
        few = answers[0].upload.extras  # of 9 examples it holds out one, too few for BatchNorm: it wishes nothing
        assert not any(value.any() for value in few.values())


def test_the_weights_move_down_the_held_out_loss_and_nothing_else_moves_them(federation: Federation) -> None:
    algorithm = make("pfedla", hypernetwork="compact", hypernetwork_lr=1e-3, **HELD_OUT)
    played, _ = play(algorithm, federation, rounds=range(1, 3))
    server, cohort = played[-1].server, everyone(federation.num_examples, 3, 0)
    downloads = algorithm.download(server, cohort)
    with engine_for(algorithm, federation, threads=1, recalibrate="never") as engine:
        answers = engine.train(cohort, downloads)
        held_out = [engine.client(client).local_data(cohort, downloads)[-2:] for client in range(6)]
    uploads = Payload(
        {name: torch.stack([a.upload.tensors[name] for a in answers]) for name in downloads.tensors},
        downloads.sent,
        {name: torch.stack([a.upload.extras[name] for a in answers]) for name in answers[0].upload.extras},
    )
    after = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, uploads)

    def loss(hypernetworks: dict, client: int) -> float:
        mixed = algorithm.download({**server, "hypernetworks": hypernetworks}, cohort).rows(client).tensors
        x, y = held_out[client]
        return F.cross_entropy(functional_call(TinyNet(), mixed, (x,)), y).item()

    for client in (1, 3, 4):
        assert loss(after["hypernetworks"], client) < loss(server["hypernetworks"], client)
    elsewhere = uploads._replace(tensors={name: value + 1 for name, value in uploads.tensors.items()})
    same = algorithm.aggregate(copy.deepcopy(server), cohort, downloads, elsewhere)
    assert torch.equal(same["hypernetworks"]["logits"], after["hypernetworks"]["logits"])


@pytest.mark.parametrize("form", ["network", "compact"])
def test_equal_models_leave_the_weights_uniform(federation: Federation, form: str) -> None:
    """All start from one initialisation: what differs in the first round is rounding, and must not be scaled up to a step."""
    algorithm = make("pfedla", hypernetwork=form, **HELD_OUT)
    played, _ = play(algorithm, federation, rounds=range(1, 3))
    assert torch.equal(algorithm.alpha(played[0].server), torch.full((6, 2, 6), 1 / 6))
    assert not torch.equal(algorithm.alpha(played[1].server), torch.full((6, 2, 6), 1 / 6))


def test_the_weights_stay_before_and_after_they_are_learned_and_then_all_data_are_trained_on(federation: Federation) -> None:
    algorithm = make("pfedla", rule="held-out", warm_up=2, learning_rounds=1)
    played, _ = play(algorithm, federation, rounds=range(1, 6))
    alphas = [algorithm.alpha(one.server) for one in played]
    assert torch.equal(alphas[0], alphas[1])
    assert not torch.equal(alphas[1], alphas[2])
    assert torch.equal(alphas[2], alphas[4])
    model = 6 * 4 * 53
    up = [one.traffic.up_bytes for one in played]
    assert up == [model, 2 * model, 4 * model, 5 * model, 6 * model]  # while it is learned a gradient too
    few, _ = play(algorithm, federation, rounds=range(1, 11), participation=0.5)
    up = [one.traffic.up_bytes * 2 // model for one in few]
    assert up == [1, 2, 3, 4, 6, 8, 9, 10, 11, 12]  # half take part: before and while it is learned, twice as long


def test_auto_is_the_pace_of_the_rule_and_what_is_asked_for_stays() -> None:
    assert make("pfedla", rule="held-out").pace == (5, 10)
    assert make("pfedla", rule="paper").pace == (0, "all")
    assert make("heurpfedla", rule="paper", warm_up=1, learning_rounds=2).pace == (1, 2)


def test_a_unit_free_gradient_is_the_slope_along_the_way_to_each_sender_and_rounding_is_nothing() -> None:
    """The slow twin: differences of whole models, one pair at a time, in float64."""
    layers, draw = make("local").task.layers, torch.Generator().manual_seed(0)
    shapes = {"fc1.weight": (5, 6), "fc1.bias": (5,), "fc2.weight": (3, 5), "fc2.bias": (3,)}
    models, start, delta = ({n: torch.randn(rows, *shape, generator=draw) for n, shape in shapes.items()} for rows in (4, 2, 2))
    gradient = layer_gradient(delta, models, layers)
    all_sent = torch.ones(2, 2, dtype=torch.bool)
    found = unit_free(gradient, delta, start, models, layers, all_sent)

    def flat(tensors: dict, row: int, layer: str = "fc") -> torch.Tensor:
        return torch.cat([tensors[name][row].double().flatten() for name in shapes if name.startswith(layer)])

    for receiver in range(2):
        ways = [flat(models, sender) - flat(start, receiver) for sender in range(4)]
        unit = flat(delta, receiver).norm() * torch.stack(ways).square().sum(1).mean().sqrt()
        for layer, name in enumerate(layers.names):
            wants = flat(delta, receiver, name)
            slopes = (
                torch.stack([wants @ (flat(models, sender, name) - flat(start, receiver, name)) for sender in range(4)]) / unit
            )
            torch.testing.assert_close(found[receiver, layer], (slopes - slopes.mean()).float())
    without = unit_free(gradient, delta, start, models, layers, torch.tensor([[True, False], [True, True]]))
    elsewhere = {**delta, "fc2.weight": delta["fc2.weight"] + 1, "fc2.bias": delta["fc2.bias"] - 1}
    moved = unit_free(gradient, elsewhere, start, models, layers, torch.tensor([[True, False], [True, True]]))
    assert torch.equal(without[0, 0], moved[0, 0])  # a layer that was not sent has no say in the unit
    assert not torch.equal(without[0, 0], found[0, 0])
    assert torch.equal(without[1], found[1])
    larger = {name: 1000 * value for name, value in delta.items()}
    torch.testing.assert_close(unit_free(1000 * gradient, larger, start, models, layers, all_sent), found)
    equal = {
        name: value[:1].expand_as(value) * (1 + 1e-7 * torch.rand(value.shape, generator=draw))
        for name, value in models.items()
    }
    same = {name: value[:1] for name, value in models.items()}
    assert not unit_free(layer_gradient(same, equal, layers), same, same, equal, layers, all_sent[:1]).any()
    nothing = {name: torch.zeros_like(value) for name, value in delta.items()}
    assert not unit_free(layer_gradient(nothing, models, layers), nothing, start, models, layers, all_sent).any()


def test_a_tamed_step_moves_the_logits_as_the_compact_form_and_the_trunk_a_tenth_as_fast() -> None:
    network = LayerWeightHypernetwork(num_senders=3, num_layers=2)
    tensors = {name: value.double() for name, value in network.init(2, torch.Generator().manual_seed(0)).items()}
    gradient, own = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1)).double(), torch.arange(2)
    free = network._free()
    compact = free.step({"logits": torch.zeros(2, 2, 3, dtype=torch.float64)}, own, gradient, 0.5)
    moved = network.step(tensors, own, gradient, 0.5, tamed=True)
    torch.testing.assert_close(network.alpha(moved, own), free.alpha(compact, own))  # with heads of zero the trunk is still
    plain, tamed = (network.step(moved, own, gradient, 0.5, tamed=tamed) for tamed in (False, True))
    hidden = torch.stack([network._hidden_of_one({n: v[i] for n, v in moved.items()}) for i in range(2)])
    shrunk = 0.1 / (1 + hidden.square().sum(-1))
    for name in ("embedding", "trunk1.weight"):
        steps = [after[name] - moved[name] for after in (tamed, plain)]
        torch.testing.assert_close(steps[0], steps[1] * shrunk.view(-1, *[1] * (steps[1].ndim - 1)))


def test_one_weight_for_the_whole_model_is_the_same_for_all_layers(federation: Federation) -> None:
    for options in (HELD_OUT, {}):
        algorithm = make("pfedla", weights="model", **options)
        played, _ = play(algorithm, federation)
        alpha = algorithm.alpha(played[-1].server)
        torch.testing.assert_close(alpha[:, 0], alpha[:, 1])
        assert not torch.allclose(alpha, torch.full_like(alpha, 1 / 6), atol=1e-4)


def test_a_run_that_ends_before_the_weights_are_learned_says_so() -> None:
    short = {"rounds": 50, "participation": 0.1, "data": {"dataset": "digits"}, "algorithm": {"name": "heurpfedla"}}
    assert "takes part in 5 rounds" in build(Experiment.parse(short)).note
    assert build(Experiment.parse({**short, "rounds": 51})).note == ""
    assert build(Experiment.parse({**short, "algorithm": {"name": "pfedla", "rule": "paper"}})).note == ""
