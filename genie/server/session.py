"""A session: the requests of one connection, or with a key of one connection after the other, and how they ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING

from genie.core import Request
from genie.storage.base import Ending

if TYPE_CHECKING:
    from genie.server.connection import Connection

MAX_ENDINGS = 10_000
"""Ended requests that a session remembers: to recognize their `ref`, and to send their endings again."""

LONGEST_ENDING = 2_000
"""Bytes in one ending. Of a longer one the details are left out."""

RECEIVED_MS = 60_000
"""After how long an ending counts as received, if the connection on which it was sent still stands. The kernel gives a
connection up much sooner than that when the other side doesn't acknowledge what it is sent."""


class Session:
    """The requests of one connection or, where it has a `key`, of one connection after the other."""

    __slots__ = (
        "_received_until",
        "_refs",
        "alive",
        "bound",
        "connection",
        "endings",
        "key",
        "number",
        "quiet",
        "since",
        "timeout_ms",
        "until",
    )

    def __init__(self, connection: Connection | None, key: str | None = None, timeout_ms: float = 0.0) -> None:
        self.connection = connection
        self.key = key
        self.timeout_ms = timeout_ms
        """How long it lasts without a connection."""
        self.number = 0
        self.alive = 0
        """How many of its requests are held or wait."""
        self.since = inf
        """When its connection came. Infinite where that is unknown: none of its endings counts as received."""
        self.until = 0
        """When it ends, while it has no connection."""
        self.bound: dict[int, Request] = {}
        """The living requests to be looked at when the session ends: all, where it has a key; else those that end with
        it, because they wait or are held with `onDisconnect: release`."""
        self.quiet = False
        """Whether its client wants no `queued` for requests with a `ref`."""
        self.endings: deque[Ending] | None = None  # most sessions never need it, and an empty one is 600 bytes
        """How requests ended, oldest first. Without a key only those with a `ref`, which may be repeated."""
        self._received_until = -inf
        """Endings up to this time were received."""
        self._refs: dict[str, Request | Ending] = {}

    def queued(self, request: Request) -> None:
        """A request of this session arrived."""
        self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def granted(self, request: Request) -> None:
        """A request of this session arrived and is held at once."""
        if self.key is not None or request.release_on_disconnect:
            self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def locked(self, request: Request) -> None:
        """It is held."""
        if self.key is None and not request.release_on_disconnect:
            del self.bound[request.id]

    def remember(self, ending: Ending) -> None:
        """Remember how a request ended. `MAX_ENDINGS` is the caller's to keep, with `forget_oldest`."""
        if self.endings is None:
            self.endings = deque()
        self.endings.append(ending)
        if ending.ref is not None:
            self._refs[ending.ref] = ending

    def forget_oldest(self) -> Ending | None:
        """Forget the oldest ending and return it."""
        if not self.endings:
            return None
        ending = self.endings.popleft()
        if ending.ref is not None and self._refs.get(ending.ref) is ending:
            del self._refs[ending.ref]
        return ending

    def disconnected(self, now: float) -> None:
        """Note which endings were received, when the connection is lost."""
        self.connection = None
        if self.since <= now - RECEIVED_MS:
            self._received_until = now - RECEIVED_MS

    def unreceived(self) -> Iterator[Ending]:
        """Endings that may have been lost with the last connection, oldest first."""
        return (ending for ending in self.endings or () if ending.line and ending.at > self._received_until)

    def close(self) -> None:
        """Nobody is connected any more. What it holds may be held for long: keep nothing else."""
        self.connection = None
        self._refs.clear()
        self.endings = None

    def forget(self) -> None:
        """The server leads no more. Its requests refer to it, and it to them: nobody else would part them."""
        self.close()
        self.bound.clear()

    def known(self, ref: str) -> Request | Ending | None:
        """Return the request that came with this `ref` before, or how it ended; None if there is none."""
        return self._refs.get(ref)


def same(one: Request, other: Request) -> bool:
    """Whether two requests mean the same, so that the second may be a repetition of the first."""
    return (
        one.chosen == other.chosen
        and (one.chosen is not None or _same_resources(one, other))
        and one.transaction == other.transaction
        and one.priority == other.priority
        and one.queue_timeout_ms == other.queue_timeout_ms
        and one.transaction_timeout_ms == other.transaction_timeout_ms
        and one.release_on_disconnect == other.release_on_disconnect
        and one.note == other.note
    )


def _same_resources(one: Request, other: Request) -> bool:
    """Whether both name the same resources in the same modes, in whatever order."""
    if one.shared == other.shared and one.exclusive == other.exclusive:
        return True
    return set(one.shared) == set(other.shared) and set(one.exclusive) == set(other.exclusive)
