"""A client that joins after the run gets a personal model from the server's state and changes nobody else's.

It gets a row in a copy of the state (`Algorithm.admit`) and runs a few rounds there, as a cohort of its own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from pfedla.algorithms import check_joining, create
from pfedla.core.accounting import design, spent
from pfedla.core.codecs import split_links
from pfedla.core.contracts import Algorithm, Cohort, Failure, Params, ServerState
from pfedla.core.errors import PfedlaError, Stopped
from pfedla.core.files import safe_name, sum_files, write_tensors, write_text
from pfedla.core.layers import stack
from pfedla.core.privacy import Mechanism
from pfedla.core.rounds import DIVERGED, Traffic, accept, evaluate_all, finite_mean, payload_bytes, summarise
from pfedla.core.settings import WireSettings
from pfedla.data.federation import Federation, digest_of
from pfedla.engines.simulated import TRAINED, SimulatedEngine
from pfedla.report.reading import Metric
from pfedla.runs.build import build_around
from pfedla.runs.experiment import SITES, Experiment
from pfedla.runs.folder import (
    ALPHA,
    RESULT,
    Checkpoints,
    RunState,
    fresh_state,
    new_folder,
    plan_snapshots,
    write_alpha,
)
from pfedla.runs.personal import JOINED, load_unseen, read_run
from pfedla.runs.recognition import TRAINED_ON, write_trained_on
from pfedla.runs.releases import describe
from pfedla.runs.run import Run

EVALUATIONS = 2  # before and after the rounds


class Joined(NamedTuple):
    """How an unseen client fared."""

    rounds: int  # that it ran: none where there is nothing to learn
    # On its own test data: "before" and "after" the rounds, "after_training" (the last local one; None if it never
    # trained), and "alone": of a model trained on its own data only, for all the rounds that were asked for.
    score: dict[str, Any]  # the task's headline metric; None where it is undefined
    traffic: Traffic
    privacy: dict[str, Any]  # what it has released, as of a run's clients
    alphas: torch.Tensor | None  # [rounds + 1, layers, clients + 1]: its own row of alpha; it is the last sender
    model: Params  # personal


def join(method: Algorithm, state: RunState, unseen: Federation, experiment: Experiment, rounds: int = 10) -> Joined:
    """Take one client into a finished run of `experiment`; leave its `state` as it is."""
    check_joining(method)
    joined = _run_unseen(method, state, unseen, experiment, rounds)
    local = create("local", method.task, method.training)
    alone = _run_unseen(local, state.model_copy(update={"server": {"model": {}}}), unseen, experiment, rounds)
    return joined._replace(score=joined.score | {"alone": alone.score["after"]})


def _run_unseen(method: Algorithm, state: RunState, unseen: Federation, experiment: Experiment, rounds: int) -> Joined:
    """Admit the client after the run's others and run `rounds`, or none where there is nothing to learn.

    Its messages are not encoded.
    """
    method, before = method.model_copy(update={"wire": WireSettings()}), split_links(state.server)[0]
    place = len(state.after_training)
    cohort = Cohort(state.round + 1, experiment.seed, ids=torch.tensor([place]), num_examples=unseen.num_examples)
    admitted = method.admit(before, experiment.seed)
    server = _protect_others(method, admitted, admitted, before)
    settings = experiment.engine.model_copy(update={"name": "threaded", "threads": 1, "compile": False})
    training, personal = method.count_epochs()
    epochs, mechanisms = training * rounds + EVALUATIONS * personal, list[Mechanism]()
    if experiment.privacy.is_on:
        size = int(unseen.num_examples[0])
        mechanisms = [design(experiment.privacy, size, method.training.batch_size, epochs)]
    with SimulatedEngine(method, unseen, settings, recalibrate=experiment.recalibrate, mechanisms=mechanisms) as engine:
        private = engine.algorithm.init_unseen(server, engine.algorithm.init_client())
        private = {name: value.to(engine.device) for name, value in private.items()}
        client = replace(engine.clients[0], number=place, state=private)
        engine.clients = [client] * (place + 1)  # only the last is asked: an engine finds a client by its number
        rounds = rounds if private or admitted is not before else 0
        score: dict[str, Any] = {"before": _evaluate(method, engine, server, cohort)}
        traffic, alphas, after_training = Traffic(), _alpha_row(method, server, place), None
        for _ in range(rounds):
            downloads = method.download(server, cohort)
            accepted, failures = accept(method, server, cohort, downloads, engine.train(cohort, downloads))
            _check_client(failures)
            server = method.aggregate(server, cohort, accepted.downloads, accepted.uploads)
            server = _protect_others(method, server, admitted, before)
            engine.commit(cohort.ids)
            cohort = cohort._replace(round=cohort.round + 1)
            after_training = finite_mean(accepted.after_training.score)
            down = int(payload_bytes(downloads, method.task.layers).sum())
            traffic = traffic.plus(down=down, up=accepted.num_bytes)
            alphas += _alpha_row(method, server, place)
        score |= {"after": _evaluate(method, engine, server, cohort), "after_training": after_training}
        model = engine.personal_models(cohort, method.download(server, cohort))[0]
    kept, epochs = torch.stack(alphas) if alphas else None, training * rounds + EVALUATIONS * personal
    released = describe([spent(one, epochs) for one in mechanisms]) if mechanisms else {}
    return Joined(rounds=rounds, score=score, traffic=traffic, privacy=released, alphas=kept, model=model)


def _protect_others(method: Algorithm, server: ServerState, admitted: ServerState, before: ServerState) -> ServerState:
    """Put back what all clients share, in copies that a round may write into; refuse a change of another's row."""
    kept = {group: dict(part) for group, part in server.items()}
    for group, part in before.items():
        for name, value in part.items():
            now = server[group][name]
            if now.shape == value.shape:
                kept[group][name] = admitted[group][name].clone()
            elif not torch.equal(now[tuple(map(slice, value.shape))], value):
                raise PfedlaError(f"{method.name} has changed another client's {name} ({group}); nothing is written")
    return kept


def _evaluate(method: Algorithm, engine: SimulatedEngine, server: ServerState, cohort: Cohort) -> float | None:
    metrics, failures = evaluate_all(method, engine, server, cohort)
    _check_client(failures)
    return finite_mean(metrics.score)


def _check_client(failures: Mapping[int, Failure]) -> None:
    for one in failures.values():
        hint = "; are its examples in the scale of the run's?" if one.reason in DIVERGED else ""
        raise PfedlaError(f"the client cannot take part: {one.reason} {one.detail}".strip() + hint) from one.error


def _alpha_row(method: Algorithm, server: ServerState, place: int) -> list[torch.Tensor]:
    """Return the client's row of alpha in a list; an empty one if there is none, or it is too large."""
    alpha = method.alpha(server) if plan_snapshots(method, place + 1) else None
    return [] if alpha is None else [alpha[place].clone()]


def join_unseen(run: Run, unseen: Federation, models: Path) -> dict[str, Any]:
    """Let the unseen clients join the finished run, each alone; write their models, return what result.json holds."""
    result: dict[str, Any] = {"clients": unseen.names, "rounds": 0}
    rows: list[dict[str, Any]] = []
    metric = Metric.of({"task": run.algorithm.task.objective.describe()})
    for number, name in enumerate(unseen.names):
        if run.stopping():
            raise Stopped
        target = models / f"unseen-{number}.safetensors"
        target.unlink(missing_ok=True)
        rows.append({})  # scores are null for a client that cannot join
        try:
            joined = join(run.algorithm, run.state, unseen.only([number]), run.experiment)
        except PfedlaError as error:  # the others can join all the same
            run.say(f"unseen client {name}: {error}")
            continue
        write_tensors(target, joined.model)
        rows[-1], result["rounds"] = joined.score, joined.rounds
        if joined.privacy:
            result.setdefault("epsilon", {})[name] = joined.privacy["epsilon"]["max"]
        first, last = (metric.show(joined.score[key]) for key in ("before", "after"))
        run.say(f"unseen client {name}: {metric.label} {first} at first, {last} at the end")
    for key in ("after", "before", "after_training", "alone"):
        values = np.array([row.get(key) for row in rows], dtype=np.float64)  # None becomes nan
        spread = summarise(torch.from_numpy(values), higher_is_better=metric.higher_is_better)
        result["score" if key == "after" else f"score_{key}"] = spread
    return result


def join_run(
    run: Path, data: Path, *, rounds: int = 10, name: str | None = None, say: Callable[[str], None] = print
) -> tuple[Path, dict[str, Any]]:
    """Take the client whose examples are in `data` into a finished run; return its folder and its result."""
    experiment, known = read_run(run)
    if experiment.data.dataset == SITES or (run / "site.json").exists() or (run / "deployment.json").exists():
        raise PfedlaError(f"{run} is a deployment's: clients' data never reach the server, so none can join")
    count = len(known.clients)
    method = build_around(experiment, known.to_outline()).algorithm
    unseen, split = load_unseen(data, experiment, known)
    folder = run / JOINED / safe_name(name or unseen.names[0])
    if folder.exists():
        raise PfedlaError(f"{folder} exists already and is never overwritten; give another --name")
    clients = stack([method.init_client()] * count) | {TRAINED: torch.zeros(count, dtype=torch.bool)}
    fresh = fresh_state(method, count, experiment.seed)
    warnings: list[str] = []

    def warn(line: str) -> None:
        say(line)
        warnings.append(line)

    state, _ = Checkpoints(run, experiment, warn).load_newest(fresh, clients) or (None, None)
    if state is None:
        raise PfedlaError(f"{run} holds no checkpoint that a client could join; run it again and keep the folder")
    joined = join(method, state, unseen, experiment, rounds)
    result = {"algorithm": method.name, "data": str(data.resolve()), "name": folder.name, "clients": count}
    result |= {"after_round": state.round, "rounds": joined.rounds, "rounds_alone": rounds, "seed": experiment.seed}
    result["examples"] = {"train": len(unseen.train[0].y), "test": len(unseen.test[0].y), "split": split}
    result["digest"] = digest_of(unseen.train[0], unseen.test[0])
    result |= {"task": method.task.objective.describe(), "score": joined.score, "traffic": asdict(joined.traffic)}
    result |= joined.privacy
    if unseen.scaling:
        result["scaling"] = unseen.scaling[0].to_lists()
    new_folder(folder, "give another --name")
    write_tensors(folder / "model.safetensors", joined.model)
    write_trained_on(folder, {0: (unseen.train[0], unseen.test[0])})
    if joined.alphas is not None:
        layers = method.task.layers.names
        result["senders"] = list(known.clients)
        result["alpha"] = dict(zip(layers, joined.alphas[-1].tolist(), strict=True))
        taken = {"alphas": list(joined.alphas), "alpha_rounds": list(range(joined.rounds + 1))}
        write_alpha(folder, state.model_copy(update=taken), layers)
    result |= {"warnings": warnings} if warnings else {}
    result["sha256"] = sum_files(folder, "model.safetensors", ALPHA, TRAINED_ON)
    write_text(folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")  # last
    return folder, result
