"""What a site does when the server asks, and what it keeps in its own folder. Only answers leave the site.

STATE/<run>/site.json  the client's number and the SHA-256 of its examples, which must not change
STATE/<run>/round-<r>.safetensors  private state after round r; the server says which one counts. Three are
    kept, enough for any of the server's checkpoints
STATE/<run>/models/, experiment.toml, federation.json, result.json  the personal model, as in a run folder
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from pfedla.core.contracts import ClientState, Cohort, Params, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, read_tensors, write_tensors, write_text
from pfedla.core.settings import EngineSettings
from pfedla.data.federation import digest_of
from pfedla.engines.client import Client, keep_freed_memory, make_client
from pfedla.flower.codec import CONFIG, METRICS, decode_download, encode_answer
from pfedla.flower.deployment import Deployment
from pfedla.flower.site_data import read_examples

KEPT = 3


class Site:
    def __init__(self, deployment: Deployment, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        """`config` comes with the server's message, `node` is the site's own --node-config."""
        self.deployment = deployment
        self.number, run = int(config["client"]), str(config["run"])
        claimed = node.get("partition-id", self.number)
        if claimed != self.number:
            raise PfedlaError(f"partition-id = {claimed}, but this node has the key of client {self.number}")
        if not 0 <= self.number < deployment.num_clients or not re.fullmatch("[0-9a-f]{16}", run):
            raise PfedlaError(f"the server sent an invalid client ({self.number}) or run ({run!r:.40})")
        state = node.get("state") or platformdirs.user_state_path("pfedla") / f"client-{self.number}"
        self.folder = Path(str(state)).expanduser().resolve() / run
        self.built = deployment.build()
        torch.set_num_threads(int(node.get("threads", 1)))
        keep_freed_memory()
        experiment, self.federation = self.built.experiment, self.built.federation
        self.path = Path(str(node["data"])).expanduser().resolve() if "data" in node else None
        kept = self.folder / "data.safetensors"
        examples = read_examples(self.path, experiment, self.federation, self.number, kept)
        engine = EngineSettings(name="threaded", device=str(node.get("device", experiment.engine.device)))
        how: dict[str, Any] = {"number": self.number, "recalibrate": experiment.recalibrate}
        self.client = make_client(self.built.algorithm, self.federation, examples, engine, **how)
        self.device = self.client.device
        self._check_unchanged(digest_of(*examples))

    def _check_unchanged(self, digest: str) -> None:
        known = self.folder / "site.json"
        if not known.exists():
            about = {"client": self.number, "digest": digest, "data": str(self.path or "")}
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(known, json.dumps(about, indent=1) + "\n")
        elif read_object(known).get("digest") != digest:
            raise PfedlaError(
                "the data of this site have changed since the run began; restore them, or start a new run"
            )

    # What the server may ask for

    def join(self) -> RecordDict:
        """Tell the numbers of examples; class counts and digest only of a public data set."""
        labels = {"train": self.client.train.y, "test": self.client.test.y}
        about: dict[str, Any] = {part: len(y) for part, y in labels.items()}
        if self.path is None:
            about["digest"] = str(read_object(self.folder / "site.json")["digest"])
            for part, y in labels.items():
                about[f"{part}_counts"] = np.bincount(y.numpy(), minlength=len(self.federation.classes)).tolist()
        return RecordDict({CONFIG: ConfigRecord(about)})

    def train(self, content: RecordDict, cohort: Cohort, base: int) -> RecordDict:
        state, answer = self._client_after(base).update(self._read_download(content), cohort)
        self._keep(cohort.round, base, state)
        return encode_answer(answer, self.built.algorithm.task.layers)

    def evaluate(self, content: RecordDict, cohort: Cohort, base: int) -> RecordDict:
        """Test the personal model and write it: the site may use it from now on."""
        model = self._client_after(base).personalize(self._read_download(content), cohort)
        accuracy, loss = self.client.evaluate(model)
        self._write_personal(model, cohort.round - 1, accuracy)
        return RecordDict({METRICS: MetricRecord({"accuracy": accuracy, "loss": loss})})

    def _read_download(self, content: RecordDict) -> Payload:
        task = self.built.algorithm.task
        return decode_download(content, task.initial(), task.layers, self.deployment.num_clients).to(self.device)

    # Private state

    def _client_after(self, base: int) -> Client:
        """Return the client with its private state after a round."""
        initial = self.client.state
        if base == 0 or not initial:
            return replace(self.client, has_trained=base > 0)
        path = self._state_path(base)
        if not path.exists():
            raise PfedlaError(
                f"{path} is missing: the private state after round {base} is lost or elsewhere; give its "
                "folder with --node-config 'state=\"/path\"', restore it, or start a new run"
            )
        kept = read_tensors(path, {name: value.to("meta") for name, value in initial.items()})
        state = {name: value.clone().to(self.device) for name, value in kept.items()}
        return replace(self.client, state=state, has_trained=True)

    def _keep(self, round: int, base: int, state: ClientState) -> None:
        if not state:
            return
        write_tensors(self._state_path(round), {name: value.cpu() for name, value in state.items()})
        there = [int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors")]
        accepted = sorted(number for number in there if number <= base)[-(KEPT - 1) :]
        for number in there:  # never a later one: the server may have given up waiting for this round
            if number < round and number not in accepted:
                self._state_path(number).unlink(missing_ok=True)

    def _state_path(self, round: int) -> Path:
        return self.folder / f"round-{round}.safetensors"

    def _write_personal(self, model: Params, round: int, accuracy: float) -> None:
        path = self.folder / "models" / f"client-{self.number}.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, {name: value.cpu() for name, value in model.items()})
        known = self.deployment.settings.model_dump(include={"shape", "classes", "mean", "std"})
        known |= {"clients": self.federation.names, "test": []}
        result = {"client": self.number, "after_round": round, "accuracy": accuracy}
        for name, about in (("federation.json", known), ("result.json", result)):
            write_text(self.folder / name, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
        write_text(self.folder / "experiment.toml", self.built.experiment.to_toml())


def read_cohort(config: Mapping[str, Any]) -> Cohort:
    """Return the cohort of a message: a site knows of no other client."""
    ids = torch.tensor([int(config["client"])])
    return Cohort(round=int(config["round"]), seed=int(config["seed"]), ids=ids, num_examples=torch.zeros_like(ids))
