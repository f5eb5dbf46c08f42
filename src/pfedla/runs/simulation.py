"""The Python entry: a federation and a model in, personal models and alpha out."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from pfedla.core.rounds import Round
from pfedla.data.federation import Federation
from pfedla.runs.build import build, build_own
from pfedla.runs.experiment import Experiment, list_settings
from pfedla.runs.folder import RUNS, RunFolder, folder_name, next_numbered
from pfedla.runs.overrides import nest, overlay
from pfedla.runs.progress import Display
from pfedla.runs.result import Simulation
from pfedla.runs.run import Run
from pfedla.runs.trackers import check_trackers


def run(experiment: Experiment, out: Path | None = None, *, resume: bool = False, track: Sequence[str] = ()) -> Path:
    """Run an experiment; return its run folder. With `resume`, continue the run in `out` if there is one.

    `track` names experiment trackers that get every round too: tensorboard, mlflow, wandb.
    """
    trackers, built = check_trackers(track), build(experiment)
    folder = RunFolder(out or next_numbered(RUNS / folder_name(built.experiment)), resume=resume)
    Run(built, folder, track=trackers).complete()
    return folder.path


def simulate(
    federation: Federation,
    model: nn.Module,
    algorithm: str = "pfedla",
    *,
    on_round: Callable[[Round], None] | None = None,
    progress: bool | None = None,
    faults: dict[str, Any] | Any = None,
    **settings: Any,
) -> Simulation:
    """Train personal models for all clients of a federation.

    `model` maps a batch to logits; its present weights are the common initialisation. `settings` are those of the
    experiment file by their short names (`rounds`, `lr`, `local_epochs`, `batch_size`, `participation`, `seed`,
    `engine`, `threads`, `device`, `norm_bound`, …; docs/experiment-file.md lists them) and the algorithm's own options
    (`neighbours`, …). `faults` makes clients fail on purpose. `on_round` is called after every round. `progress` shows
    a progress bar; by default it does so on a terminal.
    """
    places = {name: place for name, place in list_settings().items() if place.section not in ("data", "faults")}
    common = {name: value for name, value in settings.items() if name in places}
    options = {name: value for name, value in settings.items() if name not in places}
    values = overlay(nest(common), {"algorithm": {"name": algorithm, **options}})
    if faults is not None:
        values["faults"] = faults
    experiment = Experiment.parse(values)
    built = build_own(experiment, federation, model)
    quiet = not (sys.stderr.isatty() if progress is None else progress)
    with Display(experiment.rounds, quiet=quiet) as display:
        display.begin(algorithm, experiment.seed)
        with Run(built, display=display) as run:
            for round in run:
                if on_round is not None:
                    on_round(round)
            run.finish()
    assert run.simulation is not None
    return run.simulation
