"""A server without sockets, its clients, and the steps that a plan takes with them. Everything is looked at after each turn.

The server is the real one from `Connection` on: framing, reading, the pipeline, the lock manager, sessions, watches. Its time
is virtual, so that nothing is waited for.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from itertools import pairwise
from typing import Any

from fuzz.client_model import Ear
from fuzz.grammar import said
from fuzz.sent_commands import NAMESPACE
from fuzz.shared_model import Book, Wrong
from fuzz.store import Shelf
from fuzz.transport import Transport
from genie.config import Limits
from genie.core import HELD
from genie.errors import Code, RequestRejected
from genie.observability.stats import Stats
from genie.protocol.commands import Hello
from genie.server.connection import Connection
from genie.server.follower import FollowerHandler
from genie.server.listener import AdmissionControl
from genie.server.pipeline import WATCH_FLUSH_INTERVAL_S, Pipeline
from genie.storage.memory import MemoryStore
from genie.storage.store import LeadershipLost, RetainedReply
from genie.testing.simulation.invariants import check

PLACE = re.compile(rb"@(\d+)@")
PING = said("ping") + b"\n"
LONGEST_S = 60.0
"""By then everything is over."""
TURNS = 2_000
"""Rounds of the loop within which everything must have been answered."""


class Client:
    """One connection, as its client has it."""

    def __init__(self, stage: Stage, number: int) -> None:
        self.stage = stage
        self.ear = Ear(stage.book, stage.seen, stage.limits.max_line)
        self.transport = Transport(number, self._hears, self._ended)
        self.half_closed = self.dropped = False
        self.stalled_once = False
        self.connection = Connection(stage.handler, stage.limits, stage.admission, find_handler=stage.find_handler)
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)

    @property
    def open(self) -> bool:
        """Whether it can say something and will be answered."""
        return not (self.transport.closing or self.half_closed or self.dropped or self.ear.ends)

    def say(self, data: bytes) -> None:
        """Bytes. Behind a `hello` that asks for a session goes a `ping`, so that it can be told what belongs to it."""
        whole = b"hello" not in self.ear.mouth.rest + data
        for part in [data] if whole else re.split(rb"(?<=\n)", data):
            found = self.ear.says(part, self.stage.now_ms)
            self.stage.lines += len(found)
            self.transport.say(part)
            if found and isinstance(found[-1].command, Hello) and not self.ear.mouth.over:
                self.ear.says(PING, self.stage.now_ms)
                self.stage.lines += 1
                self.transport.say(PING)

    def _hears(self, data: bytes) -> None:
        if self.dropped:
            return
        try:
            self.ear.hears(data)
        except Wrong as wrong:
            self.stage.wrong(wrong)

    @property
    def _stolen(self) -> bool:
        """Whether somebody else has said the secret of its session."""
        owner = self.ear.owner
        return isinstance(owner, tuple) and len(self.stage.book.claims[owner[0]]) > 1

    def _ended(self) -> None:
        if not self.transport.hung_up or self.stage.killing or self.dropped:
            return
        if self.half_closed or self.ear.ends:
            self.stage.seen[f"closed: {self.ear.ends or 'half-closed'}"] += 1
            due = [said for said in self.ear.due if not self.ear.silent_now(said)]
            if self.half_closed and not self.ear.ends and not self._stolen and due:
                self.stage.wrong(Wrong(f"a half-closed connection was not answered: {due[:3]}"))
        elif self._stolen:
            self.stage.seen["closed: stolen"] += 1
        else:
            self.stage.wrong(Wrong(f"the server closed a connection without a cause; due: {list(self.ear.due)[:3]}"))


class Stage:
    """One world. Its methods without an underscore are the steps of a plan."""

    def __init__(self, seen: Counter[str]) -> None:
        self.seen = seen
        self.loop = asyncio.get_running_loop()
        self.book = Book()
        self.clients: dict[int, Client] = {}
        self.others: list[Client] = []
        """Those that another one has taken the place of, and that don't know it yet."""
        self.lines = 0
        self.killing = self.was_away = False
        self.problem: BaseException | None = None
        self._numbers = 0

    @property
    def now_ms(self) -> float:
        return self.loop.time() * 1000

    def find_handler(self, namespace: str | None) -> Any:
        """The handler of a namespace, or why there is none."""
        if namespace in (None, NAMESPACE):
            return self.handler
        return RequestRejected(Code.UNKNOWN_NAMESPACE, f"this server does not serve the namespace {namespace!r}")

    def wrong(self, error: BaseException) -> None:
        """Remember the first thing that went wrong."""
        self.problem = self.problem or error

    # -- steps of the server ------------------------------------------------------------------------------

    async def begin(self, durable: bool, limits: dict[str, Any]) -> None:
        """Start it."""
        self.limits = Limits(**limits)
        self.store: MemoryStore = Shelf() if durable else MemoryStore()
        self.stats = Stats()
        self.admission = AdmissionControl(self.limits)
        await self._lead()

    async def _lead(self) -> None:
        replica = self.store.replica() if isinstance(self.store, Shelf) else await self.store.open(None, None, None)  # type: ignore[arg-type]
        manager, began = replica.manager, self.now_ms - replica.clock_ms
        manager.unix_offset_ms = 1.79e12
        manager.max_queue_entries = self.limits.max_queue
        manager.next_id, manager.next_fence = max(manager.next_id, 100), max(manager.next_fence, 100)
        self.handler: Any = FollowerHandler(self.stats, NAMESPACE, 1 << 20)
        self.pipeline = Pipeline(
            manager, self.store, self.limits, self.stats, lambda: self.now_ms - began, self._failed
        )
        self.pipeline._scheduler._clock = self.loop.time
        self.pipeline.recover(replica.retained_replies.values())
        await self._quiet()
        if isinstance(self.handler, FollowerHandler):
            self.handler.reject_all()
        self.handler = self.pipeline
        for client in self.clients.values():
            client.connection.handler = self.pipeline

    def _failed(self, error: BaseException) -> None:
        if not isinstance(error, LeadershipLost) or not self.was_away:
            self.wrong(error)
        self.seen["lost the lead"] += 1
        self._cut_all()

    def _cut_all(self) -> None:
        self.killing = True
        self.handler = FollowerHandler(self.stats, NAMESPACE, 1 << 20)
        for connection in list(self.admission):
            connection.abort()

    async def slow(self, delay_s: float) -> None:
        """From now on a commit takes so long."""
        if isinstance(self.store, Shelf):
            self.store.delay_s = delay_s

    async def away(self, ms: float) -> None:
        """The store does not answer for a while, and clients go on."""
        if isinstance(self.store, Shelf) and not self.killing:
            self.store.away = self.was_away = True
            await asyncio.sleep(ms / 2000)
            for client in list(self.clients.values()):
                if client.open:
                    client.say(PING + said("request", resources=["exclusive:a"], ref="r1") + b"\n")
            await asyncio.sleep(ms / 2000)
            self.seen["the store was away"] += 1
            if self.killing:
                await self._restart()
            self.store.away = False
            self.store.answer()
            await self.settle()
            self.was_away = False

    async def crash(self, stored: bool, late: bool) -> None:
        """The process dies; another finds what was stored. `late`: clients come before it leads."""
        if not isinstance(self.store, Shelf):
            return
        self.pipeline.stop()
        self._cut_all()
        if stored:
            self.store.store()
        if late:
            await self._turns(2)
            self.killing = False
            client = self._client(0)
            client.say(
                said("hello", session="secret-number-one") + b"\n" + said("request", resources=["exclusive:a"]) + b"\n"
            )
            await self._turns(2)
        await self._restart()

    async def _restart(self) -> None:
        self.pipeline.stop()
        await self._turns(3)
        self.seen["a new server"] += 1
        await self._lead()
        self.killing = False

    # -- steps of clients ---------------------------------------------------------------------------------

    def _client(self, slot: int) -> Client:
        client = self.clients.get(slot)
        if client is None or not client.open:
            if client is not None:
                self.others.append(client)
            self._numbers += 1
            client = self.clients[slot] = Client(self, self._numbers)
        return client

    async def say(self, slot: int, data: bytes, cuts: tuple[float, ...]) -> None:
        """Say it, in pieces."""
        client = self._client(slot)
        data = PLACE.sub(lambda found: b"%d" % self.book.pick(int(found[1])), data)
        places = [0, *(int(cut * len(data)) for cut in cuts), len(data)]
        for begin, end in pairwise(places):
            client.say(data[begin:end])
            if len(cuts) > 2:
                await self._turns(1)

    async def hello(
        self, slot: int, secret: str, timeout_ms: float, again: bool, more: dict[str, Any], before: tuple[bytes, ...]
    ) -> None:
        """A new connection with a session. `before` are lines that it says first, each a `hello` that is rejected."""
        old = self.clients.pop(slot, None)
        if old is not None and old.open and not again:
            old.dropped = True
            old.transport.drop()
        elif old is not None:
            self.others = [other for other in self.others if not other.transport.over] + [old]
        client = self._client(slot)
        client.say(b"".join(line + b"\n" for line in before))
        client.say(said("hello", session=secret, sessionTimeout=timeout_ms, **more) + b"\n")

    async def wrong_lines(self, slot: int, lines: tuple[bytes, ...]) -> None:
        """Lines of which each that is answered by an error must have changed nothing."""
        client = self._client(slot)
        await self.settle()
        if not client.open or client.transport.paused or self.killing:
            return
        for line in lines:
            text = PLACE.sub(lambda found: b"%d" % self.book.pick(int(found[1])), line)
            before, errors, others = self._state(), self.seen["told error"], self._told()
            client.say(text + b"\n")
            await self._turns(3)
            told = client.open and self.seen["told error"] > errors and self._told() == others
            if told and self._state() != before:
                self.wrong(Wrong(f"an error changed something: {text!r}"))

    def _told(self) -> int:
        return sum(
            count for word, count in self.seen.items() if word.startswith("told ") and not word.startswith("told error")
        )

    def _state(self) -> Any:
        table, dispatcher = self.pipeline.manager.table, self.pipeline._dispatcher
        rows = [
            (
                id_,
                request.state,
                request.deadline,
                request.fence,
                request.ref,
                request.queue_entry and request.queue_entry[:2],
            )
            for requests in (table.held, table.waiting)
            for id_, request in requests.items()
        ]
        prefixes = {prefix: len(watchers) for prefix, watchers in dispatcher.watches.prefixes.items()}
        return rows, prefixes, len(dispatcher.sessions), [session.live_requests for session in dispatcher.sessions]

    async def half_close(self, slot: int) -> None:
        """It will say nothing more."""
        client = self.clients.get(slot)
        if client is not None and client.open:
            client.half_closed = True
            client.transport.say(None)

    async def drop(self, slot: int) -> None:
        """It is gone."""
        client = self.clients.pop(slot, None)
        if client is not None:
            client.dropped = True
            client.transport.drop()

    async def stall(self, slot: int) -> None:
        """It does not read for a while."""
        client = self.clients.get(slot)
        if client is not None:
            client.transport.stalled = True

    async def drain(self, slot: int) -> None:
        """It reads again."""
        client = self.clients.get(slot)
        if client is not None:
            client.transport.drain()

    # -- time ---------------------------------------------------------------------------------------------

    async def wait(self, ms: float) -> None:
        """Time goes by."""
        await asyncio.sleep(ms / 1000)

    async def turn(self) -> None:
        """The server runs a little."""
        await self._turns(2)
        self._look()

    async def _turns(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)

    async def _quiet(self) -> None:
        pipeline = self.pipeline
        for _ in range(TURNS):
            await asyncio.sleep(0.01 if pipeline.in_flight else 0)
            if not (pipeline._scheduler or pipeline.in_flight or pipeline._scheduled) or pipeline._stopped:
                break
        else:
            self.wrong(Wrong("the server does not come to rest"))
        await self._turns(3)

    async def settle(self) -> None:
        """Everything is answered, and all that is held is what somebody was told."""
        if self.killing:
            await self._restart()
        await self._quiet()
        while self.pipeline._deferred:  # who watches is told a little later
            await asyncio.sleep(WATCH_FLUSH_INTERVAL_S)
            await self._quiet()
        self._look()
        if self.problem is None and not self.pipeline._scheduler and not self.pipeline.in_flight:
            self._agree()

    async def end(self) -> None:
        """Everybody leaves, and all is over: nothing may be left."""
        for client in [*self.clients.values(), *self.others]:
            client.transport.drain()
        await self.settle()
        for client in self.others:
            client.dropped = True
            client.transport.drop()
        for slot in list(self.clients):
            await self.drop(slot)
        await asyncio.sleep(LONGEST_S)
        await self._quiet()
        table, dispatcher = self.pipeline.manager.table, self.pipeline._dispatcher
        left = (len(table.held), len(table.waiting), len(dispatcher.sessions), len(self.admission))
        if left != (0, 0, 0, 0) or dispatcher.watches.prefixes or self.pipeline._scheduler.bytes:
            self.wrong(Wrong(f"left over: {left} held, waiting, sessions, connections"))
        if isinstance(self.store, Shelf) and self.store.records:
            self.wrong(Wrong(f"left in the store: {self.store.records}"))
        self.pipeline.stop()

    # -- what must be so ----------------------------------------------------------------------------------

    def _look(self) -> None:
        """What holds at any time."""
        try:
            check(self.pipeline.manager)
            self.book.look()
        except AssertionError as wrong:
            self.wrong(wrong)

    def _agree(self) -> None:
        """What clients were told, what the lock manager knows and what is stored is the same."""
        table = self.pipeline.manager.table
        for client in self.clients.values():
            self._agrees(client)
        self._no_conflict()
        ears = {client.connection: client.ear for client in self.clients.values() if client.open}
        for request in [*table.held.values(), *table.waiting.values()]:
            connection = None if request.origin is None else request.origin.connection  # type: ignore[attr-defined]
            known = self.book.requests.get(request.id)
            if connection is None or connection.closed:
                lasts = request.origin is not None and request.origin.key is not None
                cut_off = (
                    connection is not None and connection in self.admission._open
                )  # it is given some seconds to read
                if not lasts and not cut_off and (request.state is not HELD or request.release_on_disconnect):
                    self.wrong(Wrong(f"{request} should have ended with its connection"))
                continue
            state = "held" if request.state is HELD else "queued"
            if state == "queued" and request.ref is not None and request.origin.quiet:  # type: ignore[union-attr]
                continue  # nobody is told of it; `_agrees` looks at those that wait so
            if known is None or known.state != state or (state == "held" and known.fence != request.fence):
                self.wrong(Wrong(f"{request} is {state}, and its client was told {known}"))
            elif connection in ears and request.id not in ears[connection].here:
                self.wrong(Wrong(f"{request} is {state}, and this connection was not told"))
        if isinstance(self.store, Shelf):
            whole = self.pipeline.snapshot().changes
            # The ending of a request that was over at once need not be stored: who does not know of it asks again.
            stored = {
                id_
                for id_, change in whole.items()
                if not isinstance(change, RetainedReply) or id_ in self.store.records
            }
            if stored != self.store.records.keys():
                self.wrong(Wrong(f"stored are {sorted(self.store.records)}, and known {sorted(whole)}"))

    def _no_conflict(self) -> None:
        """No two clients hold a lock in conflicting modes, by nothing but what they were told."""
        holders: dict[str, list[tuple[Any, bool, int]]] = {}
        for ear in (client.ear for client in self.clients.values() if client.open):
            for id_ in ear.here:
                known = self.book.requests[id_]
                if known.state != "held" or known.said is None or known.owner != ear.owner:
                    continue
                owner = known.said.request.transaction or id_
                for name, exclusive in known.names.items():
                    holders.setdefault(name, []).append((owner, exclusive, id_))
        for name, held in holders.items():
            if any(alone for _, alone, _ in held) and len({owner for owner, _, _ in held}) > 1:
                self.wrong(Wrong(f"{name} is held by {held}"))

    def _agrees(self, client: Client) -> None:
        ear, table = client.ear, self.pipeline.manager.table
        if not client.open or client.transport.paused or client.transport.coming:
            return
        due = [said for said in ear.due if not ear.silent_now(said)]
        if due:
            self.wrong(Wrong(f"never answered: {due[:3]}"))
        silent = {said.ref or "" for said in [*ear.silent.values(), *ear.due] if said not in due}
        silent = {ref for ref in silent if self.book.named(ear.owner, ref) is None}
        waiting = {request.ref for request in table.waiting.values() if request.origin is client.connection.session}
        if silent - waiting:
            self.wrong(Wrong(f"{silent - waiting} of a quiet client don't wait, and it was told nothing"))
        for id_ in ear.here:
            known = self.book.requests[id_]
            where = "held" if id_ in table.held else "queued" if id_ in table.waiting else "ended"
            if known.owner == ear.owner and known.state != where:
                self.wrong(Wrong(f"{id_} is {where}, and its client was told that it is {known.state}"))
        if ear.watched:
            held = {
                (name, request.id): str(request.mode(name))
                for request in table.held.values()
                for name in request.names()
                if ear._watches(name)
            }
            if held != ear.mirror:
                self.wrong(Wrong(f"who watches {list(ear.watched)} knows {ear.mirror}, and held is {held}"))
