"""Read arrays from files. Nothing is unpickled, and nothing is allocated that the file does not hold."""

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, read_plain_array
from pfedla.data.dataset import Array, Dataset, dataset_of

PLAIN = "save plain arrays with numpy.savez (names as y.astype(str))"
LARGEST = 2**33  # bytes of an array
LARGE, DENSEST = 2**28, 200  # an array of more than LARGE bytes may be at most DENSEST times its packed size
UNREADABLE = (  # what numpy and zipfile raise on damaged files
    OSError,
    ValueError,
    TypeError,
    EOFError,
    AttributeError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)


def load_arrays(path: Path) -> Dataset:
    """Read the arrays of a .npz, or of a folder that holds each as a .npy."""
    return _load_folder(path) if path.is_dir() else load_npz(path)


def _load_folder(path: Path) -> Dataset:
    arrays: dict[str, Any] = {}
    for name in ("x", "y", "test"):
        file = path / f"{name}.npy"
        if file.is_file():
            try:
                with file.open("rb") as opened:
                    arrays[name] = read_plain_array(opened, file.stat().st_size, str(file))
            except (OSError, ValueError) as error:
                raise PfedlaError(f"{file}: cannot be read ({error})") from None
        elif name != "test":
            raise PfedlaError(f"{path}: no {name}.npy; a folder holds x.npy, y.npy and optionally test.npy")
    return dataset_of(path.name, **arrays)


def load_npz(path: Path) -> Dataset:
    """Read a file with x, y, and optionally client (the owner of each example) and test (a mask)."""
    check_size(path, None)
    try:
        with zipfile.ZipFile(path) as archive:
            found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            wanted = [name for name in ("x", "y", "client", "test") if name in found]
            arrays = {name: _read_member(archive, found[name]) for name in wanted}
    except UNREADABLE as error:
        if "pickle" in str(error):  # numpy would advise to allow it
            raise PfedlaError(f"{path}: holds Python objects, which are never opened; {PLAIN}") from None
        raise PfedlaError(f"{path}: cannot be read ({error}); {PLAIN}") from None
    if missing := {"x", "y"} - arrays.keys():
        holds = ", ".join(found)[:200] or "nothing"
        raise PfedlaError(f"{path}: no array {' and '.join(sorted(missing))}; it holds: {holds}")
    return replace(dataset_of(path.name, **arrays), name=path.stem)  # errors name the file


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    size = member.file_size
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may unpack to any size
        raise ValueError(f"{member.filename} is packed in a way that numpy never does")
    if size > LARGEST or (size > LARGE and size > DENSEST * member.compress_size):
        raise ValueError(f"{member.filename} would unpack to {size} bytes; save it unpacked, or save less")
    with archive.open(member) as file:
        return read_plain_array(file, size, member.filename)
