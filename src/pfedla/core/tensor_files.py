"""Read and write tensors in safetensors files; a file is checked before anything of its size is made."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, write_whole
from pfedla.core.layers import Params

DTYPES = {  # as safetensors names them
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def read_tensors(path: Path, expected: Params, *, finite: bool = True) -> Params:
    """Read tensors whose names, shapes and dtypes must be those of `expected` (which may be on "meta")."""
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
    for name in sorted(expected.keys() ^ found):
        what = "is missing" if name in expected else "does not belong there"
        raise PfedlaError(f"{path}: tensor {name!r:.100} {what}")
    for name, wanted in expected.items():
        part = file.get_slice(name)
        shape, code = tuple(part.get_shape()), part.get_dtype()
        if shape != tuple(wanted.shape) or DTYPES.get(code) != wanted.dtype:
            now = f"{_word(DTYPES.get(code, code))} {shape}"
            raise PfedlaError(f"{path}: {name} is {now}, not {_word(wanted.dtype)} {tuple(wanted.shape)}")


def _word(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def write_tensors(path: Path, tensors: Params) -> None:
    """Write a safetensors file, whole or not at all."""
    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    write_whole(path, lambda part: save_file(copies, part))
