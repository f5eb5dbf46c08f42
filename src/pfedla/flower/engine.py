"""Clients behind Flower's Grid: sites that keep their data and private state, and may come and go.

Client i is the node with the i-th public key. The server remembers the round of each client's last accepted
upload, its `base`: the client continues from its private state after that round. Base 0: it has not trained.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import httpx
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from pfedla.core.codecs import expect_upload
from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, Cohort, Failure, Params, Payload
from pfedla.core.errors import GaveUpError, PfedlaError, shown
from pfedla.core.rounds import NO_ANSWER
from pfedla.data.federation import Outline
from pfedla.engines.client import one_thread
from pfedla.flower.codec import CONFIG, decode_answer, encode_payload, measure, read_config, read_numbers
from pfedla.flower.deployment import Deployment
from pfedla.flower.keys import to_pem
from pfedla.flower.orders import Signer

POLL = 0.5  # seconds between two looks for replies
JOINING = 120.0  # seconds for a client to answer when it is asked to join
ASK_AGAIN = 60.0  # seconds until a client that could not join is asked again, plus ten times what asking took
WIRE = ("down_bytes", "down_arrays", "up_bytes", "up_arrays")
SILENT = 2  # messages in a row without an answer, after which nobody waits for a client
GONE = (3, 4, 5, 8)  # Flower's codes of answers that are incomplete, of a node or process that is gone

Reply = RecordDict | Failure


@dataclass
class FlowerEngine:
    """Implements the Engine contract over push and pull."""

    grid: Grid
    algorithm: Algorithm
    federation: Outline
    deployment: Deployment
    run: str  # what the sites call this run
    plan: Mapping[str, Any]  # the run configuration, which the sites have too
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._signer = Signer(self.deployment.order_key, self.plan)
        self._client_of = {to_pem(key): client for client, key in enumerate(self.deployment.keys)}
        self._base = torch.zeros(len(self.federation), dtype=torch.int64)
        self._wire = torch.zeros(len(WIRE), dtype=torch.int64)  # what training has sent, with headers
        self._round = 0
        self._unanswered: Counter[int] = Counter()  # messages in a row, by client
        self._ask_at: dict[int, float] = {}  # when to ask a client again to join
        self._say_once = lru_cache(1000)(self.say)

    def wait_for(self, count: int) -> None:
        """Wait until so many clients are online; raise if in the end fewer than min_clients are."""
        end = time.monotonic() + self.deployment.wait
        while (online := self.admit()) < count and time.monotonic() < end:
            time.sleep(1.0)
        if online < self.deployment.min_clients:
            there = f"{online} of {len(self.federation)} clients are online after {self.deployment.wait:.0f} s"
            raise GaveUpError(f"{there}, min_clients = {self.deployment.min_clients}; start the others, then resume")

    def admit(self) -> int:
        """Ask clients that have come online to join, wait for their answers; return how many online have joined."""
        start, nodes, num_examples = time.monotonic(), self._find_nodes(), self.federation.num_examples
        new = [client for client in nodes if not num_examples[client] and start >= self._ask_at.get(client, 0)]
        contents = {client: RecordDict({CONFIG: ConfigRecord({"run": self.run, "client": client})}) for client in new}
        for client, reply in self._exchange(MessageType.QUERY, nodes, contents).items():
            now = time.monotonic()
            self._ask_at[client] = now + ASK_AGAIN + 10 * (now - start)  # a silent client delays all others
            told = reply.detail if isinstance(reply, Failure) else read_config(reply).get("train")
            if isinstance(told, int) and 0 < told < 2**40:
                num_examples[client] = told
            else:
                why = told if isinstance(reply, Failure) else f"it has {shown(told)} training examples"
                self._say_once(printable(f"client {client} cannot join: {why}"))
        return sum(bool(num_examples[client]) for client in nodes)

    def _find_nodes(self) -> dict[int, int]:
        """Return the nodes of our clients that are online, found by their keys, whatever names they claim."""
        nodes = {}
        for node in self.grid.get_nodes():
            client = self._client_of.get(node.public_key)
            if client is None:
                name = printable(node.name)[:40]
                self._say_once(f"node {node.node_id} ({name!r}) has none of the clients' keys and is ignored")
            else:
                nodes[client] = node.node_id
        return nodes

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        self._round = cohort.round
        self.wait_for(self.deployment.min_clients)
        replies = self._ask(MessageType.TRAIN, cohort, downloads)
        answers: list[Answer | Failure] = []
        for row, client in enumerate(cohort.ids.tolist()):
            reply = replies.get(client, NO_ANSWER)
            if isinstance(reply, Failure):
                answers.append(reply)
            else:
                self._wire[2:] += measure(reply)
                expected = expect_upload(self.algorithm, downloads.rows(row))
                answers.append(decode_answer(reply, expected, self.algorithm.task.layers))
        return answers

    def commit(self, accepted: Tensor) -> None:
        self._base[accepted] = self._round

    def evaluate(
        self, cohort: Cohort, downloads: Payload, *, whole: bool = False
    ) -> tuple[ClientMetrics, dict[int, Failure]]:
        """A client that is offline or silent has no metrics. One that refuses or raises is a failure."""
        objective = self.algorithm.task.objective
        names = ["score", "loss", *(metric.name for metric in objective.metrics)]
        metrics, failures = dict.fromkeys(cohort.ids.tolist(), [torch.nan] * len(names)), {}
        for client, reply in self._ask(MessageType.EVALUATE, cohort, downloads).items():
            try:
                if isinstance(reply, Failure):
                    raise PfedlaError(f"{reply.reason}: {reply.detail}")
                numbers = read_numbers(reply, *names)
                if objective.metric.percent and not (math.isnan(numbers[0]) or 0 <= numbers[0] <= 1):  # nan: undefined
                    raise PfedlaError(f"its {objective.headline} is {numbers[0]}")
                metrics[client] = numbers
            except PfedlaError as error:
                failures[client] = Failure("evaluation raised", str(error))
        score, loss, *others = torch.tensor(list(metrics.values()), dtype=torch.float64).T
        return ClientMetrics(score, loss, dict(zip(names[2:], others, strict=True))), failures

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        """Return empty models: each site writes its own when it is evaluated, as after the last round."""
        return [{} for _ in cohort.ids]

    def state(self) -> Params:
        return {"base": self._base.clone(), "wire": self._wire.clone()}

    def load(self, state: Params) -> None:
        self._base, self._wire = state["base"].clone(), state["wire"].clone()

    def __enter__(self) -> Self:
        one_thread.__enter__()  # as when simulating: the server's sums do not depend on the number of cores
        return self

    def __exit__(self, *error: object) -> None:
        one_thread.__exit__()

    def _ask(self, kind: str, cohort: Cohort, downloads: Payload) -> dict[int, Reply]:
        """Return the replies of the clients that are online and had joined when the cohort was drawn."""
        nodes, contents, offline = self._find_nodes(), {}, []
        for row, client in enumerate(cohort.ids.tolist()):
            if cohort.num_examples[row] and client in nodes:
                about = {"run": self.run, "client": client, "base": int(self._base[client])}
                about |= {"round": cohort.round, "seed": cohort.seed}
                contents[client] = encode_payload(downloads.rows(row), self.algorithm.task.layers, **about)
                self._wire[:2] += measure(contents[client]) if kind == MessageType.TRAIN else 0
            elif cohort.num_examples[row]:
                offline.append(client)
        if offline:
            self.say(f"round {self._round}, {kind}: offline: {offline}")
        replies = self._exchange(kind, nodes, contents)
        for client, reply in list(replies.items()):
            if isinstance(reply, Failure) and reply.reason == NO_ANSWER.reason:
                self.say(f"round {self._round}, {kind}: client {client} did not answer: {reply.detail}")
                del replies[client]
        return replies

    def _exchange(self, kind: str, nodes: dict[int, int], contents: dict[int, RecordDict]) -> dict[int, Reply]:
        """Send each client its message and collect what comes back in time."""
        timeout = self.deployment.round_timeout
        limit = min(JOINING, timeout) if kind == MessageType.QUERY else timeout
        for content in contents.values():
            self._signer.sign(kind, content)
        messages = [Message(content, nodes[client], kind, ttl=limit) for client, content in contents.items()]
        ids = list(self.grid.push_messages(messages)) if messages else []
        if len(ids) != len(messages):
            raise PfedlaError("the SuperLink did not take the messages: they are too large for it")
        replies: dict[int, Reply] = dict.fromkeys(contents, Failure(NO_ANSWER.reason, f"nothing came in {limit:.0f} s"))
        waiting = {message: client for message, client in zip(ids, contents, strict=True) if message}
        awaited = {client for client in contents if self._unanswered[client] < SILENT} or set(contents)
        self._unanswered.update(contents.keys())
        end, is_over = time.monotonic() + limit, False
        while awaited & {*waiting.values()} and not is_over:
            is_over = time.monotonic() >= end  # then look once more: reading the others' replies takes time
            for message, client in list(waiting.items()):
                if (reply := self._pull(message)) is not None:
                    replies[client] = reply
                    del waiting[message], self._unanswered[client]
            if awaited & {*waiting.values()} and not is_over:
                time.sleep(max(POLL, 0.1 * len(waiting)))
        return replies

    def _pull(self, message: str) -> Reply | None:
        """Return the reply to one message, if it has come."""
        try:  # one by one: Flower forgets what it hands out, so an unreadable reply would take others along
            for reply in self.grid.pull_messages([message]):
                if reply.has_error():
                    reason = NO_ANSWER.reason if reply.error.code in GONE else "raised"
                    return Failure(reason, printable(reply.error.reason or ""))
                refusal = read_config(reply.content).get("refusal")
                return reply.content if refusal is None else Failure("refused", printable(str(refusal)))
        except httpx.HTTPError:  # the SuperLink is gone: the run ends and can be resumed
            raise
        except Exception as error:  # untrusted input may raise anything
            return Failure("not an upload", printable(f"it cannot be read: {type(error).__name__}: {error}"))
        return None


def printable(text: str) -> str:
    """Return untrusted text as a part of one line of the log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])
