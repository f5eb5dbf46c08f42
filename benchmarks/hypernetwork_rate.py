"""Which rate of the hypernetwork? Measured on a validation split of the *training* data; the test data are not touched.

python benchmarks/hypernetwork_rate.py digits classes
python benchmarks/hypernetwork_rate.py digits classes --hypernetwork compact --rates 3,10,30
python benchmarks/hypernetwork_rate.py fashion-mnist classes --rounds 30 --local-epochs 10 --seeds 0
"""

import statistics
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pfedla import simulate
from pfedla.data.federation import Federation, federation_of
from pfedla.experiment import Experiment, build


def validation(federation: Federation, seed: int) -> Federation:
    """The clients' training examples alone, 30 % of them held out as the test split of a new federation."""
    x, y = (np.concatenate([examples[part].numpy() for examples in federation.train]) for part in (0, 1))
    return federation_of(x, y, np.repeat(np.arange(len(federation)), federation.num_examples.numpy()), seed=seed)


def main(
    dataset: str,
    partition: str,
    hypernetwork: str = "network",
    rates: Annotated[str, typer.Option()] = "0.3,1,3,10",
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    rounds: int = 20,
    local_epochs: int = 5,
) -> None:
    contenders = [("local", None), ("fedavg", None), *(("pfedla", float(rate)) for rate in rates.split(","))]
    table = Table("algorithm", "rate", "validation accuracy %", "self-weight per layer")
    for name, rate in track(contenders, console=Console(stderr=True)):
        accuracies, self_weights = [], []
        for seed in map(int, seeds.split(",")):
            built = build(Experiment.parse({"seed": seed, "data": {"dataset": dataset, "partition": partition}}))
            result = simulate(
                validation(built.federation, seed), built.algorithm.task.module, name, rounds=rounds, local_epochs=local_epochs,
                lr=built.algorithm.training.lr, seed=seed, evaluate_every=rounds, progress=False,
                **({} if rate is None else {"hypernetwork": hypernetwork, "hypernetwork_lr": rate}),
            )  # fmt: skip
            accuracies.append(100 * result.accuracy.mean().item())
            if result.alphas is not None:
                self_weights.append(result.alpha.diagonal(dim1=0, dim2=2).mean(1).numpy())
        weights = " ".join(
            f"{layer} {weight:.2f}" for layer, weight in zip(result.layer_names, np.mean(self_weights, 0), strict=True)
        ) if self_weights else ""  # fmt: skip
        table.add_row(name, "" if rate is None else f"{rate:g}", f"{statistics.mean(accuracies):.1f}", weights)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
