"""What `pfedla deploy init` writes: a Flower app, certificates and keys, and the commands for the server and every site.

DIR/app/            the Flower app: its pyproject.toml holds the experiment; this alone is sent to the sites
DIR/server/         for the server: CA, certificate, their keys, and Flower's configuration (FLWR_HOME)
DIR/sites/client-i/ for site i: its key and the CA's certificate; copy it there
DIR/README.md       the commands
"""

import shutil
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from pfedla import __version__
from pfedla.core.errors import PfedlaError
from pfedla.flower import FLOWER_SWITCHES
from pfedla.flower.keys import check_hosts, write_certificates, write_node_key
from pfedla.flower.plan import Deployment, Plan
from pfedla.runs.experiment import SITES, Experiment, build
from pfedla.runs.folder import new_folder

CONNECTION = "pfedla"  # the SuperLink's name in Flower's configuration
PACKAGE = "pfedla_federation"
LOOPBACK = ("127.0.0.1", "localhost")  # `deploy local` reaches the server there
HALF_OF_BYTE = 127.5


class OwnData(NamedTuple):
    """What sites' own data must be: nobody's data are looked at to find out."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    pixels: bool  # uint8 images, which a common scale takes to -1..1; else floats, used as they are

    @classmethod
    def of(cls, shape: str, classes: str, pixels: bool) -> "OwnData":
        sizes = [word.strip() for word in shape.split(",")]
        if not all(size.isdecimal() and 0 < int(size) < 2**20 for size in sizes) or len(sizes) not in (1, 3):
            raise PfedlaError(f"--shape {shape}: write the features (30) or channels, height, width (1,28,28) of an example")
        names = [word.strip() for word in classes.split(",")]
        if len(names) == 1 and names[0].isdecimal():
            names = [str(number) for number in range(int(names[0]))]
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise PfedlaError(f"--classes {classes}: write how many there are (10), or their names (cat,dog)")
        if pixels and len(sizes) != 3:
            raise PfedlaError("--pixels is for images: --shape channels,height,width")
        return cls(tuple(map(int, sizes)), tuple(names), pixels)


def planned(experiment: Experiment, own: OwnData | None, folder: Path, **options: Any) -> Plan:
    """The plan of a deployment whose keys are still to be made; everything that can be refused is refused here."""
    engine = experiment.engine.model_copy(update={"name": "threaded", "compile": "off"})  # what a site runs, for one client
    checkpoint = experiment.checkpoint.model_copy(update={"rounds": 1})  # a server may go down after any round
    experiment = experiment.model_copy(update={"engine": engine, "checkpoint": checkpoint})
    common = {"version": __version__, "folder": str(folder / "run"), **options}
    if own is None:
        built = build(experiment)
        known = built.federation
        if known.subset:
            raise PfedlaError(f"{experiment.data.dataset} is taken from {known.subset} here; sites would not have the same")
        experiment = built.experiment
        what: dict[str, Any] = {"shape": known.shape, "classes": known.classes, "mean": known.mean, "std": known.std}
        names = known.names
    else:
        clients = experiment.data.clients
        if not isinstance(clients, int):
            raise PfedlaError("how many sites are there? give --clients")
        data = experiment.data.model_copy(update={"dataset": SITES, "partition": "client", "classes_limit": len(own.classes)})
        experiment = experiment.model_copy(update={"data": data})
        scale = (HALF_OF_BYTE,) * own.shape[0] if own.pixels else ()
        what = {"shape": own.shape, "classes": own.classes, "mean": scale, "std": scale}
        names = tuple(map(str, range(clients)))
    deployment = Deployment(**common, **what, names=names, keys=("",) * len(names))
    if deployment.min_clients > len(names):
        raise PfedlaError(f"--min-clients {deployment.min_clients}: there are {len(names)} clients")
    plan = Plan(experiment, deployment)
    built = plan._replace(deployment=deployment.model_copy(update={"keys": names})).built(deployment.outline())
    return Plan(built.experiment, deployment)


def write_deployment(folder: Path, plan: Plan, hosts: list[str], port: int) -> str:
    """Write everything; returns the commands."""
    check_hosts(hosts)
    new_folder(folder, "choose another folder")
    server, sites = folder / "server", folder / "sites"
    for path in (server / "flower", sites):
        path.mkdir(parents=True)
    write_certificates(server, list(dict.fromkeys([*hosts, *LOOPBACK])))
    keys = []
    for client in range(len(plan.deployment.names)):
        site = sites / f"client-{client}"
        site.mkdir()
        keys.append(write_node_key(site / "client.key", f"client-{client}"))
        shutil.copy(server / "ca.crt", site)
    plan = plan._replace(deployment=plan.deployment.model_copy(update={"keys": tuple(keys)}))
    _write_app(folder / "app", plan)
    write_flower_config(server / "flower", f"{hosts[0]}:{port}", server / "ca.crt")
    commands = commands_of(folder, plan, hosts[0], port)
    (folder / "README.md").write_text(commands, encoding="utf-8")
    return commands


def _write_app(app: Path, plan: Plan) -> None:
    package = app / PACKAGE
    package.mkdir(parents=True)
    for name, text in (
        ("__init__", '"""A federation of pfedla, as a Flower app."""\n'),
        # An assignment: Flower reads these files to see whether `app` is there.
        ("server_app", "from pfedla.flower import server_app\n\napp = server_app.app\n"),
        ("client_app", "from pfedla.flower import client_app\n\napp = client_app.app\n"),
    ):
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": PACKAGE.replace("_", "-"), "version": "1.0.0", "description": "A federation of pfedla",
            "dependencies": [f"pfedla[flower]=={__version__}"],
        },
        "tool": {"flwr": {"app": {
            "publisher": "pfedla",
            "components": {"serverapp": f"{PACKAGE}.server_app:app", "clientapp": f"{PACKAGE}.client_app:app"},
            "config": plan.to_run_config(),
        }}},
    }  # fmt: skip
    (app / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


def read_plan(folder: Path) -> Plan:
    """The plan of a deployment that was written."""
    path = folder / "app" / "pyproject.toml"
    if not path.is_file():
        raise PfedlaError(
            f"{folder} is no deployment: it has no app/pyproject.toml; make one with `pfedla deploy init {folder}`"
        )
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PfedlaError(f"{path} is damaged: {error}") from None
    sections = {key: value if isinstance(value, dict) else None for key, value in config.items()}
    flat = {key: config[key] for key, section in sections.items() if section is None}
    flat |= {f"{key}.{name}": value for key, section in sections.items() if section for name, value in section.items()}
    return Plan.of_run_config(flat)


def write_flower_config(home: Path, address: str, ca: Path) -> None:
    connection = {"address": address, "root-certificates": str(ca.resolve())}
    (home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: connection}}), encoding="utf-8"
    )


def commands_of(folder: Path, plan: Plan, host: str, port: int) -> str:
    here, own = folder.resolve(), plan.experiment.data.dataset == SITES
    exports = "export " + " ".join(f"{key}={value}" for key, value in FLOWER_SWITCHES.items())
    names = range(len(plan.deployment.names))
    data = ' data="/srv/mine.npz"' if own else ""
    register = "\n".join(
        f"flwr supernode register {here}/sites/client-{n}/client.key.pub {CONNECTION} --name client-{n}" for n in names
    )
    return f"""# A federation of {len(names)} clients: {plan.experiment.algorithm.name}, {plan.experiment.rounds} rounds

Everywhere: `pip install 'pfedla[flower]=={__version__}'`, the same version on the server and at every site. Then, once in
every shell:

    {exports}

## On the server

    # 1. the SuperLink: it passes messages on; keep it running. Firewall: let only the sites reach port {port}
    export FLWR_HOME={here}/server/flower
    flower-superlink --host 0.0.0.0 --port {port} --database {here}/server/state.db \\
        --enable-supernode-auth --disable-runtime-dependency-installation \\
        --ssl-ca-certfile {here}/server/ca.crt --ssl-certfile {here}/server/server.crt \\
        --ssl-keyfile {here}/server/server.key

    # 2. in another shell, once: the clients' public keys
    export FLWR_HOME={here}/server/flower
{_indented(register)}

    # 3. the run; it waits {plan.deployment.wait:.0f} s for the sites. Results: {plan.deployment.folder}
    flwr run {here}/app {CONNECTION} --stream

    # if it was stopped, or to make it longer: go on from the last checkpoint
    flwr run {here}/app {CONNECTION} --stream --run-config 'deployment.resume=true rounds={plan.experiment.rounds}'

## At site i: copy {here}/sites/client-i there, by a safe way (it holds the site's private key)

    # what is private to the site, and its personal model, are kept under `state`
    flower-supernode --superlink {host}:{port} --root-certificates ca.crt --auth-supernode-private-key client.key \\
        --node-config 'partition-id=i state="/srv/pfedla"{data}'

`--node-config` also takes threads=4 (cores for training; with 1, the default, the numbers are those of a simulation to the
last bit) and device="cuda". Two SuperNodes on one machine need a --port each.{_about_data(plan) if own else ""}
Never copy server/*.key or another site's folder to a site.

## All of it on this machine, to try

    pfedla deploy local {folder}
"""


def _about_data(plan: Plan) -> str:
    wanted = plan.deployment
    kind = "uint8" if wanted.mean else "float"
    return (
        f" `data` is a .npz or a folder of .npy files: x {kind} [examples, {', '.join(map(str, wanted.shape))}], y one of "
        f"{', '.join(wanted.classes[:12])}{', …' if len(wanted.classes) > 12 else ''}, and if there is a ready test split a "
        "boolean `test`."
    )


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
