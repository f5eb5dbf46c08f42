"""`pfedla deploy check`: what of a deployment is open that should not be."""

import stat
from datetime import UTC, datetime
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from cryptography import x509

from pfedla.core.errors import PfedlaError
from pfedla.flower.layout import read_ports

LOCAL = ("127.", "::1", "::ffff:127.")
PROGRAMS = ("flower-superlink", "flower-superexec", "flwr-serverapp", "flower-supernode", "flwr-clientapp")
SOON = 60  # days


def inspect(folder: Path) -> tuple[list[str], list[str]]:
    """Return what is right and what is wrong with the server's side of a deployment on this machine."""
    good, wrong = list[str](), list[str]()
    for found, problems in (inspect_ports(read_ports(folder)), inspect_files(folder), inspect_certificate(folder)):
        good += found
        wrong += problems
    return good, wrong


def inspect_ports(ports: dict[str, int]) -> tuple[list[str], list[str]]:
    """Only the gate may be reached from other machines."""
    good, wrong, seen = list[str](), list[str](), set[str]()
    for connection in psutil.net_connections("inet"):
        if connection.status != psutil.CONN_LISTEN:
            continue
        program, (address, port) = name_program(connection.pid), connection.laddr
        is_local = str(address).startswith(LOCAL)
        if port == ports["gate"]:
            seen.add("gate")
            good.append(
                f"the gate listens on {address}:{port}" + (", only this machine reaches it" if is_local else "")
            )
        elif port == ports["superlink"] or program in PROGRAMS:
            seen |= {"superlink"} if port == ports["superlink"] else set()
            about = f"{program or 'a program'} listens on {address}:{port}"
            if is_local:
                good.append(f"{about}, only this machine reaches it")
            else:
                wrong.append(f"{about}: whoever reaches it can run code here; start it with --host 127.0.0.1")
    good += [f"the {name} is not running" for name in ports if name not in seen]
    return good, wrong


def name_program(pid: int | None) -> str:
    """Return which of Flower's programs a process is, or nothing."""
    try:
        words = psutil.Process(pid).cmdline()[:2] if pid else []
    except psutil.Error:
        return ""
    return next((name for name in PROGRAMS if any(Path(word).name == name for word in words)), "")


def inspect_files(folder: Path) -> tuple[list[str], list[str]]:
    """Private keys and their folders may be read by their owner only."""
    keys = [path for part in ("server", "sites") for path in sorted((folder / part).rglob("*.key"))]
    if not keys:
        raise PfedlaError(f"{folder} has no keys: is it the folder of `pfedla deploy init`?")
    open_to_others = [path for path in keys if stat.S_IMODE(path.stat().st_mode) & 0o077]
    folders = sorted({path.parent for path in keys if stat.S_IMODE(path.parent.stat().st_mode) & 0o077})
    wrong = [f"{path} can be read by others: chmod 600" for path in open_to_others]
    wrong += [f"{path} can be entered by others: chmod 700" for path in folders]
    there = [path.parent.name for path in keys if path.is_relative_to(folder / "sites")]
    good = [f"{len(keys)} private keys are readable by their owner only"] * (not wrong)
    return good + [f"the server still has the private keys of {len(there)} sites"] * bool(there), wrong


def inspect_certificate(folder: Path) -> tuple[list[str], list[str]]:
    certificate = x509.load_pem_x509_certificate((folder / "server" / "server.crt").read_bytes())
    days = (certificate.not_valid_after_utc - datetime.now(UTC)).days
    text = f"the server's certificate is valid for {days} days"
    return ([text], []) if days > SOON else ([], [f"{text}: renew it (docs/deployment.md)"])
