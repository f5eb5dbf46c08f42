"""Personal models as people use them: predict, score, evaluate, export."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TinyNet, toy_federation
from test_tables import hospitals
from torch import Tensor, nn

from pfedla import simulate
from pfedla.core.errors import PfedlaError
from pfedla.core.objectives import OBJECTIVES
from pfedla.data.federation import Examples, Federation, Outline, federation_of
from pfedla.runs.experiment import Experiment
from pfedla.runs.export import export_personal, make_program
from pfedla.runs.personal import evaluate_personal, load_personal
from pfedla.runs.prediction import PersonalModel, find_client
from pfedla.runs.recognition import hash_examples
from pfedla.runs.run import run

OWN = """
import torch
from collections import OrderedDict
from torch import nn

def half_frozen(shape, outputs):
    backbone = nn.Linear(shape[0], 6).requires_grad_(False)
    return nn.Sequential(OrderedDict(backbone=backbone, relu=nn.ReLU(), head=nn.Linear(6, outputs)))
"""


def images(count: int = 90, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    y = np.arange(count) % 3
    x = (rng.integers(0, 150, (count, 8, 8)) + 35 * y[:, None, None]).astype(np.uint8)
    return {"x": x, "y": np.array(["ant", "bee", "cat"])[y], "client": np.repeat(["north", "south"], count // 2)}


def run_on(path: Path, out: str = "r", **settings: Any) -> Path:
    table = {"label": "disease", "client": "site"} if path.suffix == ".csv" else {}
    values = {"rounds": 2, "data": {"dataset": str(path), **table}, "training": {"lr": 0.1}}
    return run(Experiment.parse(values | {"algorithm": {"name": "fedavg"}} | settings), path.parent / out)


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfedla.runs.result.draw_run", lambda folder: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on images and one on a table."""
    here = tmp_path_factory.mktemp("personal")
    np.savez(here / "images.npz", **images())
    hospitals().to_csv(here / "table.csv", index=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfedla.runs.result.draw_run", lambda folder: None)
        run_on(here / "images.npz", "images")
        run_on(here / "table.csv", "table")
    return here


def test_predictions_are_the_labels_that_were_given() -> None:
    given = images()
    federation = federation_of(**given)
    result = simulate(federation, nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), "fedavg", rounds=3, lr=0.1)
    test, raw = federation.test[1], federation.test[1].x.numpy()
    found = result.predict(raw, client="south")
    assert set(found) <= {"ant", "bee", "cat"}
    shares = result.predict_proba(torch.from_numpy(raw), client=1)
    assert shares.sum(1) == pytest.approx(1)
    assert (np.array(federation.classes)[shares.argmax(1)] == found).all()
    names = np.array(federation.classes)[test.y]
    assert result.score(raw[:, 0], names, client="south") == pytest.approx((found == names).mean())  # [n, h, w] too
    assert result.score(raw, names, client="south") == pytest.approx(float(result.scores[1]))
    plain = result.personal_model("south")(federation.normalise(test.x)).softmax(1)
    torch.testing.assert_close(torch.from_numpy(shares).float(), plain.detach())
    for wrong in (raw / 255, raw[..., :4], [[1, 2], [3]]):
        with pytest.raises(PfedlaError):
            result.predict(wrong, client="south")
    for client in ("west", 2, -1):
        with pytest.raises(PfedlaError, match="north, south"):
            result.personal_model(client)


def test_whole_numbers_stay_whole_numbers() -> None:
    result = simulate(toy_federation(), TinyNet(), "local", rounds=1)
    x = np.zeros((4, 6))
    assert result.predict(x, client=3).dtype.kind == "i"
    assert find_client(["7", "0"], "0") == 1
    assert find_client(["7", "0"], 0) == 0
    assert find_client(["a", "b"], "1") == 1


@pytest.mark.parametrize("task", [name for name in OBJECTIVES if name != "classification"])
def test_every_task_predicts(task: str) -> None:
    toy, outputs = toy_federation((12, 9)), {"multilabel": 3}.get(task, 1)

    def relabel(part: Examples) -> Examples:
        y = {"multilabel": (part.x[:, :3] > 0).float(), "regression": part.x.sum(1)}
        survival = torch.stack([part.x.exp().sum(1), torch.ones(len(part.x))], 1)
        return Examples(part.x, y.get(task, survival))

    known = {"task": task, "targets": tuple("abc"[:outputs])}
    federation = Federation([*map(relabel, toy.train)], [*map(relabel, toy.test)], ("examples",), **known)
    result = simulate(federation, nn.Linear(6, outputs), "fedavg", rounds=1)
    test = federation.test[0]
    found = result.predict(test.x, client=0)
    assert found.shape == ((7, 3) if task == "multilabel" else (7,))
    score = result.score(test.x, test.y, client=0)
    assert score == pytest.approx(float(result.scores[0]), nan_ok=True)
    if task == "multilabel":
        assert ((result.predict_proba(test.x, client=0) > 0.5) == found).all()
    else:
        with pytest.raises(PfedlaError, match=task):
            result.predict_proba(test.x, client=0)


def test_raw_tables_are_encoded_and_scaled_as_the_clients_own() -> None:
    frame = hospitals()
    federation = federation_of(frame, "disease", "site")
    result = simulate(federation, nn.Linear(7, 2), "local", rounds=2)
    east = frame[frame.site == "east"]
    shares = result.predict_proba(east, client="east")
    assert shares.shape == (40, 2)
    number = federation.names.index("east")
    scaled = torch.cat([federation.train[number].x, federation.test[number].x])
    plain = result.personal_model("east")(scaled).softmax(1).detach().numpy()
    assert np.sort(shares[:, 0]) == pytest.approx(np.sort(plain[:, 0]), abs=1e-6)
    assert np.isfinite(result.predict_proba(frame[frame.site == "north"], client="north")).all()  # missing values
    with pytest.raises(PfedlaError, match="ward"):
        result.predict(east.drop(columns="ward"), client="east")


def test_training_rows_are_recognised_by_their_content(finished: Path, tmp_path: Path) -> None:
    shutil.copy(finished / "images.npz", tmp_path / "copy.npz")
    north = load_personal(finished / "images", "north")
    trained = sum(json.loads((finished / "images" / "federation.json").read_text())["train"][0])
    with pytest.raises(PfedlaError, match=f"{trained} of 45 rows"):
        evaluate_personal(north, tmp_path / "copy.npz")
    given = images()
    rows = np.flatnonzero(given["client"] == "north")
    own, known = evaluate_personal(north, None), np.load(finished / "images" / "trained_on.npy")
    held = rows[~np.isin(hash_examples(given["x"][rows][:, None], client=0), known)]
    np.savez(tmp_path / "held.npz", x=given["x"][held], y=given["y"][held])
    assert evaluate_personal(north, tmp_path / "held.npz") == own  # its own test rows are fine
    np.savez(tmp_path / "new.npz", **{key: value[:9] for key, value in images(seed=1).items() if key != "client"})
    assert evaluate_personal(north, tmp_path / "new.npz")["examples"] == 9
    assert own["metrics"].keys() == {metric.name for metric in OBJECTIVES["classification"].metrics}


def test_a_table_is_evaluated_and_its_training_rows_refused(pfedla: Any, finished: Path, tmp_path: Path) -> None:
    frame = hospitals()
    frame[frame.site == "east"].drop(columns="site").to_csv("copy.csv", index=False)
    code, _, err = pfedla("evaluate", finished / "table", "--client", "east", "--data", "copy.csv")
    assert (code, "28 of 40 rows" in err) == (2, True)
    new = frame[frame.site == "east"].assign(creatinine=lambda one: one.creatinine + 0.01)
    new.to_csv("new.csv", index=False)
    how = ("--data", "new.csv", "--predictions", "out.csv", "--json")
    code, out, err = pfedla("evaluate", finished / "table", "--client", "east", *how)
    assert code == 0, err
    table = pd.read_csv("out.csv")
    assert [*table] == ["row", "label", "prediction", "probability_ill", "probability_well"]
    assert (table.label == new.disease.to_numpy()).all()
    assert json.loads(out)["score"] == pytest.approx((table.label == table.prediction).mean())
    assert pfedla("evaluate", finished / "table", "--client", "east", *how)[0] == 2  # never overwritten


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "pfedla":
            raise ImportError(name)
sys.meta_path.insert(0, Blocker())
import numpy, torch
model = torch.export.load(sys.argv[1]).module()
x = torch.from_numpy(numpy.load(sys.argv[2]))
numpy.save(sys.argv[3], model(x).softmax(1).detach().numpy())
"""


@pytest.mark.slow
def test_an_exported_table_model_scales_by_itself_without_pfedla(finished: Path, tmp_path: Path) -> None:
    personal = load_personal(finished / "table", "north")
    _, program, about = export_personal(personal, tmp_path / "out")
    described = json.loads(about.read_text())
    assert described["features"] == ["creatinine", "age", "ward=A", "ward=B", "ward=C", "smoker=False", "smoker=True"]
    assert described["columns"][2] == {"name": "ward", "kind": "category", "categories": ["A", "B", "C"]}
    frame = hospitals()
    frame = frame[frame.site == "north"]
    np.save(tmp_path / "x.npy", personal.model.arrange(frame).x)
    command = [sys.executable, "-I", "-c", BLOCKED, program, tmp_path / "x.npy", tmp_path / "y.npy"]
    subprocess.run([*map(str, command)], check=True)
    assert np.isnan(np.load(tmp_path / "x.npy")).any()
    assert np.load(tmp_path / "y.npy") == pytest.approx(personal.model.predict_proba(frame), abs=1e-6)


def test_frozen_tensors_are_rebuilt_and_the_adapter_is_exported(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    (tmp_path / "half.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(finished / "table.csv", tmp_path)
    folder = run_on(tmp_path / "table.csv", model="half:half_frozen")
    result = json.loads((folder / "result.json").read_text())
    personal = load_personal(folder, "0")
    assert evaluate_personal(personal, None)["score"] == pytest.approx(result["score"]["per_client"][0])
    paths = export_personal(personal, tmp_path / "adapter")
    assert [path.name for path in paths] == ["adapter.safetensors", "model.json"]
    assert load_file(paths[0]).keys() == {"head.weight", "head.bias"}
    state, program, _ = export_personal(personal, tmp_path / "merged", merged=True)
    assert "backbone.weight" in load_file(state)
    x = torch.randn(5, 7)
    torch.testing.assert_close(torch.export.load(program).module()(x), personal.model(x))


def test_a_program_takes_several_inputs() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head((self.embed(ids) * mask[..., None]).sum(1))}

    outline = Outline({"ids": (6,), "mask": (6,)}, ("no", "yes"), torch.zeros(1), vocabulary=10)
    model = PersonalModel(Bag(), outline, OBJECTIVES["classification"])
    x = {"ids": torch.arange(30).reshape(5, 6) % 10, "mask": torch.ones(5, 6, dtype=torch.bool)}
    program = make_program(model, {key: value[:2] for key, value in x.items()})
    torch.testing.assert_close(program.module()(x), model(x))
    assert model.predict(x).tolist() == [["no", "yes"][int(one)] for one in model(x).argmax(1)]
