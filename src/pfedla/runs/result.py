"""What a finished run leaves behind, in plain formats: result.json, personal models, weights, pictures."""

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pfedla.core.contracts import Algorithm
from pfedla.core.rounds import summarise
from pfedla.core.tensor_files import write_tensors
from pfedla.report.figures import draw_run
from pfedla.runs.build import Built
from pfedla.runs.checkpoint import FORMAT, write_alpha
from pfedla.runs.folder import RESULT

if TYPE_CHECKING:
    from pfedla.runs.run import Run, Simulation


def describe_result(built: Built, simulation: "Simulation", honest: Tensor) -> dict[str, Any]:
    """Return what result.json holds."""
    experiment = built.experiment
    total = sum(simulation.seconds.values())
    loss = simulation.loss.nanmean().item()
    result = {
        "format": FORMAT,
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
        "accuracy": summarise(simulation.accuracy),
        "accuracy_after_training": summarise(simulation.accuracy_after_training),
        "loss": loss if abs(loss) < float("inf") else None,
        "traffic": dataclasses.asdict(simulation.traffic),
        "refused_uploads": simulation.refused_uploads,
        "failures": {str(client): reasons for client, reasons in sorted(simulation.failures.items())},
        "faults": experiment.faults.active,
        "seconds": {"total": total, "per_round": total / experiment.rounds, "phases": simulation.seconds},
    }
    if not honest.all():
        result["attackers"] = (~honest).nonzero().squeeze(1).tolist()
        result["honest"] = {
            "accuracy": summarise(simulation.accuracy[honest]),
            "accuracy_after_training": summarise(simulation.accuracy_after_training[honest]),
        }
    return result


def write_results(run: "Run") -> None:
    """Write everything of a finished run; result.json is the last of the numbers: a folder with it is complete."""
    folder, simulation = run.folder, run.simulation
    assert folder is not None and simulation is not None and run.result is not None
    if simulation.alphas is not None:
        write_alpha(folder.path, run.state, run.algorithm.task.layers.names)
    elif type(simulation.algorithm).alpha is not Algorithm.alpha:
        run.say(f"the weights of {len(simulation.models):,} clients are too many to keep: no alpha, no picture of it")
    (folder.path / "models").mkdir(exist_ok=True)
    for client, model in enumerate(simulation.models):
        target = folder.path / "models" / f"client-{client}.safetensors"
        target.unlink(missing_ok=True)
        if model:  # a client that fails has none
            write_tensors(target, model)
    if run.built.unseen is not None:
        from pfedla.runs.joining import join_unseen

        run.result["unseen"] = join_unseen(run)
    folder.write_json(RESULT, run.result)
    draw_run(folder.path)
