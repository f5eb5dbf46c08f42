"""Keys and certificates: a CA of the federation's own, the server's certificate, a key for every client."""

import contextlib
import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from inspect import signature
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedla.core.errors import PfedlaError, shown

DAYS = {"ca": 3650, "server": 825}  # the longest that common TLS libraries accept for a server
USES = signature(x509.KeyUsage).parameters  # all that a key can be used for


def to_pem(openssh: str) -> bytes:
    """Convert a public key to the format in which Flower shows those of its nodes."""
    try:
        key = to.load_ssh_public_key(openssh.encode())
    except ValueError:
        raise PfedlaError(f"{shown(openssh)} is not a public key in OpenSSH's format") from None
    return key.public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo)


def write_private(path: Path, style: to.PrivateFormat) -> ec.EllipticCurvePrivateKey:
    """Write a new private key."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(path, key.private_bytes(to.Encoding.PEM, style, to.NoEncryption()))
    return key


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read, from the first moment on."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def write_node_key(path: Path, comment: str) -> str:
    """Write a client's key pair, as ssh-keygen would; return the public key."""
    key = write_private(path, to.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH).decode()
    path.with_name(f"{path.name}.pub").write_text(f"{public} {comment}\n", encoding="utf-8")
    return f"{public} {comment}"


def write_certificates(folder: Path, hosts: list[x509.GeneralName]) -> None:
    """Write ca.crt, ca.key, server.crt and server.key; `hosts` are the server's names and addresses."""
    keys = {role: write_private(folder / f"{role}.key", to.PrivateFormat.PKCS8) for role in DAYS}
    names = {role: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"pfedla {role}")]) for role in DAYS}
    public, start = keys["ca"].public_key(), datetime.now(UTC) - timedelta(hours=1)  # sites' clocks may be behind
    signs = {"digital_signature": True, "key_cert_sign": True, "crl_sign": True}
    extensions: dict[str, list[x509.ExtensionType]] = {
        "ca": [
            x509.BasicConstraints(ca=True, path_length=0),
            x509.KeyUsage(**dict.fromkeys(USES, False) | signs),
            x509.SubjectKeyIdentifier.from_public_key(public),
        ],
        "server": [
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName(hosts),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(public),
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        ],
    }
    for role, days in DAYS.items():
        builder = x509.CertificateBuilder(names["ca"], names[role], keys[role].public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(start).not_valid_after(start + timedelta(days=days))
        for extension in extensions[role]:
            is_critical = isinstance(extension, x509.BasicConstraints | x509.KeyUsage)
            builder = builder.add_extension(extension, critical=is_critical)
        signed = builder.sign(keys["ca"], hashes.SHA384())
        (folder / f"{role}.crt").write_bytes(signed.public_bytes(to.Encoding.PEM))


def to_general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.*-]{0,252}", host):
        raise PfedlaError(f"--host {host}: give a name (fl.example.org) or an address, without https:// and port")
    return x509.DNSName(host)
