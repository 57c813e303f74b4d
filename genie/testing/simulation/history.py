"""Watches what a namespace in the simulated Redis holds, and puts each change into the history."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from genie.storage.redis.log import EpochHistory, read_ends
from genie.testing.simulation.network import Connection, SimTransport
from genie.testing.simulation.redis.commands import Read
from genie.testing.simulation.redis.keyspace import Undo
from genie.testing.simulation.redis.replication import ReplicatedRedis, Write
from genie.testing.simulation.redis.server import SimRedis


class Witness:
    """Reads the records of one namespace as they are stored, without the code that wrote them."""

    def __init__(self, redis: SimRedis, history: History, namespace: str = "genie") -> None:
        self._keys = redis.keys
        self._history = history
        self._meta = f"{{{namespace}}}:meta".encode()
        self._pointer = b""
        self._nonce = b""
        self._counters = b""
        """Of the last batch that was stored."""
        self._writer = ""
        self._served = False
        """Whether the writer has committed a batch."""
        self._lost = False
        self.known: dict[int, Message] = {}
        """What was stored last, for as long as whoever stored it goes on."""
        redis.on_write = self._on_write

    def look(self) -> None:
        """The store may have lost writes. Whoever leads has not, and will write them anew."""
        meta = self._keys.hash(self._meta)
        if meta.get(b"counters", b"") != self._counters or meta.get(b"records", b"") != self._pointer:
            self._lost = True

    def stored(self) -> dict[int, Message]:
        """What is there now."""
        records = self._keys.hash(self._keys.hash(self._meta).get(b"records", b""))
        return {int(field): json.loads(record) for field, record in records.items() if record}

    def _on_write(self, group: list[Undo], who: str) -> None:
        meta = self._keys.hash(self._meta)
        if not meta or all(key != self._meta for key, _, _ in group):
            return
        pointer, nonce, counters = meta.get(b"records", b""), meta.get(b"nonce", b""), meta[b"counters"]
        number, clock, next_id, next_fence = counters.split()[:4]
        if self._lost and int(number) == 0 and meta.get(b"base", b""):
            return  # somebody leads from what is left, and may yet see that it is too little
        # Who has served must not forget, even if it has stood down meanwhile. Others can't know.
        forgotten = self._lost and (who != self._writer or not self._served)
        anew = self._lost or pointer != self._pointer or nonce != self._nonce
        written, gone = self._compare() if anew else self._changed(group, pointer)
        self._lost = False
        # Who has just taken over may not have read the records yet.
        self._served = int(number) > 0 or (self._served and who == self._writer and not forgotten)
        self._pointer, self._nonce, self._counters, self._writer = pointer, nonce, counters, who
        epoch = int(meta.get(b"epoch", b"0"))
        self._history.note(
            STORE,
            who,
            Change(written, gone, epoch, (int(number), float(clock), int(next_id), int(next_fence)), anew, forgotten),
        )

    def _compare(self) -> tuple[dict[int, Message], dict[int, Message]]:
        now = self.stored()
        written = {id_: record for id_, record in now.items() if self.known.get(id_) != record}
        gone = {id_: record for id_, record in self.known.items() if id_ not in now}
        self.known = now
        return written, gone

    def _changed(self, group: list[Undo], pointer: bytes) -> tuple[dict[int, Message], dict[int, Message]]:
        records = self._keys.hash(pointer)
        written, gone = {}, {}
        for name in dict.fromkeys([name for key, name, _ in group if key == pointer and name is not None]):
            id_, record = int(name), records.get(name)
            if record is not None:
                written[id_] = self.known[id_] = json.loads(record)
            elif id_ in self.known:
                gone[id_] = self.known.pop(id_)
        return written, gone


# -- Watches what a namespace holds on several Redises, of which each may go back, or another way than the others --------


class Branches:
    """Reads the records of one namespace as they are stored on each of them. A batch must be on `min_replicas` replicas."""

    def __init__(
        self, redises: list[ReplicatedRedis], history: History, min_replicas: int, namespace: str = "genie"
    ) -> None:
        self._history = history
        self._min_replicas = min_replicas
        self._meta = f"{{{namespace}}}:meta".encode()
        self._journal = f"{{{namespace}}}:journal".encode()
        self._knows: dict[str, Place] = {}
        """The latest that each server is known to know, of what it still goes on from."""
        self._stored: dict[str, Place] = {}
        """What each server has stored last, though it may not know that it has."""
        self._batches: dict[tuple[tuple[int, int], str], Place] = {}
        self._count = 0
        for redis in redises:
            redis.on_write = self._watch(redis)
            redis.on_listen = self._listened(redis)
            redis.on_copy = self._copied

    def head(self, redis: ReplicatedRedis) -> Place | None:
        """What a Redis has."""
        for write in reversed(redis.log):
            if write.noted is not None:
                return write.noted  # type: ignore[no-any-return]
        return None

    def stored(self, redis: ReplicatedRedis) -> dict[int, Message]:
        """The records that a Redis has."""
        return _records(redis, redis.keys.hash(self._meta).get(b"records", b""))

    # -- inside -------------------------------------------------------------------------------------------

    def _watch(self, redis: ReplicatedRedis) -> Callable[[list[Undo], str], None]:
        def wrote(group: list[Undo], who: str) -> None:
            if any(key == self._meta for key, _, _ in group):
                self._wrote(redis, redis.log[-1], group, who)

        return wrote

    def _listened(self, redis: ReplicatedRedis) -> Callable[[str, Read], None]:
        def listened(who: str, read: Read) -> None:
            epoch, rest = read.after.get(self._journal, (0, 0))
            place = self.head(redis)
            while place is not None and place.batch > (epoch, rest // 1000):
                place = place.parent
            knew = self._knows.get(who)
            if place is None or place.batch != (epoch, rest // 1000) or (knew is not None and knew.follows(place)):
                return  # it must not forget what it has read, though Redis may
            self._knows[who] = place

        return listened

    def _copied(self, write: Write) -> None:
        place: Place | None = write.noted
        if place is not None and place.confirmed_at is None and len(write.on) > self._min_replicas:
            place.confirmed_at = self._history.clock()

    def _wrote(self, redis: ReplicatedRedis, write: Write, group: list[Undo], who: str) -> None:
        meta, before = redis.keys.hash(self._meta), self.head(redis)
        number, clock, next_id, next_fence = meta[b"counters"].split()
        batch, records = (int(meta[b"epoch"]), int(number)), meta[b"records"]
        if before is not None and before.records == records:
            known = dict(before.known)
            for field in {field: None for key, field, _ in group if key == records and field not in (None, b"0")}:
                record = redis.keys.hash(records).get(field or b"")
                if record is None:
                    known.pop(int(field or b""), None)
                else:
                    known[int(field or b"")] = json.loads(record)
        else:
            known = _records(redis, records)
        again = self._batches.get((batch, who))
        if again is not None and before in (again, again.parent) and again.known == known:
            write.noted = again  # the same batch, sent again
            return
        anew, knew = number == b"0" and not meta.get(b"base"), self._knows.get(who)
        led_by = EpochHistory(read_ends(meta.get(b"history", b"")))
        parent = self._source(who, knew, before, known, led_by) if anew else before
        self._count += 1
        place = Place(
            self._count, self._history.clock(), who, redis.host, batch, records, parent, before, knew, anew, known
        )
        write.noted = self._batches[batch, who] = place
        self._copied(write)
        self._learnt(place)
        old = {} if parent is None else parent.known
        written = {id_: record for id_, record in known.items() if old.get(id_) != record}
        gone = {id_: record for id_, record in old.items() if id_ not in known}
        counters = int(number), float(clock), int(next_id), int(next_fence)
        self._history.note(STORE, who, Change(written, gone, batch[0], counters, anew, place=place))

    def _learnt(self, place: Place) -> None:
        """What its writer knows now. (One that came too late, from a connection that it has given up, tells it nothing.)"""
        who, before, knew, stored = place.who, place.before, place.knew, self._stored.get(place.who)
        if stored is not None and place.batch < stored.batch:
            place.late = True
            return
        if place.batch[1] > 0 and before is not None:  # it does not know yet that this one is stored
            self._knows[who] = before if before.who == who else place
        elif place.anew or knew is None or before is None or not knew.follows(before_it_led(before, who) or before):
            self._knows[who] = place
        if place.batch[1] > 0 or place.anew:
            self._stored[who] = place

    def _source(
        self, who: str, knew: Place | None, before: Place | None, known: dict[int, Message], led_by: EpochHistory
    ) -> Place | None:
        """What a whole state follows on. Who has read on since it was last seen to know something wrote just that.

        A batch that too few replicas had was told to nobody: its writer may leave it out, and says which it has done.
        """
        had, stored = before_it_led(before, who), self._stored.get(who)
        if knew is not None and stored is not None and stored.follows(knew):
            knew = stored if stored.confirmed_at is not None or led_by.includes(stored.batch) else knew
        if knew is not None and knew.known == known:
            return knew
        least = had if knew is None or (had is not None and had.follows(knew)) else before_it_led(knew, who)
        if least is None or least.known == known:
            return least
        later = [place for place in self._batches.values() if place.known == known and place.follows(least)]
        return max(later, key=lambda place: place.number, default=least)


def _records(redis: ReplicatedRedis, key: bytes) -> dict[int, Message]:
    return {int(field): json.loads(record) for field, record in redis.keys.hash(key).items() if record}


# -- What happened in a simulated world: every line said, told and heard, every change of the store, every fault --------

Message = dict[str, Any]

SAY, TELL, HEAR, OPEN, LEFT, STORE, FAULT, LOG, NOTE = (
    "say",
    "tell",
    "hear",
    "open",
    "left",
    "store",
    "fault",
    "log",
    "note",
)
"""A client sends a line, a server writes one, a client gets one; a connection is made, one side of it ends; the store
changed; something was broken, or mended; a server logs; a program says what it thinks."""


@dataclass(slots=True, frozen=True)
class Entry:
    """One thing that happened. `who` is the node, `connection` the number of the connection where there is one."""

    at: float
    kind: str
    who: str
    what: Any
    connection: int = 0

    def __str__(self) -> str:
        what = self.what
        if isinstance(what, dict):
            what = json.dumps(what, default=str)
        where = f" #{self.connection}" if self.connection else ""
        return f"{self.at:12.6f} {self.who}{where} {self.kind} {what}"


@dataclass(slots=True)
class Change:
    """A change of the store: requests that it holds now as they are now, and ids of those that it holds no more.

    `counters` are the fields of that name; `anew` says that the whole was compared, not only what a batch wrote.
    """

    written: dict[int, Message]
    gone: dict[int, Message]
    epoch: int
    counters: tuple[int, float, int, int]
    anew: bool = False
    forgotten: bool = False
    """The store had lost what it acknowledged, and with it the server that knew."""
    place: Place | None = field(default=None, repr=False)
    """Where in the tree of all that was ever stored, where there are several Redises."""


@dataclass(slots=True, eq=False)
class Place:
    """A state of a namespace in a tree of them: what some Redis had after a batch, or after a server began to lead.

    `parent` is what it follows on; `before` what that Redis had had, which is another place where somebody wrote anew what
    the Redis had lost. `knew` is the latest that the writer is known to have known.
    """

    number: int
    at: float
    who: str
    host: str
    batch: tuple[int, int]
    """The epoch, and the number of the batch within it."""
    records: bytes
    """The key of the records."""
    parent: Place | None
    before: Place | None
    knew: Place | None
    anew: bool
    known: dict[int, Message]
    """The records."""
    late: bool = False
    """It came from a connection that its writer had given up, and what was in it is also in what that one wrote later."""
    confirmed_at: float | None = None
    """When as many replicas had it as must."""
    told: bool = False
    """Something was told that rests on it."""

    def __str__(self) -> str:
        return f"{self.batch[0]}-{self.batch[1]} by {self.who} on {self.host}"

    def follows(self, other: Place) -> bool:
        """Whether it is the other, or has come by there."""
        place: Place | None = self
        while place is not None and place is not other:
            place = None if place.number < other.number else place.parent
        return place is other

    def tell(self) -> None:
        """Something is told that rests on this, and on all that it follows on."""
        place: Place | None = self
        while place is not None and not place.told:
            place.told, place = True, place.parent

    @property
    def begins(self) -> bool:
        """Whether its writer leads from here on, and did not before."""
        before = self.before
        took_over = before is not None and before.who == self.who and before.batch[1] == 0 and not before.anew
        return self.batch[1] == 0 and (took_over or not self.anew)


def before_it_led(place: Place | None, who: str | None = None) -> Place | None:
    """What there was before a server took over that has stored nothing since, and before what came too late.

    Without `who` whichever server that was: none of them has told anybody anything.
    """
    while place is not None and (place.late or (who in (None, place.who) and place.batch[1] == 0 and not place.anew)):
        place = place.before
    return place


@dataclass
class History:
    """Collects entries. `clock` gives the time."""

    clock: Callable[[], float]
    server_port: int = 7077
    final: Place | None = None
    """What was there at the end, where there are several Redises."""
    hindered: dict[str, list[float]] = field(default_factory=dict)
    """When a host was looked at and could not do what it would, by its name: it was down, stood still or was cut off."""
    lives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """From when to when each process of a server lived, by its name."""
    entries: list[Entry] = field(default_factory=list)
    _parts: dict[tuple[SimTransport, str], bytes] = field(default_factory=dict)

    def note(self, kind: str, who: str, what: Any, connection: int = 0) -> None:
        """Something happened."""
        self.entries.append(Entry(self.clock(), kind, who, what, connection))

    def digest(self) -> str:
        """The same for the same history."""
        return sha256("\n".join(map(str, self.entries)).encode()).hexdigest()

    def tail(self, count: int = 60, until: float | None = None, about: int | None = None) -> str:
        """The last entries, of those about one id where that is given."""
        found = [
            entry
            for entry in self.entries
            if (until is None or entry.at <= until)
            and (about is None or entry.kind == FAULT or str(about) in str(entry))
        ]
        return "\n".join(map(str, found[len(found) - min(count, len(found)) :]))

    # -- what the network shows ---------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """A connection was made."""
        if connection.address[1] == self.server_port:
            self.note(OPEN, connection.client.node.name, connection.server.node.name, connection.number)

    def sent(self, transport: SimTransport, data: bytes) -> None:
        """A process has written this."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            self._lines(transport, SAY if transport is connection.client else TELL, data)

    def got(self, transport: SimTransport, data: bytes) -> None:
        """A process is about to be given this."""
        connection = transport.connection
        if connection.address[1] == self.server_port and transport is connection.client:
            self._lines(transport, HEAR, data)

    def closed(self, transport: SimTransport, how: str) -> None:
        """A process has ended its side, or learnt of its end."""
        connection = transport.connection
        if connection.address[1] == self.server_port:
            side = "client" if transport is connection.client else "server"
            self.note(LEFT, transport.node.name, f"{side} {how}", connection.number)

    def _lines(self, transport: SimTransport, kind: str, data: bytes) -> None:
        key = transport, kind
        lines = (self._parts.pop(key, b"") + data).split(b"\n")
        if lines[-1]:
            self._parts[key] = lines[-1]
        who, number = transport.node.name, transport.connection.number
        for line in lines[:-1]:
            if not line.strip():
                continue
            try:
                what = json.loads(line)
            except ValueError:
                what = {"command": "garbage", "payload": {"line": repr(line)}}
            self.note(kind, who, what, number)
