"""What is tried with real processes, each as a program of its own (in a namespace where that is possible):

    python tests/deployment.py SCENARIO FOLDER

Every process that is started inherits MARK in its environment, so that one left behind is found.
"""

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import pfedla
from pfedla.core.errors import PfedlaError
from pfedla.core.faults import Faults
from pfedla.flower.codec import HEADER_BYTES
from pfedla.flower.keys import write_certificates, write_node_key
from pfedla.flower.layout import _write_app, planned, read_plan, write_deployment
from pfedla.flower.local import LOOPBACK, LocalFederation, descendants, free_port, gather_models
from pfedla.flower.plan import Plan
from pfedla.runs.experiment import Experiment
from pfedla.runs.result_file import read_result

BEGUN = time.monotonic()
MARK = "PFEDLA_DEPLOYMENT_TEST"
DIGITS = {"data": {"dataset": "digits", "clients": 3}, "rounds": 3, "evaluate_every": 3, "training": {"local_epochs": 2}}

TWO = {**DIGITS, "data": {"dataset": "digits", "clients": 2}}


def deployment(folder: Path, values: dict[str, Any], **options: Any) -> Plan:
    write_deployment(folder, planned(Experiment.parse(values), None, folder, **options), [LOOPBACK], 9092)
    return read_plan(folder)


def another_app(folder: Path, name: str, plan: Plan, values: dict[str, Any]) -> Plan:
    """Another experiment for the same clients and keys, in folder/name."""
    other = planned(Experiment.parse(values), None, folder).experiment
    changed = plan.deployment.model_copy(update={"folder": str(folder / f"run-{name}")})
    _write_app(folder / name, Plan(other, changed))
    return Plan(other, changed)


def until(happens: Callable[[], Any], what: str, seconds: float = 150) -> Any:
    end = time.monotonic() + seconds
    while not (value := happens()):
        assert time.monotonic() < end, f"{what} has not happened in {seconds} s"
        time.sleep(0.1)
    print(f"{time.monotonic() - BEGUN:.0f} s: {what}", flush=True)
    return value


def said(plan: Plan) -> str:
    log = Path(f"{plan.deployment.folder}.log")
    return log.read_text(encoding="utf-8") if log.exists() else ""


def ended(plan: Plan, times: int = 1, seconds: float = 240) -> None:
    until(lambda: len(re.findall("^(?:finished|failed): ", said(plan), re.M)) >= times, f"the end of {plan.folder}", seconds)
    assert said(plan).splitlines()[-1].startswith("finished: "), said(plan)


def same(left: Path, right: Path) -> bool:
    ours, theirs = load_file(left), load_file(right)
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def assert_as_simulated(folder: Path, plan: Plan, **checks: bool) -> dict[str, Any]:
    """The run folder, with the sites' models gathered, is that of `pfedla run` with the threaded engine, bit for bit."""
    simulated = pfedla.run(plan.experiment, folder / "simulated" / plan.folder.name)
    gather_models(folder, plan.folder)
    for path in sorted([*simulated.glob("models/*"), *simulated.glob("alpha.safetensors")]):
        assert same(plan.folder / path.relative_to(simulated), path), path
    ours, theirs = (read_result(path / "result.json") for path in (plan.folder, simulated))
    for key in ("accuracy", "accuracy_after_training", "loss", "traffic", "failures"):
        assert not checks.get(key, True) or ours[key] == theirs[key], (key, ours[key], theirs[key])
    return ours


def processes() -> Iterator[tuple[int, str]]:
    """Those that this test has started, and theirs."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(path.name) != os.getpid() and mark in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()


# Scenarios


def short(folder: Path) -> None:
    """The command line's two commands, and nothing but them."""
    command = [str(Path(sys.executable).with_name("pfedla")), "deploy"]
    words = ["-a", "pfedla", "-d", "digits", "--clients", "2", "--rounds", "1", "--local-epochs", "1"]
    subprocess.run([*command, "init", str(folder), *words], check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run([*command, "local", str(folder), "--json"], check=True, stdout=subprocess.PIPE, text=True)
    told, plan = json.loads(done.stdout), read_plan(folder)
    assert told["run"] == str(plan.folder)
    result = assert_as_simulated(folder, plan)
    assert told["accuracy"] == result["accuracy"]
    simulated = folder / "simulated" / "run"
    names = [{path.name for path in run.rglob("*") if path.name != ".lock"} for run in (plan.folder, simulated)]
    assert names[0] - names[1] == {"deployment.json", ".run"}  # the same files, and what it is called at the sites
    assert not names[1] - names[0]


SPOILER = """
import numpy as np
from flwr.app import Array, ArrayRecord
from pfedla.flower import client_app

app = client_app.ClientApp()


@app.query()
@app.evaluate()
def honest(message, context):
    return client_app.reply(message, context)


@app.train()
def train(message, context):
    answer = client_app.reply(message, context)
    arrays = dict(answer.content["tensors"].items())
    name = next(iter(arrays))
    value = arrays[name].numpy()
    spoiled = {
        1: {name: Array(value * np.nan)},
        2: {name: Array(value[:1])},
        3: {"another.layer": Array(np.zeros(3, np.float32))},
        4: {name: Array("float32", (3,), "numpy.ndarray", b"garbage")},
    }
    config = message.content["config"]
    if config["client"] == 1:
        answer.content["tensors"] = ArrayRecord(arrays | spoiled[config["round"]])
    return answer
"""


def methods(folder: Path) -> None:
    """Three methods, then bad clients and strangers, on the same three SuperNodes."""
    plan = deployment(folder, {**DIGITS, "algorithm": {"name": "pfedla", "warm_up": 0}})
    plans = [plan]
    for name, options in (("heurpfedla", {"retained_layers": 2, "warm_up": 0}), ("fedrep", {})):
        plans.append(another_app(folder, name, plan, {**DIGITS, "algorithm": {"name": name, **options}}))
    with LocalFederation(folder, 3) as federation:
        for app in ("app", "heurpfedla"):  # two runs at once: a site keeps them apart
            federation.run(app)
        for one in plans[:2]:
            ended(one)
        federation.run("fedrep")
        ended(plans[2])
        refusals(folder, federation)
    for one in plans:
        traffic = assert_as_simulated(folder, one)["traffic"]
        wire = json.loads((one.folder / "deployment.json").read_text())["wire"]
        for way in ("down", "up"):
            assert wire[way]["num_bytes"] == traffic[f"{way}_bytes"] + HEADER_BYTES * wire[way]["num_arrays"]


def refusals(folder: Path, federation: LocalFederation) -> None:
    """Strangers do not get in, a client with another's data cannot join, and what client 1 sends is of no use: client 0 goes
    on alone."""
    plan = another_app(folder, "spoiled", read_plan(folder), {**DIGITS, "rounds": 4, "evaluate_every": 4})
    (folder / "spoiled" / "pfedla_federation" / "client_app.py").write_text(SPOILER)
    strangers = {name: folder / "sites" / name for name in ("stranger", "bought", "other-ca")}
    for name, site in strangers.items():
        site.mkdir()
        write_node_key(site / "client.key", name)
        write_certificates(site, [LOOPBACK])  # a CA of their own, which nobody asked for
    trusted = folder / "server" / "ca.crt"
    federation.register(strangers["bought"] / "client.key.pub", "client-1")  # the open control port: anybody may, as anybody

    def node(name: str, ca: Path, key: Path | None) -> None:
        words = ["--auth-supernode-private-key", str(key)] if key else []
        federation._start(name, [
            "flower-supernode", "--superlink", f"{LOOPBACK}:{federation.port}", "--host", LOOPBACK, "--port", str(free_port()),
            "--root-certificates", str(ca), "--max-retries", "2", "--node-config", "partition-id=1", *words,
        ])  # fmt: skip

    node("stranger", trusted, strangers["stranger"] / "client.key")
    node("keyless", trusted, None)
    node("other-ca", strangers["other-ca"] / "ca.crt", folder / "sites" / "client-1" / "client.key")
    node("bought", trusted, strangers["bought"] / "client.key")
    federation.stop("client-2")
    federation.start_supernode(2, **{"partition-id": 0})  # its own key, another's data
    until(lambda: (federation.logs / "client-2.log").read_text().count("SuperNode ID: ") == 2, "the other configuration")
    federation.run("spoiled", **{"deployment.wait": 3.0})
    ended(plan)
    logs = {name: (federation.logs / f"{name}.log").read_text() for name in ("stranger", "keyless", "other-ca", "client-2")}
    for name in ("stranger", "keyless", "other-ca"):
        assert federation.processes.pop(name).wait(60) != 0, logs[name]  # refused, and gone
        assert "Receiving" not in logs[name], logs[name]
    assert "certificate verify failed" in logs["other-ca"].lower(), logs["other-ca"]
    assert re.search(r"node \d+ \('client-1'\) has none of the clients' keys: it is left out", said(plan)), said(plan)
    sentence = "partition-id = 0 is another's: this node's key is that of client 2"
    assert f"client 2 cannot join: {sentence}" in said(plan), said(plan)
    assert f"pfedla: {sentence}" in logs["client-2"]
    reasons = ("not finite", "wrong shape", "wrong names", "not an upload")
    assert read_result(plan.folder / "result.json")["failures"] == {"1": dict.fromkeys(reasons, 1), "2": {"no answer": 4}}
    answering = Faults.answering
    Faults.answering = lambda self, cohort: cohort.ids == 0  # type: ignore[method-assign]
    simulated = pfedla.run(plan.experiment, folder / "simulated" / plan.folder.name)
    Faults.answering = answering  # type: ignore[method-assign]
    gather_models(folder, plan.folder)
    for name in ("alpha.safetensors", "models/client-0.safetensors"):
        assert same(plan.folder / name, simulated / name), name


def node_killed(folder: Path) -> None:
    """kill -9 of a SuperNode while it trains: the round ends with the others, and the same node comes back."""
    values = {**TWO, "rounds": 5, "evaluate_every": 5, "training": {"local_epochs": 60}}
    plan = deployment(folder, {**values, "algorithm": {"name": "heurpfedla", "retained_layers": 2}})
    with LocalFederation(folder, 2) as federation:
        federation.run()
        log = federation.logs / "client-1.log"
        until(lambda: log.read_text().count("Receiving: train") == 2, "the second round")
        node = federation.processes["client-1"].pid
        until(lambda: {pid for pid, command in processes() if "flwr-clientapp" in command} & {*descendants(node)}, "its work")
        federation.stop("client-1", kill=True)

        def back() -> bool:  # refused as long as Flower believes the first one to be there
            process = federation.processes.get("client-1")
            if process is None or process.poll() is not None:
                federation.processes.pop("client-1", None)
                time.sleep(1)
                federation.start_supernode(1)
            return log.read_text().count("SuperNode ID: ") == 2

        until(back, "the return of the node")
        ended(plan)
    lost = {int(found) for found in re.findall(r"round (\d+): client 1 did not answer: the node is gone", said(plan))}
    left, returned = (re.search(rf"round (\d+): client 1 is {word}", said(plan)) for word in ("away", "back"))
    absent = lost | set(range(int(left[1]), int(returned[1]))) if left and returned else lost
    assert 2 in absent, said(plan)
    assert 5 not in absent, said(plan)
    Faults.answering = lambda self, cohort: torch.tensor([i != 1 or cohort.round not in absent for i in cohort.ids])  # type: ignore[method-assign]
    result = assert_as_simulated(folder, plan)
    assert result["failures"] == {"1": {"no answer": len(absent)}}


def server_killed(folder: Path) -> None:
    """kill -9 of the ServerApp, then of the SuperLink: `resume` goes on each time, to the same end."""
    plan = deployment(folder, {**TWO, "algorithm": {"name": "fedrep"}, "training": {"local_epochs": 20}})
    with LocalFederation(folder, 2, lasting=True) as federation:
        run = federation.run()
        until(plan.folder.joinpath("checkpoints/round-1.json").exists, "the first round")
        (server_app,) = (number for number, command in processes() if "flwr-serverapp" in command)
        os.kill(server_app, signal.SIGKILL)
        until(lambda: all("flwr-serverapp" not in command for _, command in processes()), "the ServerApp's end")
        federation.stop_run(run)  # else Flower takes it to be running for almost a minute, and its nodes wait for it
        run = federation.run(**{"deployment.resume": True})
        until(plan.folder.joinpath("checkpoints/round-2.json").exists, "the second round")
        assert re.search("going on after round [12]", said(plan)), said(plan)
        federation.stop("superlink", kill=True)
        until(lambda: all("flwr-serverapp" not in command for _, command in processes()), "the end of its ServerApp")
        federation.start_superlink()
        federation.stop_run(run)
        federation.run(**{"deployment.resume": True})
        ended(plan)
    assert said(plan).count("going on after round") == 2, said(plan)
    assert_as_simulated(folder, plan)


def main() -> None:
    scenario, folder = (
        {one.__name__: one for one in (short, methods, node_killed, server_killed)}[sys.argv[1]],
        Path(sys.argv[2]),
    )
    with contextlib.suppress(OSError), socket.socket() as any_socket:  # in a namespace of its own, loopback is down at first
        request = struct.pack("16sh14x", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS
    torch.set_num_threads(1)
    try:
        scenario(folder / "fed")
    except (PfedlaError, AssertionError):
        for log in sorted(folder.rglob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}")
        raise
    # Flower's helpers of a SuperNode that was refused look every few seconds whether it is still there.
    until(lambda: not list(processes()), "the end of all processes", 20)


if __name__ == "__main__":
    main()
