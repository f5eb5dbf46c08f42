"""What every algorithm of the registry must do."""

import copy
from functools import cache

import pytest
import torch
from conftest import (
    FEATURES,
    VARIANTS,
    applies,
    assert_same,
    engine_for,
    flat,
    make,
    personal_models,
    play,
    received,
    toy_federation,
)
from safetensors.torch import load, save
from torch import nn

from pfedla.algorithms import ALGORITHMS
from pfedla.core.contracts import Cohort, Failure, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Layers, Params, mix, take
from pfedla.core.rounds import Round, payload_bytes
from pfedla.core.tasks import load_tensors
from pfedla.data.federation import Examples, Federation
from pfedla.engines.client import Client

Ran = tuple[list[Round], Params]
CASES = [(name, norm) for name in (*ALGORITHMS, *VARIANTS) for norm in (False, True) if applies(name, norm)]
ALL = pytest.mark.parametrize(
    ("name", "batch_norm"),
    [pytest.param(*case, id=f"{case[0]}-{'batchnorm' if case[1] else 'plain'}") for case in CASES],
)
EACH = pytest.mark.parametrize("name", [*ALGORITHMS, *VARIANTS])  # with BatchNorm where it fits
# FedFomo divides differences of losses by distances, pfedla-heldout gradients by norms.
TOLERANCES = {name: 1e-4 for name in (*ALGORITHMS, *VARIANTS) if "fedfomo" in name}
TOLERANCES |= {name: 1e-3 for name in (*ALGORITHMS, *VARIANTS) if "heldout" in name}


@cache
def reference(name: str, batch_norm: bool | None = None) -> Ran:
    """Three rounds with half of the clients each; every test compares with these, none writes into them."""
    return play(make(name, batch_norm=batch_norm), toy_federation(), participation=0.5)


def ends_equal(one: Ran, other: Ran, tolerance: float = 0.0) -> None:
    (rounds, clients), (other_rounds, other_clients) = one, other
    assert_same(flat(rounds[-1].server), flat(other_rounds[-1].server), tolerance)
    assert_same(clients, other_clients, tolerance)
    near = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(rounds[-1].evaluation.loss, other_rounds[-1].evaluation.loss, **near)
    torch.testing.assert_close(rounds[-1].training_loss, other_rounds[-1].training_loss, **near)
    torch.testing.assert_close(rounds[-1].after_training.loss, other_rounds[-1].after_training.loss, **near)


def reload(tensors: Params) -> Params:
    """Through a file and back, in the same order of names."""
    loaded = load(save(tensors))
    return {name: loaded[name] for name in tensors}


# Reproducible, on every engine, with any interruption


@ALL
def test_neither_threads_nor_evaluation_change_a_bit(name: str, batch_norm: bool, federation: Federation) -> None:
    """The same seed again, with another number of threads and evaluated at the end only."""
    algorithm = make(name, batch_norm=batch_norm)
    again = play(algorithm, federation, participation=0.5, threads=3, evaluate_every=100)
    ends_equal(reference(name, batch_norm), again)


@ALL
def test_vectorized_equals_threaded(name: str, batch_norm: bool, federation: Federation) -> None:
    vectorized = play(make(name, batch_norm=batch_norm), federation, participation=0.5, engine="vectorized")
    ends_equal(reference(name, batch_norm), vectorized, tolerance=TOLERANCES.get(name, 1e-5))


@pytest.mark.slow
@EACH
def test_another_seed_gives_other_numbers(name: str, federation: Federation) -> None:
    other, _ = play(make(name, batch_norm=None), federation, participation=0.5, rounds=range(1, 2), seed=1)
    assert not torch.equal(reference(name)[0][0].evaluation.loss, other[0].evaluation.loss)


@EACH
def test_saved_and_loaded_it_continues_like_a_straight_run(name: str, federation: Federation) -> None:
    algorithm = make(name, batch_norm=None)
    half, clients = play(algorithm, federation, rounds=range(1, 3), participation=0.5)
    server, traffic = {group: reload(part) for group, part in half[-1].server.items()}, half[-1].traffic
    state = {"server": server, "clients": reload(clients), "traffic": traffic}
    rest = play(algorithm, federation, rounds=range(3, 4), participation=0.5, **state)
    ends_equal(reference(name), rest)
    assert reference(name)[0][-1].traffic == rest[0][-1].traffic


@pytest.mark.slow
@EACH
def test_a_cohort_of_one(name: str, federation: Federation) -> None:
    algorithm, tolerance = make(name, batch_norm=None), max(1e-5, TOLERANCES.get(name, 0))
    threaded, vectorized = (
        play(algorithm, federation, participation=0.01, engine=e) for e in ("threaded", "vectorized")
    )
    assert all(len(one.cohort.ids) == 1 and not one.failures for one in threaded[0])
    ends_equal(threaded, vectorized, tolerance)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "pfedhn"])  # it steps client by client
def test_permuting_the_clients_permutes_the_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full batches, all candidates and all examples, so that a client's number decides no draw."""

    def hold_out_the_first(self: Client, seed: int, share: float) -> tuple[Examples, Examples]:
        (x, y), count = self.train, 2 if share else 0
        return Examples(x[count:], y[count:]), Examples(x[:count], y[:count])

    monkeypatch.setattr(Client, "_hold_out", hold_out_the_first)
    options = {"fedala": {"sample_share": 1.0}, "pfedla-heldout": {"sketch": "exact"}}.get(name, {})
    federation, order = toy_federation(), [3, 0, 5, 1, 4, 2]
    permuted = Federation([federation.train[i] for i in order], [federation.test[i] for i in order], federation.classes)
    algorithm = make(name, batch_norm=not applies(name, batch_norm=False), batch_size=1000, **options)
    straight, shuffled = (personal_models(algorithm, f, *play(algorithm, f)) for f in (federation, permuted))
    for new, old in enumerate(order):
        assert_same(shuffled[new], straight[old], tolerance=TOLERANCES.get(name, 1e-5))


# Who may change what


@EACH
def test_nothing_handed_in_is_written_into(name: str, federation: Federation) -> None:
    algorithm = make(name, batch_norm=None)
    with engine_for(algorithm, federation, threads=2, recalibrate="unsampled") as engine:
        server = algorithm.init_server(len(federation), seed=0)
        cohort = Cohort.everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(server, cohort)
        before = copy.deepcopy((flat(server), downloads.tensors, downloads.extras, engine.state()))
        trained = received(engine, cohort, downloads)
        uploads = copy.deepcopy(trained.uploads.tensors)
        algorithm.aggregate(copy.deepcopy(server), cohort, downloads, trained.uploads)  # it may write into the server
        assert not engine.evaluate(cohort, downloads)[1]
        after = flat(server), downloads.tensors, downloads.extras, engine.state()
    for left, right in zip(before, after, strict=True):
        assert_same(left, right)
    assert_same(uploads, trained.uploads.tensors)


@EACH
def test_absent_clients_are_untouched(name: str, federation: Federation) -> None:
    algorithm = make(name, batch_norm=None)
    start, initial = algorithm.init_server(len(federation), seed=0), algorithm.init_client()
    played, clients = play(algorithm, federation, rounds=range(1, 2), participation=0.5, server=start)
    absent = sorted(set(range(len(federation))) - set(played[0].cohort.ids.tolist()))
    assert len(absent) == 3
    for client in absent:
        assert_same(take({n: v for n, v in clients.items() if n in initial}, client), initial)
    for group in ("models", "hypernetworks", "embeddings", "affinity"):  # what the server keeps per client
        for before, after in zip(start.get(group, {}).values(), played[0].server.get(group, {}).values(), strict=True):
            assert torch.equal(before[absent], after[absent])


@EACH
def test_a_client_that_breaks_does_not_spoil_the_others(name: str, federation: Federation) -> None:
    """What is not finite is refused: that client's state stays, the others' is as if it had not answered."""
    bad = federation.train[2]._replace(x=federation.train[2].x.clone())
    bad.x[:, 0] = torch.inf
    spoiled = Federation([*federation.train[:2], bad, *federation.train[3:]], federation.test, federation.classes)
    algorithm = make(name, batch_norm=None)
    start, before = play(algorithm, federation, rounds=range(1, 2))
    played, clients = play(algorithm, spoiled, rounds=range(2, 3), server=start[0].server, clients=before)
    others = torch.tensor([0, 1, 3, 4, 5])
    with engine_for(algorithm, federation, recalibrate="unsampled") as engine:
        engine.load(before)
        cohort = Cohort.everyone(federation.num_examples, 2, 0)
        downloads = algorithm.download(start[0].server, cohort)
        uploads = received(engine, cohort, downloads).uploads
        engine.commit(others)
        only = cohort.only(others), downloads.rows(others), uploads.rows(others)
        expected = algorithm.aggregate(start[0].server, *only)
        assert_same(clients, engine.state())
    assert played[0].failures == {2: Failure("not finite")}
    assert_same(flat(played[0].server), flat(expected))
    sent_up = int(payload_bytes(uploads, algorithm.task.layers).sum())
    assert played[0].traffic.up_bytes == sent_up  # what was refused was sent all the same


# What is measured and counted


@EACH
def test_after_training_is_measured_on_the_trained_model(name: str, federation: Federation) -> None:
    """Recomputed, with a module of its own, from the model that each client's update returns."""
    algorithm = make(name, batch_norm=None)
    with engine_for(algorithm, federation) as engine:
        cohort = Cohort.everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(algorithm.init_server(len(federation), seed=0), cohort)
        trained = received(engine, cohort, downloads)
        for client in (0, 3):
            data = engine.clients[client].local_data(cohort, downloads.rows(client))
            result = algorithm.local_update(algorithm.init_client(), downloads.rows(client), data)
            x, y = federation.test[client]
            with torch.no_grad():
                loss = nn.functional.cross_entropy(load_tensors(algorithm.task.module, result.model)(x), y)
            assert trained.after_training.loss[client].item() == pytest.approx(loss.item(), abs=1e-6)
            assert not all(torch.equal(result.model[n], v) for n, v in algorithm.task.initial().items())


@EACH
def test_evaluation_is_of_what_the_next_round_would_send(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is done in chunks."""
    played, clients = reference(name)
    algorithm, following = make(name, batch_norm=None), Cohort.sample(federation.num_examples, 4, 1.0, 0)
    with engine_for(algorithm, federation, recalibrate="unsampled") as engine:  # one thread for sums, as in the run
        engine.load(clients)
        downloads = algorithm.download(played[-1].server, following)
        metrics, failures = engine.evaluate(following, downloads)
    assert not failures
    assert torch.equal(played[-1].evaluation.loss, metrics.loss)
    monkeypatch.setattr("pfedla.core.rounds.EVALUATION_CHUNK", 4)
    start = {"server": played[1].server, "clients": clients, "rounds": range(4, 5)}
    whole = play(algorithm, federation, **start)[0][-1]
    monkeypatch.setattr("pfedla.core.rounds.EVALUATION_CHUNK", 64)
    chunked = play(algorithm, federation, **start)[0][-1]
    torch.testing.assert_close(whole.evaluation.loss, chunked.evaluation.loss, rtol=1e-5, atol=1e-5)
    assert whole.traffic == chunked.traffic


@EACH
def test_bytes_counted_are_bytes_sent(name: str, federation: Federation) -> None:
    """Against an encoder: the tensors of the sent layers, serialised, less the header."""
    algorithm = make(name, batch_norm=None)
    index = algorithm.task.layers.index

    def encoded(payload: Payload) -> int:
        total = 0
        for row in range(len(payload.sent)):
            sent = {n: v[row].contiguous() for n, v in payload.tensors.items() if payload.sent[row, index[n]]}
            sent |= {f"extra/{n}": v[row].contiguous() for n, v in payload.extras.items()}
            message = save(sent) if sent else bytes(8)
            total += len(message) - 8 - int.from_bytes(message[:8], "little")
        return total

    down = up = 0
    server = algorithm.init_server(len(federation), seed=0)
    with engine_for(algorithm, federation, recalibrate="unsampled") as engine:
        for number in range(1, 4):
            cohort = Cohort.sample(federation.num_examples, number, 0.5, 0)
            downloads = algorithm.download(server, cohort)
            uploads = received(engine, cohort, downloads).uploads
            server = algorithm.aggregate(server, cohort, downloads, uploads)
            engine.commit(cohort.ids)
            down, up = down + encoded(downloads), up + encoded(uploads)
    traffic = reference(name)[0][-1].traffic
    assert (traffic.down_bytes, traffic.up_bytes) == (down, up)


@EACH
def test_what_is_not_sent_is_not_read(name: str, federation: Federation) -> None:
    """Poison in the layers that were not sent must not reach a client."""
    algorithm = make(name, batch_norm=None)
    index = algorithm.task.layers.index
    with engine_for(algorithm, federation, threads=2, recalibrate="unsampled") as engine:
        cohort = Cohort.everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(algorithm.init_server(len(federation), seed=0), cohort)
        poisoned = {n: v.clone() for n, v in downloads.tensors.items()}
        for tensor_name, value in poisoned.items():
            value[~downloads.sent[:, index[tensor_name]]] = 77
        bad = downloads._replace(tensors=poisoned)
        assert_same(*(received(engine, cohort, sent).uploads.tensors for sent in (downloads, bad)))
        (one, _), (other, _) = (engine.evaluate(cohort, sent) for sent in (downloads, bad))
        assert torch.equal(one.loss, other.loss)


def test_runs_differ_between_methods() -> None:
    """A method whose numbers equal another's to the digit has a bug."""
    losses = [reference(name, batch_norm=True)[0][-1].evaluation.loss for name in ALGORITHMS]
    assert all(not torch.equal(one, other) for i, one in enumerate(losses) for other in losses[:i])


# Other kinds of tensors


class OddNet(nn.Module):
    """A frozen backbone with BatchNorm, a scalar parameter, and a head of bfloat16."""

    def __init__(self, head_dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)).requires_grad_(False)
            self.body = nn.Linear(8, 5)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.bn = nn.BatchNorm1d(5)
            self.head = nn.Linear(5, 3).to(head_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.bn(self.body(self.backbone(x)))) * self.scale
        return self.head(hidden.to(self.head.weight.dtype)).float()


FROZEN = {"backbone.0.weight", "backbone.0.bias", "backbone.1.weight", "backbone.1.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "fedsa-lora"])  # its frozen tensors: test_lora
def test_frozen_scalar_and_bfloat16_parameters(name: str, federation: Federation) -> None:
    """Both engines agree, a frozen tensor is nowhere but in the task, the others keep their dtypes."""
    algorithm = make(name, module=OddNet())
    assert algorithm.task.layers.frozen == FROZEN
    threaded, vectorized = (play(algorithm, federation, engine=e) for e in ("threaded", "vectorized"))
    (played, clients), (others, _) = threaded, vectorized
    assert not any(one.failures or one.evaluation_failures for one in played + others)
    torch.testing.assert_close(played[-1].evaluation.loss, others[-1].evaluation.loss, rtol=0.05, atol=0.05)
    cohort = Cohort.everyone(federation.num_examples, 4, 0)
    downloads = algorithm.download(played[-1].server, cohort)
    with engine_for(algorithm, federation) as engine:
        engine.load(clients)
        uploads = received(engine, cohort, downloads).uploads
        model = engine.personal_models(cohort, downloads)[0]
    kept = [clients, downloads.tensors, downloads.extras, uploads.tensors, uploads.extras, model]
    kept += list(played[-1].server.values())
    assert not [tensor for part in kept for tensor in part for frozen in FROZEN if frozen in tensor]
    assert model["head.weight"].dtype == torch.bfloat16
    assert model["scale"].shape == ()
    trained = algorithm.task.layers.parameters(algorithm.task.initial())
    assert model.keys() == algorithm.task.initial().keys()
    assert not all(torch.equal(model[n], v) for n, v in trained.items())


@pytest.mark.parametrize("name", ["local", "fedavg", "fedrep", "pfedla"])
def test_the_frozen_backbone_does_not_change_the_training(name: str, federation: Federation) -> None:
    """The same as training the rest on what the backbone makes of the examples."""
    whole = OddNet(torch.float32)
    whole.backbone[1] = nn.Identity()
    rest = copy.deepcopy(whole)
    rest.backbone = nn.Identity()
    with torch.no_grad():
        train, test = (
            [Examples(whole.backbone(x), y) for x, y in part] for part in (federation.train, federation.test)
        )
    ends = (
        play(make(name, module=whole), federation),
        play(make(name, module=rest), Federation(train, test, federation.classes)),
    )
    ends_equal(*ends, tolerance=1e-5)


def test_mix_refuses_integers() -> None:
    layers = Layers.of(nn.Linear(1, 1))
    with pytest.raises(PfedlaError, match="weight"):
        mix(torch.ones(1, 1, 2) / 2, {"weight": torch.ones(2, 1, 1, dtype=torch.int64)}, layers)
