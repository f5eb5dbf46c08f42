"""What new users get wrong ends in one sentence that names it: PfedlaError, or exit code 2 on the command line."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CLASSES, FEATURES, TinyNet, toy_federation
from torch import Tensor, nn

import pfedla as package
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core import plugins
from pfedla.core.contracts import Algorithm
from pfedla.core.errors import PfedlaError


class Unfinished(Algorithm):
    def init_client(self) -> dict[str, Tensor]:
        return {}


class WrongShape(FedAvg):
    def aggregate(self, server: Any, *others: Any) -> Any:
        return {"model": {name: value[:1] for name, value in server["model"].items()}}


class WrongNames(FedAvg):
    def aggregate(self, server: Any, *others: Any) -> Any:
        return server | {"more": {}, "model": dict(list(server["model"].items())[1:])}


class NoState(FedAvg):
    def aggregate(self, server: Any, *others: Any) -> Any:
        return None


class Raises(FedAvg):
    def local_update(self, client: Any, download: Any, data: Any) -> Any:
        raise KeyError("oops")


class Hides(FedAvg):
    pull: float = 0.5  # type: ignore[assignment]


class Words(nn.Module):
    def forward(self, x: Tensor) -> str:
        return "words"

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 1)


def linear(width: int = CLASSES, features: int = FEATURES) -> nn.Module:
    return nn.Linear(features, width)


def simulate(model: Any = None, method: Any = "fedavg", **more: Any) -> Any:
    return package.simulate(toy_federation(), model or TinyNet(), method, **{"rounds": 1, "lr": 0.1, **more})


PYTHON: dict[str, tuple[str, Callable[[], Any]]] = {
    "class instead of instance": ("instance", lambda: simulate(TinyNet)),
    "arguments swapped": ("federation_of", lambda: package.simulate(TinyNet(), toy_federation(), "fedavg")),
    "no model": ("nn.Module", lambda: simulate("cnn")),
    "wrong width": ("3 classes", lambda: simulate(linear(2))),
    "wrong features": ("cannot train", lambda: simulate(linear(3, 4))),
    "text as output": ("str", lambda: simulate(Words())),
    "lazy layer": ("LazyLinear", lambda: simulate(nn.LazyLinear(CLASSES))),
    "nothing to train": ("trainable", lambda: simulate(linear().requires_grad_(False))),
    "embedding of floats": ("cannot train", lambda: simulate(nn.Embedding(9, CLASSES))),
    "rounds in words": ("rounds", lambda: simulate(rounds="many")),
    "rounds as a float": ("rounds", lambda: simulate(rounds=2.5)),
    "negative lr": ("lr", lambda: simulate(lr=-1.0)),
    "unknown setting": ("epochz", lambda: simulate(epochz=2)),
    "method misspelled": ("did you mean 'pfedla'", lambda: simulate(method="pfedle")),
    "method of another type": ("algorithm", lambda: simulate(method=3)),
    "method as an instance": ("class", lambda: simulate(method=object())),
    "class that is no method": ("Algorithm", lambda: simulate(method=TinyNet)),
    "unfinished method": ("aggregate", lambda: simulate(method=Unfinished)),
    "option that hides a function": ("pull", lambda: simulate(method=Hides)),
    "aggregate of the wrong shape": ("fc1.weight", lambda: simulate(method=WrongShape)),
    "aggregate of other names": ("fc1.weight", lambda: simulate(method=WrongNames)),
    "aggregate without a state": ("None", lambda: simulate(method=NoState)),
    "method that raises": ("test_wrong_inputs.py:", lambda: simulate(method=Raises, rounds=5)),
    "partition misspelled": ("did you mean 'dirichlet'", lambda: package.federation_of(
        np.zeros((9, 2)), np.arange(9) % 3, partition="dirchlet")),
    "nothing to compare": ("at least one", lambda: package.compare(toy_federation(), TinyNet(), [])),
    "option of nobody": ("strength", lambda: package.compare(toy_federation(), TinyNet(), ["local"], strength=1)),
}  # fmt: skip


@pytest.mark.parametrize("case", PYTHON)
def test_in_python(case: str) -> None:
    names, call = PYTHON[case]
    with pytest.raises(PfedlaError) as caught:
        call()
    text = str(caught.value)
    assert names in text
    assert "\n" not in text
    assert len(text) < 500


OWN = """
from torch import nn
from pfedla.algorithms.fedavg import FedAvg

class Mine(FedAvg):
    pass

class Broken(FedAvg):
    def download(self, server, cohort):
        return server["nowhere"]

def factory(shape, num_outputs):
    return "net"

def greedy(shape, num_outputs, depth):
    return nn.Linear(1, 1)

def fails(shape, num_outputs):
    return nn.Linear(shape, 1 / 0)

number = 3
"""
RUN = ("run", "-d", "digits", "--clients", "3", "--samples", "40", "--rounds", "1", "--local-epochs", "1")
SHARED = ("--samples", "400", "--set", "data.overlapping=true")
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "partition misspelled": ("did you mean 'dirichlet'", (*RUN, "--partition", "dirchlet")),
    "method misspelled": ("did you mean 'pfedla'", (*RUN, "-a", "pfedle")),
    "model misspelled": ("did you mean 'resnet20'", (*RUN, "--model", "resnet2")),
    "engine misspelled": ("did you mean 'vectorized'", (*RUN, "--engine", "vectorised")),
    "data set misspelled": ("digits", ("run", "-d", "digit")),
    "key misspelled": ("neighbours", (*RUN, "-a", "pfedla", "--set", "algorithm.neighbors=2")),
    "no such module": ("no module 'nomodule'", (*RUN, "-a", "nomodule:Mine")),
    "file in place of a module": ("write own:Mine", (*RUN, "-a", "own.py:Mine")),
    "no such class": ("did you mean 'Mine'", (*RUN, "-a", "own:Mini")),
    "no class": ("class", (*RUN, "-a", "own:number")),
    "no method": ("not a subclass", (*RUN, "-a", "torch.nn:Linear")),
    "module that fails": ("bad.py:1", (*RUN, "-a", "bad:Mine")),
    "method that fails on the server": ("own.py:10", (*RUN, "-a", "own:Broken")),
    "model that is no module": ("str", (*RUN, "--model", "own:factory")),
    "model with more arguments": ("depth", (*RUN, "--model", "own:greedy")),
    "model that fails": ("own.py:19", (*RUN, "--model", "own:fails")),
    "model that is no function": ("own:number", (*RUN, "--model", "own:number")),
    "text model for images": ("lstm-text", (*RUN, "--model", "lstm-text")),
    "image too small": ("at least 16x16", (*RUN, "--model", "cnn")),
    "folder that is there": ("full", (*RUN, "--out", "full")),
    "starter in a full folder": ("full", ("new", "full")),
    "report of nothing": ("nope", ("report", "nope")),
    "resume of no comparison": ("full", ("compare", "full", "--resume")),
    "tuning of a method misspelled": ("did you mean 'pfedla'", ("tune", *RUN[1:], "-a", "pfedle")),
    "tuning without trials": ("--trials 0", ("tune", *RUN[1:], "-a", "local", "--trials", "0")),
    "tuning of nothing": ("at least one", ("tune", *RUN[1:], "-a", ",")),
    "tuning in a full folder": ("full", ("tune", *RUN[1:], "-a", "local", "--out", "full")),
    "resume of no tuning": ("full", ("tune", *RUN[1:], "-a", "local", "--out", "full", "--resume")),
    "tuning of clients that share examples": ("overlapping", ("tune", *RUN[1:], *SHARED, "-a", "local")),
    "methods that are no list": ("methods", ("tune", "methods.toml")),
}


@pytest.mark.parametrize("case", COMMANDS)
def test_on_the_command_line(pfedla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "SEARCH", [])
    for name in ("own", "bad"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "methods.toml").write_text('methods = "local"')
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    names, words = COMMANDS[case]
    code, _, err = pfedla(*words)
    assert code == 2, err
    assert names in err
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "nope").exists()


def test_a_traceback_on_demand(pfedla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "raising.py").write_text(OWN)
    code, _, err = pfedla("--debug", *RUN, "-a", "raising:Broken")
    assert code == 2
    assert "Traceback" in err
    assert "nowhere" in err


def test_an_empty_folder_may_be_used(pfedla, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert pfedla(*RUN, "--out", "out", "-q")[0] == 0
    assert pfedla(*RUN, "--out", "out", "-q")[0] == 2


def test_the_random_state_is_left_alone() -> None:
    model, before = nn.Sequential(nn.Dropout(0.1), linear()), torch.random.get_rng_state()
    simulate(model)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_loss_that_is_not_finite_and_options_that_do_nothing_are_refused() -> None:
    for settings, what in (
        ({"loss": lambda outputs, y: outputs.sum() * float("nan")}, "loss"),
        ({"optimizer": "adamw", "momentum": 0.9}, "momentum"),
        ({"nesterov": True}, "nesterov"),
    ):
        with pytest.raises(PfedlaError, match=what):
            package.simulate(toy_federation(), TinyNet(), "fedavg", rounds=1, **settings)
