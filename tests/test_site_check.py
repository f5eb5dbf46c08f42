"""`pfedla site check`: what a site learns before it joins."""

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flower_grid import deploy
from typer.testing import CliRunner

from pfedla.cli import app
from pfedla.flower.layout import describe_own_data, write_deployment
from pfedla.flower.layout import plan_deployment as plan
from pfedla.runs.experiment import Experiment

OWN = {"data": {"clients": 2}, "training": {"local_epochs": 1}}


def check(site: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["site", "check", str(site), *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def write(path: Path, x: np.ndarray, y: list[int]) -> Path:
    np.savez(path, x=x, y=np.array(y))
    return path


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.listen()
        yield door


def answer(door: socket.socket, server: Path) -> None:
    """Greet callers with the server's certificate, as the gate does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server / "server.crt", server / "server.key")

    def greet() -> None:
        while True:
            try:
                plain, _ = door.accept()
                with context.wrap_socket(plain, server_side=True) as caller:
                    caller.recv(1)
            except ssl.SSLError:
                continue
            except OSError:
                return

    threading.Thread(target=greet, daemon=True).start()


def write_fed(folder: Path, door: socket.socket) -> Path:
    planned = plan(Experiment.parse(OWN), describe_own_data("4", "3", False), folder)
    write_deployment(folder, planned, ["127.0.0.1"], door.getsockname()[1])
    answer(door, folder / "server")
    return folder / "sites" / "client-1"


def test_a_site_that_is_ready(tmp_path: Path, listening: socket.socket) -> None:
    site = write_fed(tmp_path / "fed", listening)
    x = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
    code, said = check(site, "--data", str(write(tmp_path / "mine.npz", x, [0, 1] * 15)))
    assert code == 0, said
    assert "client 1" in said
    assert "none of 2" in said  # a class that the site does not have
    kept = "ca.crt client.key client.key.pub pfedla-site.service plan.toml server.pub"
    assert {path.name for path in site.iterdir()} == set(kept.split())  # it leaves nothing behind


def random(scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(0).normal(size=(30, 4))).astype(np.float32)


def copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())


LABELS = [0, 1, 2] * 10
SPOILED = {  # what is done to the site's folder or its data, and a word of the error
    "shape": (lambda site, mine: write(mine, random()[:, :3], LABELS), "(3,)"),
    "class": (lambda site, mine: write(mine, random(), [0, 1, 7] * 10), "7"),
    "nan": (lambda site, mine: write(mine, random() * np.nan, LABELS), "finite"),
    "scale": (lambda site, mine: write(mine, random(1e20), LABELS), "diverges"),
    "no data": (lambda site, mine: mine.unlink(), "mine.npz"),
    "open key": (lambda site, mine: (site / "client.key").chmod(0o644), "chmod 600"),
    "another key": (lambda site, mine: copy(site.parent / "client-0/client.key", site / "client.key"), "not that"),
    "no server key": (lambda site, mine: (site / "server.pub").unlink(), "server.pub"),
    "no plan": (lambda site, mine: (site / "plan.toml").unlink(), "plan.toml"),
    "another CA": (lambda site, mine: copy(mine.parent / "other/server/ca.crt", site / "ca.crt"), "certificate"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_does_not_fit_is_named(name: str, tmp_path: Path, listening: socket.socket) -> None:
    site, mine = write_fed(tmp_path / "fed", listening), tmp_path / "mine.npz"
    if name == "another CA":
        deploy(tmp_path / "other", {"data": {"dataset": "digits", "clients": 2}})
    write(mine, random(), LABELS)
    spoil, key = SPOILED[name]
    spoil(site, mine)
    code, said = check(site, "--data", str(mine))
    assert code == 1, said
    assert any(key in line for line in said.split("error: ")[1:]), said


def test_a_server_that_is_away(tmp_path: Path) -> None:
    deploy(tmp_path / "fed", {"data": {"dataset": "digits", "clients": 2}, "training": {"local_epochs": 1}})
    code, said = check(tmp_path / "fed" / "sites" / "client-0")
    assert code == 1
    assert "9092" in said
    assert "does not answer" in said
