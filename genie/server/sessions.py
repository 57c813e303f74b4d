"""The sessions that outlive their connections: by the secret that proves them, and when they end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import ceil

from genie.core import Request
from genie.core.deadlines import Deadlines
from genie.server.session import MAX_ENDINGS, Session
from genie.storage.base import Ending

MAX_ENDINGS_IN_ALL = 100_000
"""Ended requests that all sessions together remember. Beyond it the oldest of all is forgotten."""


def key_of(secret: str, principal: str | None = None) -> str:
    """What a session is known by: no store, no log and no look at the memory tells the secret itself.

    Where clients must have a name it is part of it: the same secret under another name is another session.
    """
    said = secret if principal is None else f"{len(principal)} {principal} {secret}"
    return blake2b(said.encode(), digest_size=16).hexdigest()


class Sessions:
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

    def restore(self, requests: Iterable[Request], endings: Iterable[Ending], now: float) -> None:
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

    def remember(self, session: Session, ending: Ending) -> list[int]:
        """Remember how a request of a session ended; returns the ids of the endings that are forgotten for it."""
        session.remember(ending)
        self._endings[ending.id] = session
        forgotten: list[int] = []
        if session.endings is not None and len(session.endings) > MAX_ENDINGS:
            forgotten += self._forget_oldest(session)
        if len(self._endings) > MAX_ENDINGS_IN_ALL:
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
        for number in self.deadlines.due(now, 1):
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
