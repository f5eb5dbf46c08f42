"""Flower without processes: a Grid that hands each message to the site's own code at once, as Flower's processes would."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from pfedla.flower.client_app import reply
from pfedla.flower.keys import pem_of
from pfedla.flower.layout import OwnData, planned, read_plan, write_deployment
from pfedla.flower.plan import Plan
from pfedla.flower.server_app import serve
from pfedla.runs.experiment import Experiment
from pfedla.runs.progress import Reporter

# The client's number and its reply; None: nothing comes, an exception: it cannot be read.
Change = Callable[[int, Message], Message | Exception | None]


class LoopbackGrid(Grid):
    """`absent(client, round)` tells who is not online; `change` is what becomes of a reply on its way."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.replies, self.sent = plan, {}, []
        self.round = 0
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as in the process of a ServerApp
        self.absent: Callable[[int, int], bool] = lambda client, round: False
        self.change: Change = lambda client, message: message
        clients = range(len(plan.deployment.keys))
        self.nodes = {100 + client: client for client in clients}
        self.keys = {100 + client: pem_of(plan.deployment.keys[client]) for client in clients}
        self.config: dict[int, dict[str, Any]] = {
            client: {"partition-id": client, "state": str(folder / f"site-{client}")} for client in clients
        }

    def get_nodes(self) -> Iterable[NodeInfo]:
        online = [node for node, client in self.nodes.items() if not self.absent(client, self.round)]
        return [NodeInfo(node_id=node, public_key=self.keys[node], name=f"node-{node}") for node in online]

    def get_node_ids(self) -> Iterable[int]:
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            config = message.content.config_records["config"]
            self.round = int(config.get("round", self.round))
            number = str(len(self.sent))
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            client = self.nodes[message.metadata.dst_node_id]
            context = Context(1, message.metadata.dst_node_id, self.config[client], RecordDict(), flat(self.plan))
            try:
                answer: Message | Exception | None = reply(message, context)
            except Exception as error:  # as Flower's own process does
                answer = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            answer = self.change(client, answer)
            self.replies[number] = [] if answer is None else [answer]
            ids.append(number)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        answers = [answer for number in message_ids for answer in self.replies.pop(number, [])]  # forgotten as handed out
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise AssertionError("the engine pushes and pulls, and makes its messages itself")

    def set_run(self, run: Any) -> None: ...
    def create_message(self, *args: Any, **options: Any) -> Message:
        raise AssertionError("the engine pushes and pulls, and makes its messages itself")

    @property
    def run(self) -> Any:
        return None


def flat(plan: Plan) -> dict[str, Any]:
    """The run configuration as Flower hands it over."""
    values = plan.to_run_config()
    nested = {key: value for key, value in values.items() if isinstance(value, dict)}
    alone = {key: value for key, value in values.items() if key not in nested}
    return alone | {f"{key}.{name}": value for key, section in nested.items() for name, value in section.items()}


def deployed(folder: Path, values: dict[str, Any], own: OwnData | None = None, **options: Any) -> Plan:
    """A deployment of an experiment, written to `folder` and read again."""
    options = {"wait": 1.0, "round_timeout": 1.0} | options
    write_deployment(folder, planned(Experiment.parse(values), own, folder, **options), ["127.0.0.1"], 9092)
    return read_plan(folder)


def served(grid: LoopbackGrid, **changes: Any) -> list[str]:
    """Play the grid's plan; returns what was said."""
    grid.plan = grid.plan._replace(deployment=grid.plan.deployment.model_copy(update=changes)) if changes else grid.plan
    said: list[str] = []
    reporter = Reporter(grid.plan.experiment.rounds, quiet=True)
    reporter.say = said.append  # type: ignore[method-assign]
    serve(grid, grid.plan, reporter)
    return said
