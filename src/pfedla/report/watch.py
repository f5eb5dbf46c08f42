"""Serve the page of runs while they run. It reads run folders and nothing else."""

import hashlib
import json
import socket
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

from pfedla.core.errors import PfedlaError
from pfedla.report.page import collect_page_data, render_page

LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCHED = ("rounds.jsonl", "alpha.safetensors", "result.json")


class Watcher(ThreadingHTTPServer):
    """A server of two addresses: the page and its data."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], host: str, port: int) -> None:
        self.runs = runs
        self._lock, self._data = Lock(), {"live": ""}
        self.data()  # refuses what is not a run before the server starts
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PfedlaError(f"cannot serve at {host}:{port}: {error}. Choose another --port") from None

    def data(self) -> dict[str, Any]:
        """Return the page's data, read anew if a file of the runs has changed; "live" is their ETag."""
        with self._lock:
            stamps = repr([_stamp(run / name) for run in self.runs for name in WATCHED])
            tag = f'"{hashlib.sha256(stamps.encode()).hexdigest()[:32]}"'
            if tag != self._data["live"]:
                self._data = collect_page_data(self.runs) | {"live": tag}
            return self._data


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # not there yet, or removed: a run that is resumed removes its result
        return None
    return found.st_mtime_ns, found.st_size


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "pfedla", ""
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_local_name():
            self.send_error(403, "this page is served under local names only")
        elif self.path not in ("/", "/data.json"):
            self.send_error(404)
        else:
            try:
                self._answer(self.server.data())
            except PfedlaError as error:  # the folder was moved or damaged
                self.send_error(503, str(error).splitlines()[0].encode("ascii", "replace").decode())

    def _answer(self, data: dict[str, Any]) -> None:
        is_known, body = self.headers.get("If-None-Match") == data["live"], b""
        headers = {"ETag": data["live"], "Cache-Control": "no-cache"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        if not is_known:
            body = (render_page(data) if self.path == "/" else json.dumps(data, allow_nan=False)).encode()
            kind = "text/html; charset=utf-8" if self.path == "/" else "application/json"
            headers |= {"Content-Type": kind, "Content-Length": str(len(body))}
        self.send_response(304 if is_known else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _is_local_name(self) -> bool:
        """Refuse foreign host names: a page elsewhere could point its name here and read the runs."""
        if self.server.server_address[0] not in LOOPBACK:
            return True  # --host serves it to a network on purpose
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        except ValueError:
            return False

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
