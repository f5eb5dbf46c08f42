"""The options that commands share. Those of the experiment are made from its settings, each declared once there."""

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter
from rich.console import Console

from pfedla.core.errors import PfedlaError, shown
from pfedla.runs.experiment import Place, list_settings
from pfedla.runs.interruption import Interruption

Command = Callable[..., None]
out_console = Console(highlight=False, markup=False)
PANELS = {"algorithm": "Method", "data": "Data", "training": "Training", "": "Run", "checkpoint": "Run"}
PANELS["wire"] = "Run"
PANELS["engine"] = "Engine"
PLAIN_TYPES = {"integer": int, "number": float, "boolean": bool}


def option(panel: str, help: str, *names: str, **bounds: Any) -> Any:
    """Return an option that `--help` shows in a panel."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **bounds)


FILE_HELP = "Experiment file or run folder. Options override its values."
RESUME_HELP = "Resume the run in --out (or RUN, or the latest of the default name); start a new one if there is none."
SET_HELP = "Any key of the experiment file: --set algorithm.neighbours=5 (repeatable)."
TRACK_HELP = "Also send every round to experiment trackers, separated by commas: tensorboard, mlflow, wandb."
File = Annotated[Path | None, typer.Argument(help=FILE_HELP, metavar="EXPERIMENT.toml", show_default=False)]
Sets = Annotated[list[str] | None, option("Method", SET_HELP, "--set")]
Quiet = Annotated[bool, option("Output", "Print nothing.", "--quiet", "-q")]
Json = Annotated[bool, option("Output", "Print the results as JSON on standard output.", "--json")]


@dataclass(frozen=True)
class Output:
    """Where the results go and what is printed; `with_settings` gives it to a command that has `output`."""

    out: Annotated[Path | None, option("Output", "Folder for the results; must not exist (default: runs/…).")] = None
    resume: Annotated[bool, option("Output", RESUME_HELP, "--resume")] = False
    track: Annotated[str, option("Output", TRACK_HELP)] = ""
    quiet: Quiet = False
    as_json: Json = False


def with_settings(*, only: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Give a command one option per setting that has one; the command gets those that were given as `given`."""
    places = {name: place for name, place in list_settings().items() if place.option and name not in without}
    order = sorted(only or places, key=lambda name: list(PANELS).index(places[name].section))
    keyword = inspect.Parameter.KEYWORD_ONLY
    made = [inspect.Parameter(name, keyword, default=None, annotation=_annotation(places[name])) for name in order]

    def decorate(command: Command) -> Command:
        own = dict(inspect.signature(command).parameters)
        output = inspect.signature(Output).parameters if own.pop("output", None) else {}
        own.pop("given")

        def wrapper(**arguments: Any) -> None:
            arguments["given"] = {name: arguments.pop(name) for name in order}
            if output:
                arguments["output"] = Output(**{name: arguments.pop(name) for name in output})
            command(**arguments)

        first, *others = [one.replace(kind=keyword) for one in [*own.values(), *output.values()]]
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = signature = inspect.Signature([first, *made, *others])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
        return wrapper

    return decorate


def _annotation(place: Place) -> Any:
    assert place.option is not None
    # The plain type of a setting: of `int | "auto"` int, of a choice str.
    schema = TypeAdapter(place.field.rebuild_annotation()).json_schema()
    kinds = [PLAIN_TYPES.get(one["type"], str) for one in schema.get("anyOf", [schema])]
    kind = next((kind for kind in kinds if kind is not str), str)
    name, default = place.option.name, place.field.default
    words = [f"--{name}/--no-{name}" if kind is bool else f"--{name}", *filter(None, [place.option.short])]
    text = f"{' '.join((place.field.description or '').split())} (default: {'no' if default is False else default})"
    return Annotated[kind | None, option(PANELS[place.section], text, *words)]


def split_words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_ints(name: str, text: str, example: str) -> list[int]:
    words = split_words(text)
    for word in words:
        if not word.isdecimal() or len(word) > 19:
            raise PfedlaError(f"{name}: {shown(word)} is not a whole number; write for example {name} {example}")
    return [int(word) for word in words]


def say(*parts: object) -> None:
    """Print lines and tables; a terminal wraps the lines, so that a path can be copied."""
    for part in parts:
        out_console.print(part, soft_wrap=isinstance(part, str))


def answer(content: dict[str, Any], *parts: object, as_json: bool, quiet: bool = False) -> None:
    """Print the content as JSON, or the lines and tables that show it."""
    if as_json:
        print(json.dumps(content))
    elif not quiet:
        say(*parts)


@contextmanager
def watching(rounds: int, *, quiet: bool, **how: Any) -> Iterator[tuple[Any, Interruption]]:
    """Show the progress of a run of `rounds`, and catch the signals that stop it; `how` as in Display."""
    from pfedla.runs.progress import Display

    with Interruption(quiet) as interruption, Display(rounds, quiet=quiet, **how) as display:
        yield display, interruption
