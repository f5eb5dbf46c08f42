"""A client that joins after the run gets a personal model of its own, and nobody else's changes by a bit."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HELD_OUT, TinyNet, assert_same, budget, flat, make, play, toy_federation
from safetensors.torch import load_file
from test_learning import clusters
from test_resume import contents

from pfedla.algorithms import ALGORITHMS
from pfedla.algorithms.similarity import LayerSimilarity
from pfedla.core.contracts import Algorithm, ServerState
from pfedla.core.errors import NotApplicableError, PfedlaError, Stopped
from pfedla.core.tasks import task_of
from pfedla.data.federation import Examples, Federation
from pfedla.report.methods import MethodTable
from pfedla.runs.build import build
from pfedla.runs.comparison import plan_comparison, run_comparison
from pfedla.runs.experiment import Experiment
from pfedla.runs.folder import RunFolder, RunState
from pfedla.runs.joining import Joined, join, join_run
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.run import Run, run, simulate

ROUNDS = 2
JOINING = [name for name, kind in ALGORITHMS.items() if not kind.cannot_join]
LEARNING = ["pfedla", "pfedla-compact", "heurpfedla", "pfedla-heldout", "pfedla-heldout-retained"]


def split() -> tuple[Federation, Federation]:
    """Five clients, and one that joins after the run."""
    federation = toy_federation()
    return federation.only([0, 1, 2, 4, 5]), federation.only([3])


def trained(name: str, federation: Federation, **options: Any) -> tuple[Algorithm, ServerState]:
    algorithm = make(name, **options)
    return algorithm, play(algorithm, federation)[0][-1].server


def join_one(algorithm: Algorithm, server: ServerState, unseen: Federation, rounds: int = ROUNDS) -> Joined:
    return join(algorithm, RunState(server=server, after_training=[None] * 5, round=3), unseen, Experiment(), rounds)


@pytest.mark.parametrize("name", JOINING)
def test_joining_changes_nobody_else_and_is_repeatable(name: str) -> None:
    federation, unseen = split()
    algorithm, server = trained(name, federation, batch_norm=None)
    kept = copy.deepcopy(server)
    joined, again = (join_one(algorithm, server, unseen) for _ in range(2))
    assert_same(flat(server), flat(kept))
    assert_same(joined.model, again.model)
    assert (joined.score, joined.traffic) == (again.score, again.traffic)
    assert joined.model.keys() == algorithm.task.initial().keys()
    assert all(value.isfinite().all() for value in joined.model.values())
    if joined.alphas is not None:
        assert torch.equal(joined.alphas, again.alphas)
        assert joined.alphas.shape == (ROUNDS + 1, len(algorithm.task.layers), 6)
        torch.testing.assert_close(joined.alphas.sum(-1), torch.ones(joined.alphas.shape[:2]))
    if name not in LEARNING:  # the private state starts as ever
        admitted, start = algorithm.admit(server, 0), algorithm.init_client()
        assert_same(algorithm.init_unseen(admitted, start), algorithm.init_client())


def test_a_method_that_changes_another_client_is_found_out() -> None:
    class Careless(LayerSimilarity):
        def aggregate(self, server: Any, cohort: Any, downloads: Any, uploads: Any) -> ServerState:
            server["models"]["fc1.weight"][0] += 1e-6
            return super().aggregate(server, cohort, downloads, uploads)

    careless = Careless(task=task_of(TinyNet()), training=budget(0.1, 1, 5))
    with pytest.raises(PfedlaError, match="fc1"):
        join_one(careless, careless.init_server(5, 0), split()[1])


def test_fedavg_gives_the_global_model_and_fedrep_its_body_with_a_head() -> None:
    federation, unseen = split()
    algorithm, server = trained("fedavg", federation)
    joined = join_one(algorithm, server, unseen)
    assert (joined.rounds, joined.score["after_training"], joined.traffic.up_bytes) == (0, None, 0)
    assert_same(joined.model, server["model"])
    tuned = join_one(make("fedavg-ft"), server, unseen)
    assert tuned.rounds == 0
    assert any(not torch.equal(value, joined.model[name]) for name, value in tuned.model.items())
    algorithm, server = trained("fedrep", federation)
    model = join_one(algorithm, server, unseen).model
    assert_same({name: model[name] for name in server["model"]}, server["model"])
    assert not torch.equal(model["fc2.weight"], algorithm.task.initial()["fc2.weight"])


@pytest.mark.parametrize("name", LEARNING)
def test_pfedla_starts_from_the_plain_mean_and_learns_at_once(name: str) -> None:
    """Also where the run has not reached, or is past, the rounds in which alpha is learned."""
    federation, unseen = split()
    algorithm, server = trained(name, federation)
    joined = join_one(algorithm, server, unseen, rounds=1)
    assert joined.alphas is not None
    neighbours = joined.alphas[0] > 0
    torch.testing.assert_close(joined.alphas[0], neighbours / neighbours.sum(-1, keepdim=True))
    assert not torch.equal(joined.alphas[1], joined.alphas[0])
    admitted = algorithm.admit(server, 0)
    mean = {key: value.mean(0) for key, value in server["models"].items()}
    assert_same({key: value[-1] for key, value in admitted["models"].items()}, mean)
    # A retained layer is not sent: the client's own is the server's row, as if it had trained before.
    own = algorithm.init_unseen(admitted, algorithm.init_client())
    assert own.keys() == algorithm.init_client().keys()
    assert_same(algorithm.task.layers.parameters(own), {key: mean[key] for key in own if key in mean})


@pytest.mark.slow
@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("form", ["network", "compact"])
def test_an_unseen_client_finds_the_clients_that_are_like_it(form: str, sign: int) -> None:
    whole = clusters((1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0))
    federation, unseen = whole.only(range(6)), whole.only([6 + sign])

    def join_after_30(name: str, **options: Any) -> Joined:
        algorithm = make(name, epochs=5, batch_size=32, **options)
        server = play(algorithm, federation, rounds=range(1, 31), evaluate_every=30)[0][-1].server
        state = RunState(server=server, after_training=[None] * 6, round=30)
        return join(algorithm, state, unseen, Experiment())

    joined = join_after_30("pfedla-heldout", hypernetwork=form, warm_up=5)
    assert joined.alphas is not None
    alike, others = (joined.alphas[-1][:, first : first + 3].sum(-1) for first in (3 * sign, 3 - 3 * sign))
    assert (others < 0.2).all()
    assert (alike > 1.5 * others).all()
    assert alike[-1] > 0.8  # the layer in which the clusters differ
    assert joined.score["after"] > joined.score["before"] + 0.2
    assert joined.score["after"] > join_after_30("fedavg").score["after"] + 0.2


# The command


def arrays(clients: int, seed: int = 0, **more: np.ndarray) -> dict[str, np.ndarray]:
    federation = toy_federation((30,) * clients, seed=seed)
    x, y = (torch.cat([examples[part] for examples in federation.train]).numpy() for part in (0, 1))
    return {"x": x, "y": y, **more}


TRAINING = {"lr": 0.05, "local_epochs": 1}
METHOD = {"training": TRAINING, "algorithm": {"name": "pfedla-heldout", **HELD_OUT}}
EXPERIMENT: dict[str, Any] = {"rounds": 2, "model": "mlp", **METHOD, "data": {"dataset": "old.npz"}}
UNSEEN = EXPERIMENT | {"unseen_clients": 0.3}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("joining")
    np.savez(here / "old.npz", **arrays(4, client=np.repeat(["north", "east", "south", "west"], 30)))
    np.savez(here / "new.npz", **arrays(1, seed=1))
    run(Experiment.parse(EXPERIMENT | {"data": {"dataset": str(here / "old.npz")}}), here / "run")
    return here


@pytest.fixture
def finished(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


def test_the_command_leaves_a_folder_and_nothing_else_changes(pfedla: Any, finished: Path) -> None:
    before = contents(finished)
    code, out, err = pfedla("join", finished, "--data", "new.npz", "--rounds", 3)
    assert (code, "run/joined/new" in out) == (0, True), err
    folder = finished / "joined" / "new"
    assert {path.name for path in folder.iterdir()} == {
        "result.json",
        "model.safetensors",
        "alpha.safetensors",
        "trained_on.npy",
    }
    result = json.loads((folder / "result.json").read_text())
    assert (result["after_round"], result["rounds"], result["clients"]) == (2, 3, 4)
    alpha = load_file(folder / "alpha.safetensors")["alpha"]
    assert torch.equal(alpha[-1], torch.tensor(list(result["alpha"].values())))
    model = load_file(folder / "model.safetensors")
    assert model.keys() == load_file(finished / "models" / "client-0.safetensors").keys()
    assert before.items() <= contents(finished).items()
    code, _, err = pfedla("join", finished, "--data", "new.npz")
    assert (code, "--name" in err) == (2, True)
    code, out, _ = pfedla("join", finished, "--data", "new.npz", "--rounds", 3, "--name", "again", "--json")
    assert (code, json.loads(out)["score"]) == (0, result["score"])


def test_the_model_of_an_unseen_client_is_evaluated_and_exported(pfedla: Any, finished: Path) -> None:
    folder, result = join_run(finished, Path("new.npz"), rounds=2)
    personal = load_personal(finished, "joined/new")
    tested = evaluate_personal(personal, None)
    assert (tested["client"], tested["examples"]) == ("joined/new", 9)
    assert tested["score"] == pytest.approx(result["score"]["after"])
    assert pfedla("export", finished, "--client", "joined/new")[0] == 0
    described = json.loads((finished / "export" / "client-joined_new" / "model.json").read_text())
    assert described["client"] == "joined/new"
    with pytest.raises(PfedlaError, match="joined/new"):
        load_personal(finished, "joined/old")
    assert evaluate_personal(personal, Path("new.npz")) == tested  # its own data: split again
    own = arrays(1, seed=1)
    np.savez("some.npz", x=own["x"][:20], y=own["y"][:20])
    with pytest.raises(PfedlaError, match="of 20 rows"):
        evaluate_personal(personal, Path("some.npz"))
    np.savez("new.npz", **arrays(1, seed=2))
    for data in (None, Path("new.npz")):
        with pytest.raises(PfedlaError, match="changed"):
            evaluate_personal(personal, data)
    np.savez("other.npz", **arrays(1, seed=3, client=np.full(30, "elsewhere")))
    assert evaluate_personal(personal, Path("other.npz"))["examples"] == 30
    (folder / "result.json").write_text("{}")
    with pytest.raises(PfedlaError, match="--data"):
        evaluate_personal(personal, None)
    np.savez("new.npz", **arrays(1, seed=1, test=np.arange(30) % 3 == 0, client=np.full(30, "site 7")))
    folder, result = join_run(finished, Path("new.npz"), rounds=1)
    assert (result["examples"]["train"], result["examples"]["test"]) == (20, 10)
    assert folder == finished / "joined" / "site_7"


WRONG = {
    "shape": {"x": np.zeros((30, 5), np.float32)},
    "class": {"y": np.full(30, 7)},
    "not finite": {"x": np.full((30, 6), np.nan)},
    "scale": {"x": np.full((30, 6), 1e30)},
    "several clients": {"client": np.arange(30) // 10},
    "0 test": {"test": np.zeros(30, bool)},
    "never opened": {"y": np.array([None] * 30)},
}


@pytest.mark.parametrize("word", WRONG)
def test_wrong_data_are_refused_and_leave_nothing(finished: Path, word: str) -> None:
    np.savez("new.npz", **arrays(1) | WRONG[word])
    with pytest.raises(PfedlaError, match=word):
        join_run(finished, Path("new.npz"), rounds=2)
    assert not (finished / "joined").exists()


def test_refusals_of_the_run(finished: Path, original: Path) -> None:
    assert set(ALGORITHMS) - set(JOINING) == {"local"}
    alone = run(Experiment.parse(EXPERIMENT | {"algorithm": {"name": "local"}}), Path("alone"))
    with pytest.raises(NotApplicableError, match="local"):
        join_run(alone, Path("new.npz"))
    for folder, data, spoil, key in (
        (finished, original / "old.npz", lambda: None, "made of"),
        (Path("nowhere"), Path("new.npz"), lambda: None, "nowhere"),
        (finished, Path("new.npz"), lambda: shutil.rmtree(finished / "checkpoints"), "checkpoint"),
        (finished, Path("new.npz"), lambda: (finished / "deployment.json").write_text("{}"), "deployment"),
    ):
        spoil()
        with pytest.raises(PfedlaError, match=key):
            join_run(folder, data)


def test_to_join_an_earlier_round_is_recorded_though_nobody_listens(finished: Path) -> None:
    """The newest checkpoint is damaged: the client joins after the one before."""
    often = run(Experiment.parse(EXPERIMENT | {"checkpoint": {"rounds": 1}}), Path("often"))
    (often / "checkpoints" / "round-2.safetensors").write_bytes(b"damaged")
    _, result = join_run(often, Path("new.npz"), rounds=1, say=lambda line: None)
    assert result["after_round"] == 1
    assert any("round 2" in line for line in result["warnings"])


# Clients of an experiment that join after its last round


def test_at_least_one_is_held_back_and_never_all() -> None:
    federation = toy_federation()
    assert federation.hold_back(0.0, 0) == (federation, None)
    for share, count in ((0.01, 1), (0.5, 3), (0.99, 5)):
        seen, unseen = federation.hold_back(share, 0)
        assert len(unseen) == count
        assert sorted(seen.names + unseen.names) == list(federation.names)
    assert len({federation.hold_back(0.2, seed)[1].names for seed in range(20)}) > 1
    with pytest.raises(PfedlaError, match="unseen_clients"):
        federation.only([0]).hold_back(0.5, 0)


def test_a_leak_counts_only_among_the_clients_that_take_part() -> None:
    part = [Examples(torch.full((1, 4), float(number)), torch.tensor([0])) for number in range(6)]
    test = [part[1], part[2], part[5]]  # 0 is tested on what trains 1, 1 on what trains 2
    whole = Federation(part[:3], test, ("a", "b"), leaked_share=2 / 3)
    assert [whole.only(pair).leaked_share for pair in ([0, 1], [0, 2])] == [0.5, 0.0]


def test_unseen_clients_are_part_of_the_identity(finished: Path, original: Path) -> None:
    assert "unseen_clients" not in Experiment.parse(EXPERIMENT).identity()
    with pytest.raises(PfedlaError, match="unseen_clients"):
        run(Experiment.parse(UNSEEN | {"data": {"dataset": str(original / "old.npz")}}), finished, resume=True)


def test_unseen_clients_are_reported_apart(finished: Path) -> None:
    folder = run(Experiment.parse(UNSEEN), Path("unseen"))
    result, known = (json.loads((folder / f"{name}.json").read_text()) for name in ("result", "federation"))
    unseen = result["unseen"]
    assert (result["clients"], len(known["clients"]), len(unseen["clients"])) == (3, 3, 1)
    assert known["unseen"] == unseen["clients"]
    assert {*known["clients"], *unseen["clients"]} == {"north", "east", "south", "west"}
    for key in ("score", "score_before", "score_after_training", "score_alone"):
        assert len(unseen[key]["per_client"]) == 1
    built = build(Experiment.parse(UNSEEN))
    assert isinstance(built.federation, Federation)
    module, options = built.algorithm.task.module, {"rounds": 2, "engine": "vectorized", **TRAINING, **HELD_OUT}
    plain = simulate(built.federation, module, "pfedla-heldout", **options)
    assert result["score"]["per_client"] == plain.accuracy.tolist()
    assert (folder / "models" / "unseen-0.safetensors").exists()
    for position, name in enumerate(known["clients"]):
        again = evaluate_personal(load_personal(folder, name), None)
        assert again["score"] == pytest.approx(result["score"]["per_client"][position])


@pytest.mark.slow
def test_a_stopped_run_with_unseen_clients_resumes(finished: Path) -> None:
    longer = Experiment.parse(UNSEEN | {"rounds": 3})
    straight = run(longer, Path("straight"))
    extended = run(Experiment.parse(UNSEEN), Path("extended"))
    run(longer, extended, resume=True)
    stopped = Path("stopped")
    with pytest.raises(Stopped):  # after the last round, before any client has joined
        Run(build(longer), RunFolder(stopped), stopping=lambda: (stopped / "models").exists()).complete()
    assert not (stopped / "result.json").exists()
    run(longer, stopped, resume=True)
    kept = [
        (json.loads((one / "result.json").read_text())["unseen"], (one / "models/unseen-0.safetensors").read_bytes())
        for one in (straight, extended, stopped)
    ]
    assert kept[0] == kept[1] == kept[2]


def test_local_with_unseen_clients_is_refused_at_once(pfedla: Any, finished: Path) -> None:
    values = {key: value for key, value in UNSEEN.items() if key != "algorithm"}
    rows = run_comparison(plan_comparison(values, ["local", "fedavg"], [0], Path("compared")))
    assert "join" in rows[0].not_applicable
    assert "unseen" in MethodTable(rows).to_markdown()
    code, _, err = pfedla("run", finished, "-a", "local", "--set", "unseen_clients=0.5", "--out", "no")
    assert (code, "local" in err) == (2, True)
    assert not Path("no").exists()
    code, out, err = pfedla("run", finished, "-a", "fedavg", "--set", "unseen_clients=0.5", "--out", "yes")
    assert (code, "unseen" in out) == (0, True), err
