"""From the words of the command line to the values of an experiment."""

import tomllib
from collections.abc import Mapping
from typing import Any

from pfedla.core.errors import PfedlaError, shown
from pfedla.runs.experiment import read_toml

# Option name -> where it stands in the experiment file.
PLACES = {
    "dataset": ("data", "dataset"), "partition": ("data", "partition"), "clients": ("data", "clients"),
    "samples": ("data", "samples_per_client"), "participation": ("participation",), "rounds": ("rounds",),
    "local_epochs": ("training", "local_epochs"), "lr": ("training", "lr"), "batch_size": ("training", "batch_size"),
    "augment": ("training", "augment"),
    "model": ("model",), "seed": ("seed",), "engine": ("engine", "name"), "threads": ("engine", "threads"),
    "device": ("engine", "device"), "compile": ("engine", "compile"),
    "checkpoint_rounds": ("checkpoint", "rounds"), "algorithm": ("algorithm", "name"),
}  # fmt: skip


def gather(options: dict[str, Any], spread: bool = False) -> dict[str, Any]:
    """The experiment file, the options that were given, then --set: each lies over the one before.

    The options in the file's [algorithm] are those of the algorithm it names: they do not go over to another one that the
    command names. With `spread` (compare) they move into a section of that name.
    """
    values = read_toml(options["file"]) if options.get("file") else {}
    section = values.get("algorithm")
    if isinstance(section, dict):
        named = section.get("name", "pfedla")
        if spread and isinstance(named, str):
            laid_over = {"algorithm.name", *(setting.partition("=")[0].strip() for setting in options.get("setting") or [])}
            own = {key: v for key, v in values.pop("algorithm").items() if f"algorithm.{key}" not in laid_over}
            values = overlay({named: own} if own else {}, values)
        elif options.get("algorithm") not in (None, named):
            values["algorithm"] = {}
    for name, place in PLACES.items():
        if (value := options.get(name)) is not None:
            nested: Any = value
            for key in reversed(place):
                nested = {key: nested}
            values = overlay(values, nested)
    for setting in options.get("setting") or []:
        values = with_setting(values, setting)
    return values


def with_setting(values: dict[str, Any], setting: str) -> dict[str, Any]:
    """`values` with one "section.key=value" laid over; the value is TOML, a bare word is a string."""
    path, equals, text = setting.partition("=")
    parts = path.strip().split(".")
    if not equals or len(parts) > 2 or not all(parts):
        raise PfedlaError(f"--set {shown(setting)}: write section.key=value, for example algorithm.neighbours=5")
    try:
        # No option takes a NaN, but `nan` is the name of an attack.
        value = text if text.strip() == "nan" else tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number or nesting beyond Python's limits
        value = text
    return overlay(values, {parts[0]: value} if len(parts) == 1 else {parts[0]: {parts[1]: value}})


def overlay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries merged; what is above wins."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and key in below:
            if not isinstance(below[key], Mapping):
                raise PfedlaError(f"{key} = {shown(below[key])} is not possible: [{key}] is a section")
            merged[key] = overlay(below[key], value)
        else:
            merged[key] = value
    return merged
