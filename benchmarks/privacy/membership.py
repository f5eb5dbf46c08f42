"""Was this image in the training data? Membership inference on personal models and on uploads.

A federation is trained; then every client's model is tested on the client's training images (members) and on its test
images (not members; the same distribution). Two attacks give each image a score, high for members:

- loss: minus the loss of the model.
- ratio: the log-odds of the true class under the model, less their mean under models of other seeds whose client has
  that class; a likelihood ratio as offline LiRA's, without shadow models.

"personal" is the model that a client deploys, "upload" the one that the server receives in the last round. Runs whose
results are in --out are not run again.

python benchmarks/privacy/membership.py digits fashion-mnist --seeds 0,1,2
python benchmarks/privacy/membership.py fashion-mnist --methods fedavg --set training.clip_norm=1
"""

import json
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from sklearn.metrics import roc_auc_score, roc_curve
from torch import Tensor

from pfedla.core.contracts import Answer, Cohort, Params
from pfedla.core.tasks import Task
from pfedla.data.federation import Federation
from pfedla.runs.build import build
from pfedla.runs.experiment import Experiment, overlay, parse_assignment
from pfedla.runs.run import Run

OUT = Path(__file__).parent.parent / "results" / "membership.jsonl"
DATA = {"digits": {"dataset": "digits"}, "fashion-mnist": {"dataset": "fashion-mnist", "samples_per_client": 200}}
METHODS = ("local", "fedavg", "fedrep", "pfedla", "pfedla-heldout")
FALSE_POSITIVES = 0.01


class Trained(NamedTuple):
    """A finished run: its data, and each client's models, empty where there is none."""

    federation: Federation
    task: Task
    accuracy: float
    models: dict[str, list[Params]]  # "personal", "upload"


def train(dataset: str, method: str, *, seed: int, rounds: int, sets: list[str]) -> Trained:
    values: dict[str, Any] = {"seed": seed, "rounds": rounds, "evaluate_every": rounds, "data": DATA[dataset]}
    values |= {"algorithm": {"name": method}, "engine": {"threads": 1}}
    for assignment in sets:
        values = overlay(values, parse_assignment(assignment))
    run = Run(build(Experiment.parse(values)))
    federation = run.built.federation
    assert isinstance(federation, Federation)
    with run:
        for round in range(1, rounds + 1):
            if round == rounds:
                answers = train_once(run, Cohort.everyone(federation.num_examples, round, seed))
            run.step()
        run.finish()
    assert run.simulation is not None
    models = {"personal": run.simulation.models, "upload": [complete(one, run.algorithm.task) for one in answers]}
    return Trained(federation, run.algorithm.task, run.simulation.accuracy.mean().item(), models)


def train_once(run: Run, cohort: Cohort) -> list[Any]:
    """Return what the clients send in a round, as the round itself will have them send it again."""
    return run.engine.train(cohort, run.algorithm.download(run.state.server, cohort))


def complete(answer: Any, task: Task) -> Params:
    """Return the uploaded model if all of it was sent, else nothing."""
    if not isinstance(answer, Answer) or not answer.upload.sent.all():
        return {}
    tensors = answer.upload.tensors
    return tensors if tensors.keys() == task.initial().keys() else {}


def log_odds(task: Task, model: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-odds of the true class, and the loss of each example."""
    with torch.no_grad():
        logits = task.outputs(model, x)
    own = logits.gather(1, y[:, None]).squeeze(1)
    others = logits.scatter(1, y[:, None], -torch.inf).logsumexp(1)
    return own - others, F.cross_entropy(logits, y, reduction="none")


def score_members(target: Trained, references: list[Trained], kind: str) -> dict[str, list[Tensor]]:
    """Return the scores of both attacks: [members, others], over all clients."""
    found: dict[str, list[list[Tensor]]] = {"loss": [[], []], "ratio": [[], []]}
    for client, model in enumerate(target.models[kind]):
        if not model:
            continue
        for part, examples in enumerate((target.federation.train[client], target.federation.test[client])):
            x, y = target.federation.normalise(examples.x), examples.y
            odds, loss = log_odds(target.task, model, x, y)
            found["loss"][part].append(-loss)
            found["ratio"][part].append(odds - average_odds(references, kind, x, y))
    return {name: [torch.cat(part) for part in parts] for name, parts in found.items() if parts[0]}


def average_odds(references: list[Trained], kind: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean log-odds under the reference models whose client trained on the class of each example."""
    total, count = torch.zeros(len(y)), torch.zeros(len(y))
    for run in references:
        for own, model in zip(run.federation.train, run.models[kind], strict=True):
            knows = torch.isin(y, own.y)
            if model and knows.any():
                total[knows] += log_odds(run.task, model, x[knows], y[knows])[0]
                count[knows] += 1
    return total / count.clamp(min=1)


def judge(members: Tensor, others: Tensor) -> dict[str, float]:
    """Return the area under the curve, and the share of members found at FALSE_POSITIVES."""
    truth = np.repeat([1, 0], [len(members), len(others)])
    scores = torch.cat([members, others]).double().numpy()
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    return {"auc": float(roc_auc_score(truth, scores)), "tpr": float(true[false <= FALSE_POSITIVES].max())}


def measure(dataset: str, method: str, *, seeds: list[int], rounds: int, sets: list[str]) -> list[dict[str, Any]]:
    """Train all seeds, attack each with the others as references; return a line per seed and kind of model."""
    begun, lines = time.process_time(), list[dict[str, Any]]()
    runs = {seed: train(dataset, method, seed=seed, rounds=rounds, sets=sets) for seed in seeds}
    for seed, run in runs.items():
        references = [other for number, other in runs.items() if number != seed]
        for kind in run.models:
            scores = score_members(run, references, kind)
            attacks = {name: judge(*parts) for name, parts in scores.items()}
            if not references:
                attacks.pop("ratio", None)
            if attacks:
                line = {"dataset": dataset, "method": method, "set": sets, "rounds": rounds, "seed": seed}
                lines.append(
                    {**line, "model": kind, "accuracy": run.accuracy, **attacks, "references": len(references)}
                )
    print(f"{dataset} {method} {' '.join(sets)}: {time.process_time() - begun:.0f} s", flush=True)
    return lines


def main(
    datasets: list[str],
    methods: Annotated[str, typer.Option()] = ",".join(METHODS),
    seeds: Annotated[str, typer.Option()] = "0,1,2",
    rounds: int = 20,
    sets: Annotated[list[str], typer.Option("--set", help="section.key=value, as for `pfedla run`.")] = [],  # noqa: B006
    out: Path = OUT,
) -> None:
    torch.set_num_threads(1)
    numbers = [int(seed) for seed in seeds.split(",")]
    known = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    for dataset in datasets:
        for method in methods.split(","):
            setting = {"dataset": dataset, "method": method, "set": sets, "rounds": rounds}
            done = {one["seed"] for one in known if one.items() >= setting.items()}
            if done >= {*numbers}:
                continue
            lines = measure(dataset, method, seeds=numbers, rounds=rounds, sets=sets)
            with out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    typer.run(main)
