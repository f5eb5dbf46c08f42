"""Every block of code in the documents, and what becomes of it: it is played, checked, or named here with a reason."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from typer.main import get_command

from pfedla.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "experiments").rglob("*.md")),
]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
PLAYED_PYTHON = {"README.md", "docs/index.md", "docs/results.md", *(path.relative_to(ROOT).as_posix() for path in TUTORIALS)}

# Commands that are not played as they stand, by how they begin, and why. What begins with `pfedla` is parsed all the same.
NOT_PLAYED = {
    "pfedla deploy ": "starts servers; tests/test_deployment.py and tests/deployment.py play them",
    "pfedla reproduce ": "minutes to hours of training; tests/test_reproduction.py plays small ones",
    "pfedla evaluate /srv/": "a site's folder on another machine; tests/test_deployment.py plays it",
    "pfedla export /srv/": "as above",
    "pfedla watch ": "serves a page until it is stopped; tests/test_page.py looks at it",
    "python benchmarks/validation.py ": "minutes of training; tests/test_site.py plays it with one round",
    "python benchmarks/joining.py ": "as above",
    "pip install ": "changes the environment",
    "export FLWR_": "settings for the commands below it",
    "flower-superlink ": "a server on another machine; tests/deployment.py starts one",
    "flower-supernode ": "a site on another machine; tests/deployment.py starts some",
    "flwr ": "needs a running server; tests/deployment.py calls it",
    "printf 'subjectAltName=": "renews a certificate on a server",
    "openssl ": "as above",
    "ssh ": "another machine",
}
OUTLINES = {"ARCHITECTURE.md": "the loop of rounds.py in outline: its names are not there"}  # Python that is not to be run


class Block(NamedTuple):
    document: str  # its path in the repository
    line: int
    language: str  # "" for a block that is indented
    text: str

    @property
    def commands(self) -> list[str]:
        """Line by line, comments taken off, what goes on in the next line joined."""
        lines = re.sub(r" *\\\n *", " ", self.text).splitlines()
        return [line for line in (re.sub(r"(^|\s)#.*", "", line).strip() for line in lines) if line]

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    name = document.relative_to(ROOT).as_posix()
    lines = document.read_text(encoding="utf-8").splitlines()
    position, code = 0, "    "
    while position < len(lines):
        start, line = position, lines[position]
        position += 1
        if line.strip() and not line.startswith(" "):
            code = " " * (6 if line.startswith("- ") else 4)  # a paragraph of a list is indented too
        if found := re.match(r" *```(\w*)", line):
            while lines[position].strip() != "```":
                position += 1
            yield Block(name, start + 1, found[1] or "none", "\n".join(text.strip() for text in lines[start + 1 : position]))
            position += 1
        elif line.startswith(code) and start and not lines[start - 1].strip():
            while position < len(lines) and lines[position].startswith(code):
                position += 1
            yield Block(name, start + 1, "", "\n".join(text.strip() for text in lines[start:position]))


def python_of(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M)


def reason_not_played(command: str) -> str | None:
    return next((reason for beginning, reason in NOT_PLAYED.items() if f"{command} ".startswith(beginning)), None)


def inline_commands(document: Path) -> list[str]:
    """`pfedla …` in running text (not `pfedla rule=paper`, a trial); an ellipsis and what stands after it are left out."""
    text = re.sub(r"^ *```.*?^ *```", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [found.split("…")[0].strip() for found in re.findall(r"`(pfedla [a-z]+(?![\w=])[^`]*)`", text)]


def parsed(command: str) -> list[str]:
    """A `pfedla` command, parsed by the command line itself, nothing run; its words after the subcommand."""
    kind, name, words = subcommand(command)
    kind.make_context(name, list(words))
    return words


def subcommand(command: str) -> tuple[Any, str, list[str]]:
    kind, name, words = get_command(app), "pfedla", shlex.split(command)[1:]
    while hasattr(kind, "commands") and words:
        name = words.pop(0)
        assert name in kind.commands, f"{command}: there is no {name}"
        kind = kind.commands[name]
    return kind, name, words


def options_of(kind: Any) -> set[str]:
    return {word for parameter in kind.params for word in (*parameter.opts, *parameter.secondary_opts)} | {"--help", "-h"}
