"""Hundreds of rounds in which much goes wrong: nothing breaks, and no memory is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROUNDS, SETTLED = 500, 50
PROGRAM = """
import json, os, sys
from pathlib import Path
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunFolder
from pfedla.runs.run import Run

memory, failures = [], []
with Run(build(Experiment.parse(json.loads(sys.argv[1]))), RunFolder(Path(sys.argv[2]))) as run:
    for round in run:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory.append(pages * os.sysconf("SC_PAGE_SIZE"))
        failures.append({client: failure.reason for client, failure in round.failures.items()})
    result = run.finish()
print(json.dumps({"memory": memory, "failures": failures, "result": result}))
"""


@pytest.mark.slow
def test_five_hundred_rounds_with_absent_and_bad_clients(tmp_path: Path) -> None:
    experiment = {
        "rounds": ROUNDS,
        "evaluate_every": 5,
        "algorithm": {"name": "heurpfedla"},
        "training": {"local_epochs": 1},
        "checkpoint": {"rounds": 10},
        "faults": {"dropout": 0.3, "attack": "nan", "attackers": 1.0, "attack_rate": 0.05},
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(experiment), str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    drawn = 10 * ROUNDS
    reasons = [reason for failures in seen["failures"] for reason in failures.values()]
    assert reasons.count("no answer") / drawn == pytest.approx(0.3, abs=0.03)
    assert reasons.count("not finite") / (drawn - reasons.count("no answer")) == pytest.approx(0.05, abs=0.02)
    assert set(reasons) == {"no answer", "not finite"}
    assert seen["result"]["refused_uploads"] == reasons.count("not finite")
    assert seen["result"]["score"]["mean"] > 0.8  # it learns all the same: guessing is 0.1
    settled = seen["memory"][SETTLED - 1]
    assert max(seen["memory"][SETTLED:]) / settled - 1 < 0.05
