"""Data of real sites: hospitals, regions, wearers of a watch, sources of text. Every file is checked."""

import csv
import hashlib
import lzma
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size
from pfedla.data.arrays import read_npz
from pfedla.data.dataset import Array, Column, Dataset, dataset_of
from pfedla.data.published import check_file

LARGEST_TEXT = 2**24  # bytes of a table or of unpacked texts; the largest has 2.7 MB
LARGEST_RECORDINGS = 2**26  # bytes of an array of recordings; the largest has 5.9 MB
LARGEST_DICTIONARY = 2**27  # bytes that unpacking an .xz may take
UNKNOWN = ("", "?")


class Between(NamedTuple):
    least: float
    most: float


Allowed = Mapping[str, Between | tuple[int, ...]]  # of each column: a range, or codes

HOSPITALS = {"cleveland": 303, "hungary": 294, "switzerland": 123, "va-long-beach": 200}  # patients
TEN = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak")  # FLamby's features
ATTRIBUTES: Allowed = {
    **dict.fromkeys(TEN, (0, 1)),
    "age": Between(18, 100),
    "cp": (1, 2, 3, 4),
    "trestbps": Between(0, 300),
    "chol": Between(0, 700),
    "restecg": (0, 1, 2),
    "thalach": Between(40, 250),
    "oldpeak": Between(-5, 10),
    "slope": (1, 2, 3),
    "ca": Between(0, 9),
    "thal": (3, 6, 7),
}

FOLDS = ("train", "test")
REGIONS = ((248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11))  # patients of each fold

WEARERS, SIDES, AXES = 10, 2, 6
WINDOW, HOP, TRAINING_SHARE = 100, 50, 0.7  # in samples, 50 a second; the share of a recording that trains

DOMAINS = {"tweets": 4_200, "amazon": 3_708, "film": 10_605, "editorials": 5_190}  # texts
MOST_VALENCE, NEUTRAL, BUCKETS = 4, 0.5, 1024
TEXTS_FOR_TEST = 0.3


def load_heart(files: Sequence[Path], missing: str, *, fold: str = "") -> Dataset:
    """Read the prepared table, or the official file of each hospital.

    missing = "drop": FLamby's ten features and the patients that have them all; "impute": everybody, all thirteen.
    fold = "flamby": mark the test patients of FLamby's split.
    """
    names = [*ATTRIBUTES]
    if len(files) == 1:
        rows = read_rows(files[0], ["site", *names, "disease"])
        owners = np.array([row[0] for row in rows])
        _check_counts(files[0], owners, HOSPITALS)
        table = _read_values(files[0], [row[1:] for row in rows], {**ATTRIBUTES, "disease": (0, 1)})
    else:
        tables = []
        for path, count in zip(files, HOSPITALS.values(), strict=True):
            rows = read_rows(path, width=len(names) + 1)
            check_file(path, len(rows) == count, f"{len(rows)} patients, not {count}")
            tables.append(_read_values(path, rows, {**ATTRIBUTES, "disease": (0, 1, 2, 3, 4)}))
        table, owners = np.concatenate(tables), np.repeat([*HOSPITALS], [*HOSPITALS.values()])
    check_file(files[0], not np.isnan(table[:, -1]).any(), "a patient has no label")
    if fold and missing == "impute":
        raise PfedlaError('FLamby\'s test patients are of those without missing values: use missing = "drop"')
    names = names if missing == "impute" else list(TEN)
    there = np.isfinite(table[:, : len(names)]).sum(axis=1) == len(names)
    x, columns = _encode(table, {name: ATTRIBUTES[name] for name in names})
    dataset = dataset_of("heart-disease", x, (table[:, -1] > 0).astype(np.int64), client=owners, columns=columns)
    dataset = dataset if missing == "impute" or there.all() else dataset.keep(there)
    return replace(dataset, test=_draw_flamby_split(dataset)) if fold else dataset


def _draw_flamby_split(dataset: Dataset) -> Array:
    """Return FLamby's test patients: 34 % of each hospital, stratified where each label has more than two patients."""
    from sklearn.model_selection import train_test_split

    test = np.zeros(len(dataset.y), bool)
    for site in range(len(dataset.client_names)):
        rows = np.flatnonzero(dataset.client == site)
        labels = dataset.y[rows]
        stratify = labels if np.bincount(labels, minlength=2).min() > 2 else None
        parts = train_test_split(rows, test_size=1.0 - 0.66, train_size=0.66, random_state=43, stratify=stratify)
        test[parts[1]] = True
    return test


def load_brca(files: Sequence[Path], covariates: Sequence[str]) -> Dataset:
    """Read the prepared table, or FLamby's two files: the patients, and the region and fold of each."""
    allowed: Allowed = dict.fromkeys(covariates, (0, 1)) | {"age_at_index": Between(18, 120)}
    outcome: Allowed = {"event": (0, 1), "days": Between(0, 40_000)}
    if len(files) == 1:
        rows = read_rows(files[0], ["region", "fold", *covariates, *outcome])
        places, rows = [f"{row[1]}_{row[0]}" for row in rows], [row[2:] for row in rows]
    else:
        rows = read_rows(files[0], ["pid", *covariates, "E", "T"])
        found = {row[0]: row[2] for row in read_rows(files[1], ["pid", "fold", "fold2"])}
        check_file(files[1], found.keys() == {row[0] for row in rows}, f"other patients than in {files[0].name}")
        places, rows = [found[row[0]] for row in rows], [row[1:] for row in rows]
    counts = {f"{fold}_{region}": n for region, pair in enumerate(REGIONS) for fold, n in zip(FOLDS, pair, strict=True)}
    _check_counts(files[-1], np.array(places), counts)
    table = _read_values(files[0], rows, {**allowed, **outcome})
    check_file(files[0], not np.isnan(table).any(), "a value is missing")
    regions, test = zip(*((int(place[-1]), place.startswith("test")) for place in places), strict=True)
    dataset = dataset_of(
        "tcga-brca",
        table[:, : len(covariates)],
        table[:, [-1, -2]],
        client=regions,
        test=np.array(test),
        task="survival",
        columns=tuple(Column(name, "number") for name in covariates),
    )
    return replace(dataset, client_names=tuple(f"region {name}" for name in dataset.client_names))


def read_rows(path: Path, header: Sequence[str] = (), *, width: int = 0) -> list[list[str]]:
    """Return the rows of a table with this header, or of one without header and this many columns."""
    check_size(path, LARGEST_TEXT)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, ValueError, csv.Error) as error:
        raise PfedlaError(f"{path}: damaged ({error}); fetch it again") from None
    if header:
        names, rows = rows[0] if rows else [], rows[1:]
        wrong = sorted({*header} ^ {*names})
        check_file(path, not wrong, f"column {wrong[:1]} is missing or does not belong there")
        check_file(path, names == [*header], "its columns are in another order")
    width = width or len(header)
    for number, row in enumerate(rows, 1):
        check_file(path, len(row) == width, f"row {number} has {len(row)} values, not {width}")
    return rows


def _check_counts(path: Path, owners: Array, expected: Mapping[str, int]) -> None:
    found = Counter(owners.tolist())
    for name in sorted({*found} | {*expected}):
        there, wanted = found[name], expected.get(name, 0)
        check_file(path, there == wanted, f"{there} rows of {name!r:.40}, not {wanted}")


def _read_values(path: Path, rows: Sequence[Sequence[str]], allowed: Allowed) -> Array:
    """Return the numbers of a table [rows, columns], NaN where one is unknown; refuse what a column cannot hold."""
    table = np.full((len(rows), len(allowed)), np.nan)
    for number, row in enumerate(rows):
        for place, cell in enumerate(row):
            try:
                table[number, place] = np.nan if cell in UNKNOWN else float(cell)
            except ValueError:
                table[number, place] = np.inf  # refused below
    for name, column, may_be, place in zip(allowed, table.T, allowed.values(), range(len(allowed)), strict=True):
        is_range = isinstance(may_be, Between)
        fits = (may_be[0] <= column) & (column <= may_be[1]) if is_range else np.isin(column, may_be)
        fits |= np.array([row[place] in UNKNOWN for row in rows])
        first = int(fits.argmin())
        what = f"from {may_be[0]} to {may_be[1]}" if is_range else f"one of {may_be}"
        check_file(path, bool(fits.all()), f"row {first + 1}, column {name}: {rows[first][place]!r:.40} is not {what}")
    return table


def _encode(table: Array, allowed: Allowed) -> tuple[Array, tuple[Column, ...]]:
    """Return the features, and what they are; one of more than two codes is one-hot, all zeros if it is unknown."""
    parts, columns = [], []
    for values, (name, may_be) in zip(table.T[: len(allowed)], allowed.items(), strict=True):
        if isinstance(may_be, Between) or len(may_be) == 2:
            parts.append(values[:, None])
            columns.append(Column(name, "number"))
        else:
            parts.append(values[:, None] == np.array(may_be))
            columns.append(Column(name, "category", tuple(map(str, may_be))))
    return np.concatenate(parts, axis=1), tuple(columns)


def load_watch(path: Path, exercises: tuple[str, ...]) -> Dataset:
    """Read recordings and describe windows of two seconds; the last part of each recording is for test."""
    check_size(path, LARGEST_RECORDINGS)
    labels = ("length", "exercise", "subject", "side")
    try:
        arrays = read_npz(path, ("samples", *labels), LARGEST_RECORDINGS)
    except Exception as error:  # numpy and zipfile raise many kinds on damaged files
        raise PfedlaError(f"{path}: damaged ({error}); fetch it again") from None
    lacking = [name for name in ("samples", *labels) if name not in arrays]
    check_file(path, not lacking, f"it has no array {', '.join(lacking)}")
    samples, count = arrays["samples"], len(exercises) * WEARERS * SIDES
    is_plain = samples.dtype.kind == "f" and samples.shape[1:] == (AXES,) and samples.size > 0
    check_file(path, is_plain, f"samples is {samples.dtype} of shape {samples.shape}, not floats [n, {AXES}]")
    check_file(path, bool(np.isfinite(samples).all()), "samples holds a number that is not finite")
    for name in labels:
        array = arrays[name]
        fits = array.dtype.kind in "iu" and array.shape == (count,)
        check_file(path, fits, f"{name} is {array.dtype} of shape {array.shape}, not {count} whole numbers")
    length, exercise, subject, side = (arrays[name].astype(np.int64) for name in labels)
    expected = {(e, w, s) for e in range(len(exercises)) for w in range(1, WEARERS + 1) for s in range(SIDES)}
    found = {*zip(exercise.tolist(), subject.tolist(), side.tolist(), strict=True)}
    check_file(path, found == expected, "not one recording of each exercise, wearer and side")
    fits = bool((length >= 4 * WINDOW).all() and (length < len(samples)).all() and length.sum() == len(samples))
    check_file(path, fits, f"the lengths of the recordings do not fit its {len(samples)} samples")
    x, recording, test = [], [], []
    for number, part in enumerate(np.split(samples.astype(np.float64), length.cumsum()[:-1])):
        border = int(TRAINING_SHARE * len(part))
        for is_test, piece in enumerate((part[:border], part[border:])):
            x.append(describe_windows(piece))
            recording += [number] * len(x[-1])
            test += [bool(is_test)] * len(x[-1])
    y, client = exercise[recording], subject[recording]
    dataset = dataset_of("watch", np.concatenate(x), y, client=client, test=np.array(test))
    wearers = tuple(f"wearer {name}" for name in dataset.client_names)
    return replace(dataset, classes=exercises, client_names=wearers)


def describe_windows(samples: Array) -> Array:
    """Return of each window and axis mean, standard deviation, least, greatest, mean absolute step [windows, 30]."""
    windows = np.lib.stride_tricks.sliding_window_view(samples, WINDOW, axis=0)[::HOP]  # [windows, axes, WINDOW]
    steps = np.abs(np.diff(windows, axis=-1)).mean(-1)
    parts = [windows.mean(-1), windows.std(-1), windows.min(-1), windows.max(-1), steps]
    return np.stack(parts, axis=-1).reshape(len(windows), -1)


def load_sentiment(path: Path, classes: tuple[str, ...]) -> Dataset:
    """Read rated texts; keep those with a clear rating, once in each domain, as hashed words and pairs of words."""
    from sklearn.feature_extraction.text import HashingVectorizer

    header, *lines = _read_xz(path).removesuffix("\n").split("\n")
    check_file(path, header == "domain\tvalence\ttext", f"its columns are {header!r:.60}, not domain, valence, text")
    rows = [line.split("\t") for line in lines]
    for number, row in enumerate(rows, 1):
        check_file(path, len(row) == 3, f"row {number} has {len(row)} values, not 3")
    _check_counts(path, np.array([row[0] for row in rows]), DOMAINS)
    bounds: Allowed = {"valence": Between(-MOST_VALENCE, MOST_VALENCE)}
    valence = _read_values(path, [[row[1]] for row in rows], bounds)[:, 0]
    check_file(path, not np.isnan(valence).any(), "a text has no valence")
    kept: dict[tuple[str, str], float] = {}
    for (domain, _, text), value in zip(rows, valence.tolist(), strict=True):
        if abs(value) >= NEUTRAL:
            kept.setdefault((domain, text), value)
    hashing = HashingVectorizer(n_features=BUCKETS, ngram_range=(1, 2), norm="l2", dtype=np.float32)
    x = hashing.transform([text for _, text in kept]).toarray()
    y = (np.array([*kept.values()]) > 0).astype(np.int64)
    # By the text itself: the same texts in every run, and a text of two domains never trains one and tests the other.
    test = np.array([hashlib.sha256(text.encode()).digest()[0] < TEXTS_FOR_TEST * 256 for _, text in kept])
    dataset = dataset_of("sentiment", x, y, client=np.array([domain for domain, _ in kept]), test=test)
    return replace(dataset, classes=classes)


def _read_xz(path: Path) -> str:
    """Unpack a text, with a bound on its size and on the memory that takes."""
    check_size(path, LARGEST_TEXT)
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=LARGEST_DICTIONARY)
        content = unpacker.decompress(path.read_bytes(), max_length=LARGEST_TEXT + 1)
        check_file(path, len(content) <= LARGEST_TEXT, f"it would unpack to more than {LARGEST_TEXT:,} bytes")
        check_file(path, unpacker.eof and not unpacker.unused_data, "it is incomplete, or something follows its end")
        return content.decode("utf-8")
    except (OSError, lzma.LZMAError, ValueError) as error:
        if isinstance(error, PfedlaError):
            raise
        raise PfedlaError(f"{path}: damaged ({error}); fetch it again") from None
