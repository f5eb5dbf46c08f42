"""The server's side of the Flower app: the same rounds, checkpoints and run folder as in a simulation."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_text
from pfedla.core.settings import AUTO
from pfedla.flower.deployment import Deployment
from pfedla.flower.engine import WIRE, FlowerEngine
from pfedla.report.reading import read_result
from pfedla.runs.folder import RESULT, RunFolder
from pfedla.runs.progress import Display
from pfedla.runs.run import Run

RUN_NAME = ".run"  # in the run folder: what the sites call this run
LOG, END = (".log", ".end.json")  # files beside the run folder: the server's lines; {"error": …} once the run has ended

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["deployment.folder"]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside(folder, END).unlink(missing_ok=True)
    problem, rounds = None, context.run_config.get("rounds")
    with Display(rounds if isinstance(rounds, int) else 0, log=beside(folder, LOG)) as display:
        try:
            serve(grid, context.run_config, display)
        except BaseException as error:
            problem = str(error) if isinstance(error, PfedlaError) else repr(error)
            display.say(f"failed: {problem}")
            raise
        finally:
            write_text(beside(folder, END), json.dumps({"error": problem}))


def beside(folder: Path, suffix: str) -> Path:
    """Return a file beside the run folder, which does not exist before the clients have joined."""
    return folder.with_name(f"{folder.name}{suffix}")


def serve(grid: Grid, plan: Mapping[str, Any], display: Display) -> None:
    """Run the experiment of a plan (Flower's run configuration) with the clients behind the grid."""
    deployment = Deployment.from_run_config(plan)
    built, path = deployment.build(), deployment.folder
    built = built.exclude(built.experiment.exclude | dict.fromkeys(deployment.exclude, AUTO))
    federation, experiment = built.federation, built.experiment
    display.begin(built.algorithm.name, experiment.seed)
    if path.exists() and not deployment.resume:
        raise PfedlaError(f"{path} exists already and is never overwritten; set deployment.resume or another folder")
    name = (path / RUN_NAME).read_text(encoding="utf-8") if (path / RUN_NAME).exists() else secrets.token_hex(8)
    known: dict[str, Any] = {"deployment": deployment, "run": name, "plan": plan, "say": display.say}
    engine = FlowerEngine(grid, built.algorithm, federation, **known)
    is_finished = (path / RESULT).exists() and read_result(path / RESULT)["rounds"] >= experiment.rounds
    is_finished = is_finished and not deployment.from_round
    if not is_finished:  # before there is a folder: a run that no client joins leaves none
        display.say(f"waiting up to {deployment.wait:.0f} s for {len(federation)} clients")
        engine.wait_for(len(federation))
        missing = (federation.num_examples == 0).nonzero().flatten().tolist()
        display.say(f"{len(federation) - len(missing)} clients have joined; missing: {missing or 'none'}")
    folder = RunFolder(path, resume=deployment.resume, from_round=deployment.from_round or None)
    write_text(path / RUN_NAME, name)
    with Run(built, folder, engine=engine, display=display) as run:
        for round in run:
            if round.evaluation is None:
                display.say(f"round {round.round}: {len(round.cohort.ids)} uploads accepted")
            if round.round < experiment.rounds:
                engine.admit()  # clients that have come late
        run.finish()
    if not is_finished:
        wire = dict(zip(WIRE, engine.state()["wire"].tolist(), strict=True))
        about = {"run": name, "wire": wire, "examples": federation.num_examples.tolist()}
        folder.write_json("deployment.json", about)
    display.say(f"finished: results in {path}; each site has its own personal model")
