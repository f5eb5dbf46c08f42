"""One page that shows runs: a single file that opens offline."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pfedla.report.page_data import page_data

SCRIPTS = ("charts.js", "alpha.js", "page.js")


def write_page(runs: Sequence[Path], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(page_data(runs)), encoding="utf-8")
    return path


def page(data: dict[str, Any]) -> str:
    """The whole page. With data["live"] it asks where it came from for what is new."""
    title = data["runs"][0]["name"] if len(data["runs"]) == 1 else f"{len(data['runs'])} runs"
    return Template(_asset("page.html")).substitute(
        title=_escaped(f"{title} – pfedla"),
        version=version("pfedla"),
        connect="'self'" if data.get("live") else "'none'",
        style=_asset("page.css"),
        script="\n".join(map(_asset, SCRIPTS)),
        data=_in_script(data),
    )


def _asset(name: str) -> str:
    return files("pfedla.report").joinpath("assets", name).read_text(encoding="utf-8")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def _in_script(data: dict[str, Any]) -> str:
    """JSON in which nothing ends the script element, whatever a client is called."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
