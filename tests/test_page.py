"""The report page: its data, and what a browser makes of it."""

import base64
import http.client
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import drop_sums
from rich.console import Console
from safetensors.numpy import save_file

from pfedla.core.errors import PfedlaError
from pfedla.report.figures import draw_run
from pfedla.report.page import Watcher, collect_page_data, order_by_labels, order_by_weights, render_page, write_page
from pfedla.report.reading import read_alpha, read_result, read_rounds
from pfedla.report.tables import metrics_table, result_table

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NAMES = ["</script><script>alert(1)</script>", "=1+1", "Ärzte & Söhne"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return a run of HeurpFedLA, and one of Local on the same federation."""
    from pfedla import Experiment, run

    place = tmp_path_factory.mktemp("runs")
    data = {"dataset": "digits", "partition": "dominant", "clients": 6}
    common: dict[str, Any] = {"rounds": 8, "training": {"local_epochs": 2}, "data": data}
    return [
        run(Experiment.parse({**common, "algorithm": {"name": name}}), place / name) for name in ("heurpfedla", "local")
    ]


def copied(run: Path, place: Path) -> Path:
    return drop_sums(Path(shutil.copytree(run, place)))


def unfinished(run: Path, place: Path) -> Path:
    """Return a copy of a run after its third round."""
    going = copied(run, place)
    (going / "result.json").unlink()
    (going / "rounds.jsonl").write_text("".join((run / "rounds.jsonl").read_text().splitlines(keepends=True)[:3]))
    return going


def change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


# --- what is on the page ---


def test_the_page_holds_the_numbers_of_the_run(runs: list[Path]) -> None:
    found = collect_page_data(runs)["runs"]
    result, lines = json.loads((runs[0] / "result.json").read_text()), read_rounds(runs[0])
    assert [run["name"] for run in found] == ["heurpfedla", "local"]
    assert found[0]["final"]["mean"] == result["score"]["mean"]
    assert found[0]["final"]["down"] == result["traffic"]["down_bytes"] / 2**20
    assert [point["mean"] for point in found[0]["curve"]] == [line["score"]["mean"] for line in lines]
    assert [client["score"] for client in found[0]["clients"]] == result["score"]["per_client"]
    assert found[0]["alpha"]["rounds"] == list(range(9))
    assert found[1]["alpha"] is None
    alpha, _, rounds = read_alpha(runs[0]) or pytest.fail("no alpha")
    packed = found[0]["alpha"]  # to the last of 65,535 parts
    numbers = np.frombuffer(base64.b64decode(packed["values"]), "<u2").reshape(alpha.shape) / 65535
    assert np.abs(numbers - alpha).max() <= 0.5 / 65535 + 1e-6
    assert np.allclose(np.array(packed["self"]["mean"]).T, np.diagonal(alpha, 0, 1, 3).mean(-1), atol=1e-4)
    assert packed["self"]["rounds"] == rounds


def test_runs_are_named_by_what_differs(runs: list[Path], tmp_path: Path) -> None:
    twin = copied(runs[0], tmp_path / "again")
    assert [run["name"] for run in collect_page_data([runs[0], twin])["runs"]] == ["heurpfedla", "again"]
    (twin / "experiment.toml").write_text((twin / "experiment.toml").read_text().replace("seed = 0", "seed = 1"))
    data = collect_page_data([runs[0], twin])
    assert [run["name"] for run in data["runs"]] == ["heurpfedla, seed 0", "heurpfedla, seed 1"]
    assert data["differs"] == [["seed", "0", "1"]]


def test_a_run_that_goes_on_has_a_page(runs: list[Path], tmp_path: Path) -> None:
    going = unfinished(runs[0], tmp_path / "going")
    (going / "rounds.jsonl").write_text((going / "rounds.jsonl").read_text() + '{"round": 4')  # is being written
    (found,) = collect_page_data([going])["runs"]
    assert (found["finished"], found["played"], found["rounds"], found["clients"]) == (False, 3, 8, [])
    (going / "rounds.jsonl").unlink()
    assert collect_page_data([going])["runs"][0]["final"] is None


def test_unseen_clients_have_numbers_of_their_own(runs: list[Path], tmp_path: Path) -> None:
    run = copied(runs[0], tmp_path / "unseen")
    means = {"score_before": 0.25, "score": 0.75, "score_alone": 0.5, "score_after_training": 0.0}
    spreads = {key: dict.fromkeys(("mean", "std", "p10", "worst"), value) for key, value in means.items()}
    change(run / "result.json", {"unseen": {"clients": ["6", "7"], "rounds": 10, **spreads}})
    assert collect_page_data([run])["runs"][0]["unseen"] == {"clients": 2, "before": 0.25, "joined": 0.75, "alone": 0.5}


def test_federations_that_are_not_known_are_like_no_other(runs: list[Path], tmp_path: Path) -> None:
    unknown = [copied(run, tmp_path / run.name) for run in runs]
    for run in unknown:
        change(run / "federation.json", {"fingerprint": "", "train": [], "test": []})
    prints = [run["fingerprint"] for run in collect_page_data([*runs, *unknown])["runs"]]
    assert (prints[0], len(set(prints))) == (prints[1], 3)


def test_who_attacks_is_told_apart(runs: list[Path], tmp_path: Path) -> None:
    run = copied(runs[0], tmp_path / "attacked")
    result = json.loads((run / "result.json").read_text())
    honest = {key: {**result[key], "mean": 0.125} for key in ("score", "score_after_training")}
    change(run / "result.json", {"attackers": [1], "honest": honest})
    lines = [{**line, "honest": {"score": {**line["score"], "mean": 0.25}}} for line in read_rounds(run)]
    (run / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = collect_page_data([run])["runs"]
    assert [client["attacks"] for client in found["clients"]] == [False, True, False, False, False, False]
    assert (found["final"]["mean"], found["final"]["after"]) == (0.125, 0.125)
    assert {(point["mean"], point["after"]) for point in found["curve"]} == {(0.25, None)}
    assert found["warnings"]
    (run / "result.json").unlink()
    (found,) = collect_page_data([run])["runs"]
    assert (found["final"]["mean"], found["final"]["after"]) == (0.25, None)
    assert "attack" in found["warnings"][0]


def test_a_regression_is_shown_with_its_metric_and_what_is_undefined(runs: list[Path], tmp_path: Path) -> None:
    run = copied(runs[0], tmp_path / "regression")
    task = {"name": "regression", "metric": "rmse", "higher_is_better": False, "percent": False}
    errors = {"mean": 140.0, "std": 10.0, "p10": 150.0, "worst": 160.0, "per_client": [None, *[140.0] * 5]}
    change(run / "federation.json", {"task": task, "clients": ["north", *"bcdef"]})
    numbers = {"score": errors, "metrics": {"rmse": errors, "r2": errors | {"mean": None}}}
    change(run / "result.json", numbers | {"task": task, "baseline": {"name": "mean", "score": errors}})
    (found,) = collect_page_data([run])["runs"]
    assert (found["metric"]["label"], found["metric"]["sign"]) == ("RMSE (lower is better)", -1)
    assert found["metric"]["percentile"] == "90th percentile"
    assert (found["baseline"]["name"], found["baseline"]["mean"]) == ("mean", 140.0)
    assert [(one["name"], one["sign"], one["mean"]) for one in found["metrics"]] == [
        ("rmse", -1, 140.0),
        ("r2", 1, None),
    ]
    assert (found["clients"][0]["name"], found["clients"][0]["score"]) == ("north", None)
    assert all(path.stat().st_size for path in draw_run(run))
    console = Console(record=True, width=120, quiet=False, file=io.StringIO())
    result = read_result(run / "result.json")
    console.print(result_table(result), *metrics_table(result))
    text = console.export_text()
    assert all(words in text for words in ("test RMSE", "160", "baseline: mean", "lower is better", "5 of 6", "–"))
    assert "%" not in text


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("federation.json", None, "federation.json"),
        ("federation.json", "{", "federation.json"),
        ("experiment.toml", None, "not a run folder"),
        ("alpha.safetensors", "", "alpha.safetensors"),
        ("rounds.jsonl", '{"round": 1}\n', "rounds.jsonl"),
        ("result.json", '{"format": 4}', "format"),
    ],
)
def test_what_is_missing_or_damaged_is_named(
    runs: list[Path], tmp_path: Path, file: str, content: str | None, key: str
) -> None:
    run = copied(runs[0], tmp_path / "run")
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    with pytest.raises(PfedlaError, match=key):
        collect_page_data([run])


@pytest.mark.parametrize("name", ["paper", "heldout", "fedavg"])
def test_run_folders_of_format_1_are_shown(name: str, tmp_path: Path) -> None:
    run = copied(Path(__file__).parent / "fixtures" / "format1" / name, tmp_path / name)
    expected = {"paper": "pfedla", "heldout": "pfedla-heldout", "fedavg": "fedavg"}[name]
    (found,) = collect_page_data([run])["runs"]
    assert (found["algorithm"], found["finished"]) == (expected, True)
    assert all(path.stat().st_size for path in draw_run(run))


def test_alike_clients_stand_together() -> None:
    counts = np.array([[9, 1, 0], [0, 1, 9], [9, 0, 1], [0, 0, 10], [0, 10, 0]])
    order = order_by_labels(counts)
    assert sorted(order) == list(range(5))
    assert abs(order.index(0) - order.index(2)) == 1
    assert abs(order.index(1) - order.index(3)) == 1
    alpha = np.full((6, 2, 6), 0.02)
    for one, other in ((0, 3), (1, 4), (2, 5)):
        alpha[one, :, other] = alpha[other, :, one] = 0.45
    order = order_by_weights(alpha)
    assert all(abs(order.index(one) - order.index(other)) == 1 for one, other in ((0, 3), (1, 4), (2, 5)))
    assert order_by_weights(np.ones((1, 1, 1))) == [0]
    assert sorted(order_by_weights(np.ones((2, 1, 2)))) == [0, 1]
    many = order_by_labels(np.eye(10, dtype=int)[np.arange(5000) % 10] * 7)  # too many to cluster
    assert sorted(many) == list(range(5000))
    assert [client % 10 for client in many] == sorted(client % 10 for client in many)


@pytest.fixture(scope="module")
def large(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100 clients, 7 layers, 100 snapshots."""
    run = copied(runs[0], tmp_path_factory.mktemp("large") / "run")
    generator = np.random.default_rng(0)
    alpha = generator.dirichlet(np.full(100, 0.3), (100, 100, 7)).astype(np.float32)
    layers = {"layers": json.dumps([f"layer{number}" for number in range(7)])}
    save_file({"alpha": alpha, "rounds": np.arange(0, 400, 4)}, run / "alpha.safetensors", layers)
    counts = generator.integers(0, 60, (100, 10)).tolist()
    names = [str(client) for client in range(100)]
    change(run / "federation.json", {"clients": names, "train": counts, "test": counts})
    score = {**dict.fromkeys(("mean", "std", "p10", "worst"), 0.5), "per_client": [0.5] * 100}
    change(run / "result.json", {"clients": 100, "score": score, "score_after_training": score})
    return run


@pytest.mark.slow
def test_a_hundred_clients_fit(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page([large], tmp_path / "report.html")
    assert path.stat().st_size < 6e6
    alpha = collect_page_data([large])["runs"][0]["alpha"]
    assert (alpha["snapshots"], len(alpha["rounds"]), len(alpha["self"]["rounds"])) == (100, 20, 100)
    assert (alpha["rounds"][0], alpha["rounds"][-1]) == (0, 396)
    for most, rounds in ((70_000, [396]), (69_999, [])):  # weights of a snapshot
        monkeypatch.setattr("pfedla.report.page.PAGE_WEIGHTS", most)
        assert collect_page_data([large])["runs"][0]["alpha"]["rounds"] == rounds


def named(run: Path, names: list[str]) -> Path:
    federation = json.loads((run / "federation.json").read_text())
    federation["clients"][: len(names)] = names
    (run / "federation.json").write_text(json.dumps(federation))
    return run


def test_a_clients_name_cannot_end_the_script(runs: list[Path], tmp_path: Path) -> None:
    text = render_page(collect_page_data([named(copied(runs[0], tmp_path / "run"), NAMES)]))
    assert text.count("</script>") == 2


def test_the_commands(pfedla, runs: list[Path], tmp_path: Path) -> None:
    code, out, err = pfedla("report", runs[0], "--out", tmp_path / "one.html")
    assert (code, (tmp_path / "one.html").exists(), "one.html" in out) == (0, True, True), err
    code, _, err = pfedla("report", runs[0].parent, "--out", tmp_path / "two.html")  # the folder of a comparison
    assert code == 0, err
    assert '"name":"local"' in (tmp_path / "two.html").read_text(encoding="utf-8")
    code, _, err = pfedla("report", tmp_path / "nowhere")
    assert (code, "nowhere" in err) == (2, True)


# --- while it goes on ---


@pytest.fixture
def watched(runs: list[Path], tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A run of which three rounds have been played, and the port it is watched at."""
    run = unfinished(runs[0], tmp_path / "going")
    with Watcher([run], "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield run, server.server_address[1]
        server.shutdown()
        thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path, headers={key.replace("_", "-"): value for key, value in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.read(), answer.headers


def test_watch_serves_the_page_and_what_is_new(watched: tuple[Path, int], runs: list[Path]) -> None:
    run, port = watched
    status, body, headers = ask(port, "/")
    assert (status, b"connect-src 'self'" in body) == (200, True)
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"  # no other page may hold it
    assert ask(port, "/data.json", If_None_Match=headers["ETag"])[0] == 304
    (run / "rounds.jsonl").write_text("".join((runs[0] / "rounds.jsonl").read_text().splitlines(keepends=True)[:4]))
    status, body, _ = ask(port, "/data.json", If_None_Match=headers["ETag"])
    assert (status, json.loads(body)["runs"][0]["played"]) == (200, 4)


def test_watch_serves_nothing_else_only_reads_and_only_for_this_machine(watched: tuple[Path, int]) -> None:
    port = watched[1]
    for path in ("/../experiment.toml", "/experiment.toml", "//etc/passwd", "/%2e%2e/x", "/data.json?x"):
        assert ask(port, path)[0] == 404
    assert [ask(port, "/", method)[0] for method in ("POST", "DELETE")] == [501, 501]
    for host, code in (("elsewhere.example:80", 403), (f"127.0.0.1.elsewhere.example:{port}", 403), ("127.0.0.1", 200)):
        assert ask(port, "/data.json", Host=host)[0] == code


def test_watch_names_a_port_that_is_taken(watched: tuple[Path, int]) -> None:
    with pytest.raises(PfedlaError, match="--port"):
        Watcher([watched[0]], "127.0.0.1", watched[1])


# --- in a browser ---


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        if os.environ.get("PFEDLA_REQUIRE_BROWSER"):
            pytest.fail("no chromium, and PFEDLA_REQUIRE_BROWSER is set")
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Seen:
    """A page in the browser, and whatever went wrong in it."""

    def __init__(self, browser: Any, address: str, width: int = 1100, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.asked: list[str] = []
        wrong = ("error", "warning")
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type in wrong else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector("section svg")

    def __enter__(self) -> "Seen":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def point_at(self, row: int, column: int, size: int) -> str:
        """What the page says of a cell of the heat map."""
        canvas = self.page.locator("#alpha-map canvas")
        canvas.scroll_into_view_if_needed()
        box = canvas.bounding_box()
        cell = box["width"] / size, box["height"] / size
        self.page.mouse.move(box["x"] + (column + 0.5) * cell[0], box["y"] + (row + 0.5) * cell[1])
        return str(self.page.locator("#readout").inner_text())


@pytest.mark.slow
def test_the_page_loads_offline_without_an_error(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    path = write_page(runs, tmp_path / "report.html")
    for scheme, ground in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(16, 21, 28)")):
        with Seen(browser, path.as_uri(), scheme=scheme) as seen:
            page = seen.page
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
            shown = page.locator("section").evaluate_all("all => all.map((one) => one.id)")
            assert " ".join(shown) == "summary curves clients metrics alpha self federation traffic time faults setting"
            page.click("#theme")
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
            assert seen.problems == []
            assert [address for address in seen.asked if not address.startswith(("file:", "data:"))] == []


def test_slider_and_selector_show_what_alpha_holds(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    alpha, layers, rounds = read_alpha(runs[0]) or pytest.fail("no alpha")
    clients = alpha.shape[1]
    with Seen(browser, write_page(runs[:1], tmp_path / "report.html").as_uri()) as seen:
        seen.page.select_option("#alpha-order", "as numbered")
        pictures = set()
        for snapshot, layer, receiver, sender in ((8, 0, 0, 0), (8, 3, 2, 5), (0, 3, 1, 4), (4, 2, 5, 0), (8, 2, 5, 0)):
            seen.page.select_option("#alpha-layer", label=layers[layer])
            seen.page.locator("#alpha-round").fill(str(snapshot))
            said = seen.point_at(receiver, sender, clients)
            whom = "itself" if receiver == sender else f"client {sender}"
            value = f"{round(alpha[snapshot, receiver, layer, sender] * 65535) / 65535:.4f}"
            expected = f"client {receiver} takes {value} of {layers[layer]} from {whom}"
            assert said == f"{expected}, after round {rounds[snapshot]}"
            pictures.add(seen.page.evaluate("document.querySelector('#alpha-map canvas').toDataURL()"))
        assert len(pictures) == 5
        seen.page.select_option("#alpha-order", "by weights")
        order = order_by_weights(alpha[-1])
        assert seen.point_at(0, 3, clients).startswith(f"client {order[0]} takes ")
        assert seen.problems == []


def test_keys_alone_will_do(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    with Seen(browser, write_page(runs, tmp_path / "report.html").as_uri()) as seen:
        seen.page.focus("#alpha-round")
        seen.page.keyboard.press("ArrowLeft")
        assert seen.page.locator("#alpha-shown").inner_text() == "after round 7"
        seen.page.focus("#alpha-map canvas")
        seen.page.keyboard.press("ArrowRight")
        first = seen.page.locator("#readout").inner_text()
        seen.page.keyboard.press("ArrowDown")
        assert " takes " in first != seen.page.locator("#readout").inner_text()
        seen.page.focus("#curves svg")
        seen.page.keyboard.press("ArrowRight")
        assert "round 1" in seen.page.locator("#tip").inner_text()
        assert seen.problems == []


@pytest.mark.slow
def test_a_phone_need_not_scroll_sideways(browser: Any, runs: list[Path], large: Path, tmp_path: Path) -> None:
    for name, shown in (("small", runs), ("large", [large])):
        with Seen(browser, write_page(shown, tmp_path / f"{name}.html").as_uri(), width=375) as seen:
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= 375
            assert seen.problems == []


def test_the_numbers_can_be_taken_away(browser: Any, runs: list[Path], tmp_path: Path) -> None:
    run = named(copied(runs[0], tmp_path / "run"), NAMES)
    with Seen(browser, write_page([run], tmp_path / "report.html").as_uri()) as seen:

        def taken(name: str) -> list[str]:
            with seen.page.expect_download() as waiting:
                seen.page.click(f"button:has-text('{name}')")
            return Path(waiting.value.path()).read_text(encoding="utf-8").splitlines()

        lines = read_rounds(run)
        rows = taken("rounds.csv")
        assert len(rows) == 1 + len(lines)
        assert rows[-1].split(",")[2] == str(lines[-1]["score"]["mean"])
        clients = taken("clients.csv")
        assert clients[2].split(",")[1] == "'=1+1"  # not a formula
        assert len(taken("alpha.csv")) == 1 + 6 * 4 * 6
        assert seen.page.evaluate("document.querySelectorAll('script').length") == 2
        assert seen.problems == []


@pytest.mark.slow
def test_watch_shows_a_new_round_within_five_seconds(browser: Any, watched: tuple[Path, int], runs: list[Path]) -> None:
    run, port = watched
    with Seen(browser, f"http://127.0.0.1:{port}/") as seen:
        assert "round 3 of 8" in seen.page.locator("#state").inner_text()
        seen.page.select_option("#alpha-layer", "0")
        with (run / "rounds.jsonl").open("a") as file:
            file.write((runs[0] / "rounds.jsonl").read_text().splitlines(keepends=True)[3])
        seen.page.click("#alpha-play")
        assert seen.page.locator("#alpha-round").input_value() == "0"
        seen.page.locator("#state", has_text="round 4 of 8").wait_for(timeout=5000)
        assert seen.page.locator("#alpha-layer").input_value() == "0"  # what was chosen stays
        seen.page.locator("#alpha-play", has_text="Play").wait_for(timeout=10_000)  # what was playing goes on
        slider = seen.page.locator("#alpha-round")
        assert slider.input_value() == slider.get_attribute("max")
        assert seen.problems == []
        assert all(address.startswith((f"http://127.0.0.1:{port}/", "data:")) for address in seen.asked)
