"""What happens in a run: failures in evaluation, exit codes, the files a round enters, several runs at once."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SIZES, TinyNet, make, toy_federation

import pfedla
from pfedla import Run, simulate
from pfedla.algorithms import ALGORITHMS
from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.rounds import finite_mean
from pfedla.runs.build import Built
from pfedla.runs.experiment import Experiment, list_settings
from pfedla.runs.folder import RunFolder

SOURCE = Path(pfedla.__file__).parent


def built_with(name: str = "pfedla", **values: Any) -> Built:
    experiment = Experiment.parse({"algorithm": {"name": name}, "engine": {"name": "threaded", "threads": 1}, **values})
    return Built(experiment, toy_federation(), make(name))


def test_a_round_enters_at_most_fourteen_files(tmp_path: Path) -> None:
    """Download, local training, aggregation, evaluation, record and checkpoint of a round of pFedLA."""
    entered: set[str] = set()

    def trace(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            entered.add(str(path.relative_to(SOURCE)))

    built = built_with(rounds=3, checkpoint={"rounds": 1})
    with Run(built, RunFolder(tmp_path / "run")) as run:
        run.step()  # the first builds what later ones use again
        threading.setprofile_all_threads(trace) if sys.version_info >= (3, 12) else threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            run.engine._pool.shutdown()
            run.engine._pool = ThreadPoolExecutor(1)  # its thread starts under the trace
            run.step()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    assert (tmp_path / "run" / "checkpoints" / "round-2.json").exists()
    assert {"core/tasks.py", "algorithms/pfedla.py", "engines/simulated.py", "runs/folder.py"} <= entered
    assert len(entered) <= 14, ", ".join(sorted(entered))


class Broken(FedAvg):
    name = "broken"

    def personalize(self, client: Any, download: Any, data: Any) -> Any:
        raise AttributeError("a typo in personalize")


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHMS, "broken", Broken)
    monkeypatch.setitem(ALGORITHMS, "half-broken", HalfBroken)


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_an_error_in_evaluation_ends_the_run(engine: str) -> None:
    with pytest.raises(GaveUpError, match="typo") as caught:
        simulate(toy_federation(), TinyNet(), "broken", rounds=2, engine=engine)
    assert isinstance(caught.value.__cause__, AttributeError)


def test_the_command_line_says_what_failed_in_evaluation(pfedla: Any) -> None:
    for debug in ([], ["--debug"]):
        tiny = ("-d", "digits", "--rounds", 1, "--clients", 3, "--samples", 20)
        code, _, error = pfedla("run", "-a", "broken", *tiny, *debug)
        assert code == 1
        assert "AttributeError" in error
        assert ("Traceback" in error) == bool(debug)


class HalfBroken(FedAvg):
    name = "half-broken"

    def personalize(self, client: Any, download: Any, data: Any) -> Any:
        if not data.has_trained:
            raise RuntimeError("has not trained")
        return download.tensors


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_a_client_that_fails_in_evaluation_is_counted_alone(engine: str) -> None:
    broken, sound = (
        simulate(toy_federation(), TinyNet(), name, rounds=1, participation=0.5, engine=engine)
        for name in ("half-broken", "fedavg")
    )
    failed = {client for client, reasons in broken.failures.items() if reasons.get("evaluation raised")}
    assert len(failed) == len(SIZES) // 2
    assert set(broken.accuracy.isnan().nonzero().squeeze(1).tolist()) == failed
    assert all(not broken.models[client] for client in failed)
    assert broken.refused_uploads == 0
    trained = ~broken.loss.isnan()
    torch.testing.assert_close(broken.loss[trained], sound.loss[trained])


def test_mean_loss_skips_the_clients_that_accuracy_skips() -> None:
    assert finite_mean(torch.tensor([1.0, torch.nan, 3.0])) == 2.0
    assert finite_mean(torch.tensor([torch.nan])) is None
    assert finite_mean(torch.empty(0)) is None


def test_steps_and_iteration_are_the_same(tmp_path: Path) -> None:
    with Run(built_with(rounds=3)) as stepped:
        rounds = [stepped.step().round for _ in range(3)]
        stepped.finish()
    with Run(built_with(rounds=3), RunFolder(tmp_path / "run")) as iterated:
        assert [one.round for one in iterated] == rounds == [1, 2, 3]
        iterated.finish()
    assert torch.equal(stepped.simulation.accuracy, iterated.simulation.accuracy)
    assert (tmp_path / "run" / "result.json").exists()


def test_simulate_takes_every_setting_by_its_short_name() -> None:
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.2, "local_epochs": 1, "batch_size": 4, "participation": 0.5}
    settings |= {"evaluate_every": 2, "norm_bound": 50.0, "max_failed_rounds": 3, "neighbours": 2}
    simulation = simulate(toy_federation(), TinyNet(), "pfedla", faults={"dropout": 0.2}, **settings)
    assert simulation.algorithm.training.lr == 0.2
    assert simulation.algorithm.neighbours == 2
    with pytest.raises(PfedlaError, match="round_s"):
        simulate(toy_federation(), TinyNet(), "pfedla", round_s=3)
    with pytest.raises(PfedlaError, match="rounds"):
        simulate(toy_federation(), TinyNet(), "pfedla", rounds=0)


def test_every_setting_has_a_name_of_its_own_and_a_description() -> None:
    places = list_settings()
    sections = [Experiment, *(f.annotation for f in Experiment.model_fields.values())]
    sections = [section for section in sections if hasattr(section, "model_fields")]
    assert len(places) == sum(len(section.model_fields) for section in sections) - (len(sections) - 1)
    assert all(place.field.description for place in places.values())


def test_dir_lists_the_public_names() -> None:
    assert {"simulate", "Run", "mix", "Experiment", "PfedlaError"} <= set(dir(pfedla))
    assert all(getattr(pfedla, name) is not None for name in dir(pfedla))


def test_retained_layers_are_counted_in_the_line_of_a_round(tmp_path: Path) -> None:
    with Run(built_with("heurpfedla", rounds=1), RunFolder(tmp_path / "run")) as run:
        run.step()
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text())
    assert sum(line["retained"].values()) == len(SIZES)


def test_an_error_in_the_evaluation_of_a_resumed_run_ends_it(tmp_path: Path) -> None:
    """All rounds were run before; only the evaluation at the end is left."""
    with Run(built_with("fedavg", rounds=1), RunFolder(tmp_path / "run")) as run:
        run.step()
        run._evaluation, run.algorithm = None, Broken(task=run.algorithm.task, training=run.algorithm.training)
        for number, client in enumerate(run.engine.clients):
            run.engine.clients[number] = replace(client, algorithm=run.algorithm)
        with pytest.raises(GaveUpError, match="typo"):
            run.finish()
