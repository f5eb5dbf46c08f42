"""A round must not become slower unseen: CPU time relative to a textbook loop, beside what was recorded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUARD = ROOT / "benchmarks" / "guard.py"


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    """In a process of its own: nobody else's threads or memory."""
    done = subprocess.run([sys.executable, str(GUARD)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(GUARD.parent))
    import guard

    return guard


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["Fashion-MNIST", "CIFAR-10"])
def test_a_round_takes_no_more_cpu_time_than_it_did(measured, guard, dataset: str) -> None:
    recorded = json.loads(guard.RECORDED.read_text())["ratio"][dataset]
    ratio = measured[dataset]["ratio"]
    assert not guard.too_slow(ratio, recorded), (
        f"{ratio:.2f} of the textbook loop's CPU time, it was {recorded:.2f}; if meant: python benchmarks/guard.py --record"
    )


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["Fashion-MNIST", "CIFAR-10"])
def test_an_engine_twice_as_slow_would_be_noticed(measured, guard, dataset: str) -> None:
    assert guard.too_slow(measured[dataset]["slowed"], recorded=measured[dataset]["ratio"])
