"""The run folder: what a run leaves behind, in plain formats."""

import dataclasses
import errno
import math
import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from pfedla import __version__
from pfedla.runs.checkpoint import Progress, differing
from pfedla.runs.progress import Reporter
from pfedla.core.contracts import Algorithm
from pfedla.data.federation import Outline
from pfedla.data.statistics import split_statistics
from pfedla.core.errors import PfedlaError
from pfedla.runs.experiment import Built, Experiment, build
from pfedla.core.files import read_object, safe_name, write_tensors
from pfedla.report.figures import draw_run
from pfedla.report.tables import MIB
from pfedla.core.rounds import Round
from pfedla.runs.folder import RESULT, RunFolder
from pfedla.runs.simulation import RunningEngine, Simulation, simulate_method
from pfedla.runs.trackers import Tracking, chosen
from pfedla.runs.unseen import join_unseen
from pfedla.core.uploads import count_failures

RUNS = Path("runs")
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}


def summary(accuracies: Tensor) -> dict[str, Any]:
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


def line_of(played: Round, layers: Sequence[str], honest: Tensor, failures: dict[int, dict[str, int]]) -> dict[str, Any]:
    """What rounds.jsonl holds of an evaluated round; `failures` are all so far."""
    assert played.evaluation is not None
    kept = zip(layers, (~played.sent).sum(0).tolist(), strict=True)
    line = {
        "round": played.round,
        "accuracy": _short_summary(played.evaluation.accuracy),
        "loss": _mean(played.evaluation.loss),
        "accuracy_after_training": _mean(played.after_training.accuracy),
        "training_loss": _mean(played.training_loss),
        "seconds": {phase: round(value, 4) for phase, value in played.seconds.items()},
        **dataclasses.asdict(played.traffic),
        "cohort": played.cohort.ids.tolist(),
        "retained": {layer: count for layer, count in kept if count},
        "failures": failures,
    }
    if not honest.all():
        line["honest"] = {"accuracy": _short_summary(played.evaluation.accuracy[honest])}
    return line


def _short_summary(accuracies: Tensor) -> dict[str, Any]:
    return {key: value for key, value in summary(accuracies).items() if key != "per_client"}


def result_of(built: Built, simulation: Simulation, honest: Tensor) -> dict[str, Any]:
    """What result.json holds."""
    experiment = built.experiment
    total = sum(simulation.seconds.values())
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
        "failures": {str(client): reasons for client, reasons in sorted(simulation.failures.items())},
        "faults": experiment.faults.active(),
        "seconds": {"total": total, "per_round": total / experiment.rounds, "phases": simulation.seconds},
    }
    if not honest.all():
        result["attackers"] = (~honest).nonzero().squeeze(1).tolist()
        result["honest"] = {
            "accuracy": summary(simulation.accuracy[honest]),
            "accuracy_after_training": summary(simulation.accuracy_after_training[honest]),
        }
    return result


def write_results(folder: RunFolder, result: dict[str, Any], simulation: Simulation) -> None:
    path = folder.path
    if simulation.alphas is not None:
        folder.write_alpha(simulation.alphas, simulation.alpha_rounds, simulation.layer_names)
    elif type(simulation.algorithm).alpha is not Algorithm.alpha:
        folder.say(
            f"{path}: the weights of {len(simulation.models):,} clients are too many to keep: no alpha, no picture of it"
        )
    (path / "models").mkdir(exist_ok=True)
    for client, model in enumerate(simulation.models):
        target = path / "models" / f"client-{client}.safetensors"
        target.unlink(missing_ok=True)
        if model:  # a client that fails has none
            write_tensors(target, model)
    folder.write_json(RESULT, result)  # last of the numbers: a folder with a result is complete
    draw_run(path)


def _mean(values: Tensor) -> float | None:
    """None where there is nothing finite to report: JSON has no NaN."""
    mean = values.mean().item() if len(values) else math.nan
    return mean if math.isfinite(mean) else None


def environment() -> dict[str, Any]:
    return {
        "pfedla": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_model": cpu_model(),
        "cores": os.cpu_count(),
    }


def cpu_model() -> str:
    """Whose CPU it is: libraries choose their kernels, and so the last bits, by more than what it can."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor()
    known = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")  # x86's, then ARM's
    return " ".join(f"{name} {known[name]}" for name in names if name in known)


def describe(federation: Outline) -> dict[str, Any]:
    """What federation.json holds: how the data are cut, and how unlike the clients are, as far as it is known here."""
    counts = federation.class_counts()
    by_class: dict[str, Any] = {"train": [], "test": [], "statistics": {}}
    if counts is not None:
        by_class = {"train": counts[:, 0].tolist(), "test": counts[:, 1].tolist(), "statistics": split_statistics(counts)}
    return {
        "shape": federation.shape,
        "classes": federation.classes,
        "mean": federation.mean,
        "std": federation.std,
        "clients": federation.names,
        "subset": federation.subset,
        "leaked_test_share": federation.leaked_share,
        "fingerprint": federation.fingerprint(),
        **by_class,
    }


def run_built(
    built: Built, folder: RunFolder, reporter: Reporter | None = None, engine: RunningEngine | None = None,
    track: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """Play a built experiment in its folder, from the start or from where it stands; returns what result.json holds.

    The clients live in the engine that the experiment names, unless another is given; `track` names trackers to tell.
    """
    experiment = built.experiment
    reporter = reporter or Reporter(experiment.rounds, quiet=True)
    layers = built.algorithm.task.layers.names
    honest = torch.ones(len(built.federation), dtype=torch.bool)
    attackers = experiment.faults.faults().attacking(len(honest), experiment.seed)
    if len(attackers) < len(honest):  # if all attack now and then, nobody is told apart
        honest[attackers] = False
    failures: dict[int, dict[str, int]] = {}

    def restored(progress: Progress) -> None:
        reporter.skip(progress.round)
        failures.update({client: dict(reasons) for client, reasons in progress.failures.items()})
        tracking.begin()

    def record(played: Round) -> None:
        count_failures(failures, played.failures)
        if played.evaluation is not None:
            line = line_of(played, layers, honest, failures)
            folder.add_line(line)
            tracking.tell(line)
        reporter.on_round(played)

    folder.say, folder.on_restored = reporter.say, restored
    if built.note:
        reporter.say(built.note)
    with folder, disk_named(folder), Tracking(track, folder.path, reporter.say) as tracking:
        if (result := folder.begin(experiment)) is not None:
            reporter.skip(experiment.rounds)
            reporter.say(f"{folder.path} is finished: {experiment.rounds} rounds; more --rounds would extend it")
            drawn = folder.path / "learning_curve.png"
            if not drawn.exists() or drawn.stat().st_mtime < (folder.path / RESULT).stat().st_mtime:
                draw_run(folder.path)  # it was stopped after its numbers and before its pictures
            tracking.begin()
            tracking.result = result
            return result
        describe_in(folder, built.federation, built.unseen)
        if not folder.reopened:
            tracking.begin()
        simulation = simulate_method(
            built.federation, built.algorithm, experiment.settings(), on_round=record, keeper=folder, engine=engine
        )
        result = result_of(built, simulation, honest)
        if built.unseen is not None:
            rounds, accuracies = join_unseen(built, folder)
            parts = {key: summary(values) for key, values in accuracies.items()}
            result["unseen"] = {"clients": built.unseen.names, "rounds": rounds, **parts}
        write_results(folder, result, simulation)
        tracking.result = result
        return result


def describe_in(folder: RunFolder, federation: Outline, unseen: Outline | None = None) -> None:
    """Write down what the run is made of and runs on; of one that goes on, refuse other data and name another machine."""
    made_of, runs_on = describe(federation), environment()
    if unseen is not None:
        made_of["unseen"] = unseen.names
    if folder.reopened and (folder.path / "federation.json").exists():
        before = read_object(folder.path / "federation.json").get("fingerprint")
        if before and made_of["fingerprint"] and before != made_of["fingerprint"]:  # a server may not know it
            raise PfedlaError(f"the data are not what they were when {folder.path} was begun; start in a new folder")
    else:
        folder.write_json("federation.json", made_of)
    if folder.reopened and (folder.path / "environment.json").exists():
        begun_on = runs_on | read_object(folder.path / "environment.json")  # one of before knows less
        if changed := differing(begun_on, runs_on):
            folder.say(f"not the machine the run was begun on, results may differ in the last bits: {'; '.join(changed)}")
    else:
        folder.write_json("environment.json", runs_on)


@contextmanager
def disk_named(folder: RunFolder) -> Iterator[None]:
    """Whatever could not be written: name the folder, the disk's room, and what is safe."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if error.errno not in DISK_ERRORS if isinstance(error, OSError) else "I/O error" not in str(error):
            raise
        usage = shutil.disk_usage(folder.path if folder.path.exists() else folder.path.parent)
        room = f"its disk has {usage.free / MIB:.0f} of {usage.total / MIB:.0f} MiB free"
        rounds = folder.checkpoints.rounds()
        safe = f"the checkpoint after round {rounds[-1]} is whole, go on from it with --resume" if rounds else "nothing is kept"
        raise OSError(f"{folder.path} cannot be written: {error}; {room}; {safe}") from error


def folder_name(experiment: Experiment) -> str:
    """<algorithm>-<dataset>-<partition>-s<seed>"""
    data = experiment.data
    return f"{experiment.algorithm.name}-{safe_name(Path(data.dataset).stem)}-{data.split_name}-s{experiment.seed}"


def numbered(path: Path) -> Path:
    """The first of path, path-2, path-3, … that is free."""
    return next(candidate for candidate in _candidates(path) if not candidate.exists())


def last_numbered(path: Path) -> Path:
    """The last of them that is there; `path` if none is."""
    there = list(takewhile(Path.exists, _candidates(path)))
    return there[-1] if there else path


def _candidates(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in count(2))


def run(experiment: Experiment, out: Path | None = None, *, resume: bool = False, track: Sequence[str] = ()) -> Path:
    """Run an experiment; returns its run folder. With `resume` it goes on in `out`, if the run is there already.

    `track` names experiment trackers to be told of every round: tensorboard, mlflow, wandb.
    """
    trackers, built = chosen(track), build(experiment)
    folder = RunFolder(out or numbered(RUNS / folder_name(built.experiment)), resume=resume)
    run_built(built, folder, track=trackers)
    return folder.path
