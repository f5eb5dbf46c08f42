"""Whatever a client sends or does, the run continues, and the others are as if it had not answered."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyNet, assert_same, engine_for, flat, make, play, toy_federation
from torch import Tensor

from pfedla import simulate
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedrep import FedRep
from pfedla.core.contracts import Answer, Cohort, Failure, LocalResult, Payload
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
