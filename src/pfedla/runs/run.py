"""A run from its first round, or its last checkpoint, to its result. `simulate` is the Python entry.

The command line, `compare`, `reproduce`, `simulate` and the Flower server app all drive `Run`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self

import torch

from pfedla.core.contracts import Algorithm, ClientMetrics, Engine, Failure
from pfedla.core.errors import GaveUpError, Stopped
from pfedla.core.faults import choose_attackers
from pfedla.core.rounds import Round, evaluate_all, everyone, in_chunks, run_rounds, timed
from pfedla.data.federation import Federation
from pfedla.engines.simulated import SimulatedEngine
from pfedla.report.figures import draw_run
from pfedla.runs.build import Built
from pfedla.runs.checkpoint import RunState, add_line, describe_round, show_alpha
from pfedla.runs.folder import RunFolder
from pfedla.runs.progress import Display
from pfedla.runs.result import Simulation, describe_result, write_results
from pfedla.runs.trackers import Tracking

SNAPSHOTS = 100
SNAPSHOT_NUMBERS = 2**26  # at most 256 MiB of alpha are kept
RunningEngine = AbstractContextManager[Engine]


class Run:
    """One run: iterate over its rounds, then `finish`. With a folder it is recorded, saved, and can be resumed."""

    def __init__(
        self,
        built: Built,
        folder: RunFolder | None = None,
        *,
        engine: RunningEngine | None = None,
        display: Display | None = None,
        stopping: Callable[[], bool] = lambda: False,
        track: Sequence[str] = (),
    ) -> None:
        self.built, self.experiment, self.algorithm = built, built.experiment, built.algorithm
        self.folder, self.display, self.stopping = folder, display, stopping
        self.trackers = Tracking(track, folder.path, self.say) if folder and track else None
        self.result: dict[str, Any] | None = None  # what result.json holds, once the run is finished
        self.simulation: Simulation | None = None  # the same for Python
        self._given_engine = engine
        self._evaluation: ClientMetrics | None = None  # of the last round
        num_clients, num_layers = len(built.federation), len(self.algorithm.task.layers)
        self._interval = snapshot_interval(self.experiment.rounds, num_clients, num_layers)
        self._keeps_alpha = can_keep_alpha(num_clients, num_layers)
        self.honest = torch.ones(num_clients, dtype=torch.bool)
        attackers = choose_attackers(self.experiment.faults, num_clients, self.experiment.seed)
        if len(attackers) < num_clients:  # if all attack now and then, nobody is told apart
            self.honest[attackers] = False

    def say(self, line: str) -> None:
        if self.display is not None:
            self.display.say(line)

    # Start and end

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            if self.built.note:
                self.say(self.built.note)
            if self.folder is not None:
                stack.enter_context(self.folder)
                stack.enter_context(self.folder.name_disk_errors())
                if self.trackers is not None:
                    stack.enter_context(self.trackers)
                self.result = self.folder.begin(self.experiment, self.say)
            if self.result is None:
                if self.folder is not None:
                    self.folder.describe(self.built.federation, self.built.unseen, self.say)
                self._start(stack.enter_context(self._given_engine or self._create_engine()))
            else:
                self._skip(self.experiment.rounds)
                self.say(f"the run is finished ({self.experiment.rounds} rounds); more --rounds extend it")
            if self.trackers is not None:
                self.trackers.begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _create_engine(self) -> RunningEngine:
        assert isinstance(self.built.federation, Federation)
        return SimulatedEngine(
            self.algorithm,
            self.built.federation,
            self.experiment.engine,
            recalibrate=self.experiment.recalibrate,
            faults=self.experiment.faults,
            stopping=self.stopping,
        )

    def _start(self, engine: Engine) -> None:
        """Take the state of the last checkpoint, or a fresh one."""
        self.engine = engine
        experiment, num_examples = self.experiment, self.built.federation.num_examples
        self.state = fresh_state(self.algorithm, len(num_examples), experiment.seed)
        if self.folder is not None and self.folder.reopened:
            loaded = self.folder.checkpoints.load_newest(self.state, engine.state())
            if loaded is not None:
                self.state, clients = loaded
                engine.load(clients)
                thin_snapshots(self.state, self._interval, experiment.rounds)
            self.folder.prepare_resume(self.state)
            where = f"resuming after round {self.state.round}" if loaded else "no checkpoint yet, starting"
            self.say(f"{self.folder.path}: {where}")
            self._skip(self.state.round)
        if self.state.failed_rounds >= experiment.uploads.max_failed_rounds:
            raise GaveUpError(
                f"the last {self.state.failed_rounds} rounds had no usable upload, so the run was given up; "
                "raise uploads.max_failed_rounds to continue"
            )
        bound = experiment.uploads.norm_bound
        self._rounds = run_rounds(
            self.algorithm,
            engine,
            num_examples,
            self.state.server,
            rounds=range(self.state.round + 1, experiment.rounds + 1),
            participation=experiment.participation,
            evaluate_every=experiment.evaluate_every,
            seed=experiment.seed,
            traffic=self.state.traffic,
            norm_bound=None if bound == "off" else bound,
        )

    def _skip(self, rounds: int) -> None:
        if self.display is not None:
            self.display.skip(rounds)

    # Rounds

    def __iter__(self) -> Iterator[Round]:
        while self.result is None and self.state.round < self.experiment.rounds:
            yield self.step()

    def step(self) -> Round:
        """Run the next round, record it, and save the run if that is due."""
        try:
            if self.stopping():
                raise Stopped
            round = next(self._rounds)
        except Stopped:
            # The round in work was dropped before any state advanced: this is the state after the one before it.
            self._save(anyway=self.state.round > 0)
            raise
        self._advance(round)
        with timed(self.state.seconds, "record"):
            self._record(round)
        gave_up = self._failed(round)
        is_last = round.round == self.experiment.rounds
        with timed(self.state.seconds, "checkpoint"):
            self._save(anyway=self.stopping() or gave_up is not None or is_last)
        if gave_up is not None:
            raise gave_up
        return round

    def _advance(self, round: Round) -> None:
        state = self.state
        state.round, state.server, self._evaluation = round.round, round.server, round.evaluation
        # The last round is always evaluated. A longer run would not have evaluated it out of turn: not counted here.
        out_of_turn = round.round % self.experiment.evaluate_every
        state.traffic = round.traffic.plus(evaluation=-round.evaluation_bytes if out_of_turn else 0)
        self._traffic = round.traffic
        for client, accuracy in zip(round.cohort.ids.tolist(), round.after_training.accuracy.tolist(), strict=True):
            state.after_training[client] = accuracy
        state.failed_rounds = 0 if len(round.cohort.ids) else state.failed_rounds + 1
        for failures in (round.failures, round.evaluation_failures):
            for client, failure in failures.items():
                reasons = state.failures.setdefault(client, {})
                reasons[failure.reason] = reasons.get(failure.reason, 0) + 1
        for phase, seconds in round.seconds.items():
            state.seconds[phase] = state.seconds.get(phase, 0.0) + seconds

    def _record(self, round: Round) -> None:
        layers = self.algorithm.task.layers.names
        if self._keeps_alpha and (round.round % self._interval == 0 or round.round == self.experiment.rounds):
            take_snapshot(self.state, self.algorithm)
            if self.folder is not None:
                show_alpha(self.folder.path, self.state, layers)
        if self.folder is not None and round.evaluation is not None:
            line = describe_round(round, layers, self.honest, self.state.failures)
            add_line(self.folder.path, line)
            if self.trackers is not None:
                self.trackers.log(line)
        if self.display is not None:
            self.display.on_round(round)

    def _save(self, *, anyway: bool) -> None:
        if self.folder is None:
            return
        self.folder.has_rounds = self.state.round > 0
        if anyway or self.folder.checkpoints.is_due(self.state.round):
            self.folder.checkpoints.save(self.state, self.engine.state())

    def _failed(self, round: Round) -> GaveUpError | None:
        """Return the error that ends a run without usable uploads or personal models."""
        count = self.state.failed_rounds
        if count >= self.experiment.uploads.max_failed_rounds:
            what = f"no upload could be used in {count} rounds in a row (max_failed_rounds)"
            return give_up(f"{what}, the last time in round {round.round}", round.failures)
        return check_evaluation(round.evaluation, round.evaluation_failures, round.round)

    # Result

    def finish(self) -> dict[str, Any]:
        """Write the personal models and the result; return what result.json holds."""
        if self.result is None:
            self.simulation = self._conclude()
            self.result = describe_result(self.built, self.simulation, self.honest)
            if self.folder is not None:
                write_results(self, self.folder, self.simulation, self.result)
        elif self.folder is not None and not (self.folder.path / "learning_curve.png").exists():
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
        cohort = everyone(self.built.federation.num_examples, rounds + 1, self.experiment.seed)
        if self._evaluation is None:  # all rounds had been run before
            evaluated = evaluate_all(self.algorithm, self.engine, state.server, cohort)
            self._evaluation, failures, evaluation_bytes = evaluated
            if (error := check_evaluation(self._evaluation, failures, rounds)) is not None:
                raise error
            out_of_turn = rounds % self.experiment.evaluate_every
            self._traffic = state.traffic.plus(evaluation=evaluation_bytes if out_of_turn else 0)
        chunks = in_chunks(self.algorithm, state.server, cohort)
        models = [model for chunk, downloads in chunks for model in self.engine.personal_models(chunk, downloads)]
        return Simulation(
            algorithm=self.algorithm,
            accuracy=self._evaluation.accuracy,
            loss=self._evaluation.loss,
            accuracy_after_training=torch.tensor(
                [math.nan if value is None else value for value in state.after_training], dtype=torch.float64
            ),
            traffic=self._traffic,
            failures=state.failures,
            seconds=state.seconds,
            alphas=torch.stack(state.alphas) if state.alphas else None,
            alpha_rounds=state.alpha_rounds,
            models=models,
        )


def can_keep_alpha(num_clients: int, num_layers: int) -> bool:
    return num_clients * num_layers * num_clients <= SNAPSHOT_NUMBERS


def fresh_state(algorithm: Algorithm, num_clients: int, seed: int) -> RunState:
    """Return the state before the first round."""
    state = RunState(server=algorithm.init_server(num_clients, seed), after_training=[None] * num_clients)
    if can_keep_alpha(num_clients, len(algorithm.task.layers)):
        take_snapshot(state, algorithm)
    return state


def snapshot_interval(rounds: int, num_clients: int, num_layers: int) -> int:
    """Return the rounds between two snapshots of alpha: at most a hundred are taken, and they fit in memory.

    A power of two: a run that is extended later has taken all the snapshots that the longer one needs.
    """
    affordable = max(1, min(SNAPSHOTS, SNAPSHOT_NUMBERS // (num_clients * num_layers * num_clients)))
    return 1 << (-(-rounds // affordable) - 1).bit_length()


def take_snapshot(state: RunState, algorithm: Algorithm) -> None:
    alpha = algorithm.alpha(state.server)
    if alpha is not None:
        state.alphas.append(alpha)
        state.alpha_rounds.append(state.round)


def thin_snapshots(state: RunState, interval: int, rounds: int) -> None:
    """Leave out the snapshots that a run of this length would not have taken."""
    kept = [n for n, round in enumerate(state.alpha_rounds) if round % interval == 0 or round == rounds]
    state.alphas = [state.alphas[position] for position in kept]
    state.alpha_rounds = [state.alpha_rounds[position] for position in kept]


def check_evaluation(
    evaluation: ClientMetrics | None, failures: Mapping[int, Failure], round: int
) -> GaveUpError | None:
    """Return an error if no personal model could be evaluated."""
    if evaluation is None or not failures or not evaluation.accuracy.isnan().all():
        return None
    return give_up(f"no personal model could be evaluated in round {round}", failures)


def give_up(what: str, failures: Mapping[int, Failure]) -> GaveUpError:
    """Return the error that ends a run; it names the first failure."""
    client, failure = next(iter(failures.items()))
    detail = f" ({failure.detail})" if failure.detail else ""
    hint = ""
    if failure.reason == "not finite":
        hint = "; training diverges: a smaller lr, or uploads.norm_bound from the start, may help"
    error = GaveUpError(f"{what}; client {client}: {failure.reason}{detail}{hint}")
    error.__cause__ = failure.error
    return error
