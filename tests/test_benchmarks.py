"""The benchmarks run, on tiny work, and write what they say; their numbers are no test's business."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pfedla.core.models import PaperCNN

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def fixed_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import fixed_work

    return fixed_work


def bench(name: str, out: Path, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"bench_{name}.py"), "--quick", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def round_report(out: Path, *contenders: str) -> dict:
    """A quick run of the round benchmark, checked for what all contenders have."""
    options = ["--repeats", "1", "--wait", "0", "--only", "CIFAR-10", "--contenders", ",".join(contenders)]
    printed = bench("round", out, *options)
    assert "measured elsewhere, through their ratio to the textbook loop" in printed
    assert (out / "round.png").stat().st_size > 10_000
    report = json.loads((out / "round.json").read_text())
    assert report["environment"]["torch"] == torch.__version__
    result = report["results"]["CIFAR-10"]
    assert result["data"] in ("real", "synthetic")
    assert result["work"]["images"] == 28
    assert result["contenders"].keys() == set(contenders)
    assert min(result["gemm_gflops"]["1"]) > 0
    for found in result["contenders"].values():
        assert len(found["seconds"]) == 1
        assert found["seconds"][0] > 0
        assert found["peak_mib"] > 100
        assert 0 <= found["others_share"][0] <= 1
    return result


@pytest.mark.slow
def test_the_round_benchmark(tmp_path: Path) -> None:
    round_report(tmp_path, "textbook", "threaded")


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="flwr[simulation] is not installed: pip install -e '.[bench]'"
)
def test_the_round_benchmark_with_flower(tmp_path: Path) -> None:
    found = round_report(tmp_path, "textbook", "vectorized", "flower")["contenders"]
    assert found["flower"]["peak_mib"] > 2 * found["textbook"]["peak_mib"]  # its processes are counted


@pytest.mark.slow
def test_the_phases_benchmark(tmp_path: Path) -> None:
    bench("phases", tmp_path, "--rounds", "2")
    assert (tmp_path / "phases.png").stat().st_size > 10_000
    runs = json.loads((tmp_path / "phases.json").read_text())["runs"]
    assert len(runs) == 2
    for found in runs.values():
        assert found["phases"].keys() == {"train", "evaluate", "server", "record", "checkpoint"}
        assert min(*found["phases"].values(), *found["around"].values()) >= 0
        assert sum(found["phases"].values()) + sum(found["around"].values()) == pytest.approx(found["seconds"], abs=0.01)


@pytest.mark.slow
def test_the_choice_benchmark(tmp_path: Path) -> None:
    bench("choice", tmp_path, "--repeats", "1")
    (found,) = json.loads((tmp_path / "choice.json").read_text())["results"]
    assert found["seconds"].keys() == {"threaded", "compiled", "vectorized"}
    assert min(seconds for way in found["seconds"].values() for seconds in way) > 0


@pytest.mark.parametrize(("shape", "mflop"), [((1, 28, 28), 6.27), ((3, 32, 32), 12.08)])
def test_the_fixed_work_is_the_papers(fixed_work, shape: tuple[int, ...], mflop: float) -> None:
    work = fixed_work.Work(shape)
    assert work.samples == 8400
    assert fixed_work.flop_per_sample(work) / 1e6 == pytest.approx(mflop, abs=0.01)
    ours, textbook = PaperCNN(shape, 10, work.batch_norm), fixed_work.TextbookCNN(shape, work.batch_norm)
    textbook.load_state_dict(ours.state_dict())
    x = torch.randn(4, *shape)
    assert torch.equal(ours(x), textbook(x))
