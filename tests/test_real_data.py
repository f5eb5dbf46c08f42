"""The paper's federation on the real files, shortened."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

FEDERATION = ("-d", "fashion-mnist", "--clients", 10, "--samples", 600, "--partition", "classes", "--local-epochs", 2)


def test_all_methods_learn_on_fashion_mnist(pfedla, fashion_mnist: None, tmp_path: Path) -> None:
    code, _, err = pfedla("compare", *FEDERATION, "--rounds", 6, "--lr", 0.02, "--out", "c", "-q")
    assert code == 0, err
    results = {name: one[0] for name, one in json.loads((tmp_path / "c" / "comparison.json").read_text()).items()}
    assert results.keys() == {"local", "fedavg", "pfedla", "heurpfedla"}
    accuracies = {name: result["accuracy"]["mean"] for name, result in results.items()}
    assert min(accuracies.values()) > 0.3  # four classes a client: a quarter is chance
    assert len({tuple(result["accuracy"]["per_client"]) for result in results.values()}) == 4
    full = 10 * 6 * 85_822 * 4
    assert results["fedavg"]["traffic"]["down_bytes"] == results["pfedla"]["traffic"]["down_bytes"] == full
    assert results["heurpfedla"]["traffic"]["down_bytes"] < full == results["heurpfedla"]["traffic"]["up_bytes"]
    for name in results:
        lines = [json.loads(line) for line in (tmp_path / "c" / f"{name}-s0" / "rounds.jsonl").read_text().splitlines()]
        assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("algorithm", ["pfedla", "heurpfedla"])
def test_the_papers_cnn_is_bit_identical_for_any_number_of_threads(
    pfedla, fashion_mnist: None, tmp_path: Path, algorithm: str
) -> None:
    for threads in (1, 2, 3):
        code, _, err = pfedla(
            "run", "-a", algorithm, *FEDERATION, "--rounds", 2, "--threads", threads, "--out", f"t{threads}", "-q"
        )
        assert code == 0, err
    for other in ("t2", "t3"):
        for path in sorted((tmp_path / "t1" / "models").iterdir()):
            one, two = load_file(path), load_file(tmp_path / other / "models" / path.name)
            assert all(torch.equal(one[name], two[name]) for name in one)
        first, second = (load_file(tmp_path / run / "alpha.safetensors")["alpha"] for run in ("t1", other))
        assert torch.equal(first, second)


def test_the_papers_batchnorm_cnn_agrees_between_engines(pfedla, tmp_path: Path) -> None:
    """Colour images of 32x32 (drawn here): 121,278 parameters, statistics on the clients."""
    import numpy as np

    rng = np.random.default_rng(0)
    y = np.arange(400) % 4
    x = rng.integers(0, 200, (400, 32, 32, 3)) + 12 * y[:, None, None, None]
    np.savez("photos.npz", x=x.astype(np.uint8), y=y)
    results = []
    for engine in ("threaded", "vectorized"):
        code, out, err = pfedla(
            "run", "-d", "photos.npz", "--clients", 4, "--rounds", 2, "--engine", engine, "--lr", 0.01, "--json"
        )
        assert code == 0, err
        results.append(json.loads(out))
    assert results[0]["model"] == "cnn-bn"
    assert results[0]["loss"] == pytest.approx(results[1]["loss"], rel=1e-3)  # two rounds of five epochs amplify rounding
    assert results[0]["traffic"] == results[1]["traffic"]
