"""Read and write tensors in safetensors files; a file is checked before anything of its size is made."""

from pathlib import Path

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


def write_tensors(path: Path, tensors: Params) -> None:
    """Write a safetensors file, whole or not at all."""
    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    write_whole(path, lambda part: save_file(copies, part))
