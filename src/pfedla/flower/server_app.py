"""The server's side of a Flower app: the same rounds, checkpoints and run folder as everywhere, with the clients elsewhere."""

import secrets
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_text
from pfedla.flower.engine import FlowerEngine
from pfedla.flower.plan import Plan
from pfedla.flower.remote import RemoteFederation
from pfedla.runs.folder import RESULT, RunFolder
from pfedla.runs.progress import Reporter
from pfedla.runs.result import run_built
from pfedla.runs.result_file import read_result

RUN_FILE = "deployment.json"  # in the run folder: what the wire has carried
RUN_NAME = ".run"  # what the sites call this run
FINISHED, FAILED = "finished: ", "failed: "  # how the last line of a run begins

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder = Path(str(context.run_config["deployment.folder"]))
    folder.parent.mkdir(parents=True, exist_ok=True)
    rounds = context.run_config.get("rounds", 0)
    with Reporter(rounds if isinstance(rounds, int) else 0, quiet=False, log=log_of(folder)) as reporter:
        try:
            serve(grid, Plan.of_run_config(context.run_config), reporter)
        except BaseException as error:
            reporter.say(f"{FAILED}{error if isinstance(error, PfedlaError) else repr(error)}")
            raise


def log_of(folder: Path) -> Path:
    """Where the server's lines go: beside the run folder, which is not there before the clients are."""
    return folder.with_name(f"{folder.name}.log")


def serve(grid: Grid, plan: Plan, reporter: Reporter) -> None:
    """Play the plan's experiment with the clients that are behind the grid."""
    deployment = plan.deployment
    federation = RemoteFederation(deployment)
    built = plan.built(federation)
    reporter.begin(built.experiment.algorithm.name, built.experiment.seed)
    if plan.folder.exists() and not deployment.resume:
        raise PfedlaError(
            f"{plan.folder} exists already and is never overwritten; go on in it with --run-config "
            "'deployment.resume=true', or give another deployment.folder"
        )
    known = plan.folder / RUN_NAME
    run = known.read_text(encoding="utf-8") if known.exists() else secrets.token_hex(8)
    engine = FlowerEngine(grid, built.algorithm, federation, deployment, run, built.experiment.seed, reporter.say)
    if not _is_finished(plan):
        engine.gather()  # before there is a folder: a run that nobody came to leaves none
    folder = RunFolder(plan.folder, resume=deployment.resume)
    write_text(known, run)
    run_built(built, folder, reporter, engine)
    wire = {way: one._asdict() for way, one in engine.wire().items()}
    if wire["up"]["num_arrays"]:  # else nothing was left to do
        folder.write_json(RUN_FILE, {"run": run, "wire": wire, "examples": federation.num_examples.tolist()})
    reporter.say(f"{FINISHED}results in {folder.path}, every personal model at its site")


def _is_finished(plan: Plan) -> bool:
    result = plan.folder / RESULT
    return result.exists() and int(read_result(result)["rounds"]) >= plan.experiment.rounds
