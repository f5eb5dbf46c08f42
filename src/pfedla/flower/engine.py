"""Clients behind Flower's Grid: sites that keep their data and private state, and may come and go.

Client i is the node with the i-th public key. The server remembers the round of each client's last accepted
upload, its `base`: the client continues from its private state after that round. Base 0: it has not trained.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from pfedla.core.contracts import Algorithm, Answer, ClientMetrics, Cohort, Failure, Params, Payload
from pfedla.core.errors import GaveUpError, PfedlaError
from pfedla.core.uploads import NO_ANSWER
from pfedla.engines.client import one_thread
from pfedla.flower.codec import CONFIG, decode_answer, encode_payload, measure, read_config, read_number
from pfedla.flower.deployment import DeploymentSettings
from pfedla.flower.keys import to_pem
from pfedla.flower.remote import RemoteFederation, SiteInfo

POLL = 0.5  # seconds between two looks for replies
JOINING = 120.0  # seconds for a client to answer when it is asked to join
ASK_AGAIN = 60.0  # seconds until a client that could not join is asked again, plus ten times what asking took
WIRE = ("down_bytes", "down_arrays", "up_bytes", "up_arrays")
GONE = {3: "its answer is incomplete", 4: "its answer is incomplete"}  # by Flower's error codes
GONE |= {5: "the node is gone", 8: "its process was killed"}

Replies = dict[int, RecordDict | Failure]


@dataclass(kw_only=True)
class FlowerEngine:
    """Implements the Engine contract over push and pull."""

    grid: Grid
    algorithm: Algorithm
    federation: RemoteFederation
    settings: DeploymentSettings
    run: str  # what the sites call this run
    say: Callable[[str], None] = lambda line: None
    _round: int = 0
    _said: set[str] = field(default_factory=set)
    _ask_at: dict[int, float] = field(default_factory=dict)  # when to ask a client again to join
    _away: set[int] = field(default_factory=set)  # clients that have joined and are not online

    def __post_init__(self) -> None:
        self._client_of = {to_pem(key): client for client, key in enumerate(self.settings.keys)}
        self._base = torch.zeros(len(self.federation), dtype=torch.int64)
        self._wire = torch.zeros(len(WIRE), dtype=torch.int64)  # what training has sent, with headers

    # Joining

    def gather(self) -> None:
        """Wait until all clients have joined, or until the time is up if enough have."""
        total, joined = len(self.federation), self.federation.joined
        self.say(f"waiting up to {self.settings.wait:.0f} s for {total} clients")
        self._wait(lambda: self.admit() == total)
        missing = [client for client in range(total) if client not in joined]
        self.say(f"{len(joined)} of {total} clients have joined" + (f"; missing: {missing}" if missing else ""))

    def admit(self) -> int:
        """Ask clients that have come online to join; return how many have joined. Blocks until they answer."""
        start, nodes = time.monotonic(), self._find_nodes()
        new = [c for c in nodes if c not in self.federation.joined and start >= self._ask_at.get(c, 0)]
        messages = {client: RecordDict({CONFIG: self._config("join", client)}) for client in new}
        for client, reply in self._exchange(messages, MessageType.QUERY, nodes, JOINING).items():
            now = time.monotonic()
            self._ask_at[client] = now + ASK_AGAIN + 10 * (now - start)  # a silent client delays all others
            try:
                if isinstance(reply, Failure):
                    raise PfedlaError(reply.detail or reply.reason)
                self.federation.admit(client, SiteInfo.read(read_config(reply), len(self.federation.classes)))
            except PfedlaError as error:
                self._say_once(printable(f"client {client} cannot join: {error}"))
        return len(self.federation.joined)

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Wait until there are enough clients; raise if then fewer than min_clients are online."""
        end = time.monotonic() + self.settings.wait
        while not enough() and time.monotonic() < end:
            time.sleep(1.0)
        if (count := len(self._find_joined())) < self.settings.min_clients:
            online = f"{count} of {len(self.federation)} clients are online after {self.settings.wait:.0f} s"
            raise GaveUpError(f"{online}, min_clients = {self.settings.min_clients}; start the others, then resume")

    def _find_joined(self) -> dict[int, int]:
        return {client: n for client, n in self._find_nodes().items() if client in self.federation.joined}

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

    def _say_once(self, line: str) -> None:
        if line not in self._said and len(self._said) < 1000:
            self._said.add(line)
            self.say(line)

    # The Engine contract

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        self._round = cohort.round
        ids = cohort.ids.tolist()
        nodes = self._find_participants(ids)
        messages = self._address("train", cohort, downloads, nodes)
        replies = self._exchange(messages, MessageType.TRAIN, nodes)
        for content in messages.values():
            self._wire[:2] += torch.tensor(measure(content))
        answers: list[Answer | Failure] = []
        for row, client in enumerate(ids):
            reply = replies.get(client, NO_ANSWER)
            if isinstance(reply, Failure):
                answers.append(reply)
                if reply.reason == NO_ANSWER.reason and reply.detail:  # the display shows other reasons
                    self.say(f"round {self._round}: client {client} did not answer: {reply.detail}")
                continue
            expected = self.algorithm.upload_like(downloads.rows(row))
            answers.append(decode_answer(reply, expected, self.algorithm.task.layers))
            if isinstance(answers[-1], Answer):
                self._wire[2:] += torch.tensor(measure(reply))
        return answers

    def commit(self, accepted: Tensor) -> None:
        self._base[accepted] = self._round

    def evaluate(self, cohort: Cohort, downloads: Payload) -> tuple[ClientMetrics, dict[int, Failure]]:
        """A client that is offline or silent has no metrics. One that refuses or raises is a failure."""
        nodes = self._find_joined()
        messages = self._address("evaluate", cohort, downloads, nodes)
        replies = self._exchange(messages, MessageType.EVALUATE, nodes)
        metrics, failures = dict.fromkeys(cohort.ids.tolist(), (torch.nan, torch.nan)), {}
        for client, reply in replies.items():
            if isinstance(reply, Failure) and reply.reason == NO_ANSWER.reason:
                self.say(f"client {client} was not evaluated: {reply.detail}")
                continue
            try:
                metrics[client] = _read_metrics(reply)
            except PfedlaError as error:
                failures[client] = Failure("evaluation raised", str(error))
        columns = (torch.tensor(column, dtype=torch.float64) for column in zip(*metrics.values(), strict=True))
        return ClientMetrics(*columns), failures

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        """Return empty models: each site writes its own when it is evaluated, as after the last round."""
        return [{} for _ in cohort.ids]

    def state(self) -> Params:
        return {"base": self._base.clone(), "wire": self._wire.clone()}

    def load(self, state: Params) -> None:
        self._base, self._wire = state["base"].clone(), state["wire"].clone()

    def wire(self) -> dict[str, int]:
        return dict(zip(WIRE, self._wire.tolist(), strict=True))

    def __enter__(self) -> Self:
        one_thread.__enter__()  # as when simulating: the server's sums do not depend on the number of cores
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        one_thread.__exit__()

    # Messages

    def _find_participants(self, ids: Sequence[int]) -> dict[int, int]:
        """Return the nodes of the cohort's clients that are online; first wait until min_clients are."""
        known = set(self.federation.joined)  # without clients that had no examples when the cohort was drawn

        def enough() -> bool:
            if is_short := len(self._find_joined()) < self.settings.min_clients:
                self.admit()
            return not is_short

        self._wait(enough)
        online = self._find_joined()
        for client in known.intersection(ids):
            if (client in online) == (client in self._away):
                self._away ^= {client}
                self.say(f"round {self._round}: client {client} is {'back' if client in online else 'away'}")
        return {client: online[client] for client in ids if client in online and client in known}

    def _config(self, action: str, client: int, **more: Any) -> ConfigRecord:
        return ConfigRecord({"action": action, "run": self.run, "client": client, **more})

    def _address(
        self, action: str, cohort: Cohort, downloads: Payload, nodes: Mapping[int, int]
    ) -> dict[int, RecordDict]:
        """Return the message of each client of the cohort that has a node."""
        messages = {}
        for row, client in enumerate(cohort.ids.tolist()):
            if client in nodes:
                content = encode_payload(downloads.rows(row), self.algorithm.task.layers)
                more = {"round": cohort.round, "seed": cohort.seed, "base": int(self._base[client])}
                content[CONFIG] = self._config(action, client, **more, **read_config(content))
                messages[client] = content
        return messages

    def _exchange(
        self, contents: Mapping[int, RecordDict], kind: str, nodes: Mapping[int, int], limit: float = math.inf
    ) -> Replies:
        """Send each client its message and collect what comes back in time."""
        if not contents:
            return {}
        limit = min(limit, self.settings.round_timeout)
        messages = [Message(content, nodes[client], kind, ttl=limit) for client, content in contents.items()]
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(messages):
            raise PfedlaError("the SuperLink did not take the messages: they are too large for it")
        waiting = {message: client for message, client in zip(ids, contents, strict=True) if message}
        replies: Replies = {}
        end = time.monotonic() + limit
        while waiting and time.monotonic() < end:
            self._pull(waiting, replies)
            if waiting:
                time.sleep(max(POLL, 0.1 * len(waiting)))
        self._pull(waiting, replies)  # what came while another reply was read
        late = Failure(NO_ANSWER.reason, f"nothing came in {limit:.0f} s")
        return replies | dict.fromkeys(waiting.values(), late)

    def _pull(self, waiting: dict[str, int], replies: Replies) -> None:
        """Move the replies that have come from `waiting` to `replies`, one by one.

        Flower forgets what it hands out, so an unreadable reply would take the others of its pull along.
        """
        for message, client in list(waiting.items()):
            try:
                came = list(self.grid.pull_messages([message]))
                if not came:
                    continue
                replies[client] = _read_reply(came[0])
            except httpx.HTTPError:  # the SuperLink is gone: the run ends and can be resumed
                raise
            except Exception as error:  # untrusted input may raise anything
                detail = printable(f"it cannot be read: {type(error).__name__}: {error}")
                replies[client] = Failure("not an upload", detail)
            del waiting[message]


def _read_reply(reply: Message) -> RecordDict | Failure:
    if reply.has_error():
        code, reason = reply.error.code, reply.error.reason or ""
        return Failure(NO_ANSWER.reason, GONE[code]) if code in GONE else Failure("raised", printable(reason))
    refusal = read_config(reply.content).get("refusal")
    return reply.content if refusal is None else Failure("refused", printable(str(refusal)))


def _read_metrics(reply: RecordDict | Failure) -> tuple[float, float]:
    """Return accuracy and loss of an evaluation."""
    if isinstance(reply, Failure):
        raise PfedlaError(f"{reply.reason}: {reply.detail}")
    accuracy, loss = (read_number(reply, key) for key in ("accuracy", "loss"))
    if not 0 <= accuracy <= 1:
        raise PfedlaError(f"its accuracy is {accuracy}")
    return accuracy, loss


def printable(text: str) -> str:
    """Return untrusted text as a part of one line of the log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])
