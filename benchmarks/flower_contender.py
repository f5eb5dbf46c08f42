"""FedAvg in Flower's own simulation (Ray): as many clients at a time as cores, with the textbook's local training.

A module of its own: Ray's actors import it by name, so that each reads its data once and keeps them.
"""

import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor
from torch.utils.data import DataLoader

from contenders import Serve
from fixed_work import TextbookCNN, Work, loaders, mean_of, train_textbook

PATIENCE = 600.0  # seconds: a message that is lost is never sent again

client_app = ClientApp()


@cache
def kept_loaders(data: str, work: Work) -> list[DataLoader[tuple[Tensor, ...]]]:
    return loaders(Path(data), work)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)  # as many as the CPUs it was given
    config = message.content["config"]
    work = work_of(str(config["work"]))
    model = TextbookCNN(work.shape, work.batch_norm)
    model.load_state_dict(message.content["model"].to_torch_state_dict())
    train_textbook(model, kept_loaders(str(config["data"]), work)[int(context.node_config["partition-id"])], work)
    return Message(RecordDict({"model": ArrayRecord(model.state_dict())}), reply_to=message)


def work_of(text: str) -> Work:
    values = json.loads(text)
    return Work(**values | {"shape": tuple(values["shape"])})


def simulate(data: Path, work: Work, serve: Serve) -> None:
    server_app = ServerApp()
    config = ConfigRecord({"data": str(data), "work": json.dumps(asdict(work))})

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        torch.manual_seed(0)
        model = TextbookCNN(work.shape, work.batch_norm).state_dict()
        nodes = list(grid.get_node_ids())

        def run_round() -> None:
            nonlocal model
            content = RecordDict({"model": ArrayRecord(model), "config": config})
            messages = [Message(content, node, MessageType.TRAIN) for node in nodes]
            replies = list(grid.send_and_receive(messages, timeout=PATIENCE))
            failed = [reply.error.reason for reply in replies if reply.has_error()]
            if failed or len(replies) < len(nodes):
                raise RuntimeError(f"{len(replies)} of {len(nodes)} clients answered; {failed}")
            model = mean_of([reply.content["model"].to_torch_state_dict() for reply in replies])

        serve(run_round)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count()}}
    run_simulation(server_app, client_app, num_supernodes=work.clients, backend_config=resources)
