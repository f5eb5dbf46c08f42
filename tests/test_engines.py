"""Which engine runs, with or without a compiler; that each fast way comes to the plain one's numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import budget
from pfedla.engines.choice import chosen_compile, chosen_engine
from torch import nn

from pfedla.algorithms import create
from pfedla.core.contracts import Answer
from pfedla.core.errors import PfedlaError
from pfedla.core.models import MODELS, PaperCNN, SmallCNN
from pfedla.core.rounds import everyone
from pfedla.core.tasks import task_of
from pfedla.data.federation import Examples, Federation
from pfedla.engines import create_engine, vectorized
from pfedla.runs.experiment import Experiment, build
from pfedla.runs.result import run
from pfedla.runs.simulation import simulate


def federation_of_images(shape: tuple[int, ...], sizes: list[int]) -> Federation:
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        return Examples(torch.randn(count, *shape, generator=draws), torch.randint(0, 3, (count,), generator=draws))

    return Federation([examples(size) for size in sizes], [examples(4) for _ in sizes], ("a", "b", "c"))


def trained(name: str, module: nn.Module, federation: Federation, *, batch_size: int = 8, **options: object) -> list[Answer]:
    algorithm = create("fedavg", task_of(module), budget(0.1, 2, batch_size))
    cohort = everyone(federation.num_examples, 1, 0)
    with create_engine(
        name, algorithm, federation, **{"device": "cpu", "threads": 0, "recalibrate": "never", **options}
    ) as engine:  # type: ignore[arg-type]
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
def test_the_engine_is_chosen_by_device_and_model(name: str, device: str, module: nn.Module, chosen: str) -> None:
    assert chosen_engine(name, device, module) == chosen


def test_what_was_chosen_is_written_down(tmp_path: Path) -> None:
    experiment = Experiment.parse({"rounds": 1, "data": {"dataset": "digits"}, "training": {"local_epochs": 1}})
    built = build(experiment).experiment.engine
    assert (built.name, built.compile) == ("threaded", "off")
    folder = run(experiment, tmp_path / "run")
    text = (folder / "experiment.toml").read_text()
    assert 'name = "threaded"' in text
    assert 'compile = "off"' in text


def test_compiling_falls_back_with_a_sentence_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_compile("auto", "threaded", "cpu", "no such model") == ("off", "")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert chosen_compile("auto", "threaded", "cpu", "cnn") == ("off", "")
    resolved, note = chosen_compile("on", "threaded", "cpu")
    assert resolved == "off"
    assert "no C++ compiler" in note
    built = build(Experiment.parse({"engine": {"compile": "on"}, "data": {"dataset": "digits"}}))
    assert built.experiment.engine.compile == "off"
    assert built.note == note


def test_compiling_is_refused_where_it_means_nothing() -> None:
    with pytest.raises(PfedlaError, match="threaded and flower engines on the cpu"):
        chosen_compile("on", "vectorized", "cpu")
    federation = federation_of_images((1, 8, 8), [8, 8])
    with pytest.raises(PfedlaError, match="compile"):
        simulate(federation, SmallCNN((1, 8, 8), 3), compile="perhaps")  # type: ignore[arg-type]


COMPILED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(5, 3), (5,)),
    "small-cnn": (lambda: SmallCNN((1, 9, 9), 3), (1, 9, 9)),  # odd feature maps: the last row and column are not pooled
    "cnn-bn": (lambda: PaperCNN((3, 16, 16), 3, batch_norm=True), (3, 16, 16)),
}


@pytest.mark.parametrize("kind", ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in list(COMPILED)[1:])])
def test_compiled_steps_come_to_the_numbers_of_the_plain_ones(kind: str) -> None:
    torch.manual_seed(0)
    build_module, shape = COMPILED[kind]
    module, federation = build_module(), federation_of_images(shape, [24, 19, 5, 24])  # with and without a rest
    plain = trained("threaded", module, federation)
    compiled = trained("threaded", module, federation, compile=True, threads=2)
    again = trained("threaded", module, federation, compile=True, threads=1)
    for left, right, same in zip(plain, compiled, again, strict=True):
        torch.testing.assert_close(right.upload.tensors, left.upload.tensors, rtol=1e-3, atol=1e-5)
        assert all(torch.equal(value, same.upload.tensors[name]) for name, value in right.upload.tensors.items())
    moved = plain[0].upload.tensors[next(iter(plain[0].upload.tensors))] - next(iter(task_of(module).initial().values()))
    assert moved.abs().max() > 1e-3  # the tolerance above would see a lost step


def test_a_compiled_step_takes_tensors_in_any_order() -> None:
    torch.manual_seed(0)
    task = task_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    compiled = task.compiled((4,), budget(0.1, 1, 8))
    parameters, x, y = task.initial(), torch.randn(8, 4), torch.randint(0, 3, (8,))
    wanted = task.step(parameters, {}, x, y, 0.1)
    found = compiled.step(dict(reversed(parameters.items())), {}, x, y, 0.1)
    assert list(found[0]) == list(reversed(parameters))
    torch.testing.assert_close({name: found[0][name] for name in wanted[0]}, wanted[0])


def test_a_model_that_cannot_be_compiled_says_what_to_do() -> None:
    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum().item() > 0 else -x)

    with pytest.raises(PfedlaError, match="--compile off"):
        trained("threaded", Branches(5, 3), federation_of_images((5,), [8]), compile=True)


def test_vectorized_clients_are_stacked_within_the_memory_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    module, federation = SmallCNN((1, 8, 8), 3), federation_of_images((1, 8, 8), [16] * 5 + [24] * 2)
    groups: list[int] = []
    train_group = vectorized.VectorizedEngine._train_group

    def spied(self: vectorized.VectorizedEngine, cohort: object, rows: list[int], *rest: object) -> object:
        groups.append(len(rows))
        return train_group(self, cohort, rows, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(vectorized.VectorizedEngine, "_train_group", spied)
    together = trained("vectorized", module, federation)
    assert groups == [5, 2]
    groups.clear()
    monkeypatch.setattr(vectorized, "MEMORY_BOUND", 2**20)
    apart = trained("vectorized", module, federation)
    assert max(groups) < 5
    assert sum(groups) == 7
    for left, right in zip(together, apart, strict=True):
        torch.testing.assert_close(left.upload.tensors, right.upload.tensors, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(vectorized, "MEMORY_BOUND", 1)  # even the smallest bound trains one at a time
    groups.clear()
    trained("vectorized", module, federation)
    assert groups == [1] * 7
