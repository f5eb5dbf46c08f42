"""Check untrusted files before reading them; write our own whole or not at all. Imports no torch."""

import hashlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open

from pfedla.core.errors import PfedlaError, first_line, shown

NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
Tensors = dict[str, Any]  # of torch
RUN_PLACES = ("*", "models/*", "checkpoints/*", "joined/*", "joined/*/*")
LARGEST_JSON, LARGEST_TOML = 2**26, 2**24  # bytes


def read_plain_array(file: IO[bytes], size: int, name: str) -> npt.NDArray[Any]:
    """Read an array of `size` bytes; raise ValueError if it claims more: numpy would allocate that before reading."""
    try:
        shape, _, dtype = NPY_HEADERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # numpy parses the header as Python: a damaged one may raise anything
        raise ValueError(f"{name} does not begin as a plain array: {str(error)[:80]}") from None
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects, which are never opened")
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    # With a zero beside it, any length would claim no byte.
    if claimed != there or not dtype.itemsize or not all(0 <= length < 2**40 for length in shape):
        raise ValueError(f"{name} claims shape {shape} in {claimed} bytes and has {there} bytes")
    file.seek(0)
    return np.lib.format.read_array(file, allow_pickle=False)


def read_bytes(path: Path, limit: int) -> bytes:
    check_size(path, limit)
    try:
        return path.read_bytes()
    except OSError as error:
        raise PfedlaError(f"{path}: cannot be read ({error})") from None


def parse_json(content: bytes) -> Any:
    """Parse strict JSON, nested to a bounded depth; raise ValueError for what could not be written again, as NaN."""
    found = from_json(content, allow_inf_nan=False)
    json.dumps(found, allow_nan=False)  # 1e999 is read as infinity
    return found


def read_object(path: Path, limit: int = LARGEST_JSON) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    try:
        content = parse_json(read_bytes(path, limit))
    except PfedlaError:
        raise
    except ValueError as error:
        raise PfedlaError(f"{path} is damaged: {error}") from None
    if not isinstance(content, dict):
        raise PfedlaError(f"{path} is damaged: it holds {shown(content)}")
    return content


def parse_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_bytes(path, LARGEST_TOML).decode("utf-8"))
    except PfedlaError:
        raise
    except (ValueError, RecursionError) as error:
        raise PfedlaError(f"{path} is not valid TOML: {first_line(error)}") from None


def check_size(path: Path, limit: float = math.inf) -> None:
    """Refuse what is no regular file, or is too large, before it is opened: a pipe or a device never ends."""
    if not path.is_file():
        raise PfedlaError(f"{path}: cannot be read ({'not a file' if path.exists() else 'it does not exist'})")
    if (size := path.stat().st_size) > limit:
        raise PfedlaError(f"{path} is damaged: it has {size} bytes, at most {limit} are read")


def refuse_links(folder: Path) -> None:
    """Refuse a run folder in which a link leads out of it: another file would be read or written in its place."""
    home = os.path.realpath(folder)
    for path in (path for places in RUN_PLACES for path in folder.glob(places)):
        if path.is_symlink() and not os.path.realpath(path).startswith(home + os.sep):
            raise PfedlaError(f"{path} is a link out of the run folder; replace it by the file itself")


def safe_name(text: str) -> str:
    """Return untrusted text as part of a file name: printable, short, and inside its folder."""
    name = re.sub(r"[^\w.-]+", "_", text).encode(errors="ignore")[:60].decode(errors="ignore")
    return name.strip("._") or "unnamed"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sum_files(folder: Path, *patterns: str) -> dict[str, str]:
    """Return the SHA-256 of the files that fit, by their names in the folder."""
    found = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return {path.relative_to(folder).as_posix(): sha256(path) for path in found}


def write_whole(path: Path, write: Callable[[Path], object], *, to_disk: bool = True) -> None:
    """Replace a file, or a link, with all of its new content, or leave it; `to_disk` waits for the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may write at once
    temporary.unlink(missing_ok=True)  # it could be a link
    try:
        write(temporary)
        if to_disk:
            _sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if to_disk:
        _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_tensors(path: Path, expected: Tensors, *, finite: bool = True, optional: str = "") -> Tensors:
    """Read tensors whose names, shapes and dtypes must be those of `expected` (which may be on "meta").

    Those whose names begin with `optional` may be missing.
    """
    check_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            known = set(file.keys())
            expected = {
                n: value for n, value in expected.items() if n in known or not (optional and n.startswith(optional))
            }
            for name in sorted(expected.keys() ^ known):
                what = "is missing" if name in expected else "does not belong there"
                raise PfedlaError(f"{path}: tensor {name!r:.100} {what}")
            for name, wanted in expected.items():
                if (shape := file.get_slice(name).get_shape()) != list(wanted.shape):
                    raise PfedlaError(f"{path}: {name} is of shape {shape}, not {list(wanted.shape)}")
            tensors = {name: file.get_tensor(name) for name in expected}
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot make a tensor of the bytes
        raise PfedlaError(f"{path}: cannot be read ({error})") from None
    for name, value in tensors.items():
        if value.dtype != expected[name].dtype:
            raise PfedlaError(f"{path}: {name} is {value.dtype}, not {expected[name].dtype}")
        if finite and value.is_floating_point() and not value.isfinite().all():
            raise PfedlaError(f"{path}: {name} holds numbers that are not finite")
    return tensors


def write_tensors(path: Path, tensors: Tensors) -> None:
    from safetensors.torch import save_file  # imports torch

    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    write_whole(path, lambda part: save_file(copies, part))
