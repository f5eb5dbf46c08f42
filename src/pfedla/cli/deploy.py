"""`pfedla deploy`: a real federation on Flower."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from pfedla.cli.options import File, Json, Quiet, Sets, option, say, watching, with_settings
from pfedla.cli.train import print_result
from pfedla.core.errors import PfedlaError
from pfedla.runs.experiment import SITES, Experiment, gather

deploy_app = typer.Typer(help="A real federation on Flower: sites keep their data.", no_args_is_help=True)
site_app = typer.Typer(help="At a site of a deployment.", no_args_is_help=True)
Folder = Annotated[Path, typer.Argument(help="Folder of the deployment.", metavar="DIR", resolve_path=True)]
TIMEOUT_HELP = "Seconds to wait for clients before a round continues without them."
setup = partial(option, "Deployment")


@deploy_app.command()
@with_settings(without=("engine", "threads", "device", "compile", "checkpoint_every"))
def init(
    given: dict[str, Any],
    folder: Folder,
    file: File = None,
    setting: Sets = None,
    shape: Annotated[str | None, setup("Sites bring their own data of this shape: 30 features, or 1,28,28.")] = None,
    classes: Annotated[str | None, setup("With --shape: the number of classes (10), or their names (cat,dog).")] = None,
    pixels: Annotated[bool, setup("With --shape: uint8 images (default: floats).")] = False,
    host: Annotated[list[str] | None, setup("Name or address of the server; repeatable (default: 127.0.0.1).")] = None,
    port: Annotated[
        int, setup("Port of the server: the gate's. The SuperLink takes the next.", min=1, max=65534)
    ] = 9092,
    min_clients: Annotated[int, setup("Clients that must be online; else a round waits, then stops.", min=1)] = 1,
    wait: Annotated[float, setup("Seconds to wait: at first for all clients, then for --min-clients.", min=1)] = 300,
    round_timeout: Annotated[float, setup(TIMEOUT_HELP, min=1)] = 3600,
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

    if (shape is None) != (classes is None):
        raise PfedlaError("--shape and --classes belong together")
    public = [f"--{key}" for key in ("dataset", "partition", "samples") if given.get(key) is not None]
    if shape is not None and public:
        raise PfedlaError(f"{public[0]} is for a public data set; with --shape the sites bring their own data")
    experiment, own = Experiment.parse(gather(file, given, setting or [])), None
    if shape is not None and classes is not None:
        own = describe_own_data(shape, classes, pixels, experiment.task)
    limits = {"min_clients": min_clients, "wait": wait, "round_timeout": round_timeout}
    deployment = plan_deployment(experiment, own, folder, **limits)
    commands = write_deployment(folder, deployment, host or ["127.0.0.1"], port)
    if not quiet:
        say(commands, f"written to {folder}; these commands are in {folder / 'README.md'}")
        code = [name.partition(":")[0] for name in (experiment.algorithm.name, experiment.model) if ":" in name]
        if code:
            say(f"the server and every site need {' and '.join(dict.fromkeys(code))} installed: code never travels")


@deploy_app.command()
def gate(
    folder: Folder,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int | None, typer.Option(help="Port for the sites (default: of deploy init).", min=1)] = None,
    control_port: Annotated[int | None, typer.Option(help="Port of the SuperLink (default: the next).", min=1)] = None,
) -> None:
    """Run the only door of a deployment to the outside: it passes on what SuperNodes send, and nothing else.

    The SuperLink listens on loopback behind it. Control calls, messages in another site's name and orders from one site
    to another are refused, as are requests that are too large, too many or too slow.
    """
    _check_flower()
    from pfedla.flower.gate import run_gate
    from pfedla.flower.layout import read_ports

    ports = read_ports(folder)
    run_gate(folder, host, port or ports["gate"], control_port or ports["superlink"])


@deploy_app.command()
def check(folder: Folder) -> None:
    """Tell what of a deployment is open on the server: ports, keys, the certificate's age. Exit code 1 if too much."""
    _check_flower()
    from pfedla.flower.inspection import inspect

    good, wrong = inspect(folder)
    say(*good)
    for problem in wrong:
        say(f"error: {problem}")
    if wrong:
        raise typer.Exit(1)


@deploy_app.command()
def local(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training (default: the deployment's).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the last run of this deployment.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a deployment on this machine: SuperLink, gate and SuperNodes are processes on loopback, with TLS and keys.

    Leaves the run folder DIR/run (then DIR/run-2, …) as `pfedla run` does, with the sites' personal models in it. A
    site's own data are expected in DIR/sites/client-<i>/data.npz.
    """
    _check_flower()
    from pfedla.algorithms import short_name
    from pfedla.flower.layout import read_deployment
    from pfedla.flower.processes import run_locally
    from pfedla.report.reading import read_result
    from pfedla.runs.folder import number_folder

    deployment = read_deployment(folder)
    sites = (folder / f"sites/client-{client}/data.npz" for client in range(len(deployment.keys)))
    missing = [path for path in sites if not path.exists()]
    if deployment.experiment.data.dataset == SITES and missing:
        raise PfedlaError(f"the sites bring their own data: {len(missing)} are missing, the first is {missing[0]}")
    run_folder = number_folder(folder / "run", resume=resume)
    rounds, hint = rounds or deployment.experiment.rounds, f"resume with pfedla deploy local {folder} --resume"
    config = {"deployment.folder": str(run_folder), "deployment.resume": resume, "rounds": rounds}
    with watching(rounds, quiet=quiet or as_json, hint=hint) as (display, signals):
        display.begin(short_name(deployment.experiment.algorithm.name), deployment.experiment.seed)
        run_locally(folder, len(deployment.keys), run_folder, display, signals, **config)
    print_result(read_result(run_folder / "result.json"), run_folder, quiet=quiet, as_json=as_json)


@site_app.command("check")
def check_site(
    folder: Annotated[Path, typer.Argument(help="The site's folder, as deploy init made it.", metavar="SITE")],
    data: Annotated[str | None, typer.Option(help="The site's examples, as data= in --node-config.")] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, …")] = "cpu",
) -> None:
    """Find out whether a site is ready before it joins: keys, data, one round of training, the connection.

    Sends nothing. Exit code 1 if something does not fit.

    Example: pfedla site check /srv/client-0 --data /srv/mine.npz
    """
    _check_flower()
    from pfedla.flower.site_check import check_site

    node, problems = {"device": device} | ({"data": data} if data else {}), 0
    for is_right, text in check_site(folder, node, say):
        say(text if is_right else f"error: {text}")
        problems += not is_right
    if problems:
        raise typer.Exit(1)


def _check_flower() -> None:
    if find_spec("flwr") is None:
        raise PfedlaError("a deployment needs Flower: pip install 'pfedla[flower]'")
