"""What a site does when the server asks, and what it keeps in its own folder: nothing of it leaves but answers.

STATE/<run>/site.json          who it is in this run, and the SHA-256 of its examples: they must not change while it goes on
STATE/<run>/round-<r>.safetensors   what is private after round r. The server says which of them counts: an upload that it
                               did not take advances nothing. The last three are kept, enough for any of its checkpoints.
STATE/<run>/models/, experiment.toml, federation.json, result.json   the personal model, as a run folder has it
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from safetensors.torch import save_file

from pfedla.core.contracts import ClientState, Cohort, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, read_tensors, write_tensors, write_text, write_whole
from pfedla.data.federation import digest_of
from pfedla.engines.allocator import keep_freed_memory
from pfedla.engines.client import Client, moved
from pfedla.engines.simulated import usable_device
from pfedla.flower.codec import CONFIG, METRICS, decoded_download, encoded_answer
from pfedla.flower.plan import Plan
from pfedla.flower.site_data import own_examples, part_examples
from pfedla.runs.experiment import SITES

KEPT = 3


class Site:
    def __init__(self, plan: Plan, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        self.plan = plan
        self.number, run = int(config["client"]), str(config["run"])
        claimed = node.get("partition-id", self.number)
        if claimed != self.number:
            raise PfedlaError(f"partition-id = {claimed} is another's: this node's key is that of client {self.number}")
        if not 0 <= self.number < len(plan.deployment.keys) or not re.fullmatch("[0-9a-f]{16}", run):
            raise PfedlaError(f"the server named client {self.number} and run {run!r:.40}, which cannot be")
        state = node.get("state") or platformdirs.user_state_path("pfedla") / f"client-{self.number}"
        self.folder = Path(str(state)).expanduser().resolve() / run
        outline = plan.deployment.outline()
        self.built = plan.built(outline)
        torch.set_num_threads(int(node.get("threads", 1)))
        keep_freed_memory()
        experiment, self.own = self.built.experiment, "data" in node
        if self.own:
            if experiment.data.dataset != SITES:
                raise PfedlaError(f"this federation cuts {experiment.data.dataset} into clients itself: leave data= out")
            train, test = own_examples(Path(str(node["data"])).expanduser(), outline, experiment.seed)
        else:
            train, test = part_examples(experiment, outline, self.number, self.folder / "data.safetensors")
        self.device = usable_device(str(node.get("device", experiment.engine.device)))
        task = self.built.algorithm.task.to(self.device).direct(outline.shape)
        algorithm = dataclasses.replace(self.built.algorithm, task=task)
        self.client = Client(self.number, train, test, outline, algorithm, self.device, experiment.recalibrate)
        self._check_unchanged({"digest": digest_of(train, test), "data": str(Path(str(node.get("data", ""))).resolve())})

    def _check_unchanged(self, about: dict[str, str]) -> None:
        known = self.folder / "site.json"
        if known.exists():
            if read_object(known).get("digest") != about["digest"]:
                raise PfedlaError("the data of this site have changed since the run began; put them back, or start a new run")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(known, json.dumps({"client": self.number, **about}, indent=1) + "\n")

    # What the server may ask for

    def join(self) -> RecordDict:
        """How many examples there are; their classes only where everybody has them anyway."""
        train, test = self.client.train.y, self.client.test.y
        about: dict[str, Any] = {"train": len(train), "test": len(test)}
        if not self.own:
            about["digest"] = str(read_object(self.folder / "site.json")["digest"])
            counts = (np.bincount(part.numpy(), minlength=len(self.plan.deployment.classes)).tolist() for part in (train, test))
            about["train_counts"], about["test_counts"] = counts
        return RecordDict({CONFIG: ConfigRecord(about)})

    def train(self, content: RecordDict, cohort: Cohort, base: int) -> RecordDict:
        state, answer = self.client.update(self._state(base), self._download(content), cohort)
        self._keep(cohort.round, base, {name: value.cpu() for name, value in state.items()})
        return encoded_answer(answer, self.built.algorithm.task.layers)

    def evaluate(self, content: RecordDict, cohort: Cohort, base: int) -> RecordDict:
        """Test the personal model and write it down here: the site may use it from now on."""
        model = self.client.personal(self._state(base), base > 0, self._download(content), cohort)
        accuracy, loss = self.client.metrics(self.client.tested(model))
        self._write_personal({name: value.cpu() for name, value in model.items()}, cohort.round - 1, accuracy)
        return RecordDict({METRICS: MetricRecord({"accuracy": accuracy, "loss": loss})})

    def _download(self, content: RecordDict) -> Payload:
        task = self.built.algorithm.task
        return moved(decoded_download(content, task.initial(), task.layers, len(self.plan.deployment.keys)), self.device)

    # What is private

    def _state(self, base: int) -> ClientState:
        initial = self.client.algorithm.init_client()
        if base == 0 or not initial:
            return initial
        path = self._version(base)
        if not path.exists():
            raise PfedlaError(
                f"{path.name} of this run is not in {path.parent}: what is private after round {base} was kept elsewhere or is "
                "lost; give the folder it is in with --node-config 'state=\"/path\"', or start a new run"
            )
        kept = read_tensors(path, {name: value.to("meta") for name, value in initial.items()})
        return {name: value.clone().to(self.device) for name, value in kept.items()}

    def _keep(self, round: int, base: int, state: ClientState) -> None:
        if not state:
            return
        write_whole(self._version(round), lambda part: save_file({n: v.contiguous() for n, v in state.items()}, part))
        there = [int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors")]
        accepted = sorted(number for number in there if number <= base)[-(KEPT - 1) :]
        for number in there:  # never a later one: this may be a round that the server no longer waited for
            if number < round and number not in accepted:
                self._version(number).unlink(missing_ok=True)

    def _version(self, round: int) -> Path:
        return self.folder / f"round-{round}.safetensors"

    def _write_personal(self, model: ClientState, round: int, accuracy: float) -> None:
        (self.folder / "models").mkdir(exist_ok=True)
        write_tensors(self.folder / "models" / f"client-{self.number}.safetensors", model)
        deployment = self.plan.deployment
        here = {"shape": deployment.shape, "classes": deployment.classes, "mean": deployment.mean, "std": deployment.std}
        known = {**here, "clients": deployment.names, "test": [], "subset": ""}
        write_text(self.folder / "federation.json", json.dumps(known, indent=2, ensure_ascii=False) + "\n")
        write_text(self.folder / "experiment.toml", self.built.experiment.to_toml())
        write_text(
            self.folder / "result.json", json.dumps({"client": self.number, "after_round": round, "accuracy": accuracy}) + "\n"
        )


def cohort_of(config: Mapping[str, Any]) -> Cohort:
    return Cohort(
        int(config["round"]), int(config["seed"]), torch.tensor([int(config["client"])]), torch.zeros(1, dtype=torch.int64)
    )
