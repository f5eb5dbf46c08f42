"""Strangers' files: whatever they hold, the answer is a correct load or a sentence, and memory stays in bounds."""

import ast
import io
import json
import re
import shutil
import struct
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import tomli_w
import torch
from conftest import budget, make, methods, play, toy_federation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from official import cifar_files, idx_files, write
from pydantic import BaseModel, ValidationError
from rich.console import Console
from safetensors.torch import load_file, save_file

import pfedla
from pfedla import errors
from pfedla.algorithms import ALGORITHMS, create, options_model
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import read_json, read_tensors, safe_name
from pfedla.core.models import MODELS, build_model, outline
from pfedla.core.tasks import task_of
from pfedla.data import datasets, own
from pfedla.data.federation import federation_of
from pfedla.data.formats import read_cifar, read_idx, read_idx_pair
from pfedla.data.own import dataset_of, load_npz
from pfedla.data.partition import by_client
from pfedla.data.recipe import Partition
from pfedla.engines import ENGINES
from pfedla.report.tables import Row, failures_lines, result_table, traffic_line, warnings
from pfedla.runs.experiment import Experiment, build, read_toml
from pfedla.runs.overrides import with_setting
from pfedla.runs.personal import FederationFile, evaluate_personal, load_personal
from pfedla.runs.result import run
from pfedla.runs.result_file import read_result, round_of

GIBIBYTE = 2**30
DIGITS = datasets.load("digits")


def fuzz(examples: int) -> settings:
    return settings(max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def call(pfedla: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str, str]]:
    """The command line; here `pfedla` is the package."""
    return pfedla


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """The process cannot have more memory than this beyond what it has; an attempt ends in an error that no test expects."""
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


def test_the_memory_limit_of_these_tests_can_fail() -> None:
    if sys.platform == "linux":
        with at_most(GIBIBYTE), pytest.raises(MemoryError):
            np.empty(2 * GIBIBYTE, np.uint8)
        np.empty(2 * GIBIBYTE, np.uint8)


# Tensors and JSON


def test_tensors_are_read_if_the_header_is_as_expected(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    good = {"w": torch.randn(3, 5), "n": torch.tensor(7), "h": torch.ones(2, dtype=torch.bfloat16), "b": torch.tensor([True])}
    expected = {name: value.to("meta") for name, value in good.items()}
    save_file(good, path)
    read = read_tensors(path, expected)
    assert all(torch.equal(read[name], value) for name, value in good.items())
    for change, message in (
        ({"w": torch.randn(3, 4)}, r"w is float32 \(3, 4\), not float32 \(3, 5\)"),
        ({"w": torch.randn(3, 5).double()}, r"w is float64 \(3, 5\), not float32 \(3, 5\)"),
        ({"w": torch.full((3, 5), torch.inf)}, "w holds numbers that are not finite"),
        ({"more": torch.zeros(1)}, "tensor 'more' does not belong there"),
    ):
        save_file({**good, **change}, path)
        with pytest.raises(PfedlaError, match=message) as error:
            read_tensors(path, expected)
        assert str(path) in str(error.value)
    save_file({"w": torch.full((3, 5), torch.nan), "z": torch.zeros(1)}, path)
    with pytest.raises(PfedlaError, match="tensor 'z' does not belong there"):  # the whole header comes before any number
        read_tensors(path, {"w": expected["w"]})
    both = {"w": expected["w"], "z": torch.zeros(1, device="meta")}
    assert read_tensors(path, both, finite=False)["w"].isnan().all()
    with pytest.raises(PfedlaError, match="tensor 'zz' is missing"):
        read_tensors(path, {**both, "zz": expected["w"]})


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A device never ends."""
    for path in (tmp_path, Path("/dev/zero"), tmp_path / "nothing"):
        for read in (read_json, read_toml, load_npz, lambda path: read_tensors(path, {})):
            with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=path.name):
                read(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"\xff", "damaged"),
        (b"NaN", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e999]", "1e999 is too large"),
        (b"9" * 5000, "damaged"),
        (b"[" * 100_000, "damaged"),
        (rb'"\ud800"', "damaged"),
        (b" " * 101, "it has 101 bytes, at most 100"),
    ],
)
def test_json_is_strict(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.raises(PfedlaError, match=message) as error:
        read_json(path, 100 if len(content) == 101 else 2**20)
    assert str(path) in str(error.value)
    path.write_text('{"ä": [1, 2.5, null]}', encoding="utf-8")
    assert read_json(path) == {"ä": [1, 2.5, None]}


# Experiments

SECTIONS: dict[str, Any] = {
    name: field.annotation
    for name, field in Experiment.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
}
PLACES = [(name,) for name in Experiment.model_fields] + [
    (section, key) for section, kind in SECTIONS.items() for key in kind.model_fields
]
OPTIONS = {name: [*options_model(kind).model_fields] for name, kind in ALGORITHMS.items()}
WORDS = ["auto", "all", *get_args(Partition), *MODELS, *ENGINES, *ALGORITHMS, "digits", "../../x.npz", "\x00.npz", "cuda:-1"]
PLAUSIBLE = st.sampled_from(
    [0, 1, 2, 4, 9, 60, 1797, 1798, 10**6, 10**9, 5e-324, 0.01, 0.3, 0.999, 1.0, 1e6, 1e38, 1e308, True, False, *WORDS]
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(["../" * 9, "/etc/passwd", "x" * 10**5])
SCALARS = st.one_of(
    st.integers(-(10**30), 10**30), st.sampled_from([10**400, -1, 2**63, 2**64]), st.floats(), TEXT, st.booleans(), st.dates(),
    st.datetimes(), st.times(), PLAUSIBLE,
)  # fmt: skip
WILD = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6)


def laid_out(values: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for (*sections, key), value in values:
        place = document.setdefault(sections[0], {}) if sections else document
        if isinstance(place, dict):
            place[key] = value
    return document


@fuzz(200)
@given(st.lists(st.tuples(st.sampled_from(PLACES) | st.tuples(TEXT) | st.tuples(TEXT, TEXT), WILD), max_size=4))
def test_any_document_is_an_experiment_or_a_sentence(values: list[tuple[tuple[str, ...], Any]]) -> None:
    text = tomli_w.dumps(laid_out(values))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        build(Experiment.parse(tomllib.loads(text)))


@fuzz(250)
@given(st.data())
def test_any_plausible_experiment_is_built_or_refused(data: st.DataObject) -> None:
    """Values of the right kind at the ends of their ranges: nothing is allocated that was not computed first."""
    name = data.draw(st.sampled_from(list(ALGORITHMS)))
    places = st.sampled_from([*PLACES, *[("algorithm", option) for option in OPTIONS[name]] * 3])
    changes = data.draw(st.lists(st.tuples(places, PLAUSIBLE), min_size=1, max_size=3))
    partition = data.draw(st.sampled_from(get_args(Partition)))
    start = [(("algorithm", "name"), name), (("data", "partition"), partition)]
    with at_most(GIBIBYTE), suppress(PfedlaError):
        build(Experiment.parse(laid_out([*start, *changes])), DIGITS)


def test_plain_experiments_are_not_refused() -> None:
    """The two tests above would also pass if everything were."""
    for name in ALGORITHMS:
        if name != "fedbn":  # needs BatchNorm
            built = build(Experiment.parse(laid_out([(("algorithm", "name"), name)])), DIGITS)
            assert built.algorithm.name == name


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "a = " + "9" * 5000, "a = '\xff'", "#" * 2**21])
def test_experiment_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(PfedlaError, match=r"e\.toml"):
        read_toml(path)


def test_a_strange_value_is_shown_short() -> None:
    nested: dict[str, Any] = {}
    inner = nested
    for _ in range(3000):
        inner["a"] = inner = {}
    for value in (nested, "x" * 10**6, 16**9000, [16**9000] * 100, list(range(10**5))):
        assert len(shown(value)) < 300
    assert shown("digits") == "'digits'"
    with pytest.raises(PfedlaError, match=r"hidden_size = {'a': "):
        create("pfedla", task_of(outline("mlp", (4,), 2)), budget(0.1, 1, 8), {"hidden_size": nested})


@pytest.mark.parametrize(
    "text", ["seed = 0x" + "f" * 9000, "a." * 3000 + "a = 1", "data." * 3000 + "a = 1", "data = 0x" + "f" * 9000]
)
def test_a_value_that_cannot_be_printed_is_refused(text: str) -> None:
    with pytest.raises(PfedlaError, match=r"is not possible|unknown key") as error:
        Experiment.parse(tomllib.loads(text))
    assert len(str(error.value)) < 1000


def test_a_section_that_cannot_be_printed_is_refused(call) -> None:
    Path("e.toml").write_text("data = 0x" + "f" * 9000 + "\nlocal = 0x" + "f" * 9000)
    for command in (["run", "e.toml", "--clients", 3], ["compare", "e.toml"], ["compare", "--seeds", "9" * 5000]):
        code, _, err = call(*command)
        assert code == 2
        assert len(err) < 500


@pytest.mark.parametrize("word", ["9" * 5000, "[" * 5000, "{a." + "a." * 2000 + "a = 1}"])
def test_a_setting_that_cannot_be_read_is_refused(word: str) -> None:
    with pytest.raises(PfedlaError, match=r"seed = .* is not possible"):
        Experiment.parse(with_setting({}, f"seed={word}"))


@pytest.mark.parametrize(("key", "value"), [("local_epochs", 10**9), ("local_epochs", 10_001), ("lr", 1e39)])
def test_the_local_budget_has_an_end(key: str, value: float) -> None:
    with pytest.raises(PfedlaError, match=f"training.{key} = "):
        Experiment.parse({"training": {key: value}})


def test_what_all_models_take_is_known_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = Experiment.parse({"algorithm": {"name": "fedavg"}})
    size = 4 * sum(build(experiment, DIGITS).algorithm.task.layers.num_parameters)
    monkeypatch.setattr(errors, "AFFORDABLE", 10 * size - 1)
    with pytest.raises(PfedlaError, match="the models of 10 clients would take"):
        build(experiment, DIGITS)


@pytest.mark.parametrize("name", methods("fedavg", "pfedme", "pfedla"))
def test_options_at_the_ends_of_their_ranges_run_or_are_refused(name: str) -> None:
    for option, field in options_model(ALGORITHMS[name]).model_fields.items():
        for value in (5e-324, 1e38, 1e308) if "float" in str(field.annotation) else ():
            with suppress(PfedlaError):
                algorithm = make(name, batch_norm=name == "fedbn", epochs=1, **{option: value})
                algorithm.check(6)
                played, _ = play(algorithm, toy_federation(), rounds=range(1, 2))
                assert all(value.isfinite().all() for value in played[-1].evaluation.accuracy)


def test_what_a_hypernetwork_takes_is_known_before_it_is_made() -> None:
    task = task_of(build_model("small-cnn", (1, 8, 8), 10, torch.Generator()))
    for name, groups in (("pfedla", ["hypernetworks"]), ("pfedhn", ["embeddings", "network", "momentum"])):
        sizes = {"embedding_size": 10_000, "hidden_size": 10_000}
        huge = create(name, task, budget(0.1, 1, 8), sizes)
        with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=r"hidden_size = 10000.* would take [\d,]+ GiB"):
            huge.check(10**6)
        small = create(name, task, budget(0.1, 1, 8), {})
        small.check(7)
        server = small.init_server(7, 0)
        numbers = sum(value.numel() for group in groups for value in server[group].values())
        assert numbers == small.hypernetwork_numbers(7)


# Models


@pytest.mark.parametrize("shape", [(10**30,), (2**28, 20, 20), (3, 2**14, 2**14), (1, 16, 10**9), (2**62, 2**62, 2**62)])
def test_absurd_models_are_refused_before_they_are_made(shape: tuple[int, ...]) -> None:
    for name in MODELS if len(shape) == 3 else ["mlp"]:
        with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="too large"):
            build_model(name, shape, 10, torch.Generator())
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="too large"):
        build_model("mlp", (8,), 10**20, torch.Generator())


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"rounds": 1, "data": {"clients": 3, "samples_per_client": 60}, "training": {"local_epochs": 1}}
    return run(Experiment.parse(values), tmp_path_factory.mktemp("hardening") / "run")


@fuzz(150)
@given(st.data())
def test_a_damaged_run_folder_gives_its_model_or_a_sentence(run_folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["experiment.toml", "federation.json", "models/client-1.safetensors"]))
    good = (run_folder / name).read_bytes()
    whole = load_file(run_folder / "models" / "client-1.safetensors")
    try:
        (run_folder / name).write_bytes(data.draw(damaged(good)))
        with at_most(GIBIBYTE), suppress(PfedlaError):
            personal = load_personal(run_folder, "1")
            assert {key: value.shape for key, value in personal.tensors.items()} == {k: v.shape for k, v in whole.items()}
            assert all(value.isfinite().all() for value in personal.tensors.values())
            evaluate_personal(personal, None)
    finally:
        (run_folder / name).write_bytes(good)


@fuzz(150)
@given(st.data())
def test_a_damaged_result_makes_its_table_or_a_sentence(run_folder: Path, tmp_path: Path, data: st.DataObject) -> None:
    good = (run_folder / "result.json").read_bytes()
    assert read_result(run_folder / "result.json") == json.loads(good)
    path = tmp_path / "result.json"
    path.write_bytes(data.draw(damaged(good) | st.sampled_from([b"[]", b"{}", b"null", b'{"rounds": 1}'])))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        result = read_result(path)
        Console(quiet=True).print(result_table(result), *warnings([result]), *failures_lines(result))
        assert traffic_line(result["traffic"])
        assert Row("a", [result]).cells()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("federation.json", "[]"),
        ("environment.json", "null"),
        ("result.json", "[]"),
        ("result.json", '{"rounds": 1}'),
        ("rounds.jsonl", "[" * 10**5),
        ("rounds.jsonl", '{"round": 1, "accuracy": 3}'),
    ],
)
def test_a_strange_run_folder_goes_on_or_is_refused(call, run_folder: Path, tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    for more in ([], ["--rounds", "2"]):
        assert call("run", "run", "--resume", *more)[0] in (0, 2)


@fuzz(100)
@given(st.data())
def test_a_damaged_line_is_no_round(run_folder: Path, data: st.DataObject) -> None:
    line = (run_folder / "rounds.jsonl").read_text().splitlines()[-1]
    assert round_of(line) == 1
    strange = ["", "[" * 10**5, "3", "{}", '{"round": 1}', line.replace('"mean"', '"men"'), line.replace("1", "9" * 5000)]
    text = data.draw(damaged(line.encode()).map(lambda content: content.decode(errors="replace")) | st.sampled_from(strange))
    assert round_of(text) is None or "mean" in json.loads(text)["accuracy"]
    assert all(round_of(text) is None for text in strange)


STRANGE: list[tuple[dict[str, Any], str]] = [
    ({"shape": [1, 8, 8, 8]}, "not 1 or 3"),
    ({"shape": []}, "not 1 or 3"),
    ({"shape": [1, 10**5, 10**5]}, "too large"),
    ({"shape": [2**70, 8, 8], "mean": [], "std": []}, "too large"),
    ({"shape": [1, 12, 8]}, r"fc1.weight is float32 \(64, 128\), not float32 \(64, 192\)"),
    ({"classes": ["a"] * 10**6}, r"not float32 \(1000000"),
    ({"classes": [1] * 10**6}, "classes: 0: Input should be a valid string"),
    ({"mean": [1.0, 2.0, 3.0], "std": [1.0, 1.0, 1.0]}, "3 means"),
    ({"std": [0.0]}, "std: 0"),
    ({"std": []}, "1 means and 0 standard deviations"),
    ({"mean": [1e300]}, "mean: 0"),
    ({"clients": []}, "unknown client '1'"),
    ({"test": []}, "not what it was"),
]


@pytest.mark.parametrize(("change", "message"), STRANGE)
def test_a_strange_federation_is_refused(run_folder: Path, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    shutil.copytree(run_folder, tmp_path / "run")
    path = tmp_path / "run" / "federation.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=message):
        evaluate_personal(load_personal(tmp_path / "run", "1"), None)


def test_one_wrong_number_of_a_federation_is_enough() -> None:
    """A message for each of a million would take gigabytes."""
    strange = {"shape": ["a"] * 9, "classes": [1] * 9, "mean": [-1] * 9, "std": [-1] * 9, "clients": [1] * 9, "test": [1] * 9}
    with pytest.raises(ValidationError) as error:
        FederationFile.model_validate(strange)
    assert error.value.error_count() == 5  # of shape, classes, mean, std, clients


@pytest.mark.parametrize("client", ["9" * 5000, "-1", "3", "../models/client-1", "", "1\n", "²"])
def test_a_client_that_is_not_there_is_refused(run_folder: Path, client: str) -> None:
    with pytest.raises(PfedlaError, match="unknown client"):
        load_personal(run_folder, client)


# Data files


def npz(path: Path, x: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", npy("<i8", "(4,)") + bytes(32))
    return path


def npy(dtype: str, shape: str) -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (npy("<f8", "(4, 10**12)"), "does not begin"),
        (npy("<f8", "(4, 1000000000000)"), "claims 32000000000000 bytes and has 0"),
        (npy("<f8", "(4, 99999999999999999999)"), "claims"),
        (npy("<f8", "(-2, -2)") + bytes(32), "cannot be read"),
        (npy("<f8", "(4, 1)") + bytes(31), "claims 32 bytes and has 31"),
        (npy("<f8", "(4, 1)") + bytes(33), "claims 32 bytes and has 33"),
        (npy("<U0", "(1000000000,)"), "claims 0 bytes"),
        (npy("|V0", "(4, 1)"), "claims 0 bytes"),
        (npy("<U1000000000", "(4,)"), "cannot be read"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 9000) + b"~" * 9000, "does not begin"),
        (b"\x93NUMPY\x01\x00" + struct.pack("<H", 4) + b"((((", "does not begin"),
        (b"\x93NUMPY\x09\x00" + bytes(90), "does not begin"),
        (b"", "does not begin"),
    ],
)
def test_an_array_that_claims_what_is_not_there_is_refused(tmp_path: Path, x: bytes, message: str) -> None:
    with at_most(GIBIBYTE // 4), pytest.raises(PfedlaError, match=message):
        load_npz(npz(tmp_path / "x.npz", x))


def test_bombs_are_not_unpacked(tmp_path: Path) -> None:
    size = 2**28 + 4096
    packed = npz(tmp_path / "zeros.npz", npy("|u1", f"(4, {size // 4})") + bytes(size), zipfile.ZIP_DEFLATED)
    assert packed.stat().st_size < size / 500
    strange = npz(tmp_path / "lzma.npz", npy("<f8", "(4, 1)") + bytes(32), zipfile.ZIP_LZMA)
    with at_most(2**27):
        with pytest.raises(PfedlaError, match=r"would unpack to 2684\d+ bytes"):
            load_npz(packed)
        with pytest.raises(PfedlaError, match="numpy never does"):
            load_npz(strange)


def test_an_array_has_at_most_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npz(tmp_path / "x.npz", npy("<f8", "(4, 1)") + bytes(32))
    assert load_npz(path).x.shape == (4, 1)
    monkeypatch.setattr(own, "LARGEST", 90)
    with pytest.raises(PfedlaError, match=r"x.npy would unpack to \d+ bytes"):
        load_npz(path)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.full((4, 2), 1e39), np.arange(4), "too large for float32"),
        (np.full((4, 2), np.longdouble("1e4000")), np.arange(4), "too large for float32"),
        (np.zeros((4, 2), [("a", "f8")]), np.arange(4), "x is"),
        (np.zeros((4, 2), "M8[s]"), np.arange(4), "x is"),
        (np.zeros((4, 2000, 2, 2), np.uint8), np.arange(4), "2000 channels"),
        (np.zeros((10_001, 1), np.uint8), np.arange(10_001), "y has 10001 different values, at most 10000"),
        (np.zeros((2, 1)), np.array(["a", "b" * 1001]), "at most 1000 characters"),
        (np.zeros((2, 1)), np.array([b"a", b"b" * 4001]), "at most 1000 characters"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_strange_arrays_are_refused(tmp_path: Path, x: np.ndarray, y: np.ndarray, message: str) -> None:
    np.savez(tmp_path / "x.npz", x=x, y=y)
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=message):
        load_npz(tmp_path / "x.npz")


def test_unusual_arrays_are_taken(tmp_path: Path) -> None:
    values = np.arange(8.0).reshape(4, 2)
    for x in (values.astype(">f8"), values.astype(np.float16), values.astype(np.longdouble), np.asfortranarray(values)):
        np.savez(tmp_path / "x.npz", x=x, y=np.array([-5, -5, 2**40, 3]))
        dataset = load_npz(tmp_path / "x.npz")
        assert dataset.x.tolist() == values.tolist()
        assert dataset.classes == ("-5", "3", str(2**40))


def test_tables_of_clients_and_classes_have_an_end() -> None:
    rows = 40_000
    x, y = np.zeros((rows, 1), np.uint8), np.arange(rows) % 1000
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match="20000 clients times 1000 classes"):
        federation_of(x, y, np.arange(rows) % 20_000)
    wide = np.zeros((1000, 1, 64, 64), np.uint8)
    with at_most(GIBIBYTE), pytest.raises(PfedlaError, match=r"overlapping clients .* would take"):
        federation_of(np.broadcast_to(wide, (40, 1000, 1, 64, 64)).reshape(40_000, 1, 64, 64), np.arange(40_000) % 2,
                      partition="iid", clients=1000, samples_per_client=4000, overlapping=True)  # fmt: skip
    with pytest.raises(PfedlaError, match="at most 1e"):
        federation_of(x, y, clients=10**30)


def test_the_clients_of_the_data_equal_their_plain_twin() -> None:
    """One sort in place of a search for each client."""
    rng = np.random.default_rng(0)
    client, y = rng.integers(0, 7, 300), rng.integers(0, 3, 300)
    dataset = dataset_of("mine", np.zeros((300, 1)), y, client)
    split = by_client(dataset, 0.3, rng)
    for number in range(7):
        assert np.sort(np.concatenate([split.train[number], split.test[number]])).tolist() == [
            *np.flatnonzero(client == number)
        ]


@fuzz(150)
@given(st.data())
def test_a_damaged_npz_that_is_not_packed(tmp_path: Path, data: st.DataObject) -> None:
    """Here a flipped bit reaches the heads of the arrays; packed files are in test_own_arrays."""
    file = io.BytesIO()
    np.savez(file, x=np.arange(40.0).reshape(20, 2), y=np.arange(20) % 2, client=np.array(["a", "b"] * 10))
    path = tmp_path / "damaged.npz"
    path.write_bytes(data.draw(damaged(file.getvalue())))
    with at_most(GIBIBYTE), suppress(PfedlaError):
        assert load_npz(path).x.dtype in (np.float32, np.uint8)


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


def test_an_idx_file_claims_no_more_than_could_be_there(tmp_path: Path) -> None:
    path = tmp_path / "images-idx3"
    path.write_bytes(struct.pack(">HBB3I", 0, 8, 3, 10**6, 28, 28))
    with at_most(2**27), pytest.raises(PfedlaError, match="claims 784000000 bytes"):
        read_idx(path)


# Names that become paths


@fuzz(150)
@given(TEXT | st.text())
def test_a_name_stays_in_its_folder(text: str) -> None:
    name = safe_name(text)
    assert Path("runs", name).parent == Path("runs")
    assert 1 <= len(name.encode()) <= 60
    assert name.isprintable()
    assert name == name.strip(" .")
    assert safe_name("letters_v1.2-a") == "letters_v1.2-a"


@pytest.mark.filterwarnings("ignore:Glyph 27")  # no font has an escape character
def test_names_of_files_and_clients_stay_below_the_run(call, tmp_path: Path) -> None:
    strange, outside = "a\x1b[2J b:*..", "../../../../outside"
    x, y = np.arange(160.0).reshape(80, 2), np.arange(80) % 2
    np.savez(tmp_path / f"{strange}.npz", x=x, y=y, client=np.array([outside, "b"] * 40)[np.arange(80) // 2 % 2])
    before = {*tmp_path.iterdir()}
    quick = ["-d", tmp_path / f"{strange}.npz", "--rounds", 1, "--local-epochs", 1, "-q"]
    for command in (["run", *quick], ["compare", "-a", "local", *quick], ["data", "show", *quick[:2]]):
        code, _, err = call(*command)
        assert code == 0, err
    code, _, err = call("export", next(Path("runs").glob("pfedla-*")), "--client", outside)
    assert code == 0, err
    assert sorted(path.name for path in Path("runs").iterdir()) == ["compare-a_2J_b-client", "pfedla-a_2J_b-client-s0"]
    assert [path.name for path in Path("runs").glob("*/export/*")] == ["client-outside"]
    assert {path.name for path in {*tmp_path.iterdir()} - before} == {"runs", "federation-a_2J_b-client-s0.png"}
    assert not (tmp_path.parent / "outside").exists()


# Nothing is ever unpickled


PICKLES = re.compile(r"(_?pickle|dill|cloudpickle|joblib|shelve|marshal)(\..*)?|(torch|np|numpy)\.load")


def opens_pickles(source: str) -> list[str]:
    """What in a module could open a pickle."""
    found, safe = [], set()
    for node in ast.walk(ast.parse(source)):  # a call comes before the function it calls
        names: list[str] = []
        if isinstance(node, ast.Call) and {"weights_only=True", "allow_pickle=False"} & {*map(ast.unparse, node.keywords)}:
            safe.add(node.func)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [prefix + alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and node not in safe:
            names = [ast.unparse(node)]
        found += [name for name in names if PICKLES.fullmatch(name)]
    return found


def test_nothing_in_the_package_can_open_a_pickle() -> None:
    files = list(Path(pfedla.__file__).parent.rglob("*.py"))
    assert len(files) > 50
    assert {str(file): found for file in files if (found := opens_pickles(file.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import os, dill", "from joblib import load", "def f():\n    from cloudpickle import loads",
        "import marshal as m", "import shelve", "from torch import load", "from numpy import load", "import pickle.x as y",
        "torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path)", "numpy.load(p, allow_pickle=True)",
        "read = np.load", "x = [torch.load(p) for p in paths]", "np.load(torch.load(p), allow_pickle=False)",
    ],
)  # fmt: skip
def test_the_test_above_can_fail(source: str) -> None:
    assert opens_pickles(source)
    assert not opens_pickles("torch.load(p, weights_only=True); np.load(p, allow_pickle=False); json.load(p); load(p)")
