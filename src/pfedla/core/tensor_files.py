"""Read and write tensors in safetensors files; a file is checked before anything of its size is made."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, write_whole
from pfedla.core.layers import Params


def read_tensors(path: Path, expected: Params, *, finite: bool = True) -> Params:
    """Read tensors whose names, shapes and dtypes must be those of `expected` (which may be on "meta")."""
    check_size(path)
    try:
        with safe_open(path, framework="pt") as file:
            for name in sorted(expected.keys() ^ set(file.keys())):
                what = "is missing" if name in expected else "does not belong there"
                raise PfedlaError(f"{path}: tensor {name!r:.100} {what}")
            for name, wanted in expected.items():
                part = file.get_slice(name)
                found, due = (part.get_dtype(), part.get_shape()), (_code(wanted.dtype), list(wanted.shape))
                if found != due:
                    raise PfedlaError(f"{path}: {name} is {found}, not {due}")
            tensors = {name: file.get_tensor(name) for name in expected}
    except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: torch cannot make a tensor of the bytes
        raise PfedlaError(f"{path}: cannot be read ({error})") from None
    for name, value in tensors.items():
        if finite and value.is_floating_point() and not value.isfinite().all():
            raise PfedlaError(f"{path}: {name} holds numbers that are not finite")
    return tensors


def _code(dtype: torch.dtype) -> str:
    """Return how safetensors names a dtype: F32, BF16, I64, U8, BOOL."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("uint", "u").replace("int", "i").replace("float", "f").upper()


def write_tensors(path: Path, tensors: Params) -> None:
    """Write a safetensors file, whole or not at all."""
    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    write_whole(path, lambda part: save_file(copies, part))
