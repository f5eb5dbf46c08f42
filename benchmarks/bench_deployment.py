"""Measure what a round costs on Flower: SuperLink and SuperNodes on loopback beside the threaded engine.

    python benchmarks/bench_deployment.py [--clients 3,10] [--datasets digits,fashion-mnist]

Both train the same clients on the same cores for ten local epochs, so the difference is Flower's: processes,
imports, polling and messages.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pfedla
from pfedla.flower.layout import plan_deployment, read_deployment, write_deployment
from pfedla.flower.processes import LOOPBACK, run_locally
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import describe_environment
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Display

RESULTS = Path(__file__).parent / "results" / "deployment.json"
ROUNDS = 3


def measure(dataset: str, clients: int, folder: Path) -> dict[str, Any]:
    values = {
        "rounds": ROUNDS,
        "evaluate_every": ROUNDS,
        "data": {"dataset": dataset, "clients": clients},
        "training": {"local_epochs": 10},
        "algorithm": {"name": "pfedla"},
    }
    write_deployment(folder, plan_deployment(Experiment.parse(values), None, folder), [LOOPBACK], 9092)
    plan = read_deployment(folder)
    run_locally(folder, clients, plan.folder, Display(ROUNDS), Interruption())
    simulated = pfedla.run(plan.experiment, folder / "simulated")
    seconds = [read_result(run / "result.json")["seconds"]["phases"] for run in (plan.folder, simulated)]
    deployed, threaded = (one["train"] / ROUNDS for one in seconds)
    share = 1 - threaded / deployed
    found = {"dataset": dataset, "clients": clients, "deployed": deployed, "threaded": threaded, "flowers_share": share}
    return found | {"evaluation": seconds[0]["evaluate"], "server": seconds[0]["server"] / ROUNDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", default="3,10")
    parser.add_argument("--datasets", default="digits,fashion-mnist")
    options = parser.parse_args()
    found = []
    for dataset in options.datasets.split(","):
        for clients in map(int, options.clients.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                found.append(measure(dataset, clients, Path(folder) / "fed"))
            print(json.dumps(found[-1]), flush=True)
    RESULTS.write_text(json.dumps({"environment": describe_environment(), "seconds_per_round": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
