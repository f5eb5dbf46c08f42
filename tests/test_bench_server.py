"""The benchmark of the server's step runs, and a simulation of a thousand clients stays within its memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "bench_server.py"
pytestmark = pytest.mark.slow


def test_the_benchmark_at_its_smallest(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", tmp_path], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "server.json").read_text())
    assert {one["label"] for one in report["steps"]} == {"network", "compact, 5 neighbours", "textbook"}
    assert all(value > 0 for one in report["steps"] for value in (*one["seconds"], *one["core_seconds"], one["peak_bytes"]))
    assert report["simulation"]["clients"] == 20
    assert (tmp_path / "server.png").stat().st_size > 10_000


def test_a_thousand_clients_are_simulated_in_less_than_three_gigabytes() -> None:
    asked = json.dumps({"what": "simulation", "clients": 1_000})
    done = subprocess.run([sys.executable, SCRIPT, asked], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_bytes"] < 3e9
