"""Which method, which options? Trials on a validation split of the *training* data; the test split is not touched.

A trial is a method and its options. Trials whose results are in --out are not run again.

python benchmarks/validation.py digits classes --seeds 0,1,2 local fedavg pfedla "pfedla hypernetwork_lr=6"
python benchmarks/validation.py emnist dominant --local-epochs 10 fedrep "fedrep head_epochs=2"
"""

import json
import statistics
import tomllib
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pfedla import simulate
from pfedla.core.errors import GaveUpError
from pfedla.data.federation import Federation, federation_of
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment

OPTIONAL = ("lr", "samples_per_client", "validation_share")
VALIDATION_SHARE = 0.3  # of the training images
OUT = Path(__file__).parent / "results" / "validation.jsonl"


def hold_out(federation: Federation, seed: int, share: float) -> Federation:
    """Return a federation of the training examples alone, with a share of them as its test split."""
    x, y = (np.concatenate([examples[part].numpy() for examples in federation.train]) for part in (0, 1))
    owners = np.repeat(np.arange(len(federation)), federation.num_examples.numpy())
    return federation_of(x, y, owners, seed=seed, test_share=share)


def parse_options(words: list[str]) -> dict[str, Any]:
    found = {}
    for key, _, text in (word.partition("=") for word in words):
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def measure(trial: str, setting: dict[str, Any]) -> dict[str, Any]:
    name, *words = trial.split()
    data = {key: setting[key] for key in ("dataset", "partition", "samples_per_client") if key in setting}
    built = build(Experiment.parse({"seed": setting["seed"], "data": data}))
    assert isinstance(built.federation, Federation)
    result = simulate(
        hold_out(built.federation, setting["seed"], setting.get("validation_share", VALIDATION_SHARE)),
        built.algorithm.task.module,
        name,
        rounds=setting["rounds"],
        local_epochs=setting["local_epochs"],
        lr=setting.get("lr", built.algorithm.training.learning_rate),
        seed=setting["seed"],
        evaluate_every=setting["rounds"],
        recalibrate="always",
        progress=False,
        compile=True,
        **parse_options(words),
    )
    line = {**setting, "trial": trial, "accuracy": result.accuracy.mean().item()}
    line["after_training"] = result.score_after_training.mean().item()
    if result.alpha is not None:
        names, own = result.algorithm.task.layers.names, result.alpha.diagonal(dim1=0, dim2=2).mean(1).tolist()
        line["self_weights"] = {layer: round(weight, 3) for layer, weight in zip(names, own, strict=True)}
    return line


def is_same(line: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Tell whether a stored line has this trial and these settings; an optional one is absent in both or equal."""
    return line.items() >= whole.items() and all(line.get(key) == whole.get(key) for key in OPTIONAL)


def main(
    dataset: str,
    partition: str,
    trials: Annotated[list[str], typer.Argument(help="A method and its options in one word.")],
    seeds: Annotated[str, typer.Option()] = "100",
    rounds: int = 20,
    local_epochs: int = 5,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the paper's for the data set).")] = None,
    samples: Annotated[int | None, typer.Option(help="Images per client, 30 % of them test images.")] = None,
    share: Annotated[float | None, typer.Option(help="Share of the training images for validation (0.3).")] = None,
    out: Path = OUT,
) -> None:
    known = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    table = Table("trial", "validation accuracy %", "after training %", "self-weight per layer")
    common = {"dataset": dataset, "partition": partition, "rounds": rounds, "local_epochs": local_epochs}
    optional = dict(zip(OPTIONAL, (lr, samples, share), strict=True))
    common |= {key: value for key, value in optional.items() if value is not None}
    for trial in track(trials, console=Console(stderr=True)):
        lines = []
        for seed in map(int, seeds.split(",")):
            setting = common | {"seed": seed}
            whole = {**setting, "trial": trial}
            line = next((one for one in known if is_same(one, whole)), None)
            if line is None:
                try:
                    line = measure(trial, setting)
                except GaveUpError as error:  # it diverged: a result, too
                    line = {**whole, "failed": str(error)}
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            lines.append(line)
        failed = any("failed" in line for line in lines)
        percent = [
            "diverged" if failed else f"{100 * statistics.mean(line[key] for line in lines):.1f}"
            for key in ("accuracy", "after_training")
        ]
        weights = " ".join(f"{layer} {weight:.2f}" for layer, weight in lines[0].get("self_weights", {}).items())
        table.add_row(trial, *percent, weights)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
