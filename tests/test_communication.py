"""The paper's models and Table 3; a run counts exactly what it sends, in both directions."""

from typing import Any

import pytest
import torch
from conftest import make, play, toy_federation

from pfedla.algorithms.fedavg import FedAvg
from pfedla.core.codecs import init_links, measure_layers
from pfedla.core.contracts import LocalResult, Payload
from pfedla.core.layers import Layers
from pfedla.core.models import MLP, PaperCNN, SmallCNN, build_model, model_for
from pfedla.core.rounds import MIB, plan_traffic
from pfedla.core.settings import WireSettings
from pfedla.data.federation import Federation


@pytest.mark.parametrize(
    ("shape", "name", "kind"),
    [
        ((1, 28, 28), "cnn", PaperCNN),
        ((3, 32, 32), "cnn-bn", PaperCNN),
        ((1, 8, 8), "small-cnn", SmallCNN),
        ((30,), "mlp", MLP),
        ((1, 2, 2), "mlp", MLP),
    ],
)
def test_models_are_chosen_by_shape(shape: tuple[int, ...], name: str, kind: type) -> None:
    assert model_for(shape) == name
    model = build_model(name, shape, 7, torch.Generator().manual_seed(0))
    assert isinstance(model, kind)
    assert model(torch.zeros(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(
    ("model", "retained", "mebibytes"),
    [
        (PaperCNN((1, 28, 28), 10, False), "", 491.08),
        (PaperCNN((1, 28, 28), 10, False), "fc3 fc1", 312.52),
        (PaperCNN((3, 32, 32), 10, True), "", 693.96),
        (PaperCNN((3, 32, 32), 10, True), "fc1 conv2", 382.24),
    ],
)
def test_table_3(model: PaperCNN, retained: str, mebibytes: float) -> None:
    layers = Layers.of(model)
    traffic = plan_traffic(layers, 10, 75, layers.positions(retained.split()))
    assert (traffic.down_bytes + traffic.up_bytes) / MIB == pytest.approx(mebibytes, abs=0.005)


def test_a_plan_counts_encoded_bytes_as_a_run_does(federation: Federation) -> None:
    algorithm = make("fedavg").model_copy(update={"wire": WireSettings(upload="topk", download="int8", share=0.2)})
    server = {**algorithm.init_server(len(federation), 0), **init_links(algorithm, len(federation))}
    ran, _ = play(algorithm, federation, server=server)
    layers, tensors = algorithm.task.layers, algorithm.task.initial()
    down, up = (measure_layers(layers, tensors, codec, 0.2) for codec in ("int8", "topk"))
    assert plan_traffic(layers, len(federation), 3, [], down=down, up=up) == ran[-1].traffic


class SendsTheHead(FedAvg):
    """Uploads its last layer only; the mask says so, the other tensors are there but do not travel."""

    def upload_like(self, download: Payload) -> Payload:
        return Payload(download.tensors, torch.tensor([False, True]))

    def local_update(self, client: Any, download: Payload, data: Any) -> LocalResult:
        result = super().local_update(client, download, data)
        return result._replace(upload=result.upload._replace(sent=torch.tensor([False, True])))


@pytest.mark.parametrize("engine", ["threaded", "vectorized"])
def test_an_upload_costs_what_it_sends(engine: str) -> None:
    algorithm = make("fedavg")
    partial = SendsTheHead(task=algorithm.task, training=algorithm.training)
    played, _ = play(partial, toy_federation(), rounds=range(1, 2), engine=engine)
    assert not played[0].failures
    body, head = algorithm.task.layers.num_parameters
    assert played[0].traffic.up_bytes == 6 * 4 * head
    assert played[0].traffic.down_bytes == 6 * 4 * (body + head)
