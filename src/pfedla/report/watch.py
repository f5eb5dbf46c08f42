"""The page of runs that go on: served to this machine, refreshed as rounds are played. It reads, and only run folders."""

import gzip
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
from pfedla.report.page import page
from pfedla.report.page_data import page_data, signature

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Watcher(ThreadingHTTPServer):
    """Two addresses: the page, and its data. Everything else is not found."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], host: str, port: int) -> None:
        self.runs = runs
        self._lock = Lock()  # one reads at a time
        self._known: tuple[str, dict[str, Any]] = ("", {})  # what was read last, and when it is still that
        self.data()  # refuses what is no run, before anybody looks
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PfedlaError(f"{host}:{port} cannot be served: {error}; choose another with --port") from None

    def data(self) -> dict[str, Any]:
        with self._lock:
            now = signature(self.runs)
            if now != self._known[0]:
                data = page_data(self.runs)
                data["live"] = f'"{hashlib.sha256(now.encode()).hexdigest()[:32]}"'
                self._known = (now, data)
            return self._known[1]


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "pfedla", ""
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_local_name():
            self.send_error(403, "this page is served under the machine's own names only")
            return
        if self.path not in ("/", "/data.json"):
            self.send_error(404)
            return
        try:
            data = self.server.data()
        except PfedlaError as error:  # the folder was moved away while it was watched
            self.send_error(503, str(error).splitlines()[0].encode("ascii", "replace").decode())
            return
        if self.headers.get("If-None-Match") == data["live"]:
            self._answer(304, "application/json", b"", data["live"])
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", page(data).encode(), data["live"])
        else:
            self._answer(200, "application/json", json.dumps(data, allow_nan=False).encode(), data["live"])

    def _is_local_name(self) -> bool:
        """A page elsewhere could point a name of its own at this machine, and read the runs under that name."""
        if self.server.server_address[0] not in LOOPBACK:
            return True  # whoever serves it to the network has decided so
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        except ValueError:
            return False

    def _answer(self, status: int, kind: str, body: bytes, tag: str) -> None:
        self.send_response(status)
        if status == 200:
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                body = gzip.compress(body, 1)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody reads a line for every question."""
