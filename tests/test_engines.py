"""Which engine runs; that engines agree, for any number of threads, resumed or not; what a failing client costs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import SIZES, TinyNet, assert_same, flat, make, play, toy_federation
from torch import Tensor, nn

from pfedla import simulate
from pfedla.core.contracts import Answer, Cohort
from pfedla.core.errors import PfedlaError
from pfedla.core.models import MODELS, SmallCNN, build_model
from pfedla.core.settings import EngineSettings
from pfedla.core.tasks import task_of
from pfedla.data.federation import Examples, Federation
from pfedla.engines import simulated
from pfedla.engines.client import Client
from pfedla.engines.simulated import SimulatedEngine, resolve_engine


def federation_of_images(shape: tuple[int, ...], sizes: list[int]) -> Federation:
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        labels = torch.randint(0, 3, (count,), generator=draws)
        return Examples(torch.randn(count, *shape, generator=draws), labels)

    return Federation([examples(size) for size in sizes], [examples(4) for _ in sizes], ("a", "b", "c"))


def train(module: nn.Module, federation: Federation, **settings: Any) -> list[Answer]:
    """One round of FedAvg; all clients answer."""
    algorithm = make("fedavg", module=module, batch_size=8)
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    with SimulatedEngine(algorithm, federation, EngineSettings(**settings), recalibrate="never") as engine:
        answers = engine.train(cohort, algorithm.download(algorithm.init_server(len(federation), 0), cohort))
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return answers  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("name", "device", "module", "chosen"),
    [
        ("auto", "cpu", MODELS["mlp"]((784,), 10), "vectorized"),
        ("auto", "cpu", nn.Linear(7000, 10), "threaded"),
        ("auto", "cpu", SmallCNN((1, 8, 8), 10), "threaded"),
        ("auto", "cuda", SmallCNN((1, 8, 8), 10), "vectorized"),
        ("threaded", "cuda", nn.Linear(2, 2), "threaded"),
    ],
)
def test_the_engine_is_chosen_by_device_and_model(name: Any, device: str, module: nn.Module, chosen: str) -> None:
    assert resolve_engine(EngineSettings(name=name, device=device), task_of(module))[0].name == chosen


def test_clients_of_different_sizes_are_not_stacked_by_default() -> None:
    for sizes, chosen in (([140] * 8, "vectorized"), ([140, 141] * 4, "vectorized"), ([199, 172, 30, 85], "threaded")):
        assert resolve_engine(EngineSettings(), task_of(nn.Linear(5, 2)), sizes=sizes)[0].name == chosen


def test_compiling_needs_the_threaded_engine_a_cpu_and_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    assert resolve_engine(EngineSettings(compile=True), task_of(module))[0].name == "threaded"  # though it is small
    for settings in (EngineSettings(compile=True, name="vectorized"), EngineSettings(compile=True, device="cuda")):
        with pytest.raises(PfedlaError, match="--compile"):
            resolve_engine(settings, task_of(module))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PfedlaError, match="compiler"):
        resolve_engine(EngineSettings(compile=True), task_of(module))


@pytest.mark.slow
def test_compiled_training_is_the_plain_one_for_any_number_of_threads() -> None:
    torch.manual_seed(0)
    module, federation = (nn.Linear(5, 3), federation_of_images((5,), [24, 19, 5, 24]))  # with and without a rest
    plain = train(module, federation, name="threaded")
    compiled, again = (train(module, federation, name="threaded", compile=True, threads=threads) for threads in (2, 1))
    for left, right, same in zip(plain, compiled, again, strict=True):
        torch.testing.assert_close(right.upload.tensors, left.upload.tensors, rtol=1e-3, atol=1e-5)
        assert_same(right.upload.tensors, same.upload.tensors)


@pytest.mark.parametrize("name", ["fedavg", "fedrep", "heurpfedla"])
def test_threads_and_a_resumed_engine_change_no_bit(name: str) -> None:
    """Of a network with convolutions, whose kernels may round by how a tensor lies in memory."""
    torch.manual_seed(0)
    module, federation = SmallCNN((1, 9, 9), 3), federation_of_images((1, 9, 9), [24, 19, 7, 24, 12])
    algorithm = make(name, module=module, batch_size=8)
    straight, clients = play(algorithm, federation, threads=1, participation=0.7)
    first, saved = play(algorithm, federation, threads=3, participation=0.7, rounds=range(1, 3))
    second, resumed = play(
        algorithm, federation, threads=2, participation=0.7, rounds=range(3, 4), server=first[-1].server, clients=saved
    )
    assert_same(flat(straight[-1].server), flat(second[-1].server))
    assert_same(clients, resumed)
    assert torch.equal(straight[-1].evaluation.loss, second[-1].evaluation.loss)


def test_a_clients_state_does_not_keep_the_cohorts_downloads_alive() -> None:
    algorithm = make("fedrep", batch_norm=True)
    federation = toy_federation()
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    for engine_name in ("threaded", "vectorized"):
        with SimulatedEngine(algorithm, federation, EngineSettings(name=engine_name)) as engine:
            engine.train(cohort, algorithm.download(algorithm.init_server(len(SIZES), 0), cohort))
            engine.commit(cohort.ids)
            for value in engine.clients[0].state.values():
                assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


def test_vectorized_clients_are_stacked_within_the_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, federation = SmallCNN((1, 8, 8), 3), federation_of_images((1, 8, 8), [16] * 5 + [24] * 2)
    groups: list[int] = []
    update = simulated.update_stacked

    def spy(clients: list[Client], *rest: Any) -> Any:
        groups.append(len(clients))
        return update(clients, *rest)

    monkeypatch.setattr(simulated, "update_stacked", spy)
    together = train(module, federation, name="vectorized")
    assert groups == [5, 2]
    groups.clear()
    monkeypatch.setattr(simulated, "MEMORY_BOUND", 1)  # even then one at a time is trained
    apart = train(module, federation, name="vectorized")
    assert groups == [1] * 7
    for left, right in zip(together, apart, strict=True):
        torch.testing.assert_close(left.upload.tensors, right.upload.tensors, rtol=1e-4, atol=1e-6)


def test_two_simulations_in_two_threads_at_once() -> None:
    """Each has the numbers it has alone, and torch's number of threads is as before, in old and new threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    together, after, model = threading.Barrier(2), [], TinyNet()

    def train_alone(seed: int, wait: Any = None) -> Any:
        settings: dict[str, Any] = {"rounds": 4, "seed": seed, "engine": "threaded", "on_round": wait}
        return simulate(toy_federation(), model, "fedrep", **settings)

    def train_together(seed: int) -> Any:
        result = train_alone(seed, lambda round: together.wait(60))
        after.append(torch.get_num_threads())
        return result

    expected = list(map(train_alone, (0, 1)))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(train_together, (0, 1)))
    with ThreadPoolExecutor(1) as pool:
        after.append(pool.submit(torch.get_num_threads).result())
    assert after == [2, 2, 2]
    for result, alone in zip(results, expected, strict=True):
        assert_same(result.models[0], alone.models[0])
    torch.set_num_threads(before)


def test_models_built_in_threads_have_the_weights_of_their_seeds() -> None:
    def build(seed: int) -> Tensor:
        return build_model("mlp", (40,), 3, torch.Generator().manual_seed(seed)).state_dict()["fc1.weight"]

    expected = list(map(build, range(40)))
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(build, range(40)), expected))
