"""pFedHN: its gradient against autograd, its step against torch.optim.SGD, and what must stay as it is."""

from typing import Any

import pytest
import torch
from conftest import TinyNet, assert_same, budget, flat
from torch import nn

from pfedla.algorithms.pfedhn import PFedHN
from pfedla.core.contracts import Cohort, Payload, ServerState
from pfedla.core.rounds import payload_bytes
from pfedla.core.tasks import task_of


def pfedhn(batch_norm: bool = False, dtype: torch.dtype = torch.float32, **options: Any) -> PFedHN:
    return PFedHN(task=task_of(TinyNet(batch_norm, dtype)), training=budget(0.1, 2, 5), **options)


def cohort_of(*ids: int, round: int = 1) -> Cohort:
    return Cohort(round, 0, torch.tensor(ids), torch.full((len(ids),), 10))


def double_server(algorithm: PFedHN, num_clients: int = 5) -> ServerState:
    server = algorithm.init_server(num_clients, seed=0)
    return {group: {name: value.double() for name, value in tensors.items()} for group, tensors in server.items()}


def trained(downloads: Payload, seed: int = 0, scale: float = 1.0) -> Payload:
    """What came back: the weights sent and noise."""
    draws = torch.Generator().manual_seed(seed)
    noise = {n: scale * torch.randn(v.shape, generator=draws, dtype=v.dtype) for n, v in downloads.tensors.items()}
    return Payload({name: value + noise[name] for name, value in downloads.tensors.items()}, downloads.sent)


class Twin:
    """The textbook hypernetwork, its clients' embeddings as parameters of their own."""

    def __init__(self, server: ServerState) -> None:
        self.embeddings = [nn.Parameter(row.clone()) for row in server["embeddings"]["embedding"]]
        network = server["network"]
        trunk: list[nn.Module] = [self._linear(network, "trunk0")]
        for depth in (1, 2, 3):
            trunk += [nn.ReLU(), self._linear(network, f"trunk{depth}")]
        self.trunk = nn.Sequential(*trunk)
        names = [key.removeprefix("head.").removesuffix(".weight") for key in network if key.startswith("head.")]
        names = [name for name in names if f"head.{name}.bias" in network]
        self.heads = {name: self._linear(network, f"head.{name}") for name in names}

    @staticmethod
    def _linear(network: dict, name: str) -> nn.Linear:
        outputs, inputs = network[f"{name}.weight"].shape
        linear = nn.Linear(inputs, outputs, dtype=torch.float64)
        linear.load_state_dict({"weight": network[f"{name}.weight"], "bias": network[f"{name}.bias"]})
        return linear

    def weights(self, client: int) -> dict:
        hidden = self.trunk(self.embeddings[client])
        return {name: head(hidden) for name, head in self.heads.items()}

    def shared(self) -> list[nn.Parameter]:
        return [*self.trunk.parameters(), *(p for head in self.heads.values() for p in head.parameters())]

    def same_as(self, server: ServerState) -> None:
        close = {"rtol": 1e-6, "atol": 1e-9}
        torch.testing.assert_close(
            server["embeddings"]["embedding"], torch.stack([e.detach() for e in self.embeddings]), **close
        )
        for depth in range(4):
            torch.testing.assert_close(
                server["network"][f"trunk{depth}.weight"], self.trunk[2 * depth].weight.detach(), **close
            )
        for name, head in self.heads.items():
            torch.testing.assert_close(server["network"][f"head.{name}.weight"], head.weight.detach(), **close)
            torch.testing.assert_close(server["network"][f"head.{name}.bias"], head.bias.detach(), **close)


def test_the_network_has_the_sizes_of_the_paper() -> None:
    server = pfedhn(batch_norm=True).init_server(10, seed=0)
    assert server["embeddings"]["embedding"].shape == (10, 3)  # int(1 + 10/4)
    trunk = [tuple(value.shape) for name, value in server["network"].items() if name.startswith("trunk")]
    assert trunk == [(100, 3), (100,), *[(100, 100), (100,)] * 3]
    heads = {name: tuple(value.shape) for name, value in server["network"].items() if name.startswith("head")}
    assert heads["head.fc1.weight.weight"] == (30, 100)
    assert heads["head.bn.bias.bias"] == (5,)
    assert len(heads) == 2 * 6  # γ and β are written, the statistics are not
    assert server["momentum"].keys() == {"embedding", *server["network"]}


def test_the_weights_sent_are_those_of_the_textbook_network() -> None:
    algorithm = pfedhn(dtype=torch.float64)
    server = double_server(algorithm)
    downloads = algorithm.download(server, cohort_of(1, 3))
    twin = Twin(server)
    for row, client in enumerate((1, 3)):
        for name, expected in twin.weights(client).items():
            torch.testing.assert_close(
                downloads.tensors[name][row].flatten(), expected.detach(), rtol=1e-12, atol=1e-12
            )
    assert downloads.sent.all()
    assert payload_bytes(downloads, algorithm.task.layers).tolist() == [53 * 8] * 2


@pytest.mark.parametrize("clip", [500.0, 3.0])
def test_the_steps_are_those_of_torch_sgd_client_by_client_at_the_snapshot(clip: float) -> None:
    algorithm = pfedhn(dtype=torch.float64, hypernetwork_lr=0.05, weight_decay=0.1, clip=clip)
    server = double_server(algorithm)
    twin = Twin(server)
    optimizer = torch.optim.SGD([*twin.shared(), *twin.embeddings], lr=0.05, momentum=0.9, weight_decay=0.1)
    norms = []
    for round, ids in enumerate([(0, 1, 4), (1, 2), (0, 1, 2, 3, 4)], start=1):
        cohort = cohort_of(*ids, round=round)
        downloads = algorithm.download(server, cohort)
        uploads = trained(downloads, seed=round, scale=round)
        gradients = []
        for row, client in enumerate(ids):  # all at the snapshot, before anyone steps
            moving = [*twin.shared(), twin.embeddings[client]]
            pairs = [
                (value, (downloads.tensors[n] - uploads.tensors[n])[row]) for n, value in twin.weights(client).items()
            ]
            gradients.append(torch.autograd.grad(sum((value * wish.flatten()).sum() for value, wish in pairs), moving))
        for client, gradient in zip(ids, gradients, strict=True):
            optimizer.zero_grad(set_to_none=True)  # without a gradient an embedding is not touched
            moving = [*twin.shared(), twin.embeddings[client]]
            for parameter, value in zip(moving, gradient, strict=True):
                parameter.grad = value.clone()
            norms.append(float(nn.utils.clip_grad_norm_(moving, clip)))
            optimizer.step()
        server = algorithm.aggregate(server, cohort, downloads, uploads)
    twin.same_as(server)
    assert (max(norms) > clip) == (clip == 3.0)  # it was cut in one of the two cases only


def test_a_client_that_is_away_keeps_its_embedding_and_momentum() -> None:
    algorithm = pfedhn(weight_decay=0.5)
    server = algorithm.init_server(5, seed=0)
    for round, cohort in enumerate((cohort_of(0, 1, 2, 3, 4), cohort_of(1, 3)), start=1):
        before = server
        downloads = algorithm.download(server, cohort)
        server = algorithm.aggregate(server, cohort, downloads, trained(downloads, seed=round))
    for group in ("embeddings", "momentum"):
        old, new = before[group]["embedding"], server[group]["embedding"]
        assert old.any(1).all()
        assert torch.equal(old[[0, 2, 4]], new[[0, 2, 4]])
        assert (old[[1, 3]] != new[[1, 3]]).any(1).all()


@pytest.mark.parametrize("huge", [1e30, 3e38])
def test_a_step_that_overflows_is_not_taken_and_the_others_are(huge: float) -> None:
    algorithm = pfedhn()
    server, cohort = algorithm.init_server(3, seed=0), cohort_of(0, 1, 2)
    downloads = algorithm.download(server, cohort)
    uploads = trained(downloads)
    uploads.tensors["fc1.weight"][1] = huge
    after = algorithm.aggregate(server, cohort, downloads, uploads)
    others = torch.tensor([0, 2])
    expected = algorithm.aggregate(server, cohort.only(others), downloads.rows(others), uploads.rows(others))
    assert_same(flat(after), flat(expected))
    assert not torch.equal(after["network"]["trunk0.weight"], server["network"]["trunk0.weight"])
