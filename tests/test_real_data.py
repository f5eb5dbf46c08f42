"""The paper's federation on the real files, shortened."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pfedla.algorithms import ALGORITHMS

pytestmark = pytest.mark.slow

FEDERATION = ("-d", "fashion-mnist", "--clients", 10, "--samples", 600, "--partition", "classes", "--local-epochs", 2)


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_the_whole_registry_on_real_images(pfedla, real, name: str) -> None:
    """A few rounds of every method: finite numbers, no two alike, FedBN only where there is BatchNorm."""
    real(name)
    small = ("--samples", 120, "--rounds", 3, "--local-epochs", 2, "--lr", 0.02, "--set", "algorithm.warm_up=0")
    code, out, err = pfedla("compare", "-a", "all", "-d", name, *small, "--json")
    assert code == 0, err
    results = json.loads(out)
    assert results.keys() == ALGORITHMS.keys()
    assert ("not_applicable" in results["fedbn"]) == (name == "fashion-mnist")
    ran = {method: one[0] for method, one in results.items() if "not_applicable" not in one}
    assert all(result["loss"] is not None and result["refused_uploads"] == 0 for result in ran.values())
    assert len({result["loss"] for result in ran.values()}) == len(ran)


@pytest.mark.parametrize("algorithm", ["pfedla", "heurpfedla"])
def test_the_papers_cnn_is_bit_identical_for_any_number_of_threads(pfedla, real, algorithm: str) -> None:
    real("fashion-mnist")
    for threads in (1, 2, 3):
        how = ("--rounds", 2, "--threads", threads, "--out", f"t{threads}", "-q")
        code, _, err = pfedla("run", "-a", algorithm, *FEDERATION, *how)
        assert code == 0, err
    names = [path.relative_to("t1") for path in (*Path("t1/models").iterdir(), Path("t1/alpha.safetensors"))]
    for other, name in itertools.product(("t2", "t3"), names):
        one, two = load_file(Path("t1", name)), load_file(Path(other, name))
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("name", "model", "numbers", "each"),
    [("cifar10", "cnn-bn", 121_278, 4), ("cifar100", "cnn-bn", 121_278 + 90 * 85, 12), ("emnist", "cnn", 85_822, 4)],
)
def test_the_papers_cnn_on_the_real_images(pfedla, real, name: str, model: str, numbers: int, each: int) -> None:
    real(name)
    code, out, err = pfedla("run", "-d", name, "-a", "pfedla", "--rounds", 2, "--json", "--out", "r")
    assert code == 0, err
    result = json.loads(out)
    assert (result["model"], result["traffic"]["up_bytes"]) == (model, 2 * 10 * 4 * numbers)
    lines = [json.loads(line) for line in Path("r/rounds.jsonl").read_text().splitlines()]
    assert lines[1]["training_loss"] < lines[0]["training_loss"]
    federation = json.loads(Path("r/federation.json").read_text())
    assert federation["statistics"]["classes_per_client"] == {"mean": each, "min": each, "max": each}


BUILD = """
import json, os, time
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
from pfedla.data.federation import build_federation
from pfedla.data.partition import Data
before, start = resident(), time.perf_counter()
data, federation = build_federation(Data(dataset="cifar10", clients=100), 0)
seconds = time.perf_counter() - start
images = sum(part.x.numel() for part in (*federation.train, *federation.test))
print(json.dumps({"seconds": seconds, "held": resident() - before, "images": images}))
"""


def test_a_hundred_clients_are_built_quickly_and_stay_small(real) -> None:
    """In a process of its own: what the process holds more than before, against the bytes of its uint8 images."""
    real("cifar10")
    found = json.loads(subprocess.run([sys.executable, "-c", BUILD], check=True, capture_output=True, text=True).stdout)
    assert found["images"] == 60_000 * 3072
    assert found["seconds"] < 5
    assert found["held"] <= 2 * found["images"]


def test_the_papers_method_and_its_floor_learn_on_fashion_mnist(pfedla, real, tmp_path: Path) -> None:
    real("fashion-mnist")
    code, _, err = pfedla(
        "compare", "-a", "local,fedavg,pfedla,heurpfedla", *FEDERATION, "--rounds", 6, "--lr", 0.02, "--out", "c", "-q"
    )
    assert code == 0, err
    results = {name: one[0] for name, one in json.loads((tmp_path / "c" / "comparison.json").read_text()).items()}
    assert results.keys() == {"local", "fedavg", "pfedla", "heurpfedla"}
    accuracies = {name: result["score"]["mean"] for name, result in results.items()}
    assert min(accuracies.values()) > 0.3  # four classes a client: a quarter is chance
    assert len({tuple(result["score"]["per_client"]) for result in results.values()}) == 4
    for name in results:
        lines = [json.loads(line) for line in (tmp_path / "c" / f"{name}-s0" / "rounds.jsonl").read_text().splitlines()]
        assert lines[-1]["loss"] < lines[0]["loss"]
