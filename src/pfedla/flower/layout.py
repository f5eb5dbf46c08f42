"""What `pfedla deploy init` writes: a Flower app, certificates and keys, and the commands to run it.

DIR/app/            the Flower app: its pyproject.toml holds the experiment; only this is sent to the sites
DIR/server/         for the server: CA, certificate, their keys, and Flower's configuration (FLWR_HOME)
DIR/sites/client-i/ for site i: its key and the CA's certificate; copy it there
DIR/README.md       the commands (commands.md, filled in)
"""

import shutil
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from pfedla import __version__
from pfedla.core.errors import PfedlaError
from pfedla.flower import FLOWER_SWITCHES
from pfedla.flower.deployment import Deployment, DeploymentSettings
from pfedla.flower.keys import to_general_name, write_certificates, write_node_key
from pfedla.runs.build import build
from pfedla.runs.experiment import SITES, Experiment
from pfedla.runs.folder import new_folder

CONNECTION = "pfedla"  # the SuperLink's name in Flower's configuration
PACKAGE = "pfedla_federation"
LOOPBACK = ("127.0.0.1", "localhost")  # `deploy local` reaches the server there
HALF_OF_BYTE = 127.5  # uint8 images are scaled to -1..1


class OwnData(NamedTuple):
    """What the sites' own data must look like: nobody looks at the data to find out."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    pixels: bool  # uint8 images; else floats, used as they are

    @classmethod
    def parse(cls, shape: str, classes: str, pixels: bool) -> "OwnData":
        sizes = [word.strip() for word in shape.split(",")]
        if not all(size.isdecimal() and 0 < int(size) < 2**20 for size in sizes) or len(sizes) not in (1, 3):
            raise PfedlaError(f"--shape {shape}: give the features (30) or channels, height, width (1,28,28)")
        names = [word.strip() for word in classes.split(",")]
        if len(names) == 1 and names[0].isdecimal():
            names = [str(number) for number in range(int(names[0]))]
        if len(names) < 2 or len(set(names)) < len(names) or not all(names):
            raise PfedlaError(f"--classes {classes}: give their number (10) or their names (cat,dog)")
        if pixels and len(sizes) != 3:
            raise PfedlaError("--pixels is for images: --shape channels,height,width")
        return cls(tuple(map(int, sizes)), tuple(names), pixels)


def plan_deployment(experiment: Experiment, own: OwnData | None, folder: Path, **options: Any) -> Deployment:
    """Return a deployment without keys; everything that can be refused is refused here."""
    # A site runs one client with the threaded engine. A server may go down after any round.
    engine = experiment.engine.model_copy(update={"name": "threaded", "compile": False})
    checkpoint = experiment.checkpoint.model_copy(update={"rounds": 1})
    experiment = experiment.model_copy(update={"engine": engine, "checkpoint": checkpoint})
    if own is None:
        built = build(experiment)
        experiment, known = built.experiment, built.federation
        if known.subset:
            raise PfedlaError(f"{experiment.data.dataset} is read from {known.subset}; sites may not have it")
        what = {key: getattr(known, key) for key in ("shape", "classes", "mean", "std", "names")}
    else:
        clients = experiment.data.clients
        if not isinstance(clients, int):
            raise PfedlaError("--clients is missing: give the number of sites")
        update = {"dataset": SITES, "partition": "client", "classes_limit": len(own.classes)}
        experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update=update)})
        scale = (HALF_OF_BYTE,) * own.shape[0] if own.pixels else ()
        names = tuple(map(str, range(clients)))
        what = {"shape": own.shape, "classes": own.classes, "mean": scale, "std": scale, "names": names}
    options |= {"version": __version__, "folder": str(folder / "run"), "keys": what["names"], **what}
    settings = DeploymentSettings(**options)
    if settings.min_clients > len(settings.names):
        raise PfedlaError(f"--min-clients {settings.min_clients}: there are {len(settings.names)} clients")
    return Deployment(Deployment(experiment, settings).build().experiment, settings)


def write_deployment(folder: Path, deployment: Deployment, hosts: list[str], port: int) -> str:
    """Write everything; return the commands."""
    for host in hosts:
        to_general_name(host)
    new_folder(folder, "choose another folder")
    server, keys = folder / "server", []
    (server / "flower").mkdir(parents=True)
    write_certificates(server, list(dict.fromkeys([*hosts, *LOOPBACK])))
    for client in range(deployment.num_clients):
        site = folder / "sites" / f"client-{client}"
        site.mkdir(parents=True)
        keys.append(write_node_key(site / "client.key", f"client-{client}"))
        shutil.copy(server / "ca.crt", site)
    settings = deployment.settings.model_copy(update={"keys": tuple(keys)})
    write_app(folder / "app", deployment._replace(settings=settings))
    write_flower_config(server / "flower", f"{hosts[0]}:{port}", server / "ca.crt")
    commands = describe_commands(folder, deployment, hosts[0], port)
    (folder / "README.md").write_text(commands, encoding="utf-8")
    return commands


def write_app(app: Path, deployment: Deployment) -> None:
    package = app / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('"""A federation of pfedla, as a Flower app."""\n', encoding="utf-8")
    parts = {side: f"{side[:6]}_app" for side in ("serverapp", "clientapp")}
    for module in parts.values():  # an assignment: Flower reads these files to see whether `app` is there
        text = f"from pfedla.flower import {module}\n\napp = {module}.app\n"
        (package / f"{module}.py").write_text(text, encoding="utf-8")
    flower = {
        "publisher": "pfedla",
        "components": {side: f"{PACKAGE}.{module}:app" for side, module in parts.items()},
        "config": deployment.to_run_config(),
    }
    about = {"name": PACKAGE.replace("_", "-"), "version": "1.0.0", "description": "A federation of pfedla"}
    project = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {**about, "dependencies": [f"pfedla[flower]=={__version__}"]},
        "tool": {"flwr": {"app": flower}},
    }
    (app / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


def read_deployment(folder: Path) -> Deployment:
    path = folder / "app" / "pyproject.toml"
    if not path.is_file():
        raise PfedlaError(f"{folder} is not a deployment: it has no app/pyproject.toml; see deploy init")
    try:
        config = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PfedlaError(f"{path} is damaged: {error}") from None
    return Deployment.from_run_config(config)


def write_flower_config(home: Path, address: str, ca: Path) -> None:
    connection = {"address": address, "root-certificates": str(ca.resolve())}
    config = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")


def describe_commands(folder: Path, deployment: Deployment, host: str, port: int) -> str:
    """Fill in commands.md; its lines that begin with `own:` are for sites that bring their own data."""
    wanted, brings_own = deployment.settings, deployment.experiment.data.dataset == SITES
    register = "flwr supernode register {0}/sites/client-{1}/client.key.pub {2} --name client-{1}"
    lines = [register.format(folder, client, CONNECTION) for client in range(deployment.num_clients)]
    values = {"folder": folder, "host": host, "port": port, "version": __version__, "connection": CONNECTION}
    values |= {"experiment": deployment.experiment, "wanted": wanted, "clients": deployment.num_clients}
    values["exports"] = " ".join(f"{key}={value}" for key, value in FLOWER_SWITCHES.items())
    values["register"] = "\n    ".join(lines)
    values["kind"] = "uint8" if wanted.mean else "float"
    values["shape"] = ", ".join(map(str, wanted.shape))
    values["classes"] = ", ".join(wanted.classes[:12]) + (", …" if len(wanted.classes) > 12 else "")
    values["example"] = ' data="/srv/mine.npz"' if brings_own else ""
    template = files("pfedla.flower").joinpath("commands.md").read_text(encoding="utf-8").splitlines()
    chosen = [line.removeprefix("own:") for line in template if brings_own or not line.startswith("own:")]
    return "\n".join([*chosen, ""]).format(**values)
