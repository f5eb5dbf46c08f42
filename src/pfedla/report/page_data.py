"""What a page shows of its runs: read from their folders, made small enough for one file."""

import base64
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from pfedla.core.errors import PfedlaError
from pfedla.report.figures import Array, read_alpha
from pfedla.report.order import by_labels, by_weights
from pfedla.report.tables import MIB, counted, warnings, where

PAGE_WEIGHTS = 1_400_000  # numbers of alpha on a page, two bytes each: under 4 MB as text
PAGE_LINES = 2_000  # rounds of all curves
PAGE_CELLS = 200_000  # clients x classes of all federations
LEVELS = 65_535  # a weight is stored as a whole number of such parts
TITLE_WORDS = ("algorithm", "seed")


def page_data(runs: Sequence[Path]) -> dict[str, Any]:
    """All that the page's script draws."""
    share = PAGE_WEIGHTS // len(runs)
    found = [run_data(run, share, PAGE_LINES // len(runs), PAGE_CELLS // len(runs)) for run in runs]
    for run, name in zip(found, _names(found), strict=True):
        run["name"] = name
    return {"runs": found, "differs": _differing([tomllib.loads(run["experiment"]) for run in found])}


def _differing(experiments: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The keys of the experiment files that are not the same in all, with every run's value; "" where it has none."""
    flat = [dict(_flat(experiment)) for experiment in experiments]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str, ensure_ascii=False)


def signature(runs: Sequence[Path]) -> str:
    """Changes when a page of these runs would."""
    names = ("rounds.jsonl", "alpha.safetensors", "result.json")
    return json.dumps([_state(run / name) for run in runs for name in names])


def _state(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:  # not there, or no longer: a run that goes on takes its result away
        return None
    return found.st_mtime_ns, found.st_size


def _names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """As short as tells them apart: the algorithm, with its seed, or the folder's name."""
    for words in (("algorithm",), TITLE_WORDS, ("folder",), ("path",)):
        names = [", seed ".join(str(run[word]) for word in words) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{position + 1}: {run['folder']}" for position, run in enumerate(runs)]


def run_data(run: Path, weights: int, most_lines: int, most_cells: int) -> dict[str, Any]:
    """One run, with at most so many weights, rounds, and clients x classes."""
    if (run / "experiment.toml").exists() and not (run / "federation.json").exists():
        raise PfedlaError(f"{run} has only just begun: there is nothing to be seen yet; try again in a moment")
    try:
        experiment = tomllib.loads((run / "experiment.toml").read_text(encoding="utf-8"))
        federation = _read(run / "federation.json") or {}
        result = _read(run / "result.json")
        lines = _lines(run)
        data = {
            "folder": run.resolve().name,
            "path": os.fspath(run),
            "algorithm": experiment["algorithm"]["name"],
            "seed": experiment["seed"],
            "rounds": experiment["rounds"],
            "played": result["rounds"] if result else (lines[-1]["round"] if lines else 0),
            "finished": result is not None,
            "where": where(_described(experiment, federation)),
            "warnings": warnings([result]) if result else _warnings(lines),
            "final": _final(result, lines),
            "curve": [_point(line) for line in _thinned(lines, most_lines)],
            "clients": _clients(result, federation),
            "unseen": _unseen(result),
            # A server may not know it; such a federation is like no other.
            "fingerprint": federation.get("fingerprint") or f"unknown: {run}",
            "names": federation["clients"],
            "federation": _federation(federation, most_cells),
            "alpha": _alpha(run, federation, weights),
            "failures": result["failures"] if result else (lines[-1]["failures"] if lines else {}),
            "refused": result["refused_uploads"] if result else None,
            "phases": result["seconds"]["phases"] if result else _phases(lines),
            "experiment": (run / "experiment.toml").read_text(encoding="utf-8"),
            "environment": _read(run / "environment.json") or {},
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, SafetensorError) as error:
        what = f"there is no {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else f"{error!r:.200}"
        raise PfedlaError(f"{run} is not a run folder that can be shown: {what}") from None
    return data


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _lines(run: Path) -> list[dict[str, Any]]:
    """Of a run that goes on, the last line may be half written."""
    path = run / "rounds.jsonl"
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Evenly, with the last and, if there is room for two, the first."""
    if len(items) <= most:
        return list(items)
    return [items[position] for position in np.unique(np.linspace(len(items) - 1, 0, most).round().astype(int))]


def _described(experiment: dict[str, Any], federation: dict[str, Any]) -> dict[str, Any]:
    data = experiment["data"]
    return {
        "dataset": data["dataset"], "partition": data["partition"], "overlapping": data.get("overlapping", False),
        "subset": federation.get("subset", ""), "leaked_test_share": federation.get("leaked_test_share", 0),
        "clients": federation["clients"],
    }  # fmt: skip


def _warnings(lines: list[dict[str, Any]]) -> list[str]:
    """While the run goes on."""
    return ["Some clients attack on purpose; accuracies are of the honest ones."] if lines and "honest" in lines[-1] else []


def _after(line: dict[str, Any]) -> float | None:
    """Accuracy after training; a line has it of all clients only, so where some attack it is not comparable."""
    value: float | None = None if "honest" in line else line["accuracy_after_training"]
    return value


def _final(result: dict[str, Any] | None, lines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The headline numbers: of the end, or of the last evaluated round so far."""
    if result is not None:
        numbers, traffic, seconds = counted(result)["accuracy"], result["traffic"], result["seconds"]["total"]
        after = counted(result)["accuracy_after_training"]["mean"]
    elif lines:
        last = lines[-1]
        numbers, traffic, after = counted(last)["accuracy"], last, _after(last)
        seconds = None
    else:
        return None
    return {
        **{key: numbers[key] for key in ("mean", "std", "p10", "worst")},
        "after": after, "down": traffic["down_bytes"] / MIB, "up": traffic["up_bytes"] / MIB, "seconds": seconds,
    }  # fmt: skip


def _point(line: dict[str, Any]) -> dict[str, Any]:
    accuracy = counted(line)["accuracy"]
    return {
        "round": line["round"], **{key: accuracy[key] for key in ("mean", "std", "p10", "worst")},
        "after": _after(line), "loss": line["loss"], "training_loss": line["training_loss"],
        "down": line["down_bytes"] / MIB, "up": line["up_bytes"] / MIB,
        "retained": line["retained"], "cohort": len(line["cohort"]),
    }  # fmt: skip


def _phases(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Of the rounds that have a line, while the run goes on."""
    total: dict[str, float] = {}
    for line in lines:
        for phase, seconds in line["seconds"].items():
            total[phase] = total.get(phase, 0.0) + seconds
    return total


def _clients(result: dict[str, Any] | None, federation: dict[str, Any]) -> list[dict[str, Any]]:
    """Every client's accuracies, when the run is finished."""
    if result is None:
        return []
    train = federation["train"] or [None] * len(federation["clients"])
    columns = (federation["clients"], result["accuracy"]["per_client"], result["accuracy_after_training"]["per_client"], train)
    return [
        {"name": name, "accuracy": accuracy, "after": after, "examples": None if counts is None else sum(counts),
         "attacks": client in result.get("attackers", [])}
        for client, (name, accuracy, after, counts) in enumerate(zip(*columns, strict=True))
    ]  # fmt: skip


def _unseen(result: dict[str, Any] | None) -> dict[str, Any] | None:
    """Clients that joined after the run: how many, and their mean accuracies."""
    if result is None or "unseen" not in result:
        return None
    part = result["unseen"]
    keys = {"before": "accuracy_before", "joined": "accuracy", "alone": "accuracy_alone"}
    return {"clients": len(part["clients"]), **{name: part[key]["mean"] for name, key in keys.items()}}


def _federation(federation: dict[str, Any], most_cells: int) -> dict[str, Any] | None:
    """Training examples of each class, clients ordered by them; None where it is unknown or too large to be drawn."""
    counts = np.array(federation["train"])
    if counts.ndim != 2 or counts.size > most_cells:
        return None
    return {
        "clients": federation["clients"], "classes": federation["classes"], "train": counts.tolist(), "order": by_labels(counts)
    }  # fmt: skip


def _alpha(run: Path, federation: dict[str, Any], weights: int) -> dict[str, Any] | None:
    """The snapshots that fit on the page, as whole numbers of two bytes; self-weights of all snapshots."""
    if (found := read_alpha(run)) is None:
        return None
    alpha, layers, rounds = found
    own = np.diagonal(alpha, axis1=1, axis2=3)  # [snapshots, layers, clients]
    over_clients = {"mean": own.mean(-1), "low": own.min(-1), "high": own.max(-1)}
    self_weights = {"rounds": rounds, **{name: values.round(4).T.tolist() for name, values in over_clients.items()}}
    summary = {"layers": layers, "snapshots": len(rounds), "self": self_weights}
    kept = _thinned(range(len(rounds)), weights // alpha[0].size)
    if not kept:
        return {**summary, "rounds": [], "names": [], "values": "", "orders": {}}
    counts = np.array(federation["train"])
    orders = {"as numbered": list(range(alpha.shape[1]))}
    if counts.ndim == 2:
        orders["by label distribution"] = by_labels(counts)
    orders["by weights"] = by_weights(alpha[-1])
    return {
        **summary,
        "rounds": [rounds[position] for position in kept],
        "names": federation["clients"],
        "values": _packed(alpha[kept]),
        "orders": orders,
    }


def _packed(alpha: Array) -> str:
    """Weights from 0 to 1 as whole numbers, in little-endian pairs of bytes."""
    levels = np.clip(np.rint(alpha * LEVELS), 0, LEVELS).astype("<u2")
    return base64.b64encode(levels.tobytes()).decode("ascii")
