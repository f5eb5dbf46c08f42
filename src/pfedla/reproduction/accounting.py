"""What the paper's Table 3 sends, computed from the model: no data, nothing trained."""

from collections.abc import Mapping
from typing import Any

import torch

from pfedla.communication import planned_traffic
from pfedla.data.datasets import known
from pfedla.layers import Layers
from pfedla.models import build_model, model_for
from pfedla.report.tables import MIB
from pfedla.reproduction.grid import Grid


def accounting(grid: Grid, paper: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per column and k: the layers that the paper's numbers say were retained, MiB, and the paper's."""
    rows = []
    for column in grid.columns:
        data = column.experiment["data"]
        entry = known(data["dataset"])
        layers = Layers.of(build_model(model_for(entry.shape), entry.shape, entry.num_classes, torch.Generator()))
        for k in range(len(column.retained) + 1):
            row, retained = f"k = {k}", column.retained[:k]
            traffic = planned_traffic(layers, data["clients"], grid.rounds_of_accounting, layers.positions(retained))
            theirs = paper.get(column.name, {}).get(row, {}).get("mib")
            mib = (traffic.down_bytes + traffic.up_bytes) / MIB
            rows.append({"column": column.name, "row": row, "retained": retained, "mib": mib, "paper": theirs})
    return rows
