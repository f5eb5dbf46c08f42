"""Real SuperLinks and SuperNodes on loopback, with TLS and keys: the scenarios leave no process.

Each is a program of its own, in a namespace where that is possible:

    python tests/test_deployment.py SCENARIO FOLDER

Every process that is started inherits MARK in its environment, so that one left behind is found.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from flower_grid import check, deploy

from pfedla.core.errors import PfedlaError
from pfedla.flower.deployment import Deployment
from pfedla.flower.keys import write_node_key
from pfedla.flower.layout import plan_deployment, read_deployment, write_app, write_flower_config
from pfedla.flower.processes import LocalFederation
from pfedla.flower.server_app import END, LOG, beside
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment

START = time.monotonic()
MARK = "PFEDLA_DEPLOYMENT_TEST"
DATA, TIMES = {"dataset": "digits", "clients": 3}, {"rounds": 3, "evaluate_every": 3}
DIGITS = {"data": DATA, **TIMES, "training": {"local_epochs": 2}}
TWO = {**DIGITS, "data": {**DATA, "clients": 2}}


def add_app(folder: Path, name: str, values: dict[str, Any]) -> Deployment:
    """Write another experiment for the same clients and keys to folder/name."""
    planned = plan_deployment(Experiment.parse(values), None, folder)
    changes = {"folder": folder / f"run-{name}", "keys": read_deployment(folder).keys}
    write_app(folder / name, planned.model_copy(update=changes))
    return planned.model_copy(update=changes)


def wait_for(happens: Callable[[], Any], what: str, seconds: float = 150) -> Any:
    end = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.1)
    print(f"{time.monotonic() - START:.0f} s: {what}", flush=True)
    return value


def read_log(deployment: Deployment) -> str:
    return beside(deployment.folder, LOG).read_text(encoding="utf-8")


def wait_for_end(deployment: Deployment) -> None:
    end = beside(deployment.folder, END)
    wait_for(end.exists, f"the end of {deployment.folder.name}", 240)
    assert json.loads(end.read_text()) == {"error": None}, read_log(deployment)


@contextlib.contextmanager
def start(folder: Path, clients: int, **options: Any) -> Iterator[LocalFederation]:
    federation = LocalFederation(folder, clients)
    vars(federation).update(options)
    with contextlib.closing(federation):
        federation.start_all()
        yield federation


def find_processes(program: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.pid != os.getpid() and process.environ().get(MARK) == os.environ[MARK]
            if is_ours and any(program in word for word in process.cmdline()):
                found.append(process)
    return found


def deploy_by_command(folder: Path, *words: str) -> tuple[dict[str, Any], Deployment]:
    """Run the command line's two commands; return what the second prints."""
    command = [str(Path(sys.executable).with_name("pfedla")), "deploy"]
    init = [*command, "init", str(folder), "-a", "pfedla", "--local-epochs", "1", *words]
    subprocess.run(init, check=True, stdout=subprocess.DEVNULL)
    local = [*command, "local", str(folder), "--json"]
    told = json.loads(subprocess.run(local, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return told, read_deployment(folder)


def hospitals(folder: Path) -> None:
    """The four hospitals without a further option; one has no AUROC, as it has a single healthy patient."""
    told, deployment = deploy_by_command(folder, "-d", "heart-disease", "--rounds", "2")
    assert deployment.names == ("cleveland", "hungary", "switzerland", "va-long-beach")
    assert told["task"]["metric"] == "auroc"
    assert [score is None for score in told["score"]["per_client"]] == [False, False, True, False]
    assert told["score"] == check(deployment)["score"]


def short(folder: Path) -> None:
    """The command line's two commands, and nothing else."""
    told, deployment = deploy_by_command(folder, "-d", "digits", "--clients", "2", "--rounds", "1")
    assert told["run"] == str(deployment.folder)
    assert told["score"] == check(deployment)["score"]
    runs = (deployment.folder, folder / "simulated" / "run")
    ours, simulated = ({path.name for path in run.rglob("*") if path.name != ".lock"} for run in runs)
    assert ours ^ simulated == {"deployment.json", ".run", "trained_on.npy"}  # hashes of examples stay at the sites
    assert "trained_on.npy" in simulated


SPOILER = r"""
from flwr.app import Array, ArrayRecord
from pfedla.flower import client_app

app = client_app.ClientApp()

@app.query()
@app.evaluate()
@app.train()
def answer(message, context):
    answer = client_app.reply(message, context)
    if message.content["config"]["client"] == 1 and message.metadata.message_type == "train":
        pickle = Array("float32", (3,), "numpy.ndarray", b"cos\n_exit\n(I1\ntR.")  # it would end the server
        answer.content["tensors"] = ArrayRecord({name: pickle for name in answer.content["tensors"]})
    return answer
"""


def methods(folder: Path) -> None:
    """Three methods, then bad clients and unknown nodes, on the same three SuperNodes."""
    deployments = [deploy(folder, {**DIGITS, "algorithm": {"name": "pfedla"}})]
    for name, options in (("heurpfedla", {"retained_layers": 2}), ("fedrep", {})):
        deployments.append(add_app(folder, name, {**DIGITS, "algorithm": {"name": name, **options}}))
    with start(folder, 3) as federation:
        for app in ("app", "heurpfedla"):  # two runs at once: a site keeps them apart
            federation.run(app)
        for one in deployments[:2]:
            wait_for_end(one)
        federation.run("fedrep")
        wait_for_end(deployments[2])
        outside(folder, federation)
        refusals(folder, federation)
    for one in deployments:
        check(one)


def outside(folder: Path, federation: LocalFederation) -> None:
    """Through the gate, with ca.crt, nobody lists, starts or registers anything; the control port is on loopback."""
    home = federation.logs / "flower" / "outside"
    home.mkdir()
    write_flower_config(home, f"127.0.0.1:{federation.port}", folder / "sites" / "client-0" / "ca.crt")
    key = folder / "sites" / "outside" / "client.key"
    key.parent.mkdir()
    write_node_key(key, "outside")
    asked = (["list"], ["run", str(folder / "app")], ["supernode", "register", f"{key}.pub", "--name", "outside"])
    for words in asked:
        environment = {**os.environ, "FLWR_HOME": str(home)}
        command = [str(Path(sys.executable).with_name("flwr")), *words, "--format", "json"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert '"success": true' not in done.stdout, (words, done.stdout)
    listening = [one.laddr for one in psutil.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {one.ip for one in listening if one.port == federation.control_port} == {"127.0.0.1"}


def refusals(folder: Path, federation: LocalFederation) -> None:
    """Unknown nodes do not get in, client 2 has another's data, client 1 sends bad uploads: client 0 trains alone."""
    deployment = add_app(folder, "spoiled", DIGITS)
    (folder / "spoiled" / "spoiler.py").write_text(SPOILER)
    project = folder / "spoiled" / "pyproject.toml"
    project.write_text(project.read_text().replace("pfedla.flower.client_app", "spoiler"))
    for name in ("unregistered", "registered"):
        site = folder / "sites" / name
        shutil.copytree(folder / "sites" / "client-1", site, ignore=shutil.ignore_patterns("client.key*", "state"))
        write_node_key(site / "client.key", name)
        if name == "registered":  # by a user of the server: its control port is open to them
            federation.flwr("supernode", "register", str(site / "client.key.pub"), "--name", "client-1")
        federation.start_supernode(name)
    federation.stop("client-2")
    federation.start_supernode("client-2", site=str(folder / "sites" / "client-0"))  # its own key, another's folder
    log = federation.logs / "client-2.log"
    wait_for(lambda: log.read_text().count("SuperNode ID: ") == 2, "the restart of client 2")
    federation.run("spoiled", **{"deployment.wait": 3.0})
    wait_for_end(deployment)
    text = (federation.logs / "unregistered.log").read_text()
    assert federation.processes.pop("unregistered").wait(60) != 0, text  # refused, and gone
    assert "Receiving" not in text, text
    said = read_log(deployment)
    assert re.search(r"node \d+ \('client-1'\)", said), said
    assert all("for client 2" in text for text in (said, log.read_text()))
    failures = read_result(deployment.folder / "result.json")["failures"]
    assert failures == {"1": {"not an upload": 3}, "2": {"no answer": 3}}


def node_killed(folder: Path) -> None:
    """kill -9 of a SuperNode while it trains: the round ends with the others, and the same node comes back."""
    values = {**TWO, "rounds": 5, "evaluate_every": 5, "training": {"local_epochs": 60}}
    deployment = deploy(folder, {**values, "algorithm": {"name": "heurpfedla", "retained_layers": 2}})
    with start(folder, 2) as federation:
        federation.run()
        log = federation.logs / "client-1.log"
        wait_for(lambda: log.read_text().count("Receiving: train") == 2, "the second round")
        node = federation.processes["client-1"]
        wait_for(lambda: {*find_processes("flwr-clientapp")} & {*node.children(recursive=True)}, "its work")
        federation.stop("client-1", kill=True)
        # A node that is back before the server looks again would leave the round waiting for its lost message.
        wait_for(lambda: "client 1 did not answer" in read_log(deployment), "the end of the round without it")

        def is_back() -> bool:  # refused as long as Flower believes the first one to be online
            process = federation.processes.get("client-1")
            if process is None or process.poll() is not None:
                federation.processes.pop("client-1", None)
                time.sleep(1)
                federation.start_supernode("client-1")
            return log.read_text().count("SuperNode ID: ") == 2

        wait_for(is_back, "the return of the node")
        wait_for_end(deployment)
    said = read_log(deployment)
    lines = re.findall(r"round (\d+), train: (?:client 1 did not answer|offline: \[1\])", said)
    absent = {int(number) for number in lines}
    assert 2 in absent, said
    assert 5 not in absent, said
    result = check(deployment, absent=lambda client, round: client == 1 and round in absent)
    assert result["failures"] == {"1": {"no answer": len(absent)}}


def server_killed(folder: Path) -> None:
    """kill -9 of the ServerApp, then of the SuperLink: the run resumes each time, to the same end."""
    deployment = deploy(folder, {**TWO, "algorithm": {"name": "fedrep"}, "training": {"local_epochs": 20}})
    checkpoints = deployment.folder / "checkpoints"
    with start(folder, 2, database=str(folder / "state.db")) as federation:
        run = federation.run()
        wait_for((checkpoints / "round-1.json").exists, "the first round")
        (server_app,) = find_processes("flwr-serverapp")
        server_app.kill()
        wait_for(lambda: not find_processes("flwr-serverapp"), "the end of the ServerApp")
        federation.flwr("stop", str(run))  # else Flower takes it to be running for almost a minute, and its nodes wait
        run = federation.run(**{"deployment.resume": True})
        wait_for((checkpoints / "round-2.json").exists, "the second round")
        federation.stop("superlink", kill=True)
        wait_for(lambda: not find_processes("flwr-serverapp"), "the end of its ServerApp")
        beside(deployment.folder, END).unlink(missing_ok=True)
        federation.start_superlink()
        federation.flwr("stop", str(run))
        federation.run(**{"deployment.resume": True})
        wait_for_end(deployment)
    assert read_log(deployment).count("resuming after round") == 2, read_log(deployment)
    check(deployment)


SCENARIOS = {one.__name__: one for one in (short, hospitals, methods, node_killed, server_killed)}


def namespace() -> list[str]:
    """Return the command that gives a program its own network and process namespace, if that is allowed."""
    for mine in ([], ["--map-root-user"]) if shutil.which("unshare") else ():
        command = ["unshare", *mine, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
        if subprocess.run([*command, "true"], capture_output=True, timeout=30).returncode == 0:
            return command
    return []


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, tmp_path: Path, real: Callable[[str], None]) -> None:
    if scenario == "hospitals":
        real("heart-disease")
    environment = {**os.environ, MARK: uuid.uuid4().hex}
    command = [*namespace(), sys.executable, __file__, scenario, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout[-12_000:]}\n{done.stderr[-6_000:]}"


def main() -> None:
    folder = Path(sys.argv[2])
    with contextlib.suppress(OSError), socket.socket() as any_socket:  # in a new namespace, loopback is down
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x41))  # SIOCSIFFLAGS: IFF_UP | IFF_RUNNING
    torch.set_num_threads(1)
    try:
        SCENARIOS[sys.argv[1]](folder / "fed")
    except (PfedlaError, AssertionError):
        for log in sorted(folder.rglob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        raise
    # Flower's helpers of a refused SuperNode look every few seconds whether it is still there.
    wait_for(lambda: not find_processes(), "the end of all processes", 20)


if __name__ == "__main__":
    main()
