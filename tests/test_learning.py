"""Does it learn what it should? Small federations with a known answer."""

import dataclasses

import pytest
import torch
from conftest import FEATURES, TinyNet, make, play, toy_federation

from pfedla.algorithms import ALGORITHMS
from pfedla.data.federation import Examples, Federation
from pfedla.errors import PfedlaError
from pfedla.simulation import simulate

OPPOSITE = (1.0, 1.0, 1.0, -1.0, -1.0, -1.0)


def clusters(signs: tuple[float, ...] = OPPOSITE, seed: int = 0) -> Federation:
    """Clients of one sign label by the same rule, those of the other sign by the opposite one."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(FEATURES, 3, generator=generator)

    def examples(count: int, sign: float) -> Examples:
        x = torch.randn(count, FEATURES, generator=generator)
        return Examples(x, (sign * x @ rule).argmax(1))

    return Federation([examples(30, s) for s in signs], [examples(60, s) for s in signs], ("0", "1", "2"))


def own_cluster_mass(alpha: torch.Tensor) -> torch.Tensor:
    """[receiver, layer]: the weight on senders of the receiver's own cluster."""
    cluster = torch.arange(6) // 3
    same = (cluster[:, None] == cluster[None, :]).to(alpha.dtype)
    return (alpha * same[:, None, :]).sum(-1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_clusters_find_each_other(seed: int) -> None:
    federation, how = clusters(seed=seed), {"rounds": 60, "lr": 0.1, "seed": seed}
    result = simulate(federation, TinyNet(), "pfedla", hypernetwork_lr=2.0, **how)
    assert own_cluster_mass(result.alpha).min() > 0.9
    alone = simulate(federation, TinyNet(), "local", **how)
    averaged = simulate(federation, TinyNet(), "fedavg", **how)
    assert result.accuracy.mean() > averaged.accuracy.mean() + 0.2
    assert result.accuracy.mean() > alone.accuracy.mean() - 0.02


def test_the_opposite_sign_of_the_step_would_find_the_other_cluster() -> None:
    """The sign is right: turned around, the same rule puts the weight on the dissimilar clients."""
    federation = clusters()
    algorithm = dataclasses.replace(make("pfedla", epochs=5, batch_size=32), hypernetwork_lr=-2.0)
    played, _ = play(algorithm, federation, rounds=range(1, 61), evaluate_every=60)
    assert own_cluster_mass(algorithm.alpha(played[-1].server)).mean() < 0.05


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_beats_chance_and_its_first_round(name: str) -> None:
    losses = []
    result = simulate(
        clusters((1.0,) * 6),
        TinyNet(),
        name,
        rounds=25,
        lr=0.1,
        on_round=lambda r: losses.append(r.evaluation.loss.mean()),
    )
    assert losses[-1] < losses[0]
    assert result.accuracy.mean() > 0.5  # three classes


def test_neighbours_and_retained_layers_learn_too() -> None:
    result = simulate(clusters(), TinyNet(), "heurpfedla", rounds=40, lr=0.1, neighbours=3, retained_layers=1)
    assert result.accuracy.mean() > 0.7


def test_an_unsampled_client_gets_statistics_from_its_own_training_data() -> None:
    """With BatchNorm the personal model of a client that never trained is recalibrated on a copy; 'never' leaves it be."""
    federation = toy_federation((20,) * 6)
    runs = {
        how: simulate(federation, TinyNet(batch_norm=True), "pfedla", rounds=1, participation=0.01, recalibrate=how)
        for how in ("unsampled", "never", "always")
    }
    absent = [i for i in range(6) if runs["never"].accuracy_after_training.isnan()[i]]
    assert len(absent) == 5
    x = federation.train[absent[0]].x
    start = TinyNet(batch_norm=True)
    for how, expected in (("unsampled", start.fc1(x).mean(0)), ("never", torch.zeros(5))):
        model = runs[how].personal_model(absent[0])
        if how == "unsampled":
            expected = model.fc1(x).mean(0)
        torch.testing.assert_close(model.bn.running_mean, expected, rtol=1e-4, atol=1e-5)
    sampled = next(i for i in range(6) if i not in absent)
    same = runs["unsampled"].models[sampled]["bn.running_mean"]
    assert torch.equal(same, runs["never"].models[sampled]["bn.running_mean"])
    assert not torch.equal(same, runs["always"].models[sampled]["bn.running_mean"])


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"participation": 1.5}, {"batch_size": 0}])
def test_simulate_refuses_the_impossible(wrong: dict) -> None:
    with pytest.raises(PfedlaError, match=next(iter(wrong))):
        simulate(toy_federation(), TinyNet(), **wrong)


def test_a_model_with_dropout_is_refused_by_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 3), torch.nn.Dropout(0.5))
    with pytest.raises(PfedlaError, match="layer '1' is Dropout"):
        simulate(toy_federation(), model)


def test_a_frozen_layer_neither_moves_nor_travels() -> None:
    model = TinyNet()
    model.fc1.requires_grad_(False)
    result = simulate(toy_federation(), model, "pfedla", rounds=2)
    assert result.layer_names == ("fc2",)
    assert torch.equal(result.models[0]["fc1.weight"], model.fc1.weight)
    assert not torch.equal(result.models[0]["fc2.weight"], model.fc2.weight)
    assert result.traffic.up_bytes == 2 * 6 * 18 * 4


def test_simulation_gives_working_modules_and_the_callers_module_is_untouched() -> None:
    federation, module = toy_federation(), TinyNet(batch_norm=True)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = simulate(federation, module, "heurpfedla", rounds=3)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    for client in range(len(federation)):
        x, y = federation.test[client]
        accuracy = (result.personal_model(client)(x).argmax(1) == y).double().mean()
        assert accuracy == result.accuracy[client]
    assert result.alphas.shape == (4, 6, 3, 6)
    assert result.alpha_rounds == [0, 1, 2, 3]
