"""What every algorithm of the registry must do."""

import copy

import pytest
import torch
from conftest import VARIANTS, applies, assert_same, engine_for, flat, make, play, received
from safetensors.torch import save

from pfedla.algorithms import ALGORITHMS
from pfedla.core.contracts import Failure, Payload
from pfedla.core.layers import take
from pfedla.core.rounds import everyone, payload_bytes, sample_cohort
from pfedla.core.tasks import load_tensors
from pfedla.data.federation import Federation

pytestmark = pytest.mark.parametrize(
    ("name", "batch_norm"),
    [
        pytest.param(name, batch_norm, id=f"{name}-{'batchnorm' if batch_norm else 'plain'}")
        for name in (*ALGORITHMS, *VARIANTS)
        for batch_norm in (False, True)
        if applies(name, batch_norm)
    ],
)


def ends_equal(one: tuple, other: tuple, tolerance: float = 0.0) -> None:
    (rounds, clients), (other_rounds, other_clients) = one, other
    assert_same(flat(rounds[-1].server), flat(other_rounds[-1].server), tolerance)
    assert_same(clients, other_clients, tolerance)
    if not tolerance:
        assert torch.equal(rounds[-1].evaluation.accuracy, other_rounds[-1].evaluation.accuracy)
        assert torch.equal(rounds[-1].evaluation.loss, other_rounds[-1].evaluation.loss)


def test_nothing_handed_in_is_written_into(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    with engine_for(algorithm, federation, threads=2, recalibrate="unsampled") as engine:
        server = algorithm.init_server(len(federation), seed=0)
        cohort = everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(server, cohort)
        before = copy.deepcopy((flat(server), downloads.tensors, engine.state()))
        trained = received(engine, cohort, downloads)
        uploads = copy.deepcopy(trained.uploads.tensors)
        algorithm.aggregate(copy.deepcopy(server), cohort, downloads, trained.uploads)  # it may write into the server
        engine.evaluate(cohort, downloads)
        for left, right in zip(before, (flat(server), downloads.tensors, engine.state()), strict=True):
            assert_same(left, right)
        assert_same(uploads, trained.uploads.tensors)


def test_evaluation_changes_nothing(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    ends_equal(*(play(algorithm, federation, participation=0.5, evaluate_every=every) for every in (1, 100)))


def test_any_number_of_threads_gives_the_same_bits(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    ends_equal(*(play(algorithm, federation, threads=threads) for threads in (1, 2)))
    ends_equal(*(play(algorithm, federation, threads=threads) for threads in (1, 5)))


def test_vectorized_equals_threaded(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    threaded, vectorized = (play(algorithm, federation, participation=0.7, engine=e) for e in ("threaded", "vectorized"))
    # FedFomo divides differences of losses on a few held-out examples by one another, and pFedLA's own rule their gradients:
    # both magnify rounding.
    tolerance = {"fedfomo": 1e-4, "pfedla-held-out": 1e-3, "heurpfedla-held-out": 1e-3}.get(name, 1e-5)
    ends_equal(threaded, vectorized, tolerance=tolerance)
    near = {"rtol": max(1e-5, tolerance / 10), "atol": max(1e-5, tolerance / 10)}
    for one, other in zip(threaded[0], vectorized[0], strict=True):
        torch.testing.assert_close(one.evaluation.loss, other.evaluation.loss, **near)
        torch.testing.assert_close(one.training_loss, other.training_loss, **near)
        torch.testing.assert_close(one.after_training.loss, other.after_training.loss, **near)


def test_the_same_seed_gives_the_same_bits_and_another_does_not(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    ends_equal(play(algorithm, federation), play(algorithm, federation))
    first, other = (play(algorithm, federation, seed=seed)[0][-1].evaluation.loss for seed in (0, 1))
    assert not torch.equal(first, other)


def test_saved_and_loaded_goes_on_like_a_straight_run(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    straight = play(algorithm, federation, rounds=range(1, 5), participation=0.5)
    half, clients = play(algorithm, federation, rounds=range(1, 3), participation=0.5)
    resumed = play(
        algorithm, federation, rounds=range(3, 5), participation=0.5, server=half[-1].server, clients=clients,
        traffic=half[-1].traffic,
    )  # fmt: skip
    ends_equal(straight, resumed)
    assert straight[0][-1].traffic == resumed[0][-1].traffic


def test_absent_clients_are_untouched(name: str, batch_norm: bool, federation: Federation) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    start = algorithm.init_server(len(federation), seed=0)
    played, clients = play(algorithm, federation, rounds=range(1, 2), participation=0.5, server=start)
    absent = sorted(set(range(len(federation))) - set(played[0].cohort.ids.tolist()))
    assert len(absent) == 3
    initial = algorithm.init_client()
    for client in absent:
        assert_same(take({n: v for n, v in clients.items() if n in initial}, client), initial)
    for group in ("models", "hypernetworks", "embeddings", "affinity"):  # what the server keeps per client
        for before, after in zip(start.get(group, {}).values(), played[0].server.get(group, {}).values(), strict=True):
            assert torch.equal(before[absent], after[absent])


def test_after_training_is_measured_on_the_trained_model(name: str, batch_norm: bool, federation: Federation) -> None:
    """Recomputed, with a module of its own, from the model that each client's update returns."""
    algorithm = make(name, batch_norm=batch_norm)
    with engine_for(algorithm, federation, threads=1, recalibrate="unsampled") as engine:
        server, cohort = algorithm.init_server(len(federation), seed=0), everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(server, cohort)
        trained = received(engine, cohort, downloads)
        for client in range(len(federation)):
            data = engine.client(client).local_data(cohort, downloads.rows(client))
            result = algorithm.local_update(algorithm.init_client(), downloads.rows(client), data)
            x, y = federation.test[client]
            with torch.no_grad():
                loss = torch.nn.functional.cross_entropy(load_tensors(algorithm.task.module, result.model)(x), y)
            assert trained.after_training.loss[client].item() == pytest.approx(loss.item(), abs=1e-6)
            assert not all(torch.equal(result.model[n], v) for n, v in algorithm.task.initial().items())


def test_evaluation_is_of_what_the_next_round_would_send(name: str, batch_norm: bool, federation: Federation) -> None:
    options = {"neighbours": 2} if name in ("pfedla", "heurpfedla") else {}
    algorithm = make(name, batch_norm=batch_norm, **options)
    played, clients = play(algorithm, federation, rounds=range(1, 3))
    with engine_for(algorithm, federation, threads=1, recalibrate="unsampled") as engine:
        engine.load(clients)
        following = sample_cohort(federation.num_examples, 3, 1.0, 0)
        expected = engine.evaluate(following, algorithm.download(played[-1].server, following))
    assert torch.equal(played[-1].evaluation.loss, expected.loss)


def test_evaluation_in_chunks_changes_nothing_and_is_counted_apart(
    name: str, batch_norm: bool, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    algorithm = make(name, batch_norm=batch_norm)
    whole, _ = play(algorithm, federation)
    monkeypatch.setattr("pfedla.core.rounds.EVALUATION_CHUNK", 4)
    chunked, _ = play(algorithm, federation)
    torch.testing.assert_close(whole[-1].evaluation.loss, chunked[-1].evaluation.loss, rtol=1e-6, atol=1e-6)
    assert whole[-1].traffic == chunked[-1].traffic
    expected = sum(
        int(
            payload_bytes(
                algorithm.download(one.server, everyone(federation.num_examples, one.round + 1, 0)), algorithm.task.layers
            ).sum()
        )
        for one in whole
    )
    assert whole[-1].traffic.evaluation_bytes == expected
    assert (expected > 0) == (name != "local")


def test_a_cohort_of_one(name: str, batch_norm: bool, federation: Federation) -> None:
    played, _ = play(make(name, batch_norm=batch_norm), federation, participation=0.01, engine="threaded")
    assert all(len(one.cohort.ids) == 1 for one in played)
    assert played[-1].evaluation.accuracy.isfinite().all()
    vectorized, _ = play(make(name, batch_norm=batch_norm), federation, participation=0.01, engine="vectorized")
    torch.testing.assert_close(played[-1].evaluation.loss, vectorized[-1].evaluation.loss, rtol=1e-5, atol=1e-5)


def test_bytes_counted_are_bytes_sent(name: str, batch_norm: bool, federation: Federation) -> None:
    """Against an encoder: the tensors of the sent layers, serialised, less the header."""
    algorithm = make(name, batch_norm=batch_norm)

    def encoded(payload: Payload) -> int:
        total = 0
        for row in range(len(payload.sent)):
            sent = {
                n: v[row].contiguous() for n, v in payload.tensors.items() if payload.sent[row, algorithm.task.layers.index[n]]
            } | {f"extra/{n}": v[row].contiguous() for n, v in payload.extras.items()}
            message = save(sent) if sent else bytes(8)
            total += len(message) - 8 - int.from_bytes(message[:8], "little")
        return total

    down = up = 0
    with engine_for(algorithm, federation, threads=2, recalibrate="unsampled") as engine:
        server = algorithm.init_server(len(federation), seed=0)
        for number in range(1, 4):
            cohort = sample_cohort(federation.num_examples, number, 1.0, 0)
            downloads = algorithm.download(server, cohort)
            trained = received(engine, cohort, downloads)
            server = algorithm.aggregate(server, cohort, downloads, trained.uploads)
            engine.commit(cohort.ids)
            assert int(payload_bytes(downloads, algorithm.task.layers).sum()) == encoded(downloads)
            down, up = down + encoded(downloads), up + encoded(trained.uploads)
    played, _ = play(algorithm, federation)
    assert (played[-1].traffic.down_bytes, played[-1].traffic.up_bytes) == (down, up)


def test_what_is_not_sent_is_not_read(name: str, batch_norm: bool, federation: Federation) -> None:
    """Poison in the layers that were not sent must not reach a client."""
    algorithm = make(name, batch_norm=batch_norm)
    with engine_for(algorithm, federation, threads=2, recalibrate="unsampled") as engine:
        server = algorithm.init_server(len(federation), seed=0)
        cohort = everyone(federation.num_examples, 1, 0)
        downloads = algorithm.download(server, cohort)

        def poisoned(tensor_name: str, value: torch.Tensor) -> torch.Tensor:
            sent = downloads.sent[:, algorithm.task.layers.index[tensor_name]].view(-1, *[1] * (value.ndim - 1))
            return torch.where(sent, value, torch.full_like(value, 77))

        bad = downloads._replace(tensors={n: poisoned(n, v) for n, v in downloads.tensors.items()})
        assert_same(*(received(engine, cohort, sent).uploads.tensors for sent in (downloads, bad)))
        assert torch.equal(engine.evaluate(cohort, downloads).loss, engine.evaluate(cohort, bad).loss)


def test_a_client_that_breaks_does_not_spoil_the_others(name: str, batch_norm: bool, federation: Federation) -> None:
    """What is not finite is refused: that client's state stays, the others' is as if it had not answered."""
    bad = federation.train[2]._replace(x=federation.train[2].x.clone())
    bad.x[:, 0] = torch.inf
    spoiled = Federation([*federation.train[:2], bad, *federation.train[3:]], federation.test, federation.classes)
    algorithm = make(name, batch_norm=batch_norm)
    start, before = play(algorithm, federation, rounds=range(1, 2))
    server = start[0].server
    played, clients = play(algorithm, spoiled, rounds=range(2, 3), server=server, clients=before)
    others = torch.tensor([0, 1, 3, 4, 5])
    with engine_for(algorithm, federation, threads=1, recalibrate="unsampled") as engine:
        engine.load(before)
        cohort = everyone(federation.num_examples, 2, 0)
        downloads = algorithm.download(server, cohort)
        uploads = received(engine, cohort, downloads).uploads
        engine.commit(others)
        expected = algorithm.aggregate(server, cohort.only(others), downloads.rows(others), uploads.rows(others))
        expected_clients = engine.state()
    assert played[0].failures == {2: Failure("not finite")}
    assert played[0].cohort.ids.tolist() == others.tolist()
    assert_same(flat(played[0].server), flat(expected))
    assert_same(clients, expected_clients)
    sent_up = int(payload_bytes(uploads, algorithm.task.layers).sum())
    assert played[0].traffic.up_bytes == sent_up  # what was refused was sent all the same
