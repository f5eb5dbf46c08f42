"""Keys and certificates: a CA of the federation's own, the server's certificate, a key for every client."""

import contextlib
import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import NameOID

from pfedla.core.errors import PfedlaError, shown

SERVER_DAYS = 825  # the longest that common TLS libraries accept for a server's certificate
CA_DAYS = 3650


def pem_of(openssh: str) -> bytes:
    """A public key as Flower shows those of its nodes."""
    try:
        return load_ssh_public_key(openssh.encode()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    except ValueError:
        raise PfedlaError(f"{shown(openssh)} is no public key in OpenSSH's format") from None


def write_private(path: Path, content: bytes) -> None:
    """Readable by its owner alone, from the first moment on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def write_node_key(path: Path, comment: str) -> str:
    """A client's key pair, as ssh-keygen would leave it; returns the public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = f"{key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()} {comment}"
    path.with_name(f"{path.name}.pub").write_text(f"{public}\n", encoding="utf-8")
    return public


def write_certificates(folder: Path, hosts: list[str]) -> None:
    """ca.crt and ca.key, server.crt and server.key; `hosts` are the names and addresses under which sites reach the server."""
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca_name = _name("pfedla federation CA")
    ca = (
        _certificate(ca_name, ca_name, ca_key.public_key(), CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(ca_key, hashes.SHA384())
    )
    server = (
        _certificate(_name(hosts[0]), ca_name, server_key.public_key(), SERVER_DAYS)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    for name, key, certificate in (("ca", ca_key, ca), ("server", server_key, server)):
        write_private(folder / f"{name}.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))


def check_hosts(hosts: list[str]) -> None:
    for host in hosts:
        _alternative(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.*-]{0,252}", host):
        raise PfedlaError(f"--host {host}: write a name (fl.example.org) or an address, without https:// and port")
    return x509.DNSName(host)


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(hours=1)  # the sites' clocks may be a little behind
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(now).not_valid_after(now + timedelta(days=days))


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        key_cert_sign=signs_certificates, crl_sign=signs_certificates, encipher_only=False, decipher_only=False,
    )  # fmt: skip
