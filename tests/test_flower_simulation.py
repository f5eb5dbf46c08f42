"""Flower's simulation as an engine: the threaded engine's numbers bit for bit, from real Ray workers."""

import importlib.util
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CLASSES, FEATURES, make, toy_federation
from torch import Tensor, nn

from pfedla import Experiment, PfedlaError, Simulation, run, simulate
from pfedla.data.federation import Examples, Federation
from pfedla.engines import create_engine
from pfedla.engines.choice import chosen_engine

RAISES, HANGS = 1, 2  # clients
LULLABY = 1e6


@pytest.fixture
def flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Needs Flower's simulation; nothing of it may be left running afterwards."""
    if importlib.util.find_spec("ray") is None:
        if os.environ.get("CI"):
            pytest.fail("CI should have Flower's simulation: pip install -e '.[flower-simulation]'")
        pytest.skip("Flower's simulation is not installed: pip install -e '.[flower-simulation]'")
    mark = uuid.uuid4().hex
    monkeypatch.setenv("PFEDLA_TEST_MARK", mark)  # whatever is started from here inherits it
    yield
    deadline = time.monotonic() + 30
    while (left := started_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


def started_with(mark: str) -> list[str]:
    """The commands of the processes that have the mark in their environment; that of the test itself is older than the mark."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # gone, or another's
            continue
    return [command for command in found if command]  # a zombie has none


def numbers(folder: Path) -> dict[str, Any]:
    """All that a run leaves but its seconds and its engine's name, byte for byte where it is tensors."""
    result = json.loads((folder / "result.json").read_text())
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    for timed in (result, *lines):
        del timed["seconds"]
    tensors = {path.name: path.read_bytes() for path in [*folder.glob("models/*"), *folder.glob("alpha.*s")]}
    return {"result": result, "lines": lines, **tensors}


def experiment(name: str, engine: str, faults: dict[str, Any], rounds: int) -> Experiment:
    data = {"dataset": "digits", "clients": 4}
    where = {"name": engine, "threads": 2}
    method = {"name": name} | ({"warm_up": 0} if "pfedla" in name else {})
    return Experiment.parse(
        {"rounds": rounds, "data": data, "algorithm": method, "training": {"local_epochs": 2}, "engine": where}
        | {"faults": faults}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "faults", "parts"),
    [
        ("pfedla", {}, [2]),
        ("heurpfedla", {"attack": "noise", "attackers": 0.25}, [1, 2]),  # stopped after a round, then made longer
        ("fedrep", {"dropout": 0.4, "stragglers": 0.5}, [2]),
    ],
)
def test_the_numbers_are_the_threaded_engines(
    name: str, faults: dict[str, Any], parts: list[int], tmp_path: Path, flower: None
) -> None:
    threaded = run(experiment(name, "threaded", faults, 2), tmp_path / "threaded")
    for rounds in parts:
        there = run(experiment(name, "flower", faults, rounds), tmp_path / "flower", resume=True)
    expected = numbers(threaded)
    assert len(expected) > 2  # there are models among them
    assert numbers(there) == expected


class Sleeper(nn.Module):
    """Never comes back when it sees a certain number; in the process that made it, it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.made_in = os.getpid()
        self.fc = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if (x == LULLABY).any():
            if os.getpid() != self.made_in:
                time.sleep(1000)
            raise RuntimeError("that number")
        return self.fc(x)


def troubled(federation: Federation) -> Federation:
    train = [Examples(examples.x.clone(), examples.y.clone()) for examples in federation.train]
    train[RAISES].y[:] = 77
    train[HANGS].x[:] = LULLABY
    return Federation(train, federation.test, federation.classes)


@pytest.mark.slow
def test_a_client_that_raises_or_takes_its_worker_down_fails_alone(flower: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is waited for too long goes down with its client, as one for lack of memory does; others use it after."""
    from pfedla.flower import simulation

    monkeypatch.setattr(simulation, "LONGEST", 8.0)
    torch.manual_seed(0)
    federation, model = troubled(toy_federation()), Sleeper()

    def end(engine: str) -> Simulation:
        return simulate(federation, model, "pfedla", rounds=1, local_epochs=1, engine=engine, threads=2)

    here, there = end("threaded"), end("flower")
    assert there.failures == here.failures == {RAISES: {"raised": 1}, HANGS: {"raised": 1}}
    assert torch.equal(there.loss, here.loss)
    assert here.alpha is not None
    assert there.alpha is not None
    assert torch.equal(there.alpha, here.alpha)


def test_without_the_extra_the_engine_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for ask in (
        lambda: chosen_engine("flower", "cpu", nn.Linear(1, 1)),
        lambda: create_engine("flower", make("pfedla"), toy_federation(), device="cpu", threads=1, recalibrate="never"),
    ):
        with pytest.raises(PfedlaError, match=r"pip install 'pfedla\[flower-simulation\]'"):
            ask()
