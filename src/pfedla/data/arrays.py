"""Read plain arrays of .npz and .npy files. Nothing is unpickled, and no more is allocated than the files hold."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, read_plain_array
from pfedla.data.dataset import Dataset, dataset_of

LARGEST_ARRAY = 2**33  # bytes
LARGE, DENSEST = 2**28, 200  # an array of more than LARGE bytes may be at most DENSEST times its packed size


def load_arrays(path: Path, task: str = "auto") -> Dataset:
    """Read x (or x.NAME of several inputs), y, and perhaps client (owners) and test (a mask): a .npz or .npy files."""
    if not path.is_dir():
        check_size(path)
    try:
        arrays = _read_arrays(path)
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        advice = "save plain arrays with numpy.savez (names as y.astype(str))"
        raise PfedlaError(f"{path}: cannot be read ({error}); {advice}") from None
    parts = {key.removeprefix("x."): arrays.pop(key) for key in [*arrays] if key.startswith("x.")}
    if missing := sorted({"x", "y"} - arrays.keys() - ({"x"} if parts else set())):
        raise PfedlaError(f"{path}: no array {' and '.join(missing)}; give x, y and optionally client and test")
    x = arrays.pop("x", parts)
    return dataset_of(path.name, parts or x, **arrays, task=task)


def _is_wanted(member: str, names: Sequence[str]) -> bool:
    stem = member.removesuffix(".npy")
    return stem != member and (stem in names or (stem.startswith("x.") and "x" in names and "/" not in stem))


def _read_arrays(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        return read_npz(path, ("x", "y", "client", "test"), LARGEST_ARRAY)
    arrays: dict[str, Any] = {}  # of a site, which is one client
    for member in sorted(one for one in path.iterdir() if one.is_file() and _is_wanted(one.name, ("x", "y", "test"))):
        with member.open("rb") as file:
            arrays[member.stem] = read_plain_array(file, member.stat().st_size, member.name)
    return arrays


def read_npz(path: Path, names: Sequence[str], largest: int) -> dict[str, Any]:
    """Return the arrays of these names (and x.NAME for "x"), each of at most `largest` bytes; ignore all others."""
    arrays: dict[str, Any] = {}
    with zipfile.ZipFile(path) as archive:
        for name in sorted({one for one in archive.namelist() if _is_wanted(one, names)}):
            packed = archive.getinfo(name)
            if packed.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others may unpack to any size
                raise ValueError(f"{name} is packed in a way that numpy never does")
            if (size := packed.file_size) > min(largest, max(LARGE, DENSEST * packed.compress_size)):
                raise ValueError(f"{name} would unpack to {size} bytes; save it unpacked, or save less")
            with archive.open(packed) as file:
                arrays[name.removesuffix(".npy")] = read_plain_array(file, size, name)
    return arrays
