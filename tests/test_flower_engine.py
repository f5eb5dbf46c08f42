"""Every method over Flower's messages, without processes: a site does what a simulated client does."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import methods
from flower_grid import Absent, LoopbackGrid, deploy, flatten, run_server, simulate_absent
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from safetensors.torch import load_file

from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.flower.client_app import reply
from pfedla.flower.codec import HEADER_BYTES
from pfedla.flower.deployment import Deployment
from pfedla.flower.layout import OwnData, plan_deployment, write_deployment
from pfedla.flower.site import Site
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment
from pfedla.runs.personal import evaluate_personal, load_personal

DIGITS = {"rounds": 2, "data": {"dataset": "digits", "clients": 3}, "training": {"local_epochs": 2}}
OPTIONS = {"pfedla-heldout": {"warm_up": 0}, "heurpfedla": {"retained_layers": 2}, "fedfomo": {"candidates": 1}}


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)


def values_of(name: str, **more: Any) -> dict[str, Any]:
    return {**DIGITS, "algorithm": {"name": name, **OPTIONS.get(name, {})}, **more}


def grid_of(tmp_path: Path, name: str = "pfedla", options: dict[str, Any] | None = None, **more: Any) -> LoopbackGrid:
    return LoopbackGrid(deploy(tmp_path / "fed", values_of(name, **more), **(options or {})), tmp_path)


def photos(folder: Path) -> dict[str, Any]:
    """Images that are large enough for the paper's CNN with BatchNorm, whose statistics stay at the sites."""
    draws = np.random.default_rng(0)
    y = np.arange(96) % 4
    x = (draws.integers(0, 99, (96, 1, 16, 16)) + 30 * y[:, None, None, None]).astype(np.uint8)
    np.savez(folder / "photos.npz", x=x, y=y)
    return {"model": "cnn-bn", "data": {"dataset": str(folder / "photos.npz"), "clients": 3, "partition": "iid"}}


def personal(folder: Path, client: int) -> dict[str, torch.Tensor]:
    (path,) = folder.glob(f"site-{client}/*/models/client-{client}.safetensors")
    return load_file(path)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def result_of(grid: LoopbackGrid) -> dict[str, Any]:
    return read_result(grid.deployment.folder / "result.json")


def assert_as_simulated(
    grid: LoopbackGrid,
    tmp_path: Path,
    keys: str = "accuracy accuracy_after_training loss traffic failures",
    absent: Absent | None = None,
) -> None:
    """Numbers, weights and personal models are those of the threaded engine, bit for bit.

    `absent(client, round)`: in the simulation these clients do not answer.
    """
    ours, theirs = grid.deployment.folder, tmp_path / "simulated"
    simulate_absent(grid.deployment.experiment, theirs, absent)
    found, expected = (read_result(folder / "result.json") for folder in (ours, theirs))
    for key in keys.split():
        assert found[key] == expected[key], key
    assert (ours / "alpha.safetensors").exists() == (theirs / "alpha.safetensors").exists()
    if (theirs / "alpha.safetensors").exists():
        assert same(load_file(ours / "alpha.safetensors"), load_file(theirs / "alpha.safetensors"))
    for client in range(3):
        assert same(personal(tmp_path, client), load_file(theirs / "models" / f"client-{client}.safetensors"))
    assert not list((ours / "models").iterdir())  # none comes to the server


@pytest.mark.parametrize("name", methods("pfedla", "fedfomo"))
def test_a_method_over_messages_equals_the_threaded_engine(name: str, tmp_path: Path) -> None:
    grid = grid_of(tmp_path, name, **(photos(tmp_path) if name in ("fedbn", "pfedla") else {}))
    run_server(grid)
    assert_as_simulated(grid, tmp_path)
    folders = (grid.deployment.folder, tmp_path / "simulated")
    described = [json.loads((folder / "federation.json").read_text()) for folder in folders]
    assert described[0] == described[1]


@pytest.mark.parametrize("name", ["heurpfedla", pytest.param("fedrep", marks=pytest.mark.slow)])
def test_the_wire_carries_the_counted_bytes_and_a_header_per_tensor(name: str, tmp_path: Path) -> None:
    grid = grid_of(tmp_path, name)
    run_server(grid)
    traffic = result_of(grid)["traffic"]
    wire = json.loads((grid.deployment.folder / "deployment.json").read_text())["wire"]
    for way in ("down", "up"):
        assert wire[f"{way}_bytes"] == traffic[f"{way}_bytes"] + HEADER_BYTES * wire[f"{way}_arrays"]
    training = [message.content for message in grid.sent if message.metadata.message_type == "train"]
    arrays = [array for content in training for record in content.array_records.values() for array in record.values()]
    assert (sum(len(array.data) for array in arrays), len(arrays)) == (wire["down_bytes"], wire["down_arrays"])
    num_layers = len({name.split(".")[0] for content in training for name in content.array_records["tensors"]})
    if name == "heurpfedla":  # from the second round on some layers are retained
        assert wire["down_arrays"] < wire["up_arrays"]
    else:
        assert num_layers < len({name.split(".")[0] for name in personal(tmp_path, 0)})
    (site,) = (tmp_path / "site-2").glob("*/result.json")
    tested = evaluate_personal(load_personal(site.parent, "2"), None)  # on the site's part of the data
    assert tested["accuracy"] == result_of(grid)["accuracy"]["per_client"][2]


# Clients and servers that go down


@pytest.mark.parametrize("name", ["heurpfedla", pytest.param("pfedme", marks=pytest.mark.slow)])
def test_a_server_that_stops_resumes(name: str, tmp_path: Path) -> None:
    """It stops in the middle of round 2, when sites have trained already: their newer state must not count."""
    grid = grid_of(tmp_path, name, rounds=3)

    def power_cut(client: int, message: Message) -> Message:
        if (grid.round, client, message.metadata.message_type) == (2, 2, "train"):
            raise KeyboardInterrupt
        return message

    grid.change = power_cut
    with pytest.raises(KeyboardInterrupt):
        run_server(grid)
    grid.change = lambda client, message: message
    run_server(grid, resume=True)
    assert_as_simulated(grid, tmp_path)


@pytest.mark.slow
def test_a_lost_upload_advances_nothing(tmp_path: Path) -> None:
    """Client 1's answer to round 2 is lost: the same as if it had been absent."""
    grid = grid_of(tmp_path, "heurpfedla", rounds=3)
    lost = (2, 1, "train")
    grid.change = lambda client, m: None if (grid.round, client, m.metadata.message_type) == lost else m
    run_server(grid)
    assert_as_simulated(grid, tmp_path, absent=lambda client, round: (client, round) == (1, 2))
    assert result_of(grid)["failures"] == {"1": {"no answer": 1}}


def test_a_finished_run_that_is_resumed_needs_no_client(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=1)
    run_server(grid)
    before = (grid.deployment.folder / "deployment.json").read_text()
    again = LoopbackGrid(grid.deployment, tmp_path)
    run_server(again, resume=True)
    assert not again.sent
    assert (grid.deployment.folder / "deployment.json").read_text() == before


def test_a_late_client_takes_part_from_the_next_round_on(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=3)
    grid.absent = lambda client, round: client == 2 and round < 1
    run_server(grid)
    assert_as_simulated(grid, tmp_path, absent=lambda client, round: (client, round) == (2, 1))


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
    assert_as_simulated(grid, tmp_path)


def test_a_failed_evaluation_is_counted_and_an_offline_site_is_not(tmp_path: Path) -> None:
    """Client 0 refuses, client 1 lies, client 2 goes offline after training; client 3 lies about its examples."""
    grid = grid_of(tmp_path, rounds=1, data={"dataset": "digits", "clients": 5})
    lies = {
        (0, "evaluate"): ("config", ConfigRecord({"refusal": "no"})),
        (1, "evaluate"): ("metrics", MetricRecord({"accuracy": 1e9, "loss": 0.0})),
        (3, "query"): ("config", ConfigRecord({"train": -5, "test": "many"})),
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
    assert any("refused: no" in line for line in said)
    assert any(line.startswith("client 3 cannot join:") and "train" in line for line in said)
    assert [value is None for value in result["accuracy"]["per_client"]] == [True, True, True, True, False]


def test_another_clients_partition_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The site's log and the server's have the same reason, in one line whatever the site says."""
    grid = grid_of(tmp_path)
    grid.config[1]["partition-id"] = "0\nfinished: all is well\x1b[2J"
    said = run_server(grid)
    assert "partition-id" in capsys.readouterr().err
    assert [line for line in said if "partition-id" in line and line.isprintable()]
    assert all("\n" not in line for line in said)
    assert result_of(grid)["failures"] == {"1": {"no answer": 2}}


# What sites bring


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
    return LoopbackGrid(deploy(tmp_path / "fed", values, OwnData.parse(shape, "a,b,c", pixels)), tmp_path)


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
    # What the site has kept is a run folder: its model can be tested there.
    (site,) = (tmp_path / "site-1").glob("*/result.json")
    for data in (tmp_path / "other.npz", tmp_path / "theirs"):
        tested = evaluate_personal(load_personal(site.parent, "1"), data)
        assert tested["accuracy"] == result["accuracy"]["per_client"][1]
    with pytest.raises(PfedlaError, match="--data"):
        evaluate_personal(load_personal(site.parent, "1"), None)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ({"shape": (6,)}, "(6,)"),
        ({"labels": "abx"}, "'x'"),
        ({"shape": (1, 8, 8), "dtype": np.uint8}, "(1, 8, 8)"),
        (None, "--node-config"),
    ],
)
def test_data_that_do_not_fit_are_refused_when_joining(
    file: dict[str, Any] | None, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = own_grid(tmp_path)
    grid.config[0]["data"] = str(own_file(tmp_path / "good.npz"))
    if file is not None:
        grid.config[1]["data"] = str(own_file(tmp_path / "mine.npz", **file))
    said = run_server(grid)
    assert any(line.startswith("client 1 cannot join:") and key in line for line in said)
    assert key in capsys.readouterr().err


@pytest.mark.slow
def test_data_that_change_during_a_run_are_refused(tmp_path: Path) -> None:
    """The site has no ready test split, so its model is not tested on the file that it trained on, either."""
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
    (site,) = (tmp_path / "site-0").glob("*/result.json")
    with pytest.raises(PfedlaError, match="trained on"):
        evaluate_personal(load_personal(site.parent, "0"), tmp_path / "data-0.npz")


def test_a_round_that_ends_too_late_deletes_no_later_state(tmp_path: Path) -> None:
    """The server has given up on round 5; the site finishes it after round 6."""
    deployment = deploy(tmp_path / "fed", values_of("fedrep"))
    site = Site(deployment, {"client": 0, "run": "0" * 16}, {"state": str(tmp_path / "site-0")})
    state = site.client.algorithm.init_client()

    def kept() -> list[str]:
        return sorted(path.stem for path in site.folder.glob("round-*"))

    for round, base in ((3, 2), (4, 3), (6, 4), (5, 4)):
        site._keep(round, base, state)
    assert kept() == ["round-3", "round-4", "round-5", "round-6"]
    site._keep(7, 6, state)
    assert kept() == ["round-5", "round-6", "round-7"]


# Untrusted messages


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
    value = value(first(message)[1]) if callable(value) else value
    arrays[name or first(message)[0]] = value if isinstance(value, Array) else Array(np.asarray(value))
    return replace(message, "tensors", ArrayRecord(arrays))


def first(message: Message) -> tuple[str, np.ndarray]:
    name = next(iter(message.content.array_records["tensors"]))
    return name, message.content.array_records["tensors"][name].numpy()


BAD = {
    "nan": (lambda m: put(m, lambda value: value * np.nan), "not finite"),
    "shape": (lambda m: put(m, lambda value: value[:1]), "wrong shape"),
    "names": (lambda m: put(m, np.zeros(3, np.float32), "surprise"), "wrong names"),
    "garbage": (lambda m: put(m, Array("float32", (3,), "numpy.ndarray", b"garbage")), "not an upload"),
    "huge": (lambda m: put(m, np.zeros(10**6, np.float32), "more"), "not an upload"),
    "mask": (lambda m: replace(m, "config", ConfigRecord({"sent": [1]})), "not an upload"),
    "unsent": (lambda m: replace(m, "config", ConfigRecord({"sent": [0] * 4})), "wrong layers"),
    "metrics": (
        lambda m: replace(m, "metrics", MetricRecord({"training_loss": 1.0, "accuracy": 7.0})),
        "not an upload",
    ),
    "empty": (clear, "not an upload"),
    "unreadable": (lambda m: ValueError("no message at all"), "not an upload"),
    "refusal": (lambda m: replace(m, "config", ConfigRecord({"refusal": "no"})), "refused"),
}


@pytest.mark.slow
def test_bad_uploads_are_refused_and_counted(tmp_path: Path) -> None:
    """In every round client 1 sends something else that cannot be used: the run is that of the others."""
    rounds, kinds = len(BAD), list(BAD.values())
    grid = grid_of(tmp_path, rounds=rounds, evaluate_every=rounds)

    def spoil(client: int, message: Message) -> Message:
        is_upload = client == 1 and message.metadata.message_type == "train"
        return kinds[grid.round - 1][0](message) if is_upload else message

    grid.change = spoil
    said = run_server(grid)
    counted = Counter(reason for _, reason in BAD.values())
    assert result_of(grid)["failures"] == {"1": dict(counted)}, said
    keys = "accuracy accuracy_after_training loss"
    assert_as_simulated(grid, tmp_path, keys, absent=lambda client, round: client == 1)


def test_a_site_checks_what_the_server_sends(tmp_path: Path) -> None:
    grid = grid_of(tmp_path, rounds=1)
    run_server(grid)
    message = next(message for message in grid.sent if message.metadata.message_type == "train")
    name, good = first(message)[0], message.content["tensors"]

    def refusal_of(spoiled: Message) -> str:
        refusal = str(reply(spoiled, grid.context(0)).content.config_records["config"]["refusal"])
        spoiled.content["tensors"] = good
        return refusal

    assert "not finite" in refusal_of(put(message, lambda value: value * np.inf))
    assert name in refusal_of(put(message, lambda value: value[:1]))
    assert "strange" in refusal_of(put(message, np.zeros(3, np.float32), "strange"))
    rest = ArrayRecord({key: array for key, array in good.items() if key != name})
    assert name in refusal_of(replace(message, "tensors", rest))
    message.content["config"]["run"] = "../../../etc/passw"
    assert "etc" in refusal_of(message)


# What a deployment refuses, and what it writes


def test_a_deployment_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    for values, options, key in (
        ({**DIGITS, "faults": {"dropout": 0.5}}, {}, "faults"),
        (DIGITS, {"min_clients": 4}, "--min-clients"),
        ({}, {"own": OwnData.parse("5", "3", False)}, "--clients"),
    ):
        with pytest.raises(PfedlaError, match=key):
            deploy(tmp_path / "fed", values, **options)
    for shape, classes, pixels in (("5,5", "3", 0), ("x", "3", 0), ("5", "1", 0), ("5", "a,a", 0), ("5", "3", 1)):
        with pytest.raises(PfedlaError, match="--"):
            OwnData.parse(shape, classes, bool(pixels))
    planned = plan_deployment(Experiment.parse(DIGITS), None, tmp_path / "fed")
    with pytest.raises(PfedlaError, match="--host"):
        write_deployment(tmp_path / "fed", planned, ["https://fl.example.org"], 9092)
    assert not list(tmp_path.iterdir())


def test_another_version_and_an_existing_folder_are_refused(tmp_path: Path) -> None:
    deployment = deploy(tmp_path / "fed", DIGITS)
    with pytest.raises(PfedlaError, match=r"9\.9"):
        run_server(LoopbackGrid(deployment, tmp_path), version="9.9")
    deployment.folder.mkdir()
    with pytest.raises(PfedlaError, match=r"deployment\.resume"):
        run_server(LoopbackGrid(deployment, tmp_path))


def test_the_run_configuration_describes_the_deployment(tmp_path: Path) -> None:
    deployment = deploy(tmp_path / "fed", values_of("heurpfedla", training={"lr": 0.1}))
    assert Deployment.from_run_config(flatten(deployment)) == deployment
    with pytest.raises(PfedlaError, match=r"deployment\.wait"):
        Deployment.from_run_config({**flatten(deployment), "deployment.wait": -1})


def test_private_keys_are_readable_by_their_owner_only_and_not_in_the_app(tmp_path: Path) -> None:
    deploy(tmp_path / "fed", DIGITS)
    keys = list((tmp_path / "fed").rglob("*.key"))
    assert len(keys) == 5
    assert all(path.stat().st_mode & 0o077 == 0 for path in keys)
    app = [path for path in (tmp_path / "fed" / "app").rglob("*") if path.is_file()]
    assert all(path.suffix != ".key" and b"PRIVATE" not in path.read_bytes() for path in app)
