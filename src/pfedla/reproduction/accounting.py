"""The traffic of the paper's Table 3, computed from the model; and what retained layers save in a run."""

from typing import Any

import torch

from pfedla.core.layers import Layers
from pfedla.core.models import build_model, model_for
from pfedla.core.rounds import plan_traffic
from pfedla.data.datasets import find
from pfedla.report.tables import MIB
from pfedla.reproduction.grid import Grid, Paper
from pfedla.runs.experiment import Experiment


def account(grid: Grid, paper: Paper) -> list[list[str]]:
    """Return a table of MiB by column and k, with the layers that the paper's numbers imply."""
    lines = [["data set", "k", "retained", "MiB", "paper", "difference"]]
    for column in grid.columns:
        data = column.experiment["data"]
        layers = layers_of(data["dataset"])
        for k in range(len(column.retained) + 1):
            retained = column.retained[:k]
            positions = layers.positions(retained)
            traffic = plan_traffic(layers, data["clients"], grid.rounds_of_accounting, positions)
            mib = (traffic.down_bytes + traffic.up_bytes) / MIB
            theirs = paper.get(column.name, {}).get(f"k = {k}", {}).get("mib")
            compared = ["–", "–"] if theirs is None else [f"{theirs:.2f}", f"{mib - theirs:+.2f}"]
            lines.append([column.name, f"k = {k}", ", ".join(retained) or "–", f"{mib:.2f}", *compared])
    return lines


def layers_of(dataset: str, model: str | None = None) -> Layers:
    entry = find(dataset)
    name = model or model_for(entry.shape)
    return Layers.of(build_model(name, entry.shape, entry.num_classes, torch.Generator()))


def saved_bytes(experiment: Experiment, result: dict[str, Any]) -> int | None:
    """Return the bytes of download that retained layers saved in a run in which all clients take part."""
    if not experiment.algorithm.options.get("retained_layers") or experiment.participation < 1:
        return None
    layers = layers_of(experiment.data.dataset, experiment.model)
    full = plan_traffic(layers, result["clients"], experiment.rounds, []).down_bytes
    return int(full - result["traffic"]["down_bytes"])
