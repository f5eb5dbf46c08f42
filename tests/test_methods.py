"""Tables of several methods: their files, their caption, and the page with the same numbers."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.objectives import OBJECTIVES
from pfedla.report.figures import draw_comparison
from pfedla.report.grouping import group_runs
from pfedla.report.methods import MethodTable
from pfedla.report.page import collect_page_data, render_page
from pfedla.report.reading import Metric, read_result
from pfedla.report.rows import Row
from pfedla.runs.comparison import plan_comparison, write_comparison

RUN = Path(__file__).parent / "fixtures" / "format1" / "fedavg"
GAINS = {"local": (0, 0, 0, 0), "fedavg": (-0.2, -0.19, -0.22, -0.2), "pfedla": (0.02, -0.01, 0.01, 0.01)}


def copy_run(place: Path, name: str, seed: int, gain: float) -> Path:
    """Return a run folder of a method on a seed, with scores that are higher by a gain."""
    run = Path(shutil.copytree(RUN, place / f"{name}-s{seed}"))
    text = (run / "experiment.toml").read_text().replace("seed = 0", f"seed = {seed}")
    (run / "experiment.toml").write_text(text.replace('name = "fedavg"', f'name = "{name}"'))
    result, federation = (json.loads((run / file).read_text()) for file in ("result.json", "federation.json"))
    found = [0.5 + 0.1 * seed + gain + 0.01 * client for client in range(4)]
    spread = {"mean": sum(found) / 4, "std": 0.011, "p10": found[0] + 0.003, "worst": found[0], "per_client": found}
    (run / "result.json").write_text(json.dumps(result | {"seed": seed, "accuracy": spread, "algorithm": name}))
    (run / "federation.json").write_text(json.dumps(federation | {"fingerprint": f"of seed {seed}"}))
    return run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return runs of three methods on four seeds."""
    place = tmp_path_factory.mktemp("runs")
    return [copy_run(place, name, seed, gain) for name, some in GAINS.items() for seed, gain in enumerate(some)]


@pytest.fixture
def table(folders: list[Path]) -> MethodTable:
    rows = {name: Row(name) for name in GAINS}
    for folder in folders:
        rows[folder.name.rpartition("-s")[0]].folders.append(folder)
    for row in rows.values():
        row.results = [read_result(folder / "result.json") for folder in row.folders]
    return MethodTable(list(rows.values()))


# Tables


def errors_of(name: str, *means: float | None) -> Row:
    """Return a method with these root mean squared errors, a seed each."""
    task = {"name": "regression", "metric": "rmse", "higher_is_better": False, "percent": False}
    common = {"task": task, "traffic": {"down_bytes": 0, "up_bytes": 0}, "seconds": {"total": 1.0}, "rounds": 1}
    common |= {"overlapping": False, "leaked_test_share": 0.0}
    common["baseline"] = {"name": "mean", "score": {"mean": 2.0, "worst": 3.0, "p10": 2.5, "std": None}}
    found = [{"mean": mean, "per_client": [mean, mean]} for mean in means]
    return Row(name, [{"seed": n, "score": one, "score_after_training": one} | common for n, one in enumerate(found)])


def test_the_lowest_error_is_the_best() -> None:
    table = MethodTable([errors_of("far", 1.5, 1.6, 1.7), errors_of("near", 1.4, 1.499, 1.601)])
    head, far, near, constant = table.tabulate()
    assert head[:5] == ["algorithm", "RMSE (lower is better)", "worst", "90th percentile", "spread"]
    assert (far[1], near[1]) == ("1.600 ± 0.058", "**1.500 ± 0.058**")
    assert constant[:6] == ["mean", "2.000 ± 0.000", "3.000", "2.500", "–", "–"]
    assert table.tabulate_differences()[1][:4] == ["near", "-0.100", "[-0.101, -0.099]", "<0.001"]


def test_an_undefined_score_is_a_dash_and_has_no_rank() -> None:
    table = MethodTable([errors_of("undefined", None), errors_of("known", 1234.5)])
    assert table.analysis.best == "known"
    lines = {line[0]: line for line in table.tabulate()}
    assert (lines["undefined"][1], lines["known"][1]) == ("–", "1234")


def test_metrics_are_shown_as_objectives_describe_them() -> None:
    known = {metric for objective in OBJECTIVES.values() for metric in objective.metrics}
    for metric in known:
        assert Metric.named(metric.name) == (metric.name, metric.higher_is_better, metric.percent)
        assert Metric.named(metric.name).label != metric.name or metric.name == "accuracy"
    for objective in OBJECTIVES.values():
        assert Metric.of({"task": objective.describe()}) == Metric.named(objective.headline)
    assert Metric.of({}) == Metric.named("accuracy")
    assert [Metric.named("auroc").show(value) for value in (0.5, None)] == ["0.500", "–"]
    assert Metric.named("accuracy").show(0.9125) == "91.2 %"


def test_attackers_have_no_part() -> None:
    row = errors_of("a", 1.0)
    row.results[0]["score"]["per_client"] = [1.0, 9.0]
    assert row.scores == {0: 5.0}
    row.results[0]["attackers"] = [1]
    assert row.scores == {0: 1.0}


def test_a_method_that_gave_up_on_a_seed_has_no_mean(
    table: MethodTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, _, flaky = table.rows
    flaky.results.pop()
    flaky.folders.pop()
    flaky.gave_up[3] = str(GaveUpError("nothing usable"))
    table = MethodTable([*table.rows, Row("fedbn", not_applicable="no BatchNorm")])
    lines = {line[0]: line for line in table.tabulate()}
    assert "gave up on 1 of 4 seeds" in lines["pfedla"]
    assert not any("±" in cell for cell in lines["pfedla"])
    assert lines["local"][1] == "**66.5 ± 6.5**"
    assert [line[0] for line in table.tabulate_differences()[1:]] == ["fedavg"]
    assert all(reason in table.to_markdown() for reason in ("nothing usable", "no BatchNorm"))
    content = {row.algorithm: row.content for row in table.rows}
    assert (len(content["pfedla"]["results"]), content["pfedla"]["gave_up"]) == (3, {3: "nothing usable"})
    assert content["fedbn"] == {"not_applicable": "no BatchNorm"}
    drawn: list[Any] = []
    monkeypatch.setattr("pfedla.report.figures.save", lambda figure, path, caption: drawn.append(figure) or path)
    draw_comparison(MethodTable([local, flaky]), tmp_path / "curves.png")
    labels = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert labels == ["local (4 seeds)", "pfedla (gave up on 1 of 4 seeds)"]


# Files


def test_the_files_of_a_comparison(table: MethodTable, tmp_path: Path) -> None:
    write_comparison(table, tmp_path)
    statistics = json.loads((tmp_path / "statistics.json").read_text())["accuracy"]
    assert (statistics["reference"], statistics["best"], statistics["bold"]) == ("local", "pfedla", ["local", "pfedla"])
    with (tmp_path / "comparison.csv").open(newline="") as file:
        lines = {line["method"]: line for line in csv.DictReader(file)}
    assert list(lines) == list(GAINS)
    for name in ("fedavg", "pfedla"):
        found = statistics["differences"][name]
        assert float(lines[name]["p_corrected"]) == found["p_corrected"] >= found["p"]
        assert float(lines[name]["low"]) == found["low"] <= found["mean"] <= found["high"]
    assert float(lines["pfedla"]["share_better"]) == statistics["summaries"]["pfedla"]["share_better"] == 0.75
    assert lines["local"]["difference"] == ""
    markdown, latex = ((tmp_path / f"comparison.{ending}").read_text() for ending in ("md", "tex"))
    assert [name for name in GAINS if f"| {name} | **" in markdown] == statistics["bold"]
    assert [name for name in GAINS if rf"{name} & \textbf" in latex] == statistics["bold"]
    caption = table.caption()
    assert all(
        words in caption for words in ("digits", "4 clients", "0, 1, 2, 3", "rounds 4", "0.05", "local epochs 2")
    )
    assert caption in markdown
    assert caption in latex
    assert list(json.loads((tmp_path / "comparison.json").read_text())) == list(GAINS)


def test_a_figure_holds_its_caption_and_is_the_same_again(table: MethodTable, tmp_path: Path) -> None:
    once = draw_comparison(table, tmp_path / "once" / "curves.png")
    again = draw_comparison(table, tmp_path / "again" / "curves.png")
    assert [path.suffix for path in once] == [".png", ".pdf", ".svg"]
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]
    with Image.open(once[0]) as image:
        assert image.text["Description"] == table.caption()
    assert b"/Subject" in once[1].read_bytes()
    assert table.caption() in once[2].read_text()


def test_tuned_rows_say_so(table: MethodTable) -> None:
    assert "tuned" not in table.caption()
    for row in table.rows:
        for result in row.results:
            result["tuned_trials"] = 8
    assert "tuned, 8 trials each" in table.caption()
    assert "tuned, 8 trials each" in table.notes()
    for result in table.rows[0].results:
        del result["tuned_trials"]
    assert "tuned: local 0 trials, fedavg 8 trials, pfedla 8 trials" in table.notes()


def test_an_unknown_reference_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    values = {"data": {"dataset": "digits", "clients": 3}}
    with pytest.raises(PfedlaError, match="fedagv"):
        plan_comparison(values, ["local", "fedavg"], [0], tmp_path / "c", against="fedagv")
    assert plan_comparison(values, ["local", "fedavg"], [0], tmp_path / "c", against="fedavg").against == "fedavg"


# The page


def test_the_page_shows_the_table_of_the_comparison(folders: list[Path], table: MethodTable) -> None:
    data = collect_page_data(folders)
    (shown,) = data["tables"]
    assert shown["caption"] == table.caption()
    assert shown["lines"] == table.tabulate_statistics()
    bold = json.loads(table.to_json())["accuracy"]["bold"]
    assert [line[0] for line in shown["lines"][1:] if line[1].startswith("**")] == bold == ["local", "pfedla"]
    assert len(render_page(data)) < 400_000
    one_seed = [folder for folder in folders if folder.name.endswith("-s0")]
    assert [one["lines"] for one in collect_page_data(one_seed)["tables"]] == [[]]
    assert collect_page_data(folders[:1])["tables"] == []


def test_runs_of_other_settings_or_federations_are_another_table(folders: list[Path], tmp_path: Path) -> None:
    longer, other, option = (copy_run(tmp_path / name, "pfedla", 0, 0.0) for name in ("longer", "other", "option"))
    for run, before, after in ((longer, "rounds = 4", "rounds = 9"), (option, "lr = 0.05", "lr = 0.5")):
        text = (run / "experiment.toml").read_text()
        (run / "experiment.toml").write_text(text.replace(before, after))
    federation = json.loads((other / "federation.json").read_text())
    (other / "federation.json").write_text(json.dumps(federation | {"fingerprint": "of other data"}))
    unfinished = copy_run(tmp_path, "fedavg", 9, 0.0)
    (unfinished / "result.json").unlink()
    tables = group_runs([*folders, longer, other, option, unfinished])
    rows = [[row.algorithm for row in table.rows] for table in tables]
    assert rows == [["local", "fedavg", "pfedla (lr 0.05)", "pfedla (lr 0.5)"], ["pfedla"], ["pfedla"]]
    assert [len(row.results) for row in tables[0].rows] == [4, 4, 4, 1]
