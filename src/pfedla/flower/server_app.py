"""The server's side of a Flower app: the same rounds, checkpoints and run folder as everywhere, with the clients elsewhere."""

import secrets

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from pfedla.console import Reporter
from pfedla.errors import PfedlaError
from pfedla.files import read_object
from pfedla.flower.engine import FlowerEngine
from pfedla.flower.federation import RemoteFederation
from pfedla.flower.plan import Plan
from pfedla.results import run_built
from pfedla.run_folder import RunFolder

RUN_FILE = "deployment.json"  # in the run folder
FINISHED, FAILED = "finished: ", "failed: "  # how the last line of a run begins

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    plan = Plan.of_run_config(context.run_config)
    log = plan.folder.with_name(f"{plan.folder.name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with Reporter(plan.experiment.rounds, quiet=False, log=log) as reporter:
        try:
            serve(grid, plan, reporter)
        except BaseException as error:
            reporter.say(f"{FAILED}{error if isinstance(error, PfedlaError) else repr(error)}")
            raise


def serve(grid: Grid, plan: Plan, reporter: Reporter) -> None:
    """Play the plan's experiment with the clients that are behind the grid."""
    deployment = plan.deployment
    federation = RemoteFederation(deployment)
    built = plan.built(federation)
    reporter.begin(built.experiment.algorithm.name, built.experiment.seed)
    folder = RunFolder(plan.folder, resume=deployment.resume)
    try:
        known = folder.path / RUN_FILE
        run = str(read_object(known).get("run")) if known.exists() else secrets.token_hex(8)
        engine = FlowerEngine(grid, built.algorithm, federation, deployment, run, built.experiment.seed, reporter.say)
        engine.gather()
    except BaseException:
        folder.discard()
        raise
    if not known.exists():
        folder.write_json(RUN_FILE, {"run": run})
    run_built(built, folder, reporter, engine)
    wire = {way: one._asdict() for way, one in engine.wire().items()}
    folder.write_json(RUN_FILE, {"run": run, "wire": wire, "examples": federation.num_examples.tolist()})
    reporter.say(f"{FINISHED}results in {folder.path}, every personal model at its site")
