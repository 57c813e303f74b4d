"""A client with a session, written from protocol.md alone, without the library.

It has one request at a time. When its connection is lost, it tries the servers until one sends `welcome` and the state of
its requests, and then repeats the commands that may not have arrived.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from faults.checker import Checker, Grant, locks_of
from faults.connection import CONNECT_TIMEOUT_S, Address, Connection, ConnectionEnded
from faults.request import Request, State

QUEUE_MS = 300_000
SESSION_MS = 600_000
PING_AFTER_S = 0.25
"""Time without a message after which it sends a `ping`."""
REPLY_TIMEOUT_S = 0.8
"""Time without a message after which it gives up the connection."""
REPEAT_PROBABILITY = 0.3
"""How often it repeats a request on a new connection though it has received its state: a `ref` may be repeated at any time."""
QUIET_PROBABILITY = 0.5
"""How often a connection is quiet: it gets no `queued`."""
PAUSE_S = 0.02
"""The pause between two attempts to find the leader."""


class WireClient:
    """Sends requests, extensions and releases, and retries each until it has got the reply."""

    def __init__(
        self, name: str, addresses: list[Address], checker: Checker, connections: set[Connection], seed: str
    ) -> None:
        self.name = name
        self.addresses = addresses
        self.secret = f"the secret of {name} in {seed}"
        self._checker = checker
        self._connections = connections
        self._random = random.Random(f"{seed} {name}")
        self._order = self._random.sample(addresses, len(addresses))
        self._hint: Address | None = None
        self._connection: Connection | None = None
        self._last_message_at = 0.0
        self._request: Request | None = None
        self._number = 0
        self._commands = 0
        self._own_ids: set[int] = set()
        self._repeated: set[str] = set()
        """Refs of ended requests that were repeated: the replies may arrive after the end of later requests."""
        self._ended: Request | None = None
        """The previous request."""
        self._quiet = False
        """The current connection is quiet."""

    def __str__(self) -> str:
        request = self._request
        state = "idle" if request is None else f"{request.ref} {request.id} {request.state.name} {request.keys}"
        return f"{self.name}: {state}, {'no connection' if self._connection is None else self._connection.address[1]}"

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock; None if it timed out before this client was notified."""
        self._number += 1
        self._request = request = Request(f"{self.name}-{self._number}", keys, hold_ms, time.monotonic())
        while request.state in (State.SENT, State.QUEUED):
            await self._step()
        return request.grant if request.state is State.HELD else None

    async def extend(self, hold_ms: int) -> None:
        """Extend the lock."""
        assert self._request is not None
        request, started_at = self._request, time.monotonic()
        request.extension_ms, request.sent_on = hold_ms, None
        while request.extension_ms and request.state is State.HELD:
            await self._step()
        if request.grant is not None and request.state is State.HELD:
            request.grant.certain_until = started_at + hold_ms / 1000

    async def release(self) -> str:
        """Release the lock; return the reason of its end."""
        assert self._request is not None
        request = self._request
        if request.state is State.HELD:
            request.state, request.sent_on = State.RELEASING, None
        while request.state is not State.ENDED:
            await self._step()
        self._request, self._ended = None, request
        return request.reason

    async def leave(self) -> None:
        """End the session."""
        self.drop()
        command = ""
        while command != "bye":
            if self._connection is None:
                await self._connect(SESSION_MS)
                continue
            self._send(self._connection, "bye")
            self._ended = None  # in the next session, its repetition would be a new request
            try:
                while command not in ("bye", "error"):
                    command, _ = await self._connection.next(REPLY_TIMEOUT_S)
            except (ConnectionEnded, TimeoutError):
                command = ""
            self.drop()

    async def close(self) -> None:
        """Close the client."""
        self.drop()

    def drop(self) -> None:
        """Abort the connection."""
        if self._connection is not None:
            self._connection.abort()
            self._connection = None

    # -- one step -----------------------------------------------------------------------------------------

    async def _step(self) -> None:
        if self._connection is None:
            await self._connect(SESSION_MS)
            return
        connection = self._connection
        self._send_pending(connection)
        try:
            command, payload = await connection.next(PING_AFTER_S)
        except TimeoutError:
            if time.monotonic() - self._last_message_at < REPLY_TIMEOUT_S:
                self._send(connection, "ping")
                return
            self._give_up("does not reply", leave_open=True)
        except ConnectionEnded:
            self._give_up("ended")
        else:
            self._last_message_at = time.monotonic()
            await self._on_message(connection, command, payload)

    def _send_pending(self, connection: Connection) -> None:
        """Send the pending command about the current request, once on each connection."""
        request = self._request
        if request is None or request.sent_on is connection:
            return
        if request.state is State.SENT:
            self._send_request(connection, request)
        elif request.state is State.RELEASING and self._random.random() < 0.5:
            connection.send("release", ref=request.ref)
        elif request.state is State.RELEASING:
            self._send(connection, "release", id=request.id)
        elif request.state is State.HELD and request.extension_ms:
            self._send(connection, "extend", id=request.id, transactionTimeout=request.extension_ms)
        request.sent_on = connection

    def _send(self, connection: Connection, command: str, **payload: Any) -> None:
        """Send a command with a ref of its own."""
        self._commands += 1
        connection.send(command, **payload, ref=f"{self.name}/{self._commands}")

    def _send_request(self, connection: Connection, request: Request) -> None:
        connection.send(
            "request",
            resources=locks_of(request.keys),
            ref=request.ref,
            queueTimeout=QUEUE_MS,
            transactionTimeout=request.hold_ms,
            note=f"the wire client {self.name}",
        )

    def _give_up(self, why: str, *, leave_open: bool = False) -> None:
        """Give up the connection. `leave_open`: the server may be stopped, and the checker gets what it sends later."""
        assert self._connection is not None
        self._checker.counts["connections lost"] += 1
        self._checker.note(self.name, f"{self._connection.address[1]} {why}")
        if not leave_open:
            self._connection.abort()
        self._connection = None

    # -- connecting ---------------------------------------------------------------------------------------

    async def _connect(self, session_ms: int) -> None:
        """Try once to connect and to open the session: at the leader that a server has named, or at the next server."""
        address, self._hint = self._hint or self._order[0], None
        if address == self._order[0]:
            self._order.append(self._order.pop(0))
        try:
            connection = await Connection.open(self._checker, address, self._connections, CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError):
            await self._pause()
            return
        try:
            self._quiet = self._random.random() < QUIET_PROBABILITY
            secret, client = self.secret, "faults/1"
            self._send(
                connection,
                "hello",
                session=secret,
                sessionTimeout=session_ms,
                protocol=1,
                client=client,
                quiet=self._quiet,
            )
            command, payload = await connection.next(REPLY_TIMEOUT_S)
            if command == "welcome":
                await self._resume(connection)
                return
            if command != "error" or payload["code"] != "unavailable":
                self._checker.violate(f"{self.name}: hello got the reply {command} {payload}")
            self._checker.counts["unavailable"] += 1
            if "leader" in payload:
                host, _, port = payload["leader"].rpartition(":")
                self._hint = (host, int(port)) if (host, int(port)) != address else None
            connection.abort()
        except ConnectionEnded:
            pass
        except TimeoutError:
            pass  # the connection is left open: the server may be stopped
        await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(PAUSE_S / 2, PAUSE_S))

    async def _resume(self, connection: Connection) -> None:
        """Process the messages about the session up to the `pong`; check that the server knows the current request."""
        request = self._request
        self._send(connection, "ping")
        while True:
            command, payload = await connection.next(REPLY_TIMEOUT_S)
            if command == "pong":
                break
            if command == "error" and payload["code"] == "unavailable":
                self._checker.counts["unavailable"] += 1
                connection.abort()
                return
            await self._on_message(connection, command, payload)
        self._connection, self._last_message_at = connection, time.monotonic()
        self._checker.note(self.name, f"resumes on {connection.address[1]}")
        mentioned = (State.HELD,) if self._quiet else (State.QUEUED, State.HELD)
        if request is not None and request.confirmed_on is not connection and request.state in mentioned:
            self._checker.violate(f"{connection.address[1]} sent no state of {self}")
        if (
            request is not None
            and request.state in (State.QUEUED, State.HELD)
            and self._random.random() < REPEAT_PROBABILITY
        ):
            self._send_request(connection, request)
        if (
            self._ended is not None
            and self._ended.reason != "unknown-id"
            and self._random.random() < REPEAT_PROBABILITY
        ):
            self._checker.counts["requests repeated after their end"] += 1
            self._repeated.add(self._ended.ref)
            self._send_request(connection, self._ended)

    # -- messages -----------------------------------------------------------------------------------------

    async def _on_message(self, connection: Connection, command: str, payload: dict[str, Any]) -> None:
        request = self._request
        if command == "error":
            await self._on_error(payload)
        elif command in ("queued", "locked", "released"):
            is_own = request is not None and (payload.get("ref") == request.ref or payload["id"] == request.id)
            if is_own and request is not None:
                self._on_request_message(request, connection, command, payload)
            elif not self._may_concern_ended(command, payload):
                self._checker.violate(
                    f"{self} gets a message about another client's or an ended request: {command} {payload}"
                )
        elif command == "extended":
            if request is not None and payload["id"] == request.id:
                request.extension_ms = 0
        elif command != "pong":
            self._checker.violate(f"{self} gets an unknown message: {command} {payload}")

    def _may_concern_ended(self, command: str, payload: dict[str, Any]) -> bool:
        """Return whether a message may be about an ended request, which is never granted again."""
        is_repetition = payload.get("ref") in self._repeated
        return payload["id"] in self._own_ids and (command == "released" or (command == "queued" and is_repetition))

    def _on_request_message(
        self, request: Request, connection: Connection, command: str, payload: dict[str, Any]
    ) -> None:
        if request.id not in (0, payload["id"]):
            self._checker.violate(f"{self} has the id {payload['id']} now")
        if command == "queued" and self._quiet:
            self._checker.violate(f"{self} gets {command} {payload}, but is quiet")
        request.id = payload["id"]
        self._own_ids.add(request.id)
        self._checker.record_id(self.name, request.ref, request.id)
        request.confirmed_on = connection
        if request.state is State.ENDED:
            return
        if command == "queued":
            if request.state is State.SENT:
                request.state = State.QUEUED
        elif command == "locked":
            self._on_locked(request, connection, payload)
        else:
            self._on_released(request, payload["reason"])

    def _on_locked(self, request: Request, connection: Connection, payload: dict[str, Any]) -> None:
        if request.grant is not None and request.grant.fence != payload["fence"]:
            self._checker.violate(f"{self} had fence {request.grant.fence}, and has {payload['fence']}")
        if request.state not in (State.SENT, State.QUEUED):
            return
        request.state = State.HELD
        request.grant = Grant(
            self.name, request.id, payload["fence"], request.keys, request.sent_at + request.hold_ms / 1000
        )
        self._checker.granted(request.grant, connected_at=connection.connected_at, is_repetition="expiresIn" in payload)

    def _on_released(self, request: Request, reason: str) -> None:
        self._checker.note(self.name, f"{request.id} is released: {reason}")
        is_releasing, grant = request.state is State.RELEASING, request.grant
        request.state, request.reason = State.ENDED, reason
        if grant is not None:
            self._checker.lost(grant)
        if reason == "transaction-timeout":
            if (grant is not None and grant.certain) or time.monotonic() < request.sent_at + request.hold_ms / 1000:
                self._checker.violate(f"{self} timed out early")
        elif reason != "success" or not is_releasing:
            self._checker.violate(f"{self} was released: {reason}")

    async def _on_error(self, payload: dict[str, Any]) -> None:
        request, code = self._request, payload["code"]
        if code == "unavailable":
            self._checker.counts["unavailable"] += 1
            await self._pause()
            if request is not None:
                request.sent_on = None
        elif code == "unknown-id" and "id" in payload and request is not None and request.state is State.RELEASING:
            # Its release was executed, and the reply was lost with the server: a restart keeps refs, but not ids of ended requests.
            request.state, request.reason = State.ENDED, "unknown-id"
            self._checker.counts["unknown-id"] += 1
        else:
            self._checker.violate(f"{self} gets an error: {payload}")
