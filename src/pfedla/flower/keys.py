"""Keys and certificates: a CA of the federation's own, the server's certificate, a key for every client."""

import contextlib
import ipaddress
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedla.core.errors import PfedlaError, shown

SERVER_DAYS = 825  # the longest that common TLS libraries accept for a server's certificate
CA_DAYS = 3650


def to_pem(openssh: str) -> bytes:
    """Convert a public key to the format in which Flower shows those of its nodes."""
    try:
        key = to.load_ssh_public_key(openssh.encode())
    except ValueError:
        raise PfedlaError(f"{shown(openssh)} is not a public key in OpenSSH's format") from None
    return key.public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo)


def write_private(path: Path, key: ec.EllipticCurvePrivateKey, style: to.PrivateFormat) -> None:
    """Write a private key that only its owner can read, from the first moment on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(key.private_bytes(to.Encoding.PEM, style, to.NoEncryption()))


def write_node_key(path: Path, comment: str) -> str:
    """Write a client's key pair, as ssh-keygen would; return the public key."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private(path, key, to.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(to.Encoding.OpenSSH, to.PublicFormat.OpenSSH).decode()
    path.with_name(f"{path.name}.pub").write_text(f"{public} {comment}\n", encoding="utf-8")
    return f"{public} {comment}"


def write_certificates(folder: Path, hosts: list[str]) -> None:
    """Write ca.crt, ca.key, server.crt and server.key; `hosts` are the server's names and addresses."""
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca_name = _name("pfedla federation CA")
    ca = _certificate(ca_name, ca_key, CA_DAYS, is_ca=True).add_extension(
        x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False
    )
    server = (
        _certificate(_name(hosts[0]), server_key, SERVER_DAYS, is_ca=False)
        .add_extension(x509.SubjectAlternativeName([to_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    for name, key, builder in (("ca", ca_key, ca), ("server", server_key, server)):
        write_private(folder / f"{name}.key", key, to.PrivateFormat.PKCS8)
        signed = builder.issuer_name(ca_name).sign(ca_key, hashes.SHA384())
        (folder / f"{name}.crt").write_bytes(signed.public_bytes(to.Encoding.PEM))


def to_general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.*-]{0,252}", host):
        raise PfedlaError(f"--host {host}: give a name (fl.example.org) or an address, without https:// and port")
    return x509.DNSName(host)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _certificate(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int, *, is_ca: bool
) -> x509.CertificateBuilder:
    now = datetime.now(UTC) - timedelta(hours=1)  # the sites' clocks may be a little behind
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = dict.fromkeys((*others, "decipher_only"), False)
    return (
        x509.CertificateBuilder(subject_name=subject, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=is_ca, crl_sign=is_ca, **usage), critical=True
        )
    )
