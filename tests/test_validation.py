"""The federation on which options are tuned: a part of the training examples validates, test examples are not there."""

from typing import Any

import numpy as np
import pytest
import torch
from conftest import toy_federation
from hypothesis import given
from hypothesis import strategies as st

from pfedla import federation_of
from pfedla.core.errors import PfedlaError
from pfedla.data.federation import Examples, Federation
from pfedla.data.validation import split_rows


def contents(parts: Any) -> list[bytes]:
    return [row.numpy().tobytes() for part in parts for row in part.x]


def test_it_has_all_training_examples_and_no_test_example() -> None:
    federation = toy_federation()
    found = federation.for_validation(0)
    assert len(found) == len(federation)
    for before, train, validation in zip(federation.train, found.train, found.test, strict=True):
        assert sorted(contents([train, validation])) == sorted(contents([before]))
    assert not set(contents([*found.train, *found.test])) & set(contents(federation.test))


def test_test_examples_change_nothing() -> None:
    """Not even through what is kept beside the examples: the fingerprint has all of it."""
    federation = toy_federation()
    changed = [Examples(test.x[:2] + 100, test.y[:2] * 0) for test in federation.test]
    other = Federation(federation.train, changed, federation.classes)
    assert federation.for_validation(3).fingerprint() == other.for_validation(3).fingerprint()
    assert federation.for_validation(3).fingerprint() != federation.for_validation(4).fingerprint()


def test_a_small_client_is_left_out_and_changes_no_other() -> None:
    federation = toy_federation()
    few = Examples(*(part[:2] for part in federation.train[0]))
    small = Federation([few, *federation.train[1:]], federation.test, federation.classes)
    found = small.for_validation(0)
    assert found.names == small.names[1:]
    assert any("1 clients" in one for one in found.warnings)
    assert contents(found.train) == contents(federation.for_validation(0).train[1:])
    with pytest.raises(PfedlaError, match="validation"):
        small.only([0]).for_validation(0)


def test_clients_that_share_examples_are_refused() -> None:
    draws = np.random.default_rng(0)
    x, y = draws.normal(size=(200, 3)).astype(np.float32), np.arange(200) % 3
    shared = federation_of(x, y, partition="iid", clients=4, samples_per_client=120, overlapping=True)
    with pytest.raises(PfedlaError, match="overlapping"):
        shared.for_validation(0)


@given(st.lists(st.integers(0, 4), min_size=3, max_size=60), st.integers(0, 9))
def test_every_split_is_whole_and_by_class(labels: list[int], seed: int) -> None:
    strata = np.array(labels)
    train, validation = split_rows(strata, np.random.default_rng(seed))
    assert sorted([*train, *validation]) == list(range(len(strata)))
    assert len(validation) >= 1
    assert len(train) >= 2
    counts, held = np.bincount(strata), np.bincount(strata[validation], minlength=strata.max() + 1)
    if (counts > 1).any():
        assert (held < np.maximum(counts, 1)).all()  # every class that is there is trained on
        assert (np.abs(held - counts / 4)[counts > 1] <= 1.5).all()
    else:
        assert len(validation) == 1


def test_survival_is_split_by_event() -> None:
    draws = torch.Generator().manual_seed(0)
    event = (torch.arange(40) < 8).float()
    y = torch.stack([torch.rand(40, generator=draws) + 0.1, event], 1)
    examples = Examples(torch.randn(40, 2, generator=draws), y)
    federation = Federation([examples], [examples], ("censored", "event"), task="survival", targets=("risk",))
    (validation,) = federation.for_validation(0).test
    assert (len(validation.y), int(validation.y[:, 1].sum())) == (10, 2)
