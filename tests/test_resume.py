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

import pytest

COMMAND = (sys.executable, "-c", "from pfedla.cli import main; main()", "run")
TINY = (
    "-a", "heurpfedla", "-d", "digits", "--clients", "4", "--samples", "60", "--model", "mlp", "--local-epochs", "1",
    "--participation", "0.75", "--set", "algorithm.neighbours=2", "--set", "faults.dropout=0.2",
    "--set", "algorithm.warm_up=0",
)  # fmt: skip


def numbers(run: Path) -> dict[str, Any]:
    """All that a run leaves but its seconds, byte for byte where it is tensors."""
    result = json.loads((run / "result.json").read_text())
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for timed in (result, *lines):
        del timed["seconds"]
    tensors = {path.name: path.read_bytes() for path in [*run.glob("models/*"), *run.glob("alpha.*s")]}
    return {"result": result, "lines": lines, **tensors}


def command(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, args)], capture_output=True, text=True, timeout=120, check=False, **options)


@contextmanager
def started(*args: object) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*COMMAND, *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Until the process says it; it must not end before."""
    assert process.stderr is not None
    for line in process.stderr:
        if text in line:
            return
    raise AssertionError(f"ended without a word of {text!r}")


@pytest.mark.slow
def test_killed_at_twenty_random_moments_and_resumed_each_time(tmp_path: Path) -> None:
    """SIGKILL leaves no time for anything. Each life is cut at a moment drawn from a fixed seed: some before it has begun,
    most while it plays and saves."""
    rounds = 300
    run = (*TINY, "--rounds", rounds, "--checkpoint-every", "1", "--set", "evaluate_every=3")
    whole = command(*run, "--out", tmp_path / "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    life = json.loads((tmp_path / "whole" / "result.json").read_text())["seconds"]["total"] / 20  # on this machine
    draws, killed, reached = random.Random(5), 0, []
    while killed < 20:
        with started(*run, "--out", tmp_path / "cut", "--resume") as process:
            if (where := draws.random()) < 0.85:
                wait_for(process, "accuracy" if where < 0.7 else "round")  # it has played a round, or goes on from one
            time.sleep(draws.uniform(0.0, life))
            assert process.poll() is None, "ended before it could be killed: play more rounds"
            os.killpg(process.pid, signal.SIGKILL)
            killed += 1
        reached.append(
            max((int(p.stem.split("-")[1]) for p in (tmp_path / "cut" / "checkpoints").glob("round-*.json")), default=0)
        )
    assert reached == sorted(reached)
    assert len(set(reached)) > 10  # it came further in most of its lives
    last = command(*run, "--out", tmp_path / "cut", "--resume", "--quiet")
    assert last.returncode == 0, last.stderr
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_where_it_can_go_on(number: signal.Signals, tmp_path: Path) -> None:
    run = (*TINY, "--rounds", 90)
    whole = command(*run, "--out", tmp_path / "whole", "--quiet")
    assert whole.returncode == 0, whole.stderr
    with started(*run, "--out", tmp_path / "cut") as process:
        wait_for(process, "round 4")
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
    assert "stopping" in said
    assert f"of 90 rounds; --resume goes on in {tmp_path / 'cut'}" in said
    assert list((tmp_path / "cut" / "checkpoints").glob("*.json"))  # though by the clock none was due
    resumed = command(tmp_path / "cut", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "going on after round" in resumed.stderr
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Though the clients at work would go on for minutes."""
    with started(*TINY, "--local-epochs", 10000, "--batch-size", 2, "--rounds", 9, "--out", tmp_path / "r") as process:
        while not (tmp_path / "r" / "environment.json").exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        wait_for(process, "stopping")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


@pytest.mark.slow
def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    run = (*TINY, "--rounds", 400, "--out", tmp_path / "r")
    with started(*run) as process:
        wait_for(process, "round 1")
        second = command(*run, "--resume")
        assert second.returncode == 2
        assert "another process is at work in this folder" in second.stderr
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    third = command(*run, "--resume", "--quiet")  # the lock died with its owner
    assert third.returncode == 0, third.stderr


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A file-size limit stands for the disk: the next checkpoint does not fit."""
    often = (*TINY, "--checkpoint-every", 1)
    assert command(*often, "--rounds", 6, "--out", tmp_path / "whole", "--quiet").returncode == 0
    assert command(*often, "--rounds", 3, "--out", tmp_path / "r", "--quiet").returncode == 0
    folder = tmp_path / "r" / "checkpoints"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    full = command(*often, "--rounds", 6, "--out", tmp_path / "r", "--resume", preexec_fn=limited)
    assert full.returncode == 1
    assert f"{tmp_path / 'r'} cannot be written" in full.stderr
    assert "File too large" in full.stderr
    assert "MiB free" in full.stderr
    assert "the checkpoint after round 3 is whole" in full.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    again = command(*often, "--rounds", 6, "--out", tmp_path / "r", "--resume", "--quiet")
    assert again.returncode == 0, again.stderr
    assert numbers(tmp_path / "r") == numbers(tmp_path / "whole")


@pytest.mark.slow
def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs rights that this user has not; the file-size limit above stands for it")
    try:
        often = (*TINY, "--checkpoint-every", 1, "--out", disk / "r")
        full = command(*often, "--rounds", 400)
        assert full.returncode == 1
        assert "No space left on device" in full.stderr
        assert "its disk has 0 of 1 MiB free" in full.stderr
        assert "is whole, go on from it with --resume" in full.stderr
        subprocess.run(["mount", "-o", "remount,size=9m", str(disk)], check=True)
        again = command(*often, "--rounds", 400, "--resume", "--quiet")
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.slow
def test_resume_by_the_words_of_the_command_line(pfedla, tmp_path: Path) -> None:
    """Extended, finished, shortened, changed: each says what it is."""
    assert pfedla("run", *TINY, "--rounds", 4, "--out", "whole", "-q")[0] == 0
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--resume")[0] == 0  # nothing there yet: it starts
    run = tmp_path / "runs" / "heurpfedla-digits-classes-s0"
    code, out, err = pfedla("run", *TINY, "--rounds", 4, "--resume", "--threads", 1)  # the last of that name
    assert (code, "going on after round 2" in err) == (0, True)
    assert "personal models" in out
    assert numbers(run) == numbers(tmp_path / "whole")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = pfedla("run", run, "--resume")
    assert (code, "is finished: 4 rounds" in err) == (0, True)
    assert "personal models" in out
    code, out, err = pfedla("run", run, "--resume", "--json")
    assert json.loads(out)["rounds"] == 4
    for args, message in (
        (("--rounds", 3), "was begun with 4 rounds: it can be extended, not shortened"),
        (("--lr", 0.5, "--rounds", 9), "training.learning_rate was 0.05, is now 0.5"),
        (("--set", "algorithm.neighbours=3", "--seed", 1), "seed was 0, is now 1; algorithm.neighbours was 2, is now 3"),
        (("--set", "faults.dropout=0.5"), "faults.dropout was 0.2, is now 0.5"),
    ):
        code, _, err = pfedla("run", run, "--resume", *args)
        assert code == 2
        assert message in err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    code, _, err = pfedla("run", *TINY, "--out", run)
    assert code == 2
    assert "--resume" in err


@pytest.mark.slow
def test_a_signal_is_heard_though_nobody_reads_what_is_said(tmp_path: Path) -> None:
    """`pfedla run … 2>&1 | tee` and Ctrl-C: the pipe is gone first."""
    with started(*TINY, "--rounds", 2000, "--out", tmp_path / "r", "--set", "evaluate_every=50") as process:
        wait_for(process, "round 50")
        assert process.stderr is not None
        process.stderr.close()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        process.stderr = None
    assert list((tmp_path / "r" / "checkpoints").glob("*.json"))


def test_pictures_that_are_missing_are_drawn_when_a_finished_run_is_resumed(pfedla, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 1, "-q", "--out", "r")[0] == 0
    for picture in (tmp_path / "r").glob("*.png"):
        picture.unlink()
    assert pfedla("run", "r", "--resume", "-q")[0] == 0
    assert (tmp_path / "r" / "learning_curve.png").exists()


def test_a_refusal_changes_nothing(pfedla, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--out", "r")[0] == 0
    for path in (tmp_path / "r" / "checkpoints").glob("*.json"):
        path.write_text("damaged")
    before = {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()}
    code, _, err = pfedla("run", "r", "--resume", "--rounds", 9)
    assert (code, "no checkpoint in" in err) == (2, True)
    assert {path: path.read_bytes() for path in (tmp_path / "r").rglob("*") if path.is_file()} == before
    code, _, err = pfedla("run", "r", "--resume")
    assert (code, "is finished" in err) == (0, True)


def test_what_cannot_go_on_says_so(pfedla, tmp_path: Path) -> None:
    assert pfedla("run", *TINY, "--rounds", 2, "-q", "--out", "r")[0] == 0
    for path in (tmp_path / "r" / "checkpoints").iterdir():
        path.unlink()
    code, _, err = pfedla("run", "r", "--resume", "--rounds", 3)
    assert (code, "no checkpoint left to go on from" in err) == (2, True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    code, _, err = pfedla("run", *TINY, "--out", "other", "--resume")
    assert (code, "is no run folder" in err) == (2, True)
    assert (tmp_path / "other" / "thesis.txt").exists()
    assert pfedla("run", "nowhere", "--resume")[0] == 2
    code, _, err = pfedla("compare", "-a", "local,fedavg", *TINY[2:10], "--out", "other", "--resume")
    assert (code, "is no comparison" in err) == (2, True)


def test_other_data_are_refused(pfedla, tmp_path: Path) -> None:
    import numpy as np

    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(60, 5)), draws.integers(0, 3, 60)
    run = ("run", "-a", "fedavg", "-d", "own.npz", "--clients", 2, "--partition", "iid", "--out", "r", "-q")
    np.savez(tmp_path / "own.npz", x=x, y=y)
    assert pfedla(*run, "--rounds", 1)[0] == 0
    x[3, 3] += 1e-3
    np.savez(tmp_path / "own.npz", x=x, y=y)
    code, _, err = pfedla(*run, "--rounds", 2, "--resume")
    assert (code, "the data are not what they were" in err) == (2, True)


@pytest.mark.slow
def test_a_comparison_goes_on_too(pfedla, tmp_path: Path) -> None:
    methods = ("compare", "-a", "fedavg,pfedla", *TINY[2:10], "--local-epochs", 1, "--set", "pfedla.warm_up=0")
    assert pfedla(*methods, "--rounds", 3, "--out", "whole", "-q")[0] == 0
    assert pfedla(*methods, "--rounds", 2, "--out", "cut", "-q")[0] == 0
    (tmp_path / "cut" / "pfedla-s0" / "result.json").unlink()
    code, _, err = pfedla(*methods, "--rounds", 3, "--out", "cut", "--resume")
    assert code == 0, err
    assert "cut/pfedla-s0: going on after round 2" in err
    for name in ("fedavg-s0", "pfedla-s0"):
        assert numbers(tmp_path / "cut" / name) == numbers(tmp_path / "whole" / name)
    code, _, err = pfedla(*methods, "--rounds", 3, "--out", "cut", "--resume")
    assert (code, err.count("is finished")) == (0, 2)
