"""The only door of a deployment: it passes on what SuperNodes send to the SuperLink behind it, and nothing else.

Flower's control API has no authentication and shares the SuperLink's port, and the SuperLink checks the key of a caller
but not the source of a message. So the SuperLink listens on loopback, and the gate stands outside: it speaks TLS, takes
only the calls of SuperNodes, and only messages of the caller that answer one of the server's.
"""

import asyncio
import ssl
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, ClassVar

import httpx
import uvicorn
from flwr.proto.fleet_pb2 import PushMessagesRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from pfedla.core.errors import PfedlaError
from pfedla.flower.layout import LOOPBACK

CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
LARGEST = 2**24  # bytes of a request: Flower cuts objects into pieces of 5 MB
SLOWEST = 60.0  # seconds for a request to be there whole
RATE, BURST = 200.0, 2000.0  # requests a second from one address, and how many more at once
CONNECTIONS = 64  # open at once from one address
REMEMBERED = 4096  # addresses whose rate is known
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length", "te", "trailer", "upgrade"}


def make_gate(upstream: str, **options: Any) -> Starlette:
    """Return the gate in front of the SuperLink at `upstream`; `options` are httpx.AsyncClient's."""
    client, budget = httpx.AsyncClient(base_url=upstream, timeout=SLOWEST, **options), Budget()

    async def pass_on(request: Request) -> Response:
        call, address = request.path_params["call"], request.client.host if request.client else ""
        if call not in CALLS:
            return refuse(404, address, f"{call:.40} is no call of a SuperNode")
        if not budget.spend(address):
            return refuse(503, address, "too many requests")  # a SuperNode tries again
        try:
            async with asyncio.timeout(SLOWEST):
                body = await read(request)
        except (TimeoutError, ValueError) as error:
            return refuse(413, address, str(error) or "the request is too slow")
        if call == "push-messages" and (problem := find_problem(body)):
            return refuse(403, address, problem)
        headers = [(key, value) for key, value in request.headers.items() if key.lower() not in HOP_BY_HOP]
        try:
            answer = await client.post(f"/v1/fleet/{call}", content=body, headers=headers)
        except httpx.HTTPError as error:
            return refuse(502, address, f"the SuperLink does not answer: {type(error).__name__}")
        kept = {key: value for key, value in answer.headers.items() if key.lower() not in HOP_BY_HOP}
        kept.pop("content-encoding", None)  # httpx has decoded it
        return Response(answer.content, status_code=answer.status_code, headers=kept)

    return Starlette(routes=[Route("/v1/fleet/{call}", pass_on, methods=["POST"])])


def refuse(status: int, address: str, reason: str) -> Response:
    printable = "".join(letter if letter.isprintable() else " " for letter in reason)
    print(f"pfedla gate: refused {address}: {printable}", flush=True)
    return PlainTextResponse(reason, status_code=status)


async def read(request: Request) -> bytes:
    """Return the body, which is cut off where it is too large."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > LARGEST:
            raise ValueError(f"the request has more than {LARGEST} bytes")
        parts.append(part)
    return b"".join(parts)


def find_problem(body: bytes) -> str:
    """Return what is wrong with a push of messages: each must come from the caller and answer another.

    The SuperLink checks that the caller has the key of the node that it names; a message without `reply_to` would be
    stored as an order to another site.
    """
    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return "the messages cannot be read"
    for message in pushed.messages_list:
        if message.metadata.src_node_id != pushed.node.node_id:
            return f"node {pushed.node.node_id} sent a message in the name of node {message.metadata.src_node_id}"
        if not message.metadata.reply_to_message_id:
            return f"node {pushed.node.node_id} sent a message that answers nothing"
    return ""


class Budget:
    """How many requests each address may still send; it grows with time."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> requests, and when

    def spend(self, address: str) -> bool:
        now = time.monotonic()
        left, then = self._left.pop(address, (BURST, now))
        left = min(BURST, left + RATE * (now - then))
        self._left[address] = (max(0.0, left - 1), now)
        if len(self._left) > REMEMBERED:
            self._left.popitem(last=False)
        return left >= 1


class Bounded(H11Protocol):
    """HTTP for the gate: few connections from one address, and none that asks for nothing."""

    opened: ClassVar[Counter[str]] = Counter()  # connections by address

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = str((self.client or ("",))[0])
        self.opened[self.address] += 1
        if self.opened[self.address] > CONNECTIONS:
            transport.abort()
        else:
            self.waiting = self.loop.call_later(SLOWEST, self._close_unused)

    def _close_unused(self) -> None:
        if self.cycle is None:  # not even the head of a first request has come
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.opened[self.address] -= 1
        if not self.opened[self.address]:
            del self.opened[self.address]
        super().connection_lost(exc)


def run_gate(folder: Path, host: str, port: int, control_port: int) -> None:
    """Run the gate of a deployment until it is stopped."""
    server = folder / "server"
    missing = [name for name in ("ca.crt", "server.crt", "server.key") if not (server / name).exists()]
    if missing:
        raise PfedlaError(f"{server} has no {', '.join(missing)}: is {folder} the folder of `pfedla deploy init`?")
    trusted = ssl.create_default_context(cafile=str(server / "ca.crt"))
    app = make_gate(f"https://{LOOPBACK[0]}:{control_port}", verify=trusted)
    tls: dict[str, Any] = {"ssl_certfile": str(server / "server.crt"), "ssl_keyfile": str(server / "server.key")}
    quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
    uvicorn.run(app, host=host, port=port, http=Bounded, ws="none", lifespan="off", **tls, **quiet)
