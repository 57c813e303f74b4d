"""A client written from protocol.md alone, without the library. It uses one connection after the other.

It also does what a well-behaved client would not: it repeats requests, names foreign ids, sends a `hello` that is rejected,
and ends connections at any time. With a session its requests outlive a connection.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

from genie.testing.simulation.history import NOTE
from genie.testing.simulation.scenario import ClientContext, Workload

Payload = dict[str, Any]

REJECTED_HELLOS: tuple[Payload, ...] = ({"protocol": 2}, {"protocol": 1, "sesion": "x" * 16}, {"namespace": "other"})
"""Fields of a `hello` that the server rejects without creating a session."""


class PendingRequest:
    """One of the client's requests, and its state according to the messages. `ended`: no further message is expected."""

    def __init__(self, payload: Payload, expires: bool, generation: int) -> None:
        self.payload = payload
        self.ref: str = payload["ref"]
        self.expires = expires
        """The client does not release it, so that it ends by a timeout."""
        self.generation = generation
        """The session or connection that it belongs to; see `WireClient.generation`."""
        self.id = 0
        self.held = False
        self.ended = False
        self.sent = False
        """It was sent on the current connection."""
        self.releasing = False
        self.mentioned = True
        """The server sent a message about it on the current connection."""


class WireClient:
    """A simulated client on the bare wire: `run` executes it from start to end."""

    def __init__(self, context: ClientContext, name: str, random: Random, session: str | None) -> None:
        self.context = context
        self.name = name
        self.random = random
        self.v1_random = Random(f"{context.scenario.seed} {name} extra")
        """Decides the choices of scenarios with `v1_features` only, so that the histories of other seeds do not depend on it."""
        self.v1_features = context.scenario.v1_features
        self.session = session
        self.session_timeout_ms = random.choice([10_000, 10_000, 3_000, 30_000])
        self.requests: dict[str, PendingRequest] = {}
        """By `ref`."""
        self.quiet = False
        """The current connection is quiet: it gets no `queued`."""
        self.generation = 0
        """Counts the sessions of this client or, without a session, its connections. Refs are unique within each."""
        self._workload = Workload(context.scenario, random, self.v1_random)
        self._by_id: dict[int, PendingRequest] = {}
        self._connection: _Connection | None = None
        self._leader_hint: str | None = None
        self._progress = asyncio.Event()
        """Set by every message, and when the connection ends."""
        self._ref_count = 0
        self._pinged: set[str] = set()
        """Refs of the pings that are unanswered on the current connection."""
        self._synced = False
        """The server has sent the state of all requests of the session: its reply to the first `ping` has arrived."""
        self._ready = False
        """The client may send requests: there is no handshake, or it succeeded."""

    def __str__(self) -> str:
        pending = [f"{request.id or ref}" for ref, request in self.requests.items() if not request.ended]
        return f"{self.name} waits for {' '.join(pending) or 'nothing'}"

    async def run(self) -> None:  # noqa: C901 - the main loop, and the shutdown
        """Send random commands until the scenario ends, then wait until every request has ended."""
        stopping = self.context.stopping
        while not stopping.is_set():
            await asyncio.sleep(self.random.expovariate(1 / self.context.scenario.think_time_s))
            if self._connection is None:
                await self._connect()
            elif self._ready and not stopping.is_set():
                self._act_at_random()
        while True:
            if self._connection is None and not await self._connect():
                await asyncio.sleep(self.random.uniform(0.05, 0.3))
                continue
            self._progress.clear()
            if self._ready and self._release_all() and not self._pinged:
                break
            await asyncio.sleep(0.02)
            try:
                async with asyncio.timeout(1):
                    await self._progress.wait()
            except TimeoutError:
                if self._ready:
                    self._resend_unanswered()
                if not self._pinged:
                    self._ping()
        if self._connection is not None and self.v1_features and self.v1_random.random() < 0.5:
            self._bye()
        elif self._connection is not None:
            self._connection.transport.close()
        self.context.history.append(NOTE, self.name, "finished")

    # -- the workload -------------------------------------------------------------------------------------

    def _act_at_random(self) -> None:  # noqa: C901, PLR0912 - one branch for each kind of action
        """Do one random thing: request, release, extend, ping, inspect, repeat a request, or disconnect."""
        random = self.random
        dice = random.random()
        if self.v1_features and self._act_with_v1_features():
            return
        live = [
            request
            for request in self.requests.values()
            if self._can_release(request) and not request.ended and not request.expires
        ]
        if dice < 0.5 or not live:
            for _ in range(random.choice([1, 1, 1, 2, 4])):
                self._request()
        elif dice < 0.8:
            held = [request for request in live if request.held]
            self._release(random.choice(held or live))
        elif dice < 0.85:
            request = random.choice(live)
            if request.id:
                self._send(
                    "extend", ref=self._next_ref(), id=request.id, transactionTimeout=random.choice([50, 1_000, 5_000])
                )
        elif dice < 0.88:
            self._ping()
        elif dice < 0.9:
            self._send("inspect", ref=self._next_ref(), limit=random.choice([1, 100]))
        elif dice < 0.93:
            foreign = self.context.recent_request_id(random)
            if foreign:
                self._send("release", ref=self._next_ref(), id=foreign)
        elif dice < 0.95:
            ref = random.choice(list(self.requests))
            if self.requests[ref].sent:
                self._send_request(self.requests[ref])
        elif dice < 0.97:
            self._disconnect()
        else:
            self._request()
            if self._connection is not None and random.random() < 0.5 and self.session is None:
                self._connection.output_ended = True
                self._connection.transport.write_eof()

    def _act_with_v1_features(self) -> bool:
        """Sometimes do a thing of scenarios with `v1_features`: `bye`, repeat or release an ended request; return whether it did."""
        dice = self.v1_random.random()
        if dice < 0.02:
            self._bye()
        elif dice < 0.12:
            ended = [
                request
                for request in self.requests.values()
                if request.ended and request.generation == self.generation and request.id
            ]
            if ended and self.v1_random.random() < 0.7:
                self._send_request(self.v1_random.choice(ended[-5:]))
            elif ended:
                self._send("release", ref=self.v1_random.choice(ended[-5:]).ref)
        elif dice < 0.14:
            self._send("release", ref=self._next_ref())  # no request has this ref
        return dice < 0.14

    def _request(self) -> None:
        """Send a random new request, unless the client has the maximum of live ones."""
        if sum(not request.ended for request in self.requests.values()) >= self.context.scenario.max_live_requests:
            return
        payload = self._workload.request(self.name) | {"ref": self._next_ref()}
        request = PendingRequest(payload, self.random.random() < 0.2, self.generation)
        self.requests[request.ref] = request
        self._send_request(request)

    def _release_all(self) -> bool:
        """Release every held lock, except those left to their timeout; return whether all requests have ended."""
        for request in self.requests.values():
            if request.held and not request.ended and not request.releasing and not request.expires:
                self._release(request)
        self._settle_unmentioned()
        return all(request.ended for request in self.requests.values())

    # -- sending ------------------------------------------------------------------------------------------

    def _send(self, command: str, **payload: Any) -> None:
        if self._connection is not None and not self._connection.output_ended:
            self._connection.transport.write(json.dumps({"command": command, "payload": payload}).encode() + b"\n")

    def _next_ref(self) -> str:
        self._ref_count += 1
        return f"{self.name}.{self._ref_count}"

    def _can_release(self, request: PendingRequest) -> bool:
        """Whether a release can name the request: by id or, on the quiet connection that sent it, by ref."""
        return request.id != 0 or (self.quiet and request.sent)

    def _release(self, request: PendingRequest) -> None:
        """Send a release by id or by ref, whichever is possible; if both are, choose at random."""
        by_ref = request.generation == self.generation and (request.sent or (request.id and self.session is not None))
        if by_ref and self.v1_features and (not request.id or self.v1_random.random() < 0.4):
            request.releasing = True
            self._send("release", ref=request.ref)
        elif request.id:
            request.releasing = True
            self._send("release", ref=self._next_ref(), id=request.id)

    def _ping(self) -> None:
        ref = self._next_ref()
        self._pinged.add(ref)
        self._send("ping", ref=ref)

    def _bye(self) -> None:
        """Send `bye`, which ends the session. Nothing is sent after it; the server closes the connection."""
        if self._connection is not None and not self._connection.output_ended:
            self._connection.bye_ref = self._next_ref()
            self._send("bye", ref=self._connection.bye_ref)
            self._connection.output_ended = True

    def _send_request(self, request: PendingRequest) -> None:
        """Send a request, or repeat it with the same ref."""
        request.sent = True
        self._send("request", **request.payload)

    def _resend_unanswered(self) -> None:
        """Send the requests that the server may not have received, because no message about them has arrived."""
        for request in self.requests.values():
            if not request.ended and not request.sent and not request.id:
                self._send_request(request)

    # -- receiving ----------------------------------------------------------------------------------------

    def message_received(self, message: Payload) -> None:
        """Process one message of the server."""
        self._progress.set()
        command, payload = message["command"], message["payload"]
        request = self.requests.get(payload.get("ref", "")) or self._by_id.get(payload.get("id", 0))
        if request is not None and command != "error":
            request.mentioned = True
        if command == "welcome":
            self._ready = True
            self._on_welcome(payload["resumed"])
        elif command == "pong":
            self._pinged.discard(payload["ref"])
            self._synced = self._ready
            self._settle_unmentioned()
        elif command == "error":
            self._on_error(payload, request)
        elif request is not None and command in ("queued", "locked", "released", "extended"):
            self._on_request_message(request, command, payload["id"])

    def _on_request_message(self, request: PendingRequest, command: str, id_: int) -> None:
        """Update a request by a `queued`, `locked`, `extended` or `released` about it."""
        if request.id != id_:
            # The first message about it; or it had another id on a lineage that did not survive; or it had ended without
            # being stored, and was sent again to another server.
            request.id, request.held = id_, False
            self._by_id[id_] = request
            self.context.request_ids.append(id_)
            if request.ended and command in ("queued", "locked"):
                self._release(request)
        if command in ("locked", "extended"):
            request.held = True
        elif command == "released":
            request.ended = True

    def _on_welcome(self, resumed: bool) -> None:
        """Send what the server may not have received. If the session was not resumed, it is a new one."""
        if not resumed:
            # The waiting requests were cancelled with the old session; granted locks may still be held.
            self._end_unconfirmed()
            self.generation += 1
        self._resend_unanswered()

    def _settle_unmentioned(self) -> None:
        """Query or release the requests that the server did not mention after the connection was made.

        With a session such a request has ended (the reply to its release may be lost), or it waits and the connection is
        quiet. Without a session it was cancelled with its connection, or it is still held.
        """
        for request in self.requests.values() if self._synced else ():
            if request.id and not request.ended and not request.mentioned and not request.releasing:
                is_of_session = self.session is not None and request.generation == self.generation
                if is_of_session and (self.quiet or (self.v1_features and self.v1_random.random() < 0.3)):
                    request.mentioned = True
                    self._send_request(request)
                else:
                    self._release(request)

    def _on_error(self, payload: Payload, request: PendingRequest | None) -> None:
        """Process an error that replies to a command about `request`, if any: retry, end it, or try another server."""
        code, of_request = payload["code"], "id" not in payload
        self._leader_hint = payload.get("leader")
        if self._connection is not None and self._connection.bye_ref == payload["ref"]:
            self._connection.transport.close()
        if code == "unavailable":
            self._pinged.discard(payload["ref"])
            if not self._ready:
                self._disconnect()  # the server rejected `hello`
            elif request is not None:
                request.releasing = False
                if of_request and not request.id:
                    request.sent = False
            connection = self._connection
            if self._leader_hint is not None and connection is not None and connection.address != self._leader_hint:
                connection.transport.close()
        elif request is not None and (code == "unknown-id" or (of_request and not request.id)):
            request.ended = True

    # -- the connection -----------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        """Connect to the leader that a server has named, or to a random server; return whether it succeeded."""
        address = self._leader_hint or self.random.choice(self.context.addresses)
        self._leader_hint = None
        host, port = address.split(":")
        try:
            async with asyncio.timeout(2):
                await asyncio.get_running_loop().create_connection(lambda: _Connection(self, address), host, int(port))
        except OSError:
            return False
        return self._connection is not None

    def connection_made(self, connection: _Connection) -> None:
        """Start on a new connection, with or without a handshake."""
        self._connection = connection
        self._pinged.clear()
        self._synced = self.session is None
        self.quiet = self.v1_features and self.v1_random.random() < 0.5
        handshake = self.session is not None or self.quiet or (self.v1_features and self.v1_random.random() < 0.5)
        self._ready = not handshake
        if not handshake:
            self.generation += 1
        for request in self.requests.values():
            request.mentioned = request.releasing = False
        if handshake:
            self._hello()
            self._ping()

    def _hello(self) -> None:
        """Send `hello`, in scenarios with `v1_features` sometimes after one that the server rejects."""
        if self.v1_features and self.v1_random.random() < 0.1:
            rejected = self.v1_random.choice(REJECTED_HELLOS)
            self._send("hello", ref=self._next_ref(), **rejected)
        payload: Payload = {"ref": self._next_ref(), "protocol": 1, "client": f"raw/{self.name}"}
        if self.session is not None:
            payload |= {"session": self.session, "sessionTimeout": self.session_timeout_ms}
        if self.v1_features:
            payload["quiet"] = self.quiet
        self._send("hello", **payload)

    def connection_lost(self, connection: _Connection) -> None:
        """Handle the end of a connection: without a session the requests that were not granted end with it."""
        if connection is not self._connection:
            return
        self._connection = None
        self._progress.set()
        for request in self.requests.values():
            request.sent = request.releasing = False
        if self.session is None:
            self._end_unconfirmed()

    def _end_unconfirmed(self) -> None:
        """Give up the requests that ended with their connection or session; the state of granted ones is checked later."""
        for request in self.requests.values():
            if not request.id or (not request.ended and self.session is not None and not request.held):
                request.ended = True
            request.expires = False  # this connection would get no message about the timeout

    def _disconnect(self) -> None:
        """Close or abort the connection, at random."""
        if self._connection is not None:
            if self.random.random() < 0.5:
                self._connection.transport.abort()
            else:
                self._connection.transport.close()


class _Connection(asyncio.Protocol):
    """One connection of a wire client: splits the input into messages."""

    def __init__(self, client: WireClient, address: str) -> None:
        self._client = client
        self._data = b""
        self.address = address
        self.output_ended = False
        """The client sends nothing more: it sent `bye` or an end of file."""
        self.bye_ref = ""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._client.connection_made(self)

    def data_received(self, data: bytes) -> None:
        lines = (self._data + data).split(b"\n")
        self._data = lines.pop()
        for line in lines:
            self._client.message_received(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._client.connection_lost(self)
