"""A client written from protocol.md alone, without the library. The client uses one connection after the other.

The client also does what a well-behaved client would not do: it repeats requests, releases the requests of other clients,
sends a `hello` that the server rejects, and ends connections at any time. If the client has a session, its requests outlive
a connection.
"""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

from genie.testing.simulation.history import NOTE
from simulator.scenario import ClientContext, Workload

Payload = dict[str, Any]

REJECTED_HELLOS: tuple[Payload, ...] = ({"protocol": 2}, {"protocol": 1, "sesion": "x" * 16}, {"namespace": "other"})
"""Fields of a `hello` that the server rejects without creating a session."""


class PendingRequest:
    """A request of the client, and its state according to the messages of the server."""

    def __init__(self, payload: Payload, expires: bool, generation: int) -> None:
        self.payload = payload
        self.ref: str = payload["ref"]
        self.expires = expires
        """True if the client never releases the request, so that it ends by a timeout."""
        self.generation = generation
        """The number of the session or connection that the request belongs to; see `WireClient.generation`."""
        self.id = 0
        """The request id; 0 until the server has sent it."""
        self.held = False
        self.ended = False
        """True if the client expects no further message about the request."""
        self.sent = False
        """True if the request was sent on the current connection."""
        self.releasing = False
        """True if a release of the request was sent on the current connection."""
        self.mentioned = True
        """True if the server has sent a message about the request on the current connection."""


class WireClient:
    """A simulated client without the library. `run` executes the client from start to end.

    `session` is the secret of its session, or None for a client without a session.
    """

    def __init__(self, context: ClientContext, name: str, random: Random, session: str | None) -> None:
        # More than 16 fields: the properties of the client, and the state of its session and of its connection.
        self.context = context
        self.name = name
        self.random = random
        self.v1_random = Random(f"{context.scenario.seed} {name} extra")
        """A second generator for the choices that only scenarios with `v1_features` have: other histories stay the same."""
        self.v1_features = context.scenario.v1_features
        self.session = session
        self.session_timeout_ms = random.choice([10_000, 10_000, 3_000, 30_000])
        self.requests: dict[str, PendingRequest] = {}
        """All requests by `ref`."""
        self.quiet = False
        """True if the current connection is quiet, so that the server sends no `queued`."""
        self.generation = 0
        """The number of sessions of this client so far or, without a session, of connections. The scope of refs."""
        self._workload = Workload(context.scenario, random, self.v1_random)
        self._by_id: dict[int, PendingRequest] = {}
        self._connection: _Connection | None = None
        self._leader_hint: str | None = None
        """The address of the leader according to the last error, or None."""
        self._progress = asyncio.Event()
        """Set when a message arrives, and when the connection ends."""
        self._ref_count = 0
        self._pinged: set[str] = set()
        """The refs of the pings that are unanswered on the current connection."""
        self._synced = False
        """True if the server has sent the state of all requests of the session, i.e. has replied to the first `ping`."""
        self._ready = False
        """True if the client may send requests: no handshake is needed, or the handshake has succeeded."""

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
        """Do one random action: request, release, extend, ping, inspect, repeat a request, half-close, or disconnect."""
        random = self.random
        dice = random.random()
        if self.v1_features and self._act_with_v1_features():
            return
        releasable = [
            request
            for request in self.requests.values()
            if self._can_release(request) and not request.ended and not request.expires
        ]
        if dice < 0.5 or not releasable:
            for _ in range(random.choice([1, 1, 1, 2, 4])):
                self._request()
        elif dice < 0.8:
            held = [request for request in releasable if request.held]
            self._release(random.choice(held or releasable))
        elif dice < 0.85:
            request = random.choice(releasable)
            if request.id:
                self._send(
                    "extend", ref=self._next_ref(), id=request.id, transactionTimeout=random.choice([50, 1_000, 5_000])
                )
        elif dice < 0.88:
            self._ping()
        elif dice < 0.9:
            self._send("inspect", ref=self._next_ref(), limit=random.choice([1, 100]))
        elif dice < 0.93:
            request_id = self.context.recent_request_id(random)  # perhaps of another client
            if request_id:
                self._send("release", ref=self._next_ref(), id=request_id)
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
                self._connection.transport.write_eof()  # half-close

    def _act_with_v1_features(self) -> bool:
        """With probability 0.14 use a newer feature: `bye`, repeat or release an ended request, release an unknown ref.

        Returns whether the feature was chosen, even if there was no suitable request.
        """
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
        """Send a random new request, unless the client has the maximum number of live requests."""
        if sum(not request.ended for request in self.requests.values()) >= self.context.scenario.max_live_requests:
            return
        payload = self._workload.request(self.name) | {"ref": self._next_ref()}
        request = PendingRequest(payload, expires=self.random.random() < 0.2, generation=self.generation)
        self.requests[request.ref] = request
        self._send_request(request)

    def _release_all(self) -> bool:
        """Release every held lock except the locks that have to time out; return whether all requests have ended."""
        for request in self.requests.values():
            if request.held and not request.ended and not request.releasing and not request.expires:
                self._release(request)
        self._settle_unmentioned()
        return all(request.ended for request in self.requests.values())

    # -- sending ------------------------------------------------------------------------------------------

    def _send(self, command: str, **payload: Any) -> None:
        """Send a command, unless the client is disconnected or must not send any more on this connection."""
        if self._connection is not None and not self._connection.output_ended:
            self._connection.transport.write(json.dumps({"command": command, "payload": payload}).encode() + b"\n")

    def _next_ref(self) -> str:
        self._ref_count += 1
        return f"{self.name}.{self._ref_count}"

    def _can_release(self, request: PendingRequest) -> bool:
        """Return whether a release can name the request by id or, on the quiet connection that sent the request, by ref."""
        return request.id != 0 or (self.quiet and request.sent)

    def _release(self, request: PendingRequest) -> None:
        """Send a release by id or by ref. If both are possible, choose at random; if neither is, do nothing."""
        ref_is_known = request.generation == self.generation and (
            request.sent or (request.id and self.session is not None)
        )
        if ref_is_known and self.v1_features and (not request.id or self.v1_random.random() < 0.4):
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
        """Send `bye`, which ends the session. The client sends nothing after `bye`, and the server closes the connection."""
        if self._connection is not None and not self._connection.output_ended:
            self._connection.bye_ref = self._next_ref()
            self._send("bye", ref=self._connection.bye_ref)
            self._connection.output_ended = True

    def _send_request(self, request: PendingRequest) -> None:
        """Send a request, or repeat the request with the same ref."""
        request.sent = True
        self._send("request", **request.payload)

    def _resend_unanswered(self) -> None:
        """Send the requests that the server may not have received, because no message about them has arrived."""
        for request in self.requests.values():
            if not request.ended and not request.sent and not request.id:
                self._send_request(request)

    # -- receiving ----------------------------------------------------------------------------------------

    def message_received(self, message: Payload) -> None:
        """Update the state of the client by a message of the server, and send commands that the message requires."""
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
        """Update a request by a `queued`, `locked`, `extended` or `released` with the id `id_`."""
        if request.id != id_:
            # This is the first message about the request. Or the request had another id on a lineage that did not survive. Or
            # the request had ended without being stored, and was sent again to another server.
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
        """Send the requests that the server may not have received; begin a generation if the session was not resumed."""
        if not resumed:
            # The waiting requests were cancelled with the former session, but granted locks may still be held.
            self._end_unconfirmed()
            self.generation += 1
        self._resend_unanswered()

    def _settle_unmentioned(self) -> None:
        """Repeat or release the requests that the server has not mentioned on this connection, to learn their state.

        With a session, such a request has ended and the reply to its release was lost, or it waits and the connection is
        quiet. Without a session, such a request was cancelled with its connection, or is still held.
        """
        for request in self.requests.values() if self._synced else ():
            if request.id and not request.ended and not request.mentioned and not request.releasing:
                is_of_session = self.session is not None and request.generation == self.generation
                # Repeating a request makes the server send its state.
                if is_of_session and (self.quiet or (self.v1_features and self.v1_random.random() < 0.3)):
                    request.mentioned = True
                    self._send_request(request)
                else:
                    self._release(request)

    def _on_error(self, payload: Payload, request: PendingRequest | None) -> None:
        """Process an error: end or retry `request`, which the failed command was about (or None), or change the server."""
        code, lacks_id = payload["code"], "id" not in payload  # errors of `release` and `extend` by id have the id
        if code == "session-taken-over":
            return  # on an earlier connection, which the server closes
        self._leader_hint = payload.get("leader")
        if self._connection is not None and self._connection.bye_ref == payload["ref"]:
            self._connection.transport.close()
        if code == "unavailable":
            self._pinged.discard(payload["ref"])
            if not self._ready:
                self._disconnect()  # the server rejected `hello`
            elif request is not None:
                request.releasing = False
                if lacks_id and not request.id:
                    request.sent = False
            connection = self._connection
            if self._leader_hint is not None and connection is not None and connection.address != self._leader_hint:
                connection.transport.close()
        elif request is not None and (code == "unknown-id" or (lacks_id and not request.id)):
            request.ended = True

    # -- the connection -----------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        """Connect to the leader that a server has named, or to a random server; return whether the connection is open."""
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
        """Begin to use a new connection. Send a handshake if the client has a session or chooses to send one."""
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
        """Send `hello`, in scenarios with `v1_features` sometimes after a `hello` that the server rejects."""
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
        """Handle the end of a connection. Without a session, the requests that were not granted end with the connection."""
        if connection is not self._connection:
            return
        self._connection = None
        self._progress.set()
        for request in self.requests.values():
            request.sent = request.releasing = False
        if self.session is None:
            self._end_unconfirmed()

    def _end_unconfirmed(self) -> None:
        """Mark requests as ended after their connection or session has ended.

        These are the requests without an id and, with a session, the requests that were not granted. `_settle_unmentioned`
        learns the state of the others later.
        """
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
    """A connection of a wire client, which splits the received bytes into messages."""

    def __init__(self, client: WireClient, address: str) -> None:
        self._client = client
        self._data = b""
        """The bytes of the last, incomplete line."""
        self.address = address
        self.output_ended = False
        """True if the client sends nothing more on the connection, because it has sent `bye` or half-closed it."""
        self.bye_ref = ""
        """The ref of the `bye` that was sent, or "" if none was sent."""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._client.connection_made(self)

    def data_received(self, data: bytes) -> None:
        *complete_lines, self._data = (self._data + data).split(b"\n")
        for line in complete_lines:
            self._client.message_received(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._client.connection_lost(self)
