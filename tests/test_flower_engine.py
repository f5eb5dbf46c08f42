"""Every method over Flower's messages, without processes: what a site computes, keeps and sends is what a simulation does."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import methods
from flower_grid import LoopbackGrid, deployed, served
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from safetensors.torch import load_file

import pfedla
from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.faults import Faults
from pfedla.flower.codec import HEADER_BYTES
from pfedla.flower.layout import OwnData, planned, write_deployment
from pfedla.flower.plan import Plan
from pfedla.flower.site import Site
from pfedla.runs.experiment import Experiment
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.result_file import read_result

DIGITS = {"rounds": 2, "data": {"dataset": "digits", "clients": 3}, "training": {"local_epochs": 2}}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)  # they take most of the time, and are tested elsewhere


def values_of(name: str, **more: Any) -> dict[str, Any]:
    learning = {"warm_up": 0}  # the runs are shorter than the warm-up
    options = {"pfedla": learning, "heurpfedla": {"retained_layers": 2, **learning}, "fedfomo": {"candidates": 1}}.get(name, {})
    return {**DIGITS, "algorithm": {"name": name, **options}, **more}


def with_batch_norm(folder: Path) -> dict[str, Any]:
    """BatchNorm's statistics never leave a site; the paper's CNN needs larger images than the digits are."""
    draws = np.random.default_rng(0)
    y = np.arange(96) % 4
    np.savez(
        folder / "photos.npz", x=(draws.integers(0, 99, (96, 1, 16, 16)) + 30 * y[:, None, None, None]).astype(np.uint8), y=y
    )
    return {"model": "cnn-bn", "data": {"dataset": str(folder / "photos.npz"), "clients": 3, "partition": "iid"}}


def personal(folder: Path, client: int) -> dict[str, torch.Tensor]:
    (path,) = folder.glob(f"site-{client}/*/models/client-{client}.safetensors")
    return load_file(path)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def assert_as_simulated(plan: Plan, sites: Path, simulated: Path, clients: range = range(3)) -> None:
    """Accuracies, traffic, alpha and personal models, bit for bit."""
    ours, theirs = (read_result(folder / "result.json") for folder in (plan.folder, simulated))
    for key in ("accuracy", "accuracy_after_training", "loss", "traffic", "failures"):
        assert ours[key] == theirs[key], key
    assert (plan.folder / "alpha.safetensors").exists() == (simulated / "alpha.safetensors").exists()
    if (simulated / "alpha.safetensors").exists():
        assert same(*(load_file(folder / "alpha.safetensors") for folder in (plan.folder, simulated)))
    for client in clients:
        assert same(personal(sites, client), load_file(simulated / "models" / f"client-{client}.safetensors"))
    assert not list((plan.folder / "models").iterdir())  # none comes to the server


def threaded(plan: Plan, out: Path) -> Path:
    return pfedla.run(plan.experiment, out)


@pytest.mark.parametrize("name", methods("pfedla", "fedfomo"))
def test_a_method_over_messages_is_the_method(name: str, tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of(name, **(with_batch_norm(tmp_path) if name in ("fedbn", "pfedla") else {})))
    served(LoopbackGrid(plan, tmp_path))
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))
    described = [json.loads((folder / "federation.json").read_text()) for folder in (plan.folder, tmp_path / "simulated")]
    assert described[0] == described[1]


@pytest.mark.parametrize("name", ["heurpfedla", pytest.param("fedrep", marks=pytest.mark.slow)])
def test_the_wire_carries_the_accounted_bytes_and_a_header_for_every_tensor(name: str, tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of(name))
    grid = LoopbackGrid(plan, tmp_path)
    served(grid)
    traffic = read_result(plan.folder / "result.json")["traffic"]
    wire = json.loads((plan.folder / "deployment.json").read_text())["wire"]
    for way in ("down", "up"):
        assert wire[way]["num_bytes"] == traffic[f"{way}_bytes"] + HEADER_BYTES * wire[way]["num_arrays"]
    training = [message.content for message in grid.sent if message.metadata.message_type == "train"]
    arrays = [array for content in training for record in content.array_records.values() for array in record.values()]
    assert (sum(len(array.data) for array in arrays), len(arrays)) == tuple(wire["down"].values())
    layers = {name.split(".")[0] for content in training for name in content.array_records["tensors"]}
    assert len(layers) < len({name.split(".")[0] for name in personal(tmp_path, 0)}) or name == "heurpfedla"
    if name == "heurpfedla":  # from the second round on some layers stay at home
        assert wire["down"]["num_arrays"] < wire["up"]["num_arrays"]


@pytest.mark.parametrize("name", ["heurpfedla", pytest.param("pfedme", marks=pytest.mark.slow)])
def test_a_server_that_stops_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """It stops in the middle of round 2, when the sites have already trained: their newer state must not count."""
    plan = deployed(tmp_path / "fed", values_of(name, rounds=3))
    grid = LoopbackGrid(plan, tmp_path)

    def power_cut(client: int, message: Message) -> Message:
        if (grid.round, client, message.metadata.message_type) == (2, 2, "train"):
            raise KeyboardInterrupt
        return message

    grid.change = power_cut
    with pytest.raises(KeyboardInterrupt):
        served(grid)
    again = LoopbackGrid(plan, tmp_path)
    said = served(again, resume=True)
    assert any("going on after round 1" in line for line in said)
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))


@pytest.mark.slow
def test_what_was_not_taken_advances_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client 1's answer to round 2 is lost on the way: the same as if it had been absent."""
    plan = deployed(tmp_path / "fed", values_of("heurpfedla", rounds=3))
    grid = LoopbackGrid(plan, tmp_path)
    grid.change = lambda client, message: (
        None if (grid.round, client, message.metadata.message_type) == (2, 1, "train") else message
    )
    served(grid)
    monkeypatch.setattr(Faults, "answering", lambda self, cohort: ~((cohort.ids == 1) & (cohort.round == 2)))
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))
    assert read_result(plan.folder / "result.json")["failures"] == {"1": {"no answer": 1}}


@pytest.mark.slow
def test_a_cohort_of_which_nobody_is_there_is_a_failed_round_not_the_end(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("fedavg", rounds=6, evaluate_every=6, participation=0.3))  # one client a round
    grid = LoopbackGrid(plan, tmp_path)
    grid.absent = lambda client, round: client == 0 and round > 0
    served(grid)
    failures = read_result(plan.folder / "result.json")["failures"]
    assert failures.keys() == {"0"}


def test_what_a_client_says_stays_in_one_line(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=1))
    grid = LoopbackGrid(plan, tmp_path)
    text = ConfigRecord({"refusal": "no\nfinished: all is well\x1b[2J"})
    grid.change = lambda client, message: replaced(message, "config", text) if client == 1 else message
    said = served(grid)
    assert "client 1 cannot join: no finished: all is well [2J" in said


def test_a_finished_run_that_is_resumed_needs_nobody(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=1))
    served(LoopbackGrid(plan, tmp_path))
    before = (plan.folder / "deployment.json").read_text()
    grid = LoopbackGrid(plan, tmp_path)
    said = served(grid, resume=True)
    assert not grid.sent
    assert any("is finished" in line for line in said)
    assert (plan.folder / "deployment.json").read_text() == before


def test_a_client_that_comes_late_takes_part_from_the_next_round_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=3))
    grid = LoopbackGrid(plan, tmp_path)
    grid.absent = lambda client, round: client == 2 and round < 1
    said = served(grid)
    assert any("2 of 3 clients have joined; not there yet: 2" in line for line in said)
    monkeypatch.setattr(Faults, "answering", lambda self, cohort: ~((cohort.ids == 2) & (cohort.round == 1)))
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))


@pytest.mark.slow
def test_with_too_few_clients_it_waits_then_stops_and_can_go_on(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla"), min_clients=3)
    grid = LoopbackGrid(plan, tmp_path)
    grid.absent = lambda client, round: client == 1
    with pytest.raises(GaveUpError, match=r"only 2 of 3 clients are there \(0, 2\), fewer than min_clients = 3"):
        served(grid)
    assert not plan.folder.exists()  # nothing was learned: the folder is free for the next try
    grid.absent = lambda client, round: client == 1 and len(grid.sent) > 8  # after the first round
    with pytest.raises(GaveUpError, match="fewer than min_clients"):
        served(grid)
    grid.absent = lambda client, round: False
    served(grid, resume=True)
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))


@pytest.mark.slow
def test_client_i_is_the_node_with_the_ith_key(tmp_path: Path) -> None:
    """Whatever the nodes' numbers, names and order; a node with a key of nobody is left out."""
    plan = deployed(tmp_path / "fed", values_of("pfedla"))
    grid = LoopbackGrid(plan, tmp_path)
    grid.nodes, grid.keys = {7: 2, 8: 0, 9: 1}, {7: grid.keys[102], 8: grid.keys[100], 9: grid.keys[101]}
    grid.nodes[6], grid.keys[6] = 0, b"-----BEGIN PUBLIC KEY-----\nsomebody's\n-----END PUBLIC KEY-----\n"
    said = served(grid)
    assert any("node 6 ('node-6') has none of the clients' keys: it is left out" in line for line in said)
    assert all(message.metadata.dst_node_id != 6 for message in grid.sent)
    assert_as_simulated(plan, tmp_path, threaded(plan, tmp_path / "simulated"))


def test_another_clients_partition_is_refused_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla"))
    grid = LoopbackGrid(plan, tmp_path)
    grid.config[1]["partition-id"] = 0
    said = served(grid)
    sentence = "partition-id = 0 is another's: this node's key is that of client 1"
    assert any(f"client 1 cannot join: {sentence}" in line for line in said)
    assert f"pfedla: {sentence}" in capsys.readouterr().err
    assert read_result(plan.folder / "result.json")["failures"] == {"1": {"no answer": 2}}


# What sites bring


def own_file(path: Path, shape: tuple[int, ...] = (5,), labels: str = "abc", dtype: type = np.float32, seed: int = 0) -> Path:
    draws = np.random.default_rng(seed)
    y = draws.permutation(np.repeat(np.array(list(labels)), 12))
    x = (draws.normal(size=(len(y), *shape)) * 40 + 100 + 20 * (y == labels[0]).reshape(-1, *(1 for _ in shape))).astype(dtype)
    np.savez(path, x=x, y=y, test=np.arange(len(y)) % 3 == 0)
    return path


def own_plan(folder: Path, shape: str = "5", *, pixels: bool = False, **more: Any) -> Plan:
    values = {"rounds": 2, "data": {"clients": 2}, "training": {"lr": 0.001}, "algorithm": {"name": "pfedla"}}
    return deployed(folder, values, OwnData.of(shape, "a,b,c", pixels), **more)


@pytest.mark.parametrize("pixels", [False, True])
def test_sites_bring_their_own_data(pixels: bool, tmp_path: Path) -> None:
    shape, dtype = ((1, 8, 8), np.uint8) if pixels else ((5,), np.float32)
    plan = own_plan(tmp_path / "fed", "1,8,8" if pixels else "5", pixels=pixels)
    grid = LoopbackGrid(plan, tmp_path)
    first = own_file(tmp_path / "mine.npz", shape, dtype=dtype)
    with np.load(own_file(tmp_path / "other.npz", shape, "cb", dtype, seed=1)) as arrays:  # not all classes, as a folder
        (tmp_path / "theirs").mkdir()
        for name in arrays.files:
            np.save(tmp_path / "theirs" / f"{name}.npy", arrays[name])
    grid.config[0]["data"], grid.config[1]["data"] = str(first), str(tmp_path / "theirs")
    served(grid)
    result = read_result(plan.folder / "result.json")
    assert (result["dataset"], result["clients"]) == ("sites", 2)
    assert result["accuracy"]["mean"] > 0
    described = json.loads((plan.folder / "federation.json").read_text())
    assert (described["train"], described["test"], described["fingerprint"]) == ([], [], "")  # not told
    assert json.loads((plan.folder / "deployment.json").read_text())["examples"] == [24, 16]
    # At the site, what it has kept is a run folder: its model can be tested and taken out there.
    (site,) = (tmp_path / "site-1").glob("*/result.json")
    for data in (tmp_path / "other.npz", tmp_path / "theirs"):
        tested = evaluate_personal(load_personal(site.parent, "1"), data)
        assert tested["accuracy"] == result["accuracy"]["per_client"][1]
    with pytest.raises(PfedlaError, match="give a file or folder with --data"):
        evaluate_personal(load_personal(site.parent, "1"), None)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"shape": (6,)}, "mine: examples of shape (6,), this federation takes (5,)"),
        ({"labels": "abx"}, "unknown class 'x'; choose one of: a, b, c"),
        ({"shape": (1, 8, 8), "dtype": np.uint8}, "mine: examples of shape (1, 8, 8), this federation takes (5,)"),
        (None, "this federation's sites bring their own data: name yours with --node-config"),
    ],
)
def test_data_that_do_not_fit_are_refused_at_joining_on_both_sides(
    file: dict[str, Any] | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = own_plan(tmp_path / "fed")
    grid = LoopbackGrid(plan, tmp_path)
    grid.config[0]["data"] = str(own_file(tmp_path / "good.npz"))
    if file is not None:
        grid.config[1]["data"] = str(own_file(tmp_path / "mine.npz", **file))
    said = served(grid)
    assert any(line.startswith(f"client 1 cannot join: {sentence}") for line in said)
    assert f"pfedla: {sentence}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_is_not_tested_on_what_its_site_trained_on(tmp_path: Path) -> None:
    plan = own_plan(tmp_path / "fed")
    grid = LoopbackGrid(plan, tmp_path)
    for client in (0, 1):
        path = own_file(tmp_path / f"data-{client}.npz", seed=client)
        with np.load(path) as arrays:
            x, y = arrays["x"], arrays["y"]
        np.savez(path, x=x, y=y)  # no ready test split: the site holds one out
        grid.config[client]["data"] = str(path)
    served(grid)
    (site,) = (tmp_path / "site-1").glob("*/result.json")
    with pytest.raises(PfedlaError, match="the run trained on these examples"):
        evaluate_personal(load_personal(site.parent, "1"), tmp_path / "data-1.npz")


def test_a_site_tests_its_part_of_a_common_data_set(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("fedrep"))
    served(LoopbackGrid(plan, tmp_path))
    (site,) = (tmp_path / "site-2").glob("*/result.json")
    tested = evaluate_personal(load_personal(site.parent, "2"), None)
    assert tested["accuracy"] == read_result(plan.folder / "result.json")["accuracy"]["per_client"][2]


@pytest.mark.slow
def test_data_that_change_while_a_run_goes_on_are_refused(tmp_path: Path) -> None:
    plan = own_plan(tmp_path / "fed")
    grid = LoopbackGrid(plan, tmp_path)
    for client in (0, 1):
        grid.config[client]["data"] = str(own_file(tmp_path / f"data-{client}.npz", seed=client))

    def grow(client: int, message: Message) -> Message:
        if (grid.round, client, message.metadata.message_type) == (1, 1, "train"):
            own_file(tmp_path / "data-1.npz", seed=5)
        return message

    grid.change = grow
    served(grid)
    assert read_result(plan.folder / "result.json")["failures"] == {"1": {"refused": 1}}


@pytest.mark.slow
def test_a_site_whose_private_state_is_lost_says_so(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("fedrep"))
    grid = LoopbackGrid(plan, tmp_path)

    def lose(client: int, message: Message) -> Message:
        for path in (tmp_path / "site-1").glob("*/round-1.safetensors"):
            path.unlink()
        return message

    grid.change = lose
    said = served(grid)
    assert read_result(plan.folder / "result.json")["failures"] == {"1": {"refused": 1}}
    assert any("round-1.safetensors of this run is not in" in line for line in said)


def test_a_round_that_ends_too_late_takes_nothing_from_a_later_one(tmp_path: Path) -> None:
    """The server has given round 5 up; the site finishes it after round 6."""
    plan = deployed(tmp_path / "fed", values_of("fedrep"))
    config = {"client": 0, "run": "0" * 16}
    site = Site(plan, config, {"state": str(tmp_path / "site-0")})
    state = site.client.algorithm.init_client()
    for round, base in ((3, 2), (4, 3), (6, 4), (5, 4)):
        site._keep(round, base, state)
    versions = sorted(path.stem for path in site.folder.glob("round-*"))
    assert versions == ["round-3", "round-4", "round-5", "round-6"]
    site._keep(7, 6, state)
    assert sorted(path.stem for path in site.folder.glob("round-*")) == ["round-5", "round-6", "round-7"]


# What clients may send


def replaced(message: Message, key: str, record: Any) -> Message:
    message.content[key] = record
    return message


def emptied(message: Message) -> Message:
    for key in list(message.content):
        del message.content[key]
    return message


def with_array(message: Message, name: str, value: Any) -> Message:
    arrays = dict(message.content.array_records["tensors"].items())
    arrays[name] = value if isinstance(value, Array) else Array(np.asarray(value))
    return replaced(message, "tensors", ArrayRecord(arrays))


def first(message: Message) -> tuple[str, np.ndarray]:
    name = next(iter(message.content.array_records["tensors"]))
    return name, message.content.array_records["tensors"][name].numpy()


BAD = {
    "nan": (lambda m: with_array(m, first(m)[0], first(m)[1] * np.nan), "not finite"),
    "shape": (lambda m: with_array(m, first(m)[0], first(m)[1][:1]), "wrong shape"),
    "dtype": (lambda m: with_array(m, first(m)[0], first(m)[1].astype(np.float64)), "wrong dtype"),
    "names": (lambda m: with_array(m, "surprise", np.zeros(3, np.float32)), "wrong names"),
    "missing": (lambda m: replaced(m, "tensors", ArrayRecord({})), "wrong names"),
    "garbage": (lambda m: with_array(m, first(m)[0], Array("float32", (3,), "numpy.ndarray", b"garbage")), "not an upload"),
    "pickle": (
        lambda m: with_array(m, first(m)[0], Array("object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}")),
        "not an upload",
    ),
    "claims": (  # a head of petabytes
        lambda m: with_array(m, first(m)[0], Array("float32", (2**50,), "numpy.ndarray", _head((2**50,)))), "not an upload",
    ),
    "huge": (lambda m: with_array(m, "more", np.zeros(10**6, np.float32)), "not an upload"),
    "many": (
        lambda m: replaced(m, "tensors", ArrayRecord({str(n): Array(np.zeros(1, np.float32)) for n in range(99)})),
        "not an upload",
    ),
    "mask": (lambda m: replaced(m, "config", ConfigRecord({"sent": [1]})), "not an upload"),
    "kind": (lambda m: replaced(m, "tensors", ConfigRecord({"a": 1})), "not an upload"),
    "metrics": (lambda m: replaced(m, "metrics", MetricRecord({"accuracy": 7.0, "training_loss": 1.0})), "not an upload"),
    "lists": (lambda m: replaced(m, "metrics", MetricRecord({"accuracy": [1.0], "training_loss": 1.0})), "not an upload"),
    "shapes": (  # of no bytes at all
        lambda m: with_array(m, first(m)[0], Array("float32", (0,), "numpy.ndarray", _head((2**70, 0))[:128])), "not an upload",
    ),
    "empty": (lambda m: emptied(m), "not an upload"),
    "unreadable": (lambda m: ValueError("no message at all"), "not an upload"),
    "refusal": (lambda m: replaced(m, "config", ConfigRecord({"refusal": "no"})), "refused"),
}  # fmt: skip


def _head(shape: tuple[int, ...]) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00v\x00" + text.encode() + b"\0" * 16


@pytest.mark.slow
def test_bad_answers_are_refused_and_counted_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round client 1 sends something else that cannot be used: the run is that of the others alone."""
    rounds = len(BAD)
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=rounds, evaluate_every=rounds))
    grid = LoopbackGrid(plan, tmp_path)
    kinds = list(BAD.values())

    def spoil(client: int, message: Message) -> Message:
        if client != 1 or message.metadata.message_type != "train":
            return message
        return kinds[grid.round - 1][0](message)

    grid.change = spoil
    said = served(grid)
    counted = Counter(reason for _, reason in BAD.values())
    assert read_result(plan.folder / "result.json")["failures"] == {"1": dict(counted)}, said
    monkeypatch.setattr(Faults, "answering", lambda self, cohort: cohort.ids != 1)
    simulated = threaded(plan, tmp_path / "simulated")
    for client in range(3):
        assert same(personal(tmp_path, client), load_file(simulated / "models" / f"client-{client}.safetensors"))
    assert same(*(load_file(folder / "alpha.safetensors") for folder in (plan.folder, simulated)))


@pytest.mark.slow
def test_layers_that_should_stay_at_home_are_refused(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("fedrep"))
    grid = LoopbackGrid(plan, tmp_path)

    def all_layers(client: int, message: Message) -> Message:
        if client == 1 and message.metadata.message_type == "train":
            message = with_array(message, "fc3.bias", np.zeros(10, np.float32))
        return message

    grid.change = all_layers
    served(grid)
    failures = read_result(plan.folder / "result.json")["failures"]
    assert failures == {"1": {"wrong names": 2}}


@pytest.mark.slow
def test_evaluation_and_joining_of_a_liar_cannot_stop_the_run(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla"))
    grid = LoopbackGrid(plan, tmp_path)

    def lie(client: int, message: Message) -> Message:
        if client == 1 and message.metadata.message_type == "evaluate":
            return replaced(message, "metrics", MetricRecord({"accuracy": 1e9, "loss": float("nan")}))
        if client == 2 and message.metadata.message_type == "query":
            return replaced(message, "config", ConfigRecord({"train": -5, "test": "many"}))
        return message

    grid.change = lie
    said = served(grid)
    assert any(line.startswith("client 2 cannot join: what it tells cannot be right: train:") for line in said)
    assert read_result(plan.folder / "result.json")["accuracy"]["per_client"][1:] == [None, None]


def test_what_the_server_sends_is_checked_too(tmp_path: Path) -> None:
    """A site takes nothing that is not its model's, whoever sends it."""
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=1))
    grid = LoopbackGrid(plan, tmp_path)
    served(grid)
    message = next(message for message in grid.sent if message.metadata.message_type == "train")
    from flower_grid import flat
    from flwr.app import Context, RecordDict

    from pfedla.flower.client_app import reply

    def refusal_of(spoiled: Message) -> str:
        context = Context(1, 100, grid.config[0], RecordDict(), flat(plan))
        return str(reply(spoiled, context).content.config_records["config"]["refusal"])

    name, value = first(message)
    good = message.content["tensors"]
    assert refusal_of(with_array(message, name, value * np.inf)) == "the server sent numbers that are not finite"
    message.content["tensors"] = good
    assert "the server sent" in refusal_of(with_array(message, name, value[:1]))
    message.content["tensors"] = good
    assert "is not in the model" in refusal_of(with_array(message, "strange", value))
    message.content["tensors"] = ArrayRecord({key: array for key, array in good.items() if key != name})
    assert f"the server sent no {name}" in refusal_of(message)
    message.content["tensors"] = good
    message.content["config"]["run"] = "../../../etc/passw"
    assert "which cannot be" in refusal_of(message)


# What cannot be


def test_a_deployment_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    with pytest.raises(PfedlaError, match="faults"):
        deployed(tmp_path / "a", {**DIGITS, "faults": {"dropout": 0.5}})
    with pytest.raises(PfedlaError, match="there are 3 clients"):
        deployed(tmp_path / "b", DIGITS, min_clients=4)
    with pytest.raises(PfedlaError, match="give --clients"):
        deployed(tmp_path / "c", {}, OwnData.of("5", "3", False))
    for shape, classes, pixels in (
        ("5,5", "3", False),
        ("x", "3", False),
        ("5", "1", False),
        ("5", "a,a", False),
        ("5", "3", True),
    ):
        with pytest.raises(PfedlaError, match="--"):
            OwnData.of(shape, classes, pixels)
    with pytest.raises(PfedlaError, match="without https:// and port"):
        write_deployment(
            tmp_path / "d", planned(Experiment.parse(DIGITS), None, tmp_path / "d"), ["https://fl.example.org"], 9092
        )
    assert not list(tmp_path.iterdir())


def test_another_version_and_a_folder_that_is_there_are_refused(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", DIGITS)
    with pytest.raises(PfedlaError, match=r"here is pfedla .*, the federation runs 9.9: install the same"):
        served(LoopbackGrid(plan, tmp_path), version="9.9")
    plan.folder.mkdir()
    with pytest.raises(PfedlaError, match="exists already and is never overwritten; go on in it with --run-config"):
        served(LoopbackGrid(plan, tmp_path))


def test_own_data_in_a_federation_of_a_common_data_set_are_refused(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("pfedla", rounds=1))
    grid = LoopbackGrid(plan, tmp_path)
    grid.config[1]["data"] = str(own_file(tmp_path / "mine.npz"))
    said = served(grid)
    assert any("client 1 cannot join: this federation cuts digits into clients itself" in line for line in said)


def test_the_run_configuration_says_the_same_again(tmp_path: Path) -> None:
    plan = deployed(tmp_path / "fed", values_of("heurpfedla", training={"lr": 0.1}))
    from flower_grid import flat

    assert Plan.of_run_config(flat(plan)) == plan
    with pytest.raises(PfedlaError, match=r"deployment.wait = -1 is not possible"):
        Plan.of_run_config({**flat(plan), "deployment.wait": -1})
    assert Experiment.parse(plan.experiment.model_dump()) == plan.experiment


def test_private_keys_are_readable_by_their_owner_alone_and_not_in_the_app(tmp_path: Path) -> None:
    deployed(tmp_path / "fed", DIGITS)
    keys = sorted(path for path in (tmp_path / "fed").rglob("*.key"))
    assert len(keys) == 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)
    assert all(b"PRIVATE" not in path.read_bytes() for path in (tmp_path / "fed" / "app").rglob("*") if path.is_file())
    assert not list((tmp_path / "fed" / "app").rglob("*.key"))
