"""From the words of the command line to the values of an experiment."""

from typing import Any

from pfedla.experiment import overlay, read_toml, with_setting

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
