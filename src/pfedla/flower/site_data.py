"""A site's own examples: from a file or folder of its own, or the client's part of a data set everybody has."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.torch import load_file, save_file

from pfedla.core.errors import PfedlaError
from pfedla.core.files import write_whole
from pfedla.data.federation import Examples, Outline, partitioned
from pfedla.data.own import load_arrays
from pfedla.data.recipe import recipe_of
from pfedla.runs.experiment import SITES, Experiment, build_federation


def own_examples(path: Path, outline: Outline, seed: int) -> tuple[Examples, Examples]:
    """Training and test examples of a .npz or a folder of .npy files (x, y, and test to mark a ready test split)."""
    dataset = load_arrays(path)
    dataset = dataset.fitted(outline.shape, outline.classes, pixels=bool(outline.mean), whose="this federation")
    dataset = replace(dataset, client=np.zeros(len(dataset.y), np.int64), client_names=("this one",))
    one = partitioned(dataset, recipe_of(dataset, partition="client"), seed)
    return one.train[0], one.test[0]


def part_examples(experiment: Experiment, outline: Outline, number: int, kept: Path) -> tuple[Examples, Examples]:
    """A client's part of the data set that the experiment names; kept in a file, so that later rounds need not cut it again."""
    if experiment.data.dataset == SITES:
        raise PfedlaError(
            "this federation's sites bring their own data: name yours with --node-config 'data=\"/path/file.npz\"'"
        )
    if not kept.exists():
        _, federation = build_federation(experiment.data, experiment.seed)
        here = (federation.shape, federation.classes, federation.mean, federation.std)
        if here != (outline.shape, outline.classes, outline.mean, outline.std):
            raise PfedlaError(
                f"{experiment.data.dataset} here is not the server's: {here[0]}, {len(here[1])} classes, mean {here[2]}; "
                f"there {outline.shape}, {len(outline.classes)} classes, mean {outline.mean}"
            )
        tensors = dict(zip(("x", "y", "test_x", "test_y"), (*federation.train[number], *federation.test[number]), strict=True))
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_whole(kept, lambda part: save_file({name: value.contiguous() for name, value in tensors.items()}, part))
    tensors = load_file(kept)
    return Examples(tensors["x"], tensors["y"]), Examples(tensors["test_x"], tensors["test_y"])
