"""Whose requests they are, what must end with them, and what is still to be told of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from genie.core import Request
from genie.storage.base import Ending

if TYPE_CHECKING:
    from genie.server.connection import Connection

ENDED_REFS = 10_000
"""Requests with a `ref` that are remembered beyond their end, for each session."""

ENDINGS = 10_000
"""Endings that are kept for each session, to be told again."""

ENDINGS_IN_ALL = 100_000
"""Endings that are kept for all sessions. Beyond it a session that has a new one gives up its oldest."""

LONGEST_ENDING = 2_000
"""Bytes in one of them. Of a longer one the details are left out."""

TOLD_MS = 60_000
"""How long a connection must stand after an ending was told on it before that can't have been lost with it. The kernel
gives a connection up much sooner than that when the other side doesn't acknowledge what it is sent."""


class Session:
    """The requests of one connection or, where it has a `key`, of one connection after the other."""

    __slots__ = (
        "_ended",
        "_refs",
        "alive",
        "bound",
        "connection",
        "endings",
        "key",
        "number",
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
        self.since = 0.0
        """When its connection came."""
        self.until = 0
        """When it ends, while it has no connection."""
        self.bound: dict[int, Request] = {}
        """The living requests to be looked at when the session ends: all, where it has a key; else those that end with
        it, because they wait or are held with `onDisconnect: release`."""
        self.endings: dict[int, Ending] = {}
        """What would have to be said again on another connection, in the order in which it happened."""
        self._refs: dict[str, Request | Ending] = {}
        self._ended: deque[Request] | None = None  # most sessions never need it, and an empty one is 600 bytes

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

    def released(self, request: Request) -> None:
        """It ended."""
        self.bound.pop(request.id, None)
        if request.ref is not None:
            if self._ended is None:
                self._ended = deque()
            self._ended.append(request)
            if len(self._ended) > ENDED_REFS:
                oldest = self._ended.popleft()
                if oldest.ref is not None and self._refs.get(oldest.ref) is oldest:
                    del self._refs[oldest.ref]

    def keep(self, ending: Ending) -> None:
        """Remember the last word on a request, which may have to be said again."""
        self.endings[ending.id] = ending
        if ending.ref is not None:
            self._refs.setdefault(ending.ref, ending)

    def told(self, now: float, too_many: int = 0) -> list[int]:
        """Forget the endings that must have been received, and those that are too many; returns their ids.

        `too_many` says how many there are too many in all sessions.
        """
        most = min(ENDINGS, max(0, len(self.endings) - too_many))
        gone: list[int] = []
        surely = self.connection is not None and self.since <= now - TOLD_MS
        for id_, ending in self.endings.items():
            if len(self.endings) - len(gone) <= most and not (surely and ending.at <= now - TOLD_MS):
                break
            gone.append(id_)
            if ending.ref is not None and self._refs.get(ending.ref) is ending:
                del self._refs[ending.ref]
        for id_ in gone:
            del self.endings[id_]
        return gone

    def close(self) -> None:
        """Nobody is connected any more. What it holds may be held for long: keep nothing else."""
        self.connection = None
        self._refs.clear()
        self._ended = None

    def forget(self) -> None:
        """The server leads no more. Its requests refer to it, and it to them: nobody else would part them."""
        self.close()
        self.bound.clear()
        self.endings.clear()

    def known(self, ref: str) -> Request | Ending | None:
        """The request that came with this `ref` before, if any."""
        return self._refs.get(ref)


def same(one: Request, other: Request) -> bool:
    """Whether two requests ask for the same, so that the second may be a repetition of the first."""
    asked = one.chosen is None and one.shared == other.shared and one.exclusive == other.exclusive
    return (
        (asked or one.chosen is not None)
        and one.chosen == other.chosen
        and one.transaction == other.transaction
        and one.priority == other.priority
        and one.queue_timeout_ms == other.queue_timeout_ms
        and one.transaction_timeout_ms == other.transaction_timeout_ms
        and one.release_on_disconnect == other.release_on_disconnect
    )
