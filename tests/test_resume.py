"""The command line across stops, kills, full disks and second processes: real processes, real signals."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

COMMAND = (sys.executable, "-m", "pfedla", "run")
COMMON = ("-d", "digits", "--clients", "4", "--samples", "60", "--model", "mlp", "--local-epochs", "1")
FAULTY = (*COMMON, "--participation", "0.75", "--set", "faults.dropout=0.2")
NEIGHBOURS = ("--set", "algorithm.neighbours=2")
LEARNING = (
    *NEIGHBOURS,
    "--set",
    "algorithm.warm_up=5",
    "--set",
    "algorithm.min_held_out=2",
    "--set",
    "algorithm.learning_rounds=60",
)
OPTIONS = {"fedavg": (), "pfedla": NEIGHBOURS, "heurpfedla": NEIGHBOURS, "pfedla-heldout": LEARNING}
TINY = ("-a", "heurpfedla", *FAULTY, *NEIGHBOURS)


def numbers(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for timed in (result, *lines):
        del timed["seconds"]
    tensors = {path.name: path.read_bytes() for path in [*run.glob("models/*"), *run.glob("alpha.*s")]}
    return {"result": result, "lines": lines, **tensors}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved_rounds(run: Path) -> list[int]:
    return sorted(int(path.stem.split("-")[1]) for path in (run / "checkpoints").glob("round-*.json"))


def command(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [*COMMAND, *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)


def succeed(*args: object) -> str:
    done = command(*args)
    assert done.returncode == 0, done.stderr
    return done.stderr


@contextmanager
def start(*args: object) -> Iterator[subprocess.Popen[str]]:
    words, quiet = [*COMMAND, *map(str, args)], subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert any(text in line for line in process.stderr), f"ended without {text!r}"


FORKING = """
import json, os, signal, sys
import pfedla.cli, pfedla.runs.run, sklearn.datasets, torch._dynamo
def kill_at(last, folder):  # before this operation on a file of the folder; of a line half may be written
    left, writes = [last], os.O_WRONLY | os.O_RDWR | os.O_CREAT
    def count(event, args):
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir") or event == "open" and args[2] & writes
        if changes and str(args[0]).startswith(folder):
            left[0] -= 1
            if left[0] == -1:
                if str(args[0]).endswith("rounds.jsonl"):
                    with open(args[0], "a") as file:
                        file.write('{"round": ')
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        words, *point = json.loads(line)
        sys.argv = ["pfedla", "run", *words]
        if point:
            kill_at(*point)
        pfedla.cli.main()
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def cut_short(parent: subprocess.Popen[str], said: Path, words: list[str], after: str, seconds: float) -> None:
    """Fork a run (to import everything takes longer than most lives), wait until it says `after`; kill it later."""
    said.write_text("")
    print(json.dumps([words]), file=parent.stdin, flush=True)
    pid = int(parent.stdout.readline())
    while after not in said.read_text():
        os.kill(pid, 0)  # raises if it has ended
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    assert int(parent.stdout.readline()) == signal.SIGKILL, "ended before it could be killed: run more rounds"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_at_twenty_random_moments_and_resumed_each_time(name: str, tmp_path: Path) -> None:
    """Some moments are before the first round, most while it trains."""
    run = ("-a", name, *FAULTY, *OPTIONS[name], "--rounds", "300", "--checkpoint-every", "1")
    run, whole, cut, said = (*run, "--set", "evaluate_every=3"), *(tmp_path / one for one in ("whole", "cut", "said"))
    succeed(*run, "--out", whole, "--quiet")
    seconds = json.loads((whole / "result.json").read_text())["seconds"]["total"]
    life = seconds / 60  # twenty lives end before the run does, also when the machine gets faster
    words, pipe = [sys.executable, "-c", FORKING, str(said)], subprocess.PIPE
    draws, reached, parent = random.Random(5), [], subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    for _ in range(20):
        after = draws.choices(["accuracy", "round", ""], [14, 3, 3])[0]  # it has run one, resumes after one, or starts
        after = after if reached else ""
        cut_short(parent, said, [*run, "--out", str(cut), "--resume"], after, draws.uniform(0, life))
        reached.append(max(saved_rounds(cut), default=0))
    parent.communicate()
    assert reached == sorted(reached)
    assert len(set(reached)) > 10  # most lives came further than the one before
    succeed(*run, "--out", cut, "--resume", "--quiet")
    assert numbers(cut) == numbers(whole)


def run_until(parent: subprocess.Popen[str], words: list[str], *point: object) -> int:
    """Fork a run that is killed at an operation on a file, if it comes so far; return how it ended."""
    print(json.dumps([words, *point]), file=parent.stdin, flush=True)
    parent.stdout.readline()
    return int(parent.stdout.readline())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "every"), [("fedrep", 11), ("pfedla", 7), ("fedavg private", 17)])
def test_killed_before_every_file_operation_and_again_while_it_resumes(name: str, every: int, tmp_path: Path) -> None:
    """Of all operations every so many: EVERY_POINT=1 takes each. A private run has spent what an uncut one has."""
    name, _, private = name.partition(" ")
    every, whole, said = int(os.environ.get("EVERY_POINT", every)), tmp_path / "whole", tmp_path / "said"
    quick = ("--local-epochs", "2", "--rounds", "3", "--checkpoint-every", "1", "--quiet", "--resume")
    run = ["-a", name, *FAULTY, *quick, *(["--set", "privacy.epsilon=2.0"] if private else []), "--out"]
    words = [sys.executable, "-c", FORKING, str(said)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert run_until(parent, [*run, str(whole)]) == 0, said.read_text()
        point, end = 0, signal.SIGKILL
        while end == signal.SIGKILL:
            place = tmp_path / str(point)
            if point % 2:  # made beforehand
                place.mkdir()
            end = run_until(parent, [*run, str(place)], point, str(place))
            if end == signal.SIGKILL:
                run_until(parent, [*run, str(place)], point // 2, str(place))
            assert run_until(parent, [*run, str(place)]) == 0, (point, said.read_text())
            assert numbers(place) == numbers(whole), point
            assert {path.name for path in place.rglob("*")} == {path.name for path in whole.rglob("*")}, point
            shutil.rmtree(place)
            point += every
        parent.stdin.close()
    assert point > 40


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_where_the_run_can_be_resumed(number: signal.Signals, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeed(*TINY, "--rounds", 90, "--out", whole, "--quiet")
    with start(*TINY, "--rounds", 90, "--out", cut) as process:
        wait_for(process, "round 4")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
    assert f"--out {cut}" in said
    (saved,) = saved_rounds(cut)  # though none was due by the clock
    assert f"round {saved}" in succeed(cut, "--resume")
    assert numbers(cut) == numbers(whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    long = ("--local-epochs", 10000, "--batch-size", 2, "--rounds", 9)  # the clients would train for minutes
    with start(*TINY, *long, "--out", tmp_path / "r") as process:
        while not (tmp_path / "r" / "environment.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for(process, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


@pytest.mark.slow
def test_a_signal_works_though_nobody_reads_the_output(tmp_path: Path) -> None:
    with start(*TINY, "--rounds", 2000, "--out", tmp_path / "r", "--set", "evaluate_every=50") as process:
        wait_for(process, "round 50")
        process.stderr.close()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert saved_rounds(tmp_path / "r")


@pytest.mark.slow
def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    run = (*TINY, "--rounds", 400, "--out", tmp_path / "r")
    with start(*run) as process:
        wait_for(process, "round 1")
        os.killpg(process.pid, signal.SIGSTOP)  # it must not end before the second one begins
        second = command(*run, "--resume")
        assert (second.returncode, "another process" in second.stderr) == (2, True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    succeed(*run, "--resume", "--quiet")  # the lock died with its owner


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A file-size limit stands for the disk: the next checkpoint does not fit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    often, whole, place = (*TINY, "--checkpoint-every", 1), tmp_path / "whole", tmp_path / "r"
    succeed(*often, "--rounds", 6, "--out", whole, "--quiet")
    succeed(*often, "--rounds", 3, "--out", place, "--quiet")
    before = contents(place / "checkpoints")
    full = command(*often, "--rounds", 6, "--out", place, "--resume", preexec_fn=limit)
    assert (full.returncode, str(place) in full.stderr) == (1, True)
    assert contents(place / "checkpoints") == before
    succeed(*often, "--rounds", 6, "--out", place, "--resume", "--quiet")
    assert numbers(place) == numbers(whole)


@pytest.mark.slow
def test_resumed_extended_finished_shortened_and_changed(pfedla: Any, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 4, "--out", "whole", "-q")[0] == 0
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--resume")[0] == 0  # nothing there yet: it starts
    run = tmp_path / "runs" / "heurpfedla-digits-classes-s0"
    assert pfedla("run", *TINY, "--rounds", 4, "--resume", "--threads", 1)[0] == 0  # the last of that name
    assert numbers(run) == numbers(tmp_path / "whole")
    before = contents(run)
    code, out, _ = pfedla("run", run, "--resume", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 4)
    for args, key in (
        ((run, "--resume", "--rounds", 3), "rounds"),
        ((run, "--resume", "--lr", 0.5, "--rounds", 9), "training.lr"),
        ((run, "--resume", "--set", "algorithm.neighbours=3", "--seed", 1), "algorithm.neighbours"),
        ((run, "--resume", "--set", "faults.dropout=0.5"), "faults.dropout"),
        ((*TINY, "--out", run), "--resume"),
    ):
        code, _, err = pfedla("run", *args)
        assert (code, key in err) == (2, True)
    assert contents(run) == before


def test_what_cannot_be_resumed_is_refused_and_stays(pfedla: Any, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--out", "r")[0] == 0
    for path in (tmp_path / "r" / "checkpoints").glob("*.json"):
        path.write_text("damaged")
    before = contents(tmp_path / "r")
    code, _, err = pfedla("run", "r", "--resume", "--rounds", 9)
    assert (code, "checkpoint" in err) == (2, True)
    assert contents(tmp_path / "r") == before
    (tmp_path / "r" / "learning_curve.png").unlink()
    assert pfedla("run", "r", "--resume")[0] == 0  # it is finished; missing pictures are drawn
    assert (tmp_path / "r" / "learning_curve.png").exists()
    shutil.rmtree(tmp_path / "r" / "checkpoints")
    assert pfedla("run", "r", "--resume", "--rounds", 3)[0] == 2
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    for words in (("run", *TINY), ("compare", "-a", "local,fedavg", *COMMON)):
        assert pfedla(*words, "--out", "other", "--resume")[0] == 2
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert pfedla("run", "nowhere", "--resume")[0] == 2


def test_what_a_resumed_run_had_to_put_up_with_is_kept_though_it_is_quiet(pfedla: Any, tmp_path: Path) -> None:
    """A damaged checkpoint and line, and another torch; what a killed process left is removed."""
    run, quick = tmp_path / "r", ("--checkpoint-every", 1, "-q", "--out", "r")
    assert pfedla("run", *TINY, "--rounds", 4, *quick)[0] == 0
    assert "warnings" not in json.loads((run / "result.json").read_text())
    whole = (run / "environment.json").read_text()
    (run / "environment.json").write_text(whole.replace('"torch": "', '"torch": "0.'))
    (run / "checkpoints" / "round-4.safetensors").write_bytes(b"damaged")
    lines = (run / "rounds.jsonl").read_text().splitlines()
    (run / "rounds.jsonl").write_text("\n".join([lines[0], lines[1][:-9] + "#", *lines[2:]]) + "\n")
    stale = [run / ".result.json.1.part", run / "models" / ".a.2.part", run / "checkpoints" / "round-1.safetensors"]
    for path in stale:
        path.touch()
    shutil.copy(run / "checkpoints" / "round-3.json", run / "checkpoints" / "round-1.json")
    assert pfedla("run", "r", "--resume", "--rounds", 5, "-q")[0] == 0
    said = json.loads((run / "result.json").read_text())["warnings"]
    for what in ("torch", "round 4", "missing, curves leave them out: 2"):
        assert sum(what in line for line in said) == 1, (what, said)
    assert saved_rounds(run) == [4, 5]
    assert not any(path.exists() for path in stale)
    kept = json.loads((run / "environment.json").read_text())
    assert (kept["torch"], kept["continued_on"]) == ("0." + json.loads(whole)["torch"], [json.loads(whole)])
    assert pfedla("run", "r", "--resume", "--rounds", 6, "-q")[0] == 0  # the warnings stay, and none comes twice
    assert {*said} - {*json.loads((run / "result.json").read_text())["warnings"]} == set()
    assert json.loads((run / "environment.json").read_text()) == kept
    assert pfedla("report", "r")[0] == 0
    assert said[-1] in (run / "report.html").read_text()


def test_a_folder_that_was_made_beforehand_can_always_be_resumed(pfedla: Any, tmp_path: Path, monkeypatch) -> None:
    run = ("run", *TINY, "--rounds", 1, "-q", "--resume", "--out")
    for name in ("empty", "cut"):
        (tmp_path / name).mkdir()
    (tmp_path / "cut" / "federation.json").write_text("{}")  # an older version wrote it before the experiment
    with monkeypatch.context() as broken:
        broken.setattr("pfedla.runs.run.Run._create_engine", lambda run: 1 / 0)
        assert "ZeroDivisionError" in pfedla(*run, "empty")[2]
    assert [*(tmp_path / "empty").glob("[!.]*")] == []  # so that another experiment can have it
    for name in ("empty", "cut"):
        assert pfedla(*run, name)[0] == 0


def test_other_data_are_refused(pfedla: Any, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(60, 5)), draws.integers(0, 3, 60)
    run = ("run", "-a", "fedavg", "-d", "own.npz", "--clients", 2, "--partition", "iid", "--out", "r", "-q")
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert pfedla(*run, "--rounds", 1)[0] == 0
    x[3, 3] += 1e-3
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert pfedla(*run, "--rounds", 2, "--resume")[0] == 2
    code, _, err = pfedla("evaluate", "r", "--client", 0)  # the classes are as they were
    assert (code, "own.npz has changed" in err) == (2, True)


@pytest.mark.slow
def test_a_comparison_is_resumed_too(pfedla: Any, tmp_path: Path) -> None:
    methods = ("compare", "-a", "fedavg,pfedla-heldout", *COMMON, "--set", "pfedla-heldout.warm_up=0")
    assert pfedla(*methods, "--rounds", 3, "--out", "whole", "-q")[0] == 0
    assert pfedla(*methods, "--rounds", 2, "--out", "cut", "-q")[0] == 0
    (tmp_path / "cut" / "pfedla-heldout-s0" / "result.json").unlink()
    for _ in range(2):  # the second time all are finished
        code, _, err = pfedla(*methods, "--rounds", 3, "--out", "cut", "--resume")
        assert code == 0, err
        for name in ("fedavg-s0", "pfedla-heldout-s0"):
            assert numbers(tmp_path / "cut" / name) == numbers(tmp_path / "whole" / name)
