"""Random crop and flip: the gather equals a plain loop, is drawn from the seed, and is the same on both engines."""

import numpy as np
import pytest
import torch
from conftest import NOTHING, TinyNet, assert_same, budget, engine_for, play, toy_federation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from pfedla import PfedlaError, simulate
from pfedla.algorithms import create
from pfedla.core.contracts import Algorithm, generator
from pfedla.core.models import SmallCNN
from pfedla.core.rounds import everyone
from pfedla.core.tasks import task_of
from pfedla.core.training import PADDING, crop, draw_crops
from pfedla.data.federation import Federation, federation_of


def crop_plainly(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """The slow twin: pad, cut, mirror, one image at a time."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * PADDING, width + 2 * PADDING)
    padded[:, PADDING : PADDING + height, PADDING : PADDING + width] = image
    cut = padded[:, down : down + height, right : right + width]
    return cut.flip(2) if mirrored else cut


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_crops_equal_the_plain_loop(count: int, channels: int, height: int, width: int, seed: int) -> None:
    draws = generator(seed, "test")
    images = torch.randn(2, count, channels, height, width, generator=draws)
    crops = draw_crops(2, count, draws)
    for one, moves in zip(images, crops, strict=True):
        expected = [crop_plainly(image, *move.tolist()) for image, move in zip(one, moves, strict=True)]
        assert torch.equal(crop(one, moves), torch.stack(expected))
    one_by_one = [crop(*pair) for pair in zip(images, crops, strict=True)]
    assert torch.equal(vmap(crop)(images, crops), torch.stack(one_by_one))


def test_all_moves_and_both_sides_are_drawn() -> None:
    crops = draw_crops(3, 2000, generator(0, "test")).flatten(0, 1)
    assert crops.amin(0).tolist() == [0, 0, 0]
    assert crops.amax(0).tolist() == [2 * PADDING, 2 * PADDING, 1]
    assert crops[:, 2].float().mean().item() == pytest.approx(0.5, abs=0.03)


def photos() -> Federation:
    y = np.arange(120) % 3
    x = np.random.default_rng(0).integers(0, 200, (120, 8, 8, 3)) + 18 * y[:, None, None, None]
    return federation_of(x.astype(np.uint8), y, np.arange(120) // 40)


def algorithm(augment: bool) -> Algorithm:
    torch.manual_seed(0)
    return create("fedavg", task_of(SmallCNN((3, 8, 8), 3)), budget(0.05, 2, 8, augment))


def test_engines_agree_and_the_seed_decides() -> None:
    first, threads, stacked, other = (
        play(algorithm(augment=True), photos(), engine=engine, threads=threads, seed=seed)[0][-1].server["model"]
        for engine, threads, seed in (("threaded", 1, 0), ("threaded", 3, 0), ("vectorized", 1, 0), ("threaded", 1, 1))
    )
    assert_same(first, threads)
    assert_same(first, stacked, 1e-4)
    assert not torch.equal(first["conv1.weight"], other["conv1.weight"])


def test_it_leaves_the_batches_alone() -> None:
    cohort = everyone(photos().num_examples, 1, 0)
    plain, cropped = (
        engine_for(algorithm(augment), photos()).clients[0].local_data(cohort, NOTHING) for augment in (False, True)
    )
    assert torch.equal(plain.order, cropped.order)
    assert torch.equal(plain.x, cropped.x)  # cropped when it is used, so not in the data
    assert (plain.crops.numel(), cropped.crops.shape) == (0, (*cropped.order.shape, 3))
    losses = [play(algorithm(augment), photos(), rounds=range(1, 2))[0][0].training_loss for augment in (False, True)]
    assert not torch.equal(*losses)
    with pytest.raises(PfedlaError, match="augment"):  # vectors cannot be cropped
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=1, augment=True)
