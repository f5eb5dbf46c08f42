"""The options that commands share. Those of the experiment are made from its settings, each declared once there."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from rich.console import Console

from pfedla.core.errors import PfedlaError, shown
from pfedla.runs.experiment import Place, list_settings

out_console = Console(highlight=False, markup=False)

PANELS = {
    "algorithm": "Method",
    "data": "Data",
    "training": "Training",
    "": "Run",
    "engine": "Engine",
    "checkpoint": "Run",
}
File = Annotated[
    Path | None,
    typer.Argument(
        help="Experiment file or run folder. Options override its values.",
        metavar="EXPERIMENT.toml",
        show_default=False,
    ),
]
RunPath = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the results; must not exist (default: runs/…).", rich_help_panel="Output"),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume the run in --out (or RUN, or the latest run with the default name); start a new one if there is "
        "none.",
        rich_help_panel="Output",
    ),
]
Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any key of the experiment file: --set algorithm.neighbours=5 (repeatable).",
        rich_help_panel="Method",
    ),
]
Track = Annotated[
    str,
    typer.Option(
        help="Also send every round to experiment trackers, separated by commas: tensorboard, mlflow, wandb.",
        rich_help_panel="Output",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing.", rich_help_panel="Output")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON on standard output.", rich_help_panel="Output")
]


def with_settings(
    *, only: tuple[str, ...] = (), without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per setting that has one; the command gets those that were given as `given`."""
    places = {name: place for name, place in list_settings().items() if place.option and name not in without}
    order = sorted(only or places, key=lambda name: list(PANELS).index(places[name].section))
    places = {name: places[name] for name in order}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def wrapper(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in places}
            command(given=given, **arguments)

        own = [one for one in inspect.signature(command).parameters.values() if one.name != "given"]
        made = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(place))
            for name, place in places.items()
        ]
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        wrapper.__signature__ = inspect.Signature([*parameters[:1], *made, *parameters[1:]])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {one.name: one.annotation for one in [*parameters, *made]}
        return wrapper

    return decorate


def _annotation(place: Place) -> Any:
    assert place.option is not None
    kind = _kind(place.field.annotation)
    name = f"--{place.option.name}"
    words = [f"{name}/--no-{place.option.name}" if kind is bool else name]
    words += [place.option.short] if place.option.short else []
    default = place.field.default
    text = f"{' '.join((place.field.description or '').split())} (default: {'no' if default is False else default})"
    return Annotated[kind | None, typer.Option(*words, help=text, rich_help_panel=PANELS[place.section])]


def _kind(annotation: Any) -> type:
    """Return the plain type of a setting: of `int | "auto"` int, of a choice str."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return str
    if get_origin(annotation) is UnionType or get_args(annotation):
        kinds = [_kind(one) for one in get_args(annotation)]
        return next((kind for kind in kinds if kind is not str), str)
    assert annotation in (int, float, str, bool)
    found: type = annotation
    return found


def split_words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Parse whole numbers separated by commas."""
    words = split_words(text)
    for word in words:
        if not word.isdecimal() or len(word) > 19:
            raise PfedlaError(f"{option}: {shown(word)} is not a whole number; write for example {option} {example}")
    return [int(word) for word in words]
