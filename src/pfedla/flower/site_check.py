"""`pfedla site check`: whether a site is ready, found out at the site before it joins. Nothing is sent."""

import socket
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives import serialization as to

from pfedla.core.contracts import Cohort
from pfedla.core.errors import PfedlaError, first_line
from pfedla.core.files import parse_toml
from pfedla.core.rounds import find_too_large, pack
from pfedla.flower.client_app import Site, find_number
from pfedla.flower.deployment import Deployment
from pfedla.flower.layout import PLAN
from pfedla.flower.orders import PUBLIC
from pfedla.runs.folder import fresh_state

PATIENCE = 10.0  # seconds for the server to answer
Lines = Iterator[tuple[bool, str]]  # whether it is right, and what


def check_site(folder: Path, node: dict[str, Any], say: Callable[[str], None]) -> Lines:
    """Yield what was found about the folder, the data, a round of training and the connection."""
    try:
        deployment = Deployment.from_run_config(parse_toml(folder / PLAN))
        number = find_number(folder / "client.key.pub", deployment.keys)
    except (PfedlaError, OSError) as error:
        yield False, f"{folder} is not a site's folder of `pfedla deploy init`: {error}"
        return
    yield from check_keys(folder, number)
    with tempfile.TemporaryDirectory() as state:
        config, node = {"client": number, "run": "0" * 16}, {**node, "site": str(folder), "state": state}
        try:
            site = Site(deployment, config, node)
        except (PfedlaError, OSError) as error:
            yield False, f"the data do not fit: {error}"
        else:
            yield True, describe_data(site)
            say("training one round on these data, as the plan says …")
            yield train_once(site, deployment)
    yield check_connection(deployment.address, folder / "ca.crt")


def check_keys(folder: Path, number: int) -> Lines:
    """Yield whether the private key is this site's, and readable by its owner only."""
    path = folder / "client.key"
    try:
        key = to.load_ssh_private_key(path.read_bytes(), password=None).public_key()
        public = key.public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH).decode()
        is_own = public.split() == (folder / "client.key.pub").read_text(encoding="utf-8").split()[:2]
        to.load_pem_public_key((folder / PUBLIC).read_bytes())
    except (OSError, ValueError) as error:
        yield False, f"a key cannot be read: {first_line(error)}"
        return
    yield is_own, f"client.key is {'that' if is_own else 'not that'} of client {number}"
    if path.stat().st_mode & 0o077:
        yield False, f"{path} can be read by others: chmod 600"


def describe_data(site: Site) -> str:
    """Return how many examples there are, of which classes."""
    train, test, classes = site.client.train, site.client.test, site.federation.classes
    text = f"the data fit: {len(train.y)} training and {len(test.y)} test examples"
    if site.federation.task != "classification":
        return text
    counts = Counter(classes[label] for label in torch.cat([train.y, test.y]).tolist())
    missing = [name for name in classes if name not in counts]
    text += "; of " + ", ".join(f"{name}: {counts[name]}" for name in classes if counts[name])
    return text + (f"; none of {', '.join(missing)}" if missing else "")


def train_once(site: Site, deployment: Deployment) -> tuple[bool, str]:
    """Train for one round from the initial model, as the server's first order would have it, and time it."""
    experiment, algorithm, count = site.experiment, site.client.algorithm, len(deployment.keys)
    everyone = Cohort.everyone(torch.ones(count, dtype=torch.int64), 1, experiment.seed)
    cohort, server = everyone.only(torch.tensor([site.number])), fresh_state(algorithm, count, experiment.seed).server
    message, _ = pack(algorithm, server, cohort, algorithm.download(server, cohort))
    start = time.monotonic()
    try:
        _, answer = site.client.update(message.rows(0).to(site.client.device), cohort)
    except Exception as error:  # whatever the model raises on these data
        return False, f"training fails: {type(error).__name__}: {first_line(error)}"
    seconds = time.monotonic() - start
    if not answer.finite or find_too_large(answer.upload.tensors, algorithm.task.layers):
        return (
            False,
            "training diverges in the first round: the server would refuse the model; are the features scaled?",
        )
    return True, f"one round of training takes {seconds:.1f} s here; the server waits {deployment.round_timeout:.0f} s"


def check_connection(address: str, ca: Path) -> tuple[bool, str]:
    """Connect to the gate and verify its certificate; send nothing."""
    host, _, port = address.rpartition(":")
    try:
        context = ssl.create_default_context(cafile=str(ca))
        with (
            socket.create_connection((host, int(port)), timeout=PATIENCE) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return True, f"{address} answers, and its certificate is the federation's"
    except ssl.SSLCertVerificationError as error:
        return False, f"{address} answers with another certificate: {error.verify_message}"
    except (OSError, ValueError) as error:
        return False, f"{address} does not answer: {first_line(error)}; is it running, is its port open to this site?"
