"""One page that shows runs: a single file that opens offline, small enough to be sent by mail."""

import base64
import html
import json
import os
from collections import Counter
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
from pfedla.report import reading
from pfedla.report.reading import MIB, SPREAD, Array, Values, honest_part
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
    experiments = [reading.read_experiment(run) for run in runs]
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
    flat = [reading.flatten(one) for one in experiments]
    rows = []
    for key in dict.fromkeys(key for one in flat for key in one):
        words = [json.dumps(one[key], default=str, ensure_ascii=False) if key in one else "" for one in flat]
        rows += [[key, *words]] if len(set(words)) > 1 else []
    return {"runs": shown, "differs": rows}


def _name_runs(runs: Sequence[Values]) -> list[str]:
    """Name runs as briefly as tells them apart: by algorithm, algorithm and seed, folder or path."""
    for words in (("algorithm",), ("algorithm", "seed"), ("folder",), ("path",)):
        names = [", seed ".join(str(run[word]) for word in words) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{position + 1}: {run['folder']}" for position, run in enumerate(runs)]


def _collect_run(run: Path, experiment: Values, num_runs: int) -> Values:
    federation, lines = read_object(run / "federation.json"), reading.read_rounds(run)
    result = reading.read_result(run / "result.json") if (run / "result.json").exists() else None
    last: Values = result or (lines[-1] if lines else {})
    setting = {"subset": "", "leaked_test_share": 0, "overlapping": False} | experiment["data"] | federation
    counts = np.array(federation["train"])  # [clients, classes]; a server may not know them
    known = counts if counts.ndim == 2 else None
    found = {
        "folder": run.resolve().name,
        "path": os.fspath(run),
        "algorithm": experiment["algorithm"]["name"],
        "seed": experiment["seed"],
        "rounds": experiment["rounds"],
        "where": where(setting),
        "curve": [_summarise_round(line) for line in _thin(lines, PAGE_LINES // num_runs)],
        # A server may not know the fingerprint; then the federation equals no other.
        "fingerprint": federation.get("fingerprint") or f"unknown: {run}",
        "names": federation["clients"],
        "federation": None,  # unknown, or too large to draw
        "alpha": _collect_alpha(run, federation["clients"], known, PAGE_WEIGHTS // num_runs),
        "failures": last.get("failures", {}),
        "experiment": (run / "experiment.toml").read_text(encoding="utf-8"),
        "environment": read_object(run / "environment.json") if (run / "environment.json").exists() else {},
        "finished": result is not None,
    }
    if known is not None and known.size <= PAGE_CELLS // num_runs:
        same = {key: federation[key] for key in ("clients", "classes", "train")}
        found["federation"] = {**same, "order": order_by_labels(known)}
    if result:
        return found | _collect_result(result, federation["clients"], known)
    phases: Counter[str] = Counter()
    for line in lines:
        phases.update(line["seconds"])
    found |= {"played": last.get("round", 0), "warnings": [ATTACKED] * ("honest" in last)}
    found |= {"final": _summarise_round(last) if last else None, "clients": [], "unseen": None, "refused": None}
    return found | {"phases": dict(phases)}


def _collect_result(result: Values, names: list[str], counts: Array | None) -> Values:
    """Return what only a finished run has."""
    after, total = honest_part(result)["accuracy_after_training"]["mean"], result["seconds"]["total"]
    clients = []
    for client, name in enumerate(names):
        accuracies = {"accuracy": "accuracy", "after": "accuracy_after_training"}
        found = {to: result[key]["per_client"][client] for to, key in accuracies.items()}
        found["examples"] = None if counts is None else int(counts[client].sum())
        clients.append({"name": name, **found, "attacks": client in result.get("attackers", [])})
    unseen = result.get("unseen")
    if unseen:
        means = {"before": "accuracy_before", "joined": "accuracy", "alone": "accuracy_alone"}
        unseen = {"clients": len(unseen["clients"])} | {to: unseen[key]["mean"] for to, key in means.items()}
    return {
        "played": result["rounds"],
        "warnings": warnings([result]),
        "final": _summarise(result, result["traffic"], after=after, seconds=total),
        "clients": clients,
        "unseen": unseen,
        "refused": result["refused_uploads"],
        "phases": result["seconds"]["phases"],
    }


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spread, always with the last."""
    spread = np.linspace(len(items) - 1, 0, min(most, len(items))).round().astype(int)
    return [items[position] for position in np.unique(spread)]


def _summarise(found: Values, traffic: Values, **more: Any) -> Values:
    """Return what curves and the summary show of a round, or of a whole run."""
    spread = {key: honest_part(found)["accuracy"][key] for key in SPREAD}
    return {**spread, "down": traffic["down_bytes"] / MIB, "up": traffic["up_bytes"] / MIB, "seconds": None, **more}


def _summarise_round(line: Values) -> Values:
    # After training a line has the mean of all clients only; it is not comparable where some of them attack.
    after = None if "honest" in line else line["accuracy_after_training"]
    same = {key: line[key] for key in ("round", "loss", "training_loss", "retained")}
    return _summarise(line, line, after=after, **same)


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
    levels = np.clip(np.rint(alpha.values[kept] * LEVELS), 0, LEVELS).astype("<u2")
    return {
        "layers": alpha.layers,
        "snapshots": len(alpha.rounds),
        "self": {"rounds": alpha.rounds, **{name: one.round(4).T.tolist() for name, one in over_clients.items()}},
        "rounds": [alpha.rounds[position] for position in kept],
        "names": names,
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
    ties = squareform((taken + taken.T) / 2, checks=False)  # of every pair
    return _order_leaves(ties.max(initial=0) - ties, len(alpha))


def _order_leaves(distances: Array, clients: int) -> list[int]:
    if clients < 3:
        return list(range(clients))
    return [int(client) for client in leaves_list(linkage(distances, "average", optimal_ordering=clients <= OPTIMAL))]
