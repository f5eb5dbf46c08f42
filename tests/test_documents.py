"""What the documents say is executed."""

import doctest
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import ROOT, TUTORIALS, blocks

import pfedla
from pfedla import hypernetworks, layers
from pfedla.algorithms import ALGORITHMS, options_model
from pfedla.data.datasets import KNOWN


@pytest.mark.parametrize("module", [layers, hypernetworks])
def test_docstrings(module) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


def commands(document: Path) -> list[str]:
    found = [command for block in blocks(document) if block.language == "sh" for command in block.commands]
    return [command for command in found if command.startswith("pfedla ") and not command.startswith("pfedla watch ")]


DOCUMENTED = [
    (path.name, command)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path not in TUTORIALS  # these are played from top to bottom, in test_site.py
    for command in commands(path)
]


def marked(command: str) -> Any:
    """Several methods take their time, and so does loading a tracker."""
    takes_long = any(word in command for word in ("compare", "--track"))
    return pytest.param(command, marks=pytest.mark.slow if takes_long else (), id=command)


@pytest.mark.parametrize("command", [marked(command) for command in sorted({command for _, command in DOCUMENTED})])
def test_documented_commands(pfedla, command: str, tmp_path: Path) -> None:
    """Every `pfedla` command of the README and the docs, with its rounds cut short; RUN is a run made here."""
    words = shlex.split(command)[1:]
    if words[0] != "communication":  # the real data have tests of their own
        words = ["digits" if word in KNOWN else word for word in words]
    if "--samples" in words:
        words[words.index("--samples") + 1] = "40"
    if words[0] in ("evaluate", "export", "join", "report") or "--resume" in words:
        for folder in itertools.takewhile(lambda word: not word.startswith("-"), words[1:]):
            pfedla("run", "--rounds", 1, "--out", folder, "-q")
    newcomer = next((word.removeprefix("joined/") for word in words if word.startswith("joined/")), None)
    if words[0] == "join" or newcomer:
        x = np.random.default_rng(0).integers(0, 17, (40, 8, 8), np.uint8)  # as digits are
        np.savez("new.npz", x=x, y=np.arange(40) % 10)
    if newcomer:
        pfedla("join", words[1], "--data", "new.npz", "--name", newcomer, "--rounds", 1, "-q")
    if words[0] == "join":
        words += ["--rounds", "1"]
    if "--resume" in words:
        words += ["--rounds", "2"]
    elif words[0] in ("run", "compare"):
        experiment = next((word for word in words if word.endswith(".toml")), None)
        if experiment:
            words[words.index(experiment)] = str(ROOT / experiment)
        words += ["--rounds", "1", "--local-epochs", "1"]
    code, _, err = pfedla(*words)
    assert code == 0, err


def test_the_documents_are_finished_and_have_commands() -> None:
    assert len(DOCUMENTED) >= 5
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "experiments").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "@@" not in text, path
        for target in re.findall(r"\]\(((?!http)[^)#]+)", text):
            assert (path.parent / target).exists(), f"{path}: {target}"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_has_a_page_with_its_options(name: str) -> None:
    page = ROOT / "docs" / "algorithms" / f"{'pfedla' if name == 'heurpfedla' else name}.md"
    text = page.read_text(encoding="utf-8")
    assert all(f"`{option}`" in text for option in options_model(ALGORITHMS[name]).model_fields), page
    if name != "model-similarity":  # described with layer-similarity
        assert "ersonal model" in text
        assert "ost" in text


def test_python_blocks_of_the_docs(pfedla) -> None:
    """They use the run of the README, here on digits; shapes and module are put in its place."""
    pfedla("run", "--rounds", 1, "--local-epochs", 1, "--out", "runs/first", "-q")
    pfedla("export", "runs/first", "--client", 3)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 2
    for block in blocks:
        small = block.replace("PaperCNN((1, 28, 28), num_classes=10, batch_norm=False)", "SmallCNN((1, 8, 8), num_classes=10)")
        exec(small.replace("PaperCNN", "SmallCNN").replace("28, 28", "8, 8"), {})


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"make ([a-z-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, re.M) for target in named)


def test_public_names_are_there() -> None:
    assert all(hasattr(pfedla, name) for name in pfedla.__all__)


def test_help_does_not_load_torch() -> None:
    code = "import sys; from pfedla.cli import app; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_nothing_unpickles() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|dill|joblib|cloudpickle)", text, re.M), path
        assert "allow_pickle=True" not in text, path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), path


def test_no_file_is_longer_than_one_sitting() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 320, path
