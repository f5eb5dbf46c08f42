"""Clients behind Flower's Grid: sites that keep their data and what is private, and may come and go.

Client i is the node with the i-th public key. The server remembers after which round each client's upload was last taken:
that version of its private state is the one the client is told to go on from.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from pfedla.flower.codec import CONFIG, Wire, config_of, decoded_answer, encoded_payload, number_of, wire_of
from pfedla.flower.keys import pem_of
from pfedla.flower.plan import Deployment
from pfedla.flower.remote import Joined, RemoteFederation

POLL = 0.5  # seconds between two looks at what has come
JOINING = 120.0  # seconds for a client to answer when it is asked to join
ASK_AGAIN = 60.0  # seconds until a client that could not join may try again
COMMITTED, WIRE = "committed", "wire"  # of the state in a checkpoint
GONE = {5: "the node is gone", 8: "its process was killed", 3: "its answer is not whole", 4: "its answer is not whole"}


class FlowerEngine:
    """Implements the Engine contract over push and pull."""

    def __init__(
        self, grid: Grid, algorithm: Algorithm, federation: RemoteFederation, deployment: Deployment, run: str, seed: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.grid, self.algorithm, self.federation, self.deployment = grid, algorithm, federation, deployment
        self.run, self.seed, self.say = run, seed, say
        self._client_of = {pem_of(key): client for client, key in enumerate(deployment.keys)}
        self._committed = torch.zeros(len(federation), dtype=torch.int64)  # the round of the last upload taken, by client
        self._wire = torch.zeros(4, dtype=torch.int64)  # training traffic: bytes and arrays down, bytes and arrays up
        self._round = 0
        self._said: set[str] = set()
        self._ask_again: dict[int, float] = {}  # when a client that could not join is asked again
        self._tries: dict[int, int] = {}
        self._away: set[int] = set()  # clients that had joined and are not online

    # Who is there

    def gather(self) -> None:
        """Wait until all clients have joined, or as long as may be waited if enough have."""
        self.say(f"waiting for {len(self.federation)} clients, up to {self.deployment.wait:.0f} s")
        self._wait(lambda: self._admit() == len(self.federation))
        if len(self.federation.joined) < self.deployment.min_clients:
            raise self._too_few(self.federation.joined)
        absent = [str(client) for client in range(len(self.federation)) if client not in self.federation.joined]
        missing = f"; not there yet: {', '.join(absent)}" if absent else ""
        self.say(f"{len(self.federation.joined)} of {len(self.federation)} clients have joined{missing}")

    def _wait(self, enough: Callable[[], bool]) -> None:
        end = time.monotonic() + self.deployment.wait
        while not enough() and time.monotonic() < end:
            time.sleep(1.0)

    def _too_few(self, there: Mapping[int, object]) -> GaveUpError:
        who = ", ".join(map(str, there)) or "nobody"
        return GaveUpError(
            f"after {self.deployment.wait:.0f} s only {len(there)} of {len(self.federation)} clients are there ({who}), "
            f"fewer than min_clients = {self.deployment.min_clients}; start the others, then go on with resume"
        )

    def _online(self) -> dict[int, int]:
        """The nodes of our clients, by their keys; whatever name they claim."""
        nodes = {}
        for node in self.grid.get_nodes():
            client = self._client_of.get(node.public_key)
            if client is None:
                self._say_once(f"node {node.node_id} ({node.name!r:.40}) has none of the clients' keys: it is left out")
            else:
                nodes[client] = node.node_id
        return nodes

    def _admit(self) -> int:
        """Let those join who have come since; they take part from the next round on. Returns how many have joined by now."""
        now = time.monotonic()
        new = {
            client: node
            for client, node in self._online().items()
            if client not in self.federation.joined and now >= self._ask_again.get(client, 0)
        }
        messages = {client: RecordDict({CONFIG: self._config("join", client)}) for client in new}
        for client, content in self._exchange(messages, MessageType.QUERY, new, JOINING).items():
            self._tries[client] = self._tries.get(client, 0) + 1
            self._ask_again[client] = time.monotonic() + ASK_AGAIN * self._tries[client]  # a silent one holds all others up
            if isinstance(content, Failure):
                self._say_once(f"client {client} cannot join: {content.detail or content.reason}")
                continue
            try:
                self.federation.admit(client, Joined.of(config_of(content), len(self.federation.classes)))
            except PfedlaError as error:
                self._say_once(_plain(f"client {client} cannot join: {error}"))
        return len(self.federation.joined)

    def _say_once(self, line: str) -> None:
        if line not in self._said and len(self._said) < 1000:
            self._said.add(line)
            self.say(line)

    # The Engine contract

    def train(self, cohort: Cohort, downloads: Payload) -> list[Answer | Failure]:
        self._round = cohort.round
        ids = cohort.ids.tolist()
        nodes = self._present(ids)
        messages = {
            client: self._with_payload("train", client, cohort, downloads.rows(row))
            for row, client in enumerate(ids)
            if client in nodes
        }
        replies = self._exchange(messages, MessageType.TRAIN, nodes)
        for content in messages.values():
            self._wire[:2] += torch.tensor(wire_of(content))
        answers: list[Answer | Failure] = []
        for row, client in enumerate(ids):
            reply = replies.get(client, NO_ANSWER)
            if isinstance(reply, Failure):
                if reply.reason == NO_ANSWER.reason and reply.detail:  # of others, the round's report tells
                    self.say(f"round {self._round}: client {client} did not answer: {reply.detail}")
                answers.append(reply)
            else:
                expected = self.algorithm.upload_like(downloads.rows(row))
                answers.append(decoded_answer(reply, expected, self.algorithm.task.layers))
                if isinstance(answers[-1], Answer):
                    self._wire[2:] += torch.tensor(wire_of(reply))
        return answers

    def commit(self, accepted: Tensor) -> None:
        self._committed[accepted] = self._round
        self._admit()

    def evaluate(self, cohort: Cohort, downloads: Payload) -> ClientMetrics:
        ids, nodes = cohort.ids.tolist(), self._online()
        messages = {
            client: self._with_payload("evaluate", client, cohort, downloads.rows(row))
            for row, client in enumerate(ids)
            if client in nodes and client in self.federation.joined
        }
        replies = self._exchange(messages, MessageType.EVALUATE, nodes)
        metrics = []
        for client in ids:
            content = replies.get(client, NO_ANSWER)
            if isinstance(content, Failure):
                if client in replies:
                    self.say(f"client {client} was not evaluated: {content.detail or content.reason}")
                content = RecordDict()
            try:
                accuracy, loss = (number_of(content, key) for key in ("accuracy", "loss"))
            except PfedlaError:
                accuracy = loss = torch.nan
            metrics.append((accuracy, loss) if 0 <= accuracy <= 1 else (torch.nan, torch.nan))
        return ClientMetrics(*(torch.tensor(column, dtype=torch.float64) for column in zip(*metrics, strict=True)))

    def personal_models(self, cohort: Cohort, downloads: Payload) -> list[Params]:
        """None comes here: every site has written its own when it was evaluated, as it is after the last round."""
        return [{} for _ in cohort.ids]

    def state(self) -> Params:
        return {COMMITTED: self._committed.clone(), WIRE: self._wire.clone()}

    def load(self, state: Params) -> None:
        self._committed, self._wire = state[COMMITTED].clone(), state[WIRE].clone()

    def wire(self) -> dict[str, Wire]:
        """What training has sent as arrays, headers included."""
        numbers = self._wire.tolist()
        return {"down": Wire(*numbers[:2]), "up": Wire(*numbers[2:])}

    def __enter__(self) -> Self:
        # As in the simulating engines: the server's sums must not depend on the number of cores.
        self._outer_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.set_num_threads(self._outer_threads)

    # Messages

    def _present(self, ids: Sequence[int]) -> dict[int, int]:
        """The nodes of those of the cohort who are there; waits until as many clients are there as there must be."""
        known = set(self.federation.joined)  # who joins only now had no number of examples when the cohort was drawn
        there: dict[int, int] = {}

        def enough() -> bool:
            nonlocal there
            there = {client: node for client, node in self._online().items() if client in self.federation.joined}
            if len(there) >= self.deployment.min_clients:
                return True
            self._admit()
            return False

        self._wait(enough)
        if len(there) < self.deployment.min_clients:
            raise self._too_few(there)
        nodes = {client: node for client, node in there.items() if client in ids and client in known}
        for client in ids:
            if client in known and (client in nodes) == (client in self._away):
                self._away ^= {client}
                self.say(f"round {self._round}: client {client} is {'back' if client in nodes else 'away'}")
        return nodes

    def _config(self, action: str, client: int, **more: Any) -> ConfigRecord:
        return ConfigRecord({"action": action, "run": self.run, "client": client, **more})

    def _with_payload(self, action: str, client: int, cohort: Cohort, payload: Payload) -> RecordDict:
        content = encoded_payload(payload, self.algorithm.task.layers)
        mask = content.config_records[CONFIG]["sent"]
        base = int(self._committed[client])
        content[CONFIG] = self._config(action, client, round=cohort.round, seed=self.seed, base=base, sent=mask)
        return content

    def _exchange(
        self, contents: Mapping[int, RecordDict], kind: str, nodes: Mapping[int, int], limit: float = math.inf
    ) -> dict[int, RecordDict | Failure]:
        """Send each client its message and collect what comes back in time."""
        if not contents:
            return {}
        limit = min(limit, self.deployment.round_timeout)
        messages = [Message(content, nodes[client], kind, ttl=limit) for client, content in contents.items()]
        ids = list(self.grid.push_messages(messages))
        if len(ids) != len(messages):
            raise PfedlaError("the SuperLink did not take the messages: they are too large for it")
        waiting = {message: client for message, client in zip(ids, contents, strict=True) if message}
        replies: dict[int, RecordDict | Failure] = {}
        end = time.monotonic() + limit
        while waiting and time.monotonic() < end:
            self._pull(waiting, replies)
            if waiting:
                time.sleep(max(POLL, 0.1 * len(waiting)))
        self._pull(waiting, replies)  # what came while another's was being read
        late = Failure(NO_ANSWER.reason, f"nothing came in {limit:.0f} s")
        return replies | dict.fromkeys(waiting.values(), late)

    def _pull(self, waiting: dict[str, int], replies: dict[int, RecordDict | Failure]) -> None:
        """Move what is there. One by one: Flower forgets all it hands out, so a reply that cannot be read would take those
        handed out with it along; and by the message that was asked for, whatever the reply says of itself."""
        for message, client in list(waiting.items()):
            found: RecordDict | Failure | None
            try:
                came = list(self.grid.pull_messages([message]))
                found = _content_of(came[0]) if came else None
            except httpx.HTTPError:  # the SuperLink is gone: this run ends, the next goes on from its checkpoint
                raise
            except Exception as error:  # of what a stranger sends, anything may be raised
                found = Failure("not an upload", _plain(f"it cannot be read: {type(error).__name__}: {error}"))
            if found is not None:
                replies[client] = found
                del waiting[message]


def _content_of(reply: Message) -> RecordDict | Failure:
    if reply.has_error():
        code, reason = reply.error.code, reply.error.reason or ""
        return Failure(NO_ANSWER.reason, GONE[code]) if code in GONE else Failure("raised", _plain(reason))
    refusal = config_of(reply.content).get("refusal")
    return reply.content if refusal is None else Failure("refused", _plain(str(refusal)))


def _plain(text: str) -> str:
    """A stranger's text as a part of one line of the log."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])
