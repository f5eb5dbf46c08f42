"""What standardising at each site is worth where sites measure in other units: four hospitals, real patients.

python benchmarks/units.py heart-disease.csv

Two of the four hospitals report cholesterol in mmol/l in place of mg/dl and blood pressure in kPa in place of mmHg.
Writes results/units/results.json, and the table into README.md beside it. Nothing is tuned.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from pfedla.core.files import write_text
from pfedla.report.tables import markdown_table
from pfedla.runs.comparison import plan_comparison, run_comparison

OUT = Path(__file__).parents[1] / "results" / "units"
METHODS, SEEDS = ["local", "fedavg", "pfedla"], list(range(10))
OTHER_UNITS = {"chol": 1 / 38.67, "trestbps": 1 / 7.50062}  # mg/dl to mmol/l, mmHg to kPa
FEATURES = ["age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"]
BUDGET = {"rounds": 30, "training": {"lr": 0.1, "local_epochs": 5}}
METRICS = {"auroc": "AUROC", "accuracy": "accuracy", "brier": "Brier", "ece": "ECE"}


def make_table(path: Path, out: Path) -> None:
    frame = pd.read_csv(path)[["site", *FEATURES, "disease"]].dropna(subset=FEATURES)
    foreign = frame["site"].isin(["hungary", "va-long-beach"])
    if foreign.all() or not foreign.any():
        raise SystemExit(f"{path}: expected the sites hungary and va-long-beach among {sorted(frame['site'].unique())}")
    for column, factor in OTHER_UNITS.items():
        frame.loc[foreign, column] *= factor
    frame.to_csv(out, index=False)


def measure(table: Path, standardise: str, folder: Path) -> list[dict[str, Any]]:
    data = {"dataset": str(table), "label": "disease", "client": "site", "standardise": standardise}
    plan = plan_comparison({**BUDGET, "metric": "auroc", "data": data}, METHODS, SEEDS, folder)
    cells = []
    for row in run_comparison(plan):
        for result in row.results:
            numbers = {name: result["metrics"][name]["mean"] for name in METRICS}
            per_client = result["metrics"]["auroc"]["per_client"]
            cells.append({"standardise": standardise, "method": row.algorithm, "seed": result["seed"], **numbers})
            cells[-1]["auroc_per_client"] = per_client
    return cells


def tabulate(cells: list[dict[str, Any]]) -> str:
    lines = [["standardise", "method", *METRICS.values(), "AUROC, site − this (paired)"]]
    for standardise in ("none", "shared", "site"):
        for method in METHODS:
            own = [cell for cell in cells if (cell["standardise"], cell["method"]) == (standardise, method)]
            best = [cell for cell in cells if (cell["standardise"], cell["method"]) == ("site", method)]
            numbers = [np.array([cell[name] for cell in own]) for name in METRICS]
            gap = np.array([one["auroc"] - other["auroc"] for one, other in zip(best, own, strict=True)])
            shown = [f"{values.mean():.3f} ± {stats.sem(values):.3f}" for values in numbers]
            lines.append(
                [standardise, method, *shown, f"{gap.mean():+.3f} ± {stats.sem(gap):.3f}" if gap.any() else "–"]
            )
    return markdown_table(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        table = Path(scratch) / "hospitals.csv"
        make_table(Path(sys.argv[1]), table)
        cells = [cell for how in ("none", "shared", "site") for cell in measure(table, how, Path(scratch) / how)]
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(OUT / "results.json", json.dumps({"budget": BUDGET, "cells": cells}, indent=1) + "\n")
    before, _, rest = (OUT / "README.md").read_text(encoding="utf-8").partition("<!-- table -->")
    after = rest.partition("<!-- /table -->")[2]
    write_text(OUT / "README.md", f"{before}<!-- table -->\n{tabulate(cells)}\n<!-- /table -->{after}")
    print(tabulate(cells))


if __name__ == "__main__":
    main()
