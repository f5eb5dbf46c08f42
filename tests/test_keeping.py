"""Layers that nobody borrows are not uploaded (keep_below), and come back when somebody does."""

import copy
from typing import Any

import pytest
import torch
from conftest import assert_same, engine_for, flat, make, play, toy_federation

from pfedla.core.codecs import init_links
from pfedla.core.contracts import Algorithm, Cohort, ServerState
from pfedla.core.layers import take
from pfedla.core.rounds import Round
from pfedla.core.settings import WireSettings
from pfedla.data.federation import Federation

NAMES = pytest.mark.parametrize("name", ["pfedla", "heurpfedla", "pfedla-heldout", "pfedla-compact"])
HOW: dict[str, Any] = {"rounds": range(1, 7), "participation": 0.7}


def start_at(algorithm: Algorithm, federation: Federation, logits: torch.Tensor) -> ServerState:
    """A fresh server whose weights are the softmax of `logits` [clients, clients], the same in every layer."""
    server = algorithm.init_server(len(federation), 0)
    server["hypernetworks"]["logits"] += logits.unsqueeze(1)
    return {**server, **init_links(algorithm, len(federation))}


def uploads_of(ran: list[Round], client: int, layer: int = 0) -> list[bool]:
    """Whether the client's layer was uploaded, by round."""
    kept = [int(one.server["kept"]["rounds"][client, layer]) for one in ran]
    return [count == 0 for count in kept]


@NAMES
def test_the_clients_own_part_makes_the_same_mix(name: str, federation: Federation) -> None:
    """With a bound that no weight is below, all is uploaded, and only who adds the own layer differs: by rounding."""
    plain, clients = play(make(name, batch_norm=True), federation, **HOW)
    own, others = play(make(name, batch_norm=True, keep_below=1e-30), federation, **HOW)
    tolerance = 1e-3 if name == "pfedla-heldout" else 1e-4
    server = {group: part for group, part in own[-1].server.items() if group != "kept"}
    assert_same(flat(plain[-1].server), flat(server), tolerance=tolerance)
    assert not own[-1].server["kept"]["rounds"].any()
    assert_same(clients, {name: others[name] for name in clients}, tolerance=tolerance)


@pytest.mark.parametrize("retained", [0, 1])
@pytest.mark.parametrize("upload", ["none", "int8"])
def test_what_nobody_borrows_is_not_missed(retained: int, upload: Any, federation: Federation) -> None:
    """Where everyone has its own model only, keeping all but each third upload is Local training, bit for bit."""
    options = {"hypernetwork": "compact", "keep_below": 0.01, "ask_every": 3, "retained_layers": retained}
    algorithm = make("heurpfedla", **options).model_copy(update={"wire": WireSettings(upload=upload)})
    server = start_at(algorithm, federation, 300 * torch.eye(len(federation)))
    how: dict[str, Any] = {"rounds": range(1, 8), "participation": 1.0}
    ran, clients = play(algorithm, federation, server=server, **how)
    local, alone = play(make("local"), federation, **how)
    assert torch.equal(ran[-1].evaluation.loss, local[-1].evaluation.loss)
    assert_same({name: clients[name] for name in alone}, alone)
    assert uploads_of(ran, 0) == [False, False, True, False, False, True, False]
    one = sum(value[0].nbytes for value in server["models"].values()) if upload == "none" else 1
    if upload == "none":  # two of seven rounds
        assert ran[-1].traffic.up_bytes == 2 * len(federation) * one


def test_the_servers_copy_stays_as_it_was_sent(federation: Federation) -> None:
    algorithm = make("pfedla", hypernetwork="compact", keep_below=0.5, ask_every=3)
    server = start_at(algorithm, federation, torch.zeros(6, 6))
    ran, clients = play(algorithm, federation, server=server, rounds=range(1, 4), participation=1.0)
    first, second, third = (one.server["models"] for one in ran)
    assert_same(server["models"], first)
    assert_same(first, second)
    assert not any(torch.equal(value, third[name]) for name, value in second.items())
    assert_same({name: clients[name] for name in third}, third)  # what was asked for is the client's own layer


def test_alpha_comes_back_and_so_do_the_uploads() -> None:
    """Clients 0 and 1 learn the same, and nobody has borrowed from 1: client 0's weight for it grows all the same."""
    toy = toy_federation((20, 20, 20, 20))
    train, test = list(toy.train), list(toy.test)
    train[1], test[1] = train[0], test[0]
    federation = Federation(train, test, toy.classes)
    options: dict[str, Any] = {"hypernetwork": "compact", "hypernetwork_lr": 5.0, "keep_below": 0.05, "ask_every": 5}
    algorithm = make("pfedla", **options)
    against = torch.zeros(4, 4)
    against[[0, 2, 3], 1] = -4.0
    against[0, 0] = -30.0  # client 0 depends on the others
    server = start_at(algorithm, federation, against)
    ran, _ = play(algorithm, federation, server=copy.deepcopy(server), rounds=range(1, 61), participation=1.0)
    weights = [float(algorithm.alpha(one.server)[0, 0, 1]) for one in ran]
    uploads = uploads_of(ran, 1)
    assert float(algorithm.alpha(server)[0, 0, 1]) < 0.05
    assert uploads[:5] == [False, False, False, False, True]  # asked again
    assert weights[-1] > 0.05
    assert all(uploads[-3:])


@NAMES
def test_it_goes_on_like_a_straight_run(name: str, federation: Federation) -> None:
    algorithm = make(name, keep_below=0.3, ask_every=3)
    straight, clients = play(algorithm, federation, **HOW)
    half, kept = play(algorithm, federation, **{**HOW, "rounds": range(1, 3)})
    rest, again = play(algorithm, federation, **{**HOW, "rounds": range(3, 7)}, server=half[-1].server, clients=kept)
    assert_same(flat(straight[-1].server), flat(rest[-1].server))
    assert_same(clients, again)
    vectorized, _ = play(algorithm, federation, **HOW, engine="vectorized")
    assert_same(flat(straight[-1].server), flat(vectorized[-1].server), tolerance=1e-3)
    assert straight[-1].server["kept"]["rounds"].any()


def test_with_a_robust_warm_up_nobody_adds_its_own(federation: Federation) -> None:
    algorithm = make("pfedla-heldout", keep_below=0.3, warm_up=2, averaging="median")
    server = algorithm.init_server(len(federation), 0)
    cohort = Cohort.everyone(federation.num_examples, 1, 0)
    with engine_for(algorithm, federation) as engine:
        download = algorithm.download(server, cohort).rows(0)
        own = {name: value + 1 for name, value in take(server["models"], 0).items()}
        start = algorithm.start({**engine.clients[0].state, **own}, download)
    for name, value in download.tensors.items():
        assert torch.equal(start[name], value)
