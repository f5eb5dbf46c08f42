"""From the words of a command line or the keywords of `simulate` to the values of an experiment."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pfedla.core.errors import PfedlaError, shown
from pfedla.runs.experiment import list_settings, read_toml


def gather(
    file: Path | None, options: Mapping[str, Any], settings: list[str], *, spread: bool = False
) -> dict[str, Any]:
    """Merge the experiment file, the options that were given, and --set; each overrides the one before.

    Options in the file's [algorithm] belong to the algorithm it names; they are dropped if the command names another.
    With `spread` (compare) they move into a section of that name.
    """
    values = read_toml(file) if file else {}
    section = values.get("algorithm")
    if isinstance(section, dict):
        named = section.get("name", "pfedla")
        if spread and isinstance(named, str):
            overridden = {"algorithm.name", *(setting.partition("=")[0].strip() for setting in settings)}
            own = {key: v for key, v in values.pop("algorithm").items() if f"algorithm.{key}" not in overridden}
            values = overlay({named: own} if own else {}, values)
        elif options.get("algorithm") not in (None, named):
            values["algorithm"] = {}
    values = overlay(values, nest({name: value for name, value in options.items() if value is not None}))
    for setting in settings:
        values = overlay(values, parse_setting(setting))
    return values


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Put settings given by their short names into their sections."""
    places = list_settings()
    values: dict[str, Any] = {}
    for name, value in flat.items():
        place = places[name]
        target = values.setdefault(place.section, {}) if place.section else values
        target[place.key] = value
    return values


def parse_setting(setting: str) -> dict[str, Any]:
    """Parse one "section.key=value"; the value is TOML, a bare word is a string."""
    path, equals, text = setting.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) > 2 or not all(parts):
        raise PfedlaError(f"--set {shown(setting)}: write section.key=value, for example algorithm.neighbours=5")
    try:
        # No option takes a NaN, but `nan` is the name of an attack.
        value = text if text.strip() == "nan" else tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text
    return {parts[0]: value} if len(parts) == 1 else {parts[0]: {parts[1]: value}}


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested dictionaries; `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and key in below:
            if not isinstance(below[key], Mapping):
                raise PfedlaError(f"{key} = {shown(below[key])}: [{key}] is a section")
            merged[key] = overlay(below[key], value)
        else:
            merged[key] = value
    return merged
