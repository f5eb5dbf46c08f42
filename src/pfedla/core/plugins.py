"""Own code by name: "package.module:Name", or an entry point of an installed package. Imports no torch."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from pfedla.core.errors import PfedlaError, first_line, suggest, unknown

SEARCH: list[str] = []  # folders to import own code from, beside what is installed; the command line adds its own
LIBRARIES = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
PACKAGE = str(Path(__file__).parents[1])


def find_named(kind: str, name: object, known: Mapping[str, Any]) -> Any:
    """Return what a name stands for: one of `known`, an entry point of pfedla.<kind>s, or "package.module:Name"."""
    if isinstance(name, str) and name in known:
        return known[name]
    installed = {one.name: one.value for one in entry_points(group=f"pfedla.{kind}s")}
    place = installed.get(name, name) if isinstance(name, str) else ""
    if ":" not in place:
        error = unknown(kind, name, [*known, *installed])
        raise PfedlaError(f"{error}, or package.module:Name")
    return import_named(kind, place)


def import_named(kind: str, place: str) -> Any:
    """Import the object that "package.module:Name" names; say in one sentence what is missing."""
    module_name, _, attribute = place.partition(":")
    for folder in SEARCH:
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        found: Any = import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        missing = absent in (module_name, module_name.split(".")[0])
        why = f"no module {absent!r}" if missing else f"{type(error).__name__}: {first_line(error)}"
        where = "" if missing else locate(error)
        hint = f"; write {module_name.removesuffix('.py')}:{attribute}" if module_name.endswith(".py") else ""
        raise PfedlaError(f"{kind} {place!r}: cannot import {module_name!r} ({why}{where}){hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            meant = suggest(part, [name for name in vars(found) if not name.startswith("_")])
            raise PfedlaError(f"{kind} {place!r}: {module_name!r} has no {part!r}{meant}")
        found = getattr(found, part)
    return found


def locate(error: BaseException | None) -> str:
    """Return ", file.py:12" for the last line of the user's own code in a traceback; "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    libraries = (*LIBRARIES, PACKAGE, "<")
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return f", {os.path.relpath(own[-1].filename)}:{own[-1].lineno}" if own else ""
