"""`pfedla deploy`: a real federation on Flower."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pfedla.cli.options import (
    Augment,
    BatchSize,
    Clients,
    Dataset,
    File,
    Json,
    LocalEpochs,
    Lr,
    Model,
    Participation,
    Partition,
    Quiet,
    Rounds,
    Samples,
    Setting,
    out_console,
)
from pfedla.core.errors import PfedlaError

deploy_app = typer.Typer(
    help="A real federation on Flower: sites keep their data, a server mixes their models.", no_args_is_help=True
)
Folder = Annotated[Path, typer.Argument(help="Folder of the deployment.", metavar="DIR")]


@deploy_app.command()
def init(
    folder: Folder,
    file: File = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", "-a", help="See `pfedla algorithms` (pfedla).")] = None,
    dataset: Dataset = None, partition: Partition = None, clients: Clients = None, samples: Samples = None,
    participation: Participation = None, rounds: Rounds = None, local_epochs: LocalEpochs = None, lr: Lr = None,
    batch_size: BatchSize = None, augment: Augment = None, model: Model = None,
    seed: Annotated[int | None, typer.Option(help="Every draw comes from it (default: 0).")] = None,
    setting: Setting = None,
    shape: Annotated[
        str | None, typer.Option(help="Sites bring their own data, examples of this shape: 30 features, or 1,28,28.")
    ] = None,
    classes: Annotated[str | None, typer.Option(help="With --shape: how many classes (10), or their names (cat,dog).")] = None,
    pixels: Annotated[bool, typer.Option("--pixels", help="With --shape: uint8 images (default: floats).")] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(help="Name or address of the server as sites reach it; repeatable (default: 127.0.0.1)."),
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 9092,
    min_clients: Annotated[int, typer.Option(min=1, help="With fewer clients at hand a round waits, then the run stops.")] = 1,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait: for all at the start, then for --min-clients.")] = 300,
    round_timeout: Annotated[float, typer.Option(min=1, help="Seconds until a round goes on without who is silent.")] = 3600,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Write a deployment: a Flower app of an experiment, certificates, a key for every client, and the commands.

    With a data set, every site takes its client's part of it (for experiments). With --shape and --classes the sites bring
    their own data, which the server never sees.

    Examples: pfedla deploy init fed -a heurpfedla -d digits --clients 3 --rounds 10

    pfedla deploy init fed --shape 1,28,28 --classes 10 --pixels --clients 3 --host fl.example.org
    """
    given = locals()
    _check_flower()
    from pfedla.flower.layout import OwnData, planned, write_deployment
    from pfedla.runs.experiment import Experiment
    from pfedla.runs.overrides import gather

    if (shape is None) != (classes is None) or (shape is not None and dataset is not None):
        raise PfedlaError("give --shape and --classes for sites that bring their own data, or --dataset for a part of it each")
    if shape is not None and (partition is not None or samples is not None):
        raise PfedlaError("--partition and --samples cut a data set into clients; with --shape every site brings its own data")
    own = OwnData.of(shape, classes, pixels) if shape is not None and classes is not None else None
    experiment = Experiment.parse(gather(given))
    folder = folder.resolve()
    plan = planned(experiment, own, folder, min_clients=min_clients, wait=wait, round_timeout=round_timeout)
    commands = write_deployment(folder, plan, host or ["127.0.0.1"], port)
    if not quiet:
        out_console.print(commands, soft_wrap=True)
        out_console.print(f"written to {folder}; these commands: {folder / 'README.md'}", soft_wrap=True)


@deploy_app.command()
def local(
    folder: Folder,
    rounds: Rounds = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in the last run of this deployment.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a deployment on this machine: a SuperLink and all SuperNodes as real processes on loopback, with TLS and keys.

    Leaves the run folder DIR/run (then DIR/run-2, …) as `pfedla run` does, with the sites' personal models gathered in it. A
    site's own data are expected in DIR/sites/client-<i>/data.npz.
    """
    _check_flower()
    from pfedla.flower.layout import read_plan
    from pfedla.flower.local import run_locally
    from pfedla.runs.experiment import SITES
    from pfedla.runs.interruption import Interruption
    from pfedla.runs.progress import Reporter
    from pfedla.runs.result import last_numbered, numbered
    from pfedla.runs.result_file import read_result

    folder = folder.resolve()
    plan = read_plan(folder)
    if plan.experiment.data.dataset == SITES:
        sites = [folder / "sites" / f"client-{client}" / "data.npz" for client in range(len(plan.deployment.names))]
        if missing := [str(path) for path in sites if not path.exists()]:
            raise PfedlaError(
                f"the sites bring their own data: put it at {missing[0]} ({len(missing)} of {len(sites)} missing)"
            )
    run_folder = (last_numbered if resume else numbered)(folder / "run")
    rounds = rounds or plan.experiment.rounds
    config = {"deployment.folder": str(run_folder), "deployment.resume": resume, "rounds": rounds}
    with Interruption(quiet or as_json) as interruption, Reporter(rounds, quiet or as_json, run_folder) as reporter:
        run_locally(folder, len(plan.deployment.names), run_folder, reporter, interruption, **config)
    result = read_result(run_folder / "result.json")
    if as_json:
        print(json.dumps({"run": str(run_folder), **result}))
    elif not quiet:
        from pfedla.report.tables import failures_lines, result_table, traffic_line

        out_console.print(result_table(result))
        out_console.print(f"{traffic_line(result['traffic'])}; results and pictures in {run_folder}", soft_wrap=True)
        for line in failures_lines(result):
            out_console.print(line, soft_wrap=True)


def _check_flower() -> None:
    from importlib.util import find_spec

    if find_spec("flwr") is None:
        raise PfedlaError("a deployment needs Flower: pip install 'pfedla[flower]'")
