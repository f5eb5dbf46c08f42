"""The server's step for many clients: every fast path beside its plain twin, and a client's bits whoever else takes part."""

import copy
import dataclasses

import pytest
import torch
from conftest import HELD_OUT, TinyNet, assert_same, budget, flat, make, play, toy_federation
from torch import nn

from pfedla.algorithms import create
from pfedla.algorithms.hypernetworks import (
    FreeLayerWeights,
    LayerWeightHypernetwork,
    layer_gradient,
    normalise_or_own,
)
from pfedla.core.contracts import Algorithm, Cohort, Payload, ServerState, generator
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import BLOCK, Layers, by_blocks, mix, mix_few, take
from pfedla.core.models import build_model
from pfedla.core.rounds import everyone
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation
from pfedla.runs.simulation import SNAPSHOT_NUMBERS, simulate

COMPACT = {"hypernetwork": "compact"}
FORMS = [{}, COMPACT, {"neighbours": 2}, COMPACT | {"neighbours": 3}, COMPACT | {"normalise": "relu"}]


def moved(algorithm: Algorithm, num_clients: int, seed: int = 0) -> ServerState:
    """A server with unlike models and unlike weights."""
    draws = torch.Generator().manual_seed(seed)
    return {
        group: {
            key: value + 0.1 * torch.randn(value.shape, generator=draws) if value.is_floating_point() else value
            for key, value in part.items()
        }
        for group, part in algorithm.init_server(num_clients, 0).items()
    }


def trained(algorithm: Algorithm, downloads: Payload, seed: int = 1) -> Payload:
    draws = torch.Generator().manual_seed(seed)
    tensors = {name: value + 0.1 * torch.randn(value.shape, generator=draws) for name, value in downloads.tensors.items()}
    wish = {name: torch.randn(value.shape, generator=draws) for name, value in algorithm.upload_like(downloads).extras.items()}
    return Payload(tensors, torch.ones_like(downloads.sent), wish)


# Blocks


@pytest.mark.parametrize(
    ("ids", "blocks"),
    [([], 1), ([5], 1), (range(16), 1), (range(33), 3), ([0, 16, 32], 3), ([0, 17, 34], 1), ([3, 19, 4, 20, 7], 2)],
)
def test_rows_are_packed_into_as_few_blocks_as_their_places_allow(ids: list[int], blocks: int) -> None:
    called = []

    def double(rows: dict) -> dict:
        called.append(rows["x"].shape)
        return {"y": 2 * rows["x"]}

    index = torch.tensor(list(ids), dtype=torch.int64)
    x = torch.randn(len(index), 3)
    assert torch.equal(by_blocks(double, {"x": x}, index)["y"], 2 * x)
    assert called == [(BLOCK, 3)] * blocks


@pytest.mark.parametrize("senders", [2, 10, 33, 100])
@pytest.mark.parametrize("width", [1, 3, 4, 10, 16, 18, 100, 850, 1216, 9999, 12800])
def test_products_do_not_depend_on_who_else_is_asked_for(senders: int, width: int) -> None:
    draws = torch.Generator().manual_seed(senders * width)
    layers = Layers.of(nn.Linear(width, 1))
    models = {"weight": torch.randn(senders, 1, width, generator=draws), "bias": torch.randn(senders, 1, generator=draws)}
    change = {name: torch.randn(value.shape, generator=draws) for name, value in models.items()}
    alpha = torch.rand(senders, 1, senders, generator=draws)
    wish, mixed = layer_gradient(change, models, layers), mix(alpha, models, layers)
    for count in {1, 2, senders // 2, senders - 1}:
        ids = torch.randperm(senders, generator=draws)[:count].sort().values
        assert torch.equal(layer_gradient(take(change, ids), models, layers, ids), wish[ids])
        assert_same(mix(alpha[ids], models, layers, ids), take(mixed, ids))
    plain = sum(change[name].flatten(1).double() @ models[name].flatten(1).double().T for name in models)
    torch.testing.assert_close(wish[:, 0].double(), plain, rtol=1e-5, atol=1e-5 + 1e-7 * width)  # so many terms cancel


@pytest.mark.parametrize("options", [*FORMS, HELD_OUT, HELD_OUT | {"retained_layers": 1}], ids=str)
@pytest.mark.parametrize("clients", [2, 10, 33])
def test_a_clients_step_does_not_depend_on_who_else_answered(options: dict, clients: int) -> None:
    """Not in a single bit; and a row is what it would be if all had answered."""
    algorithm = make("pfedla", batch_norm=True, **(options | ({"neighbours": 2} if "neighbours" in options else {})))
    before = moved(algorithm, clients)
    all_of_them = everyone(torch.full((clients,), 9), 3, 0)
    downloads = algorithm.download(before, all_of_them)
    uploads = trained(algorithm, downloads)
    among_all = algorithm.aggregate(copy.deepcopy(before), all_of_them, downloads, uploads)
    del among_all["progress"]
    draws = torch.Generator().manual_seed(clients)
    for count in {1, 2, clients // 2, clients - 1}:
        ids = torch.randperm(clients, generator=draws)[:count].sort().values
        away = torch.tensor([client for client in range(clients) if client not in ids], dtype=torch.int64)
        part = (all_of_them.only(ids), downloads.rows(ids), uploads.rows(ids))
        after = algorithm.aggregate(copy.deepcopy(before), *part)
        assert after.pop("progress")["uploads"] == count
        assert_same(take(flat(after), ids), take(flat(among_all), ids))
        assert_same(take(flat(after), away), take(flat({group: before[group] for group in after}), away))


def test_a_failure_in_aggregate_leaves_the_server_as_it_was() -> None:
    """All that can fail comes before the first write."""
    algorithm = make("pfedla")
    server, cohort = moved(algorithm, 6), everyone(torch.full((6,), 9), 1, 0)
    downloads, before = algorithm.download(server, cohort), copy.deepcopy(server)
    uploads = trained(algorithm, downloads)
    with pytest.raises(RuntimeError):
        algorithm.aggregate(server, cohort, downloads, uploads._replace(tensors=take(uploads.tensors, slice(0, 5))))
    assert_same(flat(server), flat(before))


# Neighbours


def cut_to_neighbours(alpha: torch.Tensor, cohort: Cohort, count: int) -> torch.Tensor:
    """The plain twin: the whole of alpha, all but the `count` largest of every row struck out, divided by its sum."""
    rows = []
    for row, client in zip(alpha, cohort.ids.tolist(), strict=True):
        rank = row.clone()
        rank[:, client] = torch.inf
        draw = torch.rand(rank.shape, generator=generator(cohort.seed, "neighbours", cohort.round, client))
        shuffled = draw.argsort(-1)
        best = shuffled.gather(-1, rank.gather(-1, shuffled).argsort(dim=-1, descending=True, stable=True))
        keep = torch.zeros_like(row, dtype=torch.bool).scatter_(-1, best[:, :count], True)
        rows.append(normalise_or_own(torch.where(keep, row, 0.0), client))
    return torch.stack(rows)


@pytest.mark.parametrize("normalise", ["softmax", "relu"])
@pytest.mark.parametrize("fresh", [True, False])  # at the start all weights are equal
@pytest.mark.parametrize("count", [1, 2, 5, 18])
def test_mixing_a_few_rows_equals_mixing_all_with_the_others_struck_out(normalise: str, fresh: bool, count: int) -> None:
    algorithm = make("pfedla", batch_norm=True, neighbours=count, normalise=normalise)
    server = moved(algorithm, 19)
    if fresh:
        server["hypernetworks"] = algorithm.init_server(19, 0)["hypernetworks"]
    cohort = everyone(torch.full((19,), 9), 4, 7).only(torch.tensor([0, 3, 11, 18]))
    alpha = algorithm._alpha(server, cohort.ids)
    expected = mix(cut_to_neighbours(alpha, cohort, count), server["models"], algorithm.task.layers)
    assert_same(algorithm.download(server, cohort).tensors, expected, tolerance=1e-6)
    weights, senders = algorithm._neighbours(alpha, cohort, count)
    assert torch.equal(senders[..., 0], cohort.ids.unsqueeze(1).expand(-1, 3))
    assert all(len(set(row.tolist())) == count for row in senders.flatten(0, 1))
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 3))


def test_only_the_neighbours_models_are_read() -> None:
    layers = Layers.of(nn.Linear(2, 1))
    models = {"weight": torch.randn(5, 1, 2), "bias": torch.randn(5, 1)}
    for value in models.values():
        value[[0, 2, 4]] = torch.nan  # in a product with zero weights it would spoil the mix
    mixed = mix_few(torch.tensor([[[0.25, 0.75]]]), torch.tensor([[[3, 1]]]), models, layers)
    for name, value in models.items():
        torch.testing.assert_close(mixed[name][0], 0.25 * value[3] + 0.75 * value[1])


# The compact form


def test_the_compact_form_by_hand() -> None:
    """Two clients, one layer, softmax at (1/2, 1/2): its Jacobian is (1/4, -1/4; -1/4, 1/4)."""
    free = FreeLayerWeights(num_senders=2, num_layers=1)
    own, tensors = torch.arange(2), free.init(2)
    assert (free.alpha(tensors, own) == 0.5).all()
    stepped = free.step(tensors, own, torch.tensor([[[3.0, 1.0]], [[0.0, 4.0]]]), lr=0.5)
    assert stepped["logits"].flatten(1).tolist() == [[0.25, -0.25], [-0.5, 0.5]]
    assert not tensors["logits"].any()
    relu = FreeLayerWeights(num_senders=2, num_layers=1, normalise="relu")
    assert (relu.alpha(relu.init(2), own) == 0.5).all()
    dead = {"logits": -torch.ones(2, 1, 2)}
    assert torch.equal(relu.alpha(dead, own)[:, 0], torch.eye(2))
    assert_same(relu.step(dead, own, torch.ones(2, 1, 2), 1.0), dead)


def test_the_first_step_of_a_network_is_that_of_the_compact_form_times_the_length_of_its_features() -> None:
    """(|h|² + 1): a logit is W h + b, and both move; the trunk does not while the heads are zero."""
    network = LayerWeightHypernetwork(num_senders=4, num_layers=2)
    free, own = network._free(), torch.arange(4)
    wish = torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(0))
    before = network.init(4, torch.Generator().manual_seed(0))
    after = network.step(before, own, wish, lr=0.1)
    factor = network._hidden_of_one(take(before, 0)).square().sum() + 1
    assert 1.3 < factor < 2.5
    logits = torch.stack([network._logits_of_one(take(after, i)) for i in range(4)])
    torch.testing.assert_close(logits, factor * free.step(free.init(4), own, wish, lr=0.1)["logits"])


def test_zeros_are_no_memory_of_each_other_and_the_sizes_are_known() -> None:
    for network in (LayerWeightHypernetwork(5, 3, 7, 11), FreeLayerWeights(5, 3)):
        tensors = network.init(4, torch.Generator().manual_seed(0))
        assert sum(value[0].numel() for value in tensors.values()) == network.num_parameters
        for value in tensors.values():
            value[1] = 3.0
            assert not (value[0] == 3.0).any()


def test_the_weights_of_permuted_clients_are_permuted_in_the_compact_form_too() -> None:
    federation = toy_federation()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    permuted = Federation([federation.train[i] for i in order], [federation.test[i] for i in order], federation.classes)
    algorithm = make("pfedla", batch_size=1000, hypernetwork_lr=20.0, **COMPACT)
    straight, shuffled = (algorithm.alpha(play(algorithm, one)[0][-1].server) for one in (federation, permuted))
    assert straight.max() > 0.2  # they moved
    torch.testing.assert_close(shuffled, straight[order][:, :, order], rtol=1e-4, atol=1e-5)


# What it takes


def test_a_hypernetwork_that_is_too_large_names_the_compact_form_where_that_fits() -> None:
    task = task_of(build_model("small-cnn", (1, 8, 8), 10, torch.Generator()))
    pfedla = create("pfedla", task, budget(0.1, 1, 8))
    pfedla.check(6_000)
    with pytest.raises(PfedlaError, match=r'151 GiB.*; hypernetwork = "compact" takes 1\.5 GiB'):
        pfedla.check(10_000)
    dataclasses.replace(pfedla, hypernetwork="compact").check(10_000)
    with pytest.raises(PfedlaError, match=r"GiB of memory; more than 64 is refused$"):
        pfedla.check(10**6)
    with pytest.raises(PfedlaError, match=r"the compact hypernetworks of 1000000 clients would take [\d,]+ GiB"):
        dataclasses.replace(pfedla, hypernetwork="compact").check(10**6)


def test_weights_too_large_to_keep_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SNAPSHOT_NUMBERS >= 1000 * 7 * 1000
    federation, how = toy_federation(), {"rounds": 2, "lr": 0.1, "local_epochs": 1}
    kept = simulate(federation, TinyNet(), "pfedla", **how)
    monkeypatch.setattr("pfedla.runs.simulation.SNAPSHOT_NUMBERS", 6 * 2 * 6 - 1)
    result = simulate(federation, TinyNet(), "pfedla", **how)
    assert kept.alpha is not None
    assert result.alpha is None
    assert result.alpha_rounds == []
    assert torch.equal(result.accuracy, kept.accuracy)
