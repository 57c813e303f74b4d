"""Sessions, which outlive connections: bound requests, retained replies, and the expiry of detached sessions."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from heapq import heapify, heapreplace
from math import ceil, inf
from typing import Final, Protocol

from genie.access import Principal
from genie.core import ENDED, WAITING, Origin, Request
from genie.core.context import shown_context
from genie.core.deadlines import Deadlines
from genie.core.tables import LARGE_SIZES, MAX_FREED_ITEMS, clear_in_parts, compact
from genie.server.shares import Shares, add, subtract
from genie.storage.store import RetainedReply

SESSION_BYTES: Final = 3_584
"""Bytes of a session without its requests and its retained replies: the object, its key, its note and its entries in
tables."""

MAX_RETAINED_REPLIES = 10_000
"""Maximum number of terminal replies that a session retains. They are sent again after a reconnect, and identify retries by
`ref`."""

MAX_RETAINED_REPLIES_TOTAL = 100_000
"""Maximum number of terminal replies that all sessions together retain. Beyond it, the oldest replies of the principals
with the most are dropped. A named principal can have a part of them (`Limits.principal_share`)."""

FREED_SHARE: Final = 0.01
"""Share of `MAX_RETAINED_REPLIES_TOTAL` that is free after replies were dropped."""

GUARANTEED_REPLIES = 4
"""Number of terminal replies that each connection without a session can always retain. All such connections together can
retain `MAX_RETAINED_REPLIES_TOTAL` more."""

MAX_RETAINED_REPLY_BYTES = 2_000
"""Maximum bytes of a retained reply. A longer reply is retained without its details, such as blockers."""

PRESUMED_RECEIVED_MS = 60_000
"""Age in ms from which a reply counts as received if its connection is still open. The kernel closes a connection much
earlier if the client does not acknowledge data."""


class Outbound(Protocol):
    """The sending side of a connection, for sessions, watches and the notifier. `Peer` implements it."""

    closed: bool
    principal: Principal | None
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
        """Defer the watch events of the batch to a later write."""

    def flush_deferred(self) -> None:
        """Send deferred watch events."""

    def finish(self) -> None:
        """Send all messages, then close the connection."""

    def detach(self) -> None:
        """Ignore further commands, because the session has ended or was taken over by another connection."""


class SessionEnd:
    """The requests of a session that ends, in slices.

    First the waiting requests end, then the held requests with `onDisconnect: release`. The other held requests are kept
    without a session. A request that was waiting ends even if it is granted before its slice.
    """

    __slots__ = ("_kept_count", "_requests")

    def __init__(self, requests: Iterable[Request]) -> None:
        kept: list[Request] = []
        released: list[Request] = []
        waiting: list[Request] = []
        for request in requests:
            if request.state is WAITING:
                waiting.append(request)
            elif request.release_on_disconnect:
                released.append(request)
            else:
                kept.append(request)
        self._kept_count = len(kept)
        self._requests = kept + released + waiting
        """In reverse order: the next request is at the end."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    def next_slice(self, max_locks: int) -> tuple[list[Request], list[Request], int]:
        """Remove the next requests. Return the requests to end, the requests to keep, and the number of their locks.

        The last request of a slice may exceed `max_locks`.
        """
        ended: list[Request] = []
        kept: list[Request] = []
        requests, lock_count = self._requests, 0
        while requests and lock_count < max_locks:
            are_only_kept_left = len(requests) <= self._kept_count
            request = requests.pop()
            if request.state is ENDED:
                continue
            lock_count += request.queue_count()  # with the queues of subtrees, while it waits
            if are_only_kept_left:
                kept.append(request)
            else:
                ended.append(request)
        return ended, kept, lock_count


class StateReport:
    """The state of a resumed session that is still to be sent to its client, in slices.

    The first slices contain the replies that the client may have missed. The others contain the requests that were live when
    the session was resumed. A request that has ended before its slice is omitted, because the client was notified of its
    end.
    """

    __slots__ = ("_replies", "_requests")

    def __init__(self, session: Session) -> None:
        self._replies = [*session.unreceived_replies()]
        self._replies.reverse()
        self._requests = [*reversed(session.bound.values())]
        """In reverse order like the replies: the next request is at the end."""

    def __bool__(self) -> bool:
        return bool(self._replies or self._requests)

    def next_slice(self, limit: int) -> tuple[list[RetainedReply], list[Request]]:
        """Remove and return the next replies and requests, at most `limit` together.

        Each resource of a request with `anyOf` counts as well, because the reply lists up to 10,000 of them. The last
        request of a slice may exceed the limit.
        """
        replies = [self._replies.pop() for _ in range(min(limit, len(self._replies)))]
        requests: list[Request] = []
        left = limit - len(replies)
        while self._requests and left > 0:
            request = self._requests.pop()
            left -= 1
            if request.state is not ENDED:
                requests.append(request)
                if request.context.choice_digest is not None:  # a request with `anyOf`
                    left -= request.name_count()
        return replies, requests


class Session:
    """The requests of one connection or, if the session has a `key`, of successive connections."""

    __slots__ = (
        "_received_until",
        "_refs",
        "bound",
        "connected_at",
        "connection",
        "ending",
        "expires_at",
        "key",
        "live_requests",
        "note",
        "number",
        "outlived_by_requests",
        "principal",
        "quiet",
        "reply_limit",
        "retained_replies",
        "sees_all",
        "state_report",
        "timeout_ms",
    )

    def __init__(
        self,
        connection: Outbound | None,
        key: str | None = None,
        timeout_ms: float = 0.0,
        note: str | None = None,
        principal: str | None = None,
    ) -> None:
        # More than 16 fields: each connection has a session, and each further object would take memory.
        self.connection = connection
        self.key = key
        self.timeout_ms = timeout_ms
        """Time in ms for which the session lasts without a connection."""
        self.note = note
        """The note of all requests that have no `note` of their own."""
        self.principal = principal
        """The name of the principal that is charged for the session and its replies. Without a key: set when it is charged."""
        self.sees_all = False
        """True if the principal of the last connection, which is lost, may see the notes and traces of all requests."""
        self.number = 0
        """The number of the session in the session table."""
        self.live_requests = 0
        """Number of held and waiting requests."""
        self.outlived_by_requests = False
        """True if the session has ended without a key, and held requests still refer to it."""
        self.connected_at = inf
        """Time at which the whole state of the session was sent after the connection's `hello` (ms, lock manager's
        clock). Infinite before that: then no retained reply counts as received."""
        self.expires_at = 0
        """Time when the session ends unless it is resumed (ms, lock manager's clock)."""
        self.bound: dict[int, Request] = {}
        """Live requests by id. With a key: all. Without a key: only requests that end with the session, because they wait or
        have `onDisconnect: release`."""
        self.ending: SessionEnd | None = None
        """The requests that have not ended yet, while the session ends. None otherwise."""
        self.state_report: StateReport | None = None
        """The state that was not sent yet after the client has resumed the session. None if all was sent."""
        self.quiet = False
        """True if `queued` is omitted for requests with a `ref`."""
        self.retained_replies: deque[RetainedReply] | None = None
        """Terminal replies, oldest first. Without a key: only replies to requests with a `ref`. None instead of an empty
        deque, which would take 600 bytes in every session."""
        self.reply_limit = GUARANTEED_REPLIES
        """Number of replies that the session can retain without asking the session table. Only without a key."""
        self._received_until = -inf
        """Replies sent until this time are presumed received (ms, lock manager's clock)."""
        self._refs: dict[str, Request | RetainedReply] = {}
        """Live requests and retained replies by `ref`."""

    def connect(self, connection: Outbound) -> None:
        """Continue on another connection, and prepare the report of the state to its client."""
        self.connection, self.connected_at, self.state_report = connection, inf, StateReport(self)

    def add_queued(self, request: Request) -> None:
        """Add a waiting request to the session."""
        self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def add_granted(self, request: Request) -> None:
        """Add a request that was granted immediately to the session."""
        if self.key is not None or request.release_on_disconnect:  # any other lock stays held after the connection
            self.bound[request.id] = request
        if request.ref is not None:
            self._refs[request.ref] = request

    def on_granted(self, request: Request) -> None:
        """Unbind a request that was granted after a wait, unless the session has a key or the held lock also ends with it."""
        if self.key is None and not request.release_on_disconnect:
            self.unbind(request)

    def unbind(self, request: Request) -> None:
        """Remove a request from `bound` if it is there, and free the slots of removed requests."""
        bound = self.bound
        bound.pop(request.id, None)
        if len(bound) in LARGE_SIZES:  # seldom, because `compact` may copy the dict
            compact(bound)

    def remove(self, request: Request) -> None:
        """Remove a live request, which continues without a session."""
        self.live_requests -= 1
        self.unbind(request)
        if request.ref is not None:
            self._remove_ref(request.ref)
        request.context = shown_context(request)  # with the note of the session, if it has no note of its own
        request.origin = None

    def _remove_ref(self, ref: str) -> None:
        """Remove a `ref`, and free the slots of removed refs."""
        refs = self._refs
        refs.pop(ref, None)
        if len(refs) in LARGE_SIZES:
            compact(refs)

    def retain(self, reply: RetainedReply) -> None:
        """Retain a terminal reply. The caller enforces `MAX_RETAINED_REPLIES` with `drop_oldest_reply`."""
        if self.retained_replies is None:
            self.retained_replies = deque()
        self.retained_replies.append(reply)
        if reply.ref is not None:
            self._refs[reply.ref] = reply

    def drop_oldest_reply(self) -> RetainedReply | None:
        """Drop the oldest retained reply and return it, or return None if the session retains no reply."""
        if not self.retained_replies:
            return None
        reply = self.retained_replies.popleft()
        if reply.ref is not None and self._refs.get(reply.ref) is reply:  # a later request may have the same ref
            self._remove_ref(reply.ref)
        return reply

    def on_disconnect(self, now: float) -> None:
        """Record that the connection is lost, and until when its replies are presumed received.

        Replies of the last `PRESUMED_RECEIVED_MS` may be lost: all replies if the connection was not open for longer.
        """
        principal = None if self.connection is None else self.connection.principal
        self.sees_all = principal is not None and principal.sees_all
        self.connection = self.state_report = None
        if self.connected_at <= now - PRESUMED_RECEIVED_MS:
            self._received_until = now - PRESUMED_RECEIVED_MS

    def unreceived_replies(self) -> Iterator[RetainedReply]:
        """Return an iterator over the replies, oldest first, that the client may not have received on the last connection."""
        return (reply for reply in self.retained_replies or () if reply.message and reply.at > self._received_until)

    def find(self, ref: str) -> Request | RetainedReply | None:
        """Return the live request with this `ref`, or the retained reply to an ended request, or None."""
        return self._refs.get(ref)

    def end(self) -> None:
        """Drop the connection, the refs and the replies of an ended session.

        A held request may refer to its ended session for a long time, so the session must not keep memory.
        """
        self.connection = self.ending = self.state_report = None
        self._refs.clear()
        self.retained_replies = None

    def dispose(self) -> None:
        """Break the reference cycle of the session and its requests, so that they are freed without the garbage collector."""
        self.end()
        self.bound.clear()


def is_same_request(one: Request, other: Request) -> bool:
    """Return whether two requests have equal parameters, so that `one` may be a retry of `other`."""
    return _parameters(one) == _parameters(other)


def fingerprint(request: Request) -> bytes:
    """Return a digest of the parameters of a request.

    Requests with equal digests are the same for `is_same_request`.
    """
    return blake2b(repr(_parameters(request)).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _parameters(request: Request) -> tuple[object, ...]:
    """Return the parameters by which requests with the same `ref` are compared.

    The order of the resources does not matter.
    """
    context = request.context
    names: tuple[object, ...] | None = None  # with `anyOf`: the digest identifies the choices
    if context.choice_digest is None:
        names = sorted(request.shared), sorted(request.exclusive)
        if request.units:  # omitted if empty, so that the fingerprints of other requests equal the stored ones
            names += (sorted(request.units.items()),)
    return (
        context.choice_digest,
        names,
        request.transaction,
        # As floats: those of a request that was loaded from the store may be integers, and the digest distinguishes 0 from 0.0.
        float(request.priority),
        float(request.queue_timeout_ms),
        float(request.transaction_timeout_ms),
        request.release_on_disconnect,
        context.note,
        context.traceparent,
    )


# -- The table of sessions that outlive their connections ---------------------------------------------


def session_key(secret: str, principal: str | None = None) -> str:
    """Return the key of a session: a digest, so that no store, log or memory dump contains the client's secret.

    The digest includes the name of the principal, so two principals with the same secret have different sessions.
    """
    text = secret if principal is None else f"{len(principal)} {principal} {secret}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


class SessionTable:
    """All sessions with a key, connected or detached. A session without requests and replies ends with its connection."""

    def __init__(self, principal_share: float = 0.5) -> None:
        """`principal_share` is the part (0 to 1) of `MAX_RETAINED_REPLIES_TOTAL` that one named principal can use."""
        self._principal_share = principal_share
        self.shares: Shares = {}
        """Charged bytes by named principal: for its sessions without a connection, and the charges of `StateSize`."""
        self._by_key: dict[str, Session] = {}
        self._detached: dict[int, Session] = {}
        """Detached sessions (those without a connection), by number."""
        self._last_number = 0
        self._replies: defaultdict[str | None, OrderedDict[int, Session]] = defaultdict(OrderedDict)
        """The session that retains each reply, by principal and then by the id of the answered request. The oldest
        reply of a principal is first."""
        self._reply_count = 0
        """Number of all retained replies of sessions with a key."""
        self.deadlines = Deadlines()
        """When detached sessions expire. The ids are session numbers."""
        self._outlived_count = 0
        """Number of ended sessions without a key to which held requests still refer."""
        self._extra_replies = 0
        """Number of replies that connections without a session can retain beyond their `GUARANTEED_REPLIES`."""
        self._extra_replies_by_principal: Shares = {}
        """The part of `_extra_replies` of each named principal."""

    @property
    def disconnected(self) -> int:
        """Number of sessions without a connection: detached sessions, and ended sessions with held requests."""
        return len(self._detached) + self._outlived_count

    def end_keyless(self, session: Session, principal: str | None) -> None:
        """End a session without a key after a `bye`, or after the loss of its connection. No client can resume it.

        Held requests may continue to refer to the session.
        """
        if session.live_requests and not session.outlived_by_requests:
            self._charge_ended(session, principal)
        self._reset_reply_limit(session, principal)
        session.end()

    def _charge_ended(self, session: Session, principal: str | None) -> None:
        """Charge the principal for an ended session until the last request of the session ends (`on_last_request`)."""
        session.outlived_by_requests = True
        session.principal = principal
        self._outlived_count += 1
        add(self.shares, principal, SESSION_BYTES)

    def on_last_request(self, session: Session) -> None:
        """Note that the last request of a session has ended. If the session ended before, stop charging its principal."""
        if session.outlived_by_requests:
            session.outlived_by_requests = False
            self._outlived_count -= 1
            subtract(self.shares, session.principal, SESSION_BYTES)

    def raise_reply_limit(self, session: Session, principal: str | None) -> bool:
        """Raise the reply limit of a session without a key, at most to twice its value.

        Return False if it cannot be raised.
        """
        added = min(
            session.reply_limit,
            MAX_RETAINED_REPLIES - session.reply_limit,
            MAX_RETAINED_REPLIES_TOTAL - self._extra_replies,
        )
        if principal is not None:
            used = self._extra_replies_by_principal.get(principal, 0)
            added = max(0, min(added, self._max_replies_of_a_principal - used))
        session.reply_limit += added
        self._extra_replies += added
        add(self._extra_replies_by_principal, principal, added)
        return added > 0

    def _reset_reply_limit(self, session: Session, principal: str | None) -> None:
        """Let a session retain `GUARANTEED_REPLIES` replies again, and take its additional ones off the totals.

        `raise_reply_limit` had added them.
        """
        added = session.reply_limit - GUARANTEED_REPLIES
        self._extra_replies -= added
        subtract(self._extra_replies_by_principal, principal, added)
        session.reply_limit = GUARANTEED_REPLIES

    @property
    def _max_replies_of_a_principal(self) -> int:
        # At least one: a reply that is dropped as soon as it is retained would stay in the store.
        return max(1, int(MAX_RETAINED_REPLIES_TOTAL * self._principal_share))

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_key.values())

    def is_ending(self, secret: str, principal: str | None = None) -> bool:
        """Return whether a secret identifies a session that is ending, and slices of its end are left."""
        session = self._by_key.get(session_key(secret, principal))
        return session is not None and session.ending is not None

    def attach(self, secret: str, timeout_ms: float, principal: str | None = None) -> tuple[Session, bool]:
        """Return `(session, resumed)`: the existing session that a secret identifies, or a new one, which is not resumed.

        The session does not expire while it has a connection. `timeout_ms` applies after the connection is lost.
        """
        key = session_key(secret, principal)
        session = self._by_key.get(key)
        resumed = session is not None
        if session is None:
            session = self._add(Session(connection=None, key=key, principal=principal))
        self._cancel_expiry(session)
        session.timeout_ms = timeout_ms
        return session, resumed

    def detach(self, session: Session, now: float) -> None:
        """Let a session expire after its timeout, because its connection is lost.

        If it has no bound requests and no retained replies, there is nothing to resume, and it is removed immediately.
        """
        session.on_disconnect(now)
        if not session.bound and not session.retained_replies:
            del self._by_key[session.key or ""]  # every session in the table has a key
            return
        session.expires_at = ceil(now + session.timeout_ms)
        self._detached[session.number] = session
        add(self.shares, session.principal, SESSION_BYTES)
        self.deadlines.add(session.expires_at, session.number)

    def restore(self, requests: Iterable[Request], replies: Iterable[RetainedReply]) -> None:
        """Recreate the sessions of loaded requests and replies. The replies must be in order of time.

        The caller must detach the sessions. A request whose session ended with its connection gets no session.
        """
        for request in requests:
            origin = request.origin
            if origin is not None and origin.key is not None:  # the stored description of a session
                request.origin = session = self._restored(origin, origin.key, request.context.principal)
                session.add_queued(request)
                session.live_requests += 1
            else:
                request.origin = None  # the connection of the request ended with the previous leader
        for reply in replies:
            reply.origin = session = self._restored(reply.origin, reply.origin.key or "", reply.origin.principal)
            session.retain(reply)
            self._replies[session.principal][reply.id] = session
            self._reply_count += 1

    def _restored(self, origin: Origin, key: str, principal: str | None) -> Session:
        """Return the restored session of a loaded request or reply, or a new one."""
        found = self._by_key.get(key)
        return found or self._add(Session(None, key, origin.timeout_ms, origin.note, principal))  # not connected yet

    def retain(self, session: Session, reply: RetainedReply) -> list[int]:
        """Retain a terminal reply in a session, and drop the oldest replies beyond the limits.

        The session, its principal, and all sessions together have a limit each. Returns the ids of the dropped replies,
        that is, of their requests.
        """
        session.retain(reply)
        principal = session.principal
        replies = self._replies[principal]
        replies[reply.id] = session
        self._reply_count += 1
        dropped: list[int] = []
        if session.retained_replies is not None and len(session.retained_replies) > MAX_RETAINED_REPLIES:
            dropped += self._drop_oldest_reply(session)
        if principal is not None and len(replies) > self._max_replies_of_a_principal:
            dropped += self._drop_oldest_reply(next(iter(replies.values())))
        if self._reply_count > MAX_RETAINED_REPLIES_TOTAL:
            dropped += self._drop_replies_of_most()
        return dropped

    def _drop_replies_of_most(self) -> list[int]:
        """Drop the oldest replies, each of the principal that then has the most, until `FREED_SHARE` of the total is free.

        Not one reply each time, because 20,000 principals may retain replies, and the search takes 0.3 ms for them. Returns the
        ids of the requests of the dropped replies.
        """
        by_count = [(-len(replies), number, name) for number, (name, replies) in enumerate(self._replies.items())]
        heapify(by_count)  # the principal with the most is first, of several the one with the first number
        dropped: list[int] = []
        while self._reply_count > MAX_RETAINED_REPLIES_TOTAL - int(MAX_RETAINED_REPLIES_TOTAL * FREED_SHARE):
            negated_count, number, name = by_count[0]
            dropped += self._drop_oldest_reply(next(iter(self._replies[name].values())))
            heapreplace(by_count, (negated_count + 1, number, name))
        return dropped

    def drop_oldest_replies(self, session: Session, limit: int) -> list[int]:
        """Drop the oldest retained replies of a session, at most `limit`. Return the ids of their requests."""
        dropped: list[int] = []
        while session.retained_replies and len(dropped) < limit:
            dropped += self._drop_oldest_reply(session)
        return dropped

    def remove(self, session: Session) -> None:
        """Remove an ended session, which retains no reply."""
        self._cancel_expiry(session)
        self._by_key.pop(session.key or "", None)
        session.end()

    def expired(self, now: float, limit: int) -> list[Session]:
        """Return detached sessions whose timeout has passed, at most `limit`."""
        return [self._detached[number] for number in self.deadlines.expired(now, limit)]

    def dispose_in_parts(self) -> Iterator[None]:
        """Drop all sessions in parts, and break their reference cycles. Yield between the parts."""
        yield from self.deadlines.free_in_parts()
        yield from clear_in_parts(self._detached)
        for replies in self._replies.values():
            yield from clear_in_parts(replies)
        size = 0
        while self._by_key:
            _, session = self._by_key.popitem()
            size += 1 + len(session.bound) + len(session.retained_replies or ())
            session.dispose()
            if size >= MAX_FREED_ITEMS:
                yield
                size = 0

    def _drop_oldest_reply(self, session: Session) -> list[int]:
        """Drop the oldest retained reply of a session, if there is one. Return a list with the id of its request."""
        reply = session.drop_oldest_reply()
        if reply is None:
            return []
        replies = self._replies[session.principal]
        del replies[reply.id]
        self._reply_count -= 1
        if not replies:
            del self._replies[session.principal]
        return [reply.id]

    def _add(self, session: Session) -> Session:
        """Add a session with a new number, and return it."""
        self._last_number += 1
        session.number = self._last_number
        self._by_key[session.key or ""] = session
        return session

    def _cancel_expiry(self, session: Session) -> None:
        if self._detached.pop(session.number, None) is not None:
            subtract(self.shares, session.principal, SESSION_BYTES)
            self.deadlines.discard(session.expires_at, session.number)
