"""Files: of strangers, read only once what they claim is what is expected; our own, written whole or not at all."""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pfedla.core.errors import PfedlaError, shown
from pfedla.core.layers import Params

NPY_HEADS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
LARGEST_JSON = 64 * 2**20  # bytes
DTYPES = {  # as safetensors names them
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_tensors(path: Path, expected: Params, *, finite: bool = True) -> Params:
    """The tensors of a safetensors file whose names, shapes and dtypes are those of `expected` (which may be on "meta")."""
    check_size(path, None)
    try:
        with safe_open(path, framework="pt") as file:
            _check_header(path, file, expected)
            tensors = {name: file.get_tensor(name) for name in expected}
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot make a tensor of the bytes
        raise PfedlaError(f"{path}: cannot be read ({error})") from None
    for name, value in tensors.items():
        if finite and value.is_floating_point() and not value.isfinite().all():
            raise PfedlaError(f"{path}: {name} holds numbers that are not finite")
    return tensors


def _check_header(path: Path, file: Any, expected: Params) -> None:
    found = set(file.keys())
    for name in sorted(expected.keys() | found):
        if name not in found or name not in expected:
            raise PfedlaError(f"{path}: tensor {name!r:.100} {'is missing' if name in expected else 'does not belong there'}")
        part, wanted = file.get_slice(name), expected[name]
        shape, code = tuple(part.get_shape()), part.get_dtype()
        if shape != tuple(wanted.shape) or DTYPES.get(code) != wanted.dtype:
            is_now = f"{_word(DTYPES.get(code, code))} {shape}"
            raise PfedlaError(f"{path}: {name} is {is_now}, not {_word(wanted.dtype)} {tuple(wanted.shape)}")


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def read_plain_array(file: IO[bytes], size: int, name: str) -> npt.NDArray[Any]:
    """An array in numpy's format of `size` bytes, once what its head claims is known to be there: numpy would allocate it
    unseen. Raises ValueError."""
    try:
        shape, _, dtype = NPY_HEADS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # numpy reads the head as Python: of a damaged one, the parser may raise anything
        raise ValueError(f"{name} does not begin as a plain array: {str(error)[:80]}") from None
    claimed, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if not all(0 <= length < 2**40 for length in shape):  # beside a zero, any length would be claimed for nothing
        raise ValueError(f"{name} has a shape that cannot be")
    if not dtype.hasobject and (claimed != there or not dtype.itemsize):
        raise ValueError(f"{name} claims {claimed} bytes and has {there}")
    file.seek(0)
    array: npt.NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
    return array


def read_json(path: Path, limit: int = LARGEST_JSON) -> Any:
    """What a JSON file holds: strictly JSON, so without NaN and Infinity, and nothing that could not be written again."""
    check_size(path, limit)
    try:
        content = json.loads(path.read_bytes().decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # half of a surrogate pair can be read but never written
    except (OSError, ValueError, RecursionError) as error:
        raise PfedlaError(f"{path} is damaged: {error}") from None
    return content


def read_object(path: Path) -> dict[str, Any]:
    """What a JSON file holds that should be one object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise PfedlaError(f"{path} is damaged: it holds {shown(content)}")
    return content


def check_size(path: Path, limit: int | None) -> None:
    """Refuse what is no file, or too large to be what it should be, before it is opened: a pipe or device never ends."""
    try:
        is_file, size = path.is_file(), path.stat().st_size
    except OSError as error:
        raise PfedlaError(f"{path}: cannot be read ({error.strerror})") from None
    if not is_file:
        raise PfedlaError(f"{path}: cannot be read (not a file)")
    if limit is not None and size > limit:
        raise PfedlaError(f"{path} is damaged: it has {size} bytes, at most {limit} are read")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is too large")
    return number


def safe_name(text: str) -> str:
    """A stranger's text as a part of a file's name: it stays in its folder, is seen, and is not too long."""
    name = re.sub(r"[^\w.-]+", "_", text).encode()[:60].decode(errors="ignore")
    return name.strip("._") or "unnamed"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, write: Callable[[Path], object], *, to_disk: bool = True) -> None:
    """The file is there with all of its content, on the disk, or not at all; what it was before is there until then.

    What only somebody looks at need not wait for the disk.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")  # two processes may be at it
    write(temporary)
    if to_disk:
        _to_disk(temporary)
    temporary.replace(path)
    if to_disk:
        _to_disk(path.parent)


def write_tensors(path: Path, tensors: Params) -> None:
    write_whole(path, lambda file: save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file))


def write_text(path: Path, text: str) -> None:
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
