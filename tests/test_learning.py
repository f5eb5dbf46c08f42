"""Does it learn what it should? Small federations with a known answer."""

import numpy as np
import pytest
import torch
from conftest import FEATURES, TinyNet, applies, make, play, tiny, toy_federation
from torch import nn

from pfedla import simulate
from pfedla.algorithms import ALGORITHMS
from pfedla.core.contracts import Cohort
from pfedla.core.errors import PfedlaError
from pfedla.core.objectives import accuracy
from pfedla.core.tasks import task_of
from pfedla.core.training import evaluate
from pfedla.data.federation import Examples, Federation

# Methods with learning rates of their own: as large for so small a net, and large enough to explode.
QUICK = {"pfedme": {"personal_lr": 0.1, "eta": 0.05, "penalty": 5.0}, "per-fedavg": {"inner_lr": 0.1}}
EXPLOSIVE = {
    "pfedme": {"personal_lr": 1e38, "penalty": 1e-38},
    "ditto": {"penalty": 0.0},
    "fedamp": {"penalty": 0.0},
    "fedprox": {"penalty": 0.0},
}
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


# Without a trunk that feeds on its own moves the logits need a larger rate to get as far in so many rounds.
FORMS = pytest.mark.parametrize(("form", "rate"), [("network", 2.0), ("compact", 40.0)], ids=["network", "compact"])


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_two_clusters_find_each_other(seed: int, form: str, rate: float) -> None:
    federation, how = clusters(seed=seed), {"rounds": 60, "lr": 0.1, "seed": seed}
    result = simulate(federation, TinyNet(), "pfedla", hypernetwork=form, hypernetwork_lr=rate, **how)
    assert own_cluster_mass(result.alpha).min() > 0.9
    ours = simulate(federation, TinyNet(), "pfedla-heldout", hypernetwork=form, sketch=16, min_held_out=2, **how)
    assert own_cluster_mass(ours.alpha).mean() > 0.9  # of a few held-out examples each, sketched
    alone = simulate(federation, TinyNet(), "local", **how)
    averaged = simulate(federation, TinyNet(), "fedavg", **how)
    for one in (result, ours):
        assert one.accuracy.mean() > averaged.accuracy.mean() + 0.2
    assert result.accuracy.mean() > alone.accuracy.mean() - 0.02


@FORMS
def test_the_opposite_sign_of_the_step_would_find_the_other_cluster(form: str, rate: float) -> None:
    """The sign is right: turned around, the same rule puts the weight on the dissimilar clients."""
    federation = clusters()
    algorithm = make("pfedla", epochs=5, batch_size=32, hypernetwork=form)
    algorithm = algorithm.model_copy(update={"hypernetwork_lr": -rate})
    played, _ = play(algorithm, federation, rounds=range(1, 61), evaluate_every=60)
    assert own_cluster_mass(algorithm.alpha(played[-1].server)).mean() < 0.05


def test_a_step_after_which_the_logits_overflow_is_not_taken() -> None:
    """Heads and features may be finite while their product is not: alpha would be nan from then on."""
    algorithm, cohort = make("pfedla"), Cohort.everyone(toy_federation().num_examples, 1, 0)
    server = algorithm.init_server(6, 0)
    server["hypernetworks"]["trunk2.bias"][0] = 1e19
    draws = torch.Generator().manual_seed(0)
    for value in server["models"].values():
        value += 0.1 * torch.randn(value.shape, generator=draws)
    downloads = algorithm.download(server, cohort)
    uploads = downloads.map(torch.clone)
    for value in uploads.tensors.values():
        value += torch.randn(value.shape, generator=draws)
    after = algorithm.aggregate(server, cohort, downloads, uploads)
    assert algorithm.weigh(after, cohort.ids).isfinite().all()
    assert (after["hypernetworks"]["heads.weight"][1:] != 0).any()


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ALGORITHMS, "per-fedavg hessian_free"])
def test_every_method_beats_chance_and_its_first_round(name: str) -> None:
    losses = []
    name, *flags = name.split()
    result = simulate(
        clusters((1.0,) * 6),
        tiny(name, batch_norm=not applies(name, batch_norm=False)),
        name,
        rounds=25,
        lr=0.1,
        on_round=lambda r: losses.append(r.evaluation.loss.mean()),
        **QUICK.get(name, {}),
        **dict.fromkeys(flags, True),
    )
    assert losses[-1] < losses[0]
    assert result.accuracy.mean() > 0.5  # three classes


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_unsampled_client_gets_statistics_from_its_own_training_data(name: str) -> None:
    """A client that never trained has its BatchNorm statistics estimated on a copy; not with "never"."""
    federation = toy_federation((20,) * 6)
    runs = {
        how: simulate(federation, tiny(name, batch_norm=True), name, rounds=1, participation=0.01, recalibrate=how)
        for how in ("unsampled", "never", "always")
    }
    absent = [i for i in range(6) if runs["never"].score_after_training.isnan()[i]]
    assert len(absent) == 5
    x = federation.train[absent[0]].x
    model = runs["unsampled"].personal_model(absent[0])
    with torch.no_grad():
        torch.testing.assert_close(model.bn.running_mean, model.fc1(x).mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.bn.running_var, model.fc1(x).var(0), rtol=1e-4, atol=1e-5)
    untouched = runs["never"].models[absent[0]]["bn.running_mean"]
    assert not torch.equal(untouched, model.bn.running_mean)
    sampled = next(i for i in range(6) if i not in absent)
    same = runs["unsampled"].models[sampled]["bn.running_mean"]
    assert torch.equal(same, runs["never"].models[sampled]["bn.running_mean"])
    assert not torch.equal(same, runs["always"].models[sampled]["bn.running_mean"])


def test_recalibration_sees_all_classes_of_a_large_sorted_client() -> None:
    x = torch.cat([torch.zeros(3000, FEATURES), torch.full((3000, FEATURES), 10.0)])
    y = torch.arange(6000) // 3000
    other = Examples(torch.randn(20, FEATURES), torch.arange(20) % 2)
    federation = Federation([Examples(x, y), other], [other, other], ("0", "1", "2"))
    result = simulate(federation, TinyNet(batch_norm=True), "local", rounds=1, recalibrate="always", local_epochs=1)
    model = result.personal_model(0)
    with torch.no_grad():
        torch.testing.assert_close(model.bn.running_mean, model.fc1(x).mean(0), rtol=1e-2, atol=1e-2)


IMPOSSIBLE = {"threads": -1, "recalibrate": "maybe", "rounds": 0, "lr": 0.0, "participation": 1.5, "batch_size": 0}


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_simulate_refuses_the_impossible(key: str) -> None:
    with pytest.raises(PfedlaError, match=key):
        simulate(toy_federation(), TinyNet(), **{key: IMPOSSIBLE[key]})


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(FEATURES, 2), "a logit for each of the 3 classes"),
        (nn.Linear(FEATURES + 1, 3), "cannot train"),
        (nn.Linear(FEATURES, 3).requires_grad_(False), "no trainable parameter"),
    ],
)
def test_models_that_cannot_be_trained_or_repeated_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(PfedlaError, match=message):
        simulate(toy_federation(), model)


def test_batchnorm_and_batches_of_one_are_refused() -> None:
    with pytest.raises(PfedlaError, match="cannot train"):
        simulate(toy_federation(), TinyNet(batch_norm=True), batch_size=1)


@pytest.mark.slow
def test_a_broken_model_is_never_right_and_never_kept() -> None:
    """Where training explodes, a client's last sound model stays, and the refusals are counted."""
    for name in ALGORITHMS:
        module = tiny(name, batch_norm=not applies(name, batch_norm=False))
        result = simulate(toy_federation(), module, name, rounds=3, lr=1e38, **EXPLOSIVE.get(name, {}))
        assert result.refused_uploads > 0 or name == "fedbabu"  # its head stays, and tanh bounds the body
        assert all(value.isfinite().all() for model in result.models for value in model.values())
    nan = {name: torch.full_like(value, torch.nan) for name, value in TinyNet().state_dict().items()}
    examples = toy_federation().test[0]
    outputs, _ = evaluate(task_of(TinyNet()), nan, examples.x, torch.zeros_like(examples.y))
    assert accuracy(outputs.numpy(), np.zeros(len(outputs))) == 0


def test_tied_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
            self.out.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.first(x)))

    result = simulate(toy_federation(), Tied(), "pfedla", rounds=2)
    model = result.personal_model(1)
    assert model.out.weight is model.first.weight
    x, y = toy_federation().test[1]
    assert (model(x).argmax(1) == y).double().mean() == result.accuracy[1]


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
    assert simulate(federation, module, "fedavg", rounds=1).alpha is None
    assert "heurpfedla, 6 clients" in repr(result)
    with pytest.raises(PfedlaError, match="client 6"):
        result.personal_model(6)
    with pytest.raises(PfedlaError, match="an instance"):
        simulate(federation, TinyNet)
