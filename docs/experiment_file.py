"""Write docs/experiment-file.md from the fields of the settings models and their descriptions.

python docs/experiment_file.py
"""

import inspect
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pfedla.algorithms import ALGORITHMS, options_model
from pfedla.core.models import MODELS
from pfedla.core.search import Choice, Epochs, Range
from pfedla.runs.experiment import Experiment, list_settings

PAGE = Path(__file__).parent / "experiment-file.md"
CHOICES = {"algorithm.name": ALGORITHMS, "model": ["auto", *MODELS]}  # plain text in the models
MORE = {  # where a section is explained
    "data": "data.md#splits",
    "engine": "performance.md",
    "uploads": "reliability.md#uploads",
    "privacy": "privacy.md",
    "faults": "reliability.md#faults-on-purpose",
    "wire": "compression.md",
    "checkpoint": "reliability.md#checkpoints",
}
PAGES = {"heurpfedla": "pfedla"}  # described on another method's page
SHOWN_BELOW = 10**6  # larger bounds only keep nonsense out

HEAD = """# The experiment file

<!-- written by docs/experiment_file.py from the settings models: do not edit this page -->

`pfedla run experiment.toml` takes a TOML file. Every key is optional. Unknown keys and impossible values are
refused. On the command line, `--set section.key=value` overrides any key; the usual ones have
[options of their own](#options-of-the-command-line). The `experiment.toml` in a run folder has every `"auto"`
resolved, so it repeats the run.

```toml
seed = 0
rounds = 30

[data]
dataset = "digits"
partition = "dominant"
clients = 10

[algorithm]
name = "pfedla"
neighbours = 5
```

Bounds of a million and more are not shown.
"""


def describe_value(schema: dict[str, Any]) -> str:
    """Return what a value may be, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(describe_value(one) for one in schema["anyOf"])
    if "additionalProperties" in schema:
        return f"a table: name → {describe_value(schema['additionalProperties'])}"
    if "const" in schema or "enum" in schema:
        return list_choices(schema.get("enum", [schema.get("const")]))
    kinds = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}
    kind = kinds[schema["type"]]
    bounds = {"from": "minimum", "above": "exclusiveMinimum", "to": "maximum", "below": "exclusiveMaximum"}
    for word, name in bounds.items():
        if name in schema and abs(schema[name]) < SHOWN_BELOW:
            kind += f" {word} {schema[name]:,}" if isinstance(schema[name], int) else f" {word} {schema[name]:g}"
    return kind


def list_choices(values: Any) -> str:
    return ", ".join(f"`{json.dumps(value)}`" for value in values)


def tabulate(model: type[BaseModel], place: str = "") -> str:
    """Return a table with a line for each key of a section."""
    properties = model.model_json_schema()["properties"]
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        choices = CHOICES.get(f"{place}{key}")
        value = list_choices(choices) if choices else describe_value(properties[key])
        meaning = " ".join((field.description or "").split())
        cells = (f"`{key}`", value, f"`{json.dumps(field.default)}`", meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def describe_method(name: str) -> str:
    kind = ALGORITHMS[name]
    title = f"\n### {name}\n\n[{kind.summary}](algorithms/{PAGES.get(name, name)}.md)"
    model = options_model(name)
    text = f"{title}.\n\n{tabulate(model)}" if model.model_fields else f"{title}; no options."
    searched = [f"`{option}` {describe_search(search)}" for option, search in kind.search.items()]
    return f"{text}\n\n[Tuning](tuning.md) searches {'; '.join(searched)}." if searched else text


def describe_search(search: Range | Choice | Epochs) -> str:
    if isinstance(search, Choice):
        return f"among {list_choices(search.values)}"
    if isinstance(search, Epochs):
        return f"from 1 to `local_epochs`{f' - {search.spare}' if search.spare else ''}"
    return f"from {search.low:g} to {search.high:g}"


def render() -> str:
    parts = [HEAD, "## At the top\n", f"{inspect.getdoc(Experiment)}\n", tabulate(Experiment)]
    for name, field in Experiment.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            continue
        more = f" [More]({MORE[name]})." if name in MORE else ""
        parts += [f"\n## [{name}]\n", f"{inspect.getdoc(section)}{more}\n", tabulate(section, f"{name}.")]
        if name == "algorithm":
            parts.append("\nThe other keys of `[algorithm]` are the options of the method:")
            parts += [describe_method(method) for method in ALGORITHMS]
    rows = []
    for place in list_settings().values():
        if place.option:
            words = ", ".join(f"`{word}`" for word in (f"--{place.option.name}", place.option.short) if word)
            rows.append(f"| {words} | `{f'{place.section}.' if place.section else ''}{place.key}` |")
    parts += ["\n## Options of the command line\n", "| option | key |", "|---|---|", *rows]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
