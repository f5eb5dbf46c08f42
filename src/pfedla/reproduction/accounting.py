"""What retained layers save: in the paper's Table 3, computed from the model, and in a run, from its weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pfedla.core.layers import Layers
from pfedla.core.models import build_model, model_for
from pfedla.core.rounds import FLOAT_BYTES, planned_traffic
from pfedla.data.datasets import known
from pfedla.report.tables import MIB
from pfedla.reproduction.grid import Grid


def accounting(grid: Grid, paper: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per column and k: the layers that the paper's numbers say were retained, MiB, and the paper's."""
    rows = []
    for column in grid.columns:
        data = column.experiment["data"]
        layers = layers_of(data["dataset"])
        for k in range(len(column.retained) + 1):
            row, retained = f"k = {k}", column.retained[:k]
            traffic = planned_traffic(layers, data["clients"], grid.rounds_of_accounting, layers.positions(retained))
            theirs = paper.get(column.name, {}).get(row, {}).get("mib")
            mib = (traffic.down_bytes + traffic.up_bytes) / MIB
            rows.append({"column": column.name, "row": row, "retained": retained, "mib": mib, "paper": theirs})
    return rows


def layers_of(dataset: str, model: str | None = None) -> Layers:
    entry = known(dataset)
    return Layers.of(build_model(model or model_for(entry.shape), entry.shape, entry.num_classes, torch.Generator()))


def saved_by_weights(alpha: npt.NDArray[np.float32], layers: Layers, k: int) -> int:
    """Bytes of download that a run in which everyone takes part saves, from alpha [rounds, clients, layers, clients] alone.

    Of the weights before each round, everybody's k layers of the largest self-weight stay at home (Eq. 12); ties go to the
    layer nearest the output.
    """
    own = np.diagonal(alpha, axis1=1, axis2=3)  # [rounds, layers, clients]
    from_the_output = np.argsort(-own[:, ::-1], axis=1, kind="stable")[:, :k]
    sizes = np.array(layers.num_parameters)[::-1]
    return int(sizes[from_the_output].sum()) * FLOAT_BYTES
