"""One page that shows runs: a file that opens offline and can be sent by mail, or served while the runs go on."""

import base64
import html
import json
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, refuse_links, write_text
from pfedla.report import reading
from pfedla.report.grouping import group_runs
from pfedla.report.reading import MIB, SPREAD, Array, Metric, Values, honest_part
from pfedla.report.tables import warnings, where

ASSETS = ("page.html", "page.css", "charts.js", "alpha.js", "page.js")
PAGE_WEIGHTS = 1_400_000  # numbers of alpha on a page, two bytes each: under 4 MB as text
PAGE_LINES = 2_000  # rounds of all curves
PAGE_CELLS = 200_000  # clients x classes of all federations
LEVELS = 65_535  # a weight is stored as a multiple of 1/65,535
OPTIMAL, CLUSTERED = 300, 2_000  # most clients for optimal leaf order, and for clustering: more take minutes
LOOPBACK = ("127.0.0.1", "localhost", "::1")
WATCHED = ("rounds.jsonl", "alpha.safetensors", "result.json")
SERVED = {"/": "text/html; charset=utf-8", "/data.json": "application/json"}
HEADERS = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
HEADERS["Content-Security-Policy"] = "frame-ancestors 'none'"  # no page elsewhere may show it; a page cannot say so
ATTACKED = "Some clients attack on purpose. Scores are of the honest ones."


def write_page(runs: Sequence[Path], path: Path) -> Path:
    page = render_page(collect_page_data(runs))  # first: a folder that does not exist is refused, not made
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return path


def render_page(data: Values) -> str:
    """Return the whole page. With data["live"] it asks the server it came from for new data."""
    title = data["runs"][0]["name"] if len(data["runs"]) == 1 else f"{len(data['runs'])} runs"
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    text = text.replace("<", "\\u003c")  # no name of a client can end the script element
    assets = files("pfedla.report").joinpath("assets")
    page, style, *scripts = (assets.joinpath(name).read_text(encoding="utf-8") for name in ASSETS)
    parts = {"title": html.escape(f"{title} – pfedla"), "version": version("pfedla"), "style": style, "data": text}
    parts |= {"script": "\n".join(scripts), "connect": "'self'" if data.get("live") else "'none'"}
    return Template(page).substitute(parts)


def collect_page_data(runs: Sequence[Path]) -> Values:
    """Return everything that the page's script draws."""
    for run in runs:
        refuse_links(run)
    experiments = [reading.read_experiment(run) for run in runs]
    shown = []
    for run, experiment in zip(runs, experiments, strict=True):
        try:
            shown.append(_collect_run(run, experiment, len(runs)))
        except PfedlaError:
            raise
        except (KeyError, TypeError, IndexError, ValueError, OSError) as error:
            raise PfedlaError(f"{run} is not a run folder that can be shown: {error!r:.200}") from None
    for one, name in zip(shown, _name_runs(shown), strict=True):
        one["name"] = name
    flat = [reading.flatten(one) for one in experiments]
    rows = []
    for key in dict.fromkeys(key for one in flat for key in one):
        words = [json.dumps(one[key], default=str, ensure_ascii=False) if key in one else "" for one in flat]
        rows += [[key, *words]] if len(set(words)) > 1 else []
    return {"runs": shown, "differs": rows, "tables": _collect_tables(runs) if len(runs) > 1 else []}


def _collect_tables(runs: Sequence[Path]) -> list[Values]:
    """Return the caption of each group of runs, and their table where several methods have several seeds."""
    found = []
    for table in group_runs(runs):
        is_shown = table.has_seeds and len(table.rows) > 1
        lines = table.tabulate_statistics() if is_shown else []
        found.append({"caption": table.caption(), "lines": lines, "notes": table.notes()})
    return found


def _name_runs(runs: Sequence[Values]) -> list[str]:
    """Name runs as briefly as tells them apart: by algorithm, algorithm and seed, folder or path."""
    for words in (("algorithm",), ("algorithm", "seed"), ("folder",), ("path",)):
        names = [", seed ".join(str(run[word]) for word in words) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{position + 1}: {run['folder']}" for position, run in enumerate(runs)]


def _collect_run(run: Path, experiment: Values, num_runs: int) -> Values:
    federation, lines = reading.read_federation(run), reading.read_rounds(run)
    result = reading.read_result(run / "result.json") if (run / "result.json").exists() else None
    last: Values = result or (lines[-1] if lines else {})
    setting = {"subset": "", "leaked_test_share": 0, "overlapping": False} | experiment["data"] | federation
    names, counts = federation["clients"], np.array(federation["train"])  # [clients, classes]
    known = counts if counts.ndim == 2 else None  # a server may not know them
    drawn = None  # unknown, or too large to draw
    if known is not None and known.size <= PAGE_CELLS // num_runs:
        drawn = {key: federation[key] for key in ("clients", "classes", "train")} | {"order": order_by_labels(known)}
    found: Values = {"folder": run.resolve().name, "path": os.fspath(run), "algorithm": experiment["algorithm"]["name"]}
    found |= {"seed": experiment["seed"], "rounds": experiment["rounds"], "where": where(setting)}
    metric = Metric.of({"task": reading.task_of_run(run)})
    found["metric"] = _describe_metric(metric) | {
        "short": metric.label,
        "axis": metric.axis,
        "percentile": metric.percentile,
    }
    found["curve"] = [_summarise(line) for line in _thin(lines, PAGE_LINES // num_runs)]
    # A server may not know the fingerprint; then the federation equals no other.
    found["fingerprint"] = federation.get("fingerprint") or f"unknown: {run}"
    found |= {"names": names, "federation": drawn}
    found["alpha"] = _collect_alpha(run, names, known, PAGE_WEIGHTS // num_runs)
    found |= {"failures": last.get("failures", {}), "experiment": (run / "experiment.toml").read_text(encoding="utf-8")}
    machine = read_object(run / "environment.json") if (run / "environment.json").exists() else {}
    found["environment"] = {key: one if isinstance(one, str) else json.dumps(one) for key, one in machine.items()}
    found |= {"finished": result is not None, "final": _summarise(last) if last else None}
    if result:
        return found | _collect_result(result, names, known)
    phases = {phase: sum(line["seconds"].get(phase, 0) for line in lines) for phase in last.get("seconds", {})}
    found |= {"played": last.get("round", 0), "warnings": [ATTACKED] * ("honest" in last), "phases": phases}
    return found | {"clients": [], "unseen": None, "refused": None, "metrics": [], "baseline": None}


def _describe_metric(metric: Metric) -> Values:
    return {"name": metric.name, "label": metric.description, "percent": metric.percent, "sign": metric.sign}


def _collect_result(result: Values, names: list[str], counts: Array | None) -> Values:
    """Return what only a finished run has."""
    clients, attackers = [], result.get("attackers", [])
    scores = (result[key]["per_client"] for key in ("score", "score_after_training"))
    for client, (name, score, after) in enumerate(zip(names, *scores, strict=True)):
        examples, attacks = None if counts is None else int(counts[client].sum()), client in attackers
        clients.append({"name": name, "score": score, "after": after, "examples": examples, "attacks": attacks})
    unseen = result.get("unseen")
    if unseen:
        means = {"before": "score_before", "joined": "score", "alone": "score_alone"}
        unseen = {"clients": len(unseen["clients"])} | {to: unseen[key]["mean"] for to, key in means.items()}
    if baseline := result["baseline"]:
        baseline = {"name": baseline["name"]} | {key: baseline["score"][key] for key in SPREAD}
    metrics = [_describe_metric(Metric.named(name)) | spread for name, spread in result["metrics"].items()]
    found = {"played": result["rounds"], "warnings": warnings([result]), "phases": result["seconds"]["phases"]}
    found |= {"metrics": metrics, "baseline": baseline}
    return found | {"clients": clients, "unseen": unseen, "refused": result["refused_uploads"]}


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spread, always with the last."""
    spread = np.linspace(len(items) - 1, 0, min(most, len(items))).round().astype(int)
    return [items[position] for position in np.unique(spread)]


def _summarise(found: Values) -> Values:
    """Return what curves and the summary show of a line of rounds.jsonl, or of a result."""
    honest, traffic = honest_part(found), found.get("traffic", found)
    summary = {key: honest["score"][key] for key in SPREAD}
    summary |= {"down": traffic["down_bytes"] / MIB, "up": traffic["up_bytes"] / MIB}
    if "traffic" in found:
        return summary | {"after": honest["score_after_training"]["mean"], "seconds": found["seconds"]["total"]}
    # After training a line has the mean of all clients only: where some attack, the honest part has none.
    summary |= {"after": honest.get("score_after_training"), "seconds": None}
    return summary | {key: found[key] for key in ("round", "loss", "training_loss", "retained")}


def _collect_alpha(run: Path, names: list[str], counts: Array | None, weights: int) -> Values | None:
    """Return the snapshots that fit on the page, two bytes a weight, and the self-weights of all."""
    if (alpha := reading.read_alpha(run)) is None:
        return None
    over_clients = {"mean": alpha.own.mean(-1), "low": alpha.own.min(-1), "high": alpha.own.max(-1)}
    kept = _thin(range(len(alpha.rounds)), weights // alpha.values[0].size)
    orders = {"as numbered": list(range(alpha.values.shape[1]))}
    if kept and counts is not None:
        orders["by label distribution"] = order_by_labels(counts)
    if kept:
        orders["by weights"] = order_by_weights(alpha.values[-1])
    levels = np.rint(np.clip(alpha.values[kept], 0, 1) * LEVELS).astype("<u2")
    found = {"layers": alpha.layers, "snapshots": len(alpha.rounds), "names": names, "orders": orders}
    found["self"] = {"rounds": alpha.rounds} | {name: one.round(4).T.tolist() for name, one in over_clients.items()}
    found["rounds"] = [alpha.rounds[position] for position in kept]
    return found | {"values": base64.b64encode(levels.tobytes()).decode("ascii")}


def order_by_labels(counts: Array) -> list[int]:
    """Order clients so that those with similar shares of the classes are neighbours; counts [clients, classes]."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if len(counts) > CLUSTERED:
        return [int(client) for client in np.lexsort((-shares.max(1), shares.argmax(1)))]
    return _order_leaves(pdist(shares, "cityblock") / 2, len(counts))


def order_by_weights(alpha: Array) -> list[int]:
    """Order clients so that those which borrow from each other are neighbours; alpha [clients, layers, clients]."""
    taken = alpha.mean(1, dtype=np.float64)
    ties = squareform((taken + taken.T) / 2, checks=False)  # of every pair
    return _order_leaves(ties.max(initial=0) - ties, len(alpha))


def _order_leaves(distances: Array, clients: int) -> list[int]:
    if clients < 3:
        return list(range(clients))
    return [int(client) for client in leaves_list(linkage(distances, "average", optimal_ordering=clients <= OPTIMAL))]


class Watcher(ThreadingHTTPServer):
    """A server of two addresses: the page and its data."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Path], host: str, port: int) -> None:
        self.runs, self._lock, self._data = runs, Lock(), {"live": ""}
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
            stamps = []
            for path in (run / name for run in self.runs for name in WATCHED):
                with suppress(OSError):  # not there yet, or removed: a run that is resumed removes its result
                    stamps.append((path, path.stat().st_mtime_ns, path.stat().st_size))
            tag = f'"{hash(tuple(stamps)):x}"'
            if tag != self._data["live"]:
                self._data = collect_page_data(self.runs) | {"live": tag}
            return self._data


class _Handler(BaseHTTPRequestHandler):
    server: Watcher
    server_version, sys_version = "pfedla", ""
    timeout = 30

    def do_GET(self) -> None:
        if not self._is_local_name():
            return self.send_error(403, "this page is served under local names only")
        if self.path not in SERVED:
            return self.send_error(404)
        try:
            data = self.server.data()
        except PfedlaError as error:  # the folder was moved or damaged
            return self.send_error(503, str(error).splitlines()[0].encode("ascii", "replace").decode())
        headers, body = HEADERS | {"ETag": data["live"]}, b""
        if self.headers.get("If-None-Match") != data["live"]:
            body = (render_page(data) if self.path == "/" else json.dumps(data, allow_nan=False)).encode()
            headers |= {"Content-Type": SERVED[self.path], "Content-Length": str(len(body))}
        self.send_response(200 if body else 304)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        return None

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
