"""A run that one client has spoiled goes back to before that, and continues without the client."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TinyNet, assert_same, flat, make, play, toy_federation
from test_bad_uploads import BAD, intercept
from test_checkpoint import assert_ends_equal, go
from test_resume import contents, numbers, saved_rounds
from torch import nn

from pfedla import simulate
from pfedla.core.contracts import ClientMetrics, Cohort
from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.faults import choose_attackers
from pfedla.core.rounds import NO_ANSWER, Trend
from pfedla.core.settings import Faults
from pfedla.engines.simulated import SimulatedEngine
from pfedla.runs.recovery import resolve_exclusions

SMALL = ("-d", "digits", "--samples", "100", "--model", "mlp", "--local-epochs", "2", "--rounds", "22")
OFTEN = (*SMALL, "--checkpoint-every", "5", "--set", "uploads.norm_bound=off", "-q")
ATTACK = {"attack": "scale", "attackers": 0.1, "attack_scale": "1e30", "attack_rate": 0.1}
ATTACKED = (*OFTEN, *(word for key, value in ATTACK.items() for word in ("--set", f"faults.{key}={value}")))
FIRST_ATTACK = 16  # of seed 0


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_one_huge_upload_costs_a_run_a_few_rounds(name: str, pfedla: Any, tmp_path: Path) -> None:
    """It gives up, says where to go back to and without whom, and ends as if that had been planned."""
    code, _, err = pfedla("run", "-a", name, *ATTACKED, "--out", "r")
    assert code == 1
    command = shlex.split(re.search("pfedla run .*", err.replace("\n", " "))[0])[1:]  # type: ignore[index]
    (attacker,) = choose_attackers(Faults(attack="scale", attackers=0.1), 10, 0).tolist()
    assert command == ["run", "r", "--resume", "--from", str(FIRST_ATTACK - 1), "--exclude", str(attacker)]
    assert saved_rounds(tmp_path / "r") == [15, 20, 21]
    assert pfedla(*command, "-q")[0] == 0
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    assert result["excluded"] == {str(attacker): FIRST_ATTACK}
    assert pfedla("run", "-a", name, *OFTEN, "--out", "clean")[0] == 0
    clean = json.loads((tmp_path / "clean" / "result.json").read_text())["score"]["per_client"]
    honest = [score for client, score in enumerate(clean) if client != attacker]
    assert result["honest"]["score"]["mean"] == pytest.approx(sum(honest) / 9, abs=0.03)
    planned = f"exclude.{attacker}={FIRST_ATTACK}"
    assert pfedla("run", "-a", name, *ATTACKED, "--set", planned, "--out", "straight")[0] == 0
    assert numbers(tmp_path / "r") == numbers(tmp_path / "straight")
    assert (tmp_path / "r" / "experiment.toml").read_text() == (tmp_path / "straight" / "experiment.toml").read_text()


def test_without_a_checkpoint_from_before_the_command_starts_again(pfedla: Any, tmp_path: Path) -> None:
    code, _, err = pfedla("run", "-a", "fedavg", *ATTACKED, "--checkpoint-every", 0, "--out", "r")
    command = shlex.split(re.search("pfedla run .*", err.replace("\n", " "))[0])[1:]  # type: ignore[index]
    assert (code, command) == (1, ["run", "r", "--exclude", "8"])
    assert pfedla(*command, "-q", "--out", "again")[0] == 0
    assert "8 = 1" in (tmp_path / "again" / "experiment.toml").read_text()


def test_in_python_it_names_round_and_client(capfd: pytest.CaptureFixture[str]) -> None:
    """Whether the run gives up, or ends without having recovered."""
    faults = Faults(attack="scale", attackers=0.17, attack_scale=1e38, attack_rate=0.2)
    how: dict[str, Any] = {"algorithm": "fedavg", "lr": 0.2, "faults": faults, "norm_bound": "off"}
    (attacker,) = choose_attackers(faults, 6, 0).tolist()
    expected = f"likely cause: client {attacker},"
    diverging = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    with pytest.raises(GaveUpError, match=expected) as caught:
        simulate(toy_federation(), diverging, **how)
    assert f"exclude={{'{attacker}': 'auto'}}" in str(caught.value)
    simulate(toy_federation(), diverging, **how, exclude={str(attacker): "auto"})
    simulate(toy_federation(), TinyNet(), **how, rounds=5, progress=True)
    assert expected in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(("last", "after"), [(4, 4), (3, 2)])
def test_to_go_back_is_to_have_been_stopped_there(last: int, after: int, tmp_path: Path) -> None:
    """From a finished run, and from one that is not."""
    straight, written = go(tmp_path / "straight", rounds=7), {}
    for round in (2, 4, 5, 7):
        go(tmp_path / "other", rounds=7, stop_after=round)
        written |= {
            file.name: shutil.copy(file, tmp_path)
            for file in (tmp_path / "other" / "checkpoints").glob(f"round-{round}.*")
        }
    for reached in (7, 5):
        path = tmp_path / f"back-{reached}"
        go(path, rounds=7, stop_after=reached)
        for name, file in written.items():  # as if these had been kept
            if int(name[6]) <= reached:
                shutil.copy(file, path / "checkpoints")
        (path / "trackers.json").write_text('{"mlflow": "1"}')
        said: list[str] = []
        assert go(path, rounds=7, stop_after=1, from_round=last, say=said.append) is None
        assert any(line.endswith(f"round {after}") for line in said)
        lines = (path / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(line)["round"] for line in lines] == list(range(1, after + 1))
        assert max(saved_rounds(path)) == after
        assert not (path / "trackers.json").exists()
        assert_ends_equal(go(path, rounds=7), straight)


def test_killed_while_it_goes_back_it_can_go_back_again_or_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = go(tmp_path / "straight"), tmp_path / "killed"
    go(killed, stop_after=4)
    with monkeypatch.context() as patch:
        patch.setattr("pfedla.runs.folder.write_text", lambda *one: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            go(killed, from_round=3, exclude={"2": "auto"})
    shutil.copytree(killed, tmp_path / "again")
    assert_ends_equal(go(killed), straight)  # client 2 takes part in every round: nothing says otherwise
    assert "exclude" not in (killed / "experiment.toml").read_text()
    planned = go(tmp_path / "planned", exclude={"2": 4})
    assert_ends_equal(go(tmp_path / "again", from_round=3, exclude={"2": "auto"}), planned)


def test_rounds_that_are_not_kept_are_refused(tmp_path: Path) -> None:
    go(tmp_path / "r", stop_after=3, every=3)
    before = contents(tmp_path / "r")
    with pytest.raises(PfedlaError, match="kept are rounds 3"):
        go(tmp_path / "r", from_round=2)
    assert contents(tmp_path / "r") == before
    with pytest.raises(PfedlaError, match="no run in"):
        go(tmp_path / "nowhere", from_round=2)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "fedfomo", "heurpfedla", "pfedla-heldout", "pfedhn"])
def test_an_excluded_client_is_one_that_does_not_answer_and_is_not_asked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from the second round on; it is no failure and costs no traffic."""
    asked: list[int] = []
    train = SimulatedEngine.train

    def listen(self: Any, cohort: Cohort, downloads: Any) -> Any:
        asked.extend(cohort.ids.tolist())
        return train(self, cohort, downloads)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEngine, "train", listen)
        rounds, clients = play(make(name, batch_norm=None), toy_federation(), excluded={BAD: 2})
    assert asked.count(BAD) == 1
    assert not any(one.failures for one in rounds)
    answers = iter((lambda answer: answer, *[lambda answer: NO_ANSWER] * 2))
    intercept(monkeypatch, lambda answer: next(answers)(answer))
    expected, expected_clients = play(make(name, batch_norm=None), toy_federation())
    assert_same(flat(rounds[-1].server), flat(expected[-1].server))
    assert_same(clients, expected_clients)
    assert torch.equal(rounds[-1].evaluation.loss, expected[-1].evaluation.loss)
    assert rounds[-1].traffic.down_bytes < expected[-1].traffic.down_bytes


@pytest.mark.parametrize("name", ["fedavg", "pfedla", "pfedla-heldout", "fedfomo", "pfedhn"])
def test_a_round_of_excluded_clients_alone_changes_nothing(name: str) -> None:
    out = dict.fromkeys(map(str, range(5)), 2)
    result = simulate(toy_federation(), TinyNet(), name, rounds=12, participation=0.1, exclude=out)
    assert not result.failures
    assert result.scores.isfinite().all()  # they are still tested
    with pytest.raises(PfedlaError, match="nobody"):
        simulate(toy_federation(), TinyNet(), name, exclude=out | {"5": "auto"})


class Round:
    """What a trend looks at."""

    def __init__(self, round: int, score: float | None, lengths: tuple[float, ...] = (1.0, 1.1, 0.9)) -> None:
        self.round, self.evaluation_failures = round, {}
        self.moved = dict(enumerate(lengths))
        self.cohort = Cohort.everyone(torch.ones(len(lengths)), round, 0)
        scores = torch.tensor([score]) if score is not None else None
        self.evaluation = None if scores is None else ClientMetrics(scores, scores)


def follow(*rounds: Any, higher_is_better: bool = True) -> Trend:
    trend = Trend()
    for number, one in enumerate(rounds, 1):
        trend = trend.follow(Round(number, *one), higher_is_better=higher_is_better)  # type: ignore[arg-type]
    return trend


def test_when_a_score_has_fallen() -> None:
    assert follow((0.1,), (0.6,), (0.9,), (0.83,), (0.5,), (0.7,)).good_round == 4  # 0.82: a tenth of the gain is lost
    assert follow((0.0,), (1.0,), (0.5,), (0.9375,)) == Trend(0.0, 1.0, good_round=4, usual_length=1.0)  # it recovered
    assert follow((5.0,), (1.0,), (1.3,), (9e9,), higher_is_better=False).good_round == 3
    assert follow((5.0,), (1.0,), (torch.inf,), higher_is_better=False).has_fallen
    assert follow((0.1,), (0.9,), (None,)).good_round == 2  # round 3 was not evaluated


def test_whose_update_is_unusual() -> None:
    good = ((0.1,), (0.9,))
    assert follow(*good, (None, (1.0, 1e30, 2.0)), (0.1, (1e31, 1e9, 1e9))).suspects == (1,)  # the others follow it
    assert follow(*good, (0.1, (50.0, 40.0, 1.0))).suspects == (0, 1)
    assert follow(*good, (0.1, (1e30, 50.0, 1.0))).suspects == (0,)
    assert follow((0.1, (1.0, 1.2)), (0.0, (99.0, 1.0))).suspects == (0,)  # the median of two says nothing
    assert follow(*good, (0.1, (1.0, 5.0, 1.0))).suspects == ()
    assert follow(*good, (0.1, ())).suspects == ()
    assert follow(*good, (0.9, (50.0, 1.0, 1.0))).suspects == ()  # it did no harm


def test_the_checkpoint_from_before_a_fall_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where not every round is evaluated."""
    scores = iter([0.1, 0.8, 0.2, 0.2])
    follow = Trend.follow

    def fall(trend: Trend, round: Any, **how: Any) -> Trend:
        evaluation = round.evaluation and round.evaluation._replace(score=torch.tensor([next(scores)]))
        return follow(trend, round._replace(evaluation=evaluation), **how)

    monkeypatch.setattr(Trend, "follow", fall)
    go(tmp_path / "r", rounds=8, evaluate_every=2)
    assert saved_rounds(tmp_path / "r") == [4, 7, 8]


NAMES = ("north", "south", "east")


@pytest.mark.parametrize(
    ("asked", "before", "how", "expected"),
    [
        ({"2": "auto", "north": 9}, {}, {}, {"north": 9, "east": 1}),
        ({"east": "auto"}, {"east": 4, "north": "auto"}, {"round": 6}, {"north": 7, "east": 4}),
        ({"east": 4}, {"east": 4}, {"round": 3}, {"east": 4}),  # it is still to come
        ({"east": 4}, {"east": 4}, {"round": 3, "going_back": True}, {}),  # as if stopped there
        ({"east": "auto"}, {"east": 4}, {"round": 1, "going_back": True}, {"east": 2}),
        ({}, {"east": 4}, {"round": 4, "going_back": True}, {"east": 4}),
        ({"east": 3}, {}, {"round": 5}, None),
        ({"east": 9}, {"east": 4}, {"round": 5}, None),
        ({"west": 9}, {}, {}, None),
        (dict.fromkeys(NAMES, "auto"), {}, {}, None),
    ],
)
def test_from_when_on_a_client_is_excluded(asked: Any, before: Any, how: Any, expected: Any) -> None:
    if expected is None:
        with pytest.raises(PfedlaError):
            resolve_exclusions(asked, NAMES, before=before, **how)
    else:
        assert resolve_exclusions(asked, NAMES, before=before, **how) == expected
