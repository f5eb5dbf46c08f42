"""Labels to clients: what every partition promises, for any size and seed."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedla.core.errors import PfedlaError
from pfedla.data.datasets import load
from pfedla.data.federation import Federation, federation_of, partitioned
from pfedla.data.own import Dataset, dataset_of
from pfedla.data.partition import leaked_share, quotas_of, split_of
from pfedla.data.recipe import Partition, Recipe, recipe_of
from pfedla.data.rounding import balanced_counts, shares_to_counts
from pfedla.data.rules import DEALT, assign_classes, rule_of
from pfedla.data.statistics import label_entropy, label_shares, mean_pairwise_distance, split_statistics

DRAWN = [name for name in get_args(Partition) if name != "client"]
FIXED = {"toy": {"clients": 6, "classes_per_client": 3}}


def numbered(num_classes: int, per_class: int | list[int], ready: bool = False) -> Dataset:
    """Every example is its own number; with a ready split, the even ones are test examples."""
    y = np.repeat(np.arange(num_classes), per_class)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    return dataset_of("numbers", x, y, test=np.arange(len(y)) % 2 == 0 if ready else None)


def rows(federation: Federation) -> list[np.ndarray]:
    pairs = zip(federation.train, federation.test, strict=True)
    return [torch.cat([train.x, test.x]).flatten().long().numpy() for train, test in pairs]


def recipe(partition: str, **how) -> Recipe:
    return Recipe(**{"partition": partition, "clients": 8, "classes_per_client": 3, **how, **FIXED.get(partition, {})})


@settings(deadline=None, max_examples=200)
@given(
    partition=st.sampled_from(DRAWN), clients=st.integers(4, 12), classes=st.integers(6, 9), samples=st.integers(20, 60),
    seed=st.integers(0, 999), ready=st.booleans(), overlapping=st.booleans(), beta=st.sampled_from([0.1, 0.5, 100.0]),
    shards=st.integers(1, 4), test_share=st.sampled_from([0.3, 0.2, 0.5]),
)  # fmt: skip
def test_every_partition(
    partition: str, clients: int, classes: int, samples: int, seed: int, ready: bool, overlapping: bool, beta: float,
    shards: int, test_share: float,
) -> None:  # fmt: skip
    how = recipe(
        partition, clients=clients, samples_per_client=samples, overlapping=overlapping, beta=beta, shards_per_client=shards,
        test_share=test_share,
    )  # fmt: skip
    dataset = numbered(9 if partition == "toy" else classes, 12 * 60, ready)
    with nullcontext() if partition != "dirichlet" or beta > 1 else suppress_refusal():
        federation, again = (partitioned(dataset, how, seed) for _ in range(2))
        check(federation, again, how, ready)


@contextmanager
def suppress_refusal():
    """A dirichlet draw may leave somebody with too little; this must then be said, and nothing else."""
    try:
        yield
    except PfedlaError as refusal:
        if "use a larger beta" not in str(refusal):
            raise


def check(federation: Federation, again: Federation, how: Recipe, ready: bool) -> None:
    partition, samples, test_share = how.partition, how.samples_per_client, how.test_share
    clients = how.clients
    counts = federation.class_counts()
    totals, sizes = counts.sum(1), counts.sum((1, 2))

    assert len(federation) == clients
    assert all(np.array_equal(a, b) for a, b in zip(rows(federation), rows(again), strict=True))  # same seed, same split
    assert sizes.sum() == clients * samples  # sizes exact: each, but for dirichlet, whose clients are unequal
    assert (sizes == samples).all() if partition != "dirichlet" else sizes.min() >= 10
    everything = np.concatenate(rows(federation))
    assert all(len(np.unique(own)) == len(own) for own in rows(federation))  # never twice within a client
    if not how.overlapping:
        assert len(np.unique(everything)) == len(everything)  # disjoint
        assert federation.leaked_share == 0
    assert (counts[:, 1].sum(1) == [round(test_share * size) for size in sizes]).all()  # 70/30: exact, per class within one
    assert (np.abs(counts[:, 1] - test_share * totals) <= 1).all()
    assert (counts.sum(2) > 0).all()  # nobody empty
    if ready:
        assert all((part.x.long() % 2 == 0).all() for part in federation.test)
        assert all((part.x.long() % 2 == 1).all() for part in federation.train)
    check_rule(partition, totals, how)


def check_rule(partition: str, totals: np.ndarray, how: Recipe) -> None:
    """No class outside the request, and the classes balanced as the rule says."""
    held = totals > 0
    num_classes = totals.shape[1]
    if partition in ("classes", "twins", "chain", "toy"):
        assert (held.sum(1) == how.classes_per_client).all()
        assert all(np.ptp(row[row > 0]) <= 1 for row in totals)  # the same amount of each
    if partition == "classes":
        assert np.ptp(held.sum(0)) <= 1
    if partition == "dominant":
        top_two = np.sort(totals, axis=1)[:, -2:].sum(1)
        assert (np.abs(top_two - 0.6 * totals.sum(1)) <= 2).all()
        assert held.all()
    if partition == "twins":
        assert (held[0] == held[1]).all()
        assert (held[0] & held[2]).sum() == how.classes_per_client - 1
        assert not (held[0] & held[3:]).any()
        assert np.ptp(held[2:].sum(0)[~held[0]]) <= 1
    if partition == "chain":
        for client in range(how.clients):
            assert np.flatnonzero(held[client]).tolist() == sorted((client + np.arange(3)) % num_classes)
    if partition == "toy":
        assert (held.sum(0) == 2).all()
        assert (held.astype(int) @ held.T)[0].tolist() == [3, 2, 0, 0, 0, 1]
    if partition in DEALT:
        assert np.ptp(totals.sum(0)) <= 1  # the pool has the classes as the data set has them: here all alike


def test_shards_have_few_classes_and_iid_all() -> None:
    dataset = numbered(10, 600)
    for shards, most in ((1, 2), (2, 4), (3, 6)):  # a shard spans at most two classes
        counts = partitioned(dataset, recipe("shards", samples_per_client=300, shards_per_client=shards), 0).class_counts()
        assert ((counts.sum(1) > 0).sum(1) <= most).all()
    counts = partitioned(dataset, recipe("iid", samples_per_client=300), 0).class_counts()
    assert (counts.sum(1) > 10).all()


def test_the_smaller_beta_the_more_unlike_the_clients() -> None:
    dataset = numbered(10, 1000)
    distances = []
    for beta in (0.1, 0.5, 5.0, 500.0):
        counts = partitioned(dataset, recipe("dirichlet", samples_per_client=500, beta=beta), 0).class_counts()
        distances.append(mean_pairwise_distance(label_shares(counts)))
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.7
    assert distances[-1] < 0.1


def test_shards_and_dirichlet_keep_the_pools_own_shares() -> None:
    """Classes of unlike sizes: those of the pool are as in the data set."""
    dataset = numbered(3, [1000, 300, 100])
    for partition in DEALT:
        counts = partitioned(dataset, recipe(partition, samples_per_client=70, beta=5.0), 0).class_counts()
        assert counts.sum((0, 1)).tolist() == [400, 120, 40]


@given(seed=st.integers(0, 10**6), partition=st.sampled_from(DRAWN))
@settings(deadline=None, max_examples=40)
def test_another_seed_is_another_split(seed: int, partition: str) -> None:
    dataset = numbered(9, 200)
    how = recipe(partition, samples_per_client=60, beta=5.0)
    one, two = (partitioned(dataset, how, number) for number in (seed, seed + 1))
    assert not all(np.array_equal(a, b) for a, b in zip(rows(one), rows(two), strict=True))


def test_overlapping_clients_leak_and_it_is_measured() -> None:
    dataset = numbered(9, 60)
    how = recipe("classes", samples_per_client=60, overlapping=True, clients=20)
    split = split_of(dataset, how, np.random.default_rng(0))
    leaked = [  # the twin: one test example at a time
        any(row in train for other, train in enumerate(split.train) if other != client)
        for client, test in enumerate(split.test)
        for row in test
    ]
    assert leaked_share(split) == np.mean(leaked)
    assert partitioned(dataset, how, 0).leaked_share > 0.5
    with pytest.raises(PfedlaError, match="lacking"):  # disjoint, there are not so many
        partitioned(dataset, replace(how, overlapping=False), 0)
    with pytest.raises(PfedlaError, match="lacking"):  # nor so many in one class, for one client
        partitioned(dataset, replace(how, samples_per_client=200), 0)


@pytest.mark.parametrize("partition", DRAWN)
@pytest.mark.parametrize("overlapping", [False, True])
def test_all_that_the_classes_allow_is_taken_when_no_number_is_given(partition: str, overlapping: bool) -> None:
    dataset = numbered(9, [40, 50, 60, 40, 50, 60, 40, 50, 60])
    how = recipe(partition, beta=5.0, overlapping=overlapping)
    sizes = partitioned(dataset, how, 0).class_counts().sum((1, 2))
    if partition in DEALT:
        assert sizes.sum() == 450 // how.clients * how.clients
    else:
        assert (sizes == sizes[0]).all()
    if partition not in DEALT or not overlapping:
        with pytest.raises(PfedlaError, match="lacking"):
            partitioned(dataset, replace(how, samples_per_client=int(sizes.mean()) + 4), 0)


@pytest.mark.parametrize("each", [20, 40, 100])
def test_all_of_a_ready_split_is_taken(each: int) -> None:
    """Ten clients, two classes, 70/30 ready: nothing needs to be left over."""
    y = np.arange(10 * each) % 2
    test = np.arange(10 * each) // 2 % 10 < 3
    dataset = dataset_of("ready", np.zeros((10 * each, 1)), y, test=test)
    federation = partitioned(dataset, recipe("classes", clients=10, classes_per_client=2), 0)
    assert (federation.class_counts().sum((1, 2)) == each).all()


def test_a_large_ready_split_of_another_share_is_cut_quickly() -> None:
    """60,000 to train and 10,000 to test, as published; asked for 70/30, the test part decides."""
    y = np.arange(70_000) % 10
    dataset = dataset_of("mnist-like", np.zeros((70_000, 1)), y, test=np.arange(70_000) >= 60_000)
    for partition in ("classes", "iid"):
        counts = partitioned(dataset, recipe(partition, clients=100, classes_per_client=4), 0).class_counts()
        assert counts[:, 1].sum() > 9_000


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 999), clients=st.integers(1, 6), test_share=st.sampled_from([0.3, 0.5]))
def test_a_given_client_column(seed: int, clients: int, test_share: float) -> None:
    """Writers, sites: every example stays with its own; sizes as they come, the test share exact, per class within one."""
    rng = np.random.default_rng(seed)
    writer = np.concatenate([np.repeat(np.arange(clients), 5), rng.integers(0, clients, 60)])
    y = np.concatenate([[0, 1], rng.integers(0, 4, len(writer) - 2)])
    x = np.arange(len(y), dtype=np.float32)[:, None]
    names = np.array([f"writer-{number}" for number in range(clients)])[writer]
    federation, again = (federation_of(x, y, names, test_share=test_share, seed=seed) for _ in range(2))
    assert federation.names == tuple(f"writer-{number}" for number in range(clients))
    for client, (own, same) in enumerate(zip(rows(federation), rows(again), strict=True)):
        assert own.tolist() == same.tolist()
        assert sorted(own) == np.flatnonzero(writer == client).tolist()
    counts = federation.class_counts()
    assert counts[:, 1].sum(1).tolist() == [round(test_share * size) for size in counts.sum((1, 2))]
    assert (np.abs(counts[:, 1] - test_share * counts.sum(1)) <= 1).all()


# Refusals


def test_the_scarce_class_is_named_when_no_number_is_given() -> None:
    with pytest.raises(PfedlaError, match=r"class '4' of numbers has 3 examples for 8 clients"):
        partitioned(numbered(5, [100, 100, 100, 100, 3]), recipe("classes"), 0)
    ready = dataset_of("ready", np.zeros((60, 1)), np.arange(60) % 3, test=(np.arange(60) % 2 == 0) & (np.arange(60) % 3 > 0))
    with pytest.raises(PfedlaError, match="class '0' has no test example in the ready split"):
        partitioned(ready, recipe("iid", clients=2), 0)


def test_a_class_that_lacks_examples_is_named_with_how_many() -> None:
    dataset = numbered(5, [100, 100, 100, 100, 20])
    with pytest.raises(PfedlaError, match=r"class '4' has 20 examples, the partition asks for 100: 80 are lacking"):
        partitioned(dataset, recipe("classes", clients=5, samples_per_client=100, classes_per_client=5), 0)


@pytest.mark.parametrize(
    ("partition", "samples", "how", "message"),
    [
        ("classes", 8, {}, "training and test examples of each"),
        ("chain", 2, {}, "training and test examples of each"),
        ("dominant", 8, {}, "too few for every class"),
        ("dominant", 100, {"dominant_share": 0.15}, "would not prevail"),
        ("dominant", 100, {"dominant_classes": 10}, "at most 9"),
        ("classes", 100, {"classes_per_client": 11}, "needs at least 11 classes, digits has 10"),
        ("chain", 100, {"classes_per_client": 10}, "needs at least 11 classes"),
        ("twins", 100, {"classes_per_client": 6}, "needs at least 12 classes"),
        ("twins", 100, {"clients": 3}, "at least 4 clients"),
        ("toy", 100, {}, "needs exactly 9 classes"),
        ("iid", 500, {}, "4 clients with 500 samples each need 2000 examples, there are 1797: 203 are lacking"),
        ("shards", 500, {}, "203 are lacking"),
        ("shards", 3, {"shards_per_client": 4}, "only 3 samples"),
        ("dirichlet", 30, {"beta": 1e-4, "clients": 40}, "use a larger beta"),
        ("dirichlet", 30, {"beta": 5e-324, "clients": 40}, "use a larger beta"),
        ("dirichlet", 30, {"beta": 1e308}, "at most 1e\\+06"),
        ("iid", 0, {}, "samples_per_client = 0"),
        ("iid", 30, {"test_share": 1.0}, "test_share = 1.0"),
        ("iid", 1, {}, "it needs both"),
        ("iid", 10**9, {"overlapping": True}, "are lacking"),
    ],
)
def test_partitions_that_would_break_their_rule_are_refused(partition: str, samples: int, how: dict, message: str) -> None:
    with pytest.raises(PfedlaError, match=message):
        partitioned(load("digits"), recipe(partition, samples_per_client=samples, **{"clients": 4, **how}), 0)


def test_toy_is_what_it_is() -> None:
    dataset = numbered(9, 100)
    with pytest.raises(PfedlaError, match="'toy' has 6 clients with 3 classes each"):
        partitioned(dataset, Recipe(partition="toy", clients=7, classes_per_client=3), 0)


# From Python


def test_own_arrays_can_be_cut_by_any_rule() -> None:
    x, y = np.zeros((400, 4)), np.arange(400) % 5
    federation = federation_of(x, y, partition="dirichlet", clients=4, beta=5.0)
    assert len(federation) == 4
    assert federation.num_examples.sum() == pytest.approx(280, abs=3)
    assert len(federation_of(x, y, clients=5, samples_per_client=40)) == 5  # classes, unless told otherwise
    assert len(federation_of(np.zeros((900, 4)), np.arange(900) % 9, partition="toy")) == 6  # the same defaults as elsewhere
    assert len(federation_of(np.zeros((900, 4)), np.arange(900) % 9, partition="chain")) == 8
    assert len(federation_of(x, np.arange(400) % 2)) == 10


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"overlaping": True}, "did you mean 'overlapping'"),
        ({"partition": "stripes"}, "unknown partition 'stripes'"),
        ({"partition": "client"}, "has no array 'client'"),
        ({"beta": 0.1}, "beta is used by partition dirichlet only, not by classes"),
        ({"partition": "iid", "classes_per_client": 2}, "used by partition classes, twins, chain, toy only"),
        ({"clients": 500}, "has only 400 examples"),
        ({"client": np.arange(400) % 4, "samples_per_client": 7}, "all are used"),
        ({"client": np.arange(400) % 4, "overlapping": True}, "all are used"),
        ({"client": np.arange(400) % 4, "clients": 7}, "names 4 clients"),
    ],
)
def test_what_would_be_ignored_is_refused(asked: dict, message: str) -> None:
    with pytest.raises(PfedlaError, match=message):
        federation_of(np.zeros((400, 4)), np.arange(400) % 5, **asked)


# Numbers


@given(shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=12), total=st.integers(0, 500))
def test_shares_become_counts_with_the_exact_sum(shares: list[float], total: int) -> None:
    counts = shares_to_counts(np.array(shares), total)
    assert counts.sum() == total
    assert (np.abs(counts - total * np.array(shares) / sum(shares)) <= 1 + 1e-6).all()


@settings(deadline=None)
@given(
    clients=st.integers(1, 15),
    classes=st.integers(1, 15),
    seed=st.integers(0, 10**6),
    held=st.floats(0.1, 1),
    even=st.booleans(),
)
def test_tables_are_rounded_both_ways(clients: int, classes: int, seed: int, held: float, even: bool) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.random((clients, classes)) * (rng.random((clients, classes)) < held)
    shares[:, 0] += shares.sum(1) == 0
    shares = (shares > 0) * 1.0 if even else shares
    exact = rng.integers(1, 60, (clients, 1)) * shares / shares.sum(1, keepdims=True)
    counts = balanced_counts(exact)
    assert (np.abs(counts - exact) < 1).all()
    assert (counts.sum(1) == np.round(exact.sum(1))).all()
    assert (np.abs(counts.sum(0) - exact.sum(0)) < 1).all()
    assert (counts[shares == 0] == 0).all()


def test_a_hundred_classes_are_all_asked_for_and_tested_alike() -> None:
    """CIFAR-100's non-IID_2 for a hundred clients takes all its 600 images of every class, no more."""
    dataset = numbered(100, 600)
    how = recipe_of(dataset, partition="dominant", clients=100, samples_per_client=600)
    assert (how.dominant_classes, how.classes_per_client) == (6, 4)
    quotas = quotas_of(rule_of(dataset, how, np.random.default_rng(0))(600), 0.3)
    assert ((quotas.train + quotas.test).sum(0) == 600).all()
    assert (quotas.test.sum(0) == 180).all()
    few = partitioned(dataset, replace(how, clients=10), 0).class_counts()
    assert (np.abs(few[:, 1].sum(0) - 0.3 * few.sum((0, 1))) < 1).all()


@given(clients=st.integers(1, 40), classes=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_classes_are_assigned_evenly_and_distinct(clients: int, classes: int, seed: int, data: st.DataObject) -> None:
    each = data.draw(st.integers(1, classes))
    holds = assign_classes(clients, classes, each, np.random.default_rng(seed))
    assert (holds.sum(1) == each).all()
    held = holds.sum(0)
    assert held.max() - held.min() <= 1


def test_statistics_by_hand() -> None:
    """Client 0 has four classes alike, 1 one of them, 2 another."""
    both = np.array([[4, 4, 4, 4], [8, 0, 0, 0], [0, 2, 0, 0]])
    counts = np.stack([both, both], axis=1)
    shares = label_shares(counts)
    assert label_entropy(shares).tolist() == [2.0, 0.0, 0.0]
    assert mean_pairwise_distance(shares) == pytest.approx((0.75 + 0.75 + 1) / 3)
    numbers = split_statistics(counts)
    assert numbers["training_examples"] == {"mean": pytest.approx(26 / 3), "min": 2, "max": 16}
    assert numbers["classes_per_client"] == {"mean": 2.0, "min": 1, "max": 4}
    assert mean_pairwise_distance(shares[:1]) == 0


@given(seed=st.integers(0, 999), clients=st.integers(2, 20))
def test_distance_equals_its_plain_twin(seed: int, clients: int) -> None:
    shares = np.random.default_rng(seed).dirichlet(np.ones(5), size=clients)
    plain = [np.abs(shares[i] - shares[j]).sum() / 2 for i in range(clients) for j in range(i)]
    assert mean_pairwise_distance(shares) == pytest.approx(np.mean(plain))
