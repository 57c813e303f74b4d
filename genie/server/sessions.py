"""Sessions: what outlives a connection. Bound requests, retained replies, and when a session without a connection ends."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from math import ceil, inf
from typing import Protocol

from genie.core import Request
from genie.core.deadlines import Deadlines
from genie.storage.store import RetainedReply

MAX_RETAINED_REPLIES = 10_000
"""Terminal replies that a session retains: to recognize the `ref` of an ended request, and to send them again."""

MAX_RETAINED_REPLIES_TOTAL = 100_000
"""Terminal replies that all sessions together retain. Beyond it the oldest of all is dropped."""

MAX_RETAINED_REPLY_BYTES = 2_000
"""Bytes of one retained reply. A longer one is retained without its details."""

PRESUMED_RECEIVED_MS = 60_000
"""Age at which a reply counts as received, if its connection still stands. The kernel closes a connection much sooner
where the other side does not acknowledge what it is sent."""


class Outbound(Protocol):
    """The sending side of a connection (`Peer` implements it): all that sessions, watches and the notifier know of one."""

    closed: bool
    outbox: list[bytes]
    has_reply: bool
    deferred: list[bytes]
    watch_bytes: int

    @property
    def unread_bytes(self) -> int:
        """Bytes written that the client has not read."""

    def flush(self) -> None:
        """Send all messages of the batch."""

    def defer(self) -> None:
        """Keep the batch's watch events for a later write."""

    def flush_deferred(self) -> None:
        """Send deferred watch events."""

    def finish(self) -> None:
        """Send everything, then close."""

    def detach(self) -> None:
        """Execute nothing more: the session has ended, or another connection took it over."""


class Session:
    """The requests of one connection or, where it has a `key`, of one connection after another."""

    __slots__ = (
        "_received_until",
        "_refs",
        "bound",
        "connected_at",
        "connection",
        "expires_at",
        "key",
        "live_requests",
        "number",
        "quiet",
        "retained_replies",
        "timeout_ms",
    )

    def __init__(self, connection: Outbound | None, key: str | None = None, timeout_ms: float = 0.0) -> None:
        self.connection = connection
        self.key = key
        self.timeout_ms = timeout_ms
        """How long it lasts without a connection."""
        self.number = 0
        """Its number in the session table."""
        self.live_requests = 0
        """How many of its requests are held or wait."""
        self.connected_at = inf
        """Manager time (ms) of its connection's `hello`. Infinite where unknown: no retained reply counts as received."""
        self.expires_at = 0
        """Manager time (ms) when it ends, while it has no connection."""
        self.bound: dict[int, Request] = {}
        """Live requests to look at when the session ends: all of them where it has a key; else those that end with it,
        because they wait or are held with `onDisconnect: release`."""
        self.quiet = False
        """Whether its client wants no `queued` for requests with a `ref`."""
        self.retained_replies: deque[RetainedReply] | None = (
            None  # most sessions need none, and an empty deque is 600 B
        )
        """Terminal replies, oldest first. Without a key only those of requests with a `ref`, which may be repeated."""
        self._received_until = -inf
        """Replies up to this time were received."""
        self._refs: dict[str, Request | RetainedReply] = {}

    def add_queued(self, request: Request) -> None:
        """Add a request that waits."""
        self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def add_granted(self, request: Request) -> None:
        """Add a request that was granted at once."""
        if self.key is not None or request.release_on_disconnect:
            self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def on_granted(self, request: Request) -> None:
        """Unbind a request that waited and was granted, unless it ends with the session."""
        if self.key is None and not request.release_on_disconnect:
            del self.bound[request.id]

    def retain(self, reply: RetainedReply) -> None:
        """Retain a terminal reply. The caller keeps to `MAX_RETAINED_REPLIES` with `drop_oldest_reply`."""
        if self.retained_replies is None:
            self.retained_replies = deque()
        self.retained_replies.append(reply)
        if reply.ref is not None:
            self._refs[reply.ref] = reply

    def drop_oldest_reply(self) -> RetainedReply | None:
        """Drop the oldest retained reply and return it."""
        if not self.retained_replies:
            return None
        reply = self.retained_replies.popleft()
        if reply.ref is not None and self._refs.get(reply.ref) is reply:
            del self._refs[reply.ref]
        return reply

    def on_disconnect(self, now: float) -> None:
        """Note which retained replies were received, when the connection is lost."""
        self.connection = None
        if self.connected_at <= now - PRESUMED_RECEIVED_MS:
            self._received_until = now - PRESUMED_RECEIVED_MS

    def unreceived_replies(self) -> Iterator[RetainedReply]:
        """Return the replies that may have been lost with the last connection, oldest first."""
        return (reply for reply in self.retained_replies or () if reply.message and reply.at > self._received_until)

    def find(self, ref: str) -> Request | RetainedReply | None:
        """Return the request with this `ref`, or its retained reply where it has ended; None if there is none."""
        return self._refs.get(ref)

    def end(self) -> None:
        """Drop what only a connected client needs. Requests may be held, and refer to the session, for long after."""
        self.connection = None
        self._refs.clear()
        self.retained_replies = None

    def dispose(self) -> None:
        """Break the reference cycle of the session and its requests, so that both are freed without the collector."""
        self.end()
        self.bound.clear()


def is_same_request(one: Request, other: Request) -> bool:
    """Return whether two requests mean the same, so that the second may be a retry of the first."""
    return (
        one.choice_digest == other.choice_digest
        and (one.choice_digest is not None or _has_same_resources(one, other))
        and one.transaction == other.transaction
        and one.priority == other.priority
        and one.queue_timeout_ms == other.queue_timeout_ms
        and one.transaction_timeout_ms == other.transaction_timeout_ms
        and one.release_on_disconnect == other.release_on_disconnect
        and one.note == other.note
    )


def _has_same_resources(one: Request, other: Request) -> bool:
    """Return whether both name the same resources in the same modes, in any order."""
    if one.shared == other.shared and one.exclusive == other.exclusive:
        return True
    return set(one.shared) == set(other.shared) and set(one.exclusive) == set(other.exclusive)


# -- The table of sessions that outlive their connections ---------------------------------------------


def session_key(secret: str, principal: str | None = None) -> str:
    """Return the key of a session: a digest, so that no store, log or memory dump contains the client's secret.

    It covers the name of the client's principal: the same secret of another principal is another session.
    """
    text = secret if principal is None else f"{len(principal)} {principal} {secret}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


class SessionTable:
    """Every session with a key, connected or not. One with nothing to resume ends with its connection."""

    def __init__(self) -> None:
        self._by_key: dict[str, Session] = {}
        self._detached: dict[int, Session] = {}
        """Sessions without a connection, by number."""
        self._last_number = 0
        self._session_of_reply: OrderedDict[int, Session] = OrderedDict()
        """The session of each retained reply, by the id of the request, oldest first."""
        self.deadlines = Deadlines()
        """When detached sessions end, by number."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def attach(self, secret: str, timeout_ms: float, principal: str | None = None) -> tuple[Session, bool]:
        """Return the session of a secret for a new connection, and whether it existed before."""
        key = session_key(secret, principal)
        session = self._by_key.get(key)
        resumed = session is not None
        if session is None:
            session = self._add(Session(None, key))
        self._cancel_expiry(session)
        session.timeout_ms = timeout_ms
        return session, resumed

    def detach(self, session: Session, now: float) -> None:
        """Keep a session whose connection was lost until its timeout, if there is anything to resume."""
        session.on_disconnect(now)
        if not session.bound and not session.retained_replies:
            del self._by_key[session.key or ""]
            return
        session.expires_at = ceil(now + session.timeout_ms)
        self._detached[session.number] = session
        self.deadlines.add(session.expires_at, session.number)

    def restore(self, requests: Iterable[Request], replies: Iterable[RetainedReply], now: float) -> None:
        """Rebuild the sessions of requests and replies that were loaded from the store, as just disconnected."""
        found: dict[str, Session] = {}
        for request in requests:
            origin = request.origin
            if origin is not None and origin.key is not None:
                session = found.get(origin.key) or found.setdefault(
                    origin.key, self._add(Session(None, origin.key, origin.timeout_ms))
                )
                request.origin = session
                session.add_queued(request)
                session.live_requests += 1
            else:
                request.origin = None  # its connection was to another server, or from before a restart
        for reply in sorted(replies, key=lambda reply: reply.at):
            key, timeout_ms = reply.origin.key or "", reply.origin.timeout_ms
            session = found.get(key) or found.setdefault(key, self._add(Session(None, key, timeout_ms)))
            reply.origin = session
            session.retain(reply)
            self._session_of_reply[reply.id] = session
        for session in found.values():
            self.detach(session, now)

    def retain(self, session: Session, reply: RetainedReply) -> list[int]:
        """Retain a terminal reply of a session; return the ids of replies that are dropped for it."""
        session.retain(reply)
        self._session_of_reply[reply.id] = session
        dropped: list[int] = []
        if session.retained_replies is not None and len(session.retained_replies) > MAX_RETAINED_REPLIES:
            dropped += self._drop_oldest_reply(session)
        if len(self._session_of_reply) > MAX_RETAINED_REPLIES_TOTAL:
            dropped += self._drop_oldest_reply(next(iter(self._session_of_reply.values())))
        return dropped

    def remove(self, session: Session) -> list[int]:
        """End a session; return the ids of its retained replies, which are dropped."""
        self._cancel_expiry(session)
        self._by_key.pop(session.key or "", None)
        dropped = [reply.id for reply in session.retained_replies or ()]
        for id_ in dropped:
            del self._session_of_reply[id_]
        session.end()
        return dropped

    def next_expired(self, now: float) -> Session | None:
        """Return a session whose time without a connection is over."""
        for number in self.deadlines.expired(now, 1):
            return self._detached[number]
        return None

    def dispose(self) -> None:
        """Break the reference cycles of all sessions."""
        for session in self._by_key.values():
            session.dispose()

    def _drop_oldest_reply(self, session: Session) -> list[int]:
        reply = session.drop_oldest_reply()
        if reply is None:
            return []
        del self._session_of_reply[reply.id]
        return [reply.id]

    def _add(self, session: Session) -> Session:
        self._last_number += 1
        session.number = self._last_number
        self._by_key[session.key or ""] = session
        return session

    def _cancel_expiry(self, session: Session) -> None:
        if self._detached.pop(session.number, None) is not None:
            self.deadlines.discard(session.expires_at, session.number)
