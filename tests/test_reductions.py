"""Cases in which two methods must coincide, and what holds for all methods."""

import pytest
import torch
from conftest import NORMS, assert_same, make, personal_models, play, toy_federation

from pfedla.core.contracts import Algorithm, Params, ServerState, generator
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation


def with_frozen_weights(algorithm: Algorithm, federation: Federation, logits: torch.Tensor) -> tuple:
    """Return pFedLA with given weights that do not move, and its server."""
    server = algorithm.init_server(len(federation), seed=0)
    server["hypernetworks"]["heads.bias"] = logits.expand(len(logits), len(algorithm.task.layers), -1).clone()
    return algorithm.model_copy(update={"hypernetwork_lr": 0.0}), server


def end(algorithm: Algorithm, federation: Federation, server: ServerState | None = None, **how: float) -> Params:
    """Return everyone's personal model after three rounds."""
    models = personal_models(algorithm, federation, *play(algorithm, federation, server=server, **how))
    return {f"{client}/{name}": value for client, model in enumerate(models) for name, value in model.items()}


@NORMS
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_identity_weights_are_local_bit_for_bit(federation: Federation, batch_norm: bool, participation: float) -> None:
    pfedla, server = with_frozen_weights(
        make("pfedla", batch_norm=batch_norm), federation, 1e6 * torch.eye(len(federation)).unsqueeze(1)
    )
    local = make("local", batch_norm=batch_norm)
    assert_same(
        end(pfedla, federation, server, participation=participation),
        end(local, federation, participation=participation),
    )


@NORMS
def test_retaining_all_layers_is_local_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    heur = make("heurpfedla", batch_norm=batch_norm, retained_layers=3 if batch_norm else 2)
    assert_same(
        end(heur, federation, participation=0.5),
        end(make("local", batch_norm=batch_norm), federation, participation=0.5),
    )
    assert sum(r.traffic.down_bytes for r in play(heur, federation)[0]) == 0


@NORMS
def test_retaining_no_layer_is_pfedla_bit_for_bit(federation: Federation, batch_norm: bool) -> None:
    assert_same(
        end(make("heurpfedla", batch_norm=batch_norm, retained_layers=0), federation),
        end(make("pfedla", batch_norm=batch_norm), federation),
    )


def test_all_neighbours_are_pfedla_bit_for_bit(federation: Federation) -> None:
    assert_same(end(make("pfedla", neighbours=len(federation)), federation), end(make("pfedla"), federation))


def test_uniform_weights_are_fedavg_where_all_clients_have_equally_many_examples() -> None:
    equal = toy_federation((12,) * 5)
    pfedla, server = with_frozen_weights(make("pfedla"), equal, torch.zeros(5, 1, 5))
    assert_same(end(pfedla, equal, server), end(make("fedavg"), equal), tolerance=1e-5)


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    assert list(batch_bounds(13, 4)) == [(0, 4), (4, 8), (8, 13)]
    assert list(batch_bounds(12, 4)) == [(0, 4), (4, 8), (8, 12)]
    assert list(batch_bounds(6, 4)) == [(0, 4), (4, 6)]
    assert list(batch_bounds(1, 4)) == [(0, 1)]


def test_a_warm_up_without_end_is_uniform_pfedla_on_what_is_not_held_out(federation: Federation) -> None:
    """Apart from how the weights are learned, both rules are one method."""
    heldout = make("pfedla-heldout", warm_up=100, held_out=0.01)  # so little that nobody holds anything out
    pfedla, server = with_frozen_weights(make("pfedla"), federation, torch.zeros(6, 1, 6))
    assert_same(end(heldout, federation), end(pfedla, federation, server))


@NORMS
def test_fedavg_of_one_client_is_sgd(batch_norm: bool) -> None:
    """The slow twin: a textbook loop with torch.optim.SGD over the same batches."""
    alone = toy_federation((13,))
    algorithm = make("fedavg", batch_norm=batch_norm)
    played, _ = play(algorithm, alone)
    module = algorithm.task.module.train()
    optimizer = torch.optim.SGD(module.parameters(), lr=algorithm.training.learning_rate)
    x, y = alone.train[0]
    for round in (1, 2, 3):
        draws = generator(0, "batches", round, 0)
        for order in [torch.randperm(13, generator=draws) for _ in range(algorithm.training.local_epochs)]:
            for start, stop in batch_bounds(13, algorithm.training.batch_size):
                optimizer.zero_grad()
                rows = order[start:stop]
                torch.nn.functional.cross_entropy(module(x[rows]), y[rows]).backward()
                optimizer.step()
    assert_same(played[-1].server["model"], {n: v.detach() for n, v in module.state_dict().items()}, tolerance=1e-6)


@pytest.mark.parametrize("form", ["network", "compact"])
def test_the_weights_of_permuted_clients_are_permuted_too(form: str) -> None:
    federation = toy_federation()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = Federation([federation.train[i] for i in order], [federation.test[i] for i in order], federation.classes)
    algorithm = make("pfedla", batch_size=1000, hypernetwork_lr=20.0, hypernetwork=form)
    straight, shuffled = (algorithm.alpha(play(algorithm, f)[0][-1].server) for f in (federation, permuted))
    assert straight.max() > 0.2  # they moved
    torch.testing.assert_close(shuffled, straight[order][:, :, order], rtol=1e-4, atol=1e-5)
