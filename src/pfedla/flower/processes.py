"""A deployment on this machine: SuperLink, gate and SuperNodes as processes on loopback, with TLS and keys."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.files import read_object
from pfedla.flower.layout import describe_superlink, write_flower_config
from pfedla.flower.server_app import END, LOG, RUN_NAME, beside
from pfedla.report.reading import Metric, read_rounds, task_of_run
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Display

LOOPBACK = "127.0.0.1"
PATIENCE = 60.0  # seconds for a process to be ready
LOOK = 15.0  # seconds between two questions whether the run is alive: each takes Flower a second


class LocalFederation:
    """The SuperLink and all SuperNodes. `close` stops them and all they started."""

    def __init__(self, folder: Path, clients: int) -> None:
        self.folder = folder.resolve()
        self.sites = [f"client-{client}" for client in range(clients)]
        self.database = ":flwr-in-memory:"  # a file lasts when the SuperLink restarts, at twice the cost
        self.control_port, self.port = find_free_port(), find_free_port()  # of the SuperLink, of the gate
        self.logs = self.folder / "logs"
        self.processes: dict[str, psutil.Popen] = {}

    def start_all(self) -> None:
        self.start_superlink()
        self.start_gate()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.register, self.sites))
        for site in self.sites:
            self.start_supernode(site)

    def start_superlink(self) -> None:
        server = self.folder / "server"
        self.start("superlink", *describe_superlink(server, self.control_port, self.database))
        write_flower_config(self.logs / "flower" / "superlink", f"{LOOPBACK}:{self.control_port}", server / "ca.crt")
        self._wait_for("superlink", self.control_port)

    def start_gate(self) -> None:
        words = ["--host", LOOPBACK, "--port", str(self.port), "--control-port", str(self.control_port)]
        self.start("gate", "pfedla", "deploy", "gate", str(self.folder), *words)
        self._wait_for("gate", self.port)

    def _wait_for(self, name: str, port: int) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=1):
                return
            if self.processes[name].poll() is not None or time.monotonic() > end:
                raise PfedlaError(f"the {name} does not start; see {self.logs / f'{name}.log'}")
            time.sleep(0.2)

    def start_supernode(self, name: str, **config: Any) -> None:
        """Start the SuperNode of a site; `config` is added to its --node-config."""
        site = self.folder / "sites" / name
        own = {"data": str(site / "data.npz")} if (site / "data.npz").exists() else {}
        words = ["--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(find_free_port())]
        words += ["--root-certificates", str(site / "ca.crt"), "--auth-supernode-private-key", str(site / "client.key")]
        words += ["--node-config", _to_words({"site": str(site), "state": str(site / "state"), **own, **config})]
        self.start(name, "flower-supernode", *words)

    def start(self, name: str, program: str, *words: str) -> None:
        options = self._options(name)
        with (self.logs / f"{name}.log").open("ab") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.processes[name] = psutil.Popen([program, *words], **streams, **options)

    def register(self, site: str) -> None:
        key = self.folder / "sites" / site / "client.key.pub"
        self.flwr("supernode", "register", str(key), "--name", site)

    def run(self, app: str = "app", /, **config: Any) -> int:
        """Start a run of an app in this folder with these values of the run configuration; return its id."""
        words = ("--run-config", _to_words(config)) if config else ()
        return int(self.flwr("run", str(self.folder / app), *words)["run-id"])

    def flwr(self, *words: str) -> dict[str, Any]:
        """Return the answer of Flower's command line."""
        command = ["flwr", *words, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, **self._options("superlink"))
        told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :]) if "{" in done.stdout else {}
        if not told.get("success"):
            problem = told.get("error-message") or (done.stderr or done.stdout).strip()[-500:]
            raise PfedlaError(f"flwr {words[0]}: {problem}")
        return told

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a process and all it has started (in sessions of their own): at once, or after time to end by itself."""
        process = self.processes.pop(name)
        with suppress(psutil.NoSuchProcess):
            family = [*process.children(recursive=True), process]  # a dead process has no children any more
            if not kill:
                process.terminate()
                with suppress(psutil.TimeoutExpired):
                    process.wait(10)
            for member in family:
                with suppress(psutil.NoSuchProcess):
                    member.kill()  # psutil compares creation times: never a later process of this id
        process.wait()

    def close(self, *, kill: bool = False) -> None:
        for name in sorted(self.processes, key=lambda name: name == "superlink"):  # the SuperLink last
            self.stop(name, kill=kill)

    def _options(self, name: str) -> dict[str, Any]:
        """Return environment and session of a process of Flower's; Ctrl-C does not reach it."""
        home = self.logs / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        programs = str(Path(sys.executable).parent)  # Flower starts further programs by their names
        own = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}
        return {"env": {**os.environ, **own, "FLWR_HOME": str(home)}, "start_new_session": True}


def _to_words(config: dict[str, Any]) -> str:
    return " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def collect_models(folder: Path, run_folder: Path) -> None:
    """Copy the personal models from the sites' folders into the run folder, as after a simulation."""
    run = (run_folder / RUN_NAME).read_text(encoding="utf-8")
    (run_folder / "models").mkdir(exist_ok=True)
    for model in folder.glob(f"sites/client-*/state/{run}/models/client-*.safetensors"):
        shutil.copy(model, run_folder / "models")


def run_locally(
    folder: Path, clients: int, run_folder: Path, display: Display, interruption: Interruption, **config: Any
) -> None:
    """Start everything, run, show the server's lines, stop everything; leave the run folder of a simulation."""
    display.say(f"starting a SuperLink and {clients} SuperNodes on loopback; their logs: {folder / 'logs'}")
    federation, end = LocalFederation(folder, clients), beside(run_folder, END)
    interruption.at_once = lambda: federation.close(kill=True)
    end.unlink(missing_ok=True)
    with beside(run_folder, LOG).open("a+", encoding="utf-8", errors="replace") as log, closing(federation):
        federation.start_all()
        run, looked, has_ended = federation.run(**config), time.monotonic(), False
        while not has_ended:
            time.sleep(0.2)
            has_ended = end.exists()
            for line in log:
                display.say(line.rstrip("\n"))
            for last in read_rounds(run_folder)[-1:]:
                display.metric = Metric.of({"task": task_of_run(run_folder)})
                display.show(last["round"], last["score"]["mean"])
            if interruption.wanted() and not has_ended:
                federation.flwr("stop", str(run))
                raise Stopped
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                status = federation.flwr("list", "--run-id", str(run))["runs"][0]["status"]
                if status.startswith("finished") and not end.exists():  # its process was killed
                    raise PfedlaError(f"the run has ended ({status}); see {federation.logs / 'superlink.log'}")
    if problem := read_object(end).get("error"):
        raise PfedlaError(problem)
    collect_models(folder, run_folder)
