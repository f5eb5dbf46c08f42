"""FedBN, FedRep, LG-FedAvg and fine-tuned FedAvg: what is shared, what stays, in which order it is trained."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import TinyNet, assert_same, budget, engine_for, make, play, toy_federation
from torch import nn

from pfedla import simulate
from pfedla.algorithms import create
from pfedla.core.contracts import Cohort, LocalData, Payload
from pfedla.core.errors import NotApplicableError, PfedlaError
from pfedla.core.models import PaperCNN
from pfedla.core.rounds import everyone, payload_bytes
from pfedla.core.tasks import task_of
from pfedla.core.training import batch_bounds
from pfedla.data.federation import Federation

COHORT = Cohort(1, 0, torch.arange(2), torch.tensor([1, 3]))


def local_data(count: int = 12, epochs: int = 3, seed: int = 0) -> LocalData:
    draws = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 6, generator=draws), torch.randint(3, (count,), generator=draws)
    return LocalData(x, y, torch.stack([torch.randperm(count, generator=draws) for _ in range(epochs)]))


def by_hand(module: nn.Module, data: LocalData, lr: float, batch_size: int, phases: list[tuple[range, str, bool]]) -> nn.Module:
    """The slow twin: torch.optim on the layers whose names match, epoch by epoch; statistics put back where they must stay."""
    module.train()
    for epochs, which, keep in phases:
        moving = [p for name, p in module.named_parameters() if name.startswith("fc2") == (which == "head") or which == "all"]
        optimizer = torch.optim.SGD(moving, lr=lr)
        for epoch in epochs:
            for start, stop in batch_bounds(len(data.y), batch_size):
                rows = data.order[epoch][start:stop]
                before = {name: value.clone() for name, value in module.named_buffers()}
                module.zero_grad()
                F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()
                optimizer.step()
                if keep:
                    for name, value in module.named_buffers():
                        value.copy_(before[name])
    return module


# FedBN


def test_fedbn_keeps_all_five_tensors_of_every_batchnorm_at_home() -> None:
    algorithm = make("fedbn", batch_norm=True)
    five = {"bn.weight", "bn.bias", "bn.running_mean", "bn.running_var", "bn.num_batches_tracked"}
    assert algorithm.init_client().keys() == five
    server = algorithm.init_server(2, seed=0)
    assert not five & server["model"].keys()
    downloads = algorithm.download(server, COHORT)
    assert downloads.sent[0].tolist() == [True, False, True]
    result = algorithm.local_update(algorithm.init_client(), downloads.rows(0), local_data(epochs=2))
    assert result.upload.tensors.keys() == server["model"].keys()
    assert not torch.equal(result.client["bn.weight"], algorithm.init_client()["bn.weight"])


def test_batchnorm_is_known_by_its_type_not_by_its_name() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2 * 36, 3), nn.BatchNorm1d(3))
    algorithm = create("fedbn", task_of(module), budget(0.1, 1, 4))
    assert algorithm.private_layers() == [1, 3]


def test_fedbn_without_batchnorm_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="the model has none"):
        make("fedbn").check(3)
    with pytest.raises(PfedlaError, match="the model has none"):
        simulate(toy_federation(), TinyNet(), "fedbn", rounds=1)
    make("fedbn", batch_norm=True).check(3)


def test_batchnorm_without_parameters_is_batchnorm_too() -> None:
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    algorithm = create("fedbn", task_of(module), budget(0.1, 1, 4))
    algorithm.check(3)
    assert algorithm.init_client().keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_fedbns_shared_layers_are_fedavgs_in_the_first_round(federation: Federation) -> None:
    fedbn, fedavg = (
        play(make(name, batch_norm=True), federation, rounds=range(1, 2))[0][0].server["model"] for name in ("fedbn", "fedavg")
    )
    assert_same(fedbn, {name: fedavg[name] for name in fedbn})
    later = [play(make(name, batch_norm=True), federation)[0][-1].server["model"] for name in ("fedbn", "fedavg")]
    assert not torch.equal(later[0]["fc1.weight"], later[1]["fc1.weight"])


# FedRep


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fedrep_trains_the_head_then_the_body(batch_norm: bool) -> None:
    algorithm = make("fedrep", batch_norm=batch_norm, epochs=3, batch_size=5, head_epochs=2)
    data = local_data(epochs=3)
    download = algorithm.download(algorithm.init_server(2, seed=0), COHORT).rows(0)
    result = algorithm.local_update(algorithm.init_client(), download, data)
    twin = by_hand(TinyNet(batch_norm), data, 0.1, 5, [(range(2), "head", True), (range(2, 3), "body", False)])
    assert_same(result.model, {name: value.detach() for name, value in twin.state_dict().items()}, tolerance=1e-6)


def test_batchnorm_statistics_do_not_move_in_the_head_phase() -> None:
    algorithm = make("fedrep", batch_norm=True, epochs=2, head_epochs=2, body_epochs=0)
    download = algorithm.download(algorithm.init_server(2, seed=0), COHORT).rows(0)
    client = algorithm.init_client()
    result = algorithm.local_update(client, download, local_data(epochs=2))
    assert_same({n: result.client[n] for n in client if "bn" in n}, {n: v for n, v in client.items() if "bn" in n})
    assert not torch.equal(result.client["fc2.weight"], client["fc2.weight"])


def test_fedrep_uploads_the_body_alone() -> None:
    algorithm = make("fedrep")
    server = algorithm.init_server(2, seed=0)
    downloads = algorithm.download(server, COHORT)
    assert server["model"].keys() == {"fc1.weight", "fc1.bias"}
    body = 4 * (6 * 5 + 5)
    assert payload_bytes(downloads, algorithm.task.layers).tolist() == [body, body]
    result = algorithm.local_update(algorithm.init_client(), downloads.rows(0), local_data(epochs=2))
    upload = Payload({n: v[None] for n, v in result.upload.tensors.items()}, result.upload.sent[None])
    assert payload_bytes(upload, algorithm.task.layers).tolist() == [body]
    paper = create("fedrep", task_of(PaperCNN((1, 28, 28), 10, batch_norm=False)), budget(0.1, 5, 32))
    assert [paper.task.layers.names[layer] for layer in paper.private_layers()] == ["fc3"]


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fedrep_with_nothing_private_and_no_head_epochs_is_fedavg(federation: Federation, batch_norm: bool) -> None:
    fedrep = make("fedrep", batch_norm=batch_norm, private="", head_epochs=0)
    shared, model = (
        play(algorithm, federation)[0][-1].server["model"] for algorithm in (fedrep, make("fedavg", batch_norm=batch_norm))
    )
    assert_same(shared, {name: model[name] for name in shared})


def test_fedreps_epochs_share_the_local_budget() -> None:
    assert make("fedrep", epochs=5)._epochs() == (2, 3)
    assert make("fedrep", epochs=5, head_epochs=4)._epochs() == (4, 1)
    assert make("fedrep", epochs=5, body_epochs=1)._epochs() == (4, 1)
    for options in ({"head_epochs": 4, "body_epochs": 4}, {"head_epochs": 6}):
        with pytest.raises(PfedlaError, match="the local budget is 5 epochs"):
            make("fedrep", epochs=5, **options).check(3)
    with pytest.raises(NotApplicableError, match="leaves no epoch to the head"):
        make("fedrep", epochs=1).check(3)
    make("fedrep", epochs=1, private="", head_epochs=0).check(3)
    with pytest.raises(PfedlaError, match="choose one of: fc1, fc2"):
        make("fedrep", private="fc9").check(3)
    with pytest.raises(NotApplicableError, match="the model has none"):
        create("fedrep", task_of(nn.Conv2d(1, 2, 3)), budget(0.1, 2, 4)).check(3)


# LG-FedAvg


def test_lg_fedavg_shares_the_last_layers_alone() -> None:
    algorithm = make("lg-fedavg", batch_norm=True)
    server = algorithm.init_server(2, seed=0)
    assert server["model"].keys() == {"fc2.weight", "fc2.bias"}
    assert algorithm.download(server, COHORT).sent[0].tolist() == [False, False, True]
    two = {name: torch.stack([torch.zeros_like(value), 4 * torch.ones_like(value)]) for name, value in server["model"].items()}
    after = algorithm.aggregate(server, COHORT, algorithm.download(server, COHORT), Payload(two, torch.ones(2, 3).bool()))
    assert (after["model"]["fc2.weight"] == 3.0).all()  # one and three examples
    with pytest.raises(NotApplicableError, match="none would be local"):
        make("lg-fedavg", shared_layers=2).check(3)


def test_lg_fedavg_trains_everything_at_once() -> None:
    algorithm = make("lg-fedavg", epochs=3, batch_size=5)
    data = local_data(epochs=3)
    download = algorithm.download(algorithm.init_server(2, seed=0), COHORT).rows(0)
    result = algorithm.local_update(algorithm.init_client(), download, data)
    twin = by_hand(TinyNet(), data, 0.1, 5, [(range(3), "all", False)])
    assert_same(result.model, {name: value.detach() for name, value in twin.state_dict().items()}, tolerance=1e-6)


# Fine-tuned FedAvg


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("epochs", ["auto", 1])
def test_fine_tuning_is_fedavg_with_other_personal_models(federation: Federation, batch_norm: bool, epochs: int | str) -> None:
    plain = make("fedavg", batch_norm=batch_norm)
    tuned = make("fedavg-ft", batch_norm=batch_norm, fine_tuning_epochs=epochs)
    one, other = (play(algorithm, federation)[0] for algorithm in (plain, tuned))
    assert_same(one[-1].server["model"], other[-1].server["model"])
    assert not torch.equal(one[-1].evaluation.loss, other[-1].evaluation.loss)
    with engine_for(tuned, federation, threads=1, recalibrate="never") as engine:
        cohort = everyone(federation.num_examples, 4, 0)
        model = engine.personal_models(cohort, tuned.download(other[-1].server, cohort))[3]
        data = engine.client(3).local_data(cohort, tuned.download(other[-1].server, cohort))
    module = TinyNet(batch_norm)
    module.load_state_dict(other[-1].server["model"])
    twin = by_hand(module, data, 0.1, 5, [(range(2 if epochs == "auto" else epochs), "all", False)])
    assert_same(model, {name: value.detach() for name, value in twin.state_dict().items()}, tolerance=1e-6)


def test_fine_tuning_has_no_more_than_the_local_budget() -> None:
    with pytest.raises(PfedlaError, match="the local budget is 2 epochs"):
        make("fedavg-ft", fine_tuning_epochs=3).check(3)


def test_fields_are_the_options() -> None:
    names = {field.name for field in dataclasses.fields(make("fedrep"))} - {"task", "training"}
    assert names == {"private", "head_epochs", "body_epochs"}
