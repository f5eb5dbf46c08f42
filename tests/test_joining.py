"""A client that comes after the run gets a personal model of its own, and nobody else's changes by a bit."""

import copy
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import HELD_OUT, PAPER, TinyNet, applies, assert_same, budget, flat, make, play, toy_federation
from safetensors.torch import load_file
from test_learning import clusters

from pfedla.algorithms import ALGORITHMS, check_joining
from pfedla.algorithms.fedavg import FedAvg
from pfedla.algorithms.fedrep import FedRep
from pfedla.algorithms.similarity import LayerSimilarity
from pfedla.core.contracts import Cohort
from pfedla.core.errors import NotApplicableError, PfedlaError, Stopped
from pfedla.core.tasks import task_of
from pfedla.data.federation import Federation
from pfedla.report.tables import comparison_markdown
from pfedla.runs.comparison import compare, plan
from pfedla.runs.experiment import Experiment, build
from pfedla.runs.folder import RunFolder
from pfedla.runs.joining import Joined, Terms, join, join_run
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.result import run, run_built
from pfedla.runs.simulation import simulate

TERMS = Terms(after=3, seed=0, rounds=2)
JOINING = [name for name, kind in ALGORITHMS.items() if not kind.cannot_join]


def parted(seed: int = 0) -> tuple[Federation, Federation]:
    """Five clients, and one that comes later."""
    federation = toy_federation(seed=seed)
    return federation.only([0, 1, 2, 4, 5]), federation.only([3])


def same(one: Joined, other: Joined) -> bool:
    assert_same(one.model, other.model)
    assert (one.alphas is None) == (other.alphas is None)
    assert one.alphas is None or torch.equal(one.alphas, other.alphas)
    return (one.accuracies(), one.traffic) == (other.accuracies(), other.traffic)


@pytest.mark.parametrize("name", JOINING)
def test_joining_changes_nobody_else_and_is_repeatable(name: str) -> None:
    federation, newcomer = parted()
    algorithm = make(name, batch_norm=None)
    server = play(algorithm, federation)[0][-1].server
    kept = copy.deepcopy(server)
    joined = join(algorithm, server, newcomer, len(federation), TERMS)
    assert_same(flat(server), flat(kept))
    assert same(joined, join(algorithm, server, newcomer, len(federation), TERMS))
    assert all(0 <= value <= 1 for value in joined.accuracies().values() if value is not None)
    assert joined.model.keys() == algorithm.task.initial().keys()
    assert all(value.isfinite().all() for value in joined.model.values())
    if joined.alphas is not None:
        assert joined.alphas.shape == (TERMS.rounds + 1, len(algorithm.task.layers), len(federation) + 1)
        torch.testing.assert_close(joined.alphas.sum(-1), torch.ones(joined.alphas.shape[:2]))


@pytest.mark.parametrize("name", JOINING)
def test_a_place_is_added_and_the_others_stay_where_they_are(name: str) -> None:
    federation, _ = parted()
    algorithm = make(name, batch_norm=None)
    server = play(algorithm, federation, rounds=range(1, 2))[0][-1].server
    admitted = algorithm.admitted(server, seed=0)
    for key, value in flat(server).items():
        if key != "progress/uploads":  # pFedLA's: when alpha is learned
            larger = flat(admitted)[key]
            assert torch.equal(larger[tuple(map(slice, value.shape))], value)
            assert larger.shape == value.shape or len(larger) == len(value) + 1 == 6


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in JOINING])
def test_methods_that_cannot_say_why_and_which_can(name: str) -> None:
    federation, newcomer = parted()
    with pytest.raises(NotApplicableError, match=r"no client can join a run of .*: .*; it can with: .*fedavg, .*pfedla"):
        join(make(name), {}, newcomer, len(federation), TERMS)


def test_local_shares_nothing() -> None:
    assert set(ALGORITHMS) - set(JOINING) == {"local"}
    with pytest.raises(NotApplicableError, match="shares nothing, there is nothing to join"):
        check_joining(make("local"))


def test_a_method_that_moves_another_client_is_found_out() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Careless(LayerSimilarity):
        def aggregate(self, server, cohort, downloads, uploads):
            server["models"]["fc1.weight"][0] += 1e-6
            return super().aggregate(server, cohort, downloads, uploads)

    federation, newcomer = parted()
    careless = Careless(task=task_of(TinyNet()), training=budget(0.1, 1, 5))
    with pytest.raises(PfedlaError, match="changed what is another client's"):
        join(careless, careless.init_server(5, 0), newcomer, len(federation), TERMS)


# What methods do


def test_fedavg_gives_the_global_model_and_plays_no_round() -> None:
    federation, newcomer = parted()
    algorithm = make("fedavg")
    server = play(algorithm, federation)[0][-1].server
    joined = join(algorithm, server, newcomer, len(federation), TERMS)
    assert (joined.rounds, joined.after_training, joined.traffic.up_bytes) == (0, None, 0)
    assert joined.before == joined.after
    assert_same(joined.model, server["model"])
    tuned = join(make("fedavg-ft"), server, newcomer, len(federation), TERMS)
    assert tuned.rounds == 0
    assert any(not torch.equal(value, joined.model[name]) for name, value in tuned.model.items())


def test_the_body_of_fedrep_stays_and_a_head_is_trained() -> None:
    federation, newcomer = parted()
    algorithm = make("fedrep")
    assert isinstance(algorithm, FedRep)
    server = play(algorithm, federation)[0][-1].server
    joined = join(algorithm, server, newcomer, len(federation), TERMS)
    assert joined.rounds == TERMS.rounds
    assert_same({name: joined.model[name] for name in server["model"]}, server["model"])
    assert not torch.equal(joined.model["fc2.weight"], algorithm.task.initial()["fc2.weight"])


def test_pfedhn_moves_the_new_embedding_alone() -> None:
    federation, newcomer = parted()
    algorithm = make("pfedhn", hypernetwork_lr=0.1)
    server = play(algorithm, federation)[0][-1].server
    joined = join(algorithm, server, newcomer, len(federation), TERMS)
    admitted = algorithm.admitted(server, 0)
    cohort = Cohort(4, 0, torch.tensor([5]), newcomer.num_examples)
    start = {name: value[0] for name, value in algorithm.download(admitted, cohort).tensors.items()}
    assert any(not torch.equal(value, start[name]) for name, value in joined.model.items())


@pytest.mark.parametrize("options", [PAPER, HELD_OUT, {"rule": "held-out"}, {"hypernetwork": "compact", **PAPER}])
def test_pfedla_starts_from_the_plain_mean_and_learns_at_once(options: dict) -> None:
    """Also where the run has not come, or is past, the rounds in which alpha is learned."""
    federation, newcomer = parted()
    algorithm = make("pfedla", **options)
    server = play(algorithm, federation)[0][-1].server
    joined = join(algorithm, server, newcomer, len(federation), replace(TERMS, rounds=1))
    assert joined.alphas is not None
    torch.testing.assert_close(joined.alphas[0], torch.full((2, 6), 1 / 6))
    assert not torch.equal(joined.alphas[1], joined.alphas[0])
    admitted = algorithm.admitted(server, 0)
    mean = {name: value.mean(0) for name, value in server["models"].items()}
    assert_same({name: value[-1] for name, value in admitted["models"].items()}, mean)
    download = algorithm.download(admitted, Cohort(4, 0, torch.tensor([5]), newcomer.num_examples))
    assert_same({name: value[0] for name, value in download.tensors.items()}, mean, tolerance=1e-6)
    heurp = replace(make("heurpfedla"), **options)
    assert_same({name: value for name, value in heurp.init_newcomer(admitted).items() if name in mean}, mean)


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("form", ["network", "compact"])
def test_a_newcomer_finds_those_who_are_like_it(form: str, sign: int) -> None:
    whole = clusters((1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0, -1.0))
    federation, newcomer = whole.only(range(6)), whole.only([6 + sign])
    algorithm = make("pfedla", epochs=5, batch_size=32, rule="held-out", hypernetwork=form)
    server = play(algorithm, federation, rounds=range(1, 31), evaluate_every=30)[0][-1].server
    joined = join(algorithm, server, newcomer, 6, Terms(after=30, seed=0))
    assert joined.alphas is not None
    alike, others = (joined.alphas[-1][:, first : first + 3].sum(-1) for first in (3 * sign, 3 - 3 * sign))
    assert (others < 0.2).all()
    assert (alike > 1.5 * others).all()
    assert alike[-1] > 0.8  # the layer in which the clusters differ
    assert joined.after > joined.before + 0.2
    averaged = make("fedavg", epochs=5, batch_size=32)
    mean = play(averaged, federation, rounds=range(1, 31), evaluate_every=30)[0][-1].server
    assert joined.after > join(averaged, mean, newcomer, 6, Terms(after=30, seed=0)).after + 0.2


# The command


def arrays(clients: int, seed: int = 0, **more: np.ndarray) -> dict[str, np.ndarray]:
    federation = toy_federation((30,) * clients, seed=seed)
    x = torch.cat([examples.x for examples in federation.train]).numpy()
    y = torch.cat([examples.y for examples in federation.train]).numpy()
    return {"x": x, "y": y, **more}


EXPERIMENT = {
    "rounds": 2, "model": "mlp", "training": {"lr": 0.05, "local_epochs": 1},
    "algorithm": {"name": "pfedla", "warm_up": 0}, "data": {"dataset": "old.npz"},
}  # fmt: skip


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on clients named in a file, and a newcomer's file beside it."""
    here = tmp_path_factory.mktemp("joining")
    np.savez(here / "old.npz", **arrays(4, client=np.repeat(np.array(["north", "east", "south", "west"]), 30)))
    np.savez(here / "new.npz", **arrays(1, seed=1))
    run(Experiment.parse(EXPERIMENT | {"data": {"dataset": str(here / "old.npz")}}), here / "run")
    return here


@pytest.fixture
def finished(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, copied."""
    shutil.copytree(played, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Path("run")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_leaves_a_folder_and_nothing_else_changes(pfedla, finished: Path) -> None:
    before = contents(finished)
    code, out, err = pfedla("join", finished, "--data", "new.npz", "--rounds", 3)
    assert code == 0, err
    for words in (
        "as it joins",
        "after 3 rounds",
        "trained alone",
        "its own",
        "21 training and 9 test",
        "30%",
        "run/joined/new",
    ):
        assert words in out
    folder = finished / "joined" / "new"
    assert {path.name for path in folder.iterdir()} == {"result.json", "model.safetensors", "alpha.safetensors"}
    result = json.loads((folder / "result.json").read_text())
    assert (result["after_round"], result["rounds"], result["clients"]) == (2, 3, 4)
    alpha = load_file(folder / "alpha.safetensors")["alpha"]
    assert alpha.shape[0] == 4
    assert torch.equal(alpha[-1], torch.tensor(list(result["alpha"].values())))
    assert load_file(folder / "model.safetensors").keys() == load_file(finished / "models" / "client-0.safetensors").keys()
    made = contents(finished)
    assert {name: made[name] for name in before} == before
    code, _, err = pfedla("join", finished, "--data", "new.npz")
    assert (code, "never overwritten; give another --name" in err) == (2, True)
    code, out, _ = pfedla("join", finished, "--data", "new.npz", "--rounds", 3, "--name", "again", "--json")
    assert (code, json.loads(out)["accuracy"]) == (0, result["accuracy"])
    for file in ("model.safetensors", "alpha.safetensors"):
        assert (finished / "joined" / "again" / file).read_bytes() == (folder / file).read_bytes()
    assert pfedla("join", finished, "--data", "new.npz", "--name", "third", "-q")[1:] == ("", "")


def test_the_model_of_a_newcomer_is_tested_and_taken_out(pfedla, finished: Path) -> None:
    folder, result = join_run(finished, Path("new.npz"), rounds=2)
    code, out, err = pfedla("evaluate", finished, "--client", "joined/new", "--json")
    assert code == 0, err
    tested = json.loads(out)
    assert (tested["client"], tested["examples"]) == ("joined/new", 9)
    assert tested["accuracy"] == pytest.approx(result["accuracy"]["after"])
    code, out, err = pfedla("export", finished, "--client", "joined/new")
    assert code == 0, err
    described = json.loads((finished / "export" / "client-joined_new" / "model.json").read_text())
    assert described["client"] == "joined/new"
    code, _, err = pfedla("evaluate", finished, "--client", "joined/old")
    assert (code, "did you mean 'joined/new'" in err) == (2, True)
    code, _, err = pfedla("evaluate", finished, "--client", "joined/new", "--data", "new.npz")
    assert (code, "trained on these examples" in err) == (2, True)
    np.savez("new.npz", **arrays(1, seed=2))
    code, _, err = pfedla("evaluate", finished, "--client", "joined/new")
    assert (code, "is not what it was when joined/new joined" in err) == (2, True)
    np.savez("other.npz", **arrays(1, seed=1, client=np.full(30, "elsewhere")))
    code, out, err = pfedla("evaluate", finished, "--client", "joined/new", "--data", "other.npz", "--json")
    assert (code, json.loads(out)["examples"]) == (0, 30), err
    (folder / "result.json").write_text("{}")
    code, _, err = pfedla("evaluate", finished, "--client", "joined/new")
    assert (code, "does not say on which examples it joined" in err) == (2, True)
    assert pfedla("evaluate", finished, "--client", "joined/new", "--data", "other.npz")[0] == 0


def test_a_ready_test_split_is_taken(finished: Path) -> None:
    test = np.arange(30) % 3 == 0
    np.savez("new.npz", **arrays(1, seed=1, test=test, client=np.full(30, "site 7")))
    folder, result = join_run(finished, Path("new.npz"), rounds=1)
    assert result["examples"] == {"train": 20, "test": 10, "split": "the file's own"}
    assert folder == finished / "joined" / "site_7"


WRONG = {
    "shape": ({"x": np.zeros((30, 5), np.float32)}, r"examples of shape \(5,\), the run takes \(6,\)"),
    "class": ({"y": np.full(30, 7)}, "unknown class '7'"),
    "nan": ({"x": np.full((30, 6), np.nan)}, "not finite"),
    "huge": ({"x": np.full((30, 6), 1e30)}, "not finite; are its examples in the scale of the run's"),
    "kind": ({"x": np.zeros((30, 1, 6, 6), np.uint8)}, "examples of shape"),
    "clients": ({"client": np.arange(30) // 10}, r"several clients \(0, 1, 2\); a newcomer is one"),
    "no test": ({"test": np.zeros(30, bool)}, "30 training and 0 test examples: it needs both"),
    "objects": ({"y": np.array([None] * 30)}, "never opened"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_data_are_refused_and_leave_nothing(finished: Path, what: str) -> None:
    changed, words = WRONG[what]
    np.savez("new.npz", **arrays(1) | changed)
    with pytest.raises(PfedlaError, match=words):
        join_run(finished, Path("new.npz"), rounds=2)
    assert not (finished / "joined").exists()


def test_refusals_of_the_run(finished: Path, played: Path) -> None:
    with pytest.raises(PfedlaError, match="made of these examples"):
        join_run(finished, played / "old.npz")
    with pytest.raises(PfedlaError, match="is not a finished run"):
        join_run(Path("nowhere"), Path("new.npz"))
    alone = run(Experiment.parse(EXPERIMENT | {"algorithm": {"name": "local"}}), Path("alone"))
    with pytest.raises(NotApplicableError, match="no client can join a run of local: it shares nothing"):
        join_run(alone, Path("new.npz"))
    shutil.rmtree(finished / "checkpoints")
    with pytest.raises(PfedlaError, match="no checkpoint any more"):
        join_run(finished, Path("new.npz"))
    (finished / "deployment.json").write_text("{}")
    with pytest.raises(PfedlaError, match="of a deployment"):
        join_run(finished, Path("new.npz"))


# Clients of an experiment that stay away


UNSEEN = EXPERIMENT | {"unseen_clients": 0.3}


def test_at_least_one_stays_away_and_never_all() -> None:
    federation = toy_federation()
    assert federation.parted(0.0, 0) == (federation, None)
    for share, count in ((0.01, 1), (0.2, 1), (0.5, 3), (0.99, 5)):
        seen, unseen = federation.parted(share, 0)
        assert unseen is not None
        assert (len(seen), len(unseen)) == (6 - count, count)
        assert sorted(seen.names + unseen.names) == list(federation.names)
        assert federation.parted(share, 0)[1].names == unseen.names
    assert len({federation.parted(0.2, seed)[1].names for seed in range(20)}) > 1
    with pytest.raises(PfedlaError, match="of a single client none can stay away"):
        federation.only([0]).parted(0.5, 0)


def test_a_leak_is_that_among_those_who_take_part() -> None:
    from pfedla.data.federation import Examples, Federation

    rows = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    part = [Examples(rows[[number]], torch.tensor([0])) for number in range(6)]
    whole = Federation(
        part[:3], [part[1], part[2], part[5]], ("a", "b"), leaked_share=2 / 3
    )  # 0 is tested on what trains 1, 1 on 2's
    assert whole.only([0, 1]).leaked_share == 0.5
    assert whole.only([0, 2]).leaked_share == 0.0


def test_the_default_leaves_no_trace(finished: Path, played: Path) -> None:
    assert "unseen" not in (finished / "experiment.toml").read_text() + (finished / "federation.json").read_text()
    assert "unseen" not in json.loads((finished / "result.json").read_text())
    assert "unseen_clients" not in Experiment.parse(EXPERIMENT).numbers()
    assert Experiment.parse(UNSEEN).numbers()["unseen_clients"] == 0.3
    with pytest.raises(PfedlaError, match=r"unseen_clients was left out, is now 0\.3"):
        run(Experiment.parse(UNSEEN | {"data": {"dataset": str(played / "old.npz")}}), finished, resume=True)


def test_unseen_clients_are_reported_apart(finished: Path) -> None:
    folder = run(Experiment.parse(UNSEEN), Path("unseen"))
    result = json.loads((folder / "result.json").read_text())
    unseen, known = result["unseen"], json.loads((folder / "federation.json").read_text())
    assert (result["clients"], len(known["clients"]), len(unseen["clients"])) == (3, 3, 1)
    assert known["unseen"] == unseen["clients"]
    assert {*known["clients"], *unseen["clients"]} == {"north", "east", "south", "west"}
    assert len(result["accuracy"]["per_client"]) == 3
    for key in ("accuracy", "accuracy_before", "accuracy_after_training", "accuracy_alone"):
        assert len(unseen[key]["per_client"]) == 1
    built = build(Experiment.parse(UNSEEN))
    plain = simulate(
        built.federation,
        built.algorithm.task.module,
        "pfedla",
        rounds=2,
        lr=0.05,
        local_epochs=1,
        warm_up=0,
        engine="vectorized",
    )
    assert result["accuracy"]["per_client"] == plain.accuracy.tolist()
    assert (folder / "models" / "unseen-0.safetensors").exists()
    for position, name in enumerate(known["clients"]):
        again = evaluate_personal(load_personal(folder, name), None)
        assert again["accuracy"] == pytest.approx(result["accuracy"]["per_client"][position])


@pytest.mark.slow
def test_a_stopped_run_with_unseen_clients_goes_on(finished: Path) -> None:
    straight = run(Experiment.parse(UNSEEN | {"rounds": 3}), Path("straight"))
    folder = run(Experiment.parse(UNSEEN), Path("longer"))
    run(Experiment.parse(UNSEEN | {"rounds": 3}), folder, resume=True)
    stopped = RunFolder(Path("stopped"))
    stopped.stopping = lambda: stopped._played == 3
    with pytest.raises(Stopped):  # after the last round, before anybody has joined
        run_built(build(Experiment.parse(UNSEEN | {"rounds": 3})), stopped)
    assert not (stopped.path / "result.json").exists()
    run(Experiment.parse(UNSEEN | {"rounds": 3}), stopped.path, resume=True)
    wanted = json.loads((straight / "result.json").read_text())["unseen"]
    for other in (folder, stopped.path):
        assert json.loads((other / "result.json").read_text())["unseen"] == wanted
        assert (other / "models" / "unseen-0.safetensors").read_bytes() == (
            straight / "models" / "unseen-0.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_a_comparison_shows_them_apart(finished: Path) -> None:
    values = {key: value for key, value in UNSEEN.items() if key != "algorithm"}
    rows = compare(plan(values, ["local", "fedavg"], [0], Path("compared")))
    assert "no client can join a run of local" in rows[0].reason
    text = comparison_markdown(rows)
    assert "unseen % | unseen alone %" in text
    assert len(rows[1].cells()) == 6


def test_local_with_unseen_clients_is_refused_at_once(pfedla, finished: Path) -> None:
    code, _, err = pfedla("run", finished, "-a", "local", "--set", "unseen_clients=0.5", "--out", "no")
    assert (code, "no client can join a run of local" in err) == (2, True)
    assert not Path("no").exists()
    code, out, err = pfedla("run", finished, "-a", "fedavg", "--set", "unseen_clients=0.5", "--out", "yes")
    assert (code, "2 unseen, joined" in out) == (0, True), err


def test_every_method_was_tried() -> None:
    assert issubclass(ALGORITHMS["fedavg-ft"], FedAvg)
    assert all(applies(name, batch_norm=True) for name in JOINING)
