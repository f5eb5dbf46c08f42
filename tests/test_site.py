"""The site builds without a warning; no block of code in the documents is left to itself."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest
import typer
from blocks import (
    DOCUMENTS,
    NOT_PLAYED,
    OUTLINES,
    PLAYED_PYTHON,
    ROOT,
    TUTORIALS,
    Block,
    blocks,
    inline_commands,
    options_of,
    parsed,
    python_of,
    reason_not_played,
    subcommand,
)
from typer.main import get_command
from typer.testing import CliRunner

from pfedla.algorithms import ALGORITHMS
from pfedla.core.models import MODELS
from pfedla.reproduction.paper_tables import compared
from pfedla.runs.experiment import Experiment, check_names

ALL = [block for document in DOCUMENTS for block in blocks(document)]


def script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script of the repository that is in no package."""
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# Every block is accounted for.


@pytest.mark.parametrize("block", ALL, ids=str)
def test_every_block_is_played_checked_or_named(block: Block) -> None:
    if block.language == "python":
        assert block.document in PLAYED_PYTHON or block.document in OUTLINES, f"{block}: nothing runs it"
    elif block.language == "toml":
        check_names(Experiment.parse(tomllib.loads(block.text)))
    else:
        assert block.language in ("sh", ""), f"{block}: of no known kind; use sh, python or toml"
        assert block.commands
        for command in block.commands:
            account_for(command, block)


def account_for(command: str, block: Block) -> None:
    reason = reason_not_played(command)
    if command.startswith("pfedla "):
        parsed(command)
        # By test_documents.py, or with its tutorial.
        played = block.language == "sh" and block.document.startswith(("README.md", "docs/"))
        assert played or reason, f"{block}: nothing runs it: {command}"
    elif command.startswith("make "):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{command.split()[1]}:", makefile, re.M), f"{block}: no such target: {command}"
    else:
        assert reason, f"{block}: nothing runs it, and tests/blocks.py does not say why: {command}"


def test_no_reason_stands_there_for_nothing() -> None:
    commands = [command for block in ALL for command in block.commands if block.language in ("sh", "")]
    for beginning in NOT_PLAYED:
        assert any(f"{command} ".startswith(beginning) for command in commands), beginning
    assert {block.document for block in ALL if block.language == "python"} == PLAYED_PYTHON | set(OUTLINES)


def test_commands_in_running_text_have_these_options() -> None:
    found = [(document.name, command) for document in DOCUMENTS for command in inline_commands(document)]
    assert len(found) > 20
    for document, command in found:
        kind, _, words = subcommand(command)
        unknown = {word for word in words if word.startswith("-")} - options_of(kind)
        assert not unknown, f"{document}: {command}: {unknown}"


@pytest.mark.parametrize("name", ["validation", "joining"])
def test_the_options_of_scripts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(script(ROOT / "benchmarks" / f"{name}.py", monkeypatch).main)
    for block in ALL:
        for command in block.commands:
            if command.startswith(f"python benchmarks/{name}.py"):
                given = get_command(app).make_context(name, shlex.split(command)[2:]).params
                assert all(trial.split()[0] in ALGORITHMS for trial in given.get("trials", [])), command


SCRIPTS = sorted({command for block in ALL for command in block.commands if command.startswith("python benchmarks/")})


@pytest.mark.slow
@pytest.mark.parametrize("command", SCRIPTS)
def test_scripts_play_with_a_budget_of_a_round(command: str, real, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, *words = shlex.split(command)[1:]
    if words[0] != "digits":
        real(words[0])
    app = typer.Typer()
    app.command()(script(ROOT / file, monkeypatch).main)
    small = ["--seeds", "0", "--rounds", "1", "--local-epochs", "3", "--out", str(tmp_path / "out.jsonl")]
    if file.endswith("joining.py"):
        small += ["--joining-rounds", "1"]
    CliRunner().invoke(app, [*words, *small], catch_exceptions=False)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines
    assert all(line["rounds"] == 1 and line["accuracy"] for line in lines)


# The blocks that are played.


@pytest.fixture
def registries() -> Iterator[None]:
    """What a tutorial registers is gone after it."""
    kept = [(registry, dict(registry)) for registry in (ALGORITHMS, MODELS)]
    yield
    for registry, before in kept:
        registry.clear()
        registry.update(before)


COMPARING = [path for path in TUTORIALS if "pfedla compare" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("tutorial", "whole"),
    [
        *(pytest.param(path, False, id=path.stem) for path in TUTORIALS if path not in COMPARING),
        *(pytest.param(path, True, id=f"{path.stem}-whole", marks=pytest.mark.slow) for path in COMPARING),
    ],
)
def test_tutorials(pfedla, registries, tutorial: Path, whole: bool, tmp_path: Path) -> None:
    """From top to bottom, as they stand, in an empty folder; comparisons, which nothing builds upon, with the slow tests."""
    namespace = {"__name__": "tutorial"}
    text = tutorial.read_text(encoding="utf-8")
    played = re.findall(r"^```(python|sh)\n(.*?)^```", text, re.S | re.M)
    for language, block in played:
        if language == "python":
            exec(compile(block, tutorial.name, "exec"), namespace)
            continue
        for command in Block(tutorial.name, 0, "sh", block).commands:
            if whole or "compare" not in command:
                code, _, err = pfedla(*shlex.split(command)[1:])
                assert code == 0, f"{command}: {err}"
    if tutorial.stem == "own-data":
        glossary_has(json.loads((tmp_path / "runs/hospitals/result.json").read_text(encoding="utf-8")))


def glossary_has(result: dict) -> None:
    """Every number of a result is explained."""
    glossary = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    plain = {"algorithm", "dataset", "partition", "clients", "rounds", "seed", "model", "traffic", "seconds"}
    for key in [*result, *result["accuracy"], *result["traffic"]]:
        assert key in plain or re.search(rf"`(\w+\.)?{key}`", glossary), key


def test_the_quick_start_and_the_readme_in_python() -> None:
    """The README goes on with the arrays of examples/own_data.py, which are those of the quick start."""
    namespace: dict = {}
    (quick,) = python_of(ROOT / "docs" / "index.md")
    exec(quick.replace("rounds=20", "rounds=2"), namespace)
    (readme,) = python_of(ROOT / "README.md")
    exec(readme.replace("rounds=40", "rounds=2"), namespace)
    assert len(namespace["result"].accuracy) == 4


# What is written by scripts.


def test_the_reference_of_the_experiment_file_is_what_the_classes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(ROOT / "docs" / "experiment_file.py", monkeypatch)
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), "python docs/experiment_file.py writes it anew"


def test_choosing_has_the_committed_numbers_and_says_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = script(ROOT / "benchmarks" / "fill_docs.py", monkeypatch)
    page = fill.CHOOSING_PAGE.read_text(encoding="utf-8")
    assert fill.choosing_table() in page, "python benchmarks/fill_docs.py writes it anew"
    # The sentences of "By situation" and the FAQ.
    hard, mixed = (accuracies(table, "CIFAR-10, 10 clients") for table in ("table1", "table2"))
    assert hard["FedAvg"] < hard["Local"] - 5
    assert 60 < hard["Local"] < 70
    assert min(hard[name] for name in ("FedRep", "pFedLA", "HeurpFedLA")) > hard["Local"] + 3
    assert max(mixed.values()) - mixed["pFedLA"] < 1
    assert mixed["Local"] < mixed["pFedLA"] - 2
    hundred, prevail = (accuracies(table, "CIFAR-100, 10 clients") for table in ("table1", "table2"))
    assert max(hundred.values()) - min(hundred[name] for name in ("Local", "FedFomo", "HeurpFedLA")) <= 1
    assert max(hundred["FedRep"], hundred["pFedLA"]) < hundred["Local"] - 2
    assert hundred["FedAvg"] < hundred["Local"] - 20
    assert max(mixed, key=mixed.get) == max(prevail, key=prevail.get) == "pFedLA"
    assert all(others["Per-FedAvg"] < others["pFedLA"] - 2 for others in (mixed, prevail))
    assert prevail["Local"] < prevail["pFedLA"] - 2
    many = accuracies("many_clients", "CIFAR-10, 100 clients")
    assert max(many, key=many.get) == "FedRep"
    assert 4 < many["FedRep"] - many["pFedLA (all)"] < 6
    assert many["FedAvg"] < many["FedRep"] - 10
    for name in ("EMNIST", "Fashion-MNIST"):
        alone, shared = (accuracies(table, f"{name}, 10 clients") for table in ("table1", "table2"))
        assert max(alone, key=alone.get) == "Local"
        assert alone["FedAvg"] < alone["Local"] - 5
        first = max(shared, key=shared.get)
        other = {"Per-FedAvg": "FedFomo", "FedFomo": "Per-FedAvg"}[first]
        assert shared[first] - shared["pFedLA"] < 1
        assert max(shared["Local"], shared[other]) < shared["pFedLA"] - 2


def test_where_pfedla_stands_is_of_the_committed_numbers_and_the_readmes_say_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = script(ROOT / "benchmarks" / "fill_docs.py", monkeypatch)
    assert fill.standing_table() in fill.TUNING_PAGE.read_text(encoding="utf-8")
    found = {place: (first, best.mean - ours.mean, best.std) for place, (first, best, _, ours) in fill.standings().items()}
    assert len(found) == 8
    first, behind, _ = found["table1", "EMNIST, 10 clients"]
    assert first == "Local"
    assert 0.5 < behind < 1.5
    first, behind, deviation = found["table1", "Fashion-MNIST, 10 clients"]
    assert first == "Local"
    assert deviation < behind < 2
    first, behind, deviation = found["table1", "CIFAR-10, 10 clients"]
    assert first == "FedRep"
    assert 1 < behind < 1.5 < deviation
    assert found["table2", "Fashion-MNIST, 10 clients"][0] == found["table2", "CIFAR-100, 10 clients"][0] == "pFedLA"
    first, behind, deviation = found["table2", "CIFAR-10, 10 clients"]
    assert first == "FedRep"
    assert deviation < behind < 1.5
    first, behind, deviation = found["table2", "EMNIST, 10 clients"]
    assert first == "Per-FedAvg"
    assert deviation < behind < 1.5
    seeds = {place: len(best.seeds) for place, (_, best, _, _) in fill.standings().items()}
    assert all(count == 3 for (_, column), count in seeds.items() if column.startswith(("Fashion", "CIFAR-10,")))


def test_joining_has_the_committed_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = script(ROOT / "benchmarks" / "fill_docs.py", monkeypatch)
    lines = fill.read_lines("joining.jsonl")
    assert fill.joining_table(lines) in fill.JOINING_PAGE.read_text(encoding="utf-8")

    def newcomers(dataset: str, partition: str, key: str) -> float:
        some = [line for line in lines if (line["dataset"], line["partition"]) == (dataset, partition)]
        return mean(value for line in some for value in line["accuracy"][key])

    for partition in ("dominant", "classes"):  # what the page and choosing.md say
        alone, tuned, joined = (newcomers("fashion-mnist", partition, key) for key in ("local", "fedavg-ft 50", "pfedla after"))
        assert joined > max(alone + 0.04, tuned + 0.02)
        assert newcomers("digits", partition, "pfedla after") < newcomers("digits", partition, "fedavg-ft 50") - 0.02


def accuracies(table: str, column: str) -> dict[str, float]:
    summary = json.loads((ROOT / "results" / table / "results.json").read_text(encoding="utf-8"))
    cells = compared(summary)["cells"]
    of_column = [cell for cell in cells if cell["column"] == column and "accuracy" in cell]
    by_row = {cell["row"]: [one["accuracy"]["mean"] for one in of_column if one["row"] == cell["row"]] for cell in of_column}
    return {row: 100 * sum(values) / len(values) for row, values in by_row.items()}


def test_choosing_names_every_method() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    pages = {"heurpfedla": "pfedla", "model-similarity": "layer-similarity"}
    assert all(f"(algorithms/{pages.get(name, name)}.md)" in page for name in ALGORITHMS)


# The site.


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=\"?(https?:)?//", html), page
        assert not re.search(r"<link[^>]*rel=\"?(stylesheet|preconnect)[^>]*href=\"?(https?:)?//", html), page
    reproduction = (tmp_path / "site/reproduction/index.html").read_text(encoding="utf-8")
    assert 'href="../experiments/table1/"' in reproduction
    assert "<code>experiments</code>" in reproduction  # a folder is named, not linked
    assert (tmp_path / "site/results/table1/figure.png").exists()
