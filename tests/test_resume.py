"""The command line across stops, kills, full disks and second processes: real processes, real signals."""

import json
import os
import random
import resource
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
OPTIONS = {  # of methods with much state
    "fedavg": [],
    "pfedla": ["algorithm.neighbours=2"],
    "heurpfedla": ["algorithm.neighbours=2"],
    "pfedla-heldout": ["algorithm.neighbours=2", "algorithm.warm_up=5", "algorithm.learning_rounds=60"],
}


def settings(name: str) -> tuple[str, ...]:
    return ("-a", name, *FAULTY, *(word for option in OPTIONS[name] for word in ("--set", option)))


TINY = settings("heurpfedla")


def numbers(run: Path) -> dict[str, Any]:
    """All that a run leaves but its seconds, byte for byte where it is tensors."""
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


def succeed(*args: object) -> subprocess.CompletedProcess[str]:
    done = command(*args)
    assert done.returncode == 0, done.stderr
    return done


@contextmanager
def start(*args: object) -> Iterator[subprocess.Popen[str]]:
    words, quiet = [*COMMAND, *map(str, args)], subprocess.DEVNULL
    process = subprocess.Popen(words, stdout=quiet, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Wait until the process says it; it must not end before."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


FORKING = """
import json, os, sys
import pfedla.cli, pfedla.runs.run, sklearn.datasets, torch._dynamo
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        sys.argv = ["pfedla", "run", *json.loads(line)]
        pfedla.cli.main()
        os._exit(0)
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


class Lives:
    """Start runs by fork from one process: to import everything takes longer than most lives."""

    def __init__(self, said: Path) -> None:
        words, pipe = [sys.executable, "-c", FORKING, str(said)], subprocess.PIPE
        self.said, self.parent = said, subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)

    def _read(self) -> int:
        assert self.parent.stdout is not None
        return int(self.parent.stdout.readline())

    def cut(self, words: list[str], after: str, seconds: float) -> None:
        """Start a run, wait until it says `after` and some more, and kill it."""
        assert self.parent.stdin is not None
        self.said.write_text("")
        print(json.dumps(words), file=self.parent.stdin, flush=True)
        pid = self._read()
        while after not in self.said.read_text():
            os.kill(pid, 0)  # raises if it has ended
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        assert self._read() == signal.SIGKILL, "ended before it could be killed: run more rounds"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_at_twenty_random_moments_and_resumed_each_time(name: str, tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything. The moments are drawn: some before the first round, most while it trains."""
    run = (*settings(name), "--rounds", 200, "--checkpoint-every", "1", "--set", "evaluate_every=3")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    succeed(*run, "--out", whole, "--quiet")
    life = json.loads((whole / "result.json").read_text())["seconds"]["total"] / 20  # on this machine
    draws, reached, lives = random.Random(5), [], Lives(tmp_path / "said")
    for _ in range(20):
        after = draws.choices(["accuracy", "round", ""], [14, 3, 3])[0]  # it has run one, resumes after one, or starts
        lives.cut([*map(str, run), "--out", str(cut), "--resume"], after if reached else "", draws.uniform(0, life))
        reached.append(max(saved_rounds(cut), default=0))
    lives.parent.communicate()
    assert reached == sorted(reached)
    assert len(set(reached)) > 10  # most lives came further than the one before
    succeed(*run, "--out", cut, "--resume", "--quiet")
    assert numbers(cut) == numbers(whole)


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
    assert f"round {saved}" in succeed(cut, "--resume").stderr
    assert numbers(cut) == numbers(whole)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Though the clients at work would train for minutes."""
    long = ("--local-epochs", 10000, "--batch-size", 2, "--rounds", 9)
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
    """`pfedla run … 2>&1 | tee` and Ctrl-C: the pipe closes first."""
    with start(*TINY, "--rounds", 2000, "--out", tmp_path / "r", "--set", "evaluate_every=50") as process:
        wait_for(process, "round 50")
        assert process.stderr is not None
        process.stderr.close()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        process.stderr = None
    assert saved_rounds(tmp_path / "r")


@pytest.mark.slow
def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    run = (*TINY, "--rounds", 400, "--out", tmp_path / "r")
    with start(*run) as process:
        wait_for(process, "round 1")
        second = command(*run, "--resume")
        assert (second.returncode, "another process" in second.stderr) == (2, True)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    succeed(*run, "--resume", "--quiet")  # the lock died with its owner


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A file-size limit stands for the disk: the next checkpoint does not fit."""
    often, whole, place = (*TINY, "--checkpoint-every", 1), tmp_path / "whole", tmp_path / "r"
    succeed(*often, "--rounds", 6, "--out", whole, "--quiet")
    succeed(*often, "--rounds", 3, "--out", place, "--quiet")
    before = contents(place / "checkpoints")
    full = command(*often, "--rounds", 6, "--out", place, "--resume", preexec_fn=limit_file_size)
    assert full.returncode == 1
    for word in (str(place), "File too large", "MiB", "round 3"):
        assert word in full.stderr
    assert contents(place / "checkpoints") == before
    succeed(*often, "--rounds", 6, "--out", place, "--resume", "--quiet")
    assert numbers(place) == numbers(whole)


@pytest.mark.slow
def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk; the file-size limit above stands for it")
    try:
        often = (*TINY, "--checkpoint-every", 1, "--out", disk / "r", "--rounds", 400)
        full = command(*often)
        assert full.returncode == 1
        for word in ("No space left on device", "MiB", "--resume"):
            assert word in full.stderr
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        succeed(*often, "--resume", "--quiet")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_resumed_extended_finished_shortened_and_changed(pfedla: Any, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 4, "--out", "whole", "-q")[0] == 0
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--resume")[0] == 0  # nothing there yet: it starts
    run = tmp_path / "runs" / "heurpfedla-digits-classes-s0"
    code, out, err = pfedla("run", *TINY, "--rounds", 4, "--resume", "--threads", 1)  # the last of that name
    assert (code, "after round 2" in err) == (0, True)
    assert numbers(run) == numbers(tmp_path / "whole")
    before = contents(run)
    assert pfedla("run", run, "--resume")[0] == 0
    code, out, _ = pfedla("run", run, "--resume", "--json")
    assert (code, json.loads(out)["rounds"]) == (0, 4)
    for args, keys in (
        (("--rounds", 3), ["4 rounds"]),
        (("--lr", 0.5, "--rounds", 9), ["training.lr"]),
        (("--set", "algorithm.neighbours=3", "--seed", 1), ["seed", "algorithm.neighbours: 2 -> 3"]),
        (("--set", "faults.dropout=0.5"), ["faults.dropout"]),
    ):
        code, _, err = pfedla("run", run, "--resume", *args)
        assert (code, [key for key in keys if key not in err]) == (2, [])
    code, _, err = pfedla("run", *TINY, "--out", run)
    assert (code, "--resume" in err) == (2, True)
    assert contents(run) == before


def test_missing_pictures_of_a_finished_run_are_drawn_when_it_is_resumed(pfedla: Any, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 1, "-q", "--out", "r")[0] == 0
    for picture in (tmp_path / "r").glob("*.png"):
        picture.unlink()
    assert pfedla("run", "r", "--resume", "-q")[0] == 0
    assert (tmp_path / "r" / "learning_curve.png").exists()


def test_what_cannot_be_resumed_is_refused_and_stays(pfedla: Any, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--out", "r")[0] == 0
    for path in (tmp_path / "r" / "checkpoints").glob("*.json"):
        path.write_text("damaged")
    before = contents(tmp_path / "r")
    code, _, err = pfedla("run", "r", "--resume", "--rounds", 9)
    assert (code, "no checkpoint" in err) == (2, True)
    assert contents(tmp_path / "r") == before
    assert pfedla("run", "r", "--resume")[0] == 0  # it is finished
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.unlink()
    code, _, err = pfedla("run", "r", "--resume", "--rounds", 3)
    assert (code, "no checkpoint" in err) == (2, True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    for words in (("run", *TINY), ("compare", "-a", "local,fedavg", *COMMON)):
        code, _, err = pfedla(*words, "--out", "other", "--resume")
        assert (code, "other is not a" in err) == (2, True)
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert pfedla("run", "nowhere", "--resume")[0] == 2


def test_other_data_are_refused(pfedla: Any, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(60, 5)), draws.integers(0, 3, 60)
    run = ("run", "-a", "fedavg", "-d", "own.npz", "--clients", 2, "--partition", "iid", "--out", "r", "-q")
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert pfedla(*run, "--rounds", 1)[0] == 0
    x[3, 3] += 1e-3
    np.savez(tmp_path / "own.npz", x=x, y=y)
    code, _, err = pfedla(*run, "--rounds", 2, "--resume")
    assert (code, "data have changed" in err) == (2, True)


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
