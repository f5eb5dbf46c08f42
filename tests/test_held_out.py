"""pFedLA's own rule: weights learned from examples that are held out of training, by a scaled step, for so many passes."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, make, play
from torch.func import functional_call

from pfedla.contracts import Payload
from pfedla.data.federation import Federation
from pfedla.engines import create_engine
from pfedla.hypernetworks import LayerWeightHypernetwork, layer_norms, scaled_rows
from pfedla.rounds import everyone

HELD_OUT = {"learn_from": "held-out", "step": "scaled"}


def test_a_client_sends_the_gradient_of_what_it_did_not_train_on(federation: Federation) -> None:
    """The slow twin: autograd of the plain module at what the client was sent."""
    algorithm = make("pfedla", **HELD_OUT)
    cohort = everyone(federation.num_examples, 1, 0)
    with create_engine("threaded", algorithm, federation, device="cpu", threads=1, recalibrate="never") as engine:
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
    with create_engine("threaded", algorithm, federation, device="cpu", threads=1, recalibrate="never") as engine:
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


def test_after_so_many_rounds_the_weights_stay_and_all_data_are_trained_on(federation: Federation) -> None:
    algorithm = make("pfedla", learning_rounds=2, **HELD_OUT)
    played, _ = play(algorithm, federation, rounds=range(1, 5))
    alphas = [algorithm.alpha(one.server) for one in played]
    assert not torch.equal(alphas[0], alphas[1])
    assert torch.equal(alphas[1], alphas[3])
    model = 6 * 4 * 53
    assert [one.traffic.up_bytes for one in played] == [2 * model, 4 * model, 5 * model, 6 * model]  # at first a gradient too
    cohort, server = everyone(federation.num_examples, 2, 0), algorithm.init_server(6, 0)
    learning, late = (algorithm.download(server, cohort._replace(round=round)) for round in (2, 3))
    assert [algorithm.held_out_share(one) for one in (learning, late)] == [0.2, 0.0]


def test_a_scaled_row_is_centred_and_at_most_one_and_rounding_is_nothing() -> None:
    gradient = torch.tensor([[[5.0, 1.0, 3.0], [1.0, 1.0, 1.0 + 1e-7]]])
    scaled = scaled_rows(gradient, torch.tensor([[1e-6, 1e-6]]))
    assert scaled.tolist() == [[[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]]
    layers = make("local").task.layers
    ones = {"fc1.weight": torch.full((1, 5, 6), 2.0), "fc1.bias": torch.ones(1, 5), "fc2.bias": torch.full((1, 3), 3.0)}
    torch.testing.assert_close(layer_norms(ones, layers), torch.tensor([[math.sqrt(125), math.sqrt(27)]]))


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
