"""A session: the requests of one connection, or with a key of one connection after the other, and how they ended."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import ceil, inf
from typing import TYPE_CHECKING

from genie.core import Request
from genie.core.deadlines import Deadlines
from genie.storage.store import RetainedReply

if TYPE_CHECKING:
    from genie.server.connection import Connection

MAX_RETAINED_REPLIES = 10_000
"""Ended requests that a session remembers: to recognize their `ref`, and to send their endings again."""

MAX_RETAINED_REPLY_BYTES = 2_000
"""Bytes in one ending. Of a longer one the details are left out."""

PRESUMED_RECEIVED_MS = 60_000
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
        self.endings: deque[RetainedReply] | None = None  # most sessions never need it, and an empty one is 600 bytes
        """How requests ended, oldest first. Without a key only those with a `ref`, which may be repeated."""
        self._received_until = -inf
        """Endings up to this time were received."""
        self._refs: dict[str, Request | RetainedReply] = {}

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

    def remember(self, ending: RetainedReply) -> None:
        """Remember how a request ended. `MAX_RETAINED_REPLIES` is the caller's to keep, with `forget_oldest`."""
        if self.endings is None:
            self.endings = deque()
        self.endings.append(ending)
        if ending.ref is not None:
            self._refs[ending.ref] = ending

    def forget_oldest(self) -> RetainedReply | None:
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
        if self.since <= now - PRESUMED_RECEIVED_MS:
            self._received_until = now - PRESUMED_RECEIVED_MS

    def unreceived(self) -> Iterator[RetainedReply]:
        """Endings that may have been lost with the last connection, oldest first."""
        return (ending for ending in self.endings or () if ending.message and ending.at > self._received_until)

    def close(self) -> None:
        """Nobody is connected any more. What it holds may be held for long: keep nothing else."""
        self.connection = None
        self._refs.clear()
        self.endings = None

    def forget(self) -> None:
        """The server leads no more. Its requests refer to it, and it to them: nobody else would part them."""
        self.close()
        self.bound.clear()

    def known(self, ref: str) -> Request | RetainedReply | None:
        """Return the request that came with this `ref` before, or how it ended; None if there is none."""
        return self._refs.get(ref)


def same(one: Request, other: Request) -> bool:
    """Whether two requests mean the same, so that the second may be a repetition of the first."""
    return (
        one.choice_digest == other.choice_digest
        and (one.choice_digest is not None or _same_resources(one, other))
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


# -- The sessions that outlive their connections: by the secret that proves them, and when they end --------

MAX_RETAINED_REPLIES_TOTAL = 100_000
"""Ended requests that all sessions together remember. Beyond it the oldest of all is forgotten."""


def key_of(secret: str, principal: str | None = None) -> str:
    """What a session is known by: no store, no log and no look at the memory tells the secret itself.

    Where clients must have a name it is part of it: the same secret under another name is another session.
    """
    said = secret if principal is None else f"{len(principal)} {principal} {secret}"
    return blake2b(said.encode(), digest_size=16).hexdigest()


class SessionTable:
    """Every session with a key, connected or not. One that has nothing left to tell ends with its connection."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._leaving: dict[int, Session] = {}
        self._numbers = 0
        self._endings: OrderedDict[int, Session] = OrderedDict()
        """The session of each ending that is remembered, by the id of the request, oldest first."""
        self.deadlines = Deadlines()
        """When those without a connection end, by their number."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def enter(self, secret: str, timeout_ms: float, principal: str | None = None) -> tuple[Session, bool]:
        """The session of a secret, which has a connection again, and whether it was there before."""
        key = key_of(secret, principal)
        session = self._by_key.get(key)
        resumed = session is not None
        if session is None:
            session = self._add(Session(None, key))
        self._stay(session)
        session.timeout_ms = timeout_ms
        return session, resumed

    def leave(self, session: Session, now: float) -> None:
        """Its connection is gone: it waits for another."""
        session.disconnected(now)
        if not session.bound and not session.endings:
            del self._by_key[session.key or ""]
            return
        session.until = ceil(now + session.timeout_ms)
        self._leaving[session.number] = session
        self.deadlines.add(session.until, session.number)

    def restore(self, requests: Iterable[Request], endings: Iterable[RetainedReply], now: float) -> None:
        """Take up the sessions that what was loaded belongs to. All have lost their connections just now."""
        found: dict[str, Session] = {}
        for request in requests:
            origin = request.origin
            if origin is not None and origin.key is not None:
                session = found.get(origin.key) or found.setdefault(
                    origin.key, self._add(Session(None, origin.key, origin.timeout_ms))
                )
                request.origin = session
                session.queued(request)
                session.alive += 1
            else:
                request.origin = None  # its connection was another server's, or another time's
        for ending in sorted(endings, key=lambda ending: ending.at):
            key, timeout_ms = ending.origin.key or "", ending.origin.timeout_ms
            session = found.get(key) or found.setdefault(key, self._add(Session(None, key, timeout_ms)))
            ending.origin = session
            session.remember(ending)
            self._endings[ending.id] = session
        for session in found.values():
            self.leave(session, now)

    def remember(self, session: Session, ending: RetainedReply) -> list[int]:
        """Remember how a request of a session ended; returns the ids of the endings that are forgotten for it."""
        session.remember(ending)
        self._endings[ending.id] = session
        forgotten: list[int] = []
        if session.endings is not None and len(session.endings) > MAX_RETAINED_REPLIES:
            forgotten += self._forget_oldest(session)
        if len(self._endings) > MAX_RETAINED_REPLIES_TOTAL:
            forgotten += self._forget_oldest(next(iter(self._endings.values())))
        return forgotten

    def remove(self, session: Session) -> list[int]:
        """Forget a session and all its endings; returns their ids."""
        self._stay(session)
        self._by_key.pop(session.key or "", None)
        forgotten = [ending.id for ending in session.endings or ()]
        for id_ in forgotten:
            del self._endings[id_]
        session.close()
        return forgotten

    def _forget_oldest(self, session: Session) -> list[int]:
        ending = session.forget_oldest()
        if ending is None:
            return []
        del self._endings[ending.id]
        return [ending.id]

    def ended(self, now: float) -> Session | None:
        """One whose time without a connection is over."""
        for number in self.deadlines.expired(now, 1):
            return self._leaving[number]
        return None

    def _add(self, session: Session) -> Session:
        self._numbers += 1
        session.number = self._numbers
        self._by_key[session.key or ""] = session
        return session

    def _stay(self, session: Session) -> None:
        if self._leaving.pop(session.number, None) is not None:
            self.deadlines.discard(session.until, session.number)
