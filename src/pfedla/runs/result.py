"""What a finished run leaves behind, in plain formats: result.json, personal models, weights, pictures."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from pfedla.core.contracts import Algorithm, Params
from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_tensors
from pfedla.core.rounds import NO_ANSWER, Traffic, finite_mean, summarise
from pfedla.core.tasks import load_tensors
from pfedla.report.figures import draw_run
from pfedla.runs.build import Built
from pfedla.runs.folder import FORMAT, RESULT, RunFolder, write_alpha

if TYPE_CHECKING:
    from pfedla.runs.run import Run


@dataclass(frozen=True, repr=False, kw_only=True)
class Simulation:
    """The end of a run. Accuracies are fractions, on every client's own test data, after the last round."""

    algorithm: Algorithm
    accuracy: Tensor  # [clients], of the personal models
    loss: Tensor
    accuracy_after_training: Tensor  # [clients], right after its last local training; nan if it never trained
    traffic: Traffic
    failures: dict[int, dict[str, int]]  # client -> reason -> how often it had no part in a round for it
    seconds: dict[str, float]  # by phase
    alphas: Tensor | None  # [snapshots, clients, layers, clients]; alpha[i, layer, j]: i receives, j sends
    alpha_rounds: list[int]  # the round after which each snapshot was taken; 0 is the start
    models: list[Params]  # every client's personal model; empty for a client that failed

    @property
    def alpha(self) -> Tensor | None:
        """The weights at the end, [clients, layers, clients]; None if a method has none, or too many to keep."""
        return None if self.alphas is None else self.alphas[-1]

    @property
    def refused_uploads(self) -> int:
        """How many uploads came and were not used."""
        others = (NO_ANSWER.reason, "raised", "evaluation raised")
        return sum(n for reasons in self.failures.values() for reason, n in reasons.items() if reason not in others)

    def __repr__(self) -> str:
        mean, worst = (f"{100 * value:.1f} %" for value in (self.accuracy.nanmean(), np.nanmin(self.accuracy)))
        return f"Simulation({self.algorithm.name}, {len(self.models)} clients, accuracy {mean}, worst client {worst})"

    def personal_model(self, client: int) -> nn.Module:
        """Return the model this client would deploy, in eval mode; uint8 images go through `Federation.normalise`."""
        if not 0 <= client < len(self.models):
            raise PfedlaError(f"client {client}: there are clients 0 to {len(self.models) - 1}")
        return load_tensors(self.algorithm.task.module, self.models[client])


def describe_result(built: Built, simulation: Simulation, honest: Tensor) -> dict[str, Any]:
    """Return what result.json holds."""
    experiment, data, federation = built.experiment, built.experiment.data, built.federation
    accuracies = {key: getattr(simulation, key) for key in ("accuracy", "accuracy_after_training")}
    failures = {str(client): reasons for client, reasons in sorted(simulation.failures.items())}
    total = sum(simulation.seconds.values())
    result: dict[str, Any] = {
        "format": FORMAT,
        "algorithm": experiment.algorithm.name,
        "dataset": data.dataset,
        "partition": data.partition,
        "subset": federation.subset,
        "overlapping": data.overlapping,
        "leaked_test_share": federation.leaked_share,
        "clients": len(federation),
        "rounds": experiment.rounds,
        "seed": experiment.seed,
        "model": experiment.model,
        **{key: summarise(values) for key, values in accuracies.items()},
        "loss": finite_mean(simulation.loss),
        "traffic": asdict(simulation.traffic),
        "refused_uploads": simulation.refused_uploads,
        "failures": failures,
        "faults": experiment.faults.model_dump(exclude_defaults=True),
        "seconds": {"total": total, "per_round": total / experiment.rounds, "phases": simulation.seconds},
    }
    if not honest.all():
        result["attackers"] = (~honest).nonzero().squeeze(1).tolist()
        result["honest"] = {key: summarise(values[honest]) for key, values in accuracies.items()}
    return result


def write_results(run: "Run", folder: RunFolder, simulation: Simulation, result: dict[str, Any]) -> None:
    """Write everything of a finished run; result.json is the last of the numbers: a folder with it is complete."""
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

        result["unseen"] = join_unseen(run, run.built.unseen, folder.path / "models")
    folder.write_json(RESULT, result)
    draw_run(folder.path)
