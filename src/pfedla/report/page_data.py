"""What a page shows of its runs: read from their folders, made small enough for one file."""

import base64
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object
from pfedla.report.order import order_by_labels, order_by_weights
from pfedla.report.reading import (
    SPREAD,
    algorithm_name,
    label_counts,
    read_alpha,
    read_experiment,
    read_federation,
    read_result,
    read_rounds,
)
from pfedla.report.tables import MIB, accuracies, warnings, where

Data = dict[str, Any]
PAGE_WEIGHTS = 1_400_000  # numbers of alpha on a page, two bytes each: under 4 MB as text
PAGE_LINES = 2_000  # rounds of all curves
PAGE_CELLS = 200_000  # clients x classes of all federations
LEVELS = 65_535  # a weight is stored as a multiple of 1/65,535
ATTACKED = "Some clients attack on purpose. Accuracies are of the honest ones."


def collect_page_data(runs: Sequence[Path]) -> Data:
    """Return everything that the page's script draws."""
    experiments, shown = [], []
    for run in runs:
        experiments.append(read_experiment(run))
        try:
            shown.append(_collect_run(run, experiments[-1], len(runs)))
        except (KeyError, TypeError, IndexError, ValueError, OSError) as error:
            if isinstance(error, PfedlaError):
                raise
            raise PfedlaError(f"{run} is not a run folder that can be shown: {error!r:.200}") from None
    for one, name in zip(shown, _name_runs(shown), strict=True):
        one["name"] = name
    return {"runs": shown, "differs": _list_differences(experiments)}


def sign(runs: Sequence[Path]) -> str:
    """Return a text that changes when a page of these runs would."""
    names = ("rounds.jsonl", "alpha.safetensors", "result.json")
    return json.dumps([_stamp(run / name) for run in runs for name in names])


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # not there yet, or removed: a run that is resumed removes its result
        return None
    return found.st_mtime_ns, found.st_size


def _list_differences(experiments: Sequence[Data]) -> list[list[str]]:
    """Return the keys whose values differ, with every run's value; "" where it has none."""
    flat = [dict(_flatten(experiment)) for experiment in experiments]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flatten(table: Data, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str, ensure_ascii=False)


def _name_runs(runs: Sequence[Data]) -> list[str]:
    """Name runs as briefly as tells them apart: by algorithm, algorithm and seed, folder or path."""
    for words in (("algorithm",), ("algorithm", "seed"), ("folder",), ("path",)):
        names = [", seed ".join(str(run[word]) for word in words) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{position + 1}: {run['folder']}" for position, run in enumerate(runs)]


def _collect_run(run: Path, experiment: Data, num_runs: int) -> Data:
    federation, lines = read_federation(run), read_rounds(run)
    result = read_result(run / "result.json") if (run / "result.json").exists() else None
    last = result or (lines[-1] if lines else None)
    setting = {"subset": "", "leaked_test_share": 0, "overlapping": False} | experiment["data"] | federation
    environment = run / "environment.json"
    return {
        "folder": run.resolve().name,
        "path": os.fspath(run),
        "algorithm": algorithm_name(experiment["algorithm"]),
        "seed": experiment["seed"],
        "rounds": experiment["rounds"],
        "played": result["rounds"] if result else (lines[-1]["round"] if lines else 0),
        "finished": result is not None,
        "where": where(setting),
        "warnings": warnings([result]) if result else [ATTACKED] * bool(last and "honest" in last),
        "final": _summarise_result(result) if result else (_summarise_round(lines[-1]) if lines else None),
        "curve": [_summarise_round(line) for line in _thin(lines, PAGE_LINES // num_runs)],
        "clients": _list_clients(result, federation) if result else [],
        "unseen": _summarise_unseen(result.get("unseen") if result else None),
        # A server may not know the fingerprint; then the federation equals no other.
        "fingerprint": federation.get("fingerprint") or f"unknown: {run}",
        "names": federation["clients"],
        "federation": _collect_federation(federation, PAGE_CELLS // num_runs),
        "alpha": _collect_alpha(run, federation, PAGE_WEIGHTS // num_runs),
        "failures": last["failures"] if last else {},
        "refused": result["refused_uploads"] if result else None,
        "phases": result["seconds"]["phases"] if result else _sum_phases(lines),
        "experiment": (run / "experiment.toml").read_text(encoding="utf-8"),
        "environment": read_object(environment) if environment.exists() else {},
    }


def _thin(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spread, always with the last."""
    if len(items) <= most:
        return list(items)
    return [items[position] for position in np.unique(np.linspace(len(items) - 1, 0, most).round().astype(int))]


def _summarise_result(result: Data) -> Data:
    found = accuracies(result)
    after = found["accuracy_after_training"]["mean"]
    return _headline(found, result["traffic"]) | {"after": after, "seconds": result["seconds"]["total"]}


def _summarise_round(line: Data) -> Data:
    return _headline(accuracies(line), line) | {
        "round": line["round"],
        # A line has it of all clients only; it is not comparable where some of them attack.
        "after": None if "honest" in line else line["accuracy_after_training"],
        "seconds": None,
        "loss": line["loss"],
        "training_loss": line["training_loss"],
        "retained": line["retained"],
    }


def _headline(found: Any, traffic: Data) -> Data:
    spread = {key: found["accuracy"][key] for key in SPREAD}
    return {**spread, "down": traffic["down_bytes"] / MIB, "up": traffic["up_bytes"] / MIB}


def _sum_phases(lines: list[Data]) -> dict[str, float]:
    """Return the seconds by phase, over the rounds that have a line."""
    phases = dict.fromkeys(phase for line in lines for phase in line["seconds"])
    return {phase: sum(line["seconds"].get(phase, 0.0) for line in lines) for phase in phases}


def _list_clients(result: Data, federation: Data) -> list[Data]:
    """Return every client's accuracies."""
    counts = label_counts(federation)
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


def _summarise_unseen(unseen: Data | None) -> Data | None:
    """Return how many clients joined after the run, and their mean accuracies."""
    if unseen is None:
        return None
    keys = {"before": "accuracy_before", "joined": "accuracy", "alone": "accuracy_alone"}
    return {"clients": len(unseen["clients"]), **{name: unseen[key]["mean"] for name, key in keys.items()}}


def _collect_federation(federation: Data, most_cells: int) -> Data | None:
    """Return the training examples of each class; None where they are unknown or too many to draw."""
    counts = label_counts(federation)
    if counts is None or counts.size > most_cells:
        return None
    order = order_by_labels(counts)
    return {
        "clients": federation["clients"],
        "classes": federation["classes"],
        "train": counts.tolist(),
        "order": order,
    }


def _collect_alpha(run: Path, federation: Data, weights: int) -> Data | None:
    """Return the snapshots that fit on the page, two bytes a weight, and the self-weights of all."""
    if (alpha := read_alpha(run)) is None:
        return None
    own = np.diagonal(alpha.values, axis1=1, axis2=3)  # [snapshots, layers, clients]
    over_clients = {"mean": own.mean(-1), "low": own.min(-1), "high": own.max(-1)}
    self_weights = {name: values.round(4).T.tolist() for name, values in over_clients.items()}
    kept = _thin(range(len(alpha.rounds)), weights // alpha.values[0].size)
    orders = {"as numbered": list(range(alpha.values.shape[1]))}
    if kept and (counts := label_counts(federation)) is not None:
        orders["by label distribution"] = order_by_labels(counts)
    if kept:
        orders["by weights"] = order_by_weights(alpha.values[-1])
    levels = np.clip(np.rint(alpha.values[kept] * LEVELS), 0, LEVELS).astype("<u2")
    return {
        "layers": alpha.layers,
        "snapshots": len(alpha.rounds),
        "self": {"rounds": alpha.rounds, **self_weights},
        "rounds": [alpha.rounds[position] for position in kept],
        "names": federation["clients"],
        "values": base64.b64encode(levels.tobytes()).decode("ascii"),
        "orders": orders,
    }
