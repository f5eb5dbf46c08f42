"""The site's side of the Flower app, and what it keeps in its own folder. Only answers leave the site.

STATE/<run>/site.json  the client's number and the SHA-256 of its examples, which must not change
STATE/<run>/last-order  the number of the server's last order: none is obeyed twice
STATE/<run>/trained_on.npy  hashes of its training examples, for `pfedla evaluate`
STATE/<run>/privacy.json  what its training has released, with [privacy]: noise, rate and number of steps
STATE/<run>/round-<r>.safetensors  private state after round r; the server says which one counts. Three are
    kept, enough for any of the server's checkpoints
STATE/<run>/models/, experiment.toml, federation.json, result.json  the personal model, as in a run folder
STATE/<run>/data.safetensors  the client's part of a public data set
"""

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from safetensors.torch import load_file

from pfedla.core.accounting import Release, design, measure_epsilon, release
from pfedla.core.contracts import ClientState, Cohort, Params, Payload
from pfedla.core.errors import PfedlaError
from pfedla.core.files import read_object, read_tensors, write_tensors, write_text
from pfedla.core.settings import EngineSettings
from pfedla.data.federation import Examples, build_federation, digest_of
from pfedla.engines.client import Client, Split, keep_freed_memory, make_client
from pfedla.flower.codec import CONFIG, METRICS, decode_download, encode_answer, read_config
from pfedla.flower.deployment import Deployment
from pfedla.flower.orders import ORDER, PUBLIC, check_signature, note_order
from pfedla.runs.experiment import SITES
from pfedla.runs.folder import describe_federation
from pfedla.runs.personal import load_site
from pfedla.runs.recognition import write_trained_on
from pfedla.runs.releases import plan_epochs

SYSTEM, SEED = "system", "seed"  # where the noise of private training comes from: only the first hides anything


class Site:
    """What a client does for one message: Flower starts a process for each."""

    def __init__(self, deployment: Deployment, config: Mapping[str, Any], node: Mapping[str, Any]) -> None:
        """`config` comes with the server's message, `node` is the site's own --node-config."""
        self.num_clients, self.number, run = len(deployment.keys), int(config["client"]), str(config["run"])
        own = find_number(Path(str(node["site"])).expanduser() / "client.key.pub", deployment.keys)
        if own != self.number:
            raise PfedlaError(
                f"this order is for client {self.number}, and this site has the key of client {own}: refused"
            )
        if not re.fullmatch("[0-9a-f]{16}", run):
            raise PfedlaError(f"the server sent an invalid run ({run!r:.40})")
        state = node.get("state") or platformdirs.user_state_path("pfedla") / f"client-{self.number}"
        self.folder = Path(str(state)).expanduser().resolve() / run
        self.experiment, self.federation, algorithm, *_ = deployment.build()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.task = algorithm.task
        torch.set_num_threads(int(node.get("threads", 1)))
        keep_freed_memory()
        self.path = Path(str(node["data"])).expanduser().resolve() if "data" in node else None
        (examples, scaling), recalibrate = self._read_examples(), self.experiment.recalibrate
        engine = EngineSettings(name="threaded", device=str(node.get("device", self.experiment.engine.device)))
        client = make_client(algorithm, self.federation, examples, engine)
        rounds = self.experiment.rounds
        self.client = replace(client, number=self.number, recalibrate=recalibrate, rounds=rounds)
        self._protect(node)
        about = {"client": self.number, "digest": digest_of(*examples), "data": str(self.path or "")} | scaling
        if not (self.folder / "site.json").exists():
            write_trained_on(self.folder, {self.number: examples})
            self._write_json("site.json", about)
        elif read_object(self.folder / "site.json").get("digest") != about["digest"]:
            raise PfedlaError("the data of this site have changed since the run began; restore them, or start anew")

    def _read_examples(self) -> tuple[Split, dict[str, Any]]:
        """Return the examples, and how they were scaled, if they were."""
        dataset = self.experiment.data.dataset
        if (dataset == SITES) == (self.path is None):
            problem = 'set data="/path"' if dataset == SITES else f"remove data=, as this federation splits {dataset}"
            raise PfedlaError(f"{problem} in --node-config")
        if self.path is None:
            return self._read_part(), {}
        one = load_site(self.path, self.federation, self.experiment)
        return (one.train[0], one.test[0]), {"scaling": one.scaling[0].to_lists()} if one.scaling else {}

    def _read_part(self) -> Split:
        """Read the client's part of a public data set, which is kept after the first time."""
        kept = self.folder / "data.safetensors"
        if not kept.exists():
            data, found = build_federation(self.experiment.data, self.experiment.seed, task=self.experiment.task)
            if found.fingerprint() != self.federation.fingerprint():
                raise PfedlaError(f"{data.dataset} is not the same data set here as on the server")
            parts = (*found.train[self.number], *found.test[self.number])
            if not isinstance(parts[0], torch.Tensor):  # a tree of inputs is read anew each time
                return found.train[self.number], found.test[self.number]
            write_tensors(kept, dict(zip(("x", "y", "test_x", "test_y"), parts, strict=True)))
        tensors = load_file(kept)
        return Examples(tensors["x"], tensors["y"]), Examples(tensors["test_x"], tensors["test_y"])

    def _protect(self, node: Mapping[str, Any]) -> None:
        """Make training private if the experiment says so; refuse to take part where the site asks for more."""
        privacy, epsilon, noise = self.experiment.privacy, node.get("max-epsilon"), node.get("noise", SYSTEM)
        if noise not in (SYSTEM, SEED):
            raise PfedlaError(f"noise = {noise!r} in --node-config; it is {SYSTEM} or {SEED}")
        if epsilon is not None and not privacy.is_on:
            raise PfedlaError(f"this site asks for max-epsilon = {epsilon}, but the experiment has no [privacy]")
        self.limit = min(float(epsilon or math.inf), math.inf if privacy.epsilon == "off" else privacy.epsilon)
        self.shares_metrics = not privacy.is_on or bool(node.get("share-metrics", False))
        if privacy.is_on:
            algorithm, size = self.client.algorithm, len(self.client.train.y)
            planned = plan_epochs(self.experiment, algorithm, self.num_clients)[self.number]
            mechanism = design(privacy, size, algorithm.training.batch_size, planned)
            self.client = replace(self.client, mechanism=mechanism, secret=noise == SYSTEM)

    def _spend(self, epochs: int) -> None:
        """Note what will be released before it is, and keep it noted; refuse what exceeds the bound."""
        if self.client.mechanism is None or not epochs:
            return
        path, mechanism = self.folder / "privacy.json", self.client.mechanism
        before = read_object(path)["releases"] if path.exists() else []
        # Each with its own noise: whoever changes the experiment in between does not change what was released.
        releases = [*(Release(*one) for one in before), release(mechanism, epochs)]
        epsilon = measure_epsilon(mechanism.delta, *releases)
        if epsilon > self.limit:
            raise PfedlaError(
                f"this site has trained on its examples as often as epsilon = {self.limit:g} allows; "
                f"once more would make it {epsilon:.3g}"
            )
        known = epsilon if epsilon < math.inf else None
        self._write_json(path.name, {"epsilon": known, "delta": mechanism.delta, "releases": releases})

    def join(self, content: RecordDict) -> RecordDict:
        return RecordDict({CONFIG: ConfigRecord({"train": len(self.client.train.y)})})

    def train(self, content: RecordDict) -> RecordDict:
        client, download, cohort = self._prepare(content)
        self._spend(client.algorithm.count_epochs()[0])
        state, answer = client.update(download, cohort)
        if not self.shares_metrics:
            answer = answer._replace(score=math.nan, loss=math.nan)
        self._keep(cohort.round, int(read_config(content)["base"]), state)
        return encode_answer(answer, self.task.layers)

    def evaluate(self, content: RecordDict) -> RecordDict:
        """Test the personal model and write it: the site may use it from now on."""
        client, download, cohort = self._prepare(content)
        self._spend(client.algorithm.count_epochs()[1])
        model = client.personalize(download, cohort)
        score, loss, metrics = client.evaluate(model, whole=True)
        self._write_personal(model, cohort.round - 1, score, metrics)
        told = {**metrics, "score": score, "loss": loss}
        shown = {key: value if self.shares_metrics else math.nan for key, value in told.items()}
        return RecordDict({METRICS: MetricRecord({**shown})})

    def _prepare(self, content: RecordDict) -> tuple[Client, Payload, Cohort]:
        """Return the client after its round `base`, the download, and the cohort: a site knows of no other client."""
        config, ids, state = read_config(content), torch.tensor([self.number]), self.client.state
        cohort = Cohort(int(config["round"]), int(config["seed"]), ids=ids, num_examples=torch.zeros_like(ids))
        download = decode_download(content, self.client.algorithm, self.num_clients)
        base = int(config["base"])
        if base and state:
            kept = read_tensors(self._state_path(base), {name: value.to("meta") for name, value in state.items()})
            state = {name: value.clone().to(self.client.device) for name, value in kept.items()}
        return replace(self.client, state=state, has_trained=base > 0), download.to(self.client.device), cohort

    def _keep(self, round: int, base: int, state: ClientState) -> None:
        if not state:
            return
        write_tensors(self._state_path(round), {name: value.cpu() for name, value in state.items()})
        there = [int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors")]
        accepted = sorted(number for number in there if number <= base)[-2:]
        for number in there:  # never a later one: the server may have given up waiting for this round
            if number < round and number not in accepted:
                self._state_path(number).unlink(missing_ok=True)

    def _state_path(self, round: int) -> Path:
        return self.folder / f"round-{round}.safetensors"

    def _write_personal(self, model: Params, round: int, score: float, metrics: dict[str, float]) -> None:
        path = self.folder / "models" / f"client-{self.number}.safetensors"
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, {name: value.cpu() for name, value in model.items()})
        self._write_json("federation.json", describe_federation(self.federation, self.task.objective))
        known = {name: None if math.isnan(value) else value for name, value in {"score": score, **metrics}.items()}
        about = {"client": self.number, "after_round": round, "task": self.task.objective.describe()}
        self._write_json("result.json", about | {"score": known.pop("score"), "metrics": known})
        write_text(self.folder / "experiment.toml", self.experiment.to_toml())

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.folder / name, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def find_number(path: Path, keys: Sequence[str]) -> int:
    """Return which client has the public key at `path`."""
    try:
        own = path.read_text(encoding="utf-8").split()[:2]
    except OSError as error:
        raise PfedlaError(f"this site's public key cannot be read: {error}; `deploy init` writes it") from None
    found = [number for number, key in enumerate(keys) if key.split()[:2] == own]
    if not found:
        raise PfedlaError(f"the key in {path} is none of this federation's")
    return found[0]


app = ClientApp()


@app.query()
@app.train()
@app.evaluate()
def reply(message: Message, context: Context) -> Message:
    """Return the answer to any message. The site's log and the server get the same reason for a refusal."""
    try:
        config, kind = message.content.config_records[CONFIG], message.metadata.message_type
        if "site" not in context.node_config:
            raise PfedlaError('--node-config lacks site="/path", the folder that deploy init has made for this site')
        own = Path(str(context.node_config["site"])).expanduser()
        check_signature(own / PUBLIC, kind, message.content, context.run_config)
        site = Site(Deployment.from_run_config(context.run_config), config, context.node_config)
        note_order(site.folder / "last-order", config[ORDER])
        answer = {MessageType.TRAIN: site.train, MessageType.EVALUATE: site.evaluate, MessageType.QUERY: site.join}
        content = answer[kind](message.content)
    except PfedlaError as error:
        print(f"pfedla: {error}", file=sys.stderr, flush=True)
        content = RecordDict({CONFIG: ConfigRecord({"refusal": str(error)})})
    return Message(content, reply_to=message)
