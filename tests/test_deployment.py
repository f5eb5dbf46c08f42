"""Real SuperLinks and SuperNodes on loopback, with TLS and keys: the scenarios of deployment.py leave no process."""

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
    """Return the command that gives a program its own network and process namespace, if that is allowed."""
    for mine in ([], ["--map-root-user"]):
        command = ["unshare", *mine, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        try:
            if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode == 0:
                return command
        except OSError:
            break
    return []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["short", "methods", "node_killed", "server_killed"])
def test_scenario(scenario: str, tmp_path: Path) -> None:
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    command = [*namespace(), sys.executable, str(SCENARIOS), scenario, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-6_000:]}"
