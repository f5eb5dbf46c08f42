"""The run folder: what a run leaves behind, in plain formats."""

import dataclasses
import json
import math
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from pfedla import __version__
from pfedla.data.federation import Federation
from pfedla.data.statistics import split_statistics
from pfedla.errors import PfedlaError
from pfedla.experiment import Built, Experiment, build
from pfedla.report.figures import draw_run
from pfedla.rounds import Round
from pfedla.simulation import Simulation, simulate_method


def summary(accuracies: torch.Tensor) -> dict[str, Any]:
    """Mean, standard deviation, lowest decile and worst over the clients; None for a client that has no value."""
    per_client = [None if math.isnan(value) else value for value in accuracies.tolist()]
    known = [value for value in per_client if value is not None]
    if not known:
        return {"mean": None, "std": None, "p10": None, "worst": None, "per_client": per_client}
    numbers = np.array(known)
    return {
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "p10": float(np.quantile(numbers, 0.1)),
        "worst": float(numbers.min()),
        "per_client": per_client,
    }


def new_folder(path: Path) -> Path:
    """A folder that was not there before: nothing is ever overwritten."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        raise PfedlaError(f"{path} exists already and is never overwritten; choose another folder with --out") from None
    except OSError as error:
        raise PfedlaError(f"{path} cannot be made: {error.strerror}") from None
    return path


class RunFolder:
    """Writes a run as it goes."""

    def __init__(self, path: Path) -> None:
        self.path = new_folder(path)
        self.seconds: list[dict[str, float]] = []

    def start(self, built: Built) -> None:
        self.layers = built.algorithm.task.layers.names
        (self.path / "experiment.toml").write_text(built.experiment.to_toml(), encoding="utf-8")
        self._write("environment.json", environment())
        self._write("federation.json", describe(built.federation))

    def add_round(self, played: Round) -> None:
        self.seconds.append(played.seconds)
        if played.evaluation is None:
            return
        kept = zip(self.layers, (~played.sent).sum(0).tolist(), strict=True)
        line = {
            "round": played.round,
            "accuracy": {key: value for key, value in summary(played.evaluation.accuracy).items() if key != "per_client"},
            "loss": _mean(played.evaluation.loss),
            "accuracy_after_training": _mean(played.after_training.accuracy),
            "training_loss": _mean(played.training_loss),
            "seconds": {phase: round(value, 4) for phase, value in played.seconds.items()},
            **dataclasses.asdict(played.traffic),
            "cohort": played.cohort.ids.tolist(),
            "retained": {layer: count for layer, count in kept if count},
            "refused": played.refused.tolist(),
        }
        with (self.path / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self, built: Built, simulation: Simulation) -> dict[str, Any]:
        experiment = built.experiment
        total = sum(sum(phases.values()) for phases in self.seconds)
        result = {
            "algorithm": experiment.algorithm.name,
            "dataset": experiment.data.dataset,
            "partition": experiment.data.partition,
            "subset": built.federation.subset,
            "overlapping": experiment.data.overlapping,
            "leaked_test_share": built.federation.leaked_share,
            "clients": len(built.federation),
            "rounds": experiment.rounds,
            "seed": experiment.seed,
            "model": experiment.model,
            "accuracy": summary(simulation.accuracy),
            "accuracy_after_training": summary(simulation.accuracy_after_training),
            "loss": _mean(simulation.loss),
            "traffic": dataclasses.asdict(simulation.traffic),
            "refused_uploads": simulation.refused_uploads,
            "seconds": {"total": total, "per_round": total / experiment.rounds},
        }
        if simulation.alphas is not None:
            save_file(
                # One entry of metadata only: several are written in a random order, and equal runs would differ in bytes.
                {"alpha": simulation.alphas.contiguous(), "rounds": torch.tensor(simulation.alpha_rounds)},
                self.path / "alpha.safetensors",
                {"layers": json.dumps(simulation.layer_names)},
            )
        (self.path / "models").mkdir()
        for client, model in enumerate(simulation.models):
            tensors = {name: value.contiguous().clone() for name, value in model.items()}
            save_file(tensors, self.path / "models" / f"client-{client}.safetensors")
        self._write("result.json", result)  # last of the numbers: a folder with a result is complete
        draw_run(self.path)
        return result

    def _write(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        (self.path / name).write_text(text + "\n", encoding="utf-8")


def _mean(values: torch.Tensor) -> float | None:
    """None where there is nothing finite to report: JSON has no NaN."""
    mean = values.mean().item() if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def environment() -> dict[str, Any]:
    return {
        "pfedla": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
    }


def describe(federation: Federation) -> dict[str, Any]:
    """What federation.json holds: how the data are cut, and how unlike the clients are."""
    counts = federation.class_counts()
    return {
        "shape": federation.shape,
        "classes": federation.classes,
        "mean": federation.mean,
        "std": federation.std,
        "clients": federation.names,
        "train": counts[:, 0].tolist(),
        "test": counts[:, 1].tolist(),
        "subset": federation.subset,
        "leaked_test_share": federation.leaked_share,
        "statistics": split_statistics(counts),
    }


def run_built(built: Built, folder: RunFolder, on_round: Callable[[Round], None] | None = None) -> dict[str, Any]:
    """Play a built experiment into its folder; returns what result.json holds."""
    experiment = built.experiment

    def record(played: Round) -> None:
        folder.add_round(played)
        if on_round is not None:
            on_round(played)

    try:
        folder.start(built)
        simulation = simulate_method(
            built.federation, built.algorithm, rounds=experiment.rounds, participation=experiment.participation,
            seed=experiment.seed, engine=experiment.engine.name, threads=experiment.engine.threads,
            device=experiment.engine.device, evaluate_every=experiment.evaluate_every,
            recalibrate=experiment.recalibrate, on_round=record,
        )  # fmt: skip
        return folder.finish(built, simulation)
    except BaseException:
        if not folder.seconds:  # it failed before anything was learned: leave nothing behind
            shutil.rmtree(folder.path, ignore_errors=True)
        raise


def free_folder(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """runs/<algorithm>-<dataset>-<partition>-s<seed>, numbered if it is taken."""
    data = experiment.data
    name = f"{experiment.algorithm.name}-{Path(data.dataset).stem[:60]}-{data.split_name}-s{experiment.seed}"
    return numbered(root / name)


def numbered(path: Path) -> Path:
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_name(f"{path.name}-{count}")
    return candidate


def run(experiment: Experiment, out: Path | None = None) -> Path:
    """Run an experiment; returns its run folder."""
    built = build(experiment)
    folder = RunFolder(out or free_folder(built.experiment))
    run_built(built, folder)
    return folder.path
