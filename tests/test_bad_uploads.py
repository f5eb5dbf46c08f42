"""Whatever a client sends or does, the run continues, and the others are as if it had not answered."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyNet, add_noise, assert_same, engine_for, flat, make, play, toy_federation
from torch import Tensor, nn

from pfedla import simulate
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedrep import FedRep
from pfedla.core.contracts import Answer, Cohort, Failure, LocalResult, Payload, ServerState
from pfedla.core.errors import GaveUpError
from pfedla.core.layers import take
from pfedla.core.rounds import NO_ANSWER, find_too_long, update_norm
from pfedla.data.federation import Federation
from pfedla.engines.simulated import SimulatedEngine

BAD = 2  # the client that sends it
BOUND = 1000.0  # no honest update of the toy federation is so many times longer than the median
Send = Callable[[Answer], Answer | Failure]


def with_upload(answer: Answer, **changes: Any) -> Answer:
    return answer._replace(upload=answer.upload._replace(**changes))


def on_tensors(change: Callable[[dict[str, Tensor]], Any]) -> Send:
    return lambda answer: with_upload(answer, tensors=change(answer.upload.tensors))


def on_first(change: Callable[[Tensor], Any]) -> Send:
    return on_tensors(lambda tensors: tensors | {(name := next(iter(tensors))): change(tensors[name].clone())})


def put(value: Tensor, number: float) -> Tensor:
    value.view(-1)[-1] = number
    return value


def with_nan_in_an_extra(answer: Answer) -> Answer:
    extras = {name: torch.full_like(value.float(), torch.nan) for name, value in answer.upload.extras.items()}
    return with_upload(answer, extras=extras or {"note": torch.tensor([torch.nan])})


KINDS: dict[str, tuple[Send, set[str]]] = {
    "one nan": (on_first(lambda value: put(value, torch.nan)), {"not finite"}),
    "one infinity": (on_first(lambda value: put(value, -torch.inf)), {"not finite"}),
    "a tensor too many": (on_tensors(lambda tensors: {**tensors, "x": torch.zeros(3)}), {"wrong names"}),
    "a tensor too few": (on_tensors(lambda tensors: dict([*tensors.items()][1:])), {"wrong names"}),
    "another shape": (on_first(lambda value: value[..., :-1]), {"wrong shape"}),
    "another dtype": (on_first(lambda value: value.double()), {"wrong dtype"}),
    "no tensor": (on_first(lambda value: value.tolist()), {"not an upload"}),
    "a sparse tensor": (on_first(lambda value: value.to_sparse()), {"not an upload"}),
    "a tensor without memory": (on_first(lambda value: value.to("meta")), {"not an upload"}),
    "names that are none": (on_tensors(lambda tensors: {1: 2}), {"wrong names"}),
    "no mask": (lambda a: with_upload(a, sent=np.ones(2)), {"not an upload"}),
    "no extras": (lambda a: with_upload(a, extras=None), {"not an upload"}),
    "other layers": (lambda a: with_upload(a, sent=~a.upload.sent), {"wrong layers"}),
    "a mask too long": (lambda a: with_upload(a, sent=a.upload.sent.repeat(2)), {"wrong shape"}),
    "an unknown extra": (lambda a: with_upload(a, extras={"note": torch.zeros(1)}), {"wrong names"}),
    "one nan in an extra": (with_nan_in_an_extra, {"not finite", "wrong names", "wrong dtype"}),
    "an update too long": (on_first(lambda value: value + 1e6), {"norm too large"}),
    "garbage": (lambda a: a._replace(upload=b"\x80\x04garbage"), {"not an upload"}),  # type: ignore[arg-type]
    "garbage for tensors": (on_tensors(lambda tensors: [1, 2, 3]), {"not an upload"}),
    "a model that is not finite": (lambda a: a._replace(finite=False), {"not finite"}),
    "nothing": (lambda a: None, {"not an upload"}),  # type: ignore[arg-type,return-value]
    "an exception": (lambda a: Failure("raised", "ValueError: no"), {"raised"}),
}


def intercept(monkeypatch: pytest.MonkeyPatch, send: Send, clients: Any = (BAD,)) -> None:
    """Change the answers of some clients on their way."""
    train = SimulatedEngine.train

    def changed(self: Any, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers = zip(cohort.ids.tolist(), train(self, cohort, downloads), strict=True)
        return [send(answer) if client in clients else answer for client, answer in answers]  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedEngine, "train", changed)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "heurpfedla", "pfedla-heldout"])
def test_a_bad_upload_is_refused_and_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind a round: after each, everybody's state and evaluation are those of the run without an answer."""
    rounds = range(1, len(KINDS) + 1)
    ends = []
    for kinds in (iter(()), iter(KINDS.values())):
        with monkeypatch.context() as patch:
            intercept(patch, lambda answer, kinds=kinds: next(kinds, (lambda a: NO_ANSWER,))[0](answer))
            algorithm = make(name, batch_norm=None, batch_size=10)
            ends.append(play(algorithm, toy_federation(), rounds=rounds, threads=1, norm_bound=BOUND))
    (expected, expected_clients), (played, clients) = ends
    paid = 0  # for uploads that are well-formed and of no use
    for (kind, (_, reasons)), one, other in zip(KINDS.items(), played, expected, strict=True):
        assert list(one.failures) == [BAD], kind
        assert one.failures[BAD].reason in reasons, kind
        more = one.traffic.up_bytes - other.traffic.up_bytes - paid
        assert (more > 0) == (one.failures[BAD].reason in ("not finite", "norm too large")), kind
        paid += more
        assert_same(flat(one.server), flat(other.server))
        assert torch.equal(one.evaluation.loss, other.evaluation.loss), kind
    assert_same(clients, expected_clients)


@pytest.mark.parametrize("name", ["fedavg", "pfedla", "fedfomo"])
def test_the_order_of_the_names_in_an_upload_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, _ = play(make(name, batch_norm=True), toy_federation())
    intercept(monkeypatch, on_tensors(lambda tensors: dict(reversed(tensors.items()))), range(6))
    shuffled, _ = play(make(name, batch_norm=True), toy_federation())
    assert not shuffled[-1].failures
    assert_same(flat(straight[-1].server), flat(shuffled[-1].server))


CHANGES: list[Callable[[LocalResult], dict[str, Any]]] = [
    lambda r: {"client": {}},
    lambda r: {"client": {name: value[None] for name, value in r.client.items()}},
    lambda r: {"loss": torch.zeros(3)},
    lambda r: {"loss": 0.5},
    lambda r: {"upload": None},
    lambda r: {"model": None},
]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_that_a_clients_code_returns_gets_past_the_engine(change: Callable[[Any], Any]) -> None:
    class Broken(FedRep):
        def local_update(self, client: Any, download: Payload, data: Any) -> LocalResult:
            result = super().local_update(client, download, data)
            spoils = len(data.y) == 20  # client 3's
            return result._replace(**change(result)) if spoils else result

    algorithm = make("fedrep")
    played, clients = play(Broken(task=algorithm.task, training=algorithm.training), toy_federation())
    assert all(list(one.failures) == [3] for one in played)
    assert not clients["__trained__"][3]
    assert_same({n: v for n, v in take(clients, 3).items() if n != "__trained__"}, algorithm.init_client())


def spoil_labels(federation: Federation, *clients: int) -> Federation:
    """Give clients a label that no class has: their training raises."""
    train = [
        examples._replace(y=torch.full_like(examples.y, 77)) if client in clients else examples
        for client, examples in enumerate(federation.train)
    ]
    return Federation(train, federation.test, federation.classes)


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
@pytest.mark.parametrize("name", ["fedavg-ft", "pfedla"])
def test_a_client_that_raises_is_left_out_alone(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vectorized engine, its group is computed again without it."""
    algorithm = make(name, batch_norm=None)
    played, clients = play(algorithm, spoil_labels(toy_federation(), BAD), engine=engine)
    assert all(one.failures.keys() == {BAD} and one.failures[BAD].reason == "raised" for one in played)
    assert isinstance(played[0].failures[BAD].error, (IndexError, RuntimeError))
    intercept(monkeypatch, lambda answer: NO_ANSWER)
    expected, expected_clients = play(algorithm, toy_federation(), engine=engine)
    assert_same(flat(played[-1].server), flat(expected[-1].server), 1e-6)
    assert_same(clients, expected_clients, 1e-6)


def test_a_run_without_a_usable_upload_stops_and_keeps_the_cause() -> None:
    class Raises(FedAvg):
        def local_update(self, *given: Any) -> Any:
            raise IndexError("no")

    with pytest.raises(GaveUpError, match="max_failed_rounds") as caught:
        simulate(toy_federation(), TinyNet(), Raises, rounds=50, max_failed_rounds=3, engine="threaded")
    assert isinstance(caught.value.__cause__, IndexError)


def test_the_norm_is_that_of_the_update_where_the_server_knows_it() -> None:
    tensors = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0]), "steps": torch.tensor(99)}
    assert update_norm(Payload(tensors, torch.ones(1)), {"a": torch.tensor([3.0, 1.0])}) == 4.0
    huge = Payload({"a": torch.tensor([3e38])}, torch.ones(1))
    assert update_norm(huge, {"a": torch.tensor([-3e38])}) == pytest.approx(6e38)


def test_the_norm_is_measured_from_where_a_client_really_began() -> None:
    """Also where that was not sent, as HeurpFedLA's retained layer."""
    moving, still = (make("heurpfedla", lr=lr) for lr in (0.3, 1e-12))
    before, clients = play(moving, toy_federation())
    cohort, server = Cohort.everyone(toy_federation().num_examples, 4, 0), before[-1].server
    downloads = still.download(server, cohort)
    with engine_for(still, toy_federation()) as engine:
        engine.load(clients)
        answers = engine.train(cohort, downloads)
    starts = still.starts(server, cohort, downloads)
    assert all(update_norm(answer.upload, take(starts, row)) < 1e-6 for row, answer in enumerate(answers))


def test_too_long_is_measured_once_against_the_median_of_all() -> None:
    """With the longest left out, 11 would be too long as well: honest clients would follow the attackers."""
    assert find_too_long(dict(enumerate([2.0, 3.0, 4.0, 11.0, 1000.0])), 3.0) == {4: 250.0}
    assert find_too_long({0: 0.0, 1: 0.0, 2: 5.0}, 3.0) == {}  # a median of zero measures nothing


# pFedLA: senders whose kept model is far off


def make_server(algorithm: Any, count: int = 6) -> ServerState:
    """Return a server whose models and weights all differ."""
    server = algorithm.init_server(count, 0)
    return {**server, **{group: add_noise(server[group], 1) for group in ("models", "hypernetworks")}}


def spoil_models(server: ServerState, numbers: dict[int, float]) -> ServerState:
    models = {name: value.clone() for name, value in server["models"].items()}
    for client, number in numbers.items():
        next(iter(models.values()))[client] = number
    return {**server, "models": models}


@pytest.mark.parametrize("name", ["pfedla", "heurpfedla", "pfedla-heldout", "pfedla-compact"])
def test_senders_far_off_have_no_weight_and_the_others_share_it(name: str) -> None:
    """Against a plain loop; with their models in order again, everything is as before."""
    algorithm = make(name)
    server, everyone = make_server(algorithm), Cohort.everyone(torch.full((6,), 9), 1, 0)
    before, kept = algorithm.alpha(server), [0, 1, 3, 5]
    assert torch.equal(before, algorithm._network(6).alpha(server["hypernetworks"]))  # nobody is off: not a bit
    spoiled = spoil_models(server, {2: 1e30, 4: torch.nan})
    alpha = algorithm.alpha(spoiled)
    assert (alpha[:, :, [2, 4]] == 0).all()
    torch.testing.assert_close(alpha[:, :, kept], before[:, :, kept] / before[:, :, kept].sum(-1, keepdim=True))
    received = algorithm.download(spoiled, everyone).tensors
    if algorithm.neighbours == "all":
        for number, layer in ((n, algorithm.task.layers.index[n]) for n in received):
            for client in range(6):
                twin = sum(alpha[client, layer, j] * server["models"][number][j] for j in kept)
                torch.testing.assert_close(received[number][client], twin, rtol=1e-5, atol=1e-5)
    assert all(value.isfinite().all() for value in received.values())
    assert torch.equal(before, algorithm.alpha(server))


def test_if_every_sender_is_off_a_client_gets_its_own_model() -> None:
    algorithm = make("pfedla")
    server, everyone = make_server(algorithm), Cohort.everyone(torch.full((6,), 9), 1, 0)
    spoiled = spoil_models(server, dict.fromkeys(range(6), 1e30))
    assert_same(algorithm.download(spoiled, everyone).tensors, spoiled["models"])


def test_a_short_model_makes_no_other_one_long() -> None:
    """Of two clients one sends nearly nothing: the other one's model is still no longer than usual."""
    algorithm = make("pfedla")
    server = make_server(algorithm, 2)
    for value in server["models"].values():
        value[1] *= 1e-9
    assert (algorithm.alpha(server) > 0).all()


def test_models_that_start_at_zero_are_not_measured_by_zero() -> None:
    algorithm = make("pfedla", module=nn.Linear(6, 3))
    for parameter in algorithm.task.module.parameters():
        nn.init.zeros_(parameter)
    server = algorithm.init_server(6, 0)
    server["models"]["weight"][2] = 1.0
    assert (algorithm.alpha(server) > 0).all()


@pytest.mark.parametrize("name", ["pfedla", "heurpfedla", "pfedla-heldout", "pfedla-compact"])
def test_weights_go_on_being_learned_beside_a_sender_that_is_off(name: str) -> None:
    """As if its model were the mean of the others."""
    algorithm, ends = make(name), []
    server, everyone = make_server(algorithm), Cohort.everyone(torch.full((6,), 9), 1, 0)
    mean = {n: torch.cat([v[:2], v[3:]]).mean(0) for n, v in server["models"].items()}
    level = {**server, "models": {n: v.clone() for n, v in server["models"].items()}}
    for n, value in level["models"].items():
        value[2] = mean[n]
    downloads = algorithm.download(level, everyone)
    extras = algorithm.upload_like(downloads.rows(0)).extras
    draws = {n: add_noise({n: torch.zeros(6, *v.shape)}, 4)[n] for n, v in extras.items()}
    uploads = Payload(add_noise(downloads.tensors, 5), downloads.sent | True, draws)
    for state in (level, spoil_models(server, {2: 1e30})):
        ends.append(algorithm.aggregate(copy.deepcopy(state), everyone, downloads, uploads)["hypernetworks"])
    assert_same(*ends, tolerance=1e-5)
    assert any(not torch.equal(value, server["hypernetworks"][n]) for n, value in ends[0].items())


@pytest.mark.parametrize("name", ["pfedla", "heurpfedla", "pfedla-heldout", "pfedla-compact"])
def test_one_upload_of_1e30_does_not_spread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round of eight; then the client sends as usual and has its weight with the others again."""
    clean, _ = play(make(name), toy_federation(), rounds=range(1, 9))
    calls = iter(range(1, 9))
    sends = on_first(lambda value: torch.full_like(value, 1e30))
    intercept(monkeypatch, lambda answer: sends(answer) if next(calls) == 2 else answer)
    algorithm = make(name)
    hit, _ = play(algorithm, toy_federation(), rounds=range(1, 9))
    assert not any(one.failures for one in hit)
    assert hit[-1].evaluation.loss.mean() < 1.2 * clean[-1].evaluation.loss.mean()
    after = {round: algorithm.alpha(hit[round - 1].server)[:, :, BAD] for round in (2, 3)}
    assert (after[2] == 0).all()
    assert (after[3][torch.arange(6) != BAD] > 0).all()
