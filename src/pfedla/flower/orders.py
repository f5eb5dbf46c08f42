"""Orders: the server signs every message, for one site, plan and moment. A site obeys no other, and none twice."""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization as to
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from flwr.app import ConfigRecord, RecordDict

from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_text
from pfedla.flower.codec import CONFIG
from pfedla.flower.keys import write_secret

PRIVATE, PUBLIC = "order.key", "server.pub"  # on the server; at every site
ORDER, SIGNATURE = "order", "signature"  # in a message's configuration


def write_order_key(path: Path) -> bytes:
    """Write the key with which the server signs; return the public one."""
    key = Ed25519PrivateKey.generate()
    write_secret(path, key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption()))
    return key.public_key().public_bytes(to.Encoding.PEM, to.PublicFormat.SubjectPublicKeyInfo)


class Signer:
    """Signs what the server of one run sends."""

    def __init__(self, path: Path, plan: Mapping[str, Any]) -> None:
        try:
            key = to.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise PfedlaError(f"the key that signs orders cannot be read: {error}; `deploy init` writes it") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise PfedlaError(f"{path} is not the key that `deploy init` has written")
        self._key, self._plan, self._last = key, plan, 0

    def sign(self, kind: str, content: RecordDict) -> None:
        """Add the number of the order, which only grows, and the signature."""
        self._last = max(self._last + 1, time.time_ns())  # grows also when the server starts anew
        config = content.config_records[CONFIG]
        config[ORDER] = self._last
        config[SIGNATURE] = self._key.sign(digest(kind, content, self._plan))


def check_signature(path: Path, kind: str, content: RecordDict, plan: Mapping[str, Any]) -> None:
    """Raise unless the message was signed by the server whose public key is at `path`, and for this plan."""
    try:
        key = to.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PfedlaError(f"the server's public key cannot be read: {error}; `deploy init` writes it") from None
    signature = content.config_records[CONFIG].get(SIGNATURE)
    try:
        if not isinstance(key, Ed25519PublicKey) or not isinstance(signature, bytes):
            raise InvalidSignature
        key.verify(signature, digest(kind, content, plan))
    except InvalidSignature:
        raise PfedlaError("this order is not signed by the server, or not for this plan: refused") from None


def digest(kind: str, content: RecordDict, plan: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of all that a message says, but for its signature."""
    said: dict[str, Any] = {"kind": kind, "plan": dict(plan)}
    for name, record in content.items():
        if isinstance(record, ConfigRecord):
            said[f"values {name}"] = {key: value for key, value in record.items() if key != SIGNATURE}
        else:
            arrays = {key: (one.dtype, one.shape, one.stype, _sha256(one.data)) for key, one in record.items()}  # type: ignore[union-attr]
            said[f"arrays {name}"] = arrays
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def note_order(path: Path, number: object) -> None:
    """Keep the number of the last order in a file; raise if this one is not later."""
    last = int(path.read_text(encoding="utf-8")) if path.exists() else 0
    if type(number) is not int or number <= last:
        raise PfedlaError(f"order {number!r:.40} was sent before, or is older than the last one: refused")
    write_text(path, str(number))
