"""`pfedla deploy`: a real federation on Flower."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from pfedla.cli.options import File, Json, Quiet, Setting, out_console, with_settings
from pfedla.core.errors import PfedlaError

deploy_app = typer.Typer(
    help="A real federation on Flower: sites keep their data, a server mixes their models.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(help="Folder of the deployment.", metavar="DIR")]
SIMULATION_ONLY = ("engine", "threads", "device", "compile", "checkpoint_every")


def deployment_option(help: str, **bounds: Any) -> Any:
    return typer.Option(help=help, rich_help_panel="Deployment", **bounds)


@deploy_app.command()
@with_settings(without=SIMULATION_ONLY)
def init(
    folder: Folder,
    file: File = None,
    given: dict[str, Any] = {},  # noqa: B006 (never written into)
    setting: Setting = None,
    shape: Annotated[
        str | None, deployment_option("Sites bring their own data of this shape: 30 features, or 1,28,28.")
    ] = None,
    classes: Annotated[
        str | None, deployment_option("With --shape: the number of classes (10), or their names (cat,dog).")
    ] = None,
    pixels: Annotated[bool, deployment_option("With --shape: uint8 images (default: floats).")] = False,
    host: Annotated[
        list[str] | None,
        deployment_option("Name or address of the server for the sites; repeatable (default: 127.0.0.1)."),
    ] = None,
    port: Annotated[int, deployment_option("Port of the server.", min=1, max=65535)] = 9092,
    min_clients: Annotated[
        int, deployment_option("Clients that must be online: with fewer a round waits, then the run stops.", min=1)
    ] = 1,
    wait: Annotated[
        float, deployment_option("Seconds to wait for clients: at the start for all, later for --min-clients.", min=1)
    ] = 300,
    round_timeout: Annotated[
        float, deployment_option("Seconds to wait for clients before a round continues without them.", min=1)
    ] = 3600,
    quiet: Quiet = False,
) -> None:
    """Write a deployment: a Flower app of an experiment, certificates, a key for every client, and the commands.

    With a data set, every site takes its client's part of it (for experiments). With --shape and --classes the sites
    bring their own data, which never leave them.

    Examples: pfedla deploy init fed -a heurpfedla -d digits --clients 3 --rounds 10

    pfedla deploy init fed --shape 1,28,28 --classes 10 --pixels --clients 3 --host fl.example.org
    """
    _check_flower()
    from pfedla.flower.layout import describe_own_data, plan_deployment, write_deployment
    from pfedla.runs.experiment import Experiment
    from pfedla.runs.overrides import gather

    if (shape is None) != (classes is None):
        raise PfedlaError("--shape and --classes belong together")
    public = [f"--{key}" for key in ("dataset", "partition", "samples") if given.get(key) is not None]
    if shape is not None and public:
        raise PfedlaError(f"{public[0]} is for a public data set; with --shape the sites bring their own data")
    own = describe_own_data(shape, classes, pixels) if shape is not None and classes is not None else None
    experiment = Experiment.parse(gather(file, given, setting or []))
    folder = folder.resolve()
    options = {"min_clients": min_clients, "wait": wait, "round_timeout": round_timeout}
    deployment = plan_deployment(experiment, own, folder, **options)
    commands = write_deployment(folder, deployment, host or ["127.0.0.1"], port)
    if not quiet:
        out_console.print(commands, soft_wrap=True)
        out_console.print(f"written to {folder}; these commands are in {folder / 'README.md'}", soft_wrap=True)


@deploy_app.command()
def local(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training (default: the deployment's).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the last run of this deployment.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a deployment on this machine: a SuperLink and all SuperNodes as processes on loopback, with TLS and keys.

    Leaves the run folder DIR/run (then DIR/run-2, …) as `pfedla run` does, with the sites' personal models in it. A
    site's own data are expected in DIR/sites/client-<i>/data.npz.
    """
    _check_flower()
    from pfedla.flower.layout import read_deployment
    from pfedla.flower.processes import run_locally
    from pfedla.report.reading import read_result
    from pfedla.report.tables import failures_lines, result_table, traffic_line
    from pfedla.runs.experiment import SITES
    from pfedla.runs.folder import last_numbered, next_numbered
    from pfedla.runs.interruption import Interruption
    from pfedla.runs.progress import Display

    folder = folder.resolve()
    deployment = read_deployment(folder)
    sites = [folder / "sites" / f"client-{client}" / "data.npz" for client in range(len(deployment.keys))]
    missing = [path for path in sites if not path.exists()]
    if deployment.experiment.data.dataset == SITES and missing:
        count = f"{len(missing)} of {len(sites)} missing"
        raise PfedlaError(f"the sites bring their own data: put it at {missing[0]} ({count})")
    run_folder = (last_numbered if resume else next_numbered)(folder / "run")
    rounds, quietly = rounds or deployment.experiment.rounds, quiet or as_json
    config = {"deployment.folder": str(run_folder), "deployment.resume": resume, "rounds": rounds}
    hint = f"resume with pfedla deploy local {folder} --resume"
    with Interruption(quietly) as interruption, Display(rounds, quiet=quietly, hint=hint) as display:
        display.begin(deployment.experiment.algorithm.name, deployment.experiment.seed)
        run_locally(folder, len(deployment.keys), run_folder, display, interruption, **config)
    result = read_result(run_folder / "result.json")
    if as_json:
        print(json.dumps({"run": str(run_folder), **result}))
    elif not quiet:
        out_console.print(result_table(result))
        summary = f"{traffic_line(result['traffic'])}; results and pictures in {run_folder}"
        for line in [summary, *failures_lines(result)]:
            out_console.print(line, soft_wrap=True)


def _check_flower() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise PfedlaError("a deployment needs Flower: pip install 'pfedla[flower]'")
