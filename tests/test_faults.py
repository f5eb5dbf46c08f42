"""Faults on purpose: drawn from the seed, the same for every engine, and doing what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CLASSES, TinyNet, add_noise, assert_same, engine_for, flat, make, play, toy_federation

from pfedla import simulate
from pfedla.core.contracts import Cohort, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.faults import choose_answering, choose_attackers, falsify, is_attacking, limit_epochs
from pfedla.core.layers import Params
from pfedla.core.settings import Faults
from pfedla.data.federation import Examples, Federation

RUN = ("-d", "digits", "--clients", 5, "--samples", 60, "--rounds", 3, "--local-epochs", 2, "--model", "mlp")


def cohort(round: int = 1, clients: int = 200, seed: int = 0) -> Cohort:
    return Cohort.everyone(torch.full((clients,), 9), round, seed)


def test_shares_are_what_they_say_and_come_from_the_seed() -> None:
    faults = Faults(dropout=0.3, stragglers=0.5, attack="nan", attackers=0.25, attack_rate=0.1)
    away = torch.stack([~choose_answering(faults, cohort(round)) for round in range(1, 21)]).float()
    assert away.mean().item() == pytest.approx(0.3, abs=0.03)
    assert (away.mean(0) > 0).all()  # everybody stays away now and then
    epochs = torch.tensor([limit_epochs(faults, cohort(round), c, 5) for round in range(1, 6) for c in range(200)])
    assert (epochs < 5).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert set(epochs.unique().tolist()) == {1, 2, 3, 4, 5}
    attackers = choose_attackers(faults, 200, seed=0)
    assert len(attackers.unique()) == 50
    assert not torch.equal(attackers, choose_attackers(faults, 200, seed=1))
    ids = attackers.tolist()
    attacks = [is_attacking(faults, cohort(round), client, 200) for round in range(1, 21) for client in ids]
    assert sum(attacks) / len(attacks) == pytest.approx(0.1, abs=0.03)
    assert not torch.equal(choose_answering(faults, cohort(3)), choose_answering(faults, cohort(3, seed=1)))
    some = cohort().only(torch.tensor([3, 70, 199]))  # a client's draw does not depend on who else is there
    assert torch.equal(choose_answering(faults, some), choose_answering(faults, cohort())[[3, 70, 199]])


@pytest.mark.parametrize(
    ("attack", "scale", "expected"),
    [
        ("sign-flip", 1.0, [-1.0, 0.0, 4.0]),
        ("sign-flip", 2.0, [-2.0, -2.0, 5.0]),
        ("scale", "auto", [10.0, 22.0, -7.0]),
        ("free-rider", "auto", [0.0, 2.0, 3.0]),
        ("label-flip", "auto", [1.0, 4.0, 2.0]),  # flipped before training
    ],
)
def test_attacks_by_hand(attack: Any, scale: Any, expected: list[float]) -> None:
    start, trained = {"a": torch.tensor([0.0, 2.0, 3.0])}, {"a": torch.tensor([1.0, 4.0, 2.0])}
    tensors = {**trained, "steps": torch.tensor(7)}
    upload = Payload(tensors, torch.ones(1, dtype=torch.bool), extras={"weights": torch.ones(2)})
    sent = falsify(Faults(attack=attack, attackers=1.0, attack_scale=scale), cohort(), 0, upload, start)
    assert sent.tensors["a"].tolist() == expected
    assert sent.tensors["steps"].item() == 7  # a counter has no sign
    assert sent.extras["weights"].tolist() == [1.0, 1.0]
    assert upload.tensors["a"].tolist() == [1.0, 4.0, 2.0]


def test_noise_is_as_large_as_the_update_it_stands_for() -> None:
    start, upload = {"a": torch.zeros(10_000)}, Payload({"a": torch.full((10_000,), 0.3)}, torch.ones(1))
    noise = Faults(attack="noise", attackers=1.0, attack_scale=2.0)
    sent, again, later = (falsify(noise, cohort(round), 0, upload, start).tensors["a"] for round in (1, 1, 2))
    assert sent.mean().item() == pytest.approx(0.0, abs=0.02)
    assert sent.std().item() == pytest.approx(0.6, rel=0.03)
    assert torch.equal(sent, again)
    assert not torch.equal(sent, later)


@pytest.mark.parametrize("attack", ["sign-flip", "label-flip"])
@pytest.mark.parametrize("name", ["fedrep", "heurpfedla"])
def test_engines_fail_alike(name: str, attack: Any) -> None:
    """Absent clients, fewer epochs and attacks are those of the seed, with any engine."""
    worst = Faults(dropout=0.3, stragglers=0.6, attack=attack, attackers=0.34, attack_rate=0.7)
    algorithm = make(name, batch_norm=None, epochs=3)
    one, two, vectorized = (
        play(algorithm, toy_federation(), faults=worst, threads=threads, engine=engine)
        for threads, engine in ((1, "threaded"), (3, "threaded"), (1, "vectorized"))
    )
    assert_same(flat(one[0][-1].server), flat(two[0][-1].server))
    assert_same(one[1], two[1])
    assert_same(flat(one[0][-1].server), flat(vectorized[0][-1].server), 1e-4)
    away = [set(played.failures) for played in one[0]]
    assert away == [set(played.failures) for played in vectorized[0]]
    assert sum(map(len, away)) > 0


def test_a_straggler_does_the_first_of_its_epochs() -> None:
    algorithm, federation = make("fedavg", epochs=4), toy_federation()
    faults, who = Faults(stragglers=1.0), Cohort.everyone(federation.num_examples, 1, 0)
    downloads = algorithm.download(algorithm.init_server(len(federation), 0), who)
    with engine_for(algorithm, federation, faults=faults) as engine:
        answers = engine.train(who, downloads)
        for client, answer in enumerate(answers):
            epochs = limit_epochs(faults, who, client, 4)
            assert 1 <= epochs < 4
            data = engine.clients[client].local_data(who, downloads)
            short = data._replace(order=data.order[:epochs])
            expected = algorithm.local_update({}, downloads.rows(client), short)
            assert_same(answer.upload.tensors, expected.upload.tensors, 1e-6)


@pytest.mark.parametrize("name", ["fedavg", "fedfomo", "pfedla"])
def test_only_the_attackers_uploads_change_and_nan_never_arrives(name: str) -> None:
    algorithm, federation = make(name, batch_norm=None), toy_federation()
    clean, _ = play(algorithm, federation, rounds=range(1, 2))
    attackers = choose_attackers(Faults(attack="scale", attackers=0.34), len(federation), 0).tolist()
    for attack in ("sign-flip", "scale", "noise"):
        faults = Faults(attack=attack, attackers=0.34, attack_scale=3.0)
        attacked, _ = play(algorithm, federation, rounds=range(1, 2), faults=faults)
        assert not attacked[0].failures
        before, after = flat(clean[0].server), flat(attacked[0].server)
        assert any(not torch.equal(before[key], after[key]) for key in before)
        if "models" in clean[0].server:
            models = attacked[0].server["models"]
            for client in range(len(federation)):
                rows = [torch.equal(v[client], models[key][client]) for key, v in clean[0].server["models"].items()]
                assert all(rows) == (client not in attackers)
    refused, _ = play(algorithm, federation, rounds=range(1, 2), faults=Faults(attack="nan", attackers=0.34))
    reasons = {client: failure.reason for client, failure in refused[0].failures.items()}
    assert reasons == dict.fromkeys(attackers, "not finite")


def first_round(faults: Faults, round: int = 1) -> tuple[list[Params], Payload]:
    """What every client of the toy federation uploads in a round of FedAvg, and what it was sent."""
    algorithm, federation = make("fedavg"), toy_federation()
    who = Cohort.everyone(federation.num_examples, round, 0)
    server = {"model": add_noise(algorithm.init_server(len(federation), 0)["model"], 3)}
    downloads = algorithm.download(server, who)
    with engine_for(algorithm, federation, faults=faults) as engine:
        return [answer.upload.tensors for answer in engine.train(who, downloads)], downloads


@pytest.mark.parametrize("attack", ["label-flip", "initial", "free-rider"])
def test_what_liars_send_that_need_no_arithmetic(attack: Any) -> None:
    honest, downloads = first_round(Faults())
    faults = Faults(attack=attack, attackers=0.34)
    attackers, (sent, _) = choose_attackers(faults, 6, 0).tolist(), first_round(faults)
    federation, algorithm = toy_federation(), make("fedavg")
    flipped = [examples._replace(y=CLASSES - 1 - examples.y) for examples in federation.train]
    with engine_for(algorithm, Federation(flipped, federation.test, federation.classes)) as engine:
        answers = engine.train(Cohort.everyone(federation.num_examples, 1, 0), downloads)
    expected = {
        "label-flip": [answer.upload.tensors for answer in answers],
        "initial": [algorithm.task.initial()] * 6,
        "free-rider": [downloads.rows(client).tensors for client in range(6)],
    }[attack]
    for client in range(6):
        assert_same(sent[client], (expected if client in attackers else honest)[client])


def test_an_attacker_is_honest_before_and_after_the_attack() -> None:
    always = Faults(attack="sign-flip", attackers=0.34)
    late = always.model_copy(update={"attack_from": 3, "attack_until": 4})
    for round, alike in ((2, Faults()), (3, always), (4, always), (5, Faults())):
        for one, other in zip(first_round(late, round)[0], first_round(alike, round)[0], strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("attack", ["label-flip", "initial", "free-rider"])
@pytest.mark.parametrize("name", ["pfedla-heldout", "fedfomo", "pfedme", "heurpfedla"])
def test_every_kind_of_upload_can_be_falsified(name: str, attack: Any) -> None:
    """Also if a run is continued in the middle of the attack."""
    faults = Faults(attack=attack, attackers=0.34, attack_from=2)
    algorithm, federation = make(name, batch_norm=None), toy_federation()
    straight, clients = play(algorithm, federation, faults=faults, participation=0.5)
    half, private = play(algorithm, federation, rounds=range(1, 3), faults=faults, participation=0.5)
    state = {"server": half[-1].server, "clients": private}
    rest, others = play(algorithm, federation, rounds=range(3, 4), faults=faults, participation=0.5, **state)
    assert not any(one.failures for one in straight)
    assert_same(flat(straight[-1].server), flat(rest[-1].server))
    assert_same(clients, others)


@pytest.mark.parametrize("name", ["pfedla", "pfedla-heldout"])
def test_pfedla_takes_less_from_sign_flippers_than_from_others(name: str) -> None:
    """Of eight clients that follow one rule two flip their updates: the others give them less weight."""
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        x = torch.randn(count, 6, generator=draws)
        return Examples(x, (x.sum(1) > 0).long())

    federation = Federation([examples(120) for _ in range(8)], [examples(9) for _ in range(8)], ("0", "1", "2"))
    faults = Faults(attack="sign-flip", attackers=0.25)
    result = simulate(federation, TinyNet(), name, rounds=10, local_epochs=2, lr=0.1, faults=faults)
    attackers = choose_attackers(faults, 8, 0).tolist()
    honest = [client for client in range(8) if client not in attackers]
    assert result.alpha[honest][:, :, attackers].sum(-1).mean() < 0.23  # uniform weights give 2 of 8


@pytest.mark.parametrize(
    "section",
    [
        {"attack": "sign-flip"},
        {"attackers": 0.2},
        {"attack": "nan", "attackers": 0.01},
        {"stragglers": 0.5},
        {"attack": "nan", "attackers": 0.2, "attack_from": 3, "attack_until": 2},
    ],
)
def test_faults_that_do_not_fit_are_refused(section: dict[str, Any]) -> None:
    with pytest.raises(PfedlaError, match=f"faults.{next(reversed(section))}"):
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=1, local_epochs=1, faults=section)


def test_labels_are_flipped_of_classes_only() -> None:
    section = {"attack": "label-flip", "attackers": 0.4}
    federation = toy_federation()
    numbers = [examples._replace(y=examples.x[:, :1]) for examples in (*federation.train, *federation.test)]
    regression = Federation(numbers[:6], numbers[6:], ("y",), task="regression")
    with pytest.raises(PfedlaError, match="label-flip"):
        simulate(regression, torch.nn.Linear(6, 1), "fedavg", rounds=1, local_epochs=1, faults=section)


def test_an_experiment_file_with_faults(pfedla: Any, tmp_path: Path) -> None:
    """[faults] and [uploads] in the file; who fails is in rounds.jsonl and result.json."""
    (tmp_path / "e.toml").write_text(
        "[faults]\ndropout = 0.3\nattack = 'nan'\nattackers = 0.4\n[uploads]\nnorm_bound = 5\nmax_failed_rounds = 9\n"
    )
    code, _, err = pfedla("run", "e.toml", *RUN, "--out", "r")
    assert code == 0, err
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "r" / "rounds.jsonl").read_text().splitlines()]
    attackers = choose_attackers(Faults(attack="nan", attackers=0.4), 5, 0).tolist()
    assert result["attackers"] == attackers
    assert lines[-1]["failures"] == result["failures"]
    refused = {int(client) for client, reasons in result["failures"].items() if "not finite" in reasons}
    assert refused <= set(attackers)
    assert refused
    honest = [a for client, a in enumerate(result["score"]["per_client"]) if client not in attackers]
    assert result["honest"]["score"]["mean"] == pytest.approx(sum(honest) / 3)
