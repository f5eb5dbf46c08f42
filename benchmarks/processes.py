"""Contenders as processes: each runs a round when told to; its memory and the load of others are watched."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fixed_work import Work

MIB = 2**20
PROC = Path("/proc")
QUIET = {  # Flower and Ray neither call home nor install anything; Ray stays on this machine
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


class Contender:
    """A long-lived process that plays rounds; its own settings, allocator and memory are nobody else's."""

    def __init__(self, name: str, data: Path, work: Work, threads: int = 0) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        arguments = [name, str(data), json.dumps(asdict(work)), str(threads)]
        program = [sys.executable, str(Path(__file__).with_name("contenders.py")), *arguments]
        self._process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=os.environ | QUIET
        )

    def wait_until_ready(self) -> None:
        self._answer()

    def play(self) -> dict[str, Any]:
        """Run a round; return its seconds, its CPU seconds, and the share of the machine that others took."""
        assert self._process.stdin
        busy, own, idle = machine_seconds(), self._cpu_seconds(), None
        self._process.stdin.write("play\n")
        self._process.stdin.flush()
        answer = self._answer()
        if busy is not None and own is not None and (now := machine_seconds()) is not None:
            idle = now[1] - busy[1]
            spent = (self._cpu_seconds() or 0.0) - own
            busy_seconds = now[0] - busy[0]
            answer["cpu_seconds"] = spent
            answer["others_share"] = max(0.0, busy_seconds - spent) / max(busy_seconds + idle, 1e-9)
        return answer

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}:\n{self._log.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_seconds(self) -> float | None:
        stats = [stat for pid in tree(self._process.pid) if (stat := stat_of(pid))]
        # Fields 14 to 17 of proc(5): its own time, and that of its children that ended.
        return sum(sum(map(int, stat[11:15])) for stat in stats) / os.sysconf("SC_CLK_TCK") if stats else None

    def peak_mib(self) -> float | None:
        """Of all its processes together. What is mapped from files is counted once: they share their libraries."""
        peaks, files = [], []
        for pid in tree(self._process.pid):
            try:
                lines = (PROC / str(pid) / "status").read_text().splitlines()
            except OSError:
                continue
            kib = {
                key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines) if "kB" in rest
            }
            if "VmHWM" in kib:
                peaks.append(kib["VmHWM"] - kib["RssFile"])
                files.append(kib["RssFile"])
        return (sum(peaks) + max(files)) * 1024 / MIB if peaks else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60 if kind is None else 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout
        self._process.stdout.close()
        self._log.close()


def machine_seconds() -> tuple[float, float] | None:
    """CPU seconds of the whole machine since its start: busy, idle. None where there is no /proc."""
    try:
        fields = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    idle = fields[3] + fields[4]
    ticks = os.sysconf("SC_CLK_TCK")
    return (sum(fields) - idle) / ticks, idle / ticks


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the third on: the second is a name and may hold anything."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def tree(root: int) -> Iterator[int]:
    """A process and all its descendants."""
    parents = {
        int(path.name): int(stat[1]) for path in PROC.glob("[0-9]*") if (stat := stat_of(int(path.name))) is not None
    }
    found = [root]
    for pid in found:
        yield pid
        found += [child for child, parent in parents.items() if parent == pid]
