"""Read arrays from files. Nothing is unpickled, and nothing is allocated that the file does not hold."""

import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, read_plain_array
from pfedla.data.dataset import Array, Dataset, dataset_of

LARGEST = 2**33  # bytes of an array
LARGE, DENSEST = 2**28, 200  # an array of more than LARGE bytes may be at most DENSEST times its packed size
# What numpy and zipfile raise on damaged files
UNREADABLE = (OSError, ValueError, TypeError, EOFError, AttributeError, RuntimeError, zipfile.BadZipFile, zlib.error)


def load_arrays(path: Path) -> Dataset:
    """Read x, y, and optionally client (the owner of each example) and test (a mask): a .npz, or a folder of .npy."""
    if not path.is_dir():
        check_size(path)
    try:
        arrays = _read_folder(path) if path.is_dir() else _read_npz(path)
    except UNREADABLE as error:
        advice = "save plain arrays with numpy.savez (names as y.astype(str))"
        raise PfedlaError(f"{path}: cannot be read ({error}); {advice}") from None
    if missing := sorted({"x", "y"} - arrays.keys()):
        raise PfedlaError(f"{path}: no array {' and '.join(missing)}; give x, y and optionally client and test")
    return replace(dataset_of(path.name, **arrays), name=path.stem)  # errors name the file


def _read_folder(path: Path) -> dict[str, Array]:
    arrays = {}
    for file in (path / f"{name}.npy" for name in ("x", "y", "test")):
        if file.is_file():
            with file.open("rb") as opened:
                arrays[file.stem] = read_plain_array(opened, file.stat().st_size, file.name)
    return arrays


def _read_npz(path: Path) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    with zipfile.ZipFile(path) as archive:
        found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        for name in [name for name in ("x", "y", "client", "test") if name in found]:
            member, size = found[name], found[name].file_size
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may unpack to any size
                raise ValueError(f"{member.filename} is packed in a way that numpy never does")
            if size > LARGEST or (size > LARGE and size > DENSEST * member.compress_size):
                raise ValueError(f"{member.filename} would unpack to {size} bytes; save it unpacked, or save less")
            with archive.open(member) as file:
                arrays[name] = read_plain_array(file, size, member.filename)
    return arrays
