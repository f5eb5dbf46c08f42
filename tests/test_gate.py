"""The gate: what SuperNodes send passes unchanged; everything else is refused."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pfedla.flower import gate


class Behind:
    """A SuperLink that notes what reaches it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes, str]] = []

        async def note(request: Request) -> Response:
            key = request.headers.get("x-key", "")
            self.seen.append((request.method, request.url.path, await request.body(), key))
            return Response(b"answer", status_code=201, headers={"x-own": "kept"})

        routes = [Route("/{path:path}", note, methods=["GET", "POST", "PUT", "DELETE"])]
        self.transport = httpx.ASGITransport(Starlette(routes=routes))

    def ask(self, path: str, body: bytes | AsyncIterator[bytes] = b"", method: str = "POST") -> httpx.Response:
        async def send() -> httpx.Response:
            door = httpx.ASGITransport(gate.make_gate("http://superlink", transport=self.transport))
            async with httpx.AsyncClient(transport=door, base_url="http://gate") as client:
                return await client.request(method, path, content=body, headers={"x-key": "signed"})

        return asyncio.run(send())


def push(node: int, *messages: tuple[int, str]) -> bytes:
    """Return a push of messages: (source, what they answer)."""
    listed = [Message(metadata=Metadata(src_node_id=source, reply_to_message_id=to)) for source, to in messages]
    return PushMessagesRequest(node=Node(node_id=node), messages_list=listed).SerializeToString()


@pytest.mark.parametrize("call", gate.CALLS)
def test_calls_of_supernodes_pass_unchanged(call: str) -> None:
    behind, body = Behind(), push(7, (7, "asked"))
    answer = behind.ask(f"/v1/fleet/{call}", body)
    assert (answer.status_code, answer.content, answer.headers["x-own"]) == (201, b"answer", "kept")
    assert behind.seen == [("POST", f"/v1/fleet/{call}", body, "signed")]


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/control/start-run", "POST"),
        ("/v1/fleet/register-node", "POST"),
        ("/v1/fleet/../control/start-run", "POST"),
        ("/v1/fleet/%2e%2e/control/start-run", "POST"),
        ("/v1/fleet/pull-messages/../../control/start-run", "POST"),
        ("/v1/runtime/push-messages", "POST"),
        ("/v1/fleet/pull-messages", "GET"),
        ("/docs", "GET"),
        ("/", "POST"),
    ],
)
def test_nothing_else_passes(path: str, method: str) -> None:
    behind = Behind()
    assert behind.ask(path, method=method).status_code in (404, 405)
    assert not behind.seen


@pytest.mark.parametrize(
    "body",
    [
        push(7, (8, "asked")),  # in another's name
        push(7, (7, "")),  # an order
        push(7, (7, "asked"), (7, "")),
        push(7, (7, "asked"), (1, "asked")),  # in the SuperLink's name
        b"\xff\xff\xff",
    ],
)
def test_messages_of_others_and_orders_are_refused(body: bytes) -> None:
    behind = Behind()
    assert behind.ask("/v1/fleet/push-messages", body).status_code == 403
    assert not behind.seen


def test_large_and_slow_requests_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 2**20
            yield bytes(2**20)

    async def slow() -> AsyncIterator[bytes]:
        yield b"some"
        await asyncio.sleep(30)

    behind = Behind()
    assert behind.ask("/v1/fleet/push-object", endless()).status_code == 413
    assert sent <= gate.LARGEST + 2**21
    monkeypatch.setattr(gate, "SLOWEST", 0.1)
    assert behind.ask("/v1/fleet/push-object", slow()).status_code == 413
    assert not behind.seen


def test_a_superlink_that_is_away_can_be_tried_again() -> None:
    behind = Behind()

    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    behind.transport = httpx.MockTransport(fail)  # type: ignore[assignment]
    assert behind.ask("/v1/fleet/pull-messages").status_code == 502  # one of those that SuperNodes try again


def test_the_budget_of_an_address_is_its_own_and_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(gate.time, "monotonic", lambda: clock)
    monkeypatch.setattr(gate, "BURST", 3.0)
    budget = gate.Budget()
    assert [budget.spend("a") for _ in range(4)] == [True, True, True, False]
    assert budget.spend("b")
    clock = 1 / gate.RATE
    assert [budget.spend("a") for _ in range(2)] == [True, False]
    for number in range(gate.REMEMBERED + 10):
        budget.spend(str(number))
    assert len(budget._left) == gate.REMEMBERED
