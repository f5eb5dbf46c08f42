"""The command line, as a person or a script would use it."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import drop_sums
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pfedla.algorithms import ALGORITHMS
from pfedla.core.contracts import Cohort
from pfedla.core.models import SmallCNN
from pfedla.core.rounds import summarise as summary

QUICK = ("--rounds", 2, "--local-epochs", 1, "--samples", 20, "--clients", 4)


def numbers(result: dict) -> dict:
    return {key: value for key, value in result.items() if key not in ("seconds", "run")}


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    """Three clients of a hospital each, plain feature vectors, named classes."""
    rng = np.random.default_rng(0)
    y = np.array(["ill", "well"])[np.arange(90) % 2]
    x = rng.normal(size=(90, 5)) + (y == "ill")[:, None]
    path = tmp_path / "hospitals.npz"
    np.savez(path, x=x, y=y, client=np.repeat(["bern", "oslo", "rome"], 30), test=np.arange(90) % 3 == 0)
    return path


def test_a_run_leaves_a_complete_folder(pfedla, tmp_path: Path) -> None:
    code, out, err = pfedla("run", "-a", "heurpfedla", *QUICK, "--set", "algorithm.neighbours=3")
    assert code == 0
    assert "personal models" in out
    assert "round 2" in err  # plain lines, as this is no terminal
    run = tmp_path / "runs" / "heurpfedla-digits-classes-s0"
    files = "experiment.toml environment.json federation.json rounds.jsonl result.json alpha.safetensors models "
    files += "learning_curve.png alpha.png self_weight.png checkpoints trained_on.npy .lock"
    assert {path.name for path in run.iterdir()} == set(files.split())
    assert {path.name for path in (run / "models").iterdir()} == {f"client-{i}.safetensors" for i in range(4)}
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2]
    keys = "round score loss score_after_training training_loss seconds down_bytes up_bytes"
    assert lines[0].keys() == {*keys.split(), "cohort", "retained", "failures"}
    assert lines[0]["score"].keys() == {"mean", "std", "p10", "worst"}
    result = json.loads((run / "result.json").read_text())
    assert result["score"]["mean"] == pytest.approx(np.mean(result["score"]["per_client"]))
    assert result["score"]["mean"] == lines[-1]["score"]["mean"]
    assert result["score"]["worst"] == min(result["score"]["per_client"])
    assert result["traffic"]["down_bytes"] == lines[-1]["down_bytes"]
    assert result["seconds"]["phases"].keys() == {"train", "server", "evaluate", "record", "checkpoint"}
    assert result["seconds"]["total"] == pytest.approx(sum(result["seconds"]["phases"].values()))
    with safe_open(run / "alpha.safetensors", framework="pt") as file:
        alpha = file.get_tensor("alpha")
        assert json.loads(file.metadata()["layers"]) == ["conv1", "conv2", "fc1", "fc2"]
        assert file.get_tensor("rounds").tolist() == [0, 1, 2]
    assert lines[0]["retained"] == {"fc2": 4}  # the uniform start: ties go to the output
    assert alpha.shape == (3, 4, 4, 4)
    torch.testing.assert_close(alpha.sum(-1), torch.ones(3, 4, 4))


def test_the_resolved_experiment_repeats_the_run(pfedla, tmp_path: Path) -> None:
    code, first, _ = pfedla("run", *QUICK, "--participation", 0.5, "--threads", 1, "--json", "--out", "one")
    assert code == 0
    code, second, _ = pfedla("run", "one/experiment.toml", "--threads", 2, "--json", "--out", "two")
    assert code == 0
    assert numbers(json.loads(first)) == numbers(json.loads(second))
    for client in range(4):
        one, two = (load_file(tmp_path / run / "models" / f"client-{client}.safetensors") for run in ("one", "two"))
        assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = ((tmp_path / run / "alpha.safetensors").read_bytes() for run in ("one", "two"))
    assert one == two
    resolved = tomllib.loads((tmp_path / "one" / "experiment.toml").read_text())
    assert "auto" not in str(resolved)


def test_options_override_the_file_and_set_overrides_both(pfedla, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        "rounds = 1\n[data]\nclients = 4\nsamples_per_client = 20\n[training]\nlr = 0.5\nlocal_epochs = 1\n"
        '[algorithm]\nname = "pfedla"\nneighbours = 2\n'
    )
    words = "run e.toml --lr 0.25 --set algorithm.neighbours=all --set seed=3 --out r -q"
    assert pfedla(*words.split())[0] == 0
    resolved = tomllib.loads((tmp_path / "r" / "experiment.toml").read_text())
    assert resolved["training"]["lr"] == 0.25
    assert resolved["algorithm"]["neighbours"] == "all"
    assert (resolved["seed"], resolved["rounds"], resolved["data"]["clients"]) == (3, 1, 4)


@pytest.mark.slow
def test_options_of_one_algorithm_do_not_go_over_to_another(pfedla, tmp_path: Path) -> None:
    """A pfedla-heldout run's file says retained_layers = 0; HeurpFedLA must not inherit it."""
    pfedla("run", *QUICK, "-a", "pfedla-heldout", "--out", "p", "-q")
    code, out, _ = pfedla("run", "p/experiment.toml", "-a", "heurpfedla", "--json", "--out", "h")
    assert code == 0
    traffic = json.loads(out)["traffic"]
    assert traffic["down_bytes"] < traffic["up_bytes"]
    pfedla("run", *QUICK, "--out", "q", "-q")
    words = "compare q/experiment.toml -a pfedla,heurpfedla --set algorithm.neighbours=2 --json --out c"
    code, out, _ = pfedla(*words.split())
    assert code == 0
    results = json.loads(out)
    assert results["heurpfedla"][0]["traffic"] != results["pfedla"][0]["traffic"]
    for name in ("pfedla", "heurpfedla"):
        resolved = tomllib.loads((tmp_path / "c" / f"{name}-s0" / "experiment.toml").read_text())["algorithm"]
        assert resolved["neighbours"] == 2


def test_the_summary_of_the_clients() -> None:
    numbers = summary(torch.tensor([0.0, 0.5, 1.0, torch.nan], dtype=torch.float64))
    assert numbers["per_client"] == [0.0, 0.5, 1.0, None]
    assert numbers["mean"] == 0.5
    assert numbers["std"] == pytest.approx((1 / 6) ** 0.5)
    assert numbers["p10"] == pytest.approx(0.1)
    assert numbers["worst"] == 0.0
    assert summary(torch.tensor([torch.nan]))["mean"] is None


def test_cohorts_are_drawn_anew_each_round_and_hold_the_share() -> None:
    sizes = torch.arange(100, 200)
    cohorts = [Cohort.sample(sizes, number, 0.1, seed=0) for number in range(1, 51)]
    assert all(len(cohort.ids) == 10 for cohort in cohorts)
    assert all(torch.equal(cohort.num_examples, sizes[cohort.ids]) for cohort in cohorts)
    assert len({tuple(cohort.ids.tolist()) for cohort in cohorts}) == 50
    assert len(set(torch.cat([cohort.ids for cohort in cohorts]).tolist())) > 95
    assert not torch.equal(cohorts[0].ids, Cohort.sample(sizes, 1, 0.1, seed=1).ids)


def test_a_run_that_fails_before_its_first_round_leaves_no_folder(
    pfedla, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pfedla.runs.folder.RunFolder.add_line", full)
    code, _, err = pfedla("run", *QUICK, "-q", "--out", "r")
    assert code == 1
    assert ("No space left" in err, "MiB are free" in err) == (True, True)
    assert not (tmp_path / "r").exists()


def test_quiet_is_quiet_and_json_is_json(pfedla) -> None:
    assert pfedla("run", *QUICK, "--quiet") == (0, "", "")
    code, out, err = pfedla("run", *QUICK, "--rounds", 1, "--participation", 0.25, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["score_after_training"]["per_client"].count(None) == 3  # these never trained
    assert None not in result["score"]["per_client"]


@pytest.mark.slow
def test_an_existing_folder_is_never_overwritten(pfedla, tmp_path: Path) -> None:
    assert pfedla("run", *QUICK, "--out", "mine", "-q")[0] == 0
    before = (tmp_path / "mine" / "result.json").read_bytes()
    code, _, err = pfedla("run", *QUICK, "--seed", 5, "--out", "mine", "-q")
    assert (code, "never overwritten" in err) == (2, True)
    assert (tmp_path / "mine" / "result.json").read_bytes() == before
    for _ in range(2):
        assert pfedla("run", *QUICK, "-q")[0] == 0
    default = "pfedla-digits-classes-s0"
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {default, f"{default}-2"}


def test_own_data_with_clients_and_a_ready_split(pfedla, own_data: Path, tmp_path: Path) -> None:
    code, out, _ = pfedla("run", "-d", own_data, "--rounds", 5, "--json", "--out", "r")
    assert code == 0
    result = json.loads(out)
    assert (result["clients"], result["partition"], result["model"]) == (3, "client", "mlp")
    federation = json.loads((tmp_path / "r" / "federation.json").read_text())
    assert federation["classes"] == ["ill", "well"]
    assert federation["clients"] == ["bern", "oslo", "rome"]
    assert np.sum(federation["test"]) == 30


@pytest.mark.slow
def test_colour_images_get_the_papers_batchnorm_net_and_export(pfedla, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    np.savez("photos.npz", x=rng.integers(0, 256, (60, 16, 16, 3), np.uint8), y=np.arange(60) % 3)
    how = ("-d", "photos.npz", "--clients", 3, "--rounds", 2, "--local-epochs", 1, "--participation", 0.34)
    code, out, err = pfedla("run", *how, "--json", "--out", "r")
    assert code == 0, err
    result = json.loads(out)
    assert result["model"] == "cnn-bn"
    for client, accuracy in enumerate(result["score"]["per_client"]):  # statistics are saved, recalibrated ones too
        assert json.loads(pfedla("evaluate", "r", "--client", client, "--json")[1])["score"] == accuracy
    assert pfedla("export", "r", "--client", 0)[0] == 0
    program = torch.export.load(tmp_path / "r" / "export" / "client-0" / "model.pt2").module()
    assert program(torch.zeros(4, 3, 16, 16)).isfinite().all()


@pytest.mark.slow
def test_evaluate_gives_the_accuracy_of_the_run(pfedla, own_data: Path) -> None:
    for data in ("digits", own_data):
        run = f"run-{Path(data).stem}"
        sizes = QUICK if data == "digits" else QUICK[:4]
        result = json.loads(pfedla("run", "-d", data, *sizes, "--json", "--out", run)[1])
        for client, accuracy in enumerate(result["score"]["per_client"]):
            code, out, _ = pfedla("evaluate", run, "--client", client, "--json")
            assert code == 0
            assert json.loads(out)["score"] == accuracy
    for client in (1, "oslo"):  # by number, by name: its rows of the file, its test split
        code, out, _ = pfedla("evaluate", run, "--client", client, "--data", own_data, "--json")
        assert json.loads(out) == {**json.loads(out), "examples": 10, "score": result["score"]["per_client"][1]}
    code, _, err = pfedla("evaluate", run, "--client", "paris")
    assert (code, "choose one of: bern, oslo, rome" in err) == (2, True)


def test_evaluate_refuses_another_scale(pfedla) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (60, 8, 8), np.uint8), np.arange(60) % 3
    np.savez("bytes.npz", x=x, y=y)
    np.savez("floats.npz", x=x / 255, y=y)
    for trained, tested in (("bytes", "floats"), ("floats", "bytes")):
        pfedla("run", "-d", f"{trained}.npz", "--clients", 3, "--rounds", 1, "--out", trained, "-q")
        code, _, err = pfedla("evaluate", trained, "--client", 0, "--data", f"{tested}.npz")
        assert (code, "uint8" in err) == (2, True)


def test_evaluate_takes_new_data_but_not_what_was_trained_on(pfedla, own_data: Path, tmp_path: Path) -> None:
    with np.load(own_data) as file:
        arrays = dict(file)
    np.savez("unsplit.npz", x=arrays["x"], y=arrays["y"], client=arrays["client"])
    pfedla("run", "-d", "unsplit.npz", "--rounds", 1, "--out", "r", "-q")
    code, _, err = pfedla("evaluate", "r", "--client", 0, "--data", "unsplit.npz")
    assert (code, "trained on" in err) == (2, True)
    np.savez("new.npz", x=arrays["x"][:9:2] + 1, y=arrays["y"][:9:2])  # one class only, no clients
    code, out, _ = pfedla("evaluate", "r", "--client", 0, "--data", "new.npz", "--json")
    assert code == 0
    assert json.loads(out)["examples"] == 5
    np.savez("unsplit.npz", x=arrays["x"][:81], y=arrays["y"][:81], client=arrays["client"][:81])
    code, _, err = pfedla("evaluate", "r", "--client", 0)
    assert (code, "unsplit.npz" in err) == (2, True)


def test_a_damaged_run_folder_is_refused(pfedla, tmp_path: Path) -> None:
    pfedla("run", *QUICK, "--out", "r", "-q")
    for content in ("{", "{}", "[]", '{"shape": [-1]}'):
        (tmp_path / "r" / "federation.json").write_text(content)
        code, _, err = pfedla("evaluate", "r", "--client", 0)
        assert (code, "federation.json is damaged" in err) == (2, True)


def test_an_exported_model_needs_nothing_of_ours(pfedla, tmp_path: Path) -> None:
    pfedla("run", "-a", "heurpfedla", *QUICK, "--out", "r", "-q")
    code, out, _ = pfedla("export", "r", "--client", 2)
    assert code == 0
    folder = tmp_path / "r" / "export" / "client-2"
    assert {path.name for path in folder.iterdir()} == {"state_dict.safetensors", "model.pt2", "model.json"}
    assert str(Path("r/export/client-2/model.pt2")) in out
    description = json.loads((folder / "model.json").read_text())
    module = SmallCNN((1, 8, 8), 10)
    module.load_state_dict(load_file(folder / "state_dict.safetensors"))  # strict: a plain state_dict
    program = torch.export.load(folder / "model.pt2").module()
    raw = torch.randint(0, 17, (5, 1, 8, 8)).float()
    mean, std = (description["normalisation_inside"][key][0] for key in ("mean", "std"))
    torch.testing.assert_close(program(raw), module.eval()((raw - mean) / std))
    assert program(raw[:1]).shape == (1, 10)
    assert pfedla("export", "r", "--client", 2)[0] == 2  # never overwritten
    code, _, err = pfedla("export", "r", "--client", 2, "--out", "r/result.json/x")
    assert (code, "cannot be made" in err) == (2, True)


def test_a_damaged_personal_model_is_refused(pfedla, tmp_path: Path) -> None:
    pfedla("run", *QUICK, "--out", "r", "-q")
    path = drop_sums(tmp_path / "r") / "models" / "client-0.safetensors"
    good = load_file(path)
    changes = {"fc2.bias": torch.zeros(11)}, {"fc2.bias": torch.full((10,), torch.nan)}, {"more": torch.zeros(1)}
    for change in changes:
        save_file({**good, **change}, path)
        code, _, err = pfedla("evaluate", "r", "--client", 0)
        assert code == 2
        assert next(iter(change)) in err
    path.write_bytes(b"garbage")
    assert pfedla("evaluate", "r", "--client", 0)[0] == 2


@pytest.mark.slow
def test_compare_has_means_differences_and_one_picture(pfedla, tmp_path: Path) -> None:
    code, out, err = pfedla(
        "compare", "-a", "local,fedavg,pfedla", "--seeds", "0,1", "--against", "fedavg", *QUICK, "--out", "c"
    )
    assert code == 0
    assert "±" in out
    assert "against fedavg" in out
    assert "fedavg, seed 1" in err
    assert (tmp_path / "c" / "learning_curves.png").exists()
    table = (tmp_path / "c" / "comparison.md").read_text().splitlines()
    assert [line.split(" | ")[0] for line in table[2:5]] == ["| local", "| fedavg", "| pfedla"]
    results = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert [one["seed"] for one in results["pfedla"]] == [0, 1]
    single = json.loads(pfedla("run", "-a", "fedavg", *QUICK, "--seed", 1, "--json")[1])
    assert numbers(results["fedavg"][1]) == numbers(single)  # the same federation, draws and numbers as alone


def test_compare_prints_a_dash_where_a_method_does_not_apply(pfedla, tmp_path: Path) -> None:
    option = ("--set", "heurpfedla.retained_layers=9")
    code, out, _ = pfedla("compare", "-a", "fedavg,heurpfedla", *QUICK, *option, "--out", "c")
    assert code == 0
    assert next(line for line in out.splitlines() if "heurpfedla" in line).count("–") > 1
    assert "retained_layers" in out
    assert "–" in (tmp_path / "c" / "comparison.md").read_text()


def test_lists(pfedla) -> None:
    code, out, _ = pfedla("algorithms")
    assert code == 0
    assert all(name in out for name in ALGORITHMS)
    assert "hypernetwork_lr" in out
    assert json.loads(pfedla("algorithms", "--json")[1])["heurpfedla"]["retained_layers"] == 1
    assert pfedla("--version")[1].strip().startswith("0.")
    for command in ("run", "compare", "communication", "evaluate", "export", "data list", "data fetch", "data show"):
        code, out, _ = pfedla(*command.split(), "--help")
        assert code == 0
        assert "--" in out


WRONG = {  # call -> the thing or the choice that the error must name
    "run -a pfedlo": "pfedla",
    "run -d fashionmnist": "fashion-mnist",
    "run --set algorithm.neighbors=3": "neighbours",
    "run --clients 500": "clients",
    "run --model resnet": "small-cnn",
    "run --participation 0": "participation",
    "run -a heurpfedla --set algorithm.retained_layers=5": "retained_layers",
    "run -a fedavg --set algorithm.neighbours=5": "neighbours",
    "run --set algorithm.hypernetwork_lr=inf": "hypernetwork_lr",
    "run --set rounds": "section.key=value",
    "run missing.toml": "missing.toml",
    "run bad.toml": "bad.toml",
    "run -d missing.npz": "missing.npz",
    "run word.toml": "algorithm",
    "compare -a local --set pfedla.neighbours=3": "pfedla",
    "compare --seeds one": "--seeds",
    "compare -a local,fedavg --set algorithm.neighbours=5": "neighbours",
    "communication -d mine.npz": "mine.npz",
    "communication -d emnist --retain fc9": "fc3",
    "evaluate nowhere --client 0": "nowhere",
    "fly": "fly",
}


@pytest.mark.parametrize(("call", "named"), WRONG.items())
def test_wrong_calls_name_the_thing_and_leave_nothing(pfedla, tmp_path: Path, call: str, named: str) -> None:
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    (tmp_path / "word.toml").write_text('algorithm = "fedavg"')
    code, out, err = pfedla(*call.split())
    assert code == 2
    assert named in out + err
    assert "Traceback" not in out + err
    assert {path.name for path in tmp_path.iterdir()} == {"bad.toml", "word.toml"}
