"""The benchmarks run on tiny work and write what they say; their numbers are not tested."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pfedla.core.models import PaperCNN

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def bench(script: str, *options: object) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.mark.slow
@pytest.mark.parametrize("contenders", [("textbook", "threaded"), ("textbook", "vectorized", "flower")])
def test_the_round_benchmark(tmp_path: Path, contenders: tuple[str, ...]) -> None:
    if "flower" in contenders and importlib.util.find_spec("ray") is None:
        pytest.skip("flwr[simulation] is not installed: pip install -e '.[bench]'")
    options = ["--repeats", 1, "--wait", 0, "--only", "CIFAR-10", "--contenders", ",".join(contenders)]
    bench("bench_round.py", "--quick", "--out", tmp_path, *options)
    assert (tmp_path / "round.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "round.json").read_text())["results"]["CIFAR-10"]
    assert result["contenders"].keys() == set(contenders)
    for found in result["contenders"].values():
        assert found["seconds"][0] > 0
        assert found["peak_mib"] > 100


@pytest.mark.slow
def test_validation_runs_a_trial_once(tmp_path: Path) -> None:
    words = ["digits", "dominant", "--rounds", 1, "--samples", 60, "--out", tmp_path / "trials.jsonl"]
    for _ in range(2):
        bench("validation.py", *words, "local", "pfedla hypernetwork_lr=1")
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines] == ["local", "pfedla hypernetwork_lr=1"]
    assert all(0 < line["accuracy"] < 1 for line in lines)


@pytest.mark.slow
def test_the_benchmarks_of_phases_engines_and_server(tmp_path: Path) -> None:
    bench("bench_phases.py", "--quick", "--rounds", 2, "--out", tmp_path)
    runs = json.loads((tmp_path / "phases.json").read_text())["runs"]
    assert len(runs) == 2
    for found in runs.values():
        parts = sum(found["phases"].values()) + sum(found["around"].values())
        assert parts == pytest.approx(found["seconds"], abs=0.01)
    bench("bench_choice.py", "--quick", "--repeats", 1, "--out", tmp_path)
    (found,) = json.loads((tmp_path / "choice.json").read_text())["results"]
    assert found["seconds"].keys() == {"threaded", "compiled", "vectorized"}
    bench("bench_server.py", "--quick", tmp_path)
    report = json.loads((tmp_path / "server.json").read_text())
    assert {one["label"] for one in report["steps"]} == {"network", "compact, 5 neighbours", "textbook"}
    assert json.loads(bench("guard.py", "--repeats", 1)).keys() == {"Fashion-MNIST", "CIFAR-10"}


@pytest.mark.slow
def test_a_thousand_clients_are_simulated_in_less_than_three_gigabytes() -> None:
    found = json.loads(bench("bench_server.py", json.dumps({"what": "simulation", "clients": 1_000})))
    assert found["peak_bytes"] < 3e9


@pytest.mark.parametrize(("shape", "mflop"), [((1, 28, 28), 6.27), ((3, 32, 32), 12.08)])
def test_the_fixed_work_is_the_papers(monkeypatch: pytest.MonkeyPatch, shape: Any, mflop: float) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fixed_work

    work = fixed_work.Work(shape)
    assert work.samples == 8400
    assert fixed_work.flop_per_sample(work) / 1e6 == pytest.approx(mflop, abs=0.01)
    ours, textbook = PaperCNN(shape, 10, work.batch_norm), fixed_work.TextbookCNN(shape, work.batch_norm)
    textbook.load_state_dict(ours.state_dict())
    x = torch.randn(4, *shape)
    assert torch.equal(ours(x), textbook(x))
