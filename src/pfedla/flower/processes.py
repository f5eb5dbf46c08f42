"""A deployment on this machine: SuperLink and SuperNodes as processes on loopback, with TLS and keys."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import psutil  # type: ignore[import-untyped]

from pfedla.core.errors import PfedlaError, Stopped
from pfedla.flower import FLOWER_SWITCHES
from pfedla.flower.layout import CONNECTION, write_flower_config
from pfedla.flower.server_app import END, LOG, RUN_NAME, beside
from pfedla.report.reading import read_rounds
from pfedla.runs.interruption import Interruption
from pfedla.runs.progress import Display

LOOPBACK = "127.0.0.1"
PATIENCE = 60.0  # seconds for a process to be ready
LOOK = 15.0  # seconds between two questions whether the run is alive: each takes Flower a second


class LocalFederation:
    """Runs the SuperLink and all SuperNodes while it is entered; then stops them and all they started."""

    def __init__(self, folder: Path, clients: int, *, stopping: Callable[[], bool] = lambda: False) -> None:
        self.folder, self.clients, self.stopping = folder.resolve(), clients, stopping
        self.lasting = False  # whether the SuperLink still knows its nodes after a restart, at twice the cost
        self.port = find_free_port()
        self.logs = self.folder / "logs"
        self.processes: dict[str, psutil.Popen] = {}

    def __enter__(self) -> Self:
        self.logs.mkdir(exist_ok=True)
        try:
            self.start_superlink()
            clients = [] if self.stopping() else range(self.clients)
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self.register_client, clients))
            for client in clients:
                self.start_supernode(client)
        except BaseException:
            self.stop_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def start_superlink(self) -> None:
        server = self.folder / "server"
        write_flower_config(self._home("superlink"), f"{LOOPBACK}:{self.port}", server / "ca.crt")
        database = ["--database", str(self.logs / "state.db")] if self.lasting else []
        words = f"--host {LOOPBACK} --port {self.port} --enable-supernode-auth".split()
        words += ["--disable-runtime-dependency-installation", "--ssl-ca-certfile", str(server / "ca.crt")]
        words += ["--ssl-certfile", str(server / "server.crt"), "--ssl-keyfile", str(server / "server.key")]
        self.start("superlink", "flower-superlink", *words, *database)
        end = time.monotonic() + PATIENCE
        while True:
            with contextlib.suppress(OSError), socket.create_connection((LOOPBACK, self.port), timeout=1):
                return
            if self.processes["superlink"].poll() is not None or time.monotonic() > end:
                raise PfedlaError(f"the SuperLink does not start; see {self.logs / 'superlink.log'}")
            time.sleep(0.2)

    def start_supernode(self, client: int, **config: Any) -> None:
        """`config` overrides the node's configuration: its number, its state folder, its data file if any."""
        site = self.folder / "sites" / f"client-{client}"
        own = {"data": str(site / "data.npz")} if (site / "data.npz").exists() else {}
        config = {"partition-id": client, "state": str(site / "state"), **own, **config}
        key = ("--auth-supernode-private-key", str(site / "client.key"))
        self.start_node(f"client-{client}", site / "ca.crt", *key, "--node-config", _to_words(config))

    def start_node(self, name: str, ca: Path, *words: str) -> None:
        address = f"--superlink {LOOPBACK}:{self.port} --host {LOOPBACK} --port {find_free_port()}".split()
        self.start(name, "flower-supernode", *address, "--root-certificates", str(ca), *words)

    def start(self, name: str, program: str, *words: str) -> None:
        command = [str(_find_program(program)), *words]
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with (self.logs / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(command, stdout=log, **streams, **self._options(name))

    def register_client(self, client: int) -> None:
        self.register(self.folder / "sites" / f"client-{client}" / "client.key.pub", f"client-{client}")

    def register(self, public_key: Path, name: str) -> None:
        self.flwr("supernode", "register", str(public_key), CONNECTION, "--name", name)

    def run(self, app: str = "app", /, **config: Any) -> int:
        """Start a run of an app in this folder with these values of the run configuration; return its id."""
        words = ("--run-config", _to_words(config)) if config else ()
        return int(self.flwr("run", str(self.folder / app), CONNECTION, *words)["run-id"])

    def stop_run(self, run: int) -> None:
        self.flwr("stop", str(run), CONNECTION)

    def flwr(self, *words: str) -> dict[str, Any]:
        """Return the answer of Flower's command line."""
        command = [str(_find_program("flwr")), *words, "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, **self._options("superlink"))
        try:
            told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            told = {"success": False, "error-message": (done.stderr or done.stdout).strip()[-500:]}
        if not told.get("success"):
            raise PfedlaError(f"flwr {words[0]}: {told.get('error-message', 'failed')}")
        return told

    def stop(self, name: str, *, kill: bool = False) -> None:
        """End a process and everything it has started: at once, or after time to end by itself.

        Flower starts its helpers in sessions of their own, so no signal reaches all of them.
        """
        process = self.processes.pop(name)
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [*process.children(recursive=True), process]  # a dead process has no children any more
            if not kill:
                process.terminate()
                with contextlib.suppress(psutil.TimeoutExpired):
                    process.wait(10)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()  # psutil compares creation times: never a later process of this id
        process.wait()

    def stop_all(self, *, kill: bool = False) -> None:
        for name in sorted(self.processes, key=lambda name: name == "superlink"):  # the SuperLink last
            self.stop(name, kill=kill)

    def _options(self, name: str) -> dict[str, Any]:
        """Return environment and session of a process of Flower's; Ctrl-C does not reach it."""
        programs = str(Path(sys.executable).parent)  # Flower starts further programs by their names
        own = {"PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **FLOWER_SWITCHES, **own, "FLWR_HOME": str(self._home(name))}
        return {"env": environment, "start_new_session": True}

    def _home(self, name: str) -> Path:
        home = self.logs / "flower" / name
        home.mkdir(parents=True, exist_ok=True)
        return home


def _find_program(name: str) -> Path:
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise PfedlaError(f"{name} is not installed beside this Python; pip install 'pfedla[flower]'")
    return path


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
    for model in sorted(folder.glob(f"sites/client-*/state/{run}/models/client-*.safetensors")):
        shutil.copy(model, run_folder / "models")


def run_locally(
    folder: Path, clients: int, run_folder: Path, display: Display, interruption: Interruption, **config: Any
) -> None:
    """Start everything, run, show progress, stop everything; leave the run folder as after a simulation."""
    display.say(f"starting a SuperLink and {clients} SuperNodes on loopback; their logs: {folder / 'logs'}")
    federation = LocalFederation(folder, clients, stopping=interruption.wanted)
    interruption.at_once = lambda: federation.stop_all(kill=True)
    beside(run_folder, END).unlink(missing_ok=True)
    beside(run_folder, LOG).touch()
    with beside(run_folder, LOG).open(encoding="utf-8", errors="replace") as log, federation:
        if interruption.wanted():
            raise Stopped
        log.seek(0, os.SEEK_END)
        follow(federation, federation.run(**config), run_folder, log, display)
    collect_models(folder, run_folder)


def follow(federation: LocalFederation, run: int, run_folder: Path, log: IO[str], display: Display) -> None:
    """Wait for the end of the run; show the server's lines, and the last evaluated round of rounds.jsonl."""
    end, looked = beside(run_folder, END), time.monotonic()
    while True:
        has_ended = end.exists()
        for line in log:
            display.say(line.rstrip("\n"))
        for last in read_rounds(run_folder)[-1:]:
            mean = last["accuracy"]["mean"]
            display.show(last["round"], "–" if mean is None else f"{100 * mean:.1f} %")
        if has_ended:
            break
        if federation.stopping():
            federation.stop_run(run)
            raise Stopped
        if time.monotonic() - looked > LOOK:
            looked = time.monotonic()
            status = federation.flwr("list", CONNECTION, "--run-id", str(run))["runs"][0]["status"]
            if status.startswith("finished") and not end.exists():  # its process was killed
                raise PfedlaError(f"the run has ended ({status}); see {federation.logs / 'superlink.log'}")
        time.sleep(0.2)
    if problem := json.loads(end.read_text(encoding="utf-8"))["error"]:
        raise PfedlaError(problem)
