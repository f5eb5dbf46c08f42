"""The mistakes that experiments/record measures: each does what its name says, on clusters with a known answer."""

import pytest
import torch
from conftest import TinyNet, assert_same, engine_for, flat, play, received
from test_learning import clusters, own_cluster_mass

from pfedla.algorithms import create
from pfedla.algorithms.pfedla import PFedLA
from pfedla.core.contracts import Algorithm, Cohort
from pfedla.core.settings import Training
from pfedla.core.tasks import task_of
from pfedla.reproduction import defects


def build(name: str) -> Algorithm:
    training = Training(lr=0.1, local_epochs=5, batch_size=32)
    return create(name, task_of(TinyNet()), training, {"hypernetwork_lr": 2.0})


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def test_the_inverted_sign_borrows_from_the_other_cluster() -> None:
    algorithm = build(name_of(defects.InvertedSign))
    played, _ = play(algorithm, clusters(), rounds=range(1, 41), evaluate_every=40)
    assert own_cluster_mass(algorithm.alpha(played[-1].server)).mean() < 0.05


@pytest.mark.parametrize("kind", [defects.FrozenAlpha, defects.FrozenAlphaOldModel])
def test_frozen_weights_stay_at_their_random_start(kind: type[PFedLA]) -> None:
    algorithm = build(name_of(kind))
    before = algorithm.alpha(algorithm.init_server(6, seed=0))
    played, _ = play(algorithm, clusters(), rounds=range(1, 4))
    after = algorithm.alpha(played[-1].server)
    assert torch.equal(before, after)
    assert len(after.unique()) > 30
    torch.testing.assert_close(after.sum(-1), torch.ones(6, after.shape[1]))


def test_the_old_model_gets_the_update_of_the_mix() -> None:
    algorithm, federation = build(name_of(defects.FrozenAlphaOldModel)), clusters()
    played, clients = play(algorithm, federation, rounds=range(1, 3))
    server, cohort = played[-1].server, Cohort.everyone(federation.num_examples, 3, 0)
    before, downloads = flat(server), algorithm.download(server, cohort)
    with engine_for(algorithm, federation) as engine:
        engine.load(clients)
        uploads = received(engine, cohort, downloads).uploads.tensors
    models = {name.removeprefix("models/"): value.clone() for name, value in before.items() if "models/" in name}
    expected = {name: models[name] + value - downloads.tensors[name] for name, value in uploads.items()}
    played, _ = play(algorithm, federation, rounds=range(3, 4), server=server, clients=clients)
    assert_same({name: played[-1].server["models"][name] for name in expected}, expected, 1e-6)
