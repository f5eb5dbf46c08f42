"""Build the site from the Markdown files that GitHub shows too.

On GitHub a page may link out of docs/ (../experiments/table1/README.md, ../results/table1/figure.png). The
site gets these files at the same place below its root. A link to anything else (a folder, a source file)
becomes the path in the repository.
"""

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "experiments/*/README.md")
PICTURES = ("results/*/*.png", "benchmarks/results/*.png")
HOME = "index.md"  # of the site, in place of README.md
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCE = re.compile(r"^ *(```|~~~)")


def list_outside() -> dict[str, Path]:
    """Return the files outside docs/ that the site has, by their path."""
    found = (path for pattern in (*PAGES, *PICTURES) for path in sorted(ROOT.glob(pattern)))
    return {path.relative_to(ROOT).as_posix(): path for path in found}


def on_files(files: Any, config: Any) -> Any:
    for uri, path in list_outside().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    uri = page.file.src_uri
    place = uri if uri in list_outside() else f"docs/{uri}"
    return "\n".join(_lines(markdown, place, uri, {file.src_uri for file in files}))


def _lines(markdown: str, place: str, uri: str, there: set[str]) -> list[str]:
    lines: list[str] = []
    fenced = False
    for line in markdown.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced:
            before = lines[-1] if lines else ""
            # GitHub begins a list or table after a line of text, Python-Markdown after an empty line.
            if _begins(line, before, "- ") or _begins(line, before, "|"):
                lines.append("")
            line = LINK.sub(lambda found: _link(found, place, uri, there), line)
        lines.append(line)
    return lines


def _begins(line: str, before: str, mark: str) -> bool:
    return line.startswith(mark) and bool(before.strip()) and not before.startswith((mark, " "))


def _link(found: re.Match[str], place: str, uri: str, there: set[str]) -> str:
    target, hash_, anchor = found["target"].partition("#")
    if not target or ":" in target:
        return found[0]
    aim = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
    goal = HOME if aim == "README.md" else aim.removeprefix("docs/")
    if goal in there:
        return f"{found['picture']}[{found['text']}]({_relative(goal, uri)}{hash_}{anchor})"
    if not (ROOT / aim).exists():
        return found[0]  # mkdocs says so
    return f"`{aim}`" if found["text"].strip("`/") == aim else f"{found['text']} (`{aim}`)"


def _relative(goal: str, uri: str) -> str:
    return posixpath.relpath(goal, PurePosixPath(uri).parent.as_posix())
