"""A site's own examples: from its file or folder, or its client's part of a public data set."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_tensors
from pfedla.data.federation import Examples, Outline, build_federation, federation_of_one
from pfedla.data.formats import load_arrays
from pfedla.runs.experiment import SITES, Experiment

Split = tuple[Examples, Examples]  # training and test examples


def read_examples(path: Path | None, experiment: Experiment, known: Outline, number: int, kept: Path) -> Split:
    """Return the examples of client `number`. A part of a public data set is kept in the file `kept`."""
    brings_own = experiment.data.dataset == SITES
    if brings_own and path is None:
        raise PfedlaError(
            'the sites of this federation bring their own data: set data="/path/file.npz" in --node-config'
        )
    if not brings_own and path is not None:
        raise PfedlaError(f"this federation splits {experiment.data.dataset} itself: remove data= from --node-config")
    return read_part(experiment, known, number, kept) if path is None else read_own(path, known, experiment.seed)


def read_own(path: Path, known: Outline, seed: int) -> Split:
    """Read a .npz or a folder of .npy files: x, y, and test to mark a ready test split."""
    dataset = load_arrays(path)
    dataset = dataset.match(known.shape, known.classes, pixels=bool(known.mean), whose="this federation")
    if dataset.x.dtype != np.uint8:
        dataset = replace(dataset, x=dataset.x.astype(np.float32))
    one = federation_of_one(dataset, "this site", seed)
    return one.train[0], one.test[0]


def read_part(experiment: Experiment, known: Outline, number: int, kept: Path) -> Split:
    if not kept.exists():
        _, found = build_federation(experiment.data, experiment.seed)
        for key in ("shape", "classes", "mean", "std"):
            here, there = getattr(found, key), getattr(known, key)
            if here != there:
                raise PfedlaError(f"{experiment.data.dataset}: {key} is {here} here and {there} on the server")
        parts = (*found.train[number], *found.test[number])
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(kept, dict(zip(("x", "y", "test_x", "test_y"), parts, strict=True)))
    tensors = load_file(kept)
    return Examples(tensors["x"], tensors["y"]), Examples(tensors["test_x"], tensors["test_y"])
