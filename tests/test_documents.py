"""What the documents say is run: Python, the tutorials, the options of commands, the generated pages, the site."""

import doctest
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

import pfedla as package
from pfedla.algorithms import ALGORITHMS, options_model
from pfedla.algorithms import pfedla as hypernetworks
from pfedla.cli import app
from pfedla.core import layers
from pfedla.core.models import MODELS
from pfedla.runs.experiment import Experiment

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```", re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


def commands_of(text: str) -> list[str]:
    """Return the `pfedla` commands of a block, without comments."""
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    plain = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [line for line in plain if line.startswith("pfedla ")]


def page_commands(page: Path) -> list[str]:
    """Return the `pfedla` commands of a page, in fenced and in indented blocks."""
    indented = re.findall(r"^    (pfedla .*)$", page.read_text(encoding="utf-8"), re.M)
    return commands_of("\n".join([*blocks(page, "sh"), *indented]))


def script(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script of the repository."""
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)


# Code


@pytest.mark.parametrize("module", [layers, hypernetworks])
def test_docstrings(module: ModuleType) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted > 0
    assert outcome.failed == 0


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_python_of_the_start_pages(page: str) -> None:
    namespace: dict[str, Any] = {}
    for block in blocks(ROOT / page, "python"):
        exec(re.sub(r"rounds=\d+", "rounds=2", block), namespace)
    assert namespace["result"].accuracy.isfinite().all()


@pytest.mark.slow
def test_python_of_the_run_folder(pfedla) -> None:
    """The page has a run on Fashion-MNIST; here it is on digits."""
    pfedla("run", "--rounds", 1, "--local-epochs", 1, "--out", "runs/first", "-q")
    pfedla("export", "runs/first", "--client", 3)
    for block in blocks(ROOT / "docs" / "results.md", "python"):
        small = block.replace(", num_outputs=10, batch_norm=False", ", num_outputs=10").replace("28, 28", "8, 8")
        exec(small.replace("PaperCNN", "SmallCNN"), {})


@pytest.fixture
def registries() -> Iterator[None]:
    """Remove what a tutorial registers."""
    before = [(registry, dict(registry)) for registry in (ALGORITHMS, MODELS)]
    yield
    for registry, content in before:
        registry.clear()
        registry.update(content)


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_run_from_top_to_bottom(pfedla, registries, page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "tutorial"}
    for language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(text, page.name, "exec"), namespace)
        for command in commands_of(text) if language == "sh" else []:
            code, _, err = pfedla(*shlex.split(re.sub(r"--rounds \d+", "--rounds 2", command))[1:])
            assert code == 0, f"{command}: {err}"


# Commands and settings


def test_every_command_can_be_parsed() -> None:
    for command in (command for page in PAGES for command in page_commands(page)):
        kind: Any = get_command(app)
        name, *words = shlex.split(command)
        while hasattr(kind, "commands") and words:
            name = words.pop(0)
            assert name in kind.commands, command
            kind = kind.commands[name]
        kind.make_context(name, words)  # raises for an option that does not exist


def test_settings_in_the_documents_are_valid() -> None:
    for page in PAGES:
        for block in blocks(page, "toml"):
            Experiment.parse(tomllib.loads(block))
    assert Experiment.parse(tomllib.loads((ROOT / "examples" / "experiment.toml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_has_a_page_with_its_options(name: str) -> None:
    page = ROOT / "docs" / "algorithms" / f"{'pfedla' if name == 'heurpfedla' else name}.md"
    text = page.read_text(encoding="utf-8")
    inherited = set(options_model("pfedla").model_fields) if name == "pfedla-heldout" else set()
    own = set(options_model(name).model_fields) - inherited
    assert all(f"`{option}`" in text for option in own)
    assert f"algorithms/{page.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(((?!http)[^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


# Generated pages


def test_the_reference_of_the_experiment_file_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(ROOT / "docs" / "experiment_file.py", monkeypatch)
    assert made.PAGE.read_text(encoding="utf-8") == made.render(), "run python docs/experiment_file.py"


def test_the_tables_of_the_documents_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script(ROOT / "benchmarks" / "fill_docs.py", monkeypatch)
    pages = made.list_pages()
    assert len(pages) > 12
    for page in pages:
        assert made.fill(page) == page.read_text(encoding="utf-8"), f"{page}: run python benchmarks/fill_docs.py"


# The package


def test_public_names_are_listed() -> None:
    assert {"simulate", "Run", "Experiment", "mix"} <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)


def test_help_does_not_load_torch() -> None:
    code = "import sys; from pfedla.cli import app; assert not {'torch', 'matplotlib'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)


def test_nothing_unpickles() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^\s*(import|from) (pickle|dill|joblib|cloudpickle)", text, re.M), path
        assert "allow_pickle=True" not in text, path
        assert not re.search(r"torch\.load\((?!.*weights_only=True)", text), path


# The site


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|img|iframe)[^>]*\ssrc=\"?(https?:)?//", html), page
        assert not re.search(r"<link[^>]*rel=\"?(stylesheet|preconnect)[^>]*href=\"?(https?:)?//", html), page
    assert (tmp_path / "site/results/table1/figure.png").exists()
