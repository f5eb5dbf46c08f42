"""Tiny files in each official format."""

import gzip
import io
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from pfedla.data.datasets import KNOWN

NUM = 40
EMNIST_SPLITS = ("byclass", "bymerge", "balanced", "letters", "digits", "mnist")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def images(count: int, part: int) -> np.ndarray:
    """Every image has one bright pixel at row 3, column `part` + 5, so that a transposed one is seen."""
    x = np.random.default_rng(part).integers(0, 100, (count, 28, 28), np.uint8)
    x[:, 3, part + 5] = 255
    return x


def idx_files(name: str, count: int = NUM) -> dict[str, bytes]:
    """The four gzipped files of an MNIST-like set: twice `count` images, all classes in turn."""
    split = name.removeprefix("emnist-")
    names = KNOWN[name].source.files
    first = 1 if split == "letters" else 0
    files = {}
    for part in range(2):
        x, y = images(count, part), (np.arange(count) % len(KNOWN[name].classes) + first).astype(np.uint8)
        x = x.transpose(0, 2, 1) if name.startswith("emnist-") else x
        files[names[2 * part]] = gzip.compress(idx(np.ascontiguousarray(x)))
        files[names[2 * part + 1]] = gzip.compress(idx(y))
    return files


def cifar_files(name: str, count: int = NUM) -> dict[str, bytes]:
    """Binary records; the pixels of an image are its class number, plane by plane plus 0, 50 and 100."""
    parts = (1,) * 6 if name == "cifar10" else (5, 1)
    files = {}
    for file, part in zip(KNOWN[name].source.files, parts, strict=True):
        y = np.arange(part * count) % len(KNOWN[name].classes)
        labels = y[:, None] if name == "cifar10" else np.stack([y // 5, y], axis=1)
        planes = np.repeat(y[:, None] + np.array([0, 50, 100]), 1024, axis=1)
        files[file] = np.concatenate([labels, planes], axis=1).astype(np.uint8).tobytes()
    return files


def official_files(name: str, count: int = NUM) -> dict[str, bytes]:
    return (cifar_files if name.startswith("cifar") else idx_files)(name, count)


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()
