"""Does joining pay? Clients that stayed away from a run join it: by pFedLA, from FedAvg's model fine-tuned, or not at all.

All have the same local budget on their own data. Seeds that stand in --out are not made again.

python benchmarks/joining.py digits dominant --seeds 0,1,2
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pfedla.algorithms.finetune import FedAvgFineTuned
from pfedla.core.contracts import ServerState
from pfedla.runs.experiment import Built, Experiment, build
from pfedla.runs.joining import ROUNDS, Terms, join
from pfedla.runs.simulation import simulate_method

OUT = Path(__file__).parent / "results" / "joining.jsonl"


def finished(name: str, setting: dict[str, Any]) -> tuple[Built, ServerState, float]:
    """A run without the unseen clients: the server's state at its end, and the accuracy of those who took part."""
    data = {"dataset": setting["dataset"], "partition": setting["partition"]}
    values = {key: setting[key] for key in ("seed", "rounds", "unseen_clients")} | {"evaluate_every": setting["rounds"]}
    training = {"local_epochs": setting["local_epochs"]}
    built = build(Experiment.parse({**values, "data": data, "training": training, "algorithm": {"name": name}}))
    last: list[ServerState] = []

    def keep(played: Any) -> None:
        last[:] = [played.server]

    result = simulate_method(built.federation, built.algorithm, built.experiment.settings(), on_round=keep)
    return built, last[0], result.accuracy.mean().item()


def made(setting: dict[str, Any]) -> dict[str, Any]:
    """The accuracies of the unseen clients, each in a list."""
    terms = Terms(setting["rounds"], setting["seed"], setting["joining_rounds"])
    built, server, took_part = finished("pfedla", setting)
    averaged, mean, took_part_fedavg = finished("fedavg", setting)
    assert built.unseen is not None
    count = len(built.federation)
    training = averaged.algorithm.training
    tuned = {epochs: _tuned(averaged, epochs) for epochs in (training.epochs, training.epochs * terms.rounds)}
    found: dict[str, list[float | None]] = {}
    for number in range(len(built.unseen)):
        newcomer = built.unseen.only([number])
        joined = join(built.algorithm, server, newcomer, count, terms)
        row = {f"pfedla {key}": value for key, value in joined.accuracies().items() if key != "alone"}
        row |= {"local": joined.alone}
        for epochs, method in tuned.items():
            row[f"fedavg-ft {epochs}"] = join(method, mean, newcomer, count, replace(terms, rounds=1)).after
        row["fedavg"] = join(averaged.algorithm, mean, newcomer, count, replace(terms, rounds=1)).after
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    return {**setting, "took_part": {"pfedla": took_part, "fedavg": took_part_fedavg}, "accuracy": found}


def _tuned(averaged: Built, epochs: int) -> FedAvgFineTuned:
    method = averaged.algorithm
    return FedAvgFineTuned(task=method.task, training=replace(method.training, epochs=epochs))


def main(
    dataset: str,
    partition: str,
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    rounds: int = 20,
    local_epochs: int = 5,
    unseen_clients: float = 0.2,
    joining_rounds: int = ROUNDS,
    out: Path = OUT,
) -> None:
    known = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    lines = []
    for seed in map(int, seeds.split(",")):
        setting = {
            "dataset": dataset, "partition": partition, "seed": seed, "rounds": rounds, "local_epochs": local_epochs,
            "unseen_clients": unseen_clients, "joining_rounds": joining_rounds,
        }  # fmt: skip
        line = next((one for one in known if one.items() >= setting.items()), None)
        if line is None:
            line = made(setting)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        lines.append(line)
    table = Table("unseen clients", "accuracy %", "± over seeds", title=f"{dataset}, {partition}", title_justify="left")
    for key in lines[0]["accuracy"]:
        means = [100 * np.mean(line["accuracy"][key]) for line in lines]
        table.add_row(key, f"{np.mean(means):.1f}", f"{np.std(means, ddof=1):.1f}" if len(means) > 1 else "")
    for name in ("pfedla", "fedavg"):
        table.add_row(f"{name}, who took part", f"{100 * np.mean([line['took_part'][name] for line in lines]):.1f}", "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
