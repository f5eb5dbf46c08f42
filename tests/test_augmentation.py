"""Random crop and flip: the gather against a plain loop, drawn from the seed, the same on both engines."""

import numpy as np
import pytest
import torch
from conftest import NOTHING, TinyNet, assert_same, budget, engine_for, play, toy_federation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from pfedla import simulate
from pfedla.algorithms import create
from pfedla.core.contracts import generator
from pfedla.core.errors import PfedlaError
from pfedla.core.models import SmallCNN
from pfedla.core.rounds import everyone
from pfedla.core.tasks import task_of
from pfedla.core.training import PADDING, cropped, draw_crops
from pfedla.data.federation import Federation, federation_of


def plainly(image: torch.Tensor, down: int, right: int, mirrored: int) -> torch.Tensor:
    """The twin: pad, cut, mirror, one image at a time."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * PADDING, width + 2 * PADDING)
    padded[:, PADDING : PADDING + height, PADDING : PADDING + width] = image
    cut = padded[:, down : down + height, right : right + width]
    return cut.flip(2) if mirrored else cut


@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 6),
    channels=st.integers(1, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_crops_equal_the_plain_loop(count: int, channels: int, height: int, width: int, seed: int) -> None:
    draws = generator(seed, "test")
    images = torch.randn(2, count, channels, height, width, generator=draws)
    crops = draw_crops(2, count, draws)
    for one, moves in zip(images, crops, strict=True):
        expected = torch.stack([plainly(image, *move.tolist()) for image, move in zip(one, moves, strict=True)])
        assert torch.equal(cropped(one, moves), expected)
    assert torch.equal(vmap(cropped)(images, crops), torch.stack([cropped(*pair) for pair in zip(images, crops, strict=True)]))


def test_all_moves_and_both_sides_are_drawn() -> None:
    crops = draw_crops(3, 2000, generator(0, "test")).flatten(0, 1)
    assert crops.amin(0).tolist() == [0, 0, 0]
    assert crops.amax(0).tolist() == [2 * PADDING, 2 * PADDING, 1]
    assert crops[:, 2].float().mean().item() == pytest.approx(0.5, abs=0.03)
    assert not torch.equal(draw_crops(1, 9, generator(0, "crops", 1, 0)), draw_crops(1, 9, generator(0, "crops", 2, 0)))


@pytest.fixture
def photos() -> Federation:
    rng = np.random.default_rng(0)
    y = np.arange(120) % 3
    x = rng.integers(0, 200, (120, 8, 8, 3)) + 18 * y[:, None, None, None]
    return federation_of(x.astype(np.uint8), y, np.arange(120) // 40)


def algorithm(augment: bool):
    torch.manual_seed(0)
    return create("fedavg", task_of(SmallCNN((3, 8, 8), 3)), budget(0.05, 2, 8, augment))


def test_engines_agree_and_the_seed_decides(photos: Federation) -> None:
    torch.set_num_threads(1)
    models = {}
    for engine, threads, seed in (("threaded", 1, 0), ("threaded", 3, 0), ("vectorized", 1, 0), ("threaded", 1, 1)):
        played, _ = play(algorithm(augment=True), photos, engine=engine, threads=threads, seed=seed)
        models[engine, threads, seed] = played[-1].server["model"]
    first = models["threaded", 1, 0]
    assert_same(first, models["threaded", 3, 0])
    assert_same(first, models["vectorized", 1, 0], 1e-4)
    assert not torch.equal(first["conv1.weight"], models["threaded", 1, 1]["conv1.weight"])


def test_it_is_off_by_default_and_leaves_the_batches_alone(photos: Federation) -> None:
    assert budget(0.1, 1, 1).augment is False
    cohort = everyone(photos.num_examples, 1, 0)
    plain, shaken = (
        engine_for(algorithm(augment), photos, threads=1, recalibrate="unsampled")
        .client(0)
        .local_data(cohort, NOTHING)
        for augment in (False, True)
    )
    assert torch.equal(plain.order, shaken.order)
    assert torch.equal(plain.x, shaken.x)  # shaken when it is used, so not in the data
    assert (plain.crops.numel(), shaken.crops.shape) == (0, (*shaken.order.shape, 3))
    losses = [play(algorithm(augment), photos, rounds=range(1, 2))[0][0].training_loss for augment in (False, True)]
    assert not torch.equal(*losses)


def test_vectors_cannot_be_cropped(pfedla) -> None:
    with pytest.raises(PfedlaError, match=r"examples have the shape \(6,\)"):
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=1, augment=True)
    np.savez("vectors.npz", x=np.random.default_rng(0).normal(size=(400, 6)), y=np.arange(400) % 4)
    code, _, err = pfedla("run", "-d", "vectors.npz", "--clients", 4, "--augment", "--rounds", 1)
    assert code == 2
    assert "augment crops and flips images" in err
