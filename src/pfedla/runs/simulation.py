"""The Python entry: a federation and a model in, personal models and alpha out."""

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, get_args

import numpy as np
import torch
from torch import Tensor, nn

from pfedla.algorithms import create
from pfedla.runs.checkpoint import Progress
from pfedla.core.rounds import Traffic
from pfedla.runs.progress import Reporter
from pfedla.core.contracts import Algorithm, Engine, LocalTraining, Params, Recalibrate
from pfedla.data.federation import Federation, Outline
from pfedla.engines import create_engine
from pfedla.engines.choice import Compile, chosen_compile, chosen_engine
from pfedla.core.errors import GaveUpError, PfedlaError, Stopped, unknown
from pfedla.core.faults import Faults
from pfedla.core.rounds import Round, Stopwatch, evaluate_all, everyone, in_chunks, run_rounds
from pfedla.core.tasks import load_tensors, task_of
from pfedla.core.training import batch_bounds
from pfedla.core.uploads import NO_ANSWER, count_failures

SNAPSHOTS = 100
SNAPSHOT_NUMBERS = 2**26  # at most 256 MiB of alpha are kept


@dataclass(frozen=True, repr=False)
class Simulation:
    """The end of a run. Accuracies are fractions, on every client's own test data, after the last round."""

    algorithm: Algorithm
    accuracy: Tensor  # [clients], of the personal models
    loss: Tensor
    accuracy_after_training: Tensor  # [clients], of the model each had after its last local training; nan if it never trained
    traffic: Traffic
    failures: dict[int, dict[str, int]]  # client -> reason -> how often it had no part in a round for it
    seconds: dict[str, float]  # by phase
    alphas: Tensor | None  # [snapshots, clients, layers, clients]; alpha[i, layer, j]: i receives, j sends; None if too large
    alpha_rounds: list[int]  # the round after which each snapshot was taken; 0 is the start
    models: list[Params]  # every client's personal model

    @property
    def layer_names(self) -> tuple[str, ...]:
        return self.algorithm.task.layers.names

    @property
    def alpha(self) -> Tensor | None:
        """The learned weights at the end, [clients, layers, clients]; None if a method has none, or too many to keep."""
        return None if self.alphas is None else self.alphas[-1]

    @property
    def refused_uploads(self) -> int:
        """How many uploads came and were not used."""
        none = (NO_ANSWER.reason, "raised")
        return sum(times for why in self.failures.values() for reason, times in why.items() if reason not in none)

    def __repr__(self) -> str:
        mean, worst = (f"{100 * value:.1f} %" for value in (self.accuracy.nanmean(), np.nanmin(self.accuracy)))
        return f"Simulation({self.algorithm.name}, {len(self.models)} clients, accuracy {mean}, worst client {worst})"

    def personal_model(self, client: int) -> nn.Module:
        """What this client would deploy: a copy of your module with its tensors, in eval mode.

        It takes what it was trained on: uint8 images go through `Federation.normalised` first.
        """
        if not 0 <= client < len(self.models):
            raise PfedlaError(f"client {client}: there are clients 0 to {len(self.models) - 1}")
        return load_tensors(self.algorithm.task.module, self.models[client])


@dataclass(frozen=True)
class Settings:
    """How a method is run; its own options and the data are elsewhere."""

    rounds: int
    participation: float = 1.0
    seed: int = 0
    engine: str = "threaded"
    threads: int = 0
    device: str = "cpu"
    compile: bool = False
    evaluate_every: int = 1
    recalibrate: Recalibrate = "unsampled"
    norm_bound: float | None = None
    max_failed_rounds: int = 5
    faults: Faults = field(default_factory=Faults)


RunningEngine = AbstractContextManager[Engine]


class Keeper(Protocol):
    """Keeps a run's progress on disk, and knows when it is to stop."""

    def restore(self, fresh: Progress, clients: Params) -> tuple[Progress, Params] | None: ...
    def save_if_due(self, progress: Progress, clients: Callable[[], Params], *, anyway: bool) -> None: ...
    def show(self, progress: Progress, layers: Sequence[str]) -> None: ...
    def stopping(self) -> bool: ...


def snapshot_interval(rounds: int, num_clients: int, num_layers: int) -> int:
    """Rounds between two snapshots of alpha, so that there are at most a hundred and they stay in memory.

    A power of two: a run that is made longer later then has taken all the snapshots that the longer one needs.
    """
    affordable = max(1, min(SNAPSHOTS, SNAPSHOT_NUMBERS // (num_clients * num_layers * num_clients)))
    return 1 << (-(-rounds // affordable) - 1).bit_length()


def simulate(
    federation: Federation,
    model: nn.Module,
    algorithm: str = "pfedla",
    *,
    rounds: int = 20,
    local_epochs: int = 5,
    lr: float = 0.01,
    batch_size: int = 32,
    augment: bool = False,
    participation: float = 1.0,
    seed: int = 0,
    engine: str = "auto",
    threads: int = 0,
    device: str = "cpu",
    compile: Compile = "auto",
    evaluate_every: int = 1,
    recalibrate: Recalibrate = "unsampled",
    norm_bound: float | None = None,
    max_failed_rounds: int = 5,
    faults: Faults | None = None,
    on_round: Callable[[Round], None] | None = None,
    progress: bool | None = None,
    **options: object,
) -> Simulation:
    """Train personal models for all clients of a federation.

    `model` maps a batch to logits; its present weights are everyone's start. `options` are the algorithm's own
    (`retained_layers`, `neighbours`, …). `augment` crops and flips the training images at random. `norm_bound` refuses
    updates longer than so many medians of the round's; after `max_failed_rounds` rounds in a row of which nothing could be
    used, the run stops. `engine` and `compile` are chosen by the device and the model unless given. `faults` makes clients
    fail on purpose. `on_round` is called after every round. `progress` shows how far it is; left out, it does so on a terminal.
    """
    for name, value, least in (
        ("rounds", rounds, 1), ("local_epochs", local_epochs, 1), ("batch_size", batch_size, 1),
        ("evaluate_every", evaluate_every, 1), ("threads", threads, 0), ("max_failed_rounds", max_failed_rounds, 1),
    ):  # fmt: skip
        if value < least:
            raise PfedlaError(f"{name} = {value} is not possible: it should be at least {least}")
    for key, word, words in (("recalibrate", recalibrate, Recalibrate), ("compile", compile, Compile)):
        if word not in get_args(words):
            raise unknown(key, word, get_args(words))
    if not 0 < lr < math.inf or not 0 < participation <= 1:
        raise PfedlaError(
            f"lr = {lr}, participation = {participation}: lr must be above 0, participation above 0 and at most 1"
        )
    if norm_bound is not None and not norm_bound >= 1:
        raise PfedlaError(f"norm_bound = {norm_bound} is not possible: it is a number of medians, at least 1")
    with Reporter(rounds, quiet=not (sys.stderr.isatty() if progress is None else progress)) as reporter:
        reporter.begin(algorithm, seed)

        def after_round(played: Round) -> None:
            reporter.on_round(played)
            if on_round is not None:
                on_round(played)

        if augment:
            federation.check_images()
        task = task_of(model)
        sizes = {stop - start for n in set(federation.num_examples.tolist()) for start, stop in batch_bounds(n, batch_size)}
        task.check(federation.normalised(federation.train[0].x[: min(sizes)]), len(federation.classes))
        method = create(algorithm, task, LocalTraining(lr, local_epochs, batch_size, augment), options)
        name = chosen_engine(engine, device, model)
        compiled, note = chosen_compile(compile, name, device)
        if note:
            reporter.say(note)
        settings = Settings(
            rounds, participation, seed, name, threads, device, compiled == "on", evaluate_every, recalibrate, norm_bound,
            max_failed_rounds, faults or Faults(),
        )  # fmt: skip
        return simulate_method(federation, method, settings, on_round=after_round)


def simulate_method(
    federation: Outline, method: Algorithm, settings: Settings, *,
    on_round: Callable[[Round], None] | None = None, keeper: Keeper | None = None, engine: RunningEngine | None = None,
) -> Simulation:  # fmt: skip
    """`simulate` for an algorithm that is built already; with a keeper it goes on from where the run stands on disk.

    `engine` is where the clients are; left out, it is made by the settings, and the federation must hold the data.
    """
    num_clients, rounds, seed = len(federation), settings.rounds, settings.seed
    method.check(num_clients)
    settings.faults.check(num_clients, method.training.epochs)
    interval = snapshot_interval(rounds, num_clients, len(method.task.layers))
    if engine is None:
        assert isinstance(federation, Federation)
        engine = create_engine(
            settings.engine, method, federation, device=settings.device, threads=settings.threads,
            recalibrate=settings.recalibrate, compile=settings.compile, faults=settings.faults,
            stopping=keeper.stopping if keeper else lambda: False,
        )  # fmt: skip
    with engine as clients:
        progress = Progress(method.init_server(num_clients, seed), torch.full((num_clients,), torch.nan, dtype=torch.float64))
        snapshot(progress, method)
        if keeper is not None and (kept := keeper.restore(progress, clients.state())) is not None:
            progress, private = kept
            clients.load(private)
            thin(progress, interval, rounds)
            if progress.failed_rounds >= settings.max_failed_rounds:
                raise GaveUpError(
                    f"the last {progress.failed_rounds} rounds brought nothing that could be used, so the run was given up; "
                    "a larger max_failed_rounds lets it go on"
                )
        evaluation, traffic = None, progress.traffic
        try:
            for played in run_rounds(
                method, clients, federation.num_examples, progress.server, rounds=range(progress.round + 1, rounds + 1),
                participation=settings.participation, evaluate_every=settings.evaluate_every, seed=seed,
                traffic=progress.traffic, norm_bound=settings.norm_bound,
            ):  # fmt: skip
                evaluation, traffic = played.evaluation, played.traffic
                advance(progress, played, scheduled=played.round % settings.evaluate_every == 0)
                watch = Stopwatch(progress.seconds)
                with watch.phase("record"):
                    if played.round % interval == 0 or played.round == rounds:
                        snapshot(progress, method)
                        if keeper is not None:
                            keeper.show(progress, method.task.layers.names)
                    if on_round is not None:
                        on_round(played)
                given_up = progress.failed_rounds >= settings.max_failed_rounds
                if keeper is not None:
                    stopping = keeper.stopping()
                    with watch.phase("checkpoint"):  # which holds the seconds of those before it
                        keeper.save_if_due(progress, clients.state, anyway=stopping or given_up or played.round == rounds)
                    if stopping and played.round < rounds:
                        raise Stopped
                if given_up:
                    raise failed(played, progress.failed_rounds)
        except Stopped:
            # The round in work was dropped before anybody's state advanced, so this is the state after the one before it.
            if keeper is not None and progress.round:
                keeper.save_if_due(progress, clients.state, anyway=True)
            raise
        cohort = everyone(federation.num_examples, rounds + 1, seed)
        if evaluation is None:  # all rounds had been played before
            evaluation, evaluation_bytes = evaluate_all(method, clients, progress.server, cohort)
            if rounds % settings.evaluate_every:
                traffic = traffic.plus(evaluation=evaluation_bytes)
        chunks = in_chunks(method, progress.server, cohort)
        models = [model for chunk, downloads in chunks for model in clients.personal_models(chunk, downloads)]
    return Simulation(
        method, evaluation.accuracy, evaluation.loss, progress.after_training, traffic, progress.failures, progress.seconds,
        torch.stack(progress.alphas) if progress.alphas else None, progress.alpha_rounds, models,
    )  # fmt: skip


def snapshot(progress: Progress, method: Algorithm) -> None:
    """Take alpha as it is now; none if a single one is too large to be kept."""
    num_clients = len(progress.after_training)
    if num_clients * len(method.task.layers) * num_clients > SNAPSHOT_NUMBERS:
        return
    alpha = method.alpha(progress.server)
    if alpha is not None:
        progress.alphas.append(alpha)
        progress.alpha_rounds.append(progress.round)


def thin(progress: Progress, interval: int, rounds: int) -> None:
    """Leave out the snapshots that a run of this length would not have taken."""
    kept = [n for n, round in enumerate(progress.alpha_rounds) if round % interval == 0 or round == rounds]
    progress.alphas = [progress.alphas[position] for position in kept]
    progress.alpha_rounds = [progress.alpha_rounds[position] for position in kept]


def advance(progress: Progress, played: Round, scheduled: bool) -> None:
    """Take in a round that was played."""
    progress.round, progress.server = played.round, played.server
    # The last round is always evaluated. If it is not its turn, a longer run would not have done it: it is not counted here.
    extra = 0 if scheduled else played.evaluation_bytes
    progress.traffic = played.traffic.plus(evaluation=-extra)
    progress.after_training[played.cohort.ids] = played.after_training.accuracy
    progress.failed_rounds = 0 if len(played.cohort.ids) else progress.failed_rounds + 1
    count_failures(progress.failures, played.failures)
    for phase, seconds in played.seconds.items():
        progress.seconds[phase] = progress.seconds.get(phase, 0.0) + seconds


def failed(played: Round, count: int) -> GaveUpError:
    """The error for a run of which nothing comes any more."""
    client, failure = next(iter(played.failures.items()))
    detail = f" ({failure.detail})" if failure.detail else ""
    hint = ""
    if failure.reason == "not finite":
        hint = "; training diverges from what the server sends: a smaller lr, or uploads.norm_bound from the start, may help"
    error = GaveUpError(
        f"in {count} rounds in a row (max_failed_rounds) no upload could be used, the last time in round {played.round}; "
        f"client {client}: {failure.reason}{detail}{hint}"
    )
    error.__cause__ = failure.error
    return error
