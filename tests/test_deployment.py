"""Real SuperLinks and SuperNodes on loopback, with TLS and keys: what deployment.py tries must end well and leave nobody."""

import os
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

import pytest
from deployment import MARK

SCENARIOS = Path(__file__).with_name("deployment.py")


@cache
def namespace() -> list[str]:
    """What puts a program into a network and process namespace of its own; nothing where that is not allowed."""
    for mine in ([], ["--map-root-user"]):
        command = ["unshare", *mine, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode == 0:
                return command
        except OSError:
            break
    return []


def play(scenario: str, folder: Path, seconds: float) -> None:
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    command = [*namespace(), sys.executable, str(SCENARIOS), scenario, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-6_000:]}"


@pytest.mark.slow
def test_init_and_local_leave_what_a_simulation_leaves(tmp_path: Path) -> None:
    play("short", tmp_path, 200)


@pytest.mark.slow
def test_methods_equal_the_simulation_and_strangers_are_refused(tmp_path: Path) -> None:
    play("methods", tmp_path, 500)


@pytest.mark.slow
def test_a_supernode_that_is_killed_comes_back_as_the_same_client(tmp_path: Path) -> None:
    play("node_killed", tmp_path, 400)


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_to_the_same_end(tmp_path: Path) -> None:
    play("server_killed", tmp_path, 400)
