"""Encoded messages: each codec by itself, every method over them, and what a hostile client may send."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyNet, assert_same, engine_for, flat, make, methods, play
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

import pfedla
from pfedla.core.codecs import (
    BLOCK,
    DOWNLOAD,
    ESCAPE,
    LEVELS,
    PREFIX,
    UPLOAD,
    count_kept,
    decode,
    decode_gaps,
    encode,
    encode_gaps,
    encoded_size,
    init_links,
)
from pfedla.core.contracts import Algorithm, Cohort, Failure
from pfedla.core.errors import PfedlaError
from pfedla.core.layers import Params
from pfedla.core.rounds import Round, accept
from pfedla.core.settings import CodecName, Faults, WireSettings
from pfedla.data.federation import Federation
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment

CODECS: tuple[CodecName, ...] = ("float16", "bfloat16", "int8", "topk", "randk")
numbers = arrays("float32", st.integers(1, 700), elements=st.floats(-100, 100, width=32))
shares = st.floats(0.01, 0.5)
Ran = tuple[list[Round], Params]


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def round_trip(codec: CodecName, value: Tensor, share: float = 0.05, seed: int = 0) -> Tensor:
    data = encode(codec, value, share, stream(seed))
    assert (data.dtype, data.shape) == (torch.uint8, (encoded_size(codec, value.numel(), share),))
    return decode(codec, data, value, share, stream(seed))


# One tensor


@given(numbers)
def test_halves_are_near(x: Any) -> None:
    value = torch.from_numpy(x)
    for codec, relative in (("float16", 2**-11), ("bfloat16", 2**-8)):
        assert bool(((round_trip(codec, value) - value).abs() <= relative * value.abs() + 2**-25).all())


@given(numbers, st.integers(0, 99))
def test_int8_is_within_a_step_of_its_block(x: Any, seed: int) -> None:
    value = torch.from_numpy(x)
    for block, found in zip(value.split(BLOCK), round_trip("int8", value, seed=seed).split(BLOCK), strict=True):
        step = block.abs().max() / LEVELS
        assert bool(((found - block).abs() <= step * (1 + 1e-4) + 1e-37).all())


def test_int8_is_right_on_average() -> None:
    """Stochastic rounding is unbiased: with 4,000 draws the mean is within five standard errors of every number."""
    value, draws = torch.randn(40, generator=stream(1)), 4000
    mean = torch.stack([round_trip("int8", value, seed=seed) for seed in range(draws)]).double().mean(0)
    step = value.abs().max().double() / LEVELS
    assert bool(((mean - value).abs() <= 5 * step / 2 / draws**0.5 + 1e-6).all())
    assert not torch.equal(round_trip("int8", value, seed=0), round_trip("int8", value, seed=1))


@given(numbers, shares)
def test_topk_keeps_the_largest_and_nothing_else(x: Any, share: float) -> None:
    value = torch.from_numpy(x)
    found, kept = round_trip("topk", value, share), count_kept(value.numel(), share)
    bound = value.abs().sort(descending=True).values[kept - 1]
    is_kept = (found - value.half().float()).abs() == 0
    assert bool(is_kept[value.abs() > bound].all())
    assert bool((found[value.abs() < bound] == 0).all())
    assert int((found != 0).sum()) <= kept


@given(numbers, shares, st.integers(0, 99))
def test_randk_keeps_what_the_seed_says(x: Any, share: float, seed: int) -> None:
    value = torch.from_numpy(x)
    found, kept = round_trip("randk", value, share, seed), count_kept(value.numel(), share)
    chosen = torch.randperm(value.numel(), generator=stream(seed))[:kept]  # drawn at both ends, not sent
    expected = torch.zeros_like(value)
    expected[chosen] = value[chosen].half().float()
    assert torch.equal(found, expected)


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_any_indices_fit_into_their_gaps(drawn: tuple[int, set[int]]) -> None:
    count, chosen = drawn[0], torch.tensor(sorted(drawn[1]))
    gaps = encode_gaps(chosen, count)
    assert len(gaps) == len(chosen) + count // ESCAPE
    assert torch.equal(decode_gaps(gaps, count, len(chosen)), chosen)


@given(st.binary(min_size=1, max_size=200), st.integers(1, 3000), st.integers(1, 200))
def test_hostile_gaps_are_refused_or_indices(data: bytes, count: int, kept: int) -> None:
    gaps = torch.tensor(list(data), dtype=torch.uint8)
    try:
        indices = decode_gaps(gaps, count, kept)
    except PfedlaError:
        return
    assert len(indices) == kept
    assert bool((indices.diff() > 0).all())
    assert 0 <= int(indices[0]) <= int(indices[-1]) < count


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 3, 257)])
def test_shape_and_dtype_come_back(codec: CodecName, shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.float64):
        found = round_trip(codec, torch.ones(shape, dtype=dtype), 0.5)
        assert (found.shape, found.dtype) == (shape, dtype)


@settings(max_examples=30)
@given(st.sampled_from(CODECS), st.integers(0, 99))
def test_what_is_left_out_comes_later(codec: CodecName, seed: int) -> None:
    """Error feedback: what has arrived and what is still missing are what was to be sent; in the end all arrives."""
    draws, arrived = stream(seed), torch.zeros(300)
    target = torch.zeros(300)
    for number in range(100):
        target = target + torch.randn(300, generator=draws) * (number < 3)  # then it stands still
        missing = target - arrived
        sent = round_trip(codec, missing, 0.1, seed=number)
        torch.testing.assert_close(arrived + sent + (missing - sent), target)
        arrived = arrived + sent
    assert float((target - arrived).abs().max()) < (0.02 if codec != "randk" else 4.0)


# Every method


def coded(name: str, upload: CodecName = "int8", download: CodecName = "int8", **options: Any) -> Algorithm:
    algorithm = make(name, batch_norm=None, **options)
    return algorithm.model_copy(update={"wire": WireSettings(upload=upload, download=download)})


def run(algorithm: Algorithm, federation: Federation, **how: Any) -> Ran:
    server = {**algorithm.init_server(len(federation), 0), **init_links(algorithm, len(federation))}
    return play(algorithm, federation, **{"server": server, "rounds": range(1, 3), "participation": 0.5, **how})


QUICK = ("fedavg", "fedrep", "fedfomo", "heurpfedla", "pfedla-heldout")
EACH = pytest.mark.parametrize("name", methods(*QUICK))


@EACH
def test_a_method_continues_like_a_straight_run_and_both_ends_agree(name: str, federation: Federation) -> None:
    algorithm = coded(name)
    straight, clients = run(algorithm, federation)
    half, kept = run(algorithm, federation, rounds=range(1, 2), threads=1)
    rest, again = run(
        algorithm,
        federation,
        rounds=range(2, 3),
        server=half[-1].server,
        clients=kept,
        traffic=half[-1].traffic,
        threads=3,
    )
    assert not any(one.failures or one.evaluation_failures for one in straight)
    assert_same(flat(straight[-1].server), flat(rest[-1].server))
    assert_same(clients, again)
    assert straight[-1].traffic == rest[-1].traffic
    assert torch.equal(straight[-1].evaluation.loss, rest[-1].evaluation.loss)
    for group in (DOWNLOAD, UPLOAD):  # what the server believes that a client has is what it has
        assert straight[-1].server[group]
        for tensor, value in straight[-1].server[group].items():
            assert torch.equal(value, clients[f"{group}/{tensor}"])


@EACH
def test_threaded_equals_vectorized_up_to_a_step(name: str, federation: Federation) -> None:
    """A rounding difference may turn a stochastic rounding: by one step, so that few numbers differ by more than it."""
    algorithm = coded(name)
    one, other = (
        flat(run(algorithm, federation, engine=engine)[0][-1].server) for engine in ("threaded", "vectorized")
    )
    for tensor, value in one.items():
        if tensor.startswith(PREFIX):
            difference = (value - other[tensor]).abs()
            assert float(difference.max()) < 0.02, tensor
            assert float((difference > 1e-4).double().mean()) < 0.05, tensor


@EACH
def test_traffic_is_the_bytes_of_the_messages(name: str, federation: Federation) -> None:
    algorithm = coded(name)
    (first, *_), _ = run(algorithm, federation, rounds=range(1, 2))
    server, layers = algorithm.init_server(len(federation), 0), algorithm.task.layers
    cohort = Cohort.sample(federation.num_examples, 1, 0.5, 0)
    downloads = algorithm.download(server, cohort)
    for way, payload, counted in (
        ("download", downloads, first.traffic.down_bytes),
        ("upload", algorithm.upload_like(downloads.rows(0)), first.traffic.up_bytes),
    ):
        shapes = {name: value[0] if way == "download" else value for name, value in payload.tensors.items()}
        sent = payload.sent[0] if way == "download" else payload.sent
        extras = sum(value.nbytes // (len(cohort.ids) if way == "download" else 1) for value in payload.extras.values())
        due = sum(
            value.nbytes if name in layers.statistics else value.numel() + 4 * -(-value.numel() // BLOCK)
            for name, value in shapes.items()
            if sent[layers.index[name]]
        )
        assert counted == len(cohort.ids) * (due + extras)


@pytest.mark.parametrize("upload", ["int8", "topk"])
def test_both_ends_agree_whatever_is_not_sent(upload: CodecName, federation: Federation) -> None:
    """Retained layers that change, kept layers, clients that do not answer: the server knows what each client keeps."""
    options: dict[str, Any] = {"hypernetwork_lr": 30.0, "keep_below": 0.15, "ask_every": 3}
    algorithm = coded("heurpfedla", upload, "int8", **options)
    faults = Faults(dropout=0.3)
    ran, clients = run(algorithm, federation, rounds=range(1, 13), faults=faults, participation=0.8)
    server = ran[-1].server
    for group in (DOWNLOAD, UPLOAD):
        for tensor, value in server[group].items():
            assert torch.equal(value, clients[f"{group}/{tensor}"])
    retained = torch.cat([one.sent for one in ran])
    assert 0 < int(retained[:, 0].sum()) < len(retained)  # now this layer, now that
    assert server["kept"]["rounds"].any()
    fresh = server["kept"]["rounds"] == 0
    for tensor, value in server["models"].items():  # the copy that is mixed is the last upload, if there was one
        rows = fresh[:, algorithm.task.layers.index[tensor]]
        assert torch.equal(value[rows], server[UPLOAD][tensor][rows])


def test_none_keeps_nothing(federation: Federation) -> None:
    algorithm = make("heurpfedla")
    assert init_links(algorithm, 3) == {}
    with engine_for(algorithm, federation) as engine:
        assert not any(PREFIX in name for name in engine.state())
        assert engine.clients[0].own_state is engine.clients[0].state


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["fedavg", "heurpfedla", "pfedla-heldout-retained", "pfedla-compact", "fedrep-median"])
def test_every_codec_learns_about_what_plain_messages_do(codec: CodecName, name: str, federation: Federation) -> None:
    """With retained layers, neighbours, the sketch and a robust average; some clients do not answer."""
    how: dict[str, Any] = {"rounds": range(1, 9), "faults": Faults(dropout=0.2), "participation": 1.0}
    plain, encoded = (
        run(make(name, batch_norm=True), federation, **how),
        run(coded(name, codec, codec), federation, **how),
    )
    assert not encoded[0][-1].evaluation_failures
    losses = [float(ran[0][-1].evaluation.loss.mean()) for ran in (plain, encoded)]
    assert losses[1] < losses[0] + {"topk": 0.5, "randk": 0.5}.get(codec, 0.1)  # neighbours may be others
    assert encoded[0][-1].traffic.up_bytes < plain[0][-1].traffic.up_bytes


def test_a_refused_upload_advances_neither_end(federation: Federation) -> None:
    """An attacker that sends nan is refused in every round: what both ends keep of it is as at first."""
    algorithm = coded("fedavg")
    faults = Faults(attack="nan", attackers=0.3)
    ran, clients = run(algorithm, federation, faults=faults, participation=1.0)
    refused = list(ran[-1].failures)
    assert refused
    assert {failure.reason for failure in ran[-1].failures.values()} == {"not finite"}
    fresh = init_links(algorithm, len(federation))
    for group, part in fresh.items():
        for name, value in part.items():
            assert torch.equal(ran[-1].server[group][name][refused], value[refused])
            assert torch.equal(clients[f"{group}/{name}"][refused], value[refused])


@pytest.mark.parametrize("attack", ["sign-flip", "scale", "noise", "initial", "free-rider"])
def test_a_falsified_model_is_what_is_encoded(attack: Any, federation: Federation) -> None:
    faults = Faults(attack=attack, attackers=0.3)
    plain, _ = run(make("fedavg", batch_norm=None), federation, faults=faults, participation=1.0, rounds=range(1, 2))
    sent, _ = run(coded("fedavg"), federation, faults=faults, participation=1.0, rounds=range(1, 2))
    for name, value in plain[-1].server["model"].items():
        near = 0.01
        torch.testing.assert_close(sent[-1].server["model"][name], value, rtol=0, atol=near)


# A run

DIGITS = {"data": {"dataset": "digits", "clients": 3}, "training": {"local_epochs": 1}, "participation": 0.7}


@pytest.mark.slow
def test_a_run_resumes_and_can_be_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)
    wire = {"upload": "int8", "download": "topk", "share": 0.1}
    values = {**DIGITS, "algorithm": {"name": "heurpfedla", "keep_below": 0.2}, "wire": wire, "unseen_clients": 0.3}
    values["data"] = {"dataset": "digits", "clients": 4}
    one, two = (Experiment.parse({**values, "rounds": rounds}) for rounds in (2, 4))
    pfedla.run(one, tmp_path / "stopped")
    pfedla.run(two, tmp_path / "stopped", resume=True)
    pfedla.run(two, tmp_path / "straight")
    stopped, straight = (read_result(tmp_path / name / "result.json") for name in ("stopped", "straight"))
    for key in ("score", "traffic", "unseen", "failures"):
        assert stopped[key] == straight[key]
    assert straight["unseen"]["score"]["mean"] is not None
    assert straight["traffic"]["up_bytes"] > 0


def test_python_takes_the_codecs_by_name(federation: Federation) -> None:
    how: dict[str, Any] = {"rounds": 2, "lr": 0.1, "progress": False}
    plain = pfedla.simulate(federation, TinyNet(), "fedavg", **how)
    same = pfedla.simulate(federation, TinyNet(), "fedavg", share=0.1, **how)  # of a codec that is not on
    assert (same.scores.tolist(), same.traffic) == (plain.scores.tolist(), plain.traffic)
    encoded = pfedla.simulate(federation, TinyNet(), "fedavg", upload="randk", download="int8", share=0.1, **how)
    assert encoded.traffic.up_bytes < 0.1 * plain.traffic.up_bytes
    with pytest.raises(PfedlaError, match=r"wire\.upload"):
        pfedla.simulate(federation, TinyNet(), "fedavg", upload="zip", **how)


# Hostile messages


@pytest.mark.parametrize("codec", CODECS)
def test_hostile_uploads_are_refused(codec: CodecName, federation: Federation) -> None:
    algorithm, draws = coded("fedavg", codec, "none"), stream()
    server = {**algorithm.init_server(len(federation), 0), **init_links(algorithm, len(federation))}
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    downloads = algorithm.download(server, cohort)
    with engine_for(algorithm, federation) as engine:
        answers = engine.train(cohort, downloads)
    good = answers[0]
    name, data = next(iter(good.upload.tensors.items()))
    before = copy.deepcopy(server)

    def with_data(value: Any) -> Any:
        return good._replace(upload=good.upload._replace(tensors={**good.upload.tensors, name: value}))

    wrong = {
        "wrong shape": [data[:-1], torch.cat([data, data]), data[None], data[:0]],
        "wrong dtype": [data.view(torch.int8), data.float()],
        "not an upload": [data.to_sparse(), None],
    }
    if codec == "topk":
        wrong["not an upload"] += [torch.full_like(data, 255), torch.full_like(data, 254)]
    if codec != "topk":
        wrong["not finite"] = [torch.full_like(data, 255)]  # nan in both halves, in a scale, in the values
    for reason, values in wrong.items():
        for value in values:
            accepted, failures = accept(algorithm, server, cohort, downloads, [with_data(value), *answers[1:]])
            assert failures[0].reason == reason, value
            assert len(accepted.cohort.ids) == len(federation) - 1
    for _ in range(50):  # any bytes of the right number are a finite upload or a failure
        noise = torch.randint(0, 256, data.shape, generator=draws, dtype=torch.uint8)
        accepted, failures = accept(algorithm, server, cohort, downloads, [with_data(noise), *answers[1:]])
        assert isinstance(failures.get(0), Failure) or bool(accepted.uploads.tensors[name].isfinite().all())
    assert_same(flat(server), flat(before))
