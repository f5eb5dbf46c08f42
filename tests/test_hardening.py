"""Untrusted files: whatever they hold, they are read correctly or refused, and memory stays bounded."""

import io
import json
import os
import random
import re
import shutil
import signal
import struct
import sys
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from conftest import budget, drop_sums
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official import cifar_files, idx_files, write
from rich.console import Console
from safetensors.torch import load_file, save_file

import pfedla as package
from pfedla.algorithms import create
from pfedla.core import errors
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_object, read_tensors, safe_name
from pfedla.core.models import MODELS, build_model
from pfedla.core.tasks import task_of
from pfedla.data import arrays
from pfedla.data.arrays import load_arrays
from pfedla.data.federation import federation_of
from pfedla.data.published import read_cifar, read_idx_pair
from pfedla.flower.layout import plan_deployment, read_deployment, write_app
from pfedla.report.page import Watcher
from pfedla.report.reading import read_result, round_of
from pfedla.report.tables import failures_lines, metrics_table, result_table, traffic_line, warnings
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.run import run

GIBIBYTE = 2**30


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """Limit the memory of this process to so much more than it has; more raises an error that no test expects."""
    if sys.platform != "linux":
        yield
        return
    import resource

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@st.composite
def damaged(draw: st.DrawFn, good: bytes) -> bytes:
    """Some bytes overwritten, left out or put in, or the end cut off."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 3))):
        start, gone = draw(st.integers(0, len(content))), draw(st.integers(0, 8) | st.just(len(content)))
        content[start : start + gone] = draw(st.binary(max_size=8))
    return bytes(content)


def test_tensors_are_read_if_the_header_is_as_expected(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    good = {"w": torch.randn(3, 5), "n": torch.tensor(7), "h": torch.ones(2, dtype=torch.bfloat16)}
    expected = {name: value.to("meta") for name, value in good.items()}
    save_file(good, path)
    assert all(torch.equal(value, good[name]) for name, value in read_tensors(path, expected).items())
    for change, named in (
        ({"w": torch.randn(3, 4)}, "w"),
        ({"w": torch.randn(3, 5).double()}, "w"),
        ({"more": torch.zeros(1), "w": torch.full((3, 5), torch.nan)}, "more"),  # the header is checked first
        ({"w": torch.full((3, 5), torch.nan)}, "w"),
    ):
        save_file({**good, **change}, path)
        with pytest.raises(PfedlaError, match=rf"t\.safetensors: .*{named}"):
            read_tensors(path, expected)
    assert read_tensors(path, expected, finite=False)["w"].isnan().all()
    save_file({"w": good["w"]}, path)
    with pytest.raises(PfedlaError, match=r"'[hn]'"):
        read_tensors(path, expected)


def test_what_is_no_file_is_not_opened_and_json_is_strict(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "nothing"):  # a device never ends
        for read in (read_object, load_arrays, lambda path: read_tensors(path, {})):
            with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=path.name):
                read(path)
    path = tmp_path / "file.json"
    values = [b'{"a": %b}' % value for value in (b"NaN", b"1e999", rb'"\ud800"')]
    for content in (b"", b"\xff", b"[]", b"9" * 5000, b"[" * 100_000, b" " * 2**21, *values):
        path.write_bytes(content)
        with pytest.raises(PfedlaError, match=r"file\.json"):
            read_object(path, 2**20)
    path.write_text('{"ä": [1, 2.5, null]}', encoding="utf-8")
    assert read_object(path) == {"ä": [1, 2.5, None]}


def test_sizes_are_known_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("mlp", (10**30,)), *((name, shape) for name in MODELS for shape in ((2**28, 20, 20), (3, 2**14, 2**14)))]
    for name, shape in cases:
        with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=name):
            build_model(name, shape, 10, torch.Generator())
    task = task_of(build_model("small-cnn", (1, 8, 8), 10, torch.Generator()))
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="hidden_size"):
        create("pfedhn", task, budget(0.1, 1, 8), {"hidden_size": 10_000}).check(10**6)
    small = create("pfedhn", task, budget(0.1, 1, 8))
    numbers = sum(value.numel() for group in small.init_server(7, 0).values() for value in group.values())
    experiment = Experiment.parse({"algorithm": {"name": "fedavg"}})
    size = 4 * sum(build(experiment).algorithm.task.layers.num_parameters)
    monkeypatch.setattr(errors, "AFFORDABLE", 10 * size - 1)
    with pytest.raises(PfedlaError, match="10 clients"):
        build(experiment)
    monkeypatch.setattr(errors, "AFFORDABLE", 4 * numbers)
    small.check(7)
    monkeypatch.setattr(errors, "AFFORDABLE", 4 * numbers - 1)
    with pytest.raises(PfedlaError, match="hidden_size"):
        small.check(7)


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"clients": 3, "samples_per_client": 60}
    experiment = Experiment.parse({"rounds": 1, "data": data, "training": {"local_epochs": 1}})
    return run(experiment, tmp_path_factory.mktemp("hardening") / "run")


@pytest.fixture(scope="module")
def run_folder(whole_folder: Path) -> Path:
    """Without checksums, which would keep damaged files from the readers."""
    return drop_sums(Path(shutil.copytree(whole_folder, whole_folder.with_name("old"))))


@fuzz(100)
@given(st.data())
def test_a_damaged_run_folder_gives_its_model_or_is_refused(run_folder: Path, data: st.DataObject) -> None:
    path = run_folder / data.draw(st.sampled_from(["federation.json", "models/client-1.safetensors"]))
    good, whole = path.read_bytes(), load_file(run_folder / "models" / "client-1.safetensors")
    try:
        path.write_bytes(data.draw(damaged(good)))
        with at_most(GIBIBYTE), suppress(PfedlaError):
            personal = load_personal(run_folder, "1")
            assert all(personal.module.state_dict()[name].shape == value.shape for name, value in whole.items())
            assert all(value.isfinite().all() for value in personal.module.state_dict().values())
            evaluate_personal(personal, None)
    finally:
        path.write_bytes(good)


@fuzz(100)
@given(st.data())
def test_damaged_results_and_rounds_are_shown_or_refused(run_folder, tmp_path: Path, data: st.DataObject) -> None:
    good, path = (run_folder / "result.json").read_bytes(), tmp_path / "result.json"
    assert read_result(run_folder / "result.json") == json.loads(good)
    path.write_bytes(data.draw(damaged(good) | st.sampled_from([b"[]", b"{}", b"null", b'{"rounds": 1}'])))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        result = read_result(path)
        Console(quiet=True).print(result_table(result), *metrics_table(result), *warnings([result]))
        assert all(failures_lines(result, ["north"]))
        assert traffic_line(result["traffic"])
    line = (run_folder / "rounds.jsonl").read_bytes().splitlines()[-1]
    assert round_of(line) == 1
    text = data.draw(damaged(line))
    assert round_of(text) is None or "mean" in json.loads(text)["score"]
    assert all(round_of(text) is None for text in (b"", b"[" * 10**5, b"3", line.replace(b'"mean"', b'"men"')))


def test_a_federation_or_client_that_cannot_be_is_refused(run_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    path, good = tmp_path / "run" / "federation.json", json.loads((run_folder / "federation.json").read_text())
    for change, named in (
        ({"shape": [2**70, 8, 8], "mean": [], "std": []}, "shape"),
        ({"shape": [1, 12, 8]}, "fc1.weight"),
        ({"classes": ["a"] * 10**6}, "fc2"),
        ({"classes": [1] * 10**6}, "classes"),
        ({"mean": [1.0, 2.0], "std": [1.0, 1.0]}, "mean"),
        ({"std": [0.0]}, "std"),
        ({"clients": []}, "client"),
    ):
        path.write_text(json.dumps(good | change))
        with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=named):
            evaluate_personal(load_personal(tmp_path / "run", "1"), None)
    for client in ("9" * 5000, "-1", "3", "../models/client-1", "", "²"):
        with pytest.raises(PfedlaError, match="client"):
            load_personal(run_folder, client)


def flip(path: Path) -> None:
    """Change one number in a file, so that it can still be read."""
    if path.suffix == ".json":
        text = path.read_text()
        found = next(re.finditer(r'"mean": \[?\s*\d+\.\d', text))
        path.write_text(text[: found.end()] + "0" + text[found.end() :])
    else:
        path.write_bytes(path.read_bytes()[:-2] + b"\0\0")


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("federation.json", ["report", "watch", "evaluate", "export", "join"]),
        ("alpha.safetensors", ["report", "watch", "draw"]),
        ("models/client-1.safetensors", ["evaluate", "export"]),
        ("trained_on.npy", ["evaluate"]),
        ("joined/own/model.safetensors", ["evaluate"]),
    ],
)
def test_a_file_that_was_changed_since_the_run_ended_is_refused(pfedla, whole_folder, tmp_path, name, commands) -> None:
    run, own = Path(shutil.copytree(whole_folder, tmp_path / "run")), save_own(tmp_path)
    if name.startswith("joined"):
        assert not read_folder(pfedla, "join", run, own)
    client, data = ("joined/own", []) if name.startswith("joined") else ("1", ["--data", own])
    data = data if name == "trained_on.npy" else []
    for command in commands:
        (run / "learning_curve.png").unlink(missing_ok=True)
        flip(run / name)
        if command == "evaluate":
            code, _, err = pfedla("evaluate", run, "--client", client, *data)
            assert (code, "SHA-256" in err) == (2, True)
        else:
            assert "SHA-256" in read_folder(pfedla, command, run, own)
    drop_sums(run / Path(name).parent if client != "1" else run)  # as an older version wrote it: nobody notices
    code, _, err = pfedla("evaluate", run, "--client", client, *data)
    assert code == 0, err


def test_a_link_is_replaced_and_never_written_through(pfedla, whole_folder: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(whole_folder, tmp_path / "run"))
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for page in (tmp_path / "page.html", tmp_path / "federation.png"):
        page.symlink_to(mine)
    assert pfedla("report", run, "--out", tmp_path / "page.html")[0] == 0
    assert pfedla("data", "show", run, "--out", tmp_path / "federation.png")[0] == 0
    for name, words in {
        "report.html": ["report", run],
        "learning_curve.png": ["run", run, "--resume"],
        "rounds.jsonl": ["run", run, "--resume", "--rounds", 2],
        "environment.json": ["report", run],
        "models": ["evaluate", run, "--client", 1],
    }.items():
        shutil.rmtree(run / name) if name == "models" else (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
        code, _, err = pfedla(*words)
        assert (code, name in err) == (2, True)
        (run / name).unlink()
    assert mine.read_text() == "mine"
    assert not (tmp_path / "page.html").is_symlink()


# --- everything that reads a folder, on 2,000 damaged ones ---

HELD = b"not of the run"
STRANGE = [None, True, -1, 1.5, 2**70, 10**400, "", "x" * 1000, "<script>", "\u202e", [], {}, [[[]]], {"a": {"b": {}}}]
RAW = ["NaN", "1e999", "-Infinity", r'"\ud800"', "[" * 400 + "]" * 400, '{"a":' * 400 + "1" + "}" * 400, "9" * 5000]
LARGE = ["federation.json", "result.json", "rounds.jsonl", "alpha.safetensors", "experiment.toml", "environment.json"]
PERSONAL = ["federation.json", "result.json", "experiment.toml", "models/client-1.safetensors", "trained_on.npy"]
STATE = ["checkpoints/round-1.json", "checkpoints/round-1.safetensors"]
READERS = {  # command: how often it is tried, the files that it reads
    "report": (5, LARGE),
    "watch": (5, LARGE),
    "deploy": (4, ["app/pyproject.toml"]),
    "evaluate": (3, PERSONAL),
    "export": (2, PERSONAL),
    "join": (2, [*PERSONAL[:3], *STATE]),
    "draw": (1, LARGE[:5]),
    "resume": (1, [*LARGE, *STATE]),
}


def damage(draws: random.Random, path: Path, outside: Path) -> str:
    """Damage a file: its bytes, one of its values, or what it is; return how."""
    good, how = path.read_bytes(), draws.choices(["bytes", "value", "kind"], [4, 5, 1])[0]
    if how == "kind":
        path.unlink()
        how = draws.choice(["gone", "empty", "folder", "pipe", "zero", "link", "dangling", "loop"])
        links = {"zero": Path("/dev/zero"), "link": outside, "dangling": outside.with_name("new"), "loop": path}
        if how in links:
            path.symlink_to(links[how])
        elif how != "gone":
            {"empty": path.touch, "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}[how]()
    elif how == "value" and path.suffix in (".json", ".jsonl", ".toml"):
        text = good.decode()
        pattern = r"(?<= = ).*$" if path.suffix == ".toml" else r"(?<=[:\[,\n] )[^\s\[\]{}:,]+|\[[^\[\]{}]*\]"
        found = draws.choice([*re.finditer(pattern, text, re.MULTILINE)])
        strange = draws.choice([*map(json.dumps, STRANGE), *RAW, *(["nan", "1979-05-27"] * (path.suffix == ".toml"))])
        path.write_text(text[: found.start()] + strange + text[found.end() :])
        how = f"{found[0]:.40} -> {strange:.40}"
    else:
        content, how = bytearray(good), "bytes"
        for _ in range(draws.randint(1, 3)):
            start = draws.randrange(len(content) + 1)
            content[start : start + draws.choice([0, 1, 4, len(content)])] = draws.randbytes(draws.randint(0, 8))
        path.write_bytes(content)
    return f"{path.name}: {how}"


def save_own(place: Path) -> Path:
    examples = np.arange(20 * 64, dtype=np.uint8).reshape(20, 1, 8, 8)
    np.savez(place / "own.npz", x=examples, y=np.arange(20) % 4)
    return place / "own.npz"


def read_folder(pfedla: Any, command: str, run: Path, own: Path) -> str:
    """Read a folder as a command does; return what the command says on standard error."""
    if command in ("watch", "deploy"):
        try:
            if command == "deploy":
                read_deployment(run).build()
                return ""
            with Watcher([run], "127.0.0.1", 0) as server:
                json.dumps(server.data(), allow_nan=False)
        except (PfedlaError, OSError) as error:
            return str(error)
        return ""
    client = ["--client", 1]
    words = {"draw": ["run", run, "--resume", "-q"], "resume": ["run", run, "--resume", "--rounds", 2, "-q"]}
    words |= {"evaluate": ["evaluate", run, *client], "export": ["export", run, *client, "--out", run.parent / "e"]}
    words |= {"join": ["join", run, "--data", own, "--rounds", 1, "-q"], "report": ["report", run]}
    return str(pfedla(*words[command])[2])


@contextmanager
def at_latest(seconds: float) -> Iterator[None]:
    """Fail what hangs: no command catches a BaseException."""

    def stop(*_: object) -> None:
        pytest.fail("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 20))])
def test_a_damaged_folder_is_read_or_refused_in_a_sentence(pfedla, whole_folder, run_folder, tmp_path, part) -> None:
    """No traceback, no hang, no gigabytes; what lies outside the folder is neither read nor written."""
    draws, own, outside = random.Random(part), save_own(tmp_path), tmp_path / "outside"
    outside.write_bytes(HELD)
    deployment = plan_deployment(Experiment.parse({"data": {"clients": 2}}), None, tmp_path)
    (tmp_path / "deployment").mkdir()
    write_app(tmp_path / "deployment" / "app", deployment)
    wrong: list[str] = []
    for number in range(100):
        command = draws.choices([*READERS], [often for often, _ in READERS.values()])[0]
        source = tmp_path / "deployment" if command == "deploy" else draws.choice([whole_folder, run_folder])
        place = Path(shutil.copytree(source, tmp_path / str(number) / "run"))
        if command in ("watch", "resume") and draws.random() < 0.5:
            (place / "result.json").unlink()
        (place / "learning_curve.png").unlink(missing_ok=True)
        there = [name for name in READERS[command][1] if (place / name).exists()]
        done = damage(draws, place / draws.choice(there), outside)
        try:
            with at_latest(60), at_most(GIBIBYTE):
                err = read_folder(pfedla, command, place, own)
            assert "out of memory" not in err, err
        except Exception as error:
            wrong.append(f"{number} {command} ({done}): {traceback.format_exception(error)[-3:]}")
        assert (outside.read_bytes(), (tmp_path / "new").exists()) == (HELD, False), f"{command} ({done})"
        shutil.rmtree(tmp_path / str(number))
    assert not wrong, "\n".join(wrong)


def write_npz(path: Path, x: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", npy("<i8", "(4,)") + bytes(32))
    return path


def npy(dtype: str, shape: str) -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def test_an_array_that_claims_what_is_not_there_is_refused(tmp_path: Path) -> None:
    for x in (
        *(npy("<f8", shape) for shape in ("(4, 1000000000000)", "(4, 99999999999999999999)", "(4, 10**12)")),
        *(npy(*claim) for claim in (("<U0", "(1000000000,)"), ("|V0", "(4, 1)"), ("<U1000000000", "(4,)"))),
        npy("<f8", "(-2, -2)") + bytes(32),
        npy("<f8", "(4, 1)") + bytes(31),
        *(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head for head in (b"~" * 9000, b"((((")),
        b"\x93NUMPY\x09\x00" + bytes(90),
    ):
        with at_most(GIBIBYTE // 4), pytest.raises(PfedlaError, match=r"x\.npy"):
            load_arrays(write_npz(tmp_path / "x.npz", x))


@pytest.mark.parametrize("code", [0xD800, 0x110000, 2**32 - 1])
def test_names_that_no_file_could_hold_are_refused(pfedla: Any, tmp_path: Path, code: int) -> None:
    """Half of a surrogate pair, and code points beyond Unicode."""
    odd = np.array([ord("a"), ord("b"), code, ord("a")], "<u4").view("<U1")
    for key in ("y", "client"):
        np.savez(tmp_path / "x.npz", **{"x": np.zeros((4, 2)), "y": np.arange(4) % 2, key: odd})
        with pytest.raises(PfedlaError, match="Unicode"):
            load_arrays(tmp_path / "x.npz")
    if code != 0xD800:  # Python and pandas hold no others
        return
    words = {"a": [1.0, 2.0] * 4, "c": ["u", "v"] * 4, "y": ["p", "q"] * 4, "client": ["m", "n"] * 4}
    for key in ("c", "y", "client"):
        frame = pandas.DataFrame(words | {key: pandas.Series(["\ud800", "b"] * 4, dtype=object)})
        with pytest.raises(PfedlaError, match="Unicode"):
            federation_of(frame, "y", client="client")
    np.savez(tmp_path / "\udcff.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2)
    assert pfedla("run", "-d", tmp_path / "\udcff.npz")[0] == 2


def test_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size, small = 2**28 + 4096, npy("<f8", "(4, 1)") + bytes(32)
    zeros = npy("|u1", f"(4, {size // 4})") + bytes(size)
    packed = write_npz(tmp_path / "zeros.npz", zeros, zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < size / 500
    assert load_arrays(write_npz(tmp_path / "x.npz", small)).x.shape == (4, 1)
    monkeypatch.setattr(arrays, "LARGEST_ARRAY", size + 200)
    for path in (packed, write_npz(tmp_path / "lzma.npz", small, zipfile.ZIP_LZMA)):
        with at_most(2**27), pytest.raises(PfedlaError, match=r"x\.npy"):
            load_arrays(path)


def test_tables_of_clients_and_classes_are_bounded() -> None:
    rows = np.arange(40_000)
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="clients"):
        federation_of(np.zeros((40_000, 1), np.uint8), rows % 1000, rows % 20_000)
    how = {"partition": "iid", "clients": 1000, "samples_per_client": 4000, "overlapping": True}
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="samples_per_client"):
        federation_of(np.zeros((40_000, 64, 64), np.uint8), rows % 2, **how)


IDX, CIFAR = dict(list(idx_files("mnist", 4).items())[:2]), cifar_files("cifar10", 2)


@fuzz(300)
@given(st.data())
def test_damaged_data_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """In a file that is not packed a damaged byte reaches the headers of the arrays."""
    file, save = io.BytesIO(), data.draw(st.sampled_from([np.savez, np.savez_compressed]))
    save(file, x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2, client=np.array(["a", "b"] * 10))
    write(tmp_path, {"damaged.npz": data.draw(damaged(file.getvalue()))})
    with at_most(GIBIBYTE), suppress(PfedlaError):
        assert load_arrays(tmp_path / "damaged.npz").x.shape[1:] == (2,)
    name = data.draw(st.sampled_from([*IDX, next(iter(CIFAR))]))
    files = IDX if name in IDX else CIFAR
    write(tmp_path, files | {name: data.draw(damaged(files[name]))})
    paths = [tmp_path / file for file in files]
    with at_most(GIBIBYTE), suppress(PfedlaError):
        x, y = read_idx_pair(*paths, 10) if name in IDX else read_cifar(paths, 10, {})
        assert x.shape == ((len(y), 28, 28) if name in IDX else (len(y), 3, 32, 32))


@fuzz(100)
@given(st.text())
def test_a_name_stays_in_its_folder_and_a_long_value_is_shown_short(text: str) -> None:
    name = safe_name(text)
    assert Path("runs", name).parent == Path("runs")
    assert 1 <= len(name.encode()) <= 60
    assert (name.isprintable(), name.strip(" .")) == (True, name)
    assert safe_name("letters_v1.2-a") == "letters_v1.2-a"
    assert all(len(shown(value)) < 300 for value in (text, "x" * 10**6, [[0] * 10**5] * 100, {"a": {"b": {"c": {}}}}))


@pytest.mark.filterwarnings("ignore:Glyph 27")  # no font has an escape character
def test_names_of_files_and_clients_stay_below_the_run(pfedla, tmp_path: Path) -> None:
    strange, outside = "a\x1b[2J b:*..", "../../../../outside"
    x, y = np.arange(160.0).reshape(80, 2), np.arange(80) % 2
    np.savez(tmp_path / f"{strange}.npz", x=x, y=y, client=np.array([outside, "b"] * 40)[np.arange(80) // 2 % 2])
    before = {*tmp_path.iterdir()}
    quick = ["-d", tmp_path / f"{strange}.npz", "--rounds", 1, "--local-epochs", 1, "-q"]
    export = ["export", Path("runs/pfedla-a_2J_b-client-s0"), "--client", outside]
    for command in (["run", *quick], ["compare", "-a", "local", *quick], ["data", "show", *quick[:2]], export):
        code, _, err = pfedla(*command)
        assert code == 0, err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["compare-a_2J_b-client", export[1].name]
    assert [path.name for path in Path("runs").glob("*/export/*")] == ["client-outside"]
    assert {path.name for path in {*tmp_path.iterdir()} - before} == {"runs", "federation-a_2J_b-client-s0.png"}
    assert not (tmp_path.parent / "outside").exists()


def test_nothing_in_the_package_can_open_a_pickle() -> None:
    modules = r"^\s*(import|from) +(_?pickle|dill|cloudpickle|joblib|shelve|marshal)\b"
    opens = re.compile(rf"{modules}|\b(torch|np|numpy)\.load\b|allow_pickle=True", re.MULTILINE)
    files = list(Path(package.__file__).parent.rglob("*.py"))
    assert [file for file in files if opens.search(file.read_text(encoding="utf-8"))] == []
    assert all(opens.search(source) for source in ("import pickle", "  from dill import loads", "np.load(path)"))
