"""Write docs/experiment-file.md: every key of the experiment file, as pfedla.runs.experiment and the algorithms have it.

python docs/experiment_file.py

A key's meaning is the comment that stands behind its field in the code. A test holds the page equal to this.
"""

import ast
import inspect
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from typer.main import get_command

from pfedla.algorithms import ALGORITHMS, options_model
from pfedla.cli import app
from pfedla.engines import ENGINE_NAMES
from pfedla.runs.experiment import AUTO, AlgorithmSection, Experiment
from pfedla.core.models import MODELS
from pfedla.runs.overrides import PLACES

PAGE = Path(__file__).parent / "experiment-file.md"
CHOICES = {"model": MODELS, "engine.name": ENGINE_NAMES, "algorithm.name": ALGORITHMS}  # plain strings to the classes
MORE = {  # where a section is explained
    "data": "data.md#splits",
    "engine": "performance.md#which-engine-compiled-or-not",
    "uploads": "reliability.md#uploads",
    "faults": "reliability.md#faults-on-purpose",
    "checkpoint": "reliability.md#checkpoints",
}
SHOWN_BELOW = 10**6  # an upper bound from here on only keeps nonsense out

HEAD = """# The experiment file

<!-- written by docs/experiment_file.py: change the comment behind the field in the code, not this page -->

`pfedla run experiment.toml` takes a TOML file. Every key may be left out; an unknown one, or a value that cannot be, is
refused. On the command line any key can be laid over with `--set section.key=value`; the usual ones have
[options of their own](#options-of-the-command-line). A run's folder holds its `experiment.toml` with every `"auto"` resolved,
so that the run can be repeated. A short file:

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

Upper bounds of a million and more are not shown below.
"""


def comments(kind: type) -> dict[str, str]:
    """The comment behind each field, of a class and those it inherits from."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if not one.__module__.startswith("pfedla"):
            continue
        source = inspect.getsource(one)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        behind = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
        (body,) = ast.parse(source).body
        assert isinstance(body, ast.ClassDef)
        for field in body.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.end_lineno in behind:
                found[field.target.id] = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), behind[field.end_lineno])
    return found


def words(schema: dict[str, Any]) -> str:
    """What a value may be, from its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(words(one) for one in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = {"integer": "whole number", "number": "number", "boolean": "`true` or `false`", "string": "text"}[schema["type"]]
    bounds = [("from", "minimum"), ("above", "exclusiveMinimum"), ("to", "maximum"), ("below", "exclusiveMaximum")]
    for word, name in bounds:
        if name in schema and abs(schema[name]) < SHOWN_BELOW:
            kind += f" {word} {schema[name]:,}" if isinstance(schema[name], int) else f" {word} {schema[name]:g}"
    return kind


def table(kind: type, model: type[BaseModel], place: str = "") -> str:
    """A row for each key of a section; `kind` is the class that has the comments."""
    properties, meanings = model.model_json_schema()["properties"], comments(kind)
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            continue
        choices = CHOICES.get(f"{place}{key}")
        offered = [*([AUTO] if field.default == AUTO else []), *choices] if choices else []
        value = ", ".join(f"`{json.dumps(word)}`" for word in offered) or words(properties[key])
        cells = (f"`{key}`", value, f"`{json.dumps(field.default)}`", meanings[key])
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def sections() -> dict[str, type[BaseModel]]:
    annotated = {name: field.annotation for name, field in Experiment.model_fields.items()}
    return {name: kind for name, kind in annotated.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def page() -> str:
    parts = [HEAD, "## At the top\n", f"{inspect.getdoc(Experiment)}\n", table(Experiment, Experiment)]
    for name, kind in sections().items():
        sentence = (inspect.getdoc(kind) or "").partition(": ")[2]
        more = f" [More]({MORE[name]})." if name in MORE else ""
        parts += [f"\n## [{name}]\n", f"{sentence[0].upper()}{sentence[1:]}{more}\n", table(kind, kind, f"{name}.")]
        if kind is AlgorithmSection:
            parts.append(
                "\nThe other keys of `[algorithm]` are the method's own options; one that it does not have is refused."
            )
            parts += [method(name) for name in ALGORITHMS]
    options = {parameter.name: parameter.opts for parameter in get_command(app).commands["run"].params}  # type: ignore[attr-defined]
    rows = [f"| {', '.join(f'`{word}`' for word in options[name])} | `{'.'.join(place)}` |" for name, place in PLACES.items()]
    parts += ["\n## Options of the command line\n", "| option | key |", "|---|---|", *rows]
    return "\n".join(parts) + "\n"


def method(name: str) -> str:
    kind = ALGORITHMS[name]
    model, above = options_model(kind), kind.__mro__[1]
    title = f"\n### {name}\n\n[{kind.summary}](algorithms/{'pfedla' if name == 'heurpfedla' else name}.md)"
    if not model.model_fields:
        return f"{title}; no options."
    if above in ALGORITHMS.values() and (same := options_model(above).model_fields).keys() == model.model_fields.keys():
        own = [f"`{key} = {field.default}`" for key, field in model.model_fields.items() if field.default != same[key].default]
        return f"{title}; the options of [{above.name}](#{above.name}), but {', '.join(own)}."
    return f"{title}.\n\n{table(kind, model)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
