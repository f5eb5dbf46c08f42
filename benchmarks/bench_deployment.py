"""What a round costs on Flower: a SuperLink and SuperNodes on loopback beside the threaded engine, ten local epochs.

    python benchmarks/bench_deployment.py [--clients 3,10] [--datasets digits,fashion-mnist]

Both train the same clients on the same cores, so the difference is Flower's: processes, imports, polling and messages.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import pfedla
from pfedla.flower.layout import planned, read_plan, write_deployment
from pfedla.flower.local import LOOPBACK, run_locally
from pfedla.runs.experiment import Experiment
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Reporter
from pfedla.runs.result import environment
from pfedla.report.reading import read_result

RESULTS = Path(__file__).parent / "results" / "deployment.json"
ROUNDS = 3


def measure(dataset: str, clients: int, folder: Path) -> dict[str, Any]:
    values = {
        "rounds": ROUNDS, "evaluate_every": ROUNDS, "data": {"dataset": dataset, "clients": clients},
        "training": {"local_epochs": 10}, "algorithm": {"name": "pfedla"},
    }  # fmt: skip
    deployment = planned(Experiment.parse(values), None, folder)
    write_deployment(folder, deployment, [LOOPBACK], 9092)
    plan = read_plan(folder)
    run_locally(folder, clients, plan.folder, Reporter(ROUNDS, quiet=False), Interruption())
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
    RESULTS.write_text(json.dumps({"environment": environment(), "seconds_per_round": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
