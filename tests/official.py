"""Files in each official format: tiny ones, of real sites with made-up values in the published numbers."""

import gzip
import io
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from pfedla.data.datasets import KNOWN
from pfedla.data.sites import ATTRIBUTES, DOMAINS, HOSPITALS, REGIONS, Between

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
    if name in SITES:
        return SITES[name]()
    return (cifar_files if name.startswith("cifar") else idx_files)(name, count)


def table(rows: list[list[object]]) -> bytes:
    return "".join(",".join(map(str, row)) + "\n" for row in rows).encode()


def heart_rows(seed: int = 0) -> dict[str, list[list[object]]]:
    """Return the rows of each hospital: every 20th lacks one of the ten features, the first has label 3."""
    rng, found = np.random.default_rng(seed), {}
    for site, count in HOSPITALS.items():
        values = [
            rng.uniform(*may_be, count).round(1) if isinstance(may_be, Between) else rng.choice(may_be, count)
            for may_be in ATTRIBUTES.values()
        ]
        rows = [[*row, label] for *row, label in zip(*values, np.arange(count) % 2 * 3, strict=True)]
        for row in rows[::20]:
            row[3] = "?"
        found[site] = rows
    return found


def heart_files() -> dict[str, bytes]:
    return dict(zip(KNOWN["heart-disease"].source.files, map(table, heart_rows().values()), strict=True))


def heart_table() -> bytes:
    """Return the same patients in one table."""
    header = ["site", *ATTRIBUTES, "disease"]
    rows = [[site, *row[:-1], int(row[-1] > 0)] for site, rows in heart_rows().items() for row in rows]
    return table([header, *([("" if cell == "?" else cell) for cell in row] for row in rows)])


def brca_rows() -> list[tuple[str, str, int, list[object]]]:
    """Return patient, fold, region and values, in the order of the table of patients."""
    rng, rows = np.random.default_rng(0), []
    for region, pair in enumerate(REGIONS):
        for fold, count in zip(("train", "test"), pair, strict=True):
            for number in range(count):
                values = [int(rng.integers(30, 90)), *rng.integers(0, 2, 38).tolist(), number % 2, 10 * number]
                rows.append((f"P-{region}{fold}{number}", fold, region, values))
    return [rows[place] for place in rng.permutation(len(rows))]


def brca_columns() -> list[str]:
    return [f'"{name}"' if "," in name else name for name in KNOWN["tcga-brca"].columns]


def brca_files() -> dict[str, bytes]:
    patients = [[pid, *values[:-2], *map(float, values[-2:])] for pid, _, _, values in brca_rows()]
    folds = [[pid, fold, f"{fold}_{region}"] for pid, fold, region, _ in sorted(brca_rows())]
    tables = (["pid", *brca_columns(), "E", "T"], *patients), (["pid", "fold", "fold2"], *folds)
    return {name: table(list(rows)) for name, rows in zip(KNOWN["tcga-brca"].source.files, tables, strict=True)}


def brca_table() -> bytes:
    header = ["region", "fold", *brca_columns(), "event", "days"]
    return table([header, *([region, fold, *values] for _, fold, region, values in brca_rows())])


def watch_arrays() -> dict[str, np.ndarray]:
    """Return recordings of 450 samples: the sample's number, plus 1,000 times the exercise on the first axis."""
    grid = np.stack(np.meshgrid(np.arange(7), np.arange(1, 11), np.arange(2), indexing="ij")).reshape(3, -1)
    samples = np.tile(np.arange(450, dtype=np.float32)[None, :, None], (140, 1, 6))
    samples[:, :, 0] += 1000 * grid[0][:, None]
    labels = dict(zip(("exercise", "subject", "side"), grid, strict=True))
    return {"samples": samples.reshape(-1, 6), "length": np.full(140, 450), **labels}


def npz_of(arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def sentiment_text() -> str:
    """Return texts with valences -2, 0, 2 in turn; the fourth text of a domain repeats its first."""
    lines = ["domain\tvalence\ttext"]
    for domain, count in DOMAINS.items():
        lines += [f"{domain}\t{2 * (row % 3 - 1)}\ttext {0 if row == 3 else row}" for row in range(count)]
    return "\n".join([*lines, ""])


SITES = {
    "heart-disease": heart_files,
    "tcga-brca": brca_files,
    "watch": lambda: {"watch.npz": npz_of(watch_arrays())},
    "sentiment": lambda: {"sentiment.tsv.xz": lzma.compress(sentiment_text().encode(), preset=1)},
}


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
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
