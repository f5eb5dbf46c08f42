"""Whatever a client sends or does: the run goes on, and the others are as in a round in which it was absent, bit for bit."""

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import TinyNet, assert_same, flat, make, methods, play, toy_federation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pfedla.core.rounds
from pfedla import simulate
from pfedla.core.contracts import Algorithm, Answer, Cohort, Failure, LocalResult, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import take
from pfedla.core.rounds import Round, everyone, sample_cohort
from pfedla.core.uploads import NO_ANSWER, accept, too_long, update_norm
from pfedla.data.federation import Federation
from pfedla.engines import ENGINES, create_engine

BAD = 2  # the client that sends it
Played = tuple[list[Round], dict[str, Tensor]]
Send = Callable[[Answer], Answer | Failure]


def on_first(change: Callable[[Tensor], Any]) -> Send:
    """Spoil one tensor; a method that uploads none (Local) sends one that nobody asked for."""

    def send(answer: Answer) -> Answer:
        tensors = dict(answer.upload.tensors) or {"fc1.weight": torch.zeros(5, 6)}
        name = next(name for name, value in tensors.items() if value.is_floating_point())
        return with_upload(answer, tensors={**tensors, name: change(tensors[name])})

    return send


def with_upload(answer: Answer, **changes: Any) -> Answer:
    return answer._replace(upload=answer.upload._replace(**changes))


def spoiled(value: Tensor, number: float) -> Tensor:
    value = value.clone()
    value.view(-1)[-1] = number
    return value


def without_first(answer: Answer) -> Answer:
    return with_upload(answer, tensors=dict(list(answer.upload.tensors.items())[1:]) or {"none": torch.zeros(1)})


def with_nan_in_an_extra(answer: Answer) -> Answer:
    extras = answer.upload.extras or {"note": torch.zeros(1)}
    name, value = next(iter(extras.items()))
    return with_upload(
        answer, extras={**extras, name: spoiled(value, torch.nan) if value.is_floating_point() else value.float()}
    )


KINDS: dict[str, tuple[Send, set[str]]] = {
    "one nan": (on_first(lambda value: spoiled(value, torch.nan)), {"not finite", "wrong names"}),
    "one infinity": (on_first(lambda value: spoiled(value, -torch.inf)), {"not finite", "wrong names"}),
    "a tensor too many": (lambda a: with_upload(a, tensors={**a.upload.tensors, "backdoor": torch.zeros(3)}), {"wrong names"}),
    "a tensor too few": (without_first, {"wrong names"}),
    "another shape": (on_first(lambda value: value[..., :-1]), {"wrong shape", "wrong names"}),
    "one more axis": (on_first(lambda value: value.unsqueeze(0)), {"wrong shape", "wrong names"}),
    "another dtype": (on_first(lambda value: value.double()), {"wrong dtype", "wrong names"}),
    "complex numbers": (on_first(lambda value: value.to(torch.complex64)), {"wrong dtype", "wrong names"}),
    "no tensor": (on_first(lambda value: value.tolist()), {"not an upload", "wrong names"}),
    "a sparse tensor": (on_first(lambda value: value.to_sparse()), {"not an upload", "wrong names"}),
    "other layers": (lambda a: with_upload(a, sent=~a.upload.sent), {"wrong layers"}),
    "a mask too long": (lambda a: with_upload(a, sent=a.upload.sent.repeat(2)), {"wrong shape"}),
    "an extra nobody asked for": (lambda a: with_upload(a, extras={"note": torch.zeros(1)}), {"wrong names"}),
    "one nan in an extra": (with_nan_in_an_extra, {"not finite", "wrong names", "wrong dtype"}),
    "an update too long": (on_first(lambda value: value + 1e6), {"norm too large", "wrong names"}),
    "garbage": (lambda a: a._replace(upload=b"\x80\x04garbage"), {"not an upload"}),  # type: ignore[arg-type]
    "garbage for tensors": (lambda a: with_upload(a, tensors=[1, 2, 3]), {"not an upload"}),
    "a model that is not finite": (lambda a: a._replace(finite=False), {"not finite"}),
    "an exception": (lambda a: Failure("raised", "ValueError: no"), {"raised"}),
    "nothing": (lambda a: NO_ANSWER, {"no answer"}),
}

ROUNDS = range(1, len(KINDS) + 1)
BOUND = 1000.0  # no honest update of the toy federation is so many times longer than the median


def sends(engine: str, send: Send, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, client BAD's answers are changed on their way."""
    kind = ENGINES[engine]
    train = kind.train

    def changed(self: Any, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers = train(self, cohort, downloads)
        return [send(a) if client == BAD else a for client, a in zip(cohort.ids.tolist(), answers, strict=True)]

    monkeypatch.setattr(kind, "train", changed)


def all_rounds(name: str) -> Played:
    learning = {"learning_rounds": "all"} if name == "pfedla-held-out" else {}
    algorithm = make(name, batch_norm=None, batch_size=10, **learning)
    return play(algorithm, toy_federation(), rounds=ROUNDS, threads=1, norm_bound=BOUND)


def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, client BAD is never drawn: the others of its cohort are alone."""

    def without(*args: Any) -> Cohort:
        cohort = sample_cohort(*args)
        return cohort.only((cohort.ids != BAD).nonzero().squeeze(1))

    monkeypatch.setattr(pfedla.core.rounds, "sample_cohort", without)


@pytest.mark.parametrize("name", [*methods(), "pfedla-held-out"])
def test_a_bad_upload_leaves_the_others_as_if_its_sender_were_absent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind a round: after each, everybody's state and evaluation are those of the run without the sender."""
    with monkeypatch.context() as patch:
        absent(patch)
        expected, expected_clients = all_rounds(name)
    sends("threaded", lambda answer: next(kinds)[0](answer), monkeypatch)
    kinds = iter(KINDS.values())
    played, clients = all_rounds(name)
    for (kind, (_, reasons)), one, other in zip(KINDS.items(), played, expected, strict=True):
        assert list(one.failures) == [BAD], kind
        assert one.failures[BAD].reason in reasons, kind
        assert_same(flat(one.server), flat(other.server))
        assert torch.equal(one.evaluation.loss, other.evaluation.loss), kind
        assert torch.equal(one.evaluation.accuracy, other.evaluation.accuracy), kind
    assert_same(clients, expected_clients)


@pytest.mark.parametrize("clients", [2, 10, 33])
@pytest.mark.parametrize("name", methods(variants=True))
def test_what_a_client_is_sent_does_not_depend_on_who_else_is_in_the_cohort(name: str, clients: int) -> None:
    """Not in a single bit: else a client's absence would be felt by the others before it is even missed."""
    algorithm = make(name, batch_norm=None)
    draws = torch.Generator().manual_seed(clients)
    server = algorithm.init_server(clients, 0)
    server = {
        group: {key: value + 0.1 * torch.randn(value.shape, generator=draws) if value.is_floating_point() else value
                for key, value in part.items()}
        for group, part in server.items()
    }  # fmt: skip
    all_of_them = everyone(torch.full((clients,), 9), 3, 0)
    among_all = algorithm.download(server, all_of_them)
    for count in (1, 2, clients // 2, clients - 1):
        rows = torch.randperm(clients, generator=draws)[:count].sort().values
        alone, expected = algorithm.download(server, all_of_them.only(rows)), among_all.rows(rows)
        assert_same(alone.tensors, expected.tensors)
        assert_same(alone.extras, expected.extras)
        assert torch.equal(alone.sent, expected.sent)


def test_nothing_that_a_clients_code_returns_gets_past_the_engine(federation: Federation) -> None:
    """Another private state, another loss, no upload: that client is left out and its state stays."""
    kind = type(make("fedrep"))

    def broken(change: Callable[[LocalResult], LocalResult]) -> Algorithm:
        class Broken(kind):  # type: ignore[misc, valid-type]
            def local_update(self, client: Any, download: Payload, data: Any) -> LocalResult:
                result = super().local_update(client, download, data)
                return change(result) if len(data.y) == 20 else result  # client 3 has 20 examples

        return dataclasses.replace(Broken(task=algorithm.task, training=algorithm.training))

    algorithm = make("fedrep")
    changes: list[Callable[[LocalResult], LocalResult]] = [
        lambda r: r._replace(client={}),
        lambda r: r._replace(client={name: value[None] for name, value in r.client.items()}),
        lambda r: r._replace(loss=torch.zeros(3)), lambda r: r._replace(loss=0.5), lambda r: r._replace(upload=None),
        lambda r: r._replace(upload=r.upload._replace(tensors={n: v.tolist() for n, v in r.upload.tensors.items()})),
        lambda r: r._replace(model=None),
    ]  # fmt: skip
    for change in changes:
        played, clients = play(broken(change), federation, rounds=range(1, 3))
        assert all(list(one.failures) == [3] for one in played)
        assert_same({n: v for n, v in take(clients, 3).items() if n != "__trained__"}, algorithm.init_client())


@pytest.mark.parametrize("name", methods("fedavg", "pfedla", "heurpfedla"))
def test_the_vectorized_engine_leaves_the_others_as_if_it_had_not_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make(name, batch_norm=None)
    ends = []
    for kind in ("nothing", "one nan"):
        with monkeypatch.context() as patch:
            sends("vectorized", KINDS[kind][0], patch)
            ends.append(play(algorithm, toy_federation(), engine="vectorized"))
    (played, clients), (expected, expected_clients) = ends
    assert_same(flat(played[-1].server), flat(expected[-1].server))
    assert_same(clients, expected_clients)


@pytest.mark.parametrize("name", methods())
def test_an_honest_upload_is_what_the_method_says_it_is(name: str, federation: Federation) -> None:
    played, _ = play(make(name, batch_norm=None), federation, participation=0.7)
    assert all(not one.failures and len(one.cohort.ids) == 4 for one in played)


@pytest.mark.parametrize("name", ["fedavg", "pfedla", "heurpfedla", "fedamp", "fedfomo", "layer-similarity"])
def test_the_order_of_the_names_in_an_upload_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make(name, batch_norm=True)
    straight = play(algorithm, toy_federation())
    sends("threaded", lambda a: with_upload(a, tensors=dict(reversed(a.upload.tensors.items()))), monkeypatch)
    shuffled = play(algorithm, toy_federation())
    assert not shuffled[0][-1].failures
    assert_same(flat(straight[0][-1].server), flat(shuffled[0][-1].server))


def poisoned(federation: Federation) -> Federation:
    """Client BAD has a label that no class has: its training raises."""
    bad = federation.train[BAD]._replace(y=federation.train[BAD].y.clone())
    bad.y[:] = 77
    return Federation([*federation.train[:BAD], bad, *federation.train[BAD + 1 :]], federation.test, federation.classes)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", methods("fedavg", "fedavg-ft", "pfedla", "heurpfedla"))
def test_a_client_that_really_raises_is_left_out_alone(name: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With both engines as if it were not there: a group that fails is computed again without those who made it fail."""
    algorithm = make(name, batch_norm=None)
    federation = poisoned(toy_federation())
    played, clients = play(algorithm, federation, engine=engine)
    assert all(one.failures.keys() == {BAD} and one.failures[BAD].reason == "raised" for one in played)
    assert "out of bounds" in played[0].failures[BAD].detail
    absent(monkeypatch)
    expected, expected_clients = play(algorithm, federation, engine=engine)
    assert_same(flat(played[-1].server), flat(expected[-1].server))
    assert_same(clients, expected_clients)
    others = torch.arange(len(federation)) != BAD
    assert torch.equal(played[-1].evaluation.loss[others], expected[-1].evaluation.loss[others])


def test_the_end_of_a_run_with_a_client_that_raises(federation: Federation) -> None:
    """FedAvg-FT's personal model is fine-tuned on the client's data, so not even its evaluation works."""
    result = simulate(poisoned(federation), TinyNet(), "fedavg-ft", rounds=2)
    assert result.failures == {BAD: {"raised": 2}}
    assert result.refused_uploads == 0  # it never sent any
    assert "nan" not in repr(result)
    assert result.accuracy.isnan().nonzero().squeeze(1).tolist() == [BAD]
    assert [bool(model) for model in result.models] == [client != BAD for client in range(6)]


def test_a_run_of_which_nothing_comes_stops_and_says_why(federation: Federation) -> None:
    bad = [examples._replace(y=torch.full_like(examples.y, 9)) for examples in federation.train]
    rounds: list[int] = []
    with pytest.raises(PfedlaError, match=r"in 3 rounds in a row .* round 3; client 0: raised .*out of bounds") as caught:
        simulate(
            Federation(bad, federation.test, federation.classes), TinyNet(), "fedavg", rounds=50, max_failed_rounds=3,
            engine="threaded", on_round=lambda played: rounds.append(played.round),
        )  # fmt: skip
    assert rounds == [1, 2, 3]
    assert isinstance(caught.value.__cause__, IndexError)  # where it happened is not lost


def test_a_sound_round_in_between_lets_the_run_go_on(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    train = ENGINES["threaded"].train

    def every_third(self: Any, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers = train(self, cohort, downloads)
        return answers if cohort.round % 3 == 0 else [NO_ANSWER] * len(answers)

    monkeypatch.setattr(ENGINES["threaded"], "train", every_third)
    result = simulate(federation, TinyNet(), "pfedla", rounds=9, max_failed_rounds=3, engine="threaded")
    assert result.failures == {client: {"no answer": 6} for client in range(6)}
    assert result.refused_uploads == 0


# The norm bound


def test_the_norm_is_that_of_the_update_where_the_server_knows_it() -> None:
    upload = Payload({"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0]), "steps": torch.tensor(99)}, torch.ones(1))
    assert update_norm(upload, {"a": torch.tensor([3.0, 1.0])}) == 4.0
    huge = Payload({"a": torch.tensor([3e38])}, torch.ones(1))
    assert update_norm(huge, {"a": torch.tensor([-3e38])}) == pytest.approx(6e38)


@pytest.mark.parametrize("name", ["heurpfedla", "fedfomo"])
def test_the_norm_is_measured_from_where_a_client_really_began(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was not sent: HeurpFedLA's retained layer, FedFomo's own model."""
    algorithm = make(name, batch_size=50, epochs=2, lr=1e-12)  # nobody moves, so the norms are those of rounding
    if name == "fedfomo":
        algorithm = make(name, batch_size=50, epochs=2, lr=1e-12, candidates=1, epsilon=0.0)
    moving = make(name, batch_size=5, lr=0.3)
    before, clients = play(moving, toy_federation(), rounds=range(1, 4))
    cohort = everyone(toy_federation().num_examples, 4, 0)
    server = before[-1].server
    downloads = algorithm.download(server, cohort)
    with create_engine("threaded", algorithm, toy_federation(), device="cpu", threads=1, recalibrate="never") as engine:
        engine.load(clients)
        answers = engine.train(cohort, downloads)
    starts = algorithm.starts(server, cohort, downloads)
    for row, answer in enumerate(answers):
        if name == "fedfomo" and (downloads.extras and answer.upload.extras["weights"].relu().sum() > 0):
            continue  # it mixed another model into its own: that is part of its way
        assert update_norm(answer.upload, take(starts, row)) < 1e-6


@pytest.mark.parametrize(
    ("norms", "gone"),
    [
        ([1, 2, 3, 4, 5], []), ([1, 1, 1, 1, 10], [4]), ([1, 1, 1, 100, 10], [3, 4]), ([5], []), ([], []),
        ([0, 0, 0, 1], []), ([1, 1, 3.0], []), ([1, 1, 3.1], [2]),
        ([2, 3, 4, 11, 1000], [3, 4]),  # 11 is within three times 4, but without the 1000 the median is 3.5
        ([2, 3, 4, 10, 1000], [4]),
    ],
)  # fmt: skip
def test_who_is_too_long(norms: list[float], gone: list[int]) -> None:
    assert sorted(too_long(dict(enumerate(norms)), 3.0)) == sorted(gone)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=9), st.floats(1, 10))
def test_who_stays_does_not_depend_on_those_who_go(norms: list[float], bound: float) -> None:
    everybody = dict(enumerate(norms))
    gone = list(too_long(everybody, bound))  # the longest first
    for some in range(len(gone) + 1):
        left = {row: norm for row, norm in everybody.items() if row not in gone[:some]}
        assert list(too_long(left, bound)) == gone[some:]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_upload_whatever_it_is_gets_past_or_stops_the_check(data: st.DataObject) -> None:
    """Random nonsense in place of any part of an upload is refused, never raised over."""
    algorithm: Algorithm = make("pfedla")
    anything = st.one_of(
        st.none(), st.integers(), st.text(max_size=5), st.binary(max_size=5), st.lists(st.integers(), max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), st.integers(), max_size=3),
        st.just(np.zeros(3)), st.just(torch.zeros(2, 2)), st.just(MappingProxyType({"fc1.weight": torch.zeros(5, 6)})),
    )  # fmt: skip
    part = data.draw(st.sampled_from(["tensors", "sent", "extras", "all"]))
    nonsense = data.draw(anything)

    cohort = everyone(torch.tensor([9, 9]), 1, 0)
    downloads = algorithm.download(algorithm.init_server(2, 0), cohort)
    honest = Answer(downloads.rows(0)._replace(extras={}), torch.zeros(()), 0.5, 1.0, True)
    bad = honest._replace(upload=nonsense) if part == "all" else with_upload(honest, **{part: nonsense})
    accepted, failures = accept(algorithm, {}, cohort, downloads, [honest, bad])
    assert accepted.cohort.ids.tolist() == ([0, 1] if not failures else [0])
    assert bool(failures) != (part == "extras" and isinstance(nonsense, dict) and not nonsense)
