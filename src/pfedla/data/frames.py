"""Tables to arrays: .csv, .tsv, .parquet and pandas frames. Categories become one-hot, text becomes token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pfedla.core.errors import PfedlaError, unknown
from pfedla.core.files import check_size
from pfedla.core.settings import AUTO
from pfedla.core.trees import Tree
from pfedla.data.dataset import Array, Column, Dataset, dataset_of
from pfedla.data.partition import Data

if TYPE_CHECKING:
    from pandas import DataFrame, Series

ENDINGS = (".csv", ".tsv", ".parquet")
LABELS = ("label", "y", "target")  # what the column of labels is called, if nothing is said
MOST_CATEGORIES = 50
STRAY_WORDS = 0.1  # of the cells: so many words in a column of numbers are a mistake
TEXT_LENGTH = 128


def read_table(path: Path) -> "DataFrame":
    check_size(path)
    try:
        import pandas
    except ImportError:
        raise PfedlaError(f"{path}: tables need pandas: pip install 'pfedla[tables]'") from None
    try:
        if (ending := path.suffix.lower()) == ".parquet":
            frame = pandas.read_parquet(path)
        else:
            frame = pandas.read_csv(path, sep="\t" if ending == ".tsv" else ",")
    except Exception as error:  # pandas and pyarrow raise many kinds on damaged files
        raise PfedlaError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    return frame


def dataset_of_frame(
    name: str, frame: "DataFrame", data: Data, task: str = AUTO, columns: Sequence[Column] = (), **given: Any
) -> Dataset:
    """Return the rows of a table as examples; `columns` encodes them as those of another table were.

    `given` has y, client or test where they are not columns of the table.
    """
    frame = frame.reset_index(drop=True)
    frame.columns = [str(column) for column in frame.columns]
    if not len(frame):
        raise PfedlaError(f"{name}: the table has no rows")
    _check_text(name, frame)
    labels = [] if "y" in given else _find_labels(name, frame, data.label)
    client = "" if "client" in given else data.client if data.client != AUTO else "client"
    dropped = [] if data.drop == AUTO else [one.strip() for one in data.drop.split(",")]
    for column in [*labels, *dropped, *([client] if client and data.client != AUTO else [])]:
        if column not in frame:
            raise unknown(f"column of {name}", column, frame.columns)
    if labels:
        given["y"], given["targets"] = _read_labels(name, frame, labels), tuple(labels)
    if client in frame:
        given["client"] = _names(name, frame[client])
    if "test" in frame and "test" not in given:
        given["test"] = _read_test(name, frame["test"])
    features = frame.drop(columns=[*labels, *dropped, client, "test"], errors="ignore")
    kept = np.ones(len(frame), bool)
    if data.missing == "drop":
        kept = _find_complete(name, features, [one.name for one in columns], data.text)
    columns = tuple(columns) or _find_columns(name, features[kept], data)
    x, vocabulary = encode(name, features, columns)
    dataset = dataset_of(name, x, **given, task=task, columns=columns, vocabulary=vocabulary)
    return dataset if kept.all() else dataset.keep(kept)


def _check_text(name: str, frame: "DataFrame") -> None:
    """Refuse names and words that no file could hold: a Python object may be half of a surrogate pair."""
    for label, column in frame.items():
        try:
            "".join([str(label), *(cell for cell in column if isinstance(cell, str))]).encode()
        except UnicodeEncodeError:
            raise PfedlaError(f"{name}: column {label!r} holds text that is not valid Unicode") from None


def _find_labels(name: str, frame: "DataFrame", label: str) -> list[str]:
    if label != AUTO:
        return [one.strip() for one in label.split(",")]
    found = [one for one in LABELS if one in frame]
    if len(found) != 1:
        there = ", ".join(list(frame.columns)[:20])
        raise PfedlaError(f"{name}: say which column is predicted with --label; its columns are {there}")
    return found


def _read_labels(name: str, frame: "DataFrame", labels: list[str]) -> Array:
    columns = [_names(name, frame[label]) for label in labels]
    return columns[0] if len(columns) == 1 else np.stack([_numbers(name, frame[label]) for label in labels], axis=1)


def _read_test(name: str, column: "Series") -> Array:
    if not column.isin([0, 1]).all():  # also True and False
        raise PfedlaError(
            f"{name}: column 'test' marks the test examples: it must hold only true and false, or 0 and 1"
        )
    mask: Array = column.astype(bool).to_numpy(bool)
    return mask


def _names(name: str, column: "Series") -> Array:
    if (missing := column.isna()).any():
        raise PfedlaError(f"{name}: row {missing.argmax() + 1} has no value in column {column.name!r}")
    values: Array = column.to_numpy() if column.dtype.kind in "biuf" else column.astype(str).to_numpy(str)
    return values


def _numbers(name: str, column: "Series") -> Array:
    """Return a column as float64, NaN where a value is missing; name the row of what is no finite number."""
    import pandas

    values: Array = pandas.to_numeric(column, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    with np.errstate(over="ignore"):
        bad = ~np.isfinite(values.astype(np.float32)) & column.notna().to_numpy()
    if bad.any():
        row = int(bad.argmax())
        raise PfedlaError(
            f"{name}: row {row + 1} of column {column.name!r} is no finite number: {column.iloc[row]!r:.40}"
        )
    return values


def _find_complete(name: str, frame: "DataFrame", columns: Sequence[str], text: str) -> Array:
    """Return which rows have a value in every column that is used."""
    used = frame[[one for one in columns if one in frame] or ([text] if text in frame else [*frame])]
    there = used.notna()
    kept: Array = there.all(axis=1).to_numpy(bool)
    if not kept.any():
        worst = there.sum().idxmin()
        advice = 'leave it out with --drop, or use missing = "impute"'
        raise PfedlaError(f"{name}: every row has a missing value, most of them in column {worst!r}; {advice}")
    return kept


def _find_columns(name: str, frame: "DataFrame", data: Data) -> tuple[Column, ...]:
    """Return how each column is encoded; the categories are those of all rows."""
    if data.text != AUTO:
        if data.text not in frame:
            raise unknown(f"column of {name}", data.text, frame.columns)
        if data.tokenizer == AUTO:
            raise PfedlaError(f"text = {data.text!r} needs a tokenizer: --tokenizer PATH of a tokenizer.json")
        length = TEXT_LENGTH if data.text_length == AUTO else data.text_length
        return (Column(data.text, "text", tokenizer=str(Path(data.tokenizer).resolve()), length=int(length)),)
    found = []
    for label, column in frame.items():
        if column.dtype.kind in "iuf":
            found.append(Column(str(label), "number"))
            continue
        if column.dtype.kind in "Mm":
            raise PfedlaError(f"{name}: column {label!r} holds dates; make them numbers, or leave it out with --drop")
        _refuse_stray_words(name, column)
        categories = tuple(sorted(set(column.dropna().astype(str))))
        if len(categories) > MOST_CATEGORIES:
            advice = (
                f"leave an identifier out with --drop, name text with --text (at most {MOST_CATEGORIES} categories)"
            )
            raise PfedlaError(f"{name}: column {label!r} has {len(categories)} different words; {advice}")
        if categories:  # an empty column says nothing
            found.append(Column(str(label), "category", categories))
    if not found:
        raise PfedlaError(f"{name}: there is no column to predict from")
    return tuple(found)


def _refuse_stray_words(name: str, column: "Series") -> None:
    """Refuse a column of numbers in which a few cells hold a word: as categories it would lose its order."""
    import pandas

    known = column.dropna()
    words = pandas.to_numeric(known.astype(str), errors="coerce").isna().to_numpy()
    if 0 < words.sum() <= STRAY_WORDS * len(words):
        place = known.index[int(words.argmax())]
        row, value = int(column.index.get_loc(place)) + 1, known.loc[place]
        advice = "the others are numbers: leave such cells empty, or --drop the column"
        raise PfedlaError(f"{name}: row {row} of column {column.name!r} is {value!r:.40}; {advice}")


def encode(name: str, frame: "DataFrame", columns: Sequence[Column]) -> tuple[Tree, int]:
    """Return the examples, missing numbers as NaN, and the size of the vocabulary (of text)."""
    for column in columns:
        if column.name not in frame:
            raise unknown(f"column of {name}: the run's", column.name, map(str, frame.columns))
    if columns[0].kind == "text":
        return tokenize(name, frame[columns[0].name], columns[0])
    parts = []
    for column in columns:
        if column.kind == "number":
            parts.append(_numbers(name, frame[column.name])[:, None])
        else:  # missing, or a category that the run has not seen: all zeros
            # Filled first: beside NaN, numpy would cut every word to one letter.
            values = _words(frame[column.name])
            parts.append(values[:, None] == np.array(column.categories)[None])
            parts[-1] &= frame[column.name].notna().to_numpy()[:, None]
    return np.concatenate(parts, axis=1).astype(np.float32), 0


def _words(column: "Series") -> Array:
    """Return the cells as words; a code is the same word whether its column is read as 2 or, beside a gap, as 2.0."""
    if column.dtype.kind == "f" and (column.dropna() % 1 == 0).all():
        column = column.astype("Int64")
    words: Array = column.astype(object).fillna("").astype(str).to_numpy(str)
    return words


def tokenize(name: str, texts: "Series", column: Column) -> tuple[Tree, int]:
    """Return {"ids", "mask"} of one length, and the size of the vocabulary."""
    check_size(Path(column.tokenizer))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise PfedlaError(f"{name}: text needs tokenizers: pip install 'pfedla[text]'") from None
    try:
        tokenizer = Tokenizer.from_file(column.tokenizer)
    except Exception as error:  # the library raises Exception itself
        raise PfedlaError(f"{column.tokenizer}: cannot be read ({str(error).splitlines()[0]})") from None
    ids = [tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>")]
    padding = (tokenizer.padding or {}).get("pad_id", next((one for one in ids if one is not None), 0))
    tokenizer.enable_truncation(column.length)
    tokenizer.enable_padding(length=column.length, pad_id=padding)
    encoded = tokenizer.encode_batch(texts.fillna("").astype(str).tolist())
    x = {"ids": np.array([one.ids for one in encoded], np.int64)}
    x["mask"] = np.array([one.attention_mask for one in encoded], np.int64).astype(bool)
    if not x["mask"].any(1).all():  # attention over nothing is not a number
        x["mask"][~x["mask"].any(1), 0] = True
    return x, int(tokenizer.get_vocab_size())
