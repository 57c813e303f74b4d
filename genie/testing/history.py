"""What happened in a simulated world: every line said, told and heard, every change of the store, every fault.

Times are the world's, in seconds. The network is listened to from outside, so that it makes no difference which client
or server it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from genie.testing.transport import Connection, SimTransport

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
