"""One page that shows runs: a single file that opens offline."""

import html
import json
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from pfedla.report.page_data import collect_page_data

SCRIPTS = ("charts.js", "alpha.js", "page.js")


def write_page(runs: Sequence[Path], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(collect_page_data(runs)), encoding="utf-8")
    return path


def render_page(data: dict[str, Any]) -> str:
    """Return the whole page. With data["live"] it asks the server it came from for new data."""
    title = data["runs"][0]["name"] if len(data["runs"]) == 1 else f"{len(data['runs'])} runs"
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Template(_read_asset("page.html")).substitute(
        title=html.escape(f"{title} – pfedla"),
        version=version("pfedla"),
        connect="'self'" if data.get("live") else "'none'",
        style=_read_asset("page.css"),
        script="\n".join(map(_read_asset, SCRIPTS)),
        data=text.replace("<", "\\u003c"),  # no name of a client can end the script element
    )


def _read_asset(name: str) -> str:
    return files("pfedla.report").joinpath("assets", name).read_text(encoding="utf-8")
