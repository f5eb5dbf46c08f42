"""The paper's Table 3, and that a real run counts what it sends."""

import json

import pytest
import torch

from pfedla.core.layers import Layers
from pfedla.core.models import MLP, PaperCNN, SmallCNN, build_model, model_for
from pfedla.core.rounds import planned_traffic


def test_the_papers_cnn_has_the_papers_sizes() -> None:
    plain, normed = PaperCNN((1, 28, 28), 10, False), PaperCNN((3, 32, 32), 10, True)
    assert dict(zip(Layers.of(plain).names, Layers.of(plain).num_parameters, strict=True)) == {
        "conv1": 416, "conv2": 12_832, "fc1": 61_560, "fc2": 10_164, "fc3": 850,
    }  # fmt: skip
    assert dict(zip(Layers.of(normed).names, Layers.of(normed).num_parameters, strict=True)) == {
        "conv1": 1_216, "bn1": 32, "conv2": 12_832, "bn2": 64, "fc1": 96_120, "fc2": 10_164, "fc3": 850,
    }  # fmt: skip
    assert sum(Layers.of(plain).num_parameters) == 85_822
    assert sum(Layers.of(normed).num_parameters) == 121_278


@pytest.mark.parametrize(
    ("shape", "name"),
    [((1, 28, 28), "cnn"), ((3, 32, 32), "cnn-bn"), ((1, 8, 8), "small-cnn"), ((30,), "mlp"), ((1, 2, 2), "mlp")],
)
def test_models_are_chosen_by_shape(shape: tuple[int, ...], name: str) -> None:
    assert model_for(shape) == name
    kind = {"cnn": PaperCNN, "cnn-bn": PaperCNN, "small-cnn": SmallCNN, "mlp": MLP}[name]
    model = build_model(name, shape, 7, torch.Generator().manual_seed(0))
    assert isinstance(model, kind)
    assert model(torch.zeros(3, *shape)).shape == (3, 7)


def test_pooling_before_relu_changes_no_number() -> None:
    model = PaperCNN((3, 32, 32), 10, True).eval()
    x = torch.randn(4, 3, 32, 32)
    hidden = torch.max_pool2d(model.bn1(model.conv1(x)).relu(), 2)
    hidden = torch.max_pool2d(model.bn2(model.conv2(hidden)).relu(), 2)
    textbook = model.fc3(model.fc2(model.fc1(hidden.flatten(1)).relu()).relu())
    assert torch.equal(model(x), textbook)


@pytest.mark.parametrize(
    ("dataset", "retain", "mebibytes"),
    [
        ("emnist", "", "491.08"), ("emnist", "fc3", "488.65"), ("emnist", "fc3,fc1", "312.52"),
        ("cifar10", "", "693.96"), ("cifar10", "fc1", "418.96"), ("cifar10", "fc1,conv2", "382.24"),
        ("cifar10", "fc1,conv2,fc3", "379.81"),
    ],
)  # fmt: skip
def test_table_3(pfedla, dataset: str, retain: str, mebibytes: str) -> None:
    call = ["communication", "--dataset", dataset, "--clients", 10, "--rounds", 75]
    code, out, _ = pfedla(*call, *(["--retain", retain] if retain else []))
    assert code == 0
    assert f"{mebibytes} MiB in all" in out


def test_participation_counts_participants(pfedla) -> None:
    _, full, _ = pfedla("communication", "-d", "digits", "--clients", 100, "--json")
    _, tenth, _ = pfedla("communication", "-d", "digits", "--clients", 100, "--participation", 0.1, "--json")
    assert json.loads(full)["total_mib"] == pytest.approx(10 * json.loads(tenth)["total_mib"])


PAPERS = ("--set", "algorithm.rule=paper")  # learns from the first round on


def test_a_real_heurpfedla_run_saves_what_it_retains(pfedla, tmp_path) -> None:
    """The set may change by client and round; here it is read back from the weights and must explain every byte."""
    code, out, _ = pfedla("run", "-a", "heurpfedla", "--rounds", 4, "--local-epochs", 1, "--json", "--out", "run", *PAPERS)
    assert code == 0
    traffic = json.loads(out)["traffic"]
    layers = Layers.of(SmallCNN((1, 8, 8), 10))
    full = planned_traffic(layers, 10, 4, [])
    assert traffic["up_bytes"] == full.up_bytes
    from pfedla.report.figures import read_alpha

    alpha, names, rounds = read_alpha(tmp_path / "run")
    assert tuple(names) == layers.names
    assert rounds == [0, 1, 2, 3, 4]
    own = alpha.diagonal(axis1=1, axis2=3)  # [snapshots, layers, clients]
    saved = 0
    for snapshot in own[:-1]:
        for client in snapshot.T:
            nearest_the_output_first = [(weight, layer) for layer, weight in enumerate(client)]
            saved += 4 * layers.num_parameters[max(nearest_the_output_first)[1]]
    assert full.down_bytes - traffic["down_bytes"] == saved
    assert saved > 0
