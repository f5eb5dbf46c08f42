"""Whatever a client sends or does, the run continues, and the others are as if it had not answered."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FEATURES, TinyNet, add_noise, assert_same, engine_for, flat, make, methods, play, toy_federation
from torch import Tensor, nn

from pfedla import federation_of, simulate
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedrep import FedRep
from pfedla.core.contracts import Answer, Cohort, Failure, LocalResult, Payload, ServerState
from pfedla.core.errors import GaveUpError
from pfedla.core.faults import choose_attackers
from pfedla.core.layers import take
from pfedla.core.lora import lora
from pfedla.core.objectives import OBJECTIVES
from pfedla.core.rounds import (
    DIVERGED,
    LARGEST,
    NO_ANSWER,
    REMEMBERED,
    Move,
    Round,
    find_too_large,
    find_too_long,
    finite_mean,
    summarise,
)
from pfedla.core.settings import Faults, UploadSettings
from pfedla.data.federation import Federation, build_federation
from pfedla.data.partition import Data
from pfedla.engines.simulated import SimulatedEngine
from pfedla.runs.build import build_around
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunFolder
from pfedla.runs.run import Run

BAD = 2  # the client that sends it
BOUND = UploadSettings(norm_bound=1000.0)  # no honest update of the toy federation is so much longer than the median
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
    "a nested tensor": (on_first(lambda value: torch.nested.nested_tensor([value])), {"not an upload"}),
    "an update too long": (on_first(lambda value: value + 6e4), {"norm too large"}),
    "a value too large": (on_first(lambda value: put(value, 1e30)), {"values too large"}),
    "a tuple": (lambda a: tuple(a), {"not an upload"}),  # type: ignore[arg-type,return-value]
    "a text": (lambda a: "upload", {"not an upload"}),  # type: ignore[arg-type,return-value]
    "a score of its own kind": (lambda a: a._replace(score=type("Own", (float,), {})(0.5)), {"not an upload"}),
    "a score that is no share": (lambda a: a._replace(score=1.5), {"not an upload"}),
    "a loss that is none": (lambda a: a._replace(training_loss=torch.tensor(0.5, device="meta")), {"not an upload"}),
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
            ends.append(play(algorithm, toy_federation(), rounds=rounds, threads=1, uploads=BOUND))
    (expected, expected_clients), (played, clients) = ends
    paid = 0  # for uploads that are well-formed and of no use
    for (kind, (_, reasons)), one, other in zip(KINDS.items(), played, expected, strict=True):
        assert list(one.failures) == [BAD], kind
        assert one.failures[BAD].reason in reasons, kind
        more = one.traffic.up_bytes - other.traffic.up_bytes - paid
        assert (more > 0) == (one.failures[BAD].reason in DIVERGED), kind
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


def test_a_length_is_that_of_the_update_where_the_server_knows_its_start() -> None:
    tensors = {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0]), "steps": torch.tensor(99)}
    assert Move.measure(Payload(tensors, torch.ones(1)), {"a": torch.tensor([3.0, 1.0])}) == (4.0, 10**0.5)
    huge = Payload({"a": torch.tensor([3e38])}, torch.ones(1))
    assert Move.measure(huge, {"a": torch.tensor([-3e38])}).length == pytest.approx(6e38)


def test_a_length_is_measured_from_where_a_client_really_began() -> None:
    """Also where that was not sent, as HeurpFedLA's retained layer."""
    moving, still = (make("heurpfedla", lr=lr) for lr in (0.3, 1e-12))
    before, clients = play(moving, toy_federation())
    cohort, server = Cohort.everyone(toy_federation().num_examples, 4, 0), before[-1].server
    downloads = still.download(server, cohort)
    with engine_for(still, toy_federation()) as engine:
        engine.load(clients)
        answers = engine.train(cohort, downloads)
    starts = still.starts(server, cohort, downloads)
    assert all(Move.measure(answer.upload, take(starts, row)).length < 1e-6 for row, answer in enumerate(answers))


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
def test_one_large_upload_does_not_spread(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second round of eight, without a bound; then it sends as usual and has its weight with others again."""
    clean, _ = play(make(name), toy_federation(), rounds=range(1, 9))
    calls = iter(range(1, 9))
    sends = on_first(lambda value: torch.full_like(value, LARGEST))
    intercept(monkeypatch, lambda answer: sends(answer) if next(calls) == 2 else answer)
    algorithm = make(name)
    hit, _ = play(algorithm, toy_federation(), rounds=range(1, 9), uploads=UploadSettings(norm_bound="off"))
    assert not any(one.failures for one in hit)
    assert hit[-1].evaluation.loss.mean() < 1.2 * clean[-1].evaluation.loss.mean()
    after = {round: algorithm.alpha(hit[round - 1].server)[:, :, BAD] for round in (2, 3)}
    assert (after[2] == 0).all()
    assert (after[3][torch.arange(6) != BAD] > 0).all()


def too_long(lengths: list[float], past: dict[int, list[float]], bound: float = 3.0, start: float = 0.0) -> list[int]:
    return list(find_too_long({client: Move(one, start) for client, one in enumerate(lengths)}, past, bound))


def test_too_long_is_measured_once_by_the_last_updates_of_all_or_ones_own() -> None:
    # A first round, by its median; with the longest left out, 11 would be too long as well.
    assert too_long([2.0, 3.0, 4.0, 11.0, 1000.0], {}) == [4]
    assert too_long([0.0, 0.0, 0.0, 5.0, 6.0, 99.0], {}) == [5]  # who sends nothing new does not switch it off
    assert too_long([0.0, 0.0], {}) == []
    # Two clients, or a cohort of one, are enough once there have been rounds.
    assert too_long([1.0, 7.0], {0: [1.0, 1.0], 1: [2.0, 2.0, 2.0]}) == [1]
    assert too_long([7.0], {0: [1.0], 1: [2.0]}) == [0]
    # Who has always moved far is measured by itself, as if it were no more than 3 times as far as others.
    past = {0: [1.0], 1: [1.0], 2: [1.0], 3: [2.5], 4: [100.0]}
    assert too_long([1.0, 1.0, 3.1, 7.4, 8.9], past) == [2]
    assert too_long([1.0, 1.0, 2.9, 7.6, 9.1], past) == [3, 4]
    # A client that is new may move as far as the model is long: it may have much more data than others.
    assert too_long([1.0, 1.0, 20.0], {0: [1.0], 1: [1.0]}, start=20.0) == []
    assert too_long([4.0, 1.0, 21.0], {0: [1.0], 1: [1.0]}, start=20.0) == [0, 2]


def test_lengths_of_accepted_updates_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last few of each client, of those that moved and were accepted."""
    rounds: list[list[float]] = []

    def send(answer: Answer) -> Answer:
        rounds.append([])
        return on_first(lambda value: value + (6e4 if len(rounds) == 3 else 0))(answer)

    intercept(monkeypatch, send)
    played, _ = play(make("fedavg"), toy_federation(), rounds=range(1, 9))
    assert [list(one.failures) for one in played] == [[], [], [BAD], [], [], [], [], []]
    assert [len(one.lengths[BAD]) for one in played] == [1, 2, 2, 3, 4, 5, 5, 5]
    assert played[-1].lengths[BAD][-2] == played[-2].lengths[BAD][-1] < 100
    assert REMEMBERED == 5
    still, _ = play(make("fedavg", lr=1e-30), toy_federation(), rounds=range(1, 3))
    assert still[-1].lengths == {}


def test_values_that_no_training_brings_about() -> None:
    """Beyond float16 in a parameter; a variance of statistics may be its square, and a counter counts for long."""
    layers = make("fedavg", batch_norm=True).task.layers

    def refused(name: str, value: float, dtype: torch.dtype = torch.float32) -> bool:
        return find_too_large({name: torch.tensor([0.0, value]).to(dtype)}, layers) is not None

    assert [refused("fc1.weight", value) for value in (LARGEST, -LARGEST, 6.6e4, -1e30)] == [False, False, True, True]
    assert [refused("bn.running_var", value) for value in (1e9, 5e9)] == [False, True]
    counts = [refused("bn.num_batches_tracked", value, torch.int64) for value in (2e6, 1e15)]
    assert counts == [False, True]
    assert find_too_large({"fc1.weight": torch.empty(0), "bn.running_var": torch.tensor([True])}, layers) is None


HUGE = {10: 1e30, 11: 1e6, 12: 6e4}  # what every number of one upload is, by round


@pytest.mark.parametrize("name", methods("fedavg", "fedrep", "pfedla", "pfedla-heldout"))
def test_huge_uploads_do_no_harm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten honest rounds, a client's numbers are huge: it ends as if that client had not answered."""
    ends = []
    for send in (fill, lambda answer, value: NO_ANSWER):
        with monkeypatch.context() as patch:
            intercept_rounds(patch, send)
            options = {"warm_up": 2} if name == "pfedla-heldout" else {}
            algorithm = make(name, batch_norm=None, batch_size=10, **options)
            ends.append(play(algorithm, toy_federation(), rounds=range(1, 14)))
    (played, clients), (expected, expected_clients) = ends
    refused = [] if name == "local" else [BAD]  # which sends nothing
    assert [list(one.failures) for one in played[9:]] == [refused, refused, refused, []]
    assert not any(one.failures for one in played[:9])
    if refused:
        assert_same(flat(played[-1].server), flat(expected[-1].server))
        assert_same(clients, expected_clients)


def fill(answer: Answer, value: float) -> Answer:
    tensors = {n: torch.full_like(v, value) if v.is_floating_point() else v for n, v in answer.upload.tensors.items()}
    return with_upload(answer, tensors=tensors)


def intercept_rounds(monkeypatch: pytest.MonkeyPatch, send: Callable[[Answer, float], Answer | Failure]) -> None:
    train = SimulatedEngine.train

    def changed(self: Any, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        answers, value = train(self, cohort, downloads), HUGE.get(cohort.round)
        return [send(one, value) if value and row == BAD else one for row, one in enumerate(answers)]  # type: ignore[arg-type]

    monkeypatch.setattr(SimulatedEngine, "train", changed)


def test_a_client_that_claims_many_examples_counts_for_no_more_than_the_cap() -> None:
    federation = toy_federation()
    federation.num_examples[BAD] = 2**39
    ends = {}
    for most in ("off", 20, 1):
        played, _ = play(make("fedavg"), federation, rounds=range(1, 2), uploads=UploadSettings(max_examples=most))
        ends[most] = flat(played[-1].server)
        assert played[0].cohort.num_examples.tolist() == [
            size if most == "off" else min(size, most) for size in federation.num_examples.tolist()
        ]
    federation.num_examples[BAD] = 20
    honest, _ = play(make("fedavg"), federation, rounds=range(1, 2))
    assert_same(flat(honest[-1].server), ends[20])
    federation.num_examples[:] = 7
    equal, _ = play(make("fedavg"), federation, rounds=range(1, 2))
    assert_same(flat(equal[-1].server), ends[1], 1e-6)


def test_numbers_that_are_not_finite_blank_nothing_but_themselves() -> None:
    assert finite_mean(torch.tensor([1.0, torch.inf, torch.nan, 3.0])) == 2.0
    assert finite_mean(torch.tensor([torch.inf])) is None
    assert finite_mean(torch.empty(0)) is None
    summary = summarise(torch.tensor([1.0, -torch.inf, torch.nan, 3.0], dtype=torch.float64))
    assert (summary["mean"], summary["worst"], summary["per_client"]) == (2.0, 1.0, [1.0, None, None, 3.0])


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_run_whose_client_reports_no_numbers_is_recorded(
    number: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its score of a regression may be anything: the checkpoint, the lines and the result hold the others'."""
    silly = {"training_loss": torch.tensor(number), "score": number, "loss": number}
    intercept(monkeypatch, lambda answer: answer._replace(**silly))
    x = torch.randn(90, FEATURES, generator=torch.Generator().manual_seed(0))
    federation = federation_of(x.numpy(), x.sum(1).numpy(), np.arange(90) // 30, task="regression")
    experiment = Experiment.parse({"rounds": 2, "algorithm": {"name": "fedavg"}, "model": "tests:none"})
    built = build_around(experiment, federation, nn.Linear(FEATURES, 1), OBJECTIVES["regression"])
    result = Run(built, RunFolder(tmp_path / "r")).complete()
    lines = [json.loads(line) for line in (tmp_path / "r" / "rounds.jsonl").read_text().splitlines()]
    assert all(math.isfinite(line[key]) for line in lines for key in ("training_loss", "score_after_training"))
    assert result["score_after_training"]["per_client"][BAD] is None
    assert result["failures"] == {}


SPLITS: dict[str, dict[str, Any]] = {
    "classes": {"partition": "classes", "classes_per_client": 2},
    "dominant": {"partition": "dominant"},
    "dirichlet": {"partition": "dirichlet", "beta": 0.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", methods())
def test_the_default_bound_refuses_no_honest_client(name: str, seed: int) -> None:
    for split in SPLITS.values():
        data = Data(dataset="digits", clients=10, samples_per_client=90, **split)
        _, federation = build_federation(data, seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            hidden = nn.Linear(64, 32), nn.BatchNorm1d(32) if name == "fedbn" else nn.Identity(), nn.ReLU()
            module = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
            module = lora(module, 4, 8.0, ["1"]) if name == "fedsa-lora" else module
        rounds: list[Round] = []
        simulate(federation, module, name, rounds=30, local_epochs=2, lr=0.05, seed=seed, on_round=rounds.append)
        assert not any(one.failures for one in rounds)
        assert rounds[-1].lengths or name == "local"


@pytest.mark.slow
@pytest.mark.parametrize("name", methods())
def test_a_run_with_one_upload_of_1e30_ends_like_the_run_without_it(name: str) -> None:
    """In round 10 of 20 on digits, by two of ten clients: the others end within three points."""
    _, federation = build_federation(Data(dataset="digits", clients=10, partition="dominant"), 0)
    once = Faults(attack="scale", attackers=0.2, attack_scale=1e30, attack_from=10, attack_until=10)
    honest = [client for client in range(10) if client not in choose_attackers(once, 10, 0).tolist()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = nn.Linear(64, 32), nn.BatchNorm1d(32) if name == "fedbn" else nn.Identity(), nn.ReLU()
        module = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(32, 10))
        module = lora(module, 4, 8.0, ["1"]) if name == "fedsa-lora" else module
    clean, hit = (simulate(federation, module, name, rounds=20, lr=0.05, faults=one) for one in (None, once))
    means = [one.accuracy[honest].mean().item() for one in (clean, hit)]
    assert means[1] == pytest.approx(means[0], abs=0.03)
    assert sum(map(len, hit.failures.values())) == (0 if name == "local" else 2)
