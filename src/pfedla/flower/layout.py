"""What `pfedla deploy init` writes: a Flower app, certificates and keys, and the commands to run it.

DIR/app/            the Flower app: a pyproject.toml that holds the experiment; only this is sent to the sites
DIR/server/         for the server: CA, certificate, their keys, the key that signs orders, and Flower's configuration
                    (FLWR_HOME)
DIR/sites/client-i/ for site i: its key, the CA's certificate, the server's public key and the plan; copy it there
DIR/README.md       the commands (commands.md, filled in)

server/units and a site's folder also hold systemd units (unit.service, filled in).
"""

import shutil
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from pfedla import __version__
from pfedla.core.errors import PfedlaError, shown
from pfedla.core.files import parse_toml
from pfedla.core.settings import AUTO
from pfedla.data.dataset import strata_names
from pfedla.flower import FLOWER_SWITCHES
from pfedla.flower.deployment import OUTLINE, Deployment
from pfedla.flower.keys import to_general_name, write_certificates, write_node_key
from pfedla.flower.orders import PRIVATE, PUBLIC, write_order_key
from pfedla.runs.build import build
from pfedla.runs.experiment import SITES, Experiment
from pfedla.runs.folder import new_folder

PLAN = "plan.toml"  # what the server will run, in a site's folder, for `pfedla site check`
PORTS = "ports.toml"  # of the gate and the SuperLink, in DIR/server
PRIVATE_FOLDER = 0o700
LOOPBACK = ("127.0.0.1", "localhost")  # `deploy local` reaches the server there
HALF_OF_BYTE = 127.5  # uint8 images are scaled to -1..1


def describe_own_data(shape: str, classes: str, pixels: bool, task: str = AUTO) -> dict[str, Any]:
    """Return what the sites' own data must look like: nobody looks at the data to find out."""
    sizes = [word.strip() for word in shape.split(",")]
    if not all(size.isdecimal() and 0 < int(size) < 2**20 for size in sizes) or len(sizes) not in (1, 3):
        raise PfedlaError(f"--shape {shape}: give the features (30) or channels, height, width (1,28,28)")
    names = [word.strip() for word in classes.split(",")]
    if len(names) == 1 and names[0].isdecimal():
        names = [str(number) for number in range(int(names[0]))]
    is_classification = task in (AUTO, "classification")
    if len(names) < 1 + is_classification or len(set(names)) < len(names) or not all(names):
        raise PfedlaError(f"--classes {classes}: give their number (10) or their names (cat,dog)")
    if pixels and len(sizes) != 3:
        raise PfedlaError("--pixels is for images: --shape channels,height,width")
    scale = [HALF_OF_BYTE] * int(sizes[0]) if pixels else []  # floats are used as they are
    known = {"shape": list(map(int, sizes)), "classes": names, "mean": scale, "std": scale}
    return known if is_classification else known | {"task": task, "targets": names, "classes": strata_names(task)}


def plan_deployment(experiment: Experiment, own: dict[str, Any] | None, folder: Path, **options: Any) -> Deployment:
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
        outline = {key: getattr(known, key) for key in (*OUTLINE, "task", "vocabulary", "columns")}
        outline["scaling"] = [one.to_lists() for one in known.scaling or ()]
        outline |= {"class_counts": np.asarray(known.class_counts()).tolist(), "fingerprint": known.fingerprint()}
    else:
        clients = experiment.data.clients
        if not isinstance(clients, int):
            raise PfedlaError("--clients is missing: give the number of sites")
        update = {"dataset": SITES, "partition": "client", "classes_limit": max(2, len(own["classes"]))}
        experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update=update)})
        outline = {**own, "names": list(map(str, range(clients)))}
    options |= {"version": __version__, "folder": folder / "run", "order_key": folder / "server" / PRIVATE}
    options |= {"keys": outline["names"], **outline}
    deployment = Deployment(experiment=experiment, **options)
    if deployment.min_clients > len(deployment.keys):
        raise PfedlaError(f"--min-clients {deployment.min_clients}: there are {len(deployment.keys)} clients")
    return deployment.model_copy(update={"experiment": deployment.build().experiment})


def write_deployment(folder: Path, deployment: Deployment, hosts: list[str], port: int) -> str:
    """Write everything; return the commands."""
    names = dict.fromkeys(map(to_general_name, [*hosts, *LOOPBACK]))
    new_folder(folder, "choose another folder")
    server, keys = folder / "server", list[str]()
    deployment = deployment.model_copy(update={"address": f"{hosts[0]}:{port}"})
    for path in (server / "flower", server / "units"):
        path.mkdir(parents=True)
    server.chmod(PRIVATE_FOLDER)
    write_certificates(server, list(names))
    public = write_order_key(server / PRIVATE)
    for client in range(len(deployment.keys)):
        site = folder / "sites" / f"client-{client}"
        site.mkdir(parents=True)
        site.chmod(PRIVATE_FOLDER)
        keys.append(write_node_key(site / "client.key", site.name))
        shutil.copy(server / "ca.crt", site)
        (site / PUBLIC).write_bytes(public)
        write_site_unit(site, deployment)
    deployment = deployment.model_copy(update={"keys": tuple(keys)})
    write_app(folder / "app", deployment)
    for site in (folder / "sites").iterdir():
        (site / PLAN).write_text(tomli_w.dumps(deployment.to_run_config()), encoding="utf-8")
    (server / PORTS).write_text(tomli_w.dumps({"gate": port, "superlink": port + 1}), encoding="utf-8")
    write_server_units(folder, port + 1)
    write_flower_config(server / "flower", f"{LOOPBACK[0]}:{port + 1}", server / "ca.crt")
    commands = describe_commands(folder, deployment, hosts[0], port)
    (folder / "README.md").write_text(commands, encoding="utf-8")
    return commands


def write_app(app: Path, deployment: Deployment) -> None:
    app.mkdir()
    head = read_template("app.toml").format(version=__version__)
    config = tomli_w.dumps({"tool": {"flwr": {"app": {"config": deployment.to_run_config()}}}})
    (app / "pyproject.toml").write_text(head + config, encoding="utf-8")


def read_deployment(folder: Path) -> Deployment:
    path = folder / "app" / "pyproject.toml"
    try:
        config = parse_toml(path)["tool"]["flwr"]["app"]["config"]
        return Deployment.from_run_config(config)
    except PfedlaError as error:
        raise PfedlaError(f"{folder} is not a deployment ({error}); see deploy init") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise PfedlaError(f"{path} is damaged: {error}; see deploy init") from None


def write_flower_config(home: Path, address: str, ca: Path) -> None:
    connection = {"address": address, "root-certificates": str(ca.resolve())}
    config = {"superlink": {"default": "pfedla", "pfedla": connection}}
    (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")


def read_ports(folder: Path) -> dict[str, int]:
    """Return the ports of the gate and the SuperLink."""
    ports = parse_toml(folder / "server" / PORTS)
    if not all(type(ports.get(name)) is int for name in ("gate", "superlink")):
        raise PfedlaError(f"{folder / 'server' / PORTS} should name the ports of gate and superlink")
    return ports


def describe_superlink(server: Path, port: int, database: str) -> list[str]:
    """Return the command that starts the SuperLink; only this machine reaches it."""
    words = ["flower-superlink", "--host", LOOPBACK[0], "--port", str(port), "--database", database]
    words += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    words += ["--ssl-ca-certfile", f"{server}/ca.crt", "--ssl-certfile", f"{server}/server.crt"]
    return [*words, "--ssl-keyfile", f"{server}/server.key"]


def write_server_units(folder: Path, control_port: int) -> None:
    server = folder.resolve() / "server"
    home, units = str(server / "flower"), server / "units"
    superlink = describe_superlink(server, control_port, f"{server}/state.db")
    write_unit(units / "pfedla-superlink.service", "SuperLink", superlink, home, writable=server.parent)
    gate = ["pfedla", "deploy", "gate", str(server.parent)]
    write_unit(units / "pfedla-gate.service", "Gate", gate, home, after="pfedla-superlink.service", writable=server)


def write_site_unit(site: Path, deployment: Deployment) -> None:
    place, state = f"/srv/{site.name}", "/srv/pfedla"  # at the site
    data = ' data="/srv/mine.npz"' if deployment.experiment.data.dataset == SITES else ""
    node = ["flower-supernode", "--superlink", deployment.address, "--root-certificates", f"{place}/ca.crt"]
    node += ["--auth-supernode-private-key", f"{place}/client.key", "--node-config"]
    node += [f"""'site="{place}" state="{state}"{data}'"""]
    write_unit(site / "pfedla-site.service", "Site", node, f"{state}/flower", writable=Path(state))


def write_unit(path: Path, what: str, command: list[str], home: str, *, writable: Path, after: str = "") -> None:
    """Write a systemd unit; the program is where this one is."""
    program = Path(sys.executable).with_name(command[0])
    switches = {**FLOWER_SWITCHES, "FLWR_HOME": home}
    environment = "\n".join(f'Environment="{key}={value}"' for key, value in switches.items())
    known = {"what": what, "after": after and f" {after}", "environment": environment, "writable": writable}
    text = read_template("unit.service").format(command=" ".join([str(program), *command[1:]]), **known)
    path.write_text(text, encoding="utf-8")


def describe_commands(folder: Path, deployment: Deployment, host: str, port: int) -> str:
    """Fill in commands.md; its lines that begin with `own:` are for sites that bring their own data."""
    brings_own = deployment.experiment.data.dataset == SITES
    lines = read_template("commands.md").splitlines()
    chosen = [line.removeprefix("own:") for line in lines if brings_own or not line.startswith("own:")]
    values = {
        "folder": folder,
        "host": host,
        "port": port,
        "control_port": port + 1,
        "deployment": deployment,
        "clients": len(deployment.keys),
    }
    values["exports"] = " ".join(f"{key}={value}" for key, value in FLOWER_SWITCHES.items())
    values["kind"] = "uint8" if deployment.mean else "float"
    values["classes"] = shown(deployment.classes)
    values["check"] = " --data /srv/mine.npz" if brings_own else ""
    values["example"] = ' data="/srv/mine.npz"' if brings_own else ""
    return "\n".join([*chosen, ""]).format(**values)


def read_template(name: str) -> str:
    return files("pfedla.flower").joinpath(name).read_text(encoding="utf-8")
