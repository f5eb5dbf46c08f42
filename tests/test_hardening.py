"""Untrusted files: whatever they hold, they are read correctly or refused, and memory stays bounded."""

import io
import json
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import budget
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official import cifar_files, idx_files, write
from rich.console import Console
from safetensors.torch import load_file, save_file

import pfedla as package
from pfedla.algorithms import create
from pfedla.core import errors
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_json, safe_name
from pfedla.core.models import MODELS, build_model
from pfedla.core.tasks import task_of
from pfedla.core.tensor_files import read_tensors
from pfedla.data import formats
from pfedla.data.federation import federation_of
from pfedla.data.formats import load_arrays, read_cifar, read_idx_pair
from pfedla.report.reading import read_result, round_of
from pfedla.report.tables import failures_lines, result_table, traffic_line, warnings
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.simulation import run

GIBIBYTE = 2**30


def fuzz(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


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
        start = draw(st.integers(0, max(0, len(content) - 1)))
        kind = draw(st.sampled_from(["flip", "cut", "drop", "insert"]))
        if kind == "flip" and content:
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[start:]
        elif kind == "drop":
            del content[start : start + draw(st.integers(1, 8))]
        else:
            content[start:start] = draw(st.binary(min_size=1, max_size=8))
    return bytes(content)


# Tensors and JSON


def test_tensors_are_read_if_the_header_is_as_expected(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    good = {"w": torch.randn(3, 5), "n": torch.tensor(7), "h": torch.ones(2, dtype=torch.bfloat16)}
    expected = {name: value.to("meta") for name, value in good.items()}
    save_file(good, path)
    assert all(torch.equal(value, good[name]) for name, value in read_tensors(path, expected).items())
    for change, named in (
        ({"w": torch.randn(3, 4)}, "w"),
        ({"w": torch.randn(3, 5).double()}, "w"),
        ({"w": torch.full((3, 5), torch.inf)}, "w"),
        ({"more": torch.zeros(1), "w": torch.full((3, 5), torch.nan)}, "more"),  # the header is checked first
    ):
        save_file({**good, **change}, path)
        with pytest.raises(PfedlaError, match=rf"t\.safetensors: .*{named}"):
            read_tensors(path, expected)
    save_file({"w": torch.full((3, 5), torch.nan)}, path)
    assert read_tensors(path, {"w": expected["w"]}, finite=False)["w"].isnan().all()
    with pytest.raises(PfedlaError, match="'n'"):
        read_tensors(path, {"w": expected["w"], "n": expected["n"]})


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A device never ends."""
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "nothing"):
        for read in (read_json, load_arrays, lambda path: read_tensors(path, {})):
            with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=path.name):
                read(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff", b"NaN", b"[-Infinity]", b"[1e999]", b"9" * 5000, b"[" * 100_000, rb'"\ud800"', b" " * 2**21],
)
def test_json_is_strict(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(PfedlaError, match=r"file\.json is damaged"):
        read_json(path, 2**20)
    path.write_text('{"ä": [1, 2.5, null]}', encoding="utf-8")
    assert read_json(path) == {"ä": [1, 2.5, None]}


# Sizes


def test_a_long_value_is_shown_short() -> None:
    for value in ("x" * 10**6, [list(range(10**5))] * 100, {"a": {"b": {"c": {"d": {}}}}}):
        assert len(shown(value)) < 300


def test_what_all_models_take_is_known_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment.parse({"algorithm": {"name": "fedavg"}})
    size = 4 * sum(build(experiment).algorithm.task.layers.num_parameters)
    monkeypatch.setattr(errors, "AFFORDABLE", 10 * size - 1)
    with pytest.raises(PfedlaError, match="10 clients"):
        build(experiment)


def test_what_a_hypernetwork_takes_is_known_before_it_is_made() -> None:
    task = task_of(build_model("small-cnn", (1, 8, 8), 10, torch.Generator()))
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="hidden_size"):
        create("pfedhn", task, budget(0.1, 1, 8), {"hidden_size": 10_000}).check(10**6)
    small = create("pfedhn", task, budget(0.1, 1, 8))
    server = small.init_server(7, 0)
    groups = ("embeddings", "network", "momentum")
    numbers = sum(value.numel() for group in groups for value in server[group].values())
    assert numbers == small.hypernetwork_numbers(7)


@pytest.mark.parametrize("shape", [(10**30,), (2**28, 20, 20), (3, 2**14, 2**14)])
def test_absurd_models_are_refused_before_they_are_made(shape: tuple[int, ...]) -> None:
    for name in MODELS if len(shape) == 3 else ["mlp"]:
        with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=name):
            build_model(name, shape, 10, torch.Generator())


# Run folders


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = {"clients": 3, "samples_per_client": 60}
    experiment = Experiment.parse({"rounds": 1, "data": data, "training": {"local_epochs": 1}})
    return run(experiment, tmp_path_factory.mktemp("hardening") / "run")


@fuzz(100)
@given(st.data())
def test_a_damaged_run_folder_gives_its_model_or_is_refused(run_folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["federation.json", "models/client-1.safetensors"]))
    good = (run_folder / name).read_bytes()
    whole = load_file(run_folder / "models" / "client-1.safetensors")
    try:
        (run_folder / name).write_bytes(data.draw(damaged(good)))
        with at_most(GIBIBYTE), suppress(PfedlaError):
            personal = load_personal(run_folder, "1")
            assert all(personal.tensors[name].shape == value.shape for name, value in whole.items())
            assert all(value.isfinite().all() for value in personal.tensors.values())
            evaluate_personal(personal, None)
    finally:
        (run_folder / name).write_bytes(good)


@fuzz(100)
@given(st.data())
def test_a_damaged_result_makes_its_table_or_is_refused(run_folder, tmp_path: Path, data: st.DataObject) -> None:
    good = (run_folder / "result.json").read_bytes()
    assert read_result(run_folder / "result.json") == json.loads(good)
    path = tmp_path / "result.json"
    path.write_bytes(data.draw(damaged(good) | st.sampled_from([b"[]", b"{}", b"null", b'{"rounds": 1}'])))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        result = read_result(path)
        Console(quiet=True).print(result_table(result), *warnings([result]), *failures_lines(result))
        assert traffic_line(result["traffic"])


@fuzz(100)
@given(st.data())
def test_a_damaged_line_is_no_round(run_folder: Path, data: st.DataObject) -> None:
    line = (run_folder / "rounds.jsonl").read_text().splitlines()[-1]
    assert round_of(line) == 1
    text = data.draw(damaged(line.encode())).decode(errors="replace")
    assert round_of(text) is None or "mean" in json.loads(text)["accuracy"]
    strange = ["", "[" * 10**5, "3", "{}", '{"round": 1}', line.replace('"mean"', '"men"')]
    assert all(round_of(text) is None for text in strange)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"shape": [1, 8, 8, 8]}, "shape"),
        ({"shape": [1, 10**5, 10**5]}, "shape"),
        ({"shape": [2**70, 8, 8], "mean": [], "std": []}, "shape"),
        ({"shape": [1, 12, 8]}, "fc1.weight"),
        ({"classes": ["a"] * 10**6}, "fc2"),
        ({"classes": [1] * 10**6}, "classes"),
        ({"mean": [1.0, 2.0, 3.0], "std": [1.0, 1.0, 1.0]}, "mean"),
        ({"std": [0.0]}, "std"),
        ({"clients": []}, "client"),
    ],
)
def test_a_federation_that_cannot_be_is_refused(run_folder, tmp_path: Path, change: dict, named: str) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    path = tmp_path / "run" / "federation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=named):
        evaluate_personal(load_personal(tmp_path / "run", "1"), None)


@pytest.mark.parametrize("client", ["9" * 5000, "-1", "3", "../models/client-1", "", "²"])
def test_a_client_that_is_not_there_is_refused(run_folder: Path, client: str) -> None:
    with pytest.raises(PfedlaError, match="client"):
        load_personal(run_folder, client)


# Data files


def write_npz(path: Path, x: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", npy("<i8", "(4,)") + bytes(32))
    return path


def npy(dtype: str, shape: str) -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize(
    "x",
    [
        npy("<f8", "(4, 10**12)"),
        npy("<f8", "(4, 1000000000000)"),
        npy("<f8", "(4, 99999999999999999999)"),
        npy("<f8", "(-2, -2)") + bytes(32),
        npy("<f8", "(4, 1)") + bytes(31),
        npy("<f8", "(4, 1)") + bytes(33),
        npy("<U0", "(1000000000,)"),
        npy("|V0", "(4, 1)"),
        npy("<U1000000000", "(4,)"),
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"~" * 9000,
        b"\x93NUMPY\x01\x00" + struct.pack("<H", 4) + b"((((",
        b"\x93NUMPY\x09\x00" + bytes(90),
        b"",
    ],
)
def test_an_array_that_claims_what_is_not_there_is_refused(tmp_path: Path, x: bytes) -> None:
    with at_most(GIBIBYTE // 4), pytest.raises(PfedlaError, match=r"x\.npy"):
        load_arrays(write_npz(tmp_path / "x.npz", x))


def test_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2**28 + 4096
    zeros = npy("|u1", f"(4, {size // 4})") + bytes(size)
    packed = write_npz(tmp_path / "zeros.npz", zeros, zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < size / 500
    small = npy("<f8", "(4, 1)") + bytes(32)
    strange = write_npz(tmp_path / "lzma.npz", small, zipfile.ZIP_LZMA)
    assert load_arrays(write_npz(tmp_path / "x.npz", small)).x.shape == (4, 1)
    monkeypatch.setattr(formats, "LARGEST_ARRAY", size + 200)
    for path in (packed, strange):
        with at_most(2**27), pytest.raises(PfedlaError, match=r"x\.npy"):
            load_arrays(path)


def test_unusual_arrays_are_taken(tmp_path: Path) -> None:
    values = np.arange(8.0).reshape(4, 2)
    for x in (values.astype(">f8"), values.astype(np.float16), values.astype(np.longdouble), np.asfortranarray(values)):
        np.savez(tmp_path / "x.npz", x=x, y=np.array([-5, -5, 2**40, 3]))
        dataset = load_arrays(tmp_path / "x.npz")
        assert dataset.x.tolist() == values.tolist()
        assert dataset.classes == ("-5", "3", str(2**40))


def test_tables_of_clients_and_classes_are_bounded() -> None:
    rows = np.arange(40_000)
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="clients"):
        federation_of(np.zeros((40_000, 1), np.uint8), rows % 1000, rows % 20_000)
    how = {"partition": "iid", "clients": 1000, "samples_per_client": 4000, "overlapping": True}
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="samples_per_client"):
        federation_of(np.zeros((40_000, 64, 64), np.uint8), rows % 2, **how)


@fuzz(300)
@given(st.data())
def test_a_damaged_npz_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    """In a file that is not packed a flipped bit reaches the headers of the arrays."""
    file, save = io.BytesIO(), data.draw(st.sampled_from([np.savez, np.savez_compressed]))
    save(file, x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2, client=np.array(["a", "b"] * 10))
    path = tmp_path / "damaged.npz"
    path.write_bytes(data.draw(damaged(file.getvalue())))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        assert load_arrays(path).x.shape[1:] == (2,)


IDX, CIFAR = dict(list(idx_files("mnist", 4).items())[:2]), cifar_files("cifar10", 2)


@fuzz(100)
@given(st.data())
def test_damaged_official_files(tmp_path: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*IDX, next(iter(CIFAR))]))
    files = IDX if name in IDX else CIFAR
    write(tmp_path, files | {name: data.draw(damaged(files[name]))})
    paths = [tmp_path / file for file in files]
    with at_most(GIBIBYTE), suppress(PfedlaError):
        x, y = read_idx_pair(*paths, 10) if name in IDX else read_cifar(paths, (1,) * 6, (10,), {})[::-1]
        assert x.shape == ((len(y), 28, 28) if name in IDX else (len(y), 3, 32, 32))


# Names that become paths


@fuzz(100)
@given(st.text())
def test_a_name_stays_in_its_folder(text: str) -> None:
    name = safe_name(text)
    assert Path("runs", name).parent == Path("runs")
    assert 1 <= len(name.encode()) <= 60
    assert name.isprintable()
    assert name == name.strip(" .")
    assert safe_name("letters_v1.2-a") == "letters_v1.2-a"


@pytest.mark.filterwarnings("ignore:Glyph 27")  # no font has an escape character
def test_names_of_files_and_clients_stay_below_the_run(pfedla, tmp_path: Path) -> None:
    strange, outside = "a\x1b[2J b:*..", "../../../../outside"
    x, y = np.arange(160.0).reshape(80, 2), np.arange(80) % 2
    np.savez(tmp_path / f"{strange}.npz", x=x, y=y, client=np.array([outside, "b"] * 40)[np.arange(80) // 2 % 2])
    before = {*tmp_path.iterdir()}
    quick = ["-d", tmp_path / f"{strange}.npz", "--rounds", 1, "--local-epochs", 1, "-q"]
    for command in (["run", *quick], ["compare", "-a", "local", *quick], ["data", "show", *quick[:2]]):
        code, _, err = pfedla(*command)
        assert code == 0, err
    code, _, err = pfedla("export", next(Path("runs").glob("pfedla-*")), "--client", outside)
    assert code == 0, err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["compare-a_2J_b-client", "pfedla-a_2J_b-client-s0"]
    assert [path.name for path in Path("runs").glob("*/export/*")] == ["client-outside"]
    assert {path.name for path in {*tmp_path.iterdir()} - before} == {"runs", "federation-a_2J_b-client-s0.png"}
    assert not (tmp_path.parent / "outside").exists()


# Nothing is ever unpickled


def test_nothing_in_the_package_can_open_a_pickle() -> None:
    modules = r"^\s*(import|from) +(_?pickle|dill|cloudpickle|joblib|shelve|marshal)\b"
    opens = re.compile(rf"{modules}|\b(torch|np|numpy)\.load\b", re.MULTILINE)
    files = list(Path(package.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert [file for file in files if opens.search(file.read_text(encoding="utf-8"))] == []
    assert all(opens.search(source) for source in ("import pickle", "  from dill import loads", "np.load(path)"))
