"""What a raw client of a simulated world says and hears, on one connection after the other."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING, Any

from genie.testing.simulation.history import NOTE
from genie.testing.simulation.scenario import Wishes

if TYPE_CHECKING:
    from genie.testing.simulation.cluster import World

Payload = dict[str, Any]

REJECTED: tuple[Payload, ...] = ({"protocol": 2}, {"protocol": 1, "sesion": "x" * 16}, {"namespace": "other"})
"""Of a `hello` that is rejected, which leaves nothing behind."""


class Wish:
    """A request of this client, as far as it has heard. `ended` when nothing more can come of it."""

    def __init__(self, payload: Payload, patient: bool, life: int) -> None:
        self.payload = payload
        self.ref: str = payload["ref"]
        self.patient = patient
        """It is never released, and ends by itself."""
        self.life = life
        """The life of the session or connection that it belongs to; see `RawTalk.life`."""
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
        self.extra = Random(f"{world.plan.seed} {name} extra")
        """Decides what only featured worlds have: the histories of other worlds do not depend on it."""
        self.featured = world.plan.featured
        self.session = session
        self.session_timeout_ms = random.choice([10_000, 10_000, 3_000, 30_000])
        self.wishes: dict[str, Wish] = {}
        self.quiet = False
        """This connection asked for no `queued`."""
        self.life = 0
        """Counts the sessions that this client had or, without a session, its connections. Each knows its own refs only."""
        self._by_id: dict[int, Wish] = {}
        self._wire: _Wire | None = None
        self._hint: str | None = None
        self._changed = asyncio.Event()
        self._refs = 0
        self._pinged: set[str] = set()
        """Refs of pings that were not answered on this connection."""
        self._synced = False
        """Whether all that was to be said at the beginning of this connection was said."""
        self._welcome = False
        """Whether it may ask for something."""

    # -- what it says -------------------------------------------------------------------------------------

    def _ref(self) -> str:
        self._refs += 1
        return f"{self.name}.{self._refs}"

    def _release(self, wish: Wish) -> None:
        by_ref = wish.life == self.life and (wish.sent or (wish.id and self.session is not None))
        if by_ref and self.featured and (not wish.id or self.extra.random() < 0.4):
            wish.leaving = True
            self._say("release", ref=wish.ref)
        elif wish.id:
            wish.leaving = True
            self._say("release", ref=self._ref(), id=wish.id)

    def _ping(self) -> None:
        ref = self._ref()
        self._pinged.add(ref)
        self._say("ping", ref=ref)

    def _bye(self) -> None:
        """End the session. Nothing more is said on this connection, which the server closes."""
        if self._wire is not None and not self._wire.said_all:
            self._wire.bye_ref = self._ref()
            self._say("bye", ref=self._wire.bye_ref)
            self._wire.said_all = True

    def _hang_up(self) -> None:
        if self._wire is not None:
            if self.random.random() < 0.5:
                self._wire.transport.abort()
            else:
                self._wire.transport.close()

    def _repeat(self, wish: Wish) -> None:
        """Send a request again, with its ref."""
        wish.sent = True
        self._say("request", **wish.payload)

    def _resend(self) -> None:
        for wish in self.wishes.values():
            if not wish.ended and not wish.sent and not wish.id:
                self._repeat(wish)

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
            self._pinged.discard(payload["ref"])
            self._synced = self._welcome
            self._settle_unmentioned()
        elif command == "error":
            self._refused(payload, wish)
        elif wish is not None and command in ("queued", "locked", "released", "extended"):
            self._about(wish, command, payload["id"])

    def _about(self, wish: Wish, command: str, id_: int) -> None:
        """A message about a request of this client."""
        if wish.id != id_:
            # For the first time; or it was queued by a server that led on a way that did not last, and is here as well;
            # or it had ended without being stored, and was sent again to another server.
            wish.id, wish.held = id_, False
            self._by_id[id_] = wish
            self.world.ids.append(id_)
            if wish.ended and command in ("queued", "locked"):
                self._release(wish)
        if command in ("locked", "extended"):
            wish.held = True
        elif command == "released":
            wish.ended = True

    def _welcomed(self, resumed: bool) -> None:
        if not resumed:
            # Those that waited have gone with the session; what was held may be held still.
            self._give_up()
            self.life += 1
        self._resend()

    def _settle_unmentioned(self) -> None:
        """What was not mentioned at the resume has ended, maybe by a release whose answer was lost, or it waits and the
        connection is quiet; and what waited when a connection without a session was lost has gone, or is held. Ask, or
        release it.
        """
        for wish in self.wishes.values() if self._synced else ():
            if wish.id and not wish.ended and not wish.mentioned and not wish.leaving:
                known = self.session is not None and wish.life == self.life
                if known and (self.quiet or (self.featured and self.extra.random() < 0.3)):
                    wish.mentioned = True
                    self._repeat(wish)
                else:
                    self._release(wish)

    def _refused(self, payload: Payload, wish: Wish | None) -> None:
        code, of_request = payload["code"], "id" not in payload
        self._hint = payload.get("leader")
        if self._wire is not None and self._wire.bye_ref == payload["ref"]:
            self._wire.transport.close()
        if code == "unavailable":
            self._pinged.discard(payload["ref"])
            if not self._welcome:
                self._hang_up()  # `hello` was refused
            elif wish is not None:
                wish.leaving = False
                if of_request and not wish.id:
                    wish.sent = False
            if self._hint is not None and self._wire is not None and self._wire.address != self._hint:
                self._wire.transport.close()
        elif wish is not None and (code == "unknown-id" or (of_request and not wish.id)):
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
        self._pinged.clear()
        self._synced = self.session is None
        self.quiet = self.featured and self.extra.random() < 0.5
        greets = self.session is not None or self.quiet or (self.featured and self.extra.random() < 0.5)
        self._welcome = not greets
        if not greets:
            self.life += 1
        for wish in self.wishes.values():
            wish.mentioned = wish.leaving = False
        if greets:
            self._hello()
            self._ping()

    def _hello(self) -> None:
        if self.featured and self.extra.random() < 0.1:
            wrong = self.extra.choice(REJECTED)
            self._say("hello", ref=self._ref(), **wrong)
        payload: Payload = {"ref": self._ref(), "protocol": 1, "client": f"raw/{self.name}"}
        if self.session is not None:
            payload |= {"session": self.session, "sessionTimeout": self.session_timeout_ms}
        if self.featured:
            payload["quiet"] = self.quiet
        self._say("hello", **payload)

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
        self.bye_ref = ""
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


# -- A client of a simulated world that speaks the wire itself: quick, careless, and at times rude --------


class RawClient(RawTalk):
    """One connection after the other. With a `session` its requests outlive them."""

    def __init__(self, world: World, name: str, random: Random, session: str | None) -> None:
        super().__init__(world, name, random, session)
        self._ask = Wishes(world.plan, random, self.extra)

    def __str__(self) -> str:
        living = [f"{wish.id or ref}" for ref, wish in self.wishes.items() if not wish.ended]
        return f"{self.name} waits for {' '.join(living) or 'nothing'}"

    async def run(self) -> None:  # noqa: C901 - a life, from beginning to end
        """Do this and that until the world asks for the end, then see that everything ends."""
        while not self.world.ending:
            await asyncio.sleep(self.random.expovariate(1 / self.world.plan.think_s))
            if self._wire is None:
                await self._connect()
            elif self._welcome and not self.world.ending:
                self._act()
        while True:
            if self._wire is None and not await self._connect():
                await asyncio.sleep(self.random.uniform(0.05, 0.3))
                continue
            self._changed.clear()
            if self._welcome and self._leave_all() and not self._pinged:
                break
            await asyncio.sleep(0.02)
            try:
                async with asyncio.timeout(1):
                    await self._changed.wait()
            except TimeoutError:
                if self._welcome:
                    self._resend()
                if not self._pinged:
                    self._ping()
        if self._wire is not None and self.featured and self.extra.random() < 0.5:
            self._bye()
        elif self._wire is not None:
            self._wire.transport.close()
        self.world.history.note(NOTE, self.name, "is done")

    # -- what it does -------------------------------------------------------------------------------------

    def _act(self) -> None:  # noqa: C901, PLR0912 - a list of things to do
        random = self.random
        dice = random.random()
        if self.featured and self._act_by_features():
            return
        living = [wish for wish in self.wishes.values() if self._known(wish) and not wish.ended and not wish.patient]
        if dice < 0.5 or not living:
            for _ in range(random.choice([1, 1, 1, 2, 4])):
                self._request()
        elif dice < 0.8:
            held = [wish for wish in living if wish.held]
            self._release(random.choice(held or living))
        elif dice < 0.85:
            wish = random.choice(living)
            if wish.id:
                self._say("extend", ref=self._ref(), id=wish.id, transactionTimeout=random.choice([50, 1_000, 5_000]))
        elif dice < 0.88:
            self._ping()
        elif dice < 0.9:
            self._say("inspect", ref=self._ref(), limit=random.choice([1, 100]))
        elif dice < 0.93:
            other = self.world.anybodys_id(random)
            if other:
                self._say("release", ref=self._ref(), id=other)
        elif dice < 0.95:
            ref = random.choice(list(self.wishes))
            if self.wishes[ref].sent:
                self._repeat(self.wishes[ref])
        elif dice < 0.97:
            self._hang_up()
        else:
            self._request()
            if self._wire is not None and random.random() < 0.5 and self.session is None:
                self._wire.said_all = True
                self._wire.transport.write_eof()

    def _act_by_features(self) -> bool:
        """Do, now and then, what only featured worlds have. Whether that was all."""
        dice = self.extra.random()
        if dice < 0.02:
            self._bye()
        elif dice < 0.12:
            ended = [wish for wish in self.wishes.values() if wish.ended and wish.life == self.life and wish.id]
            if ended and self.extra.random() < 0.7:
                self._repeat(self.extra.choice(ended[-5:]))
            elif ended:
                self._say("release", ref=self.extra.choice(ended[-5:]).ref)
        elif dice < 0.14:
            self._say("release", ref=self._ref())  # no request has this ref
        return dice < 0.14

    def _known(self, wish: Wish) -> bool:
        """Whether a request can be released: by its id, or where it was sent on this quiet connection by its ref."""
        return wish.id != 0 or (self.quiet and wish.sent)

    def _request(self) -> None:
        if sum(not wish.ended for wish in self.wishes.values()) >= self.world.plan.at_once:
            return
        payload = self._ask.payload(self.name) | {"ref": self._ref()}
        wish = Wish(payload, self.random.random() < 0.2, self.life)
        self.wishes[wish.ref] = wish
        self._repeat(wish)

    def _leave_all(self) -> bool:
        """Release what is held, but for what ends by itself. Whether all has ended."""
        for wish in self.wishes.values():
            if wish.held and not wish.ended and not wish.leaving and not wish.patient:
                self._release(wish)
        self._settle_unmentioned()
        return all(wish.ended for wish in self.wishes.values())
