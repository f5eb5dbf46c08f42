"""Does joining help? Unseen clients join by pFedLA held-out, get FedAvg's model, fine-tune it, or train alone.

All have the same local budget on their own data. Seeds whose results are in --out are not run again.

python benchmarks/joining.py digits dominant --seeds 0,1,2
"""

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pfedla.algorithms.finetune import FedAvgFineTuned
from rich.console import Console
from rich.table import Table

from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.joining import join
from pfedla.runs.run import Run

OUT = Path(__file__).parent / "results" / "joining.jsonl"


def train(name: str, setting: dict[str, Any]) -> Run:
    """Run a method without the unseen clients."""
    values = {key: setting[key] for key in ("seed", "rounds", "unseen_clients")}
    sections = {
        "data": {"dataset": setting["dataset"], "partition": setting["partition"]},
        "training": {"local_epochs": setting["local_epochs"]},
        "algorithm": {"name": name},
    }
    run = Run(build(Experiment.parse({**values, **sections, "evaluate_every": setting["rounds"]})))
    run.complete()
    return run


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of the unseen clients by method, and of those that took part."""
    rounds = setting["joining_rounds"]
    learned, averaged = train("pfedla-heldout", setting), train("fedavg", setting)
    budget, unseen = averaged.algorithm.training, learned.built.unseen
    assert unseen is not None
    methods = {"fedavg": averaged.algorithm}
    for epochs in (budget.local_epochs, budget.local_epochs * rounds):
        training = budget.model_copy(update={"local_epochs": epochs})
        methods[f"fedavg-ft {epochs}"] = FedAvgFineTuned(task=averaged.algorithm.task, training=training)
    found: dict[str, list[float | None]] = {}
    for number in range(len(unseen)):
        one = unseen.only([number])
        accuracy = join(learned.algorithm, learned.state, one, learned.experiment, rounds).score
        row = {f"pfedla-heldout {key}": value for key, value in accuracy.items() if key != "alone"}
        row["local"] = accuracy["alone"]
        for name, method in methods.items():
            row[name] = join(method, averaged.state, one, averaged.experiment, 1).score["after"]
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    took_part = {
        name: run.simulation.accuracy.mean().item()
        for name, run in (("pfedla-heldout", learned), ("fedavg", averaged))
        if run.simulation is not None
    }
    return {**setting, "took_part": took_part, "accuracy": found}


def main(
    dataset: str,
    partition: str,
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    rounds: int = 20,
    local_epochs: int = 5,
    unseen_clients: float = 0.2,
    joining_rounds: int = 10,
    out: Path = OUT,
) -> None:
    known = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    common = {"dataset": dataset, "partition": partition, "rounds": rounds, "local_epochs": local_epochs}
    common |= {"unseen_clients": unseen_clients, "joining_rounds": joining_rounds}
    lines = []
    for seed in map(int, seeds.split(",")):
        setting = common | {"seed": seed}
        line = next((one for one in known if one.items() >= setting.items()), None)
        if line is None:
            line = measure(setting)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        lines.append(line)
    table = Table("unseen clients", "accuracy %", "± over seeds", title=f"{dataset}, {partition}", title_justify="left")
    for key in lines[0]["accuracy"]:
        means = [100 * np.mean(line["accuracy"][key]) for line in lines]
        table.add_row(key, f"{np.mean(means):.1f}", f"{np.std(means, ddof=1):.1f}" if len(means) > 1 else "")
    for name in lines[0]["took_part"]:
        table.add_row(f"{name}, seen clients", f"{100 * np.mean([line['took_part'][name] for line in lines]):.1f}", "")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
