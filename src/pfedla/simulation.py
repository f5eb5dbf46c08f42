"""The Python entry: a federation and a model in, personal models and alpha out."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from pfedla.algorithms import create
from pfedla.communication import Traffic
from pfedla.console import Reporter
from pfedla.contracts import Algorithm, LocalTraining, Params, Recalibrate
from pfedla.data.federation import Federation
from pfedla.engines import create_engine
from pfedla.errors import PfedlaError, unknown
from pfedla.models import load_tensors, task_of
from pfedla.rounds import Round, everyone, in_chunks, run_rounds
from pfedla.training import batch_bounds

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
    refused_uploads: int
    alphas: Tensor | None  # [snapshots, clients, layers, clients]; alpha[i, layer, j]: i receives, j sends
    alpha_rounds: list[int]  # the round after which each snapshot was taken; 0 is the start
    models: list[Params]  # every client's personal model

    @property
    def layer_names(self) -> tuple[str, ...]:
        return self.algorithm.task.layers.names

    @property
    def alpha(self) -> Tensor | None:
        """The learned weights at the end, [clients, layers, clients]; None for a method that learns none."""
        return None if self.alphas is None else self.alphas[-1]

    def __repr__(self) -> str:
        mean, worst = (f"{100 * value:.1f} %" for value in (self.accuracy.mean(), self.accuracy.min()))
        return f"Simulation({self.algorithm.name}, {len(self.models)} clients, accuracy {mean}, worst client {worst})"

    def personal_model(self, client: int) -> nn.Module:
        """What this client would deploy: a copy of your module with its tensors, in eval mode.

        It takes what it was trained on: uint8 images go through `Federation.normalised` first.
        """
        if not 0 <= client < len(self.models):
            raise PfedlaError(f"client {client}: there are clients 0 to {len(self.models) - 1}")
        return load_tensors(self.algorithm.task.module, self.models[client])


def snapshot_interval(rounds: int, num_clients: int, num_layers: int) -> int:
    """Rounds between two snapshots of alpha, so that there are at most a hundred and they stay in memory."""
    affordable = SNAPSHOT_NUMBERS // (num_clients * num_layers * num_clients)
    return -(-rounds // max(1, min(SNAPSHOTS, affordable)))


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
    engine: str = "threaded",
    threads: int = 0,
    device: str = "cpu",
    evaluate_every: int = 1,
    recalibrate: Recalibrate = "unsampled",
    on_round: Callable[[Round], None] | None = None,
    progress: bool | None = None,
    **options: object,
) -> Simulation:
    """Train personal models for all clients of a federation.

    `model` maps a batch to logits; its present weights are everyone's start. `options` are the algorithm's own
    (`retained_layers`, `neighbours`, …). `augment` crops and flips the training images at random. `on_round` is called
    after every round. `progress` shows how far it is; left out, it does so on a terminal.
    """
    for name, value, least in (
        ("rounds", rounds, 1), ("local_epochs", local_epochs, 1), ("batch_size", batch_size, 1),
        ("evaluate_every", evaluate_every, 1), ("threads", threads, 0),
    ):  # fmt: skip
        if value < least:
            raise PfedlaError(f"{name} = {value} is not possible: it should be at least {least}")
    if recalibrate not in get_args(Recalibrate):
        raise unknown("recalibrate", recalibrate, get_args(Recalibrate))
    if not 0 < lr < math.inf or not 0 < participation <= 1:
        raise PfedlaError(
            f"lr = {lr}, participation = {participation}: lr must be above 0, participation above 0 and at most 1"
        )
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
        return simulate_method(
            federation, method, rounds=rounds, participation=participation, seed=seed, engine=engine, threads=threads,
            device=device, evaluate_every=evaluate_every, recalibrate=recalibrate, on_round=after_round,
        )  # fmt: skip


def simulate_method(
    federation: Federation, method: Algorithm, *, rounds: int, participation: float, seed: int, engine: str,
    threads: int, device: str, evaluate_every: int, recalibrate: Recalibrate,
    on_round: Callable[[Round], None] | None,
) -> Simulation:  # fmt: skip
    """`simulate` for an algorithm that is built already."""
    num_clients = len(federation)
    method.check(num_clients)
    after_training = torch.full((num_clients,), torch.nan, dtype=torch.float64)
    alphas: list[Tensor] = []
    alpha_rounds: list[int] = []
    interval = snapshot_interval(rounds, num_clients, len(method.task.layers))
    refused = 0

    def snapshot(number: int, alpha: Tensor | None) -> None:
        if alpha is not None:
            alphas.append(alpha)
            alpha_rounds.append(number)

    clients = create_engine(engine, method, federation, device=device, threads=threads, recalibrate=recalibrate)
    with clients:
        server = method.init_server(num_clients, seed)
        snapshot(0, method.alpha(server))
        for played in run_rounds(
            method, clients, federation.num_examples, server, rounds=range(1, rounds + 1),
            participation=participation, evaluate_every=evaluate_every, seed=seed,
        ):  # fmt: skip
            after_training[played.cohort.ids] = played.after_training.accuracy
            refused += len(played.refused)
            if played.round % interval == 0 or played.round == rounds:
                snapshot(played.round, method.alpha(played.server))
            if on_round is not None:
                on_round(played)
        assert played.evaluation is not None  # the last round always is
        cohort = everyone(federation.num_examples, rounds + 1, seed)
        chunks = in_chunks(method, played.server, cohort)
        models = [model for chunk, downloads in chunks for model in clients.personal_models(chunk, downloads)]
    return Simulation(
        method, played.evaluation.accuracy, played.evaluation.loss, after_training, played.traffic, refused,
        torch.stack(alphas) if alphas else None, alpha_rounds, models,
    )  # fmt: skip
