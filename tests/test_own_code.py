"""One's own methods and models: by class, by package.module:Name, by entry point, in every command; the models."""

import json
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from conftest import TinyNet, toy_federation
from torch.func import functional_call, stack_module_state, vmap

import pfedla as package
from pfedla import algorithms
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core import models, plugins
from pfedla.core.errors import PfedlaError
from pfedla.core.models import MODELS, build_model, model_for
from pfedla.core.settings import Chance

METHOD = '''
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.settings import Chance

class Lazy(FedAvg):
    """FedAvg that moves only a part of the way.

    More of it.
    """

    step: Chance = 0.5
    """How far."""

    def aggregate(self, server, cohort, downloads, uploads):
        new = super().aggregate(server, cohort, downloads, uploads)["model"]
        return {"model": {n: v.lerp(new[n], self.step) if v.is_floating_point() else new[n]
                          for n, v in server["model"].items()}}

class Local(FedAvg):
    pass
'''
MODEL = """
from torch import nn

def factory(shape, num_outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_outputs))

class Fixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))

def words(shape, num_outputs, vocabulary):
    return nn.Embedding(vocabulary, num_outputs)
"""
QUICK = ("-d", "digits", "--clients", 3, "--samples", 40, "--rounds", 2, "--local-epochs", 1)


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package of the user's in the current folder, under a name of its own; forgotten afterwards."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "SEARCH", [str(tmp_path)])
    Path(f"{name}.py").write_text(METHOD + MODEL)
    return name


class Careful(FedAvg):
    """FedAvg, carefully."""

    care: Chance = 0.25


def test_a_class_goes_into_simulate() -> None:
    known = {"rounds": 2, "local_epochs": 1, "lr": 0.1}
    own = package.simulate(toy_federation(), TinyNet(), Careful, **known, care=0.5)
    assert own.algorithm.name == "careful"
    assert own.algorithm.summary == "FedAvg, carefully"
    assert own.algorithm.care == 0.5
    assert torch.equal(own.scores, package.simulate(toy_federation(), TinyNet(), "fedavg", **known).scores)

    class Hidden(Careful):  # cannot be imported, and need not be
        pass

    assert package.simulate(toy_federation(), TinyNet(), Hidden, **known).algorithm.care == 0.25


def test_python_compares_with_own_classes(tmp_path: Path) -> None:
    known = {"rounds": 2, "local_epochs": 1, "lr": 0.1, "careful": {"care": 0.75}}
    found = package.compare(toy_federation(), TinyNet(), ["local", Careful], seeds=[0, 1], **known)
    assert [row.algorithm for row in found.rows] == ["local", "careful"]
    assert found.folder is None
    assert [one["seed"] for one in found["careful"].results] == [0, 1]
    assert 0 <= found.mean("careful") <= 1
    assert found.error("careful") is not None
    assert "| careful |" in found.table() == repr(found)
    again = package.compare(
        toy_federation(), TinyNet(), ["local", Careful], seeds=[0, 1], out=tmp_path / "out", **known
    )
    assert again.mean("careful") == found.mean("careful")
    written = tomllib.loads((tmp_path / "out/careful-s1/experiment.toml").read_text())["algorithm"]
    assert written == {"name": f"{__name__}:Careful", "averaging": "mean", "care": 0.75}
    assert list(json.loads((tmp_path / "out/comparison.json").read_text())) == ["local", "careful"]


def test_own_code_in_run_and_resume(pfedla, code: str) -> None:
    own = ("-a", f"{code}:Lazy", "--model", f"{code}:factory", "--set", "algorithm.step=0.75")
    assert pfedla("run", *QUICK, *own, "-q")[0] == 0
    run = next(Path("runs").iterdir())
    assert run.name.startswith("lazy-digits")
    content = tomllib.loads((run / "experiment.toml").read_text())
    assert content["algorithm"] == {"name": f"{code}:Lazy", "averaging": "mean", "step": 0.75}
    assert content["model"] == f"{code}:factory"
    assert json.loads((run / "result.json").read_text())["algorithm"] == "lazy"
    assert pfedla("run", run, "--resume", "--rounds", 3, "-q")[0] == 0
    status, _, err = pfedla("run", run, "--resume", "--set", "algorithm.step=0.5")
    assert status == 2
    assert "algorithm.step" in err


def test_own_code_in_compare(pfedla, code: str) -> None:
    names = f"local,{code}:Lazy,{code}:Local"
    assert pfedla("compare", *QUICK, "-a", names, "--set", "lazy.step=0.75", "--out", "both", "-q")[0] == 0
    shown = list(json.loads(Path("both/comparison.json").read_text()))
    assert shown[:2] == ["local", "lazy"]
    assert len(set(shown)) == 3
    assert all(Path(f"both/{name}-s0/result.json").exists() for name in shown)
    assert pfedla("compare", *QUICK, "-a", "local", "--set", "lazy.step=0.75", "--out", "one")[0] == 2


def test_a_comparison_is_resumed_from_its_folder_and_keeps_its_rows(pfedla, code: str) -> None:
    assert pfedla("compare", *QUICK, "-a", f"local,{code}:Lazy", "--seeds", "0,1", "--out", "c", "-q")[0] == 0
    assert pfedla("compare", *QUICK, "-a", "fedavg", "--seeds", "0", "--out", "c", "--resume", "-q")[0] == 0
    content = json.loads(Path("c/comparison.json").read_text())
    assert {name: len(results) for name, results in content.items()} == {"local": 2, "lazy": 2, "fedavg": 1}
    assert pfedla("compare", "c", "--resume", "-q")[0] == 0  # what is missing: fedavg, seed 1
    content = json.loads(Path("c/comparison.json").read_text())
    assert {name: len(results) for name, results in content.items()} == {"local": 2, "lazy": 2, "fedavg": 2}


def test_entry_points(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"algorithm": f"{code}:Lazy", "model": f"{code}:factory"}

    def list_installed(group: str) -> list[EntryPoint]:
        kind = group.removeprefix("pfedla.").removesuffix("s")
        return [EntryPoint("theirs", values[kind], group)]

    monkeypatch.setattr(plugins, "entry_points", list_installed)
    assert algorithms.find("theirs").__name__ == "Lazy"
    assert algorithms.short_name("theirs") == "lazy"
    assert isinstance(models.make("theirs", (1, 8, 8), 10), torch.nn.Sequential)


def test_a_file_in_the_folder_shadows_nothing_unless_own_code_is_asked_for(pfedla, tmp_path: Path) -> None:
    before = list(sys.path)
    (tmp_path / "matplotlib.py").write_text("raise RuntimeError")
    assert pfedla("algorithms")[0] == 0
    assert sys.path == before


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_one_step_and_maps_over_clients(name: str) -> None:
    is_text, side = models.INPUTS[name].kind == "text", max(16, models.INPUTS[name].smallest)
    shape = {"ids": (12,), "mask": (12,)} if is_text else (3, side, side)
    draws = torch.Generator().manual_seed(0)
    model = build_model(name, shape, 5, draws, 30 if is_text else 0)
    x = (torch.randn(4, *shape),) if not is_text else ()
    words = {"ids": torch.randint(30, (4, 12)), "mask": torch.arange(12) < torch.tensor([[12], [5], [1], [9]])}
    out = model(*x, **(words if is_text else {}))
    out.square().mean().backward()
    assert out.shape == (4, 5)
    assert all(p.grad is not None for p in model.parameters())
    if is_text:  # padding does not count
        model.eval()
        other = words | {"ids": torch.where(words["mask"], words["ids"], 0)}
        assert torch.allclose(model(**words), model(**other), atol=1e-6)
    if name != "lstm-text":
        tensors, buffers = stack_module_state([model.eval(), model])
        many = vmap(lambda t, b: functional_call(model, (t, b), x, words if is_text else {}))(tensors, buffers)
        assert torch.allclose(many[1], model(*x, **(words if is_text else {})), atol=1e-4)


def test_resnet20_is_the_papers() -> None:
    counts = {name: sum(p.numel() for p in build_model(name, (3, 32, 32), 10, torch.Generator()).parameters())
              for name in ("resnet20", "resnet20-gn")}  # fmt: skip
    assert counts == {"resnet20": 269_722, "resnet20-gn": 269_722}


def test_which_model_and_how_it_is_called(code: str) -> None:
    assert model_for({"ids": (9,), "mask": (9,)}) == "transformer-text"
    assert models.make(f"{code}:Fixed", (1, 8, 8), 10)[1].out_features == 10
    assert models.make(f"{code}:words", (9,), 4, vocabulary=7).weight.shape == (7, 4)
    for shape in ({"a": (3,)}, ((3,), (4,))):
        with pytest.raises(PfedlaError, match="--model"):
            model_for(shape)
    with pytest.raises(PfedlaError, match="vocabulary"):
        models.outline("lstm-text", {"ids": (9,), "mask": (9,)}, 2)
    with pytest.raises(PfedlaError, match="lstm-text"):
        models.outline("lstm-text", (1, 8, 8), 2)
    same = [build_model(f"{code}:factory", (1, 8, 8), 10, torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(same[0][1].weight, same[1][1].weight)


def test_the_list_of_models(pfedla) -> None:
    code, out, _ = pfedla("models", "--json")
    assert code == 0
    assert list(json.loads(out)) == list(MODELS)


@pytest.mark.slow
def test_a_starter_project_runs_at_once(tmp_path: Path) -> None:
    def call(folder: Path, *words: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "pfedla", *words], cwd=folder, env=os.environ, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr

    call(tmp_path, "new", "demo")
    demo = tmp_path / "demo"
    call(demo, "compare", "experiment.toml", "-a", "local,fedavg,method:ServerMomentum", "--out", "runs/c")
    assert list(json.loads((demo / "runs/c/comparison.json").read_text())) == ["local", "fedavg", "servermomentum"]
    call(demo, "run", "experiment.toml", "--rounds", "1", "--out", "runs/one")
    subprocess.run([sys.executable, "data.py"], cwd=demo, check=True, capture_output=True)
    assert "ServerMomentum" in textwrap.dedent((demo / "README.md").read_text())


@pytest.mark.slow
def test_own_code_in_a_deployment(pfedla, code: str) -> None:
    pytest.importorskip("flwr")
    own = ("-a", f"{code}:Lazy", "--model", f"{code}:factory", "-d", "digits", "--clients", 2, "--rounds", 1)
    status, out, err = pfedla("deploy", "init", "fed", *own)
    assert status == 0, err
    assert code in out.splitlines()[-1]  # the sites need it
    from pfedla.flower.layout import read_deployment

    built = read_deployment(Path("fed").resolve()).build()
    assert built.algorithm.name == "lazy"
