"""A whole deployment on this machine: SuperLink and SuperNodes as real processes on loopback, with TLS and keys."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.flower import FLOWER_SWITCHES
from pfedla.flower.layout import CONNECTION, write_flower_config
from pfedla.flower.server_app import FAILED, FINISHED, RUN_NAME, log_of
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Reporter

LOOPBACK = "127.0.0.1"
PATIENCE = 60.0  # seconds for a process to be ready
LOOK = 15.0  # seconds between two questions whether the run still goes on: each takes Flower a second


class LocalFederation:
    """While it is entered, the SuperLink and all SuperNodes run; then they are stopped, with all that they started."""

    def __init__(
        self, folder: Path, clients: int, *, lasting: bool = False, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        """`lasting`: the SuperLink still knows its nodes when it is started again; costs it twice the time."""
        self.folder, self.lasting, self.stopping = folder.resolve(), lasting, stopping
        self.clients = clients
        self.port = free_port()
        self.logs = self.folder / "logs"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        self.logs.mkdir(exist_ok=True)
        try:
            self.start_superlink()
            self._check_stopping()
            names = [f"client-{client}" for client in range(self.clients)]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self.register, [self.folder / "sites" / name / "client.key.pub" for name in names], names))
            for client in range(self.clients):
                self.start_supernode(client)
            self._check_stopping()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # The nodes first: they say goodbye to a SuperLink that is still there.
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            self.stop(name)

    def _check_stopping(self) -> None:
        if self.stopping():
            raise Stopped

    def kill(self) -> None:
        """At once: for somebody who does not want to wait."""
        for name in list(self.processes):
            self.stop(name, kill=True)

    def start_superlink(self) -> None:
        server, home = self.folder / "server", self._home("superlink")
        database = ["--database", str(self.logs / "state.db")] if self.lasting else []
        write_flower_config(home, f"{LOOPBACK}:{self.port}", server / "ca.crt")
        self._start("superlink", [
            "flower-superlink", "--host", LOOPBACK, "--port", str(self.port), *database, "--enable-supernode-auth",
            "--disable-runtime-dependency-installation", "--ssl-ca-certfile", str(server / "ca.crt"),
            "--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key"),
        ])  # fmt: skip
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1):
                return
            if self.processes["superlink"].poll() is not None or time.monotonic() > end:
                raise PfedlaError(f"the SuperLink does not start; see {self.logs / 'superlink.log'}")
            time.sleep(0.2)

    def start_supernode(self, client: int, key: Path | None = None, **config: Any) -> None:
        """`config` lies over what the node is given else: its number, a folder for its state, its data file if there is one."""
        site = self.folder / "sites" / f"client-{client}"
        own = {"data": str(site / "data.npz")} if (site / "data.npz").exists() else {}
        values = {"partition-id": client, "state": str(site / "state"), **own, **config}
        text = " ".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        self._start(f"client-{client}", [
            "flower-supernode", "--superlink", f"{LOOPBACK}:{self.port}", "--host", LOOPBACK, "--port", str(free_port()),
            "--root-certificates", str(site / "ca.crt"), "--auth-supernode-private-key", str(key or site / "client.key"),
            "--node-config", text,
        ])  # fmt: skip

    def register(self, public_key: Path, name: str) -> None:
        self.flwr("supernode", "register", str(public_key), CONNECTION, "--name", name)

    def run(self, app: str = "app", /, **config: Any) -> int:
        """Start a run of an app in this folder with these values of the run configuration; returns its number."""
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        told = self.flwr("run", str(self.folder / app), CONNECTION, *(("--run-config", text) if text else ()))
        return int(told["run-id"])

    def status(self, run: int) -> str:
        """pending, starting, running, or finished:completed, finished:failed, finished:stopped."""
        runs = self.flwr("list", CONNECTION, "--run-id", str(run))["runs"]
        return str(runs[0]["status"])

    def stop_run(self, run: int) -> None:
        self.flwr("stop", str(run), CONNECTION)

    def flwr(self, *words: str) -> dict[str, Any]:
        """What Flower's command line answers."""
        command = [str(_program("flwr")), *words, "--format", "json"]
        environment = self._environment("superlink")  # in a session of its own, which no Ctrl-C reaches
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, start_new_session=True)
        try:
            told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            told = {"success": False, "error-message": (done.stderr or done.stdout).strip()[-500:]}
        if not told.get("success"):
            raise PfedlaError(f"flwr {words[0]}: {told.get('error-message', 'failed')}")
        return told

    def lines(self, run: int, log: Path, start: int) -> Iterator[str]:
        """What the server says from byte `start` of its log on, until the run ends or is to be stopped."""
        looked = time.monotonic()
        with contextlib.ExitStack() as stack:
            file = None
            while True:
                if file is None and log.exists():
                    file = stack.enter_context(log.open(encoding="utf-8", errors="replace"))
                    file.seek(start)
                line = file.readline() if file else ""
                if line.endswith("\n"):
                    yield line.rstrip("\n")
                    if line.startswith((FINISHED, FAILED)):
                        return
                    continue
                if self.stopping():
                    self.stop_run(run)
                    raise Stopped
                if time.monotonic() - looked > LOOK:
                    looked = time.monotonic()
                    status = self.status(run)
                    if status.startswith("finished"):
                        if status != "finished:completed":
                            raise PfedlaError(f"the run has ended ({status}); see {self.logs / 'superlink.log'}")
                        return
                time.sleep(0.1)

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a process and all it has started: at once, or after it has had the time to end by itself."""
        process = self.processes.pop(name)
        family = [process.pid, *descendants(process.pid)]  # of one that is dead, nobody knows the children any more
        if not kill:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        for member in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, command: list[str]) -> None:
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(_program(command[0])), *command[1:]], env=self._environment(name), stdout=log, stderr=log,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def _environment(self, name: str) -> dict[str, str]:
        programs = str(Path(sys.executable).parent)
        path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"  # Flower starts further programs by their names
        return {**os.environ, **FLOWER_SWITCHES, "FLWR_HOME": str(self._home(name)), "PATH": path, "PYTHONUNBUFFERED": "1"}

    def _home(self, name: str) -> Path:
        home = self.folder / "logs" / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        return home


def _program(name: str) -> Path:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise PfedlaError(f"{name} is not installed beside this Python; pip install 'pfedla[flower]'")
    return path


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs. Flower starts them in sessions of their own, so that no signal reaches all."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = path.read_text()
            parents[int(path.parent.name)] = int(text[text.rindex(")") + 2 :].split()[1])
    found = [pid]
    for parent in found:  # grows while it is walked through
        found += [child for child, its in parents.items() if its == parent]
    return found[1:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def gather_models(folder: Path, run_folder: Path) -> None:
    """Copy the personal models from the sites' folders into the run folder, as a simulation leaves it."""
    run = (run_folder / RUN_NAME).read_text(encoding="utf-8")
    (run_folder / "models").mkdir(exist_ok=True)
    for model in sorted(folder.glob(f"sites/client-*/state/{run}/models/client-*.safetensors")):
        shutil.copy(model, run_folder / "models")


def run_locally(
    folder: Path, clients: int, run_folder: Path, reporter: Reporter, interruption: Interruption, **config: Any
) -> None:
    """Start everything, run, relay what the server says, stop everything; leaves the run folder as a simulation does."""
    log = log_of(run_folder)
    start = log.stat().st_size if log.exists() else 0
    reporter.say(f"starting a SuperLink and {clients} SuperNodes on loopback; their logs: {folder / 'logs'}")
    line = ""
    federation = LocalFederation(folder, clients, stopping=interruption.wanted)
    interruption.at_once = federation.kill
    with federation:
        run = federation.run(**config)
        for line in federation.lines(run, log, start):
            reporter.relay(line)
    if line.startswith(FAILED) or not (run_folder / "result.json").exists():
        raise PfedlaError(line.removeprefix(FAILED) or f"the run left no result; see {folder / 'logs'}")
    gather_models(folder, run_folder)
