"""Flower without processes: a Grid that hands each message to the site's own code at once."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.config import flatten_dict
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

import pfedla
from pfedla.core.settings import Faults
from pfedla.flower.client_app import reply
from pfedla.flower.deployment import Deployment
from pfedla.flower.keys import to_pem
from pfedla.flower.layout import plan_deployment, read_deployment, write_deployment
from pfedla.flower.processes import collect_models
from pfedla.flower.server_app import serve
from pfedla.report.reading import read_result
from pfedla.runs.experiment import Experiment
from pfedla.runs.progress import Display

# The client's number and its reply; None: nothing comes, an exception: it cannot be read.
Change = Callable[[int, Message], Message | Exception | None]
Absent = Callable[[int, int], bool]  # of a client and a round
NUMBERS = ("score", "score_after_training", "loss", "traffic", "failures")


class LoopbackGrid:
    """What the engine uses of Flower's Grid. `absent` clients are offline; `change` acts on a reply on its way."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, self.replies, self.sent, self.round = deployment, {}, [], 0
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in the process of a ServerApp
        self.absent: Absent = lambda client, round: False
        self.change: Change = lambda client, message: message
        sites = [deployment.folder.parent / "sites" / f"client-{client}" for client in range(len(deployment.keys))]
        self.config: list[dict[str, Any]] = [{"site": str(site), "state": str(site / "state")} for site in sites]

    def get_nodes(self) -> Iterable[NodeInfo]:
        keys = [(client, to_pem(key)) for client, key in enumerate(self.deployment.keys)]
        online = [(client, key) for client, key in keys if not self.absent(client, self.round)]
        return [NodeInfo(node_id=100 + client, public_key=key, name=f"node-{client}") for client, key in online]

    def push_messages(self, messages: list[Message]) -> Iterable[str]:
        for message in messages:
            self.round = int(message.content.config_records["config"].get("round", self.round))
            number = str(len(self.sent))
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            client = message.metadata.dst_node_id - 100
            try:
                answer: Message | Exception | None = reply(message, self.context(client))
            except Exception as error:  # as Flower's own process does
                answer = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            answer = self.change(client, answer)
            self.replies[number] = [] if answer is None else [answer]
        return [message.metadata.message_id for message in messages]

    def context(self, client: int) -> Context:
        config = flatten_dict(self.deployment.to_run_config())
        return Context(1, 100 + client, self.config[client], RecordDict(), config)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = [answer for number in message_ids for answer in self.replies.pop(number, [])]  # forgotten at once
        for error in (answer for answer in answers if isinstance(answer, Exception)):
            raise error
        return answers


def deploy(folder: Path, values: dict[str, Any], own: dict[str, Any] | None = None, **options: Any) -> Deployment:
    """Write a deployment of an experiment to `folder` and read it."""
    planned = plan_deployment(Experiment.parse(values), own, folder, **options)
    write_deployment(folder, planned, ["127.0.0.1"], 9092)
    return read_deployment(folder)


def run_server(grid: LoopbackGrid, **changes: Any) -> list[str]:
    """Run the grid's deployment; return the server's lines."""
    grid.deployment = grid.deployment.model_copy(update={"wait": 1.0, "round_timeout": 1.0, **changes})
    said: list[str] = []
    display = Display(grid.deployment.experiment.rounds, quiet=True)
    display.say = said.append  # type: ignore[method-assign]
    serve(grid, flatten_dict(grid.deployment.to_run_config()), display)
    return said


def check(deployment: Deployment, keys: Iterable[str] = NUMBERS, absent: Absent | None = None) -> dict[str, Any]:
    """Numbers, weights and personal models are those of the threaded engine where `absent` clients do not answer."""
    simulated, experiment = deployment.folder.parent / "simulated" / deployment.folder.name, deployment.experiment
    with pytest.MonkeyPatch.context() as patch:
        if absent is not None:
            experiment = experiment.model_copy(update={"faults": Faults(dropout=0.5)})
            patch.setattr(
                "pfedla.engines.simulated.choose_answering",
                lambda faults, cohort: torch.tensor([not absent(i, cohort.round) for i in cohort.ids.tolist()]),
            )
        pfedla.run(experiment, simulated)
    collect_models(deployment.folder.parent, deployment.folder)
    tensors = [
        {path.relative_to(folder): path for path in (*folder.glob("models/*"), *folder.glob("alpha.safetensors"))}
        for folder in (deployment.folder, simulated)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    for name, path in tensors[0].items():
        assert_same(load_file(path), load_file(tensors[1][name]))
    ours, theirs = (read_result(folder / "result.json") for folder in (deployment.folder, simulated))
    for key in keys:
        assert ours[key] == theirs[key], (key, ours[key], theirs[key])
    return ours
