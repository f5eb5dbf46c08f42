"""The options that commands share, and what they print on."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pfedla.core.errors import PfedlaError, shown

out_console = Console(highlight=False, markup=False)

File = Annotated[
    Path | None,
    typer.Argument(
        help="Experiment file or run folder; the options lie over it.", metavar="EXPERIMENT.toml", show_default=False
    ),
]
Run = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]
Dataset = Annotated[
    str | None,
    typer.Option("--dataset", "-d", help="digits, fashion-mnist, emnist, cifar10, …: see `pfedla data list`; or a file.npz."),
]
Partition = Annotated[
    str | None,
    typer.Option(
        help="classes: 4 classes a client (non-IID_1, the default); dominant: all, 2 prevail (non-IID_2); dirichlet, "
        "shards, iid; twins, chain, toy: the paper's analyses; client: as in the file."
    ),
]
Clients = Annotated[int | None, typer.Option(help="Number of clients (default: 10; twins and chain 8, toy 6).")]
Samples = Annotated[
    int | None, typer.Option(help="Examples per client, training and test (default: 600; digits: all there is).")
]
Participation = Annotated[float | None, typer.Option(help="Share of the clients in each round (default: 1.0).")]
Rounds = Annotated[int | None, typer.Option(help="Rounds of training (default: 20).")]
LocalEpochs = Annotated[int | None, typer.Option(help="Local epochs a round (default: 5).")]
Lr = Annotated[float | None, typer.Option(help="Learning rate of the clients (default: the paper's for the data set).")]
BatchSize = Annotated[int | None, typer.Option(help="Local batch size (default: 32).")]
Augment = Annotated[
    bool | None,
    typer.Option("--augment/--no-augment", help="Random crop and flip of the training images, for photographs (default: no)."),
]
Model = Annotated[str | None, typer.Option(help="cnn, cnn-bn (the paper's), small-cnn, mlp (default: by the data's shape).")]
Engine = Annotated[
    str | None,
    typer.Option(
        help="threaded, vectorized (vmap: GPUs and small nets), flower (its simulation; on a Ray cluster if RAY_ADDRESS names "
        "one), or auto: threaded or vectorized, by device and model (default: auto)."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Clients trained at once (threaded, flower); does not change the results (default: one per core)."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, … (default: cpu).")]
Compile = Annotated[
    str | None,
    typer.Option(help="Compile the training step (threaded, flower): on, off, or auto: where it pays (default: auto)."),
]
Out = Annotated[Path | None, typer.Option(help="Folder for the results; must not exist (default: runs/…).")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on where the run in --out (or RUN, or the last of its name) stands; start it if it is not there."
    ),
]
CheckpointRounds = Annotated[
    int | None, typer.Option("--checkpoint-every", help="Save the run after every so many rounds (default: every 10 minutes).")
]
Setting = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any key of the experiment file: --set algorithm.neighbours=5 (repeatable)."),
]
Track = Annotated[
    str,
    typer.Option(
        help="Also tell experiment trackers, separated by commas: tensorboard, mlflow, wandb; each an extra to install."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no tables.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")]


def words_of(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def whole_numbers(option: str, text: str, example: str) -> list[int]:
    """Separated by commas."""
    words = words_of(text)
    for word in words:
        if not word.isdecimal() or len(word) > 19:
            raise PfedlaError(f"{option}: {shown(word)} is not a whole number below 2^63; write for example {option} {example}")
    return [int(word) for word in words]
