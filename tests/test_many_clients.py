"""The server's step for many clients: what bounds memory, and what a client's row may depend on."""

import copy

import pytest
import torch
from conftest import TinyNet, assert_same, budget, flat, make, toy_federation

from pfedla import simulate
from pfedla.algorithms import create
from pfedla.algorithms.pfedla import CHUNK, LayerWeightHypernetwork
from pfedla.core.contracts import Algorithm, Cohort, Payload, ServerState
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import take
from pfedla.core.models import build_model
from pfedla.core.tasks import task_of

COMPACT = {"hypernetwork": "compact"}


def perturb(algorithm: Algorithm, num_clients: int) -> ServerState:
    """Return a server whose models and hypernetworks all differ."""
    draws = torch.Generator().manual_seed(0)
    server = algorithm.init_server(num_clients, 0)
    for group in ("models", "hypernetworks"):
        for name, value in server[group].items():
            server[group][name] = value + 0.1 * torch.randn(value.shape, generator=draws)
    return server


def make_uploads(algorithm: Algorithm, downloads: Payload) -> Payload:
    draws, count = torch.Generator().manual_seed(1), len(downloads.sent)
    tensors = {n: v + 0.1 * torch.randn(v.shape, generator=draws) for n, v in downloads.tensors.items()}
    expected = algorithm.upload_like(downloads.rows(0)).extras
    extras = {name: torch.randn(count, *value.shape, generator=draws) for name, value in expected.items()}
    return Payload(tensors, torch.ones_like(downloads.sent), extras)


@pytest.mark.parametrize("options", [{}, COMPACT, {"neighbours": 2}], ids=str)
@pytest.mark.parametrize("name", ["pfedla", "heurpfedla", "pfedla-heldout"])
def test_a_clients_step_hardly_depends_on_who_else_answered_and_absent_clients_stay(name: str, options: dict) -> None:
    algorithm = make(name, batch_norm=True, **options)
    before, everybody = perturb(algorithm, 10), Cohort.everyone(torch.full((10,), 9), 3, 0)
    downloads = algorithm.download(before, everybody)
    uploads = make_uploads(algorithm, downloads)
    among_all = algorithm.aggregate(copy.deepcopy(before), everybody, downloads, uploads)
    for ids in (torch.tensor([7]), torch.tensor([0, 4, 9])):
        part = (everybody.only(ids), downloads.rows(ids), uploads.rows(ids))
        after = algorithm.aggregate(copy.deepcopy(before), *part)
        assert after["progress"]["uploads"] == len(ids)
        away = torch.tensor([client for client in range(10) if client not in ids])
        for group in ("models", "hypernetworks"):
            assert_same(take(after[group], ids), take(among_all[group], ids), tolerance=1e-5)
            assert_same(take(after[group], away), take(before[group], away))


def test_a_failure_in_aggregate_leaves_the_server_as_it_was() -> None:
    """All that can fail comes before the first write."""
    algorithm = make("pfedla")
    server, cohort = perturb(algorithm, 6), Cohort.everyone(torch.full((6,), 9), 1, 0)
    downloads, before = algorithm.download(server, cohort), copy.deepcopy(server)
    uploads = make_uploads(algorithm, downloads)
    with pytest.raises(RuntimeError):
        algorithm.aggregate(server, cohort, downloads, uploads._replace(tensors=take(uploads.tensors, slice(0, 5))))
    assert_same(flat(server), flat(before))


@pytest.mark.parametrize("options", [{}, COMPACT], ids=["network", "compact"])
def test_the_weights_of_many_clients_are_computed_in_chunks(options: dict) -> None:
    algorithm = make("pfedla", **options)
    count = CHUNK + 3
    server = perturb(algorithm, count)
    whole = algorithm._network(count).alpha(server["hypernetworks"])
    torch.testing.assert_close(algorithm.alpha(server), whole)
    assert whole.shape == (count, 2, count)


@pytest.mark.parametrize("compact", [False, True], ids=["network", "compact"])
def test_the_sizes_are_known_and_no_client_shares_memory_with_another(compact: bool) -> None:
    network = LayerWeightHypernetwork(5, 3, compact)
    tensors = network.init(4, torch.Generator().manual_seed(0))
    assert sum(value[0].numel() for value in tensors.values()) == network.num_parameters
    for value in tensors.values():
        value[1] = 3.0
        assert not (value[0] == 3.0).any()


def test_a_hypernetwork_that_is_too_large_names_the_compact_form() -> None:
    pfedla = create("pfedla", task_of(build_model("small-cnn", (1, 8, 8), 10, torch.Generator())), budget(0.1, 1, 8))
    compact = pfedla.model_copy(update=COMPACT)
    pfedla.check(6_000)
    compact.check(10_000)
    with pytest.raises(PfedlaError, match='hypernetwork = "compact"'):
        pfedla.check(10_000)
    with pytest.raises(PfedlaError, match=r"GiB(?!.*hypernetwork = )"):
        compact.check(10**6)


def test_weights_too_large_to_keep_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = simulate(toy_federation(), TinyNet(), "pfedla", rounds=2)
    monkeypatch.setattr("pfedla.runs.folder.SNAPSHOT_NUMBERS", 6 * 2 * 6 - 1)
    result = simulate(toy_federation(), TinyNet(), "pfedla", rounds=2)
    assert kept.alpha is not None
    assert result.alpha is None
    assert torch.equal(result.accuracy, kept.accuracy)
