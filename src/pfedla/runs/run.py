"""A run from its first round, or its last checkpoint, to its result. All commands and entries drive `Run`."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from pfedla.algorithms import NamedClass, register
from pfedla.core.contracts import ClientMetrics, Cohort, Engine, Failure, Params
from pfedla.core.errors import GaveUpError, Stopped
from pfedla.core.faults import choose_attackers
from pfedla.core.objectives import Objective
from pfedla.core.rounds import (
    DIVERGED,
    NO_ANSWER,
    Round,
    evaluate_all,
    finite_mean,
    in_chunks,
    run_rounds,
    summarise,
    timed,
)
from pfedla.core.settings import AUTO
from pfedla.data.federation import Federation
from pfedla.engines.simulated import SimulatedEngine
from pfedla.report.figures import draw_run
from pfedla.report.reading import Metric
from pfedla.runs.build import Built, build, build_around, check_federation, choose_objective
from pfedla.runs.experiment import Experiment, list_settings, nest
from pfedla.runs.folder import RUNS, RunFolder, folder_name, fresh_state, number_folder, plan_snapshots, write_alpha
from pfedla.runs.progress import Display
from pfedla.runs.recovery import explain_way_back, resolve_exclusions
from pfedla.runs.releases import Releases
from pfedla.runs.result import Simulation, describe_result, write_results
from pfedla.runs.trackers import Tracking, check_trackers

Failures = Mapping[int, Failure]


class Run:
    """One run: iterate over its rounds, then `finish`. With a folder it is recorded, saved, and can be resumed."""

    def __init__(
        self,
        built: Built,
        folder: RunFolder | None = None,
        *,
        engine: AbstractContextManager[Engine] | None = None,
        display: Display | None = None,
        stopping: Callable[[], bool] = lambda: False,
        track: Sequence[str] = (),
        pictures: bool = True,
    ) -> None:
        names = built.federation.names
        if folder is None or not folder.reopened:  # else the next round is not known yet
            built = built.exclude(resolve_exclusions(built.experiment.exclude, names))
        self.pictures = pictures
        self.built, self.experiment, self.algorithm = built, built.experiment, built.algorithm
        self.folder, self.stopping, self._given_engine = folder, stopping, engine
        self.display, self._is_shown = display or Display(self.experiment.rounds, quiet=True), display is not None
        self.display.metric = Metric.of({"task": built.algorithm.task.objective.describe()})
        self.display.names = list(names)
        self.say = self.display.say
        self.trackers = Tracking(track, folder.path, self.say) if folder and track else None
        self.result: dict[str, Any] | None = None  # what result.json holds, once the run is finished
        self.simulation: Simulation | None = None  # the same for Python
        self._evaluation: ClientMetrics | None = None  # of the last round
        self.releases = Releases(self.experiment, self.algorithm, built.federation.num_examples)
        num_clients = len(built.federation)
        self._snapshots = plan_snapshots(self.algorithm, num_clients, self.experiment.rounds)
        self.honest = torch.ones(num_clients, dtype=torch.bool)
        attackers = choose_attackers(self.experiment.faults, num_clients, self.experiment.seed)
        if len(attackers) < num_clients:  # if all attack now and then, nobody is told apart
            self.honest[attackers] = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.folder is not None:
                stack.enter_context(self.folder)
                self.result = self.folder.begin(self.built, self.say)
            if self.result is None:
                self._start(stack.enter_context(self._given_engine or self._create_engine()))
            else:
                self.display.skip(self.experiment.rounds)
                self.say(f"the run is finished ({self.experiment.rounds} rounds); more --rounds extend it")
            if self.trackers is not None:
                stack.enter_context(self.trackers).begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _create_engine(self) -> AbstractContextManager[Engine]:
        settings, clients = self.experiment, self.built.federation
        assert isinstance(clients, Federation)
        known = {"recalibrate": settings.recalibrate, "faults": settings.faults, "rounds": settings.rounds}
        private = self.releases.mechanisms()
        engine = SimulatedEngine(self.algorithm, clients, settings.engine, mechanisms=private, **known)
        engine.stopping = self.stopping
        return engine

    def _start(self, engine: Engine) -> None:
        """Take the state of the last checkpoint, or a fresh one."""
        self.engine = engine
        experiment, num_examples = self.experiment, self.built.federation.num_examples
        self.state = fresh_state(self.algorithm, len(num_examples), experiment.seed)
        if self.folder is not None and self.folder.reopened:
            going_back = self.folder.from_round is not None
            loaded = self.folder.checkpoints.load_newest(self.state, engine.state(), self.folder.from_round)
            if loaded is not None:
                self.state, clients = loaded
                engine.load(clients)
            how: dict[str, Any] = {"before": self.folder.excluded, "round": self.state.round, "going_back": going_back}
            excluded = resolve_exclusions(experiment.exclude, self.built.federation.names, **how)
            self.built = self.built.exclude(excluded)
            self.experiment = experiment = self.built.experiment
            self.folder.prepare_resume(self.state, experiment)
            self.state.warnings = list(dict.fromkeys([*self.state.warnings, *self.folder.warnings]))
            where = f"resuming after round {self.state.round}" if loaded else "no checkpoint yet, starting"
            self.say(f"{self.folder.path}: {where}")
            self.display.skip(self.state.round)
        if changed := self.state.note_bound(experiment):
            self.say(changed)
        self._check({}, None, {})
        for name, start in experiment.exclude.items():
            self.say(f"client {name} takes no part from round {start} on")
        for note in (*self.built.notes, self.algorithm.notice(experiment.rounds * experiment.participation)):
            if note:
                self.say(note)
        how = experiment.model_dump(include={"participation", "evaluate_every", "seed"})
        how |= {"rounds": range(self.state.round + 1, experiment.rounds + 1), "traffic": self.state.traffic}
        how["excluded"] = {self.built.federation.names.index(name): start for name, start in experiment.exclude.items()}
        how |= {"uploads": experiment.uploads, "lengths": self.state.lengths}
        self._rounds = run_rounds(self.algorithm, engine, num_examples, self.state.server, **how)

    def __iter__(self) -> Iterator[Round]:
        while self.result is None and self.state.round < self.experiment.rounds:
            yield self.step()

    def step(self) -> Round:
        """Run the next round, record it, and save the run if that is due."""
        try:
            if self.stopping():
                raise Stopped
            round = next(self._rounds)
            self._advance(round)
            with timed(self.state.seconds, "record"):
                self._record(round)
            self._check(round.failures, round.evaluation, round.evaluation_failures)
        except (Stopped, GaveUpError):
            # A round that is stopped is dropped before any state advances: the state is that after the one before it.
            self._save(anyway=True)
            raise
        with timed(self.state.seconds, "checkpoint"):
            self._save(anyway=self.stopping() or round.round == self.experiment.rounds)
        return round

    def _advance(self, round: Round) -> None:
        state = self.state
        state.round, state.server, state.traffic = round.round, round.server, round.traffic
        state.lengths = round.lengths
        self._evaluation = round.evaluation
        for client, score in zip(round.cohort.ids.tolist(), round.after_training.score.tolist(), strict=True):
            state.after_training[client] = score if math.isfinite(score) else None
        state.trend = state.trend.follow(round, higher_is_better=self._higher_is_better)
        if self.releases.is_on:
            self.releases.count(state, round)
        if len(round.cohort.ids):
            state.failed_rounds = 0
        elif round.failures:  # else all clients of the round are excluded
            state.failed_rounds += 1
        for client, failure in [*round.failures.items(), *round.evaluation_failures.items()]:
            reasons = state.failures.setdefault(client, {})
            reasons[failure.reason] = reasons.get(failure.reason, 0) + 1
        for phase, seconds in round.seconds.items():
            state.seconds[phase] = state.seconds.get(phase, 0.0) + seconds

    def _record(self, round: Round) -> None:
        self.state.take_snapshot(self.algorithm, self._snapshots)
        if self.folder is not None and round.round in self._snapshots:
            write_alpha(self.folder.path, self.state, self.algorithm.task.layers.names, at_end=False)
        if self.folder is not None and round.evaluation is not None:
            self.folder.add_line(line := self._describe(round, round.evaluation))
            if self.trackers is not None:
                self.trackers.log(line)
        if self._is_shown:
            self.display.on_round(round)

    def _describe(self, round: Round, evaluation: ClientMetrics) -> dict[str, Any]:
        """Return what rounds.jsonl holds of an evaluated round."""
        retained = zip(self.algorithm.task.layers.names, (~round.sent).sum(0).tolist(), strict=True)
        line: dict[str, Any] = {
            "round": round.round,
            "score": self.summarise(evaluation.score),
            "loss": finite_mean(evaluation.loss),
            "score_after_training": finite_mean(round.after_training.score),
            "training_loss": finite_mean(round.training_loss),
            "seconds": {phase: float(f"{value:.4f}") for phase, value in round.seconds.items()},
            **asdict(round.traffic),
            "cohort": round.cohort.ids.tolist(),
            "retained": {layer: count for layer, count in retained if count},
            "failures": self.state.failures,
            **(self.releases.spent(self.state) if self.releases.is_on else {}),
        }
        honest = {"score": self.summarise(evaluation.score[self.honest])}
        for part in (line, honest):
            del part["score"]["per_client"]
        return line if self.honest.all() else line | {"honest": honest}

    def summarise(self, scores: Tensor) -> dict[str, Any]:
        return summarise(scores, higher_is_better=self._higher_is_better)

    @property
    def _higher_is_better(self) -> bool:
        return self.algorithm.task.objective.metric.higher_is_better

    def _save(self, *, anyway: bool) -> None:
        if self.folder is not None and (anyway or self.folder.checkpoints.is_due(self.state.round)):
            self.folder.checkpoints.save(self.state, self.engine.state())

    def _check(self, failures: Failures, evaluation: ClientMetrics | None, evaluation_failures: Failures) -> None:
        """Give up after too many rounds without a usable upload, or if no personal model could be evaluated."""
        count, what = self.state.failed_rounds, ""
        if count >= self.experiment.uploads.max_failed_rounds:
            what = f"no upload could be used in {count} rounds in a row (uploads.max_failed_rounds)"
        elif evaluation is not None and evaluation_failures and evaluation.loss.isnan().all():
            what, failures = f"no personal model could be evaluated in round {self.state.round}", evaluation_failures
        if not what:
            return
        way_back = self._name_way_back(failures)
        if not failures:
            raise GaveUpError(what + way_back)
        client, failure = next(iter(failures.items()))
        detail = f" ({failure.detail})" if failure.detail else ""
        if failure.reason in DIVERGED and not way_back:
            detail += "; training diverges: a smaller lr may help"
        raise GaveUpError(f"{what}; client {client}: {failure.reason}{detail}{way_back}") from failure.error

    def _name_way_back(self, failures: Failures) -> str:
        """Return how to go back to before the fall of the score, if it was good before."""
        trend, folder = self.state.trend, self.folder
        spoiled = trend.has_fallen or trend.suspects or any(one.reason != NO_ANSWER.reason for one in failures.values())
        if not spoiled or not 0 < trend.good_round < self.state.round:
            return ""
        known: dict[str, Any] = {"rounds": folder.checkpoints.rounds() if folder else []}
        known |= {"run": folder.path if folder else None, "is_deployed": self._given_engine is not None}
        return explain_way_back(trend, self.built.federation.names, excluded=self.experiment.exclude, **known)

    def finish(self) -> dict[str, Any]:
        """Write the personal models and the result; return what result.json holds."""
        if self.result is None:
            self.simulation = self._conclude()
            self.result = describe_result(self.built, self.simulation, self.honest)
            self.result |= self.releases.conclude(self.state)
            if self.experiment.exclude:
                self.result["excluded"] = self.experiment.exclude
            if self.state.trend.has_fallen and self.state.trend.suspects:
                self.say(f"the score has not recovered{self._name_way_back({})}")
            if self.state.warnings:
                self.result["warnings"] = self.state.warnings
            if self.folder is not None:
                write_results(self, self.folder, self.simulation, self.result)
        elif self.pictures and self.folder is not None and not (self.folder.path / "learning_curve.png").exists():
            draw_run(self.folder.path)  # it was stopped after its numbers and before its pictures
        if self.trackers is not None:
            self.trackers.result = self.result
        return self.result

    def complete(self) -> dict[str, Any]:
        """Run all remaining rounds and finish."""
        with self:
            for _ in self:
                pass
            return self.finish()

    def _conclude(self) -> Simulation:
        state, rounds = self.state, self.experiment.rounds
        cohort = Cohort.everyone(self.built.federation.num_examples, rounds + 1, self.experiment.seed)
        if self._evaluation is None:  # all rounds had been run before
            self._evaluation, failures = evaluate_all(self.algorithm, self.engine, state.server, cohort, whole=True)
            self._check({}, self._evaluation, failures)
        models: list[Params] = []
        for chunk, downloads in in_chunks(self.algorithm, state.server, cohort):
            models += self.engine.personal_models(chunk, downloads)
        after_training = [math.nan if value is None else value for value in state.after_training]
        return Simulation(
            algorithm=self.algorithm,
            federation=self.built.federation,
            scores=self._evaluation.score,
            loss=self._evaluation.loss,
            metrics=self._evaluation.others,
            score_after_training=torch.tensor(after_training, dtype=torch.float64),
            traffic=state.traffic,
            alphas=torch.stack(state.alphas) if state.alphas else None,
            models=models,
            **state.model_dump(include={"failures", "seconds", "alpha_rounds", "norm_bounds"}),
        )


def run(
    experiment: Experiment,
    out: Path | None = None,
    *,
    resume: bool = False,
    from_round: int | None = None,
    track: Sequence[str] = (),
) -> Path:
    """Run an experiment, or resume the one in `out`; return its folder.

    `from_round`: resume after this round, and drop what came later. `track`: tensorboard, mlflow, wandb.
    """
    trackers, built = check_trackers(track), build(experiment)
    out = out or number_folder(RUNS / folder_name(built.experiment))
    folder = RunFolder(out, resume=resume, from_round=from_round)
    Run(built, folder, track=trackers).complete()
    return folder.path


def simulate(
    federation: Federation,
    model: nn.Module,
    algorithm: NamedClass = "pfedla",
    *,
    task: str | Objective = AUTO,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    on_round: Callable[[Round], None] | None = None,
    progress: bool | None = None,
    faults: dict[str, Any] | Any = None,
    privacy: dict[str, Any] | None = None,
    **settings: Any,
) -> Simulation:
    """Train personal models for all clients of a federation.

    `model` maps a batch to outputs; its present weights are the common initialisation. `algorithm` is a name, a class,
    or "package.module:Class". `task` is classification,
    multilabel, regression, survival (by default what the federation says), or an `Objective` of your own; `loss`
    replaces its loss. `settings` are those of the
    experiment file by their short names (`rounds`, `lr`, `seed`, …; docs/experiment-file.md lists them) and the
    algorithm's own options (`neighbours`, …). `faults` makes clients fail on purpose; `privacy` (epsilon, …)
    makes their training private. `on_round` is called after every round. `progress` shows a progress bar; by default it
    does so on a terminal.
    """
    check_federation(federation)
    known = [name for name, place in list_settings().items() if place.section not in ("data", "faults", "privacy")]
    common = {name: settings.pop(name) for name in known if name in settings}
    own = {"algorithm": {"name": register(algorithm), **settings}, "faults": faults or {}, "privacy": privacy or {}}
    if isinstance(task, str):
        common["task"] = task
    experiment = Experiment.parse(nest(common) | own)
    objective = choose_objective(experiment, federation) if isinstance(task, str) else task
    objective = replace(objective, loss=loss) if loss else objective
    built = build_around(experiment, federation, model, objective)
    is_shown = sys.stderr.isatty() if progress is None else progress
    with Display(experiment.rounds, quiet=not is_shown) as display:
        display.begin(built.algorithm.name, experiment.seed)
        with Run(built, display=display) as run:
            for round in run:
                if on_round is not None:
                    on_round(round)
            run.finish()
    assert run.simulation is not None
    return run.simulation
