"""Every method over Flower's messages, without processes: a site does what a simulated client does."""

import io
import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import methods
from flower_grid import LoopbackGrid, check, deploy, run_server
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.config import flatten_dict

from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.objectives import CLASSIFICATION
from pfedla.core.settings import Privacy
from pfedla.flower.client_app import Site, reply
from pfedla.flower.codec import HEADER_BYTES, read_config
from pfedla.flower.deployment import Deployment
from pfedla.flower.layout import describe_own_data, plan_deployment, write_deployment
from pfedla.flower.orders import Signer, write_order_key
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment
from pfedla.runs.personal import evaluate_personal, load_personal

DIGITS = {"rounds": 2, "data": {"dataset": "digits", "clients": 3}, "training": {"local_epochs": 2}}
OPTIONS = {"pfedla-heldout": {"warm_up": 0}, "heurpfedla": {"retained_layers": 2}, "fedfomo": {"candidates": 1}}

NUMBERS = ["score", "loss", *(metric.name for metric in CLASSIFICATION.metrics)]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)


def grid_of(tmp_path: Path, name: str = "pfedla", options: dict[str, Any] | None = None, **more: Any) -> LoopbackGrid:
    values = {**DIGITS, "algorithm": {"name": name, **OPTIONS.get(name, {})}, **more}
    return LoopbackGrid(deploy(tmp_path / "fed", values, **(options or {})))


def photos(folder: Path) -> dict[str, Any]:
    """Images that are large enough for the paper's CNN with BatchNorm, whose statistics stay at the sites."""
    draws = np.random.default_rng(0)
    y = np.arange(96) % 4
    x = (draws.integers(0, 99, (96, 1, 16, 16)) + 30 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "photos.npz", x=x, y=y)
    return {"model": "cnn-bn", "data": {"dataset": str(folder / "photos.npz"), "clients": 3, "partition": "iid"}}


def result_of(grid: LoopbackGrid) -> dict[str, Any]:
    return read_result(grid.deployment.folder / "result.json")


def site_folder(grid: LoopbackGrid, client: int) -> Path:
    (path,) = Path(grid.config[client]["state"]).glob("*/result.json")
    return path.parent


@pytest.mark.parametrize("name", [one for one in methods("pfedla", "fedfomo") if one.id != "fedsa-lora"])  # no adapters
def test_a_method_over_messages_equals_the_threaded_engine(name: str, tmp_path: Path) -> None:
    grid = grid_of(tmp_path, name, **(photos(tmp_path) if name in ("fedbn", "pfedla") else {}))
    run_server(grid)
    folders = (grid.deployment.folder, tmp_path / "fed" / "simulated" / "run")
    assert not list((folders[0] / "models").iterdir())  # none comes to the server
    check(grid.deployment)
    described = [json.loads((folder / "federation.json").read_text()) for folder in folders]
    assert described[0] == described[1]
    result, kept = result_of(grid), load_personal(site_folder(grid, 2), "2")
    wire = json.loads((folders[0] / "deployment.json").read_text())["wire"]
    for way in ("down", "up"):  # the wire carries what is counted, and a header per tensor
        assert wire[f"{way}_bytes"] == result["traffic"][f"{way}_bytes"] + HEADER_BYTES * wire[f"{way}_arrays"]
    assert evaluate_personal(kept, None)["score"] == result["score"]["per_client"][2]


ENCODED = [("heurpfedla", "int8", "int8"), ("fedavg", "topk", "randk"), ("pfedla-heldout", "float16", "none")]
ENCODED += [("fedfomo", "int8", "int8"), ("local", "int8", "topk"), ("fedrep", "none", "bfloat16")]


@pytest.mark.parametrize(
    ("name", "upload", "download"), [ENCODED[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in ENCODED[1:])]
)
def test_encoded_messages_equal_the_threaded_engine(name: str, upload: str, download: str, tmp_path: Path) -> None:
    """One upload of the second round is lost, and the server stops in the middle of the third."""
    wire = {"upload": upload, "download": download}
    grid = grid_of(tmp_path, name, rounds=3, wire=wire, **(photos(tmp_path) if name == "fedavg" else {}))
    is_cut = True

    def lose(client: int, message: Message) -> Message | None:
        if is_cut and (grid.round, client, message.metadata.message_type) == (3, 2, "train"):
            raise KeyboardInterrupt
        return None if (grid.round, client, message.metadata.message_type) == (2, 1, "train") else message

    grid.change = lose
    with pytest.raises(KeyboardInterrupt):
        run_server(grid)
    is_cut = False
    run_server(grid, resume=True)
    check(grid.deployment, absent=lambda *one: one == (1, 2))


def test_encoded_messages_are_as_large_as_is_counted(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "heurpfedla", wire={"upload": "int8", "download": "topk"})
    run_server(grid)
    result = check(grid.deployment)
    wire = json.loads((grid.deployment.folder / "deployment.json").read_text())["wire"]
    for way in ("down", "up"):
        assert wire[f"{way}_bytes"] == result["traffic"][f"{way}_bytes"] + HEADER_BYTES * wire[f"{way}_arrays"]


def test_what_is_no_encoded_message_is_refused(tmp_path: Path) -> None:
    """In place of indices only escapes, or too few bytes: bad uploads of clients 0 and 1, and the run goes on."""
    grid = grid_of(tmp_path, "fedavg", rounds=1, wire={"upload": "topk", "download": "int8"})

    def lie(client: int, message: Message) -> Message:
        record = message.content.array_records.get("tensors")
        if message.metadata.message_type == "train" and client < 2:
            arrays = {name: array.numpy() for name, array in record.items()}
            lies = {n: np.full_like(v, 255) if client else v[:-1] for n, v in arrays.items()}
            return replace(message, "tensors", ArrayRecord({n: Array(v) for n, v in lies.items()}))
        return message

    grid.change = lie
    run_server(grid)
    assert result_of(grid)["failures"] == {"0": {"wrong shape": 1}, "1": {"not an upload": 1}}


def cut_off(grid: LoopbackGrid) -> None:
    """Run until all sites have trained in round 2, and lose the server there."""

    def power_cut(client: int, message: Message) -> Message:
        if (grid.round, client, message.metadata.message_type) == (2, 2, "train"):
            raise KeyboardInterrupt
        return message

    grid.change = power_cut
    with pytest.raises(KeyboardInterrupt):
        run_server(grid)
    grid.change = lambda client, message: message


@pytest.mark.parametrize("name", ["heurpfedla", pytest.param("pfedme", marks=pytest.mark.slow)])
def test_a_server_that_stops_resumes(name: str, tmp_path: Path) -> None:
    """In the middle of round 2, when sites have trained already: their newer state must not count."""
    grid = grid_of(tmp_path, name, rounds=3)
    cut_off(grid)
    run_server(grid, resume=True)
    check(grid.deployment)
    before = (grid.deployment.folder / "deployment.json").read_text()
    again = LoopbackGrid(grid.deployment)
    run_server(again, resume=True)  # finished: it needs no client
    assert not again.sent
    assert (grid.deployment.folder / "deployment.json").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True])
def test_a_late_client_or_a_lost_upload_is_an_absence(lost: bool, tmp_path: Path) -> None:
    grid, gone = grid_of(tmp_path, "heurpfedla", rounds=3), (1, 2) if lost else (2, 1)
    if lost:
        which = (*gone, "train")
        grid.change = lambda client, m: None if (client, grid.round, m.metadata.message_type) == which else m
    else:
        grid.absent = lambda client, round: client == 2 and round < 1
    run_server(grid)
    check(grid.deployment, absent=lambda *one: one == gone)
    assert result_of(grid)["failures"] == {str(gone[0]): {"no answer": 1}}


@pytest.mark.slow
def test_with_too_few_clients_it_waits_then_stops_and_can_resume(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, options={"min_clients": 3})
    grid.absent = lambda client, round: client == 1
    with pytest.raises(GaveUpError, match="min_clients"):
        run_server(grid)
    assert not grid.deployment.folder.exists()  # nothing was learned: the folder is free for the next try
    grid.absent = lambda client, round: client == 1 and len(grid.sent) > 8  # after the first round
    with pytest.raises(GaveUpError, match="min_clients"):
        run_server(grid)
    grid.absent = lambda client, round: False
    run_server(grid, resume=True)
    check(grid.deployment)


def test_a_failed_evaluation_is_counted_and_an_offline_site_is_not(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=1, data={"dataset": "digits", "clients": 5})
    lies = {
        (0, "evaluate"): ("config", ConfigRecord({"refusal": "no"})),
        (1, "evaluate"): ("metrics", MetricRecord(dict.fromkeys(NUMBERS, 1e9))),
        (3, "query"): ("config", ConfigRecord({"train": -5})),
    }

    def lie(client: int, message: Message) -> Message:
        record = lies.get((client, message.metadata.message_type))
        return replace(message, *record) if record else message

    grid.change = lie
    grid.absent = lambda client, round: client == 2 and len(grid.sent) == 9  # all have joined and trained
    said = run_server(grid)
    result, failure = result_of(grid), {"evaluation raised": 1}
    assert result["failures"] == {"0": failure, "1": failure, "3": {"no answer": 1}}
    assert result["refused_uploads"] == 0
    assert any("client 3" in line and "train" in line for line in said)
    assert [value is None for value in result["score"]["per_client"]] == [True, True, True, True, False]


def test_a_silent_site_is_asked_but_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two waits of a second in eight messages; when it answers again, it takes part again."""
    grid, waits, sleep = grid_of(tmp_path, rounds=4, evaluate_every=1), list[float](), time.sleep
    monkeypatch.setattr("pfedla.flower.engine.time.sleep", lambda seconds: (waits.append(seconds), sleep(seconds)))
    grid.change = lambda client, message: None if client == 1 and 9 <= len(grid.sent) <= 18 else message
    run_server(grid)
    asked = [
        int(m.content["config"]["round"])
        for m in grid.sent
        if m.metadata.dst_node_id == 101 and "round" in m.content["config"]
    ]
    assert asked == [1, 2, 2, 3, 3, 4, 4, 5]  # trained, then tested with the model of the next round
    assert sum(waits) <= 2.5
    assert result_of(grid)["failures"] == {"1": {"no answer": 2}}


def test_another_clients_key_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both logs have the reason, in one line whatever the site says."""
    grid = grid_of(tmp_path)
    grid.config[1]["site"] = grid.config[0]["site"]
    grid.change = lambda client, message: add_line(message) if client == 1 else message
    said = run_server(grid)
    assert "for client 1" in capsys.readouterr().err
    assert any("for client 1" in line for line in said)
    assert all(line.isprintable() for line in said)
    assert result_of(grid)["failures"] == {"1": {"no answer": 2}}


def add_line(message: Message) -> Message:
    message.content["config"]["refusal"] = f"{read_config(message.content)['refusal']}\nfinished: all is well\x1b[2J"
    return message


def own_file(
    path: Path, shape: tuple[int, ...] = (5,), labels: str = "abc", dtype: type = np.float32, seed: int = 0
) -> Path:
    draws = np.random.default_rng(seed)
    y = draws.permutation(np.repeat(np.array(list(labels)), 12))
    shift = 20 * (y == labels[0]).reshape(-1, *(1 for _ in shape))
    x = (draws.normal(size=(len(y), *shape)) * 40 + 100 + shift).astype(dtype)
    np.savez(path, x=x, y=y, test=np.arange(len(y)) % 3 == 0)
    return path


def own_grid(tmp_path: Path, shape: str = "5", *, pixels: bool = False) -> LoopbackGrid:
    values = {"rounds": 2, "data": {"clients": 2}, "training": {"lr": 0.001}, "algorithm": {"name": "pfedla"}}
    return LoopbackGrid(deploy(tmp_path / "fed", values, describe_own_data(shape, "a,b,c", pixels)))


@pytest.mark.parametrize("pixels", [False, True])
def test_sites_bring_their_own_data(pixels: bool, tmp_path: Path) -> None:
    shape, dtype = ((1, 8, 8), np.uint8) if pixels else ((5,), np.float32)
    grid = own_grid(tmp_path, "1,8,8" if pixels else "5", pixels=pixels)
    grid.config[0]["data"] = str(own_file(tmp_path / "mine.npz", shape, dtype=dtype))
    with np.load(own_file(tmp_path / "other.npz", shape, "cb", dtype, seed=1)) as arrays:  # a folder; not all classes
        (tmp_path / "theirs").mkdir()
        for name in arrays.files:
            np.save(tmp_path / "theirs" / f"{name}.npy", arrays[name])
    grid.config[1]["data"] = str(tmp_path / "theirs")
    run_server(grid)
    result, folder = result_of(grid), grid.deployment.folder
    assert (result["dataset"], result["clients"]) == ("sites", 2)
    described = json.loads((folder / "federation.json").read_text())
    assert (described["train"], described["test"], described["fingerprint"]) == ([], [], "")  # not told
    assert json.loads((folder / "deployment.json").read_text())["examples"] == [24, 16]
    kept = load_personal(site_folder(grid, 1), "1")
    for data in (tmp_path / "other.npz", tmp_path / "theirs"):
        assert evaluate_personal(kept, data)["score"] == result["score"]["per_client"][1]
    assert evaluate_personal(kept, None)["score"] == result["score"]["per_client"][1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "key"), [({"shape": (6,)}, "(6,)"), ({"labels": "abx"}, "'x'"), (None, "--node-config")]
)
def test_data_that_do_not_fit_are_refused_when_joining(file: dict[str, Any] | None, key: str, tmp_path: Path) -> None:
    grid = own_grid(tmp_path)
    grid.config[0]["data"] = str(own_file(tmp_path / "good.npz"))
    if file is not None:
        grid.config[1]["data"] = str(own_file(tmp_path / "mine.npz", **file))
    said = run_server(grid)
    assert any("client 1" in line and key in line for line in said)


@pytest.mark.slow
def test_data_that_change_during_a_run_are_refused(tmp_path: Path) -> None:
    """Without a ready test split, a site is tested on the split that was drawn, also of a copy of its file."""
    grid = own_grid(tmp_path)
    for client in (0, 1):
        path = own_file(tmp_path / f"data-{client}.npz", seed=client)
        with np.load(path) as arrays:
            np.savez(path, x=arrays["x"], y=arrays["y"])
        grid.config[client]["data"] = str(path)

    def grow(client: int, message: Message) -> Message:
        if (grid.round, client, message.metadata.message_type) == (1, 1, "train"):
            own_file(tmp_path / "data-1.npz", seed=5)
        return message

    grid.change = grow
    run_server(grid)
    assert result_of(grid)["failures"]["1"]["refused"] >= 1
    kept, score = load_personal(site_folder(grid, 0), "0"), result_of(grid)["score"]["per_client"][0]
    shutil.copy(tmp_path / "data-0.npz", tmp_path / "copy.npz")
    for data in (None, tmp_path / "data-0.npz", tmp_path / "copy.npz"):
        assert evaluate_personal(kept, data)["score"] == score
    with np.load(tmp_path / "copy.npz") as arrays:
        np.savez(tmp_path / "half.npz", x=arrays["x"][::2], y=arrays["y"][::2])
    with pytest.raises(PfedlaError, match="trained on"):
        evaluate_personal(kept, tmp_path / "half.npz")
    own_file(tmp_path / "data-0.npz", seed=7)
    with pytest.raises(PfedlaError, match="changed"):
        evaluate_personal(kept, None)


def test_a_round_that_ends_too_late_deletes_no_later_state(tmp_path: Path) -> None:
    """The server has given up on round 5; the site finishes it after round 6."""
    grid = grid_of(tmp_path, "fedrep")
    site = Site(grid.deployment, {"client": 0, "run": "0" * 16}, grid.config[0])
    for rounds, kept in ((((3, 2), (4, 3), (6, 4), (5, 4)), "3456"), (((7, 6),), "567")):
        for round, base in rounds:
            site._keep(round, base, site.client.state)
        assert sorted(path.stem for path in site.folder.glob("round-*")) == [f"round-{number}" for number in kept]


class Trap:
    """It would end the process that unpickles it."""

    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


def pickled() -> Array:
    np.save(file := io.BytesIO(), np.array([Trap()]), allow_pickle=True)
    return Array("object", (1,), "numpy.ndarray", file.getvalue())


def replace(message: Message, key: str, record: Any) -> Message:
    message.content[key] = record
    return message


def clear(message: Message) -> Message:
    for key in list(message.content):
        del message.content[key]
    return message


def put(message: Message, value: Any, name: str = "") -> Message:
    """Put an array in the place of the first one, or under another name."""
    arrays = dict(message.content.array_records["tensors"].items())
    first = next(iter(arrays))
    value = value(arrays[first].numpy()) if callable(value) else value
    arrays[name or first] = value if isinstance(value, Array) else Array(value)
    return replace(message, "tensors", ArrayRecord(arrays))


BAD = {
    "nan": (lambda m: put(m, lambda value: value * np.nan), "not finite"),
    "shape": (lambda m: put(m, lambda value: value[:1]), "wrong shape"),
    "names": (lambda m: put(m, np.zeros(3, np.float32), "surprise"), "wrong names"),
    "garbage": (lambda m: put(m, Array("float32", (3,), "numpy.ndarray", b"garbage")), "not an upload"),
    "pickle": (lambda m: put(m, pickled()), "not an upload"),
    "huge": (lambda m: put(m, np.zeros(10**6, np.float32), "more"), "not an upload"),
    "metrics": (lambda m: replace(m, "metrics", MetricRecord({"score": 7.0})), "not an upload"),
    "empty": (clear, "not an upload"),
    "unreadable": (lambda m: ValueError("no message at all"), "not an upload"),
    "refusal": (lambda m: replace(m, "config", ConfigRecord({"refusal": "no"})), "refused"),
}


@pytest.mark.slow
def test_bad_uploads_are_refused_and_counted(tmp_path: Path) -> None:
    """In every round client 1 sends something else that cannot be used: the run is that of the others."""
    kinds = list(BAD.values())
    grid = grid_of(tmp_path, rounds=len(BAD), evaluate_every=len(BAD))

    def spoil(client: int, message: Message) -> Message:
        is_upload = client == 1 and message.metadata.message_type == "train"
        return kinds[grid.round - 1][0](message) if is_upload else message

    grid.change = spoil
    said = run_server(grid)
    assert result_of(grid)["failures"] == {"1": dict(Counter(reason for _, reason in BAD.values()))}, said
    check(grid.deployment, keys=("score", "score_after_training", "loss"), absent=lambda client, _: client == 1)


def test_a_site_checks_what_the_server_sends(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=1)
    run_server(grid)
    message = next(message for message in grid.sent if message.metadata.message_type == "train")
    good, name = message.content["tensors"], next(iter(message.content["tensors"]))
    rest = ArrayRecord({key: array for key, array in good.items() if key != name})
    for spoil, key in (
        (lambda: put(message, lambda value: value * np.inf), "finite"),
        (lambda: put(message, lambda value: value[:1]), name),
        (lambda: put(message, np.zeros(3, np.float32), "strange"), "strange"),
        (lambda: put(message, pickled()), name),
        (lambda: replace(message, "tensors", rest), name),
        (lambda: message.content["config"].update({"run": "../../../etc/passw"}), "etc"),
    ):
        spoil()
        assert key in refusal(grid, message)
        message.content["tensors"] = good


def refusal(grid: LoopbackGrid, message: Message, client: int = 0, *, signed: bool = True) -> str:
    """Return why a site refuses a message, which the server signs anew."""
    if signed:
        plan = flatten_dict(grid.deployment.to_run_config())
        Signer(grid.deployment.order_key, plan).sign(message.metadata.message_type, message.content)
    return str(read_config(reply(message, grid.context(client)).content).get("refusal", ""))


def test_a_site_obeys_only_signed_orders_for_itself_and_none_twice(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=1)
    run_server(grid)
    last = next(m for m in reversed(grid.sent) if m.metadata.dst_node_id == 100)
    assert "before" in refusal(grid, last, signed=False)  # replayed
    assert "for client 0" in refusal(grid, last, client=1)
    assert not refusal(grid, last)
    for change in (
        lambda: put(last, lambda value: value + 1),
        lambda: last.content["config"].update({"base": 0}),
        lambda: last.content["config"].update({"order": 2**62}),
        lambda: last.content["config"].update({"signature": b"x" * 64}),
    ):
        assert not refusal(grid, last)
        change()
        assert "not signed" in refusal(grid, last, signed=False)
    assert not refusal(grid, last)
    grid.deployment = grid.deployment.model_copy(update={"min_clients": 2})  # another plan
    assert "not signed" in refusal(grid, last, signed=False)
    (tmp_path / "fed" / "sites" / "client-0" / "server.pub").write_bytes(write_order_key(tmp_path / "other.key"))
    assert "not signed" in refusal(grid, last)


def test_a_deployment_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    for values, options, key in (
        ({**DIGITS, "faults": {"dropout": 0.5}}, {}, "faults"),
        (DIGITS, {"min_clients": 4}, "--min-clients"),
        ({}, {"own": describe_own_data("5", "3", False)}, "--clients"),
    ):
        with pytest.raises(PfedlaError, match=key):
            deploy(tmp_path / "fed", values, **options)
    for shape, classes, pixels in (("5,5", "3", 0), ("x", "3", 0), ("5", "1", 0), ("5", "a,a", 0), ("5", "3", 1)):
        with pytest.raises(PfedlaError, match="--"):
            describe_own_data(shape, classes, bool(pixels))
    planned = plan_deployment(Experiment.parse(DIGITS), None, tmp_path / "fed")
    with pytest.raises(PfedlaError, match="--host"):
        write_deployment(tmp_path / "fed", planned, ["https://fl.example.org"], 9092)
    assert not list(tmp_path.iterdir())


def test_the_run_configuration_describes_the_deployment(tmp_path: Path) -> None:
    """Another version and an existing folder are refused."""
    deployment = grid_of(tmp_path, "heurpfedla", training={"lr": 0.1}).deployment
    assert Deployment.from_run_config(flatten_dict(deployment.to_run_config())) == deployment
    with pytest.raises(PfedlaError, match=r"deployment\.wait"):
        Deployment.from_run_config({**flatten_dict(deployment.to_run_config()), "deployment.wait": -1})
    with pytest.raises(PfedlaError, match=r"9\.9"):
        run_server(LoopbackGrid(deployment), version="9.9")
    deployment.folder.mkdir()
    with pytest.raises(PfedlaError, match=r"deployment\.resume"):
        run_server(LoopbackGrid(deployment))


def test_private_keys_are_readable_by_their_owner_only_and_not_in_the_app(tmp_path: Path) -> None:
    deploy(tmp_path / "fed", DIGITS)
    keys = list((tmp_path / "fed").rglob("*.key"))
    assert len(keys) == 6
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)
    app = [path for path in (tmp_path / "fed" / "app").rglob("*") if path.is_file()]
    assert all(path.suffix != ".key" and b"PRIVATE" not in path.read_bytes() for path in app)


def test_a_client_is_excluded_when_a_deployment_goes_back(tmp_path: Path) -> None:
    """It is not asked to train any more; the others continue from their state of that round."""
    grid = grid_of(tmp_path, "heurpfedla", rounds=3)
    run_server(grid)
    grid.sent.clear()
    run_server(grid, resume=True, from_round=2, exclude=("1",))
    asked = [(m.metadata.message_type, m.metadata.dst_node_id - 100) for m in grid.sent]
    assert [client for kind, client in asked if kind == "train"] == [0, 2]
    assert result_of(grid)["excluded"] == {"1": 3}
    experiment = grid.deployment.experiment.model_copy(update={"exclude": {"1": 3}})
    grid.deployment = grid.deployment.model_copy(update={"experiment": experiment})
    check(grid.deployment)
    config = flatten_dict({"deployment": {"exclude": '["1"]'}})
    assert Deployment.from_run_config(flatten_dict(grid.deployment.to_run_config()) | config).exclude == ("1",)


NOISY = {"privacy": {"epsilon": 8.0}}


@pytest.mark.slow
def test_a_private_site_draws_as_the_simulation_where_noise_comes_from_the_seed(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "fedrep", **NOISY)
    grid.config = [{**one, "noise": "seed", "share-metrics": True} for one in grid.config]
    run_server(grid)
    ours = check(grid.deployment)
    simulated = read_result(tmp_path / "fed" / "simulated" / "run" / "result.json")
    assert ours["privacy"] == simulated["privacy"]
    for client in range(3):
        kept = json.loads((site_folder(grid, client) / "privacy.json").read_text())
        assert kept["epsilon"] == pytest.approx(ours["privacy"]["epsilon"]["per_client"][client])
        assert len(kept["releases"]) == 2  # a round each


def test_a_private_site_tells_no_metrics_and_draws_from_the_system(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "fedavg", **NOISY)
    run_server(grid)
    for message in [one for one in grid.sent if one.metadata.message_type == "train"]:
        assert message.content.config_records["config"]["seed"] == 0
    result = result_of(grid)
    assert result["score"]["per_client"] == [None] * 3
    assert result["failures"] == {}
    with pytest.raises(AssertionError):  # other noise than the seed's
        check(grid.deployment, keys=())


def test_a_site_counts_what_the_server_has_lost_and_refuses_what_exceeds_its_epsilon(tmp_path: Path) -> None:
    """The server is cut off in round 2 after all sites have trained, resumes, and asks for round 2 again."""
    grid = grid_of(tmp_path, "fedavg", **NOISY)
    cut_off(grid)
    said = run_server(grid, resume=True)
    assert result_of(grid)["failures"] == {str(client): {"refused": 1} for client in range(3)}, said
    for client in range(3):
        kept = json.loads((site_folder(grid, client) / "privacy.json").read_text())
        assert len(kept["releases"]) == 2  # round 2 once, though it was asked for twice
        assert 7.8 < kept["epsilon"] <= 8.0


def test_a_site_composes_what_it_released_under_other_settings(tmp_path: Path) -> None:
    """A server that changes the noise in the middle of a run gets no new budget."""
    grid = grid_of(tmp_path, "fedavg", rounds=1, privacy={"noise_multiplier": 2.0})
    run_server(grid)
    first = json.loads((site_folder(grid, 0) / "privacy.json").read_text())
    quiet = grid.deployment.experiment.model_copy(update={"rounds": 2, "privacy": Privacy(noise_multiplier=50.0)})
    context = grid.context(0)
    site = Site(
        grid.deployment.model_copy(update={"experiment": quiet}),
        dict(grid.sent[-1].content.config_records["config"], client=0),
        context.node_config,
    )
    site._spend(2)
    after = json.loads((site_folder(grid, 0) / "privacy.json").read_text())
    assert [one[0] for one in after["releases"]] == [2.0, 50.0]
    assert after["epsilon"] > first["epsilon"]
    site.limit = first["epsilon"]
    with pytest.raises(PfedlaError, match="once more"):
        site._spend(2)


def test_a_site_can_ask_for_more_privacy_than_the_server(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, "fedavg")
    grid.config[1]["max-epsilon"] = 3.0
    said = run_server(grid)
    assert any("client 1 cannot join: this site asks for max-epsilon" in line for line in said)
    strict = grid_of(tmp_path / "other", "fedavg", **NOISY)
    strict.config[1]["max-epsilon"] = 3.0
    run_server(strict)
    assert result_of(strict)["failures"] == {"1": {"refused": 2}}
