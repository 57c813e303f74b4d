"""A client of the bare wire with a session, made by what protocol.md says and by nothing of genie.client.

It has one request at a time. Where its connection is lost it goes from server to server until one says `welcome`, is told
the last word, and sends again what may not have arrived.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from faults.asked import Request, State
from faults.link import CONNECT_S, Address, Link, Lost
from faults.watch import Grant, Watch

QUEUE_MS = 300_000
SESSION_MS = 600_000
QUIET_S = 0.25
"""After so long without a word it sends a ping,"""
PATIENCE_S = 0.8
"""and after so long it takes the connection for lost."""
REPEATS = 0.3
"""How often it sends a request again on a new connection though it was told of it, or of its end: a `ref` may be repeated
at any time."""
QUIET = 0.5
"""How often a connection is one that is sent no `queued`."""
PAUSE_S = 0.02
"""Between attempts to find a server that leads."""


class WireClient:
    """`lock`, `extend`, `release`. Each goes on until it has its answer."""

    def __init__(self, name: str, addresses: list[Address], watch: Watch, links: set[Link], seed: str) -> None:
        self.name = name
        self.addresses = addresses
        self.secret = f"the secret of {name} in {seed}"
        self._watch = watch
        self._links = links
        self._random = random.Random(f"{seed} {name}")
        self._order = self._random.sample(addresses, len(addresses))
        self._hint: Address | None = None
        self._link: Link | None = None
        self._heard_at = 0.0
        self._request: Request | None = None
        self._number = 0
        self._commands = 0
        self._own: set[int] = set()
        self._repeated: set[str] = set()
        """Refs of ended requests that were sent again: their answers may come when the next requests have ended."""
        self._ended: Request | None = None
        """The request before this one."""
        self._quiet = False
        """The connection that is being made, or that there is, is sent no `queued`."""

    def __str__(self) -> str:
        request = self._request
        state = "idle" if request is None else f"{request.ref} {request.id} {request.state.name} {request.keys}"
        return f"{self.name}: {state}, {'no connection' if self._link is None else self._link.address[1]}"

    async def lock(self, keys: tuple[str, ...], hold_ms: int) -> Grant | None:
        """Wait for a lock. None where the hold was over before this client heard of it."""
        self._number += 1
        self._request = request = Request(f"{self.name}-{self._number}", keys, hold_ms, time.monotonic())
        while request.state in (State.ASKED, State.QUEUED):
            await self._talk()
        return request.grant if request.state is State.HELD else None

    async def extend(self, hold_ms: int) -> None:
        """Let the hold begin anew."""
        assert self._request is not None
        request, begun = self._request, time.monotonic()
        request.extension_ms, request.sent_on = hold_ms, None
        while request.extension_ms and request.state is State.HELD:
            await self._talk()
        if request.grant is not None and request.state is State.HELD:
            request.grant.sure_until = begun + hold_ms / 1000

    async def release(self) -> str:
        """Give it back; the reason for which it ended."""
        assert self._request is not None
        request = self._request
        if request.state is State.HELD:
            request.state, request.sent_on = State.LEAVING, None
        while request.state is not State.ENDED:
            await self._talk()
        self._request, self._ended = None, request
        return request.reason

    async def leave(self) -> None:
        """End the session."""
        self.drop()
        command = ""
        while command != "bye":
            if self._link is None:
                await self._connect(SESSION_MS)
                continue
            self._send(self._link, "bye")
            try:
                while command not in ("bye", "error"):
                    command, _ = await self._link.next(PATIENCE_S)
            except (Lost, TimeoutError):
                command = ""
            self.drop()

    async def close(self) -> None:
        """Be gone."""
        self.drop()

    def drop(self) -> None:
        """Lose the connection, on purpose."""
        if self._link is not None:
            self._link.abort()
            self._link = None

    # -- one step of the conversation ---------------------------------------------------------------------

    async def _talk(self) -> None:
        if self._link is None:
            await self._connect(SESSION_MS)
            return
        link = self._link
        self._say(link)
        try:
            command, payload = await link.next(QUIET_S)
        except TimeoutError:
            if time.monotonic() - self._heard_at < PATIENCE_S:
                self._send(link, "ping")
                return
            self._lost("says nothing", leave_open=True)
        except Lost:
            self._lost("ended")
        else:
            self._heard_at = time.monotonic()
            await self._take(link, command, payload)

    def _say(self, link: Link) -> None:
        """Send what is asked for, once on each connection."""
        request = self._request
        if request is None or request.sent_on is link:
            return
        if request.state is State.ASKED:
            self._ask(link, request)
        elif request.state is State.LEAVING and self._random.random() < 0.5:
            link.send("release", ref=request.ref)
        elif request.state is State.LEAVING:
            self._send(link, "release", id=request.id)
        elif request.state is State.HELD and request.extension_ms:
            self._send(link, "extend", id=request.id, transactionTimeout=request.extension_ms)
        request.sent_on = link

    def _send(self, link: Link, command: str, **payload: Any) -> None:
        """Send a command with a ref of its own."""
        self._commands += 1
        link.send(command, **payload, ref=f"{self.name}/{self._commands}")

    def _ask(self, link: Link, request: Request) -> None:
        link.send(
            "request",
            resources=[f"exclusive:{key}" for key in request.keys],
            ref=request.ref,
            queueTimeout=QUEUE_MS,
            transactionTimeout=request.hold_ms,
            note=f"the wire client {self.name}",
        )

    def _lost(self, why: str, *, leave_open: bool = False) -> None:
        """Go elsewhere. A server that says nothing may be stopped: what it says later is still to be heard."""
        assert self._link is not None
        self._watch.counts["connections lost"] += 1
        self._watch.note(self.name, f"{self._link.address[1]} {why}")
        if not leave_open:
            self._link.abort()
        self._link = None

    # -- connecting ---------------------------------------------------------------------------------------

    async def _connect(self, session_ms: int) -> None:
        """One attempt."""
        address, self._hint = self._hint or self._order[0], None
        if address == self._order[0]:
            self._order.append(self._order.pop(0))
        try:
            link = await Link.open(self._watch, address, self._links, CONNECT_S)
        except (OSError, TimeoutError):
            await self._pause()
            return
        try:
            self._quiet = self._random.random() < QUIET
            secret, client = self.secret, "faults/1"
            self._send(
                link, "hello", session=secret, sessionTimeout=session_ms, protocol=1, client=client, quiet=self._quiet
            )
            command, payload = await link.next(PATIENCE_S)
            if command == "welcome":
                await self._resume(link)
                return
            if command != "error" or payload["code"] != "unavailable":
                self._watch.violate(f"{self.name}: hello was answered by {command} {payload}")
            self._watch.counts["unavailable"] += 1
            if "leader" in payload:
                host, _, port = payload["leader"].rpartition(":")
                self._hint = (host, int(port)) if (host, int(port)) != address else None
            link.abort()
        except Lost:
            pass
        except TimeoutError:
            pass  # left open: it may be stopped
        await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.uniform(PAUSE_S / 2, PAUSE_S))

    async def _resume(self, link: Link) -> None:
        """Hear the last word on everything: all that comes before the pong."""
        request = self._request
        self._send(link, "ping")
        while True:
            command, payload = await link.next(PATIENCE_S)
            if command == "pong":
                break
            if command == "error" and payload["code"] == "unavailable":
                self._watch.counts["unavailable"] += 1
                link.abort()
                return
            await self._take(link, command, payload)
        self._link, self._heard_at = link, time.monotonic()
        self._watch.note(self.name, f"resumes on {link.address[1]}")
        known = (State.HELD,) if self._quiet else (State.QUEUED, State.HELD)
        if request is not None and request.told_on is not link and request.state in known:
            self._watch.violate(f"{self} is forgotten by {link.address[1]}")
        if request is not None and request.state in (State.QUEUED, State.HELD) and self._random.random() < REPEATS:
            self._ask(link, request)
        if self._ended is not None and self._ended.reason != "unknown-id" and self._random.random() < REPEATS:
            self._watch.counts["asked again behind the end"] += 1
            self._repeated.add(self._ended.ref)
            self._ask(link, self._ended)

    # -- what is said -------------------------------------------------------------------------------------

    async def _take(self, link: Link, command: str, payload: dict[str, Any]) -> None:
        request = self._request
        if command == "error":
            await self._refused(payload)
        elif command in ("queued", "locked", "released"):
            mine = request is not None and (payload.get("ref") == request.ref or payload["id"] == request.id)
            if mine and request is not None:
                self._told(request, link, command, payload)
            elif not self._of_ended(command, payload):
                self._watch.violate(f"{self} is told of a stranger's, or of what has ended: {command} {payload}")
        elif command == "extended":
            if request is not None and payload["id"] == request.id:
                request.extension_ms = 0
        elif command != "pong":
            self._watch.violate(f"{self} does not know what this is: {command} {payload}")

    def _of_ended(self, command: str, payload: dict[str, Any]) -> bool:
        """Whether a message may be about a request that has ended: it is never locked again."""
        again = payload.get("ref") in self._repeated
        return payload["id"] in self._own and (command == "released" or (command == "queued" and again))

    def _told(self, request: Request, link: Link, command: str, payload: dict[str, Any]) -> None:
        if request.id not in (0, payload["id"]):
            self._watch.violate(f"{self} is {payload['id']} now")
        if command == "queued" and self._quiet:
            self._watch.violate(f"{self} is told {command} {payload}, and is quiet")
        request.id = payload["id"]
        self._own.add(request.id)
        self._watch.known_as(self.name, request.ref, request.id)
        request.told_on = link
        if request.state is State.ENDED:
            return
        if command == "queued":
            if request.state is State.ASKED:
                request.state = State.QUEUED
        elif command == "locked":
            self._locked(request, link, payload)
        else:
            self._released(request, payload["reason"])

    def _locked(self, request: Request, link: Link, payload: dict[str, Any]) -> None:
        if request.grant is not None and request.grant.fence != payload["fence"]:
            self._watch.violate(f"{self} had fence {request.grant.fence}, and has {payload['fence']}")
        if request.state not in (State.ASKED, State.QUEUED):
            return
        request.state = State.HELD
        request.grant = Grant(
            self.name, request.id, payload["fence"], request.keys, request.asked_at + request.hold_ms / 1000
        )
        self._watch.granted(request.grant, connected_at=link.connected_at, again="expiresIn" in payload)

    def _released(self, request: Request, reason: str) -> None:
        self._watch.note(self.name, f"{request.id} is released: {reason}")
        leaving, grant = request.state is State.LEAVING, request.grant
        request.state, request.reason = State.ENDED, reason
        if grant is not None:
            self._watch.left(grant)
        if reason == "transaction-timeout":
            if (grant is not None and grant.sure) or time.monotonic() < request.asked_at + request.hold_ms / 1000:
                self._watch.violate(f"{self} timed out early")
        elif reason != "success" or not leaving:
            self._watch.violate(f"{self} was released: {reason}")

    async def _refused(self, payload: dict[str, Any]) -> None:
        request, code = self._request, payload["code"]
        if code == "unavailable":
            self._watch.counts["unavailable"] += 1
            await self._pause()
            if request is not None:
                request.sent_on = None
        elif code == "unknown-id" and "id" in payload and request is not None and request.state is State.LEAVING:
            # Its release was executed, and the answer was lost with the server: ids are forgotten by a restart, refs not.
            request.state, request.reason = State.ENDED, "unknown-id"
            self._watch.counts["unknown-id"] += 1
        else:
            self._watch.violate(f"{self} is told an error: {payload}")
