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
from pfedla.report.page import render_page
from pfedla.report.page_data import collect_page_data, sign

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Watcher(ThreadingHTTPServer):
    """A server of two addresses: the page and its data."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], host: str, port: int) -> None:
        self.runs = runs
        self._lock = Lock()
        self._known: tuple[str, dict[str, Any]] = ("", {})  # the last signature of the runs, and their data
        self.data()  # refuses what is not a run before the server starts
        if ":" in host:
            self.address_family = socket.AF_INET6
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise PfedlaError(f"cannot serve at {host}:{port}: {error}. Choose another --port") from None

    def data(self) -> dict[str, Any]:
        with self._lock:
            now = sign(self.runs)
            if now != self._known[0]:
                data = collect_page_data(self.runs)
                data["live"] = f'"{hashlib.sha256(now.encode()).hexdigest()[:32]}"'
                self._known = (now, data)
            return self._known[1]


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "pfedla", ""
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_local_name():
            self.send_error(403, "this page is served under local names only")
            return
        if self.path not in ("/", "/data.json"):
            self.send_error(404)
            return
        try:
            data = self.server.data()
        except PfedlaError as error:  # the folder was moved or damaged
            self.send_error(503, str(error).splitlines()[0].encode("ascii", "replace").decode())
            return
        if self.headers.get("If-None-Match") == data["live"]:
            self._answer(304, "application/json", b"", data["live"])
        elif self.path == "/":
            self._answer(200, "text/html; charset=utf-8", render_page(data).encode(), data["live"])
        else:
            self._answer(200, "application/json", json.dumps(data, allow_nan=False).encode(), data["live"])

    def _is_local_name(self) -> bool:
        """Refuse foreign host names: a page elsewhere could point its name here and read the runs."""
        if self.server.server_address[0] not in LOOPBACK:
            return True  # --host serves it to a network on purpose
        try:
            return urlsplit(f"//{self.headers.get('Host', '')}").hostname in LOOPBACK
        except ValueError:
            return False

    def _answer(self, status: int, kind: str, body: bytes, tag: str) -> None:
        self.send_response(status)
        if status == 200:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
