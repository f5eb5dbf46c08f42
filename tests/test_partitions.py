"""Labels to clients: what every partition promises, for any size and seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedla.core.errors import PfedlaError
from pfedla.data.dataset import Dataset, dataset_of
from pfedla.data.datasets import load
from pfedla.data.federation import Federation, build_federation, federation_of
from pfedla.data.partition import DEALT, DEFAULTS, Data, round_shares, round_table, split_statistics
from pfedla.runs.experiment import Experiment, read_toml

DRAWN = [name for name in DEFAULTS if name != "client"]
FINGERPRINTS = "76e88cf9 eb4a686d ed4d3c67 0b42f8f0 ffef2218 ca423255 acddfc14 54c5b3e6"


def numbered(num_classes: int, per_class: int | list[int], ready: bool = False) -> Dataset:
    """Every example is its own number; with a ready split, the even ones are test examples."""
    y = np.repeat(np.arange(num_classes), per_class)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    return dataset_of("numbers", x, y, test=np.arange(len(y)) % 2 == 0 if ready else None)


def section(partition: str, **how: Any) -> Data:
    """Eight clients of three classes, unless told otherwise; without what the partition does not use."""
    how = {"clients": 8, "classes_per_client": 3, **how} | ({"clients": 6} if partition == "toy" else {})
    unused = {key for own in DEFAULTS.values() for key in own} - {"clients", *DEFAULTS[partition]}
    return Data(dataset="own", partition=partition, **{key: how[key] for key in how.keys() - unused})


def split(dataset: Dataset, partition: str, seed: int = 0, **how: Any) -> Federation:
    return build_federation(section(partition, **how), seed, dataset)[1]


def rows(federation: Federation) -> list[np.ndarray]:
    pairs = zip(federation.train, federation.test, strict=True)
    return [torch.cat([train.x, test.x]).flatten().long().numpy() for train, test in pairs]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), partition=st.sampled_from(DRAWN), seed=st.integers(0, 999), ready=st.booleans())
def test_every_partition(data: st.DataObject, partition: str, seed: int, ready: bool) -> None:
    draw = data.draw
    how = section(
        partition,
        clients=draw(st.integers(4, 12)),
        samples_per_client=draw(st.integers(20, 60)),
        overlapping=draw(st.booleans()),
        beta=draw(st.sampled_from([0.1, 0.5, 100.0])),
        shards_per_client=draw(st.integers(1, 4)),
        test_share=draw(st.sampled_from([0.3, 0.2, 0.5])),
    )
    dataset = numbered(9 if partition == "toy" else draw(st.integers(6, 9)), 12 * 60, ready)
    try:
        resolved, federation = build_federation(how, seed, dataset)
    except PfedlaError as refusal:  # a dirichlet draw may leave a client too little
        if partition != "dirichlet" or how.beta > 1 or "beta" not in str(refusal):
            raise
        return
    check(federation, resolved, ready)
    again = build_federation(resolved, seed, dataset)  # same seed, same split; a resolved section stays as it is
    assert (again[0], again[1].fingerprint()) == (resolved, federation.fingerprint())


def check(federation: Federation, how: Data, ready: bool) -> None:
    samples, test_share = how.samples_per_client, how.test_share
    counts = federation.class_counts()
    totals, sizes = counts.sum(1), counts.sum((1, 2))
    assert len(federation) == how.clients
    assert sizes.sum() == how.clients * samples  # exact for each client, but for dirichlet, whose sizes differ
    assert (sizes == samples).all() if how.partition != "dirichlet" else sizes.min() >= 10
    assert all(len(np.unique(own)) == len(own) for own in rows(federation))  # never twice within a client
    if not how.overlapping:
        assert len(np.unique(np.concatenate(rows(federation)))) == sizes.sum()  # disjoint
        assert federation.leaked_share == 0
    assert (counts[:, 1].sum(1) == [round(test_share * size) for size in sizes]).all()  # per class within one
    assert (np.abs(counts[:, 1] - test_share * totals) <= 1).all()
    assert (counts.sum(2) > 0).all()  # nobody empty
    if ready:
        parts = zip(federation.train, federation.test, strict=True)
        assert all((train.x % 2 == 1).all() and (test.x % 2 == 0).all() for train, test in parts)
    held, partition = totals > 0, how.partition  # no class outside the request, and balanced as the rule says
    if partition in ("classes", "twins", "chain", "toy"):
        assert (held.sum(1) == how.classes_per_client).all()
        assert all(np.ptp(row[row > 0]) <= 1 for row in totals)  # the same amount of each
    if partition == "classes":
        assert np.ptp(held.sum(0)) <= 1
    if partition == "dominant":
        assert (np.abs(np.sort(totals)[:, -2:].sum(1) - 0.6 * totals.sum(1)) <= 2).all()
        assert held.all()
    if partition == "twins":
        assert (held[0] == held[1]).all()
        assert (held[0] & held[2]).sum() == how.classes_per_client - 1
        assert not (held[0] & held[3:]).any()
        assert np.ptp(held[2:].sum(0)[~held[0]]) <= 1
    if partition == "chain":
        classes = [sorted((client + np.arange(3)) % totals.shape[1]) for client in range(how.clients)]
        assert [np.flatnonzero(row).tolist() for row in held] == classes
    if partition == "toy":
        assert (held.sum(0) == 2).all()
        assert (held.astype(int) @ held.T)[0].tolist() == [3, 2, 0, 0, 0, 1]
    if partition == "shards":
        assert (held.sum(1) <= 2 * how.shards_per_client + samples / totals.sum(0).min()).all()  # sorted by class
    if partition in DEALT:
        assert np.ptp(totals.sum(0)) <= 1  # the pool has the classes as the data set has them: here all alike


def test_a_seed_gives_the_same_split_for_ever_and_another_seed_another() -> None:
    """Fingerprints of digits, seed 7, as the first version drew them; and those of its run folders."""
    drawn = {name: build_federation(Data(partition=name), 7)[1].fingerprint() for name in DRAWN}
    assert " ".join(drawn[name][:8] for name in DRAWN) == FINGERPRINTS
    assert all(build_federation(Data(partition=name), 8)[1].fingerprint() != drawn[name] for name in DRAWN)
    for path in (Path(__file__).parent / "fixtures" / "format1").glob("*/federation.json"):
        experiment = Experiment.parse(read_toml(path.parent))
        _, federation = build_federation(experiment.data, experiment.seed)
        assert federation.fingerprint() == json.loads(path.read_text())["fingerprint"]


def test_dealt_clients_have_together_the_classes_as_the_data_set_has_them() -> None:
    for partition in DEALT:
        counts = split(numbered(3, [1000, 300, 100]), partition, samples_per_client=70, beta=5.0).class_counts()
        assert counts.sum((0, 1)).tolist() == [400, 120, 40]


def test_overlapping_clients_leak_and_it_is_measured() -> None:
    dataset, how = numbered(9, 60), {"samples_per_client": 60, "overlapping": True, "clients": 20}
    federation = split(dataset, "classes", **how)
    train, test = (
        [row for own in part for row in own.x.flatten().tolist()] for part in (federation.train, federation.test)
    )
    assert federation.leaked_share == np.mean([row in train for row in test]) > 0.5
    for change in ({"overlapping": False}, {"samples_per_client": 200}):  # too many in all; in one class of one client
        with pytest.raises(PfedlaError, match="class '0'"):
            split(dataset, "classes", **how | change)


@pytest.mark.parametrize("partition", DRAWN)
@pytest.mark.parametrize("overlapping", [False, True])
def test_without_a_number_all_that_the_classes_allow_is_taken(partition: str, overlapping: bool) -> None:
    dataset, how = numbered(9, [40, 50, 60] * 3), {"beta": 5.0, "overlapping": overlapping}
    resolved, federation = build_federation(section(partition, **how), 0, dataset)
    sizes, dealt = federation.class_counts().sum((1, 2)), partition in DEALT
    assert sizes.sum() == 450 // resolved.clients * resolved.clients if dealt else np.ptp(sizes) == 0
    if not (dealt and overlapping):
        with pytest.raises(PfedlaError, match=r"samples_per_client|beta"):
            split(dataset, partition, **how, samples_per_client=resolved.samples_per_client + 4)


def test_all_that_a_ready_split_allows_is_taken() -> None:
    for each in (20, 40, 100):  # ten clients, two classes, 70/30 ready: nothing needs to be left over
        rows = np.arange(10 * each)
        dataset = dataset_of("ready", np.zeros((len(rows), 1)), rows % 2, test=rows // 2 % 10 < 3)
        federation = split(dataset, "classes", clients=10, classes_per_client=2)
        assert (federation.class_counts().sum((1, 2)) == each).all()
    rows = np.arange(70_000)  # as MNIST: asked for 70/30, the test part decides
    dataset = dataset_of("mnist-like", np.zeros((70_000, 1)), rows % 10, test=rows >= 60_000)
    assert split(dataset, "classes", clients=100, classes_per_client=4).class_counts()[:, 1].sum() > 9_000


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 999), clients=st.integers(1, 6), test_share=st.sampled_from([0.3, 0.5]))
def test_a_given_client_column(seed: int, clients: int, test_share: float) -> None:
    """Every example stays with its owner; the test share is exact, per class within one."""
    rng = np.random.default_rng(seed)
    writer = np.concatenate([np.repeat(np.arange(clients), 5), rng.integers(0, clients, 60)])
    y = np.concatenate([[0, 1], rng.integers(0, 4, len(writer) - 2)])
    x, names = np.arange(len(y), dtype=np.float32)[:, None], np.array([f"w{number}" for number in range(clients)])
    federation, again = (federation_of(x, y, names[writer], test_share=test_share, seed=seed) for _ in range(2))
    assert (federation.names, federation.fingerprint()) == (tuple(names), again.fingerprint())
    for client, own in enumerate(rows(federation)):
        assert sorted(own) == np.flatnonzero(writer == client).tolist()
    counts = federation.class_counts()
    assert counts[:, 1].sum(1).tolist() == [round(test_share * size) for size in counts.sum((1, 2))]
    assert (np.abs(counts[:, 1] - test_share * counts.sum(1)) <= 1).all()


def test_the_scarce_class_is_named() -> None:
    rows = np.arange(60)
    ready = dataset_of("ready", np.zeros((60, 1)), rows % 3, test=(rows % 2 == 0) & (rows % 3 > 0))
    with pytest.raises(PfedlaError, match="class '0'"):
        split(ready, "classes", clients=2)


@pytest.mark.parametrize(
    ("partition", "samples", "how", "key"),
    [
        ("classes", 8, {}, "samples_per_client"),
        ("dominant", 100, {"dominant_share": 0.15}, "dominant_share"),
        ("dominant", 100, {"dominant_classes": 10}, "dominant_classes"),
        ("classes", 100, {"classes_per_client": 11}, "classes_per_client"),
        ("chain", 100, {"classes_per_client": 10}, "classes_per_client"),
        ("twins", 100, {"classes_per_client": 6}, "classes_per_client"),
        ("twins", 100, {"clients": 3}, "clients"),
        ("shards", 3, {"shards_per_client": 4}, "shards_per_client"),
        ("dirichlet", 30, {"beta": 1e-4, "clients": 40}, "beta"),
        ("iid", 1, {}, "test examples"),
        ("iid", 10**9, {"overlapping": True}, "samples_per_client"),
    ],
)
def test_partitions_that_would_break_their_rule_are_refused(partition, samples, how: dict[str, Any], key: str) -> None:
    with pytest.raises(PfedlaError, match=key):
        split(load("digits"), partition, samples_per_client=samples, **{"clients": 4, **how})


def test_own_arrays_can_be_split_by_any_rule_and_nothing_asked_for_is_ignored() -> None:
    x, y = np.zeros((900, 4)), np.arange(900) % 9
    federation = federation_of(x, y, partition="dirichlet", clients=np.int64(4), beta=5)
    assert federation.num_examples.sum() == pytest.approx(630, abs=3)
    assert [len(federation_of(x, y, partition=name)) for name in (None, "toy", "chain")] == [10, 6, 8]
    wrong: list[dict[str, Any]] = [{"overlaping": True}, {"partition": "client"}, {"test_share": 1.0}]
    wrong += [{"clients": 10**30}, {"beta": 0.1}, {"classes_limit": 5, "partition": "toy"}]
    wrong += [{"clients": 7, "client": y}, {"test_share": 0.5, "client": y, "test": np.arange(900) % 2 == 0}]
    for asked in wrong:
        with pytest.raises(PfedlaError, match=next(iter(asked))):
            federation_of(x, y, **asked)


@settings(deadline=None)
@given(st.integers(1, 15), st.integers(1, 15), st.integers(0, 10**6), st.floats(0.1, 1), st.booleans())
def test_tables_are_rounded_both_ways(clients: int, classes: int, seed: int, held: float, even: bool) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.random((clients, classes)) * (rng.random((clients, classes)) < held)
    shares[:, 0] += shares.sum(1) == 0
    shares = (shares > 0) * 1.0 if even else shares
    exact = rng.integers(1, 60, (clients, 1)) * shares / shares.sum(1, keepdims=True)
    counts = round_table(exact)
    assert (np.abs(counts - exact) < 1).all()
    assert (counts.sum(1) == np.round(exact.sum(1))).all()
    assert (np.abs(counts.sum(0) - exact.sum(0)) < 1).all()
    assert (counts[shares == 0] == 0).all()
    alone, total = round_shares(shares[0], seed % 500), seed % 500
    assert alone.sum() == total
    assert (np.abs(alone - total * shares[0] / shares[0].sum()) <= 1 + 1e-6).all()


def test_a_hundred_classes_are_all_asked_for_and_tested_alike() -> None:
    """CIFAR-100's non-IID_2 for a hundred clients takes all its 600 images of every class, no more."""
    dataset = numbered(100, 600)
    how, federation = build_federation(section("dominant", clients=100, samples_per_client=600), 0, dataset)
    assert (how.dominant_classes, how.classes_per_client) == (6, "auto")
    assert (federation.class_counts().sum(0) == [[420], [180]]).all()


def test_statistics_by_hand() -> None:
    """Client 0 has four classes alike, 1 one of them, 2 another."""
    both = np.array([[4, 4, 4, 4], [8, 0, 0, 0], [0, 2, 0, 0]])
    numbers = split_statistics(np.stack([both, both], axis=1))
    assert numbers["label_entropy_bits"] == {"mean": pytest.approx(2 / 3), "min": 0.0, "max": 2.0}
    assert numbers["mean_pairwise_distance"] == pytest.approx((0.75 + 0.75 + 1) / 3)
    assert numbers["classes_per_client"] == {"mean": 2.0, "min": 1, "max": 4}
    assert split_statistics(np.ones((1, 2, 3), int))["mean_pairwise_distance"] == 0


def test_a_smaller_beta_is_more_heterogeneous() -> None:
    hows = [{"samples_per_client": 500, "beta": beta} for beta in (0.1, 0.5, 5.0, 500.0)]
    counts = [split(numbered(10, 1000), "dirichlet", **how).class_counts() for how in hows]
    distances = [split_statistics(one)["mean_pairwise_distance"] for one in counts]
    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 0.7 > 0.1 > distances[-1]
