"""Faults on purpose: drawn from the seed, the same for every engine, and doing what they say."""

import json
from pathlib import Path

import pytest
import torch
from conftest import SIZES, TinyNet, assert_same, engine_for, flat, make, methods, play, toy_federation

from pfedla import simulate
from pfedla.core.contracts import Cohort, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.faults import Faults
from pfedla.core.rounds import everyone, sample_cohort
from pfedla.data.federation import Examples, Federation
from pfedla.runs.overrides import with_setting


def cohort(round: int = 1, clients: int = 200, seed: int = 0) -> Cohort:
    return everyone(torch.full((clients,), 9), round, seed)


def test_shares_are_what_they_say_and_come_from_the_seed() -> None:
    faults = Faults(dropout=0.3, stragglers=0.5, attack="nan", attackers=0.25, attack_rate=0.1)
    away = torch.stack([~faults.answering(cohort(round)) for round in range(1, 21)]).float()
    assert away.mean().item() == pytest.approx(0.3, abs=0.03)
    assert (away.mean(0) > 0).all()  # everybody stays away now and then
    epochs = torch.tensor([[faults.epochs(cohort(round), client, 5) for client in range(200)] for round in range(1, 6)])
    assert (epochs < 5).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert set(epochs.unique().tolist()) == {1, 2, 3, 4, 5}
    attackers = faults.attacking(200, seed=0)
    assert len(attackers.unique()) == 50
    assert not torch.equal(attackers, faults.attacking(200, seed=1))
    rate = torch.tensor([faults.attacks(cohort(round), client) for round in range(1, 6) for client in range(200)]).float()
    assert rate.mean().item() == pytest.approx(0.1, abs=0.03)
    assert torch.equal(faults.answering(cohort(3)), faults.answering(cohort(3)))
    assert not torch.equal(faults.answering(cohort(3)), faults.answering(cohort(3, seed=1)))


def test_what_a_client_draws_does_not_depend_on_who_else_is_there() -> None:
    faults = Faults(dropout=0.5, stragglers=0.5)
    some = cohort().only(torch.tensor([3, 70, 199]))
    assert torch.equal(faults.answering(some), faults.answering(cohort())[[3, 70, 199]])


@pytest.mark.parametrize(
    ("attack", "scale", "expected"),
    [("sign-flip", 1.0, [-1.0, 0.0, 4.0]), ("sign-flip", 2.0, [-2.0, -2.0, 5.0]), ("scale", 10.0, [10.0, 22.0, -7.0])],
)
def test_attacks_by_hand(attack: str, scale: float, expected: list[float]) -> None:
    start, trained = {"a": torch.tensor([0.0, 2.0, 3.0])}, {"a": torch.tensor([1.0, 4.0, 2.0])}
    upload = Payload({**trained, "steps": torch.tensor(7)}, torch.ones(1, dtype=torch.bool), {"weights": torch.ones(2)})
    sent = Faults(attack=attack, attackers=1.0, attack_scale=scale).attacked(cohort(), 0, upload, start)
    assert sent.tensors["a"].tolist() == expected
    assert sent.tensors["steps"].item() == 7  # a counter has no sign
    assert sent.extras["weights"].tolist() == [1.0, 1.0]
    assert upload.tensors["a"].tolist() == [1.0, 4.0, 2.0]


def test_noise_is_as_large_as_the_update_it_stands_for() -> None:
    start, trained = {"a": torch.zeros(10_000)}, {"a": torch.full((10_000,), 0.3)}
    upload = Payload(trained, torch.ones(1, dtype=torch.bool))
    noise = Faults(attack="noise", attackers=1.0, attack_scale=2.0)
    sent = noise.attacked(cohort(), 0, upload, start).tensors["a"]
    assert sent.mean().item() == pytest.approx(0.0, abs=0.02)
    assert sent.std().item() == pytest.approx(0.6, rel=0.03)
    assert torch.equal(sent, noise.attacked(cohort(), 0, upload, start).tensors["a"])
    assert not torch.equal(sent, noise.attacked(cohort(round=2), 0, upload, start).tensors["a"])


WORST = Faults(dropout=0.3, stragglers=0.6, attack="sign-flip", attackers=0.34, attack_rate=0.7)


@pytest.mark.parametrize("name", methods("fedrep", "heurpfedla"))
def test_engines_fail_alike(name: str) -> None:
    """Absent clients, fewer epochs and attacks are those of the seed, with any engine and any number of threads."""
    algorithm = make(name, batch_norm=None, epochs=3)
    federation = toy_federation()
    one, two, vectorized = (
        play(algorithm, federation, faults=WORST, threads=threads, engine=engine)
        for threads, engine in ((1, "threaded"), (3, "threaded"), (1, "vectorized"))
    )
    assert_same(flat(one[0][-1].server), flat(two[0][-1].server))
    assert_same(one[1], two[1])
    tolerance = 1e-3 if name == "fedfomo" else 1e-4  # it divides small differences, see test_conformance
    assert_same(flat(one[0][-1].server), flat(vectorized[0][-1].server), tolerance)
    away = [set(played.failures) for played in one[0]]
    expected = [
        set((~WORST.answering(sample_cohort(torch.tensor(SIZES), r, 1.0, 0))).nonzero().flatten().tolist()) for r in (1, 2, 3)
    ]
    assert away == expected == [set(played.failures) for played in vectorized[0]]
    assert sum(map(len, away)) > 0


@pytest.mark.parametrize("name", methods("fedavg", "fedrep", "pfedla"))
def test_a_straggler_does_the_first_of_its_epochs(name: str, federation: Federation) -> None:
    algorithm = make(name, batch_norm=None, epochs=4)
    faults = Faults(stragglers=1.0)
    who = everyone(federation.num_examples, 1, 0)
    with engine_for(algorithm, federation, threads=1, recalibrate="never", faults=faults
    ) as engine:
        downloads = algorithm.download(algorithm.init_server(len(federation), 0), who)
        for client in range(len(federation)):
            epochs = faults.epochs(who, client, 4)
            assert 1 <= epochs < 4
            one = engine.client(client)
            short, whole = (one.local_data(who, downloads, count) for count in (engine._epochs(who, client), None))
            assert torch.equal(short.order, whole.order[:epochs])
        late, in_time = (
            [answer.training_loss.item() for answer in e.train(who, downloads)]
            for e in (engine, engine_for(algorithm, federation, threads=1, recalibrate="never"))
        )
    assert all(torch.tensor(late).isfinite())
    assert late != in_time


@pytest.mark.parametrize("name", [method for method in methods("fedavg", "fedfomo", "pfedla") if method.id != "local"])
def test_sign_flips_and_scaled_updates_reach_the_server(name: str, federation: Federation) -> None:
    """An attack changes what the server has, but only from the attackers' uploads; NaN never gets there."""
    algorithm = make(name, batch_norm=None)
    clean, _ = play(algorithm, federation, rounds=range(1, 2))
    attackers = Faults(attack="sign-flip", attackers=0.34).attacking(len(federation), 0).tolist()
    for attack in ("sign-flip", "scale", "noise"):
        attacked, _ = play(
            algorithm, federation, rounds=range(1, 2), faults=Faults(attack=attack, attackers=0.34, attack_scale=3.0)
        )
        assert not attacked[0].failures
        before, after = flat(clean[0].server), flat(attacked[0].server)
        assert any(not torch.equal(before[key], after[key]) for key in before)
        if "models" in clean[0].server:
            for row, client in enumerate(range(len(federation))):
                same = all(
                    torch.equal(value[row], attacked[0].server["models"][key][row])
                    for key, value in clean[0].server["models"].items()
                )
                assert same == (client not in attackers)
    refused, _ = play(algorithm, federation, rounds=range(1, 2), faults=Faults(attack="nan", attackers=0.34))
    assert sorted(refused[0].failures) == attackers
    assert all(failure.reason == "not finite" for failure in refused[0].failures.values())


def test_pfedla_takes_less_from_sign_flippers_than_from_others() -> None:
    """Eight clients that follow one rule, two of which flip their updates: their weight in the others' mixes falls."""
    draws = torch.Generator().manual_seed(0)

    def examples(count: int) -> Examples:
        x = torch.randn(count, 6, generator=draws)
        return Examples(x, (x.sum(1) > 0).long())

    federation = Federation([examples(40) for _ in range(8)], [examples(9) for _ in range(8)], ("0", "1", "2"))
    faults = Faults(attack="sign-flip", attackers=0.25)
    result = simulate(federation, TinyNet(), "pfedla", rounds=10, local_epochs=2, lr=0.1, faults=faults)
    attackers = faults.attacking(8, 0).tolist()
    honest = [client for client in range(8) if client not in attackers]
    weight = result.alpha[honest][:, :, attackers].sum(-1)
    assert (weight < 0.25).all()  # uniform weights give 2 of 8
    assert weight.mean() < 0.2


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"attack": "sign-flip"}, "the share of the clients"),
        ({"attackers": 0.2}, "give what is sent"),
        ({"attack": "nan", "attackers": 0.01}, "is nobody"),
        ({"stragglers": 0.5, "epochs": 1}, "with one local epoch nobody can do fewer"),
    ],
)
def test_faults_that_do_not_fit_are_refused(section: dict, message: str) -> None:
    epochs = section.pop("epochs", 2)
    with pytest.raises(PfedlaError, match=message):
        simulate(toy_federation(), TinyNet(), "fedavg", rounds=1, local_epochs=epochs, faults=Faults(**section))


@pytest.mark.parametrize(
    "section", [{"attack": "bogus"}, {"dropout": -3.0}, {"attackers": 7.0}, {"stragglers": float("nan")}, {"attack_rate": 2.0}]
)
def test_faults_that_cannot_be_are_refused(section: dict) -> None:
    with pytest.raises(PfedlaError, match=next(iter(section))):
        Faults(**section)


def test_scaled_updates_are_ten_times_as_long_unless_said_otherwise() -> None:
    assert [Faults(attack=attack, attackers=0.5).factor for attack in ("sign-flip", "noise", "scale")] == [1.0, 1.0, 10.0]
    assert Faults(attack="scale", attackers=0.5, attack_scale=3.0).factor == 3.0


RUN = ("run", "-d", "digits", "--clients", 5, "--samples", 60, "--rounds", 3, "--local-epochs", 2, "--model", "mlp")


def test_an_experiment_file_with_faults(pfedla, tmp_path: Path) -> None:
    """[faults] and [uploads] in the file; who fails is in rounds.jsonl, result.json and the summary."""
    (tmp_path / "e.toml").write_text(
        "[faults]\ndropout = 0.3\nattack = 'nan'\nattackers = 0.4\n[uploads]\nnorm_bound = 5\nmax_failed_rounds = 9\n"
    )
    code, out, err = pfedla(*RUN[:1], "e.toml", *RUN[1:], "--out", "r")
    assert code == 0, err
    result = json.loads((tmp_path / "r" / "result.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "r" / "rounds.jsonl").read_text().splitlines()]
    attackers = Faults(attack="nan", attackers=0.4).attacking(5, 0).tolist()
    assert result["attackers"] == attackers
    assert lines[-1]["failures"] == result["failures"]
    refused = {int(client) for client, reasons in result["failures"].items() if "not finite" in reasons}
    assert refused <= set(attackers)
    assert refused
    assert result["refused_uploads"] == sum(reasons.get("not finite", 0) for reasons in result["failures"].values())
    honest = [a for client, a in enumerate(result["accuracy"]["per_client"]) if client not in attackers]
    assert result["honest"]["accuracy"]["mean"] == pytest.approx(sum(honest) / 3)
    assert lines[-1]["honest"]["accuracy"]["mean"] == result["honest"]["accuracy"]["mean"]
    assert "FAULTS on purpose: dropout 0.3, attack nan, attackers 0.4" in out
    assert "2 of 5 clients attack; accuracies are of the 3 honest ones" in out
    assert "not finite, client" in out
    assert "left out: not finite" in err
    assert (tmp_path / "r" / "attackers.png").exists()


def test_a_comparison_under_attack_is_of_the_honest(pfedla, tmp_path: Path) -> None:
    flip = ("--set", "faults.attack=sign-flip", "--set", "faults.attackers=0.4")
    code, out, err = pfedla("compare", "-a", "fedavg,pfedla", *RUN[1:], *flip, "--out", "c")
    assert code == 0, err
    assert "2 of 5 clients attack" in out
    assert "2 of 5 clients attack" in (tmp_path / "c" / "comparison.md").read_text()
    content = json.loads((tmp_path / "c" / "comparison.json").read_text())
    mean = content["fedavg"][0]["honest"]["accuracy"]["mean"]
    assert f"| fedavg | {100 * mean:.1f} |" in (tmp_path / "c" / "comparison.md").read_text()


@pytest.mark.parametrize("attack", ["nan", "noise", "sign-flip", "scale"])
def test_every_attack_can_be_given_on_the_command_line(attack: str) -> None:
    assert with_setting({}, f"faults.attack={attack}") == {"faults": {"attack": attack}}


def test_one_method_that_gives_up_does_not_take_the_others_with_it(pfedla, tmp_path: Path) -> None:
    """A client that sends enormous numbers breaks FedAvg's common model for everybody; Local does not hear of it."""
    huge = ("--set", "faults.attack=scale", "--set", "faults.attackers=0.4", "--set", "faults.attack_scale=1e30")
    compare = (
        "compare",
        "-a",
        "fedavg,local",
        *RUN[1:],
        "--rounds",
        9,
        *huge,
        "--set",
        "uploads.max_failed_rounds=2",
        "--out",
        "c",
    )
    code, out, err = pfedla(*compare)
    assert code == 1
    assert "uploads.norm_bound from the start, may help" in err
    content = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert "in 2 rounds in a row" in content["fedavg"]["gave_up"]
    assert content["local"][0]["rounds"] == 9
    assert "fedavg: seed 0: in 2 rounds in a row" in out.replace("\n", " ")
    code, _, err = pfedla(*compare, "--resume")
    assert code == 1
    assert "so the run was given up; a larger max_failed_rounds lets it go on" in err
    code, _, err = pfedla(*compare[:-2], "--out", "bounded", "--set", "uploads.norm_bound=5")
    assert code == 0, err


@pytest.mark.parametrize("setting", ["faults.dropout=1", "faults.attack=explode", "uploads.norm_bound=0.5", "faults.atack=nan"])
def test_values_that_are_not_possible(pfedla, setting: str) -> None:
    code, _, err = pfedla(*RUN, "--set", setting)
    assert code == 2
    assert setting.partition("=")[0] in err
