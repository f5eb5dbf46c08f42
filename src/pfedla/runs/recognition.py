"""Recognise examples that a model was trained on by their content, from hashes that are kept with the model.

RUN/trained_on.npy  sorted 8-byte hashes, one per training example. Whoever has the file can ask whether an example was
trained on, as with the data themselves: it stays where the data are, at a site in the site's own folder.
"""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import numpy as np

from pfedla.core.errors import PfedlaError
from pfedla.core.files import check_size, read_plain_array, write_whole
from pfedla.core.trees import Tree, leaves, map_tree
from pfedla.data.dataset import Array
from pfedla.data.federation import Examples
from pfedla.report.reading import check_sum

TRAINED_ON = "trained_on.npy"
REPEATED = 0.1  # of the test examples: where more are also trained on, content does not tell examples apart


def hash_examples(x: Tree, client: int) -> Array:
    """Return 8 bytes for each example of a client, as uint64; the labels do not count."""
    ordered = [x[key] for key in sorted(x)] if isinstance(x, dict) else x
    arrays = [np.asarray(leaf) for leaf in leaves(map_tree(np.asarray, ordered))]
    rows = [array if array.dtype == np.uint8 else array.astype(np.float32) for array in arrays]
    key = client.to_bytes(8, "little")
    contents = (b"".join(part.tobytes() for part in parts) for parts in zip(*rows, strict=True))
    digests = b"".join(blake2b(content, digest_size=8, key=key).digest() for content in contents)
    return np.frombuffer(digests, "<u8")


def write_trained_on(folder: Path, clients: Mapping[int, tuple[Examples, Examples]]) -> None:
    """Keep the hashes of the clients' training examples, but of those that also are test examples."""
    kept = [np.empty(0, np.uint64)]
    for client, (train, test) in clients.items():
        own, held = (hash_examples(part.x, client) for part in (train, test))
        if np.isin(held, own).mean() <= REPEATED:
            kept.append(np.setdiff1d(own, held))
    hashes = np.unique(np.concatenate(kept))

    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.save(file, hashes)

    write_whole(folder / TRAINED_ON, write)


def find_trained(folder: Path, x: Tree, client: int) -> Array | None:
    """Return for each example whether the client's model was trained on it; None if nothing is known."""
    path = folder / TRAINED_ON
    if not path.exists():  # a run of an older version
        return None
    check_size(path)
    check_sum(folder, path.name)
    try:
        with path.open("rb") as file:
            hashes = read_plain_array(file, path.stat().st_size, path.name)
    except (OSError, ValueError) as error:
        raise PfedlaError(f"{path} is damaged: {error}") from None
    if hashes.dtype != np.uint64 or hashes.ndim != 1:
        raise PfedlaError(f"{path} is damaged: it holds {hashes.dtype} of shape {hashes.shape}")
    return np.isin(hash_examples(x, client), hashes)
