"""One toy federation: six clients of unequal sizes, a tiny net. No mocks."""

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.func import functional_call

from pfedla.algorithms import ALGORITHMS, create
from pfedla.core.contracts import Algorithm, Cohort, Engine, LocalData, Params, Payload, ServerState
from pfedla.core.errors import NotApplicableError
from pfedla.core.faults import NO_FAULTS
from pfedla.core.lora import lora
from pfedla.core.rounds import NO_ANSWER, Accepted, Round, accept, run_rounds
from pfedla.core.settings import EngineSettings, Faults, Recalibrate, Training
from pfedla.core.tasks import Task, task_of
from pfedla.core.training import batch_bounds
from pfedla.data.datasets import state_of
from pfedla.data.federation import Examples, Federation
from pfedla.engines.simulated import SimulatedEngine

settings.register_profile("pfedla", deadline=None)  # a busy machine is no failure
settings.load_profile("pfedla")

NORMS = pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batchnorm"])
FEATURES, CLASSES = 6, 3
SIZES = (9, 14, 9, 20, 14, 9)
HELD_OUT: dict[str, Any] = {"warm_up": 0, "min_held_out": 2}  # by default most tests would end before it learns
PRESETS = {"pfedla-heldout": HELD_OUT}
VARIANTS = {  # options that are a path of their own
    "fedavg-trimmed": ("fedavg", {"averaging": "trimmed"}),
    "fedrep-median": ("fedrep", {"averaging": "median"}),
    "per-fedavg-krum": ("per-fedavg", {"averaging": "krum"}),
    "per-fedavg-hessian-free": ("per-fedavg", {"hessian_free": True}),
    "fedfomo-start": ("fedfomo", {"reference": "start"}),
    "pfedla-compact": ("pfedla", {"hypernetwork": "compact", "neighbours": 3}),
    "pfedla-heldout-sketched": ("pfedla-heldout", {**HELD_OUT, "learning_rounds": 2, "sketch": 8}),
    "pfedla-heldout-median": ("pfedla-heldout", {**HELD_OUT, "warm_up": 1, "averaging": "median"}),
    "pfedla-heldout-average": ("pfedla-heldout", {**HELD_OUT, "personal": "average"}),
    "pfedla-heldout-retained": ("pfedla-heldout", {**HELD_OUT, "learning_rounds": 2, "retained_layers": 1}),
}


class TinyNet(nn.Module):
    def __init__(self, batch_norm: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.fc1 = nn.Linear(FEATURES, 5)
            self.bn = nn.BatchNorm1d(5) if batch_norm else nn.Identity()
            self.fc2 = nn.Linear(5, CLASSES)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.tanh(self.bn(self.fc1(x))))


class Parabola(Task):
    """f(w; x) = (w - mean x)² / 2: its gradient is w - mean x. Keeps the batches that it was asked for."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1, bias=False).double())
        self.seen: list[list[float]] = []

    def gradient(self, parameters: Params, statistics: Params, x: Tensor, y: Tensor, only: Any = None) -> Any:
        self.seen.append(x.tolist())
        gap = parameters["weight"] - x.mean()
        return {"weight": gap}, gap.square().sum() / 2, statistics

    @staticmethod
    def data(*values: float, epochs: int = 1) -> LocalData:
        x, order = torch.tensor(values, dtype=torch.float64), torch.arange(len(values)).repeat(epochs, 1)
        return LocalData(x, torch.zeros(len(values)).long(), order)

    @staticmethod
    def download(value: float) -> Payload:
        return Payload({"weight": torch.tensor([[value]], dtype=torch.float64)}, torch.tensor([True]))


def one_client(size: int = 13, epochs: int = 2, dtype: torch.dtype = torch.float64, **more: Any) -> LocalData:
    """A client of the toy federation, in double precision, to compare a method with its slow twin."""
    x, y = toy_federation((size,)).train[0]
    draws = torch.Generator().manual_seed(2)
    order = torch.stack([torch.randperm(size, generator=draws) for _ in range(epochs)])
    return LocalData(x.to(dtype), y, order, **more)


def add_noise(tensors: Params, seed: int) -> Params:
    draws = torch.Generator().manual_seed(seed)
    return {n: v + 0.3 * torch.randn(v.shape, generator=draws, dtype=v.dtype) for n, v in tensors.items()}


def plain_loss(module: nn.Module, model: Params, data: LocalData, rows: Tensor) -> Tensor:
    return nn.functional.cross_entropy(functional_call(module, model, (data.x[rows],)), data.y[rows])


def plain_sgd(module: nn.Module, model: Params, data: LocalData, epochs: int = 2, **pulled: Any) -> Params:
    """The slow twin of `sgd`: autograd, batches of 5, lr 0.1; `towards` and `pull` add a penalty."""
    towards, pull = pulled.get("towards", model), pulled.get("pull", 0.0)
    for rows in (data.order[e][slice(*ends)] for e in range(epochs) for ends in batch_bounds(len(data.y), 5)):
        leaves = {name: value.clone().requires_grad_() for name, value in model.items()}
        distance = sum(((value - towards[name]) ** 2).sum() for name, value in leaves.items())
        objective = plain_loss(module, leaves, data, rows) + pull / 2 * distance
        gradients = torch.autograd.grad(objective, list(leaves.values()))
        model = {n: v - 0.1 * g for (n, v), g in zip(model.items(), gradients, strict=True)}
    return model


def toy_federation(sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Federation:
    """Every client labels by a linear rule of its own, close to its neighbour's."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(FEATURES, CLASSES, generator=generator)

    def examples(count: int, client: int) -> Examples:
        x = torch.randn(count, FEATURES, generator=generator) + 0.3 * client
        return Examples(x, (x @ rule.roll(client // 2, 1)).argmax(1))

    train = [examples(size, client) for client, size in enumerate(sizes)]
    test = [examples(7, client) for client in range(len(sizes))]
    return Federation(train, test, tuple(map(str, range(CLASSES))))


def budget(lr: float, local_epochs: int, batch_size: int) -> Training:
    return Training(lr=lr, local_epochs=local_epochs, batch_size=batch_size)


def engine_for(
    algorithm: Algorithm,
    federation: Federation,
    name: str = "threaded",
    *,
    threads: int = 1,
    recalibrate: Recalibrate = "never",
    faults: Faults = NO_FAULTS,
) -> SimulatedEngine:
    settings = EngineSettings(name=name, threads=threads)
    return SimulatedEngine(algorithm, federation, settings, recalibrate=recalibrate, faults=faults)


def make(
    name: str,
    *,
    batch_norm: bool | None = False,
    module: nn.Module | None = None,
    epochs: int = 2,
    batch_size: int = 5,
    lr: float = 0.1,
    recipe: dict[str, Any] | None = None,
    **options: Any,
) -> Algorithm:
    """A method or variant for a module or the tiny net; `batch_norm=None`: with BatchNorm where that fits."""
    module = module or tiny(name, applies(name, True) if batch_norm is None else batch_norm)
    name, preset = VARIANTS.get(name, (name, PRESETS.get(name, {})))
    training = budget(lr, epochs, batch_size).model_copy(update=recipe or {})
    return create(name, task_of(module), training, preset | options)


def tiny(name: str, batch_norm: bool) -> nn.Module:
    """The tiny net, with the adapters that FedSA-LoRA needs."""
    return lora(TinyNet(batch_norm), 2, 2.0, ["fc1"]) if name == "fedsa-lora" else TinyNet(batch_norm)


def applies(name: str, batch_norm: bool) -> bool:
    """Whether a method fits the tiny net: FedBN needs BatchNorm."""
    try:
        make(name, batch_norm=batch_norm).check(len(SIZES))
    except NotApplicableError:
        return False
    return True


def methods(*quick: str, variants: bool = False) -> list[Any]:
    """Every method of the registry; all but `quick`, if any are named, are marked as slow."""
    names = [*ALGORITHMS, *(VARIANTS if variants else ())]
    slow = {name for name in names if quick and name not in quick}
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else [], id=name) for name in names]


def play(
    algorithm: Algorithm,
    federation: Federation,
    *,
    rounds: range = range(1, 4),
    engine: str = "threaded",
    threads: int = 2,
    seed: int = 0,
    server: ServerState | None = None,
    clients: Params | None = None,
    faults: Faults = NO_FAULTS,
    **how: Any,
) -> tuple[list[Round], Params]:
    """Run rounds; return copies of them (a round may write into the last), and the clients' states."""
    server = copy.deepcopy(server) if server else algorithm.init_server(len(federation), seed)
    how = {"participation": 1.0, "evaluate_every": 1, "rounds": rounds, "seed": seed, **how}
    simulated = engine_for(algorithm, federation, engine, threads=threads, recalibrate="unsampled", faults=faults)
    with simulated as where:
        if clients is not None:
            where.load(clients)
        ran = run_rounds(algorithm, where, federation.num_examples, server, **how)
        return [one._replace(server=copy.deepcopy(one.server)) for one in ran], where.state()


def personal_models(
    algorithm: Algorithm, federation: Federation, ran: list[Round], clients: Params | None = None
) -> list[Params]:
    """Everyone's personal model after the rounds that were run, if any."""
    server = ran[-1].server if ran else algorithm.init_server(len(federation), 0)
    with engine_for(algorithm, federation) as engine:
        if clients is not None:
            engine.load(clients)
        cohort = Cohort.everyone(federation.num_examples, len(ran) + 1, 0)
        return engine.personal_models(cohort, algorithm.download(server, cohort))


def received(engine: Engine, cohort: Cohort, downloads: Payload, *ids: int) -> Accepted:
    """What a cohort's training brings in, all of it sound; only of some clients, if they are named."""
    answers = engine.train(cohort, downloads)
    kept = [
        answer if not ids or client in ids else NO_ANSWER for client, answer in zip(cohort.ids, answers, strict=True)
    ]
    server = engine.algorithm.init_server(len(engine.clients), 0)
    accepted, failures = accept(engine.algorithm, server, cohort, downloads, kept)
    assert len(accepted.cohort.ids) == (len(ids) or len(answers)), failures
    return accepted


def flat(state: ServerState) -> Params:
    return {f"{group}/{name}": value for group, tensors in state.items() for name, value in tensors.items()}


def assert_same(left: Params, right: Params, tolerance: float = 0.0) -> None:
    """Bit for bit, unless a tolerance is given."""
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(
            value, right[name], rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def drop_sums(run: Path) -> Path:
    """Make a run folder as older versions left it: nobody notices that its files are changed."""
    path = run / "result.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "sha256"}))
    return run


NOTHING = Payload({}, torch.empty(0, dtype=torch.bool))  # what a client is sent, where it does not matter


@pytest.fixture
def federation() -> Federation:
    return toy_federation()


@pytest.fixture(autouse=True, scope="session")
def _keep_priority() -> Iterator[None]:
    """A campaign that a test runs in this process leaves the tests after it their priority."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "nice", lambda step: 0)
        yield


@pytest.fixture
def pfedla(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process, in an empty folder: (exit code, standard output, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PFEDLA_DEBUG", "")  # --debug sets it

    from pfedla.cli import main

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pfedla", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def real() -> Callable[[str], None]:
    """real(name) needs the real files of a data set; where CI promises them, their absence is a failure."""

    def need(name: str) -> None:
        if not state_of(name).here:
            if os.environ.get("PFEDLA_REQUIRE_DATA"):
                pytest.fail(f"{name} is not there, though PFEDLA_REQUIRE_DATA is set")
            pytest.skip(f"{name} is not in the data directory")

    return need
