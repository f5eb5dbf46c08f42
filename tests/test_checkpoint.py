"""A run that is stopped, killed, extended or partly damaged ends as the one that was left alone, bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, assert_same, flat, make, methods, toy_federation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pfedla.runs.simulation
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.faults import Faults
from pfedla.core.rounds import Round
from pfedla.runs.checkpoint import Cadence, Checkpoints, Progress, differing
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunFolder
from pfedla.runs.simulation import Settings, Simulation, simulate_method

ROUNDS = 5
TROUBLE = Faults(dropout=0.3, attack="nan", attackers=0.5, attack_rate=0.5)


def go(
    path: Path, name: str = "heurpfedla", *, rounds: int = ROUNDS, stop_after: int = 0, drop_in: int = 0, every: int = 1,
    evaluate_every: int = 1, engine: str = "threaded", said: list[str] | None = None,
) -> Simulation | None:  # fmt: skip
    """A run in a folder, from the start or from where it stands; None if it is asked to stop: after a round, or in one."""
    experiment = Experiment.parse(
        {"rounds": rounds, "evaluate_every": evaluate_every, "checkpoint": {"rounds": every}, "algorithm": {"name": name}}
    )
    played: list[int] = [0]

    def record(one: Round) -> None:
        played.append(one.round)
        nothing = dict.fromkeys(("mean", "std", "p10", "worst"))
        folder.add_line({"round": one.round, "accuracy": nothing, "accuracy_after_training": None})

    folder = RunFolder(path, resume=True)
    folder.say = (said if said is not None else []).append
    folder.on_restored = lambda progress: played.append(progress.round)
    folder.stopping = lambda: (bool(stop_after) and played[-1] >= stop_after) or (bool(drop_in) and played[-1] >= drop_in - 1)
    method = make(name, batch_norm=None)
    how = Settings(rounds, 0.7, engine=engine, threads=2, evaluate_every=evaluate_every, faults=TROUBLE)
    with folder:
        if folder.begin(experiment) is not None:
            raise AssertionError("finished")
        try:
            return simulate_method(toy_federation(), method, how, on_round=record, keeper=folder)
        except Stopped:
            return None


def assert_ends_equal(one: Simulation | None, other: Simulation | None) -> None:
    assert one is not None
    assert other is not None
    assert torch.equal(one.accuracy, other.accuracy)
    assert torch.equal(one.loss, other.loss)
    torch.testing.assert_close(one.accuracy_after_training, other.accuracy_after_training, rtol=0, atol=0, equal_nan=True)
    assert one.traffic == other.traffic
    assert one.failures == other.failures
    assert one.alpha_rounds == other.alpha_rounds
    if one.alphas is not None:
        assert torch.equal(one.alphas, other.alphas)
    for left, right in zip(one.models, other.models, strict=True):
        assert_same(left, right)


@pytest.mark.parametrize("name", methods(variants=True))
def test_save_load_continue_is_a_straight_run(name: str, tmp_path: Path) -> None:
    """For every method, with clients that stay away and send nonsense; stopped once after a round and once within one."""
    straight = go(tmp_path / "straight", name)
    assert go(tmp_path / "cut", name, stop_after=1) is None
    assert go(tmp_path / "cut", name, drop_in=4) is None
    assert [json.loads(line)["round"] for line in (tmp_path / "cut" / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert_ends_equal(go(tmp_path / "cut", name), straight)


def test_a_run_with_the_vectorized_engine_goes_on_too(tmp_path: Path) -> None:
    straight = go(tmp_path / "straight", "pfedla", engine="vectorized")
    assert go(tmp_path / "cut", "pfedla", engine="vectorized", stop_after=3) is None
    assert_ends_equal(go(tmp_path / "cut", "pfedla", engine="vectorized"), straight)


@pytest.mark.parametrize(("first", "then"), [(2, 5), (3, 7), (5, 6)])
def test_a_longer_run_is_the_same_as_if_it_had_been_asked_for_at_once(
    first: int, then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated every second round, and with so few snapshots that a longer run has fewer per round."""
    monkeypatch.setattr(pfedla.runs.simulation, "SNAPSHOTS", 3)
    straight = go(tmp_path / "straight", rounds=then, evaluate_every=2)
    assert go(tmp_path / "long", rounds=first, evaluate_every=2) is not None
    assert_ends_equal(go(tmp_path / "long", rounds=then, evaluate_every=2), straight)


def test_a_run_killed_between_its_last_round_and_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds are played, the result was not written: the end is computed from the checkpoint alone."""
    monkeypatch.setattr(pfedla.runs.simulation, "SNAPSHOTS", 3)  # so that the last is out of turn
    for evaluate_every in (1, 2):
        path = tmp_path / str(evaluate_every)
        straight = go(path, evaluate_every=evaluate_every)
        assert_ends_equal(go(path, evaluate_every=evaluate_every), straight)


@pytest.mark.parametrize("rounds", [1, 2, 3, 99, 100, 101, 128, 200, 201, 10_000])
def test_snapshots_are_at_most_a_hundred_and_those_of_a_longer_run_among_them(rounds: int) -> None:
    interval = pfedla.runs.simulation.snapshot_interval(rounds, 10, 5)
    assert rounds / interval <= 100
    assert rounds <= 100 or rounds / interval > 50
    assert pfedla.runs.simulation.snapshot_interval(7 * rounds, 10, 5) % interval == 0


def test_only_the_last_two_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    go(tmp_path / "r")
    names = {path.name for path in (tmp_path / "r" / "checkpoints").iterdir()}
    assert names == {f"round-{number}.{ending}" for number in (4, 5) for ending in ("json", "safetensors")}


def damaged(how: str) -> Callable[[Path, int], None]:
    def damage(folder: Path, number: int) -> None:
        tensors, state = folder / f"round-{number}.safetensors", folder / f"round-{number}.json"
        if how == "cut":
            tensors.write_bytes(tensors.read_bytes()[:-7])
        elif how == "flipped":
            content = bytearray(tensors.read_bytes())
            content[-100] ^= 1  # one bit of one number, which stays finite
            tensors.write_bytes(content)
        elif how == "counter":
            state.write_text(state.read_text().replace('"failed_rounds": 0', '"failed_rounds": 1'))
        elif how == "empty":
            state.write_bytes(b"")
        elif how == "gone":
            tensors.unlink()
        elif how == "pickle":
            tensors.write_bytes(b"\x80\x04\x95\x0c\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins.")
        else:
            other = folder / f"round-{number - 1}"
            shutil.copy(other.with_suffix(".safetensors"), tensors)

    return damage


@pytest.mark.parametrize("how", ["cut", "flipped", "counter", "empty", "gone", "pickle", "another round's"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    straight = go(tmp_path / "straight")
    go(tmp_path / "cut", stop_after=3)
    damaged(how)(tmp_path / "cut" / "checkpoints", 3)
    said: list[str] = []
    assert_ends_equal(go(tmp_path / "cut", said=said), straight)
    assert said[0].startswith("the checkpoint after round 3 cannot be used: ")
    assert said[1].endswith("going on after round 2")


def test_with_all_checkpoints_damaged_nothing_is_made_up(tmp_path: Path) -> None:
    go(tmp_path / "cut", stop_after=3)
    for number in (2, 3):
        damaged("cut")(tmp_path / "cut" / "checkpoints", number)
    with pytest.raises(PfedlaError, match=r"no checkpoint in .* can be used"):
        go(tmp_path / "cut")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[Path], Any]]:
    """A folder with one checkpoint, and what loads a folder like it."""
    folder = tmp_path_factory.mktemp("saved") / "r"
    go(folder, stop_after=2, every=2)
    folder = folder / "checkpoints"
    method = make("heurpfedla", batch_norm=True)
    server = method.init_server(len(SIZES), 0)
    fresh = Progress(server, torch.full((len(SIZES),), torch.nan), alphas=[method.alpha(server)])
    clients = {name: torch.stack([value] * len(SIZES)) for name, value in method.init_client().items()}
    clients["__trained__"] = torch.zeros(len(SIZES), dtype=torch.bool)
    experiment = json.loads((folder / "round-2.json").read_text())["state"]["experiment"]
    return folder, lambda path: Checkpoints(path, experiment).newest(fresh, clients)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_is_ever_loaded(data: st.DataObject, saved: tuple[Path, Callable[[Path], Any]], tmp_path: Path) -> None:
    """Bytes changed, cut or put in anywhere: either the very same state comes back, or a sentence."""
    whole, load = saved
    expected, expected_clients = load(whole)
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    path = folder / data.draw(st.sampled_from(["round-2.json", "round-2.safetensors"]))
    content = bytearray(path.read_bytes())
    start = data.draw(st.integers(0, len(content)))
    content[start : start + data.draw(st.integers(0, 12))] = data.draw(st.binary(max_size=12))
    path.write_bytes(content)
    try:
        found, clients = load(folder)
    except PfedlaError:
        return
    assert_same(clients, expected_clients)
    assert_same(flat(found.server), flat(expected.server))
    assert torch.equal(torch.stack(found.alphas), torch.stack(expected.alphas))
    torch.testing.assert_close(found.after_training, expected.after_training, rtol=0, atol=0, equal_nan=True)
    counters = ("round", "traffic", "failures", "failed_rounds", "alpha_rounds", "seconds")
    assert all(getattr(found, name) == getattr(expected, name) for name in counters)


def test_what_differs_is_named() -> None:
    before = {"seed": 0, "training": {"lr": 0.1, "augment": False}, "data": {"beta": "auto"}}
    now = {"seed": 1, "training": {"lr": 0.1, "augment": True}, "data": {"beta": 0.5}, "model": "cnn"}
    assert differing(before, now) == [
        "seed was 0, is now 1", "training.augment was false, is now true", 'data.beta was "auto", is now 0.5',
        'model was left out, is now "cnn"',
    ]  # fmt: skip
    assert differing({"a": 1}, {"a": 1.0})
    assert not differing(before, before)


def test_when_a_checkpoint_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    by_rounds, by_time, never = Cadence(3, 0), Cadence(0, 2), Cadence(0, 0)
    assert [by_rounds.due(number) for number in range(1, 7)] == [False, False, True, False, False, True]
    now[0] = 119.0
    assert not by_time.due(1)
    now[0] = 120.0
    assert by_time.due(2)
    by_time.saved()
    assert not by_time.due(3)
    assert not never.due(3)
