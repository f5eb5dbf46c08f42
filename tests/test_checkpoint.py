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

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.settings import CheckpointSettings, Faults
from pfedla.report.page import write_page
from pfedla.runs.build import Built, build
from pfedla.runs.experiment import Experiment, read_toml
from pfedla.runs.folder import Checkpoints, RunFolder, RunState, differences, fresh_state, plan_snapshots
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.progress import Display
from pfedla.runs.result import Simulation
from pfedla.runs.run import Run

ROUNDS = 5
TROUBLE = Faults(dropout=0.3, attack="nan", attackers=0.5, attack_rate=0.5)


def go(
    path: Path,
    name: str = "heurpfedla",
    *,
    rounds: int = ROUNDS,
    stop_after: int = 0,
    drop_in: int = 0,
    every: int = 1,
    evaluate_every: int = 1,
    engine: str = "threaded",
    from_round: int | None = None,
    exclude: dict[str, Any] | None = None,
    norm_bound: Any = 100.0,
    say: Callable[[str], None] = lambda line: None,
) -> Simulation | None:
    """Run in a folder, from the start or resumed; None if it is stopped: after a round, or in one."""
    method = make(name, batch_norm=None)
    experiment = Experiment.parse(
        {
            "rounds": rounds,
            "participation": 0.7,
            "evaluate_every": evaluate_every,
            "exclude": exclude or {},
            "checkpoint": {"rounds": every},
            "algorithm": {"name": method.name},
            "engine": {"name": engine, "threads": 2},
            "faults": TROUBLE,
            "uploads": {"norm_bound": norm_bound},
        }
    )
    display = Display(rounds, quiet=True)
    display.say = say

    def stopping() -> bool:
        done = run.state.round if hasattr(run, "state") else 0
        return (bool(stop_after) and done >= stop_after) or (bool(drop_in) and done >= drop_in - 1)

    built = Built(experiment, toy_federation(), method)
    run = Run(built, RunFolder(path, resume=True, from_round=from_round), display=display, stopping=stopping)
    try:
        with run:
            if drop_in:  # let the engine hear of it first, when the round is in work
                run.stopping = lambda: False
            for _ in run:
                pass
            return run._conclude()  # not finish: the folder stays as of a run that was killed before its results
    except Stopped:
        return None


def assert_ends_equal(one: Any, other: Any) -> None:
    assert torch.equal(one.accuracy, other.accuracy)
    assert torch.equal(one.loss, other.loss)
    torch.testing.assert_close(one.score_after_training, other.score_after_training, rtol=0, atol=0, equal_nan=True)
    assert one.traffic == other.traffic
    assert one.failures == other.failures
    assert one.alpha_rounds == other.alpha_rounds
    if one.alphas is not None:
        assert torch.equal(one.alphas, other.alphas)
    for left, right in zip(one.models, other.models, strict=True):
        assert_same(left, right)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*methods(variants=True), "pfedla/vectorized"])
def test_save_load_continue_is_a_straight_run(case: str, tmp_path: Path) -> None:
    """For every method, with clients that drop out or send nonsense; stopped once after a round and once within one."""
    name, engine = case.split("/") if "/" in case else (case, "threaded")
    straight = go(tmp_path / "straight", name, engine=engine)
    assert go(tmp_path / "cut", name, engine=engine, stop_after=1) is None
    assert go(tmp_path / "cut", name, engine=engine, drop_in=4) is None
    lines = (tmp_path / "cut" / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [1, 2, 3]
    assert_ends_equal(go(tmp_path / "cut", name, engine=engine), straight)
    for folder in (tmp_path / "cut" / "checkpoints", tmp_path / "straight" / "checkpoints"):
        *before, fourth, fifth = sorted(path.name for path in folder.glob("*.json"))
        assert (fourth, fifth, len(before) < 2) == ("round-4.json", "round-5.json", True)  # and one before a fall
        assert len([*folder.iterdir()]) == 2 * len([*before, fourth, fifth])


@pytest.mark.parametrize(("first", "then"), [(2, 5), (3, 7), (5, 6), (5, 5)])
def test_a_longer_run_is_the_same_as_if_it_had_been_asked_for_at_once(
    first: int, then: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluated every second round, and with so few snapshots that a longer run has fewer per round.

    The last case is killed between its last round and its results: the end is computed from the checkpoint alone.
    """
    monkeypatch.setattr("pfedla.runs.folder.SNAPSHOTS", 3)
    straight = go(tmp_path / "straight", rounds=then, evaluate_every=2)
    assert go(tmp_path / "long", rounds=first, evaluate_every=2) is not None
    assert_ends_equal(go(tmp_path / "long", rounds=then, evaluate_every=2), straight)


def test_a_bound_that_refuses_is_resumed_too(tmp_path: Path) -> None:
    """Who is refused depends on the lengths of earlier updates."""
    bounded: dict[str, Any] = {"name": "fedrep", "rounds": 12, "norm_bound": 1.0}
    straight = go(tmp_path / "straight", **bounded)
    assert sum(reasons.get("norm too large", 0) for reasons in straight.failures.values()) > 3
    go(tmp_path / "cut", **bounded, stop_after=6)
    assert_ends_equal(go(tmp_path / "cut", **bounded), straight)
    assert straight.norm_bounds == {1: 1.0}


def test_the_bound_may_change_on_resume_and_the_change_is_kept(tmp_path: Path) -> None:
    said: list[str] = []
    go(tmp_path / "run", norm_bound="off", stop_after=2)
    go(tmp_path / "run", norm_bound=50.0, stop_after=4, say=said.append)
    end = go(tmp_path / "run", norm_bound=50.0)
    assert end.norm_bounds == {1: "off", 3: 50.0}
    assert any("uploads.norm_bound" in line for line in said)
    assert_ends_equal(end, go(tmp_path / "straight"))


@pytest.mark.parametrize("rounds", [1, 2, 3, 99, 100, 101, 128, 200, 201, 10_000])
def test_snapshots_are_at_most_a_hundred_and_those_of_a_longer_run_among_them(rounds: int) -> None:
    method = make("pfedla")
    taken = plan_snapshots(method, 10, rounds)
    assert min(rounds, 50) <= len(taken - {0, rounds}) + 1 <= 100
    assert {number for number in plan_snapshots(method, 10, 7 * rounds) if number <= rounds} <= taken


def damage(how: str, folder: Path, number: int) -> None:
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
        shutil.copy(folder / f"round-{number - 1}.safetensors", tensors)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "flipped", "counter", "empty", "gone", "pickle", "another round's"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    straight = go(tmp_path / "straight")
    go(tmp_path / "cut", stop_after=3)
    damage(how, tmp_path / "cut" / "checkpoints", 3)
    said: list[str] = []
    assert_ends_equal(go(tmp_path / "cut", say=said.append), straight)
    assert any("round 3 cannot be used" in line for line in said)
    assert any(line.endswith("round 2") for line in said)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[Path], Any]]:
    """A folder with one checkpoint, and what loads a folder like it."""
    folder = tmp_path_factory.mktemp("saved") / "r"
    go(folder, stop_after=2, every=2)
    folder = folder / "checkpoints"
    method = make("heurpfedla", batch_norm=True)
    fresh = fresh_state(method, len(SIZES), 0)
    clients = {name: torch.stack([value] * len(SIZES)) for name, value in method.init_client().items()}
    clients["__trained__"] = torch.zeros(len(SIZES), dtype=torch.bool)
    experiment = Experiment.parse(json.loads((folder / "round-2.json").read_text())["state"]["experiment"])
    return folder, lambda path: Checkpoints(path.parent, experiment).load_newest(fresh, clients)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_is_ever_loaded(
    data: st.DataObject, saved: tuple[Path, Callable[[Path], Any]], tmp_path: Path
) -> None:
    """Bytes changed, cut or put in anywhere: either the very same state comes back, or a sentence."""
    whole, load = saved
    expected, expected_clients = load(whole)
    folder = tmp_path / "damaged" / "checkpoints"
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
    assert found.model_dump() == expected.model_dump()  # the counters


def test_what_differs_is_named() -> None:
    before = {"seed": 0, "training": {"lr": 0.1, "local_epochs": 1}, "rounds": 1}
    now = {"seed": 0, "training": {"lr": 0.1, "local_epochs": 2}, "model": "cnn", "rounds": 1.0}
    assert [phrase.split(":")[0] for phrase in differences(before, now)] == ["training.local_epochs", "rounds", "model"]


def test_when_a_checkpoint_is_due(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    by_rounds, by_time, never = (
        Checkpoints(tmp_path, Experiment(checkpoint=CheckpointSettings(rounds=rounds, minutes=minutes)))
        for rounds, minutes in ((3, 0.0), (0, 2.0), (0, 0.0))
    )
    assert [by_rounds.is_due(number) for number in range(1, 7)] == [False, False, True, False, False, True]
    now[0] = 119.0
    assert not by_time.is_due(1)
    now[0] = 120.0
    assert by_time.is_due(2)
    by_time.save(RunState(server={}, after_training=[], round=2), {"a": torch.zeros(1)})
    assert not by_time.is_due(3)
    assert not never.is_due(3)


def test_an_added_option_leaves_a_run_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an older version leaves it: experiment.toml and the checkpoint know nothing of an option with a default."""
    go(tmp_path / "run", stop_after=2)
    path = tmp_path / "run" / "experiment.toml"
    kept = [line for line in path.read_text().splitlines() if not line.startswith(("norm_bound", "unseen_clients"))]
    path.write_text("\n".join(kept) + "\n")
    assert_ends_equal(go(tmp_path / "run"), go(tmp_path / "straight"))


FORMAT_1 = Path(__file__).parent / "fixtures" / "format1"


@pytest.mark.parametrize("name", ["paper", "fedavg", "heldout"])
def test_a_run_folder_of_format_1_is_read_and_resumes(name: str, tmp_path: Path) -> None:
    """It ends as it did under the version that made it; pfedla-heldout holds examples out from the first round now."""
    run, algorithm = tmp_path / name, {"paper": "pfedla", "fedavg": "fedavg", "heldout": "pfedla-heldout"}[name]
    shutil.copytree(FORMAT_1 / name, run)
    before = json.loads((run / "result.json").read_text())["accuracy"]["per_client"]
    assert evaluate_personal(load_personal(run, "0"), None)["score"] == pytest.approx(before[0])
    assert algorithm in write_page([run], tmp_path / "report.html").read_text()
    done = json.loads((run / "result.json").read_text())["rounds"]
    experiment = Experiment.parse({**read_toml(run), "rounds": 6, "uploads": {}})
    result = Run(build(experiment), RunFolder(run, resume=True)).complete()
    assert (result["format"], result["algorithm"]) == (3, algorithm)
    assert result["norm_bounds"] == {"1": "off", str(done + 1): 100.0}
    straight = json.loads((FORMAT_1 / f"{name}-straight.json").read_text())
    if name != "heldout":
        assert result["score"] == straight["accuracy"]
        assert result["loss"] == pytest.approx(straight["loss"], abs=1e-6)
