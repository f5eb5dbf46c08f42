"""One page that shows runs: a single file that opens offline, small enough to be sent by mail."""

import base64
import html
import json
import os
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import pdist, squareform

from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object
from pfedla.report.reading import (
    MIB,
    SPREAD,
    Array,
    Values,
    algorithm_name,
    honest_part,
    read_alpha,
    read_experiment,
    read_federation,
    read_result,
    read_rounds,
)
from pfedla.report.tables import warnings, where

SCRIPTS = ("charts.js", "alpha.js", "page.js")
PAGE_WEIGHTS = 1_400_000  # numbers of alpha on a page, two bytes each: under 4 MB as text
PAGE_LINES = 2_000  # rounds of all curves
PAGE_CELLS = 200_000  # clients x classes of all federations
LEVELS = 65_535  # a weight is stored as a multiple of 1/65,535
OPTIMAL, CLUSTERED = 300, 2_000  # most clients for optimal leaf order, and for clustering: more take minutes
ATTACKED = "Some clients attack on purpose. Accuracies are of the honest ones."


def write_page(runs: Sequence[Path], path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_page(collect_page_data(runs)), encoding="utf-8")
    return path


def render_page(data: Values) -> str:
    """Return the whole page. With data["live"] it asks the server it came from for new data."""
    title = data["runs"][0]["name"] if len(data["runs"]) == 1 else f"{len(data['runs'])} runs"
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    assets = files("pfedla.report").joinpath("assets")
    return Template(assets.joinpath("page.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(f"{title} – pfedla"),
        version=version("pfedla"),
        connect="'self'" if data.get("live") else "'none'",
        style=assets.joinpath("page.css").read_text(encoding="utf-8"),
        script="\n".join(assets.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS),
        data=text.replace("<", "\\u003c"),  # no name of a client can end the script element
    )


def collect_page_data(runs: Sequence[Path]) -> Values:
    """Return everything that the page's script draws."""
    experiments = [read_experiment(run) for run in runs]
    shown = []
    for run, experiment in zip(runs, experiments, strict=True):
        try:
            shown.append(_collect_run(run, experiment, len(runs)))
        except (KeyError, TypeError, IndexError, ValueError, OSError) as error:
            if isinstance(error, PfedlaError):
                raise
            raise PfedlaError(f"{run} is not a run folder that can be shown: {error!r:.200}") from None
    for one, name in zip(shown, _name_runs(shown), strict=True):
        one["name"] = name
    flat = [_flatten(experiment) for experiment in experiments]
    rows = [[key, *(one.get(key, "") for one in flat)] for key in dict.fromkeys(key for one in flat for key in one)]
    return {"runs": shown, "differs": [row for row in rows if len(set(row[1:])) > 1]}


def _flatten(table: Values, prefix: str = "") -> dict[str, str]:
    """Return the values as text by section.key."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        shown = {f"{prefix}{key}": json.dumps(value, default=str, ensure_ascii=False)}
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else shown
    return flat


def _name_runs(runs: Sequence[Values]) -> list[str]:
    """Name runs as briefly as tells them apart: by algorithm, algorithm and seed, folder or path."""
    for words in (("algorithm",), ("algorithm", "seed"), ("folder",), ("path",)):
        names = [", seed ".join(str(run[word]) for word in words) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{position + 1}: {run['folder']}" for position, run in enumerate(runs)]


def _collect_run(run: Path, experiment: Values, num_runs: int) -> Values:
    federation, lines = read_federation(run), read_rounds(run)
    result = read_result(run / "result.json") if (run / "result.json").exists() else None
    last: Values = result or (lines[-1] if lines else {})
    setting = {"subset": "", "leaked_test_share": 0, "overlapping": False} | experiment["data"] | federation
    counts = np.array(federation["train"])
    known = counts if counts.ndim == 2 else None  # [clients, classes]
    curve = [_summarise_round(line) for line in _thin(lines, PAGE_LINES // num_runs)]
    environment = run / "environment.json"
    return {
        "folder": run.resolve().name,
        "path": os.fspath(run),
        "algorithm": algorithm_name(experiment),
        "seed": experiment["seed"],
        "rounds": experiment["rounds"],
        "played": result["rounds"] if result else last.get("round", 0),
        "finished": result is not None,
        "where": where(setting),
        "warnings": warnings([result]) if result else [ATTACKED] * ("honest" in last),
        "final": _summarise_result(result) if result else (curve[-1] if curve else None),
        "curve": curve,
        "clients": _list_clients(result, federation, known) if result else [],
        "unseen": _summarise_unseen(result["unseen"]) if result and "unseen" in result else None,
        # A server may not know the fingerprint; then the federation equals no other.
        "fingerprint": federation.get("fingerprint") or f"unknown: {run}",
        "names": federation["clients"],
        "federation": _collect_federation(federation, known, PAGE_CELLS // num_runs),
        "alpha": _collect_alpha(run, federation, known, PAGE_WEIGHTS // num_runs),
        "failures": last.get("failures", {}),
        "refused": result["refused_uploads"] if result else None,
        "phases": result["seconds"]["phases"] if result else _sum_phases(lines),
        "experiment": (run / "experiment.toml").read_text(encoding="utf-8"),
        "environment": read_object(environment) if environment.exists() else {},
    }


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spread, always with the last."""
    spread = np.linspace(len(items) - 1, 0, min(most, len(items))).round().astype(int)
    return [items[position] for position in np.unique(spread)]


def _summarise_result(result: Values) -> Values:
    found = honest_part(result)
    after = found["accuracy_after_training"]["mean"]
    return _headline(found, result["traffic"]) | {"after": after, "seconds": result["seconds"]["total"]}


def _summarise_round(line: Values) -> Values:
    # After training a line has the mean of all clients only; it is not comparable where some of them attack.
    after = None if "honest" in line else line["accuracy_after_training"]
    same = {key: line[key] for key in ("round", "loss", "training_loss", "retained")}
    return _headline(honest_part(line), line) | same | {"after": after, "seconds": None}


def _headline(found: Values, traffic: Values) -> Values:
    spread = {key: found["accuracy"][key] for key in SPREAD}
    return {**spread, "down": traffic["down_bytes"] / MIB, "up": traffic["up_bytes"] / MIB}


def _sum_phases(lines: list[Values]) -> dict[str, float]:
    """Return the seconds by phase, over the rounds that have a line."""
    phases = dict.fromkeys(phase for line in lines for phase in line["seconds"])
    return {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) for phase in phases}


def _list_clients(result: Values, federation: Values, counts: Array | None) -> list[Values]:
    """Return every client's accuracies."""
    return [
        {
            "name": name,
            "accuracy": result["accuracy"]["per_client"][client],
            "after": result["accuracy_after_training"]["per_client"][client],
            "examples": None if counts is None else int(counts[client].sum()),
            "attacks": client in result.get("attackers", []),
        }
        for client, name in enumerate(federation["clients"])
    ]


def _summarise_unseen(unseen: Values) -> Values:
    """Return how many clients joined after the run, and their mean accuracies."""
    keys = {"before": "accuracy_before", "joined": "accuracy", "alone": "accuracy_alone"}
    return {"clients": len(unseen["clients"]), **{name: unseen[key]["mean"] for name, key in keys.items()}}


def _collect_federation(federation: Values, counts: Array | None, most: int) -> Values | None:
    """Return the training examples of each class; None where they are unknown or too many to draw."""
    if counts is None or counts.size > most:
        return None
    same = {key: federation[key] for key in ("clients", "classes", "train")}
    return {**same, "order": order_by_labels(counts)}


def _collect_alpha(run: Path, federation: Values, counts: Array | None, weights: int) -> Values | None:
    """Return the snapshots that fit on the page, two bytes a weight, and the self-weights of all."""
    if (alpha := read_alpha(run)) is None:
        return None
    over_clients = {"mean": alpha.own.mean(-1), "low": alpha.own.min(-1), "high": alpha.own.max(-1)}
    kept = _thin(range(len(alpha.rounds)), weights // alpha.values[0].size)
    orders = {"as numbered": list(range(alpha.values.shape[1]))}
    if kept and counts is not None:
        orders["by label distribution"] = order_by_labels(counts)
    if kept:
        orders["by weights"] = order_by_weights(alpha.values[-1])
    levels = np.clip(np.rint(alpha.values[kept] * LEVELS), 0, LEVELS).astype("<u2")
    return {
        "layers": alpha.layers,
        "snapshots": len(alpha.rounds),
        "self": {"rounds": alpha.rounds, **{name: one.round(4).T.tolist() for name, one in over_clients.items()}},
        "rounds": [alpha.rounds[position] for position in kept],
        "names": federation["clients"],
        "values": base64.b64encode(levels.tobytes()).decode("ascii"),
        "orders": orders,
    }


def order_by_labels(counts: Array) -> list[int]:
    """Order clients so that those with similar shares of the classes are neighbours; counts [clients, classes]."""
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    if len(counts) > CLUSTERED:
        return [int(client) for client in np.lexsort((-shares.max(1), shares.argmax(1)))]
    return _order_leaves(pdist(shares, "cityblock") / 2, len(counts))


def order_by_weights(alpha: Array) -> list[int]:
    """Order clients so that those which borrow from each other are neighbours; alpha [clients, layers, clients]."""
    taken = alpha.mean(1, dtype=np.float64)
    tie = (taken + taken.T) / 2
    np.fill_diagonal(tie, 0)
    distance = tie.max() - tie
    np.fill_diagonal(distance, 0)
    return _order_leaves(squareform(distance, checks=False), len(alpha))


def _order_leaves(distances: Array, clients: int) -> list[int]:
    if clients < 3:
        return list(range(clients))
    return [int(client) for client in leaves_list(linkage(distances, "average", optimal_ordering=clients <= OPTIMAL))]
