"""`pfedla deploy check`, and the systemd units of `deploy init`."""

import configparser
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from flower_grid import deploy
from typer.testing import CliRunner

from pfedla.cli import app
from pfedla.flower import inspection
from pfedla.flower.layout import read_ports

DIGITS = {"data": {"dataset": "digits", "clients": 2}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    deploy(tmp_path / "fed", DIGITS)
    return tmp_path / "fed"


def test_a_new_deployment_is_closed(folder: Path) -> None:
    result = CliRunner().invoke(app, ["deploy", "check", str(folder)])
    assert result.exit_code == 0, result.output
    assert "superlink is not running" in result.output


@pytest.mark.parametrize(("host", "problems"), [("0.0.0.0", 1), ("127.0.0.1", 0)])
def test_an_open_control_port_is_an_error(host: str, problems: int) -> None:
    with socket.socket() as taken, socket.socket() as gate:
        taken.bind((host, 0))
        gate.bind(("0.0.0.0", 0))
        taken.listen()
        gate.listen()
        ports = {"gate": gate.getsockname()[1], "superlink": taken.getsockname()[1]}
        good, wrong = inspection.inspect_ports(ports)
    assert len(wrong) == problems
    assert all(str(ports["superlink"]) in line for line in wrong)
    assert any(str(ports["gate"]) in line for line in good)


@pytest.mark.parametrize(("name", "mode"), [("server/order.key", 0o640), ("sites/client-1", 0o755)])
def test_keys_and_folders_that_others_can_read_are_errors(folder: Path, name: str, mode: int) -> None:
    (folder / name).chmod(mode)
    _, wrong = inspection.inspect(folder)
    assert len(wrong) == 1
    assert name in wrong[0]
    assert CliRunner().invoke(app, ["deploy", "check", str(folder)]).exit_code == 1


def test_an_old_certificate_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "SOON", 10_000)
    assert "certificate" in inspection.inspect(folder)[1][0]


def test_units_name_the_files_of_the_deployment(folder: Path) -> None:
    units = [*(folder / "server" / "units").iterdir(), *folder.glob("sites/client-*/*.service")]
    assert len(units) == 4
    for path in units:
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read(path)
        service = unit["Service"]
        assert service["NoNewPrivileges"] == "yes"
        words = service["ExecStart"].split()
        assert Path(words[0]).is_absolute()
        if "server" in path.parts:
            files = [word for word in words[1:] if word.startswith(str(folder)) and "state.db" not in word]
            assert files
            assert all(Path(word).exists() for word in files)
        if checker := shutil.which("systemd-analyze"):
            assert not subprocess.run([checker, "verify", path], capture_output=True, check=False).returncode


def test_ports_follow_the_options(tmp_path: Path) -> None:
    words = ["deploy", "init", str(tmp_path / "fed"), "-d", "digits", "--clients", "2", "--port", "7000", "-q"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert read_ports(tmp_path / "fed") == {"gate": 7000, "superlink": 7001}
