"""What a raw client of a simulated world says and hears, on one connection after the other."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from genie.testing.world import World

Payload = dict[str, Any]


class Wish:
    """A request of this client, as far as it has heard. `ended` when nothing more can come of it."""

    def __init__(self, payload: Payload, patient: bool) -> None:
        self.payload = payload
        self.patient = patient
        """It is never released, and ends by itself."""
        self.id = 0
        self.held = False
        self.ended = False
        self.sent = False
        """On the connection that there is now."""
        self.leaving = False
        self.mentioned = True
        """By the server, on the connection that there is now."""


class RawTalk:
    """What it knows by what it has heard. With a `session` its requests outlive a connection."""

    def __init__(self, world: World, name: str, random: Random, session: str | None) -> None:
        self.world = world
        self.name = name
        self.random = random
        self.session = session
        self.session_timeout_ms = random.choice([10_000, 10_000, 3_000, 30_000])
        self.wishes: dict[str, Wish] = {}
        self._by_id: dict[int, Wish] = {}
        self._wire: _Wire | None = None
        self._hint: str | None = None
        self._changed = asyncio.Event()
        self._pongs = 0
        self._pings = 0
        self._synced = False
        """Whether all that was to be said at the beginning of this connection was said."""
        self._welcome = False
        """Whether it may ask for something."""

    # -- what it says -------------------------------------------------------------------------------------

    def _release(self, wish: Wish) -> None:
        wish.leaving = True
        self._say("release", id=wish.id)

    def _ping(self) -> None:
        self._pings += 1
        self._say("ping")

    def _hang_up(self) -> None:
        if self._wire is not None:
            if self.random.random() < 0.5:
                self._wire.transport.abort()
            else:
                self._wire.transport.close()

    def _resend(self) -> None:
        for wish in self.wishes.values():
            if not wish.ended and not wish.sent and not wish.id:
                wish.sent = True
                self._say("request", **wish.payload)

    # -- what it hears ------------------------------------------------------------------------------------

    def heard(self, message: Payload) -> None:
        """A line has come."""
        self._changed.set()
        command, payload = message["command"], message["payload"]
        wish = self.wishes.get(payload.get("ref", "")) or self._by_id.get(payload.get("id", 0))
        if wish is not None and command != "error":
            wish.mentioned = True
        if command == "welcome":
            self._welcome = True
            self._welcomed(payload["resumed"])
        elif command == "pong":
            self._pongs += 1
            self._synced = self._welcome
            self._release_unmentioned()
        elif command == "error":
            self._refused(payload, wish)
        elif command == "queued" and wish is not None and wish.id != payload["id"]:
            # For the first time; or it was queued by a server that led on a way that did not last, and is here as well.
            wish.id, wish.held = payload["id"], False
            self._by_id[wish.id] = wish
            self.world.ids.append(wish.id)
            if wish.ended:
                self._release(wish)
        elif command == "extended" and wish is not None:
            wish.held = True
        elif command == "locked" and wish is not None:
            wish.id, wish.held = payload["id"], True
            self._by_id[wish.id] = wish
        elif command == "released" and wish is not None:
            wish.id, wish.ended = payload["id"], True
            self._by_id[wish.id] = wish

    def _welcomed(self, resumed: bool) -> None:
        if not resumed:
            # Those that waited have gone with the session; what was held may be held still.
            self._give_up()
        self._resend()

    def _release_unmentioned(self) -> None:
        """What was not mentioned at the resume has ended, maybe by a release whose answer was lost; and what waited when a
        connection without a session was lost has gone, or is held.
        """
        for wish in self.wishes.values() if self._synced else ():
            if wish.id and not wish.ended and not wish.mentioned and not wish.leaving:
                self._release(wish)

    def _refused(self, payload: Payload, wish: Wish | None) -> None:
        code = payload["code"]
        self._hint = payload.get("leader")
        if code == "unavailable":
            if not self._welcome:
                self._hang_up()  # `hello` was refused
            elif wish is None:
                self._pongs += 1
            else:
                wish.leaving = False
                if "ref" in payload and not wish.id:
                    wish.sent = False
            if self._hint is not None and self._wire is not None and self._wire.address != self._hint:
                self._wire.transport.close()
        elif (code == "unknown-id" and wish is not None) or (wish is not None and "ref" in payload and not wish.id):
            wish.ended = True

    # -- its connection -----------------------------------------------------------------------------------

    async def _connect(self) -> bool:
        address = self._hint or self.random.choice(self.world.addresses)
        self._hint = None
        host, port = address.split(":")
        try:
            async with asyncio.timeout(2):
                await asyncio.get_running_loop().create_connection(lambda: _Wire(self, address), host, int(port))
        except OSError:
            return False
        return self._wire is not None

    def connected(self, wire: _Wire) -> None:
        """A connection is made."""
        self._wire = wire
        self._pings = self._pongs = 0
        self._welcome = self.session is None
        self._synced = self.session is None
        for wish in self.wishes.values():
            wish.mentioned = wish.leaving = False
        if self.session is not None:
            self._say("hello", session=self.session, sessionTimeout=self.session_timeout_ms)
            self._ping()

    def lost(self, wire: _Wire) -> None:
        """It has ended."""
        if wire is not self._wire:
            return
        self._wire = None
        self._changed.set()
        for wish in self.wishes.values():
            wish.sent = wish.leaving = False
        if self.session is None:
            self._give_up()

    def _give_up(self) -> None:
        for wish in self.wishes.values():
            if not wish.id or (not wish.ended and self.session is not None and not wish.held):
                wish.ended = True
            wish.patient = False  # nobody will tell

    def _say(self, command: str, **payload: Any) -> None:
        if self._wire is not None and not self._wire.said_all:
            self._wire.transport.write(json.dumps({"command": command, "payload": payload}).encode() + b"\n")


class _Wire(asyncio.Protocol):
    """One connection of a raw client."""

    def __init__(self, client: RawTalk, address: str) -> None:
        self._client = client
        self._data = b""
        self.address = address
        self.said_all = False
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._client.connected(self)

    def data_received(self, data: bytes) -> None:
        lines = (self._data + data).split(b"\n")
        self._data = lines.pop()
        for line in lines:
            self._client.heard(json.loads(line))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._client.lost(self)
