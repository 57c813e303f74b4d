"""The limits of a new request: held locks, requests of a session or a connection, memory, and a store that is full."""

from __future__ import annotations

from genie.config import Limits
from genie.core import LockManager, Request
from genie.protocol.resources import MAX_RESOURCES
from genie.server.sessions import Session
from genie.server.state_size import StateSize


class RequestLimits:
    """Checks and charges new requests. A check computes how many further requests certainly have room. They need no check."""

    def __init__(self, manager: LockManager, size: StateSize, limits: Limits) -> None:
        self._manager = manager
        self._table = manager.table
        self._size = size
        self._max_locks = limits.max_locks
        self._max_per_session = limits.max_requests_per_session
        self._max_per_connection = limits.max_requests_per_connection
        self.unchecked_requests = min(self._max_per_session, self._max_per_connection)
        """Number of live requests of a session below which its next request cannot exceed the limits of the session."""
        self.unchecked_below_id = 0
        """A request with a smaller id that is not large, and has no named principal, cannot exceed `max_locks` or `max_state`,
        and the store is not full. The dispatcher sets it to 0 before a request that must be charged."""
        self._short_below_id = 0
        """Like `unchecked_below_id`, for requests of named principals, which must be charged but not checked."""
        self.store_full = False
        """True if the store is out of memory, so that new requests are rejected."""

    def check_next(self) -> None:
        """Require a check of the next request, because there may be less room."""
        self.unchecked_below_id = self._short_below_id = 0

    def set_store_full(self, full: bool) -> None:
        """Reject new requests while the store is out of memory."""
        self.store_full = full
        self.check_next()

    def charge(self, session: Session, request: Request, lock_count: int, excess: int) -> str:  # noqa: PLR0911 - one for each limit
        """Charge a request for `lock_count` locks and return "", or return why the request is rejected.

        `excess` is the `excess_bytes` of a large request, else 0.
        """
        size, id_ = self._size, self._manager.next_id
        if (
            id_ < self._short_below_id
            and session.live_requests < self.unchecked_requests
            and not excess
            and size.charge_short(id_, request.context.principal, lock_count)
        ):
            return ""
        locks = self._table.locks + lock_count
        if self.store_full:
            return "the store is out of memory: locks can be released, but no requests are accepted"
        if locks > self._max_locks:
            return f"too many locks: at most {self._max_locks} can be held"
        if session.key is not None and session.live_requests >= self._max_per_session:
            return f"too many requests: this session already has {self._max_per_session} held or waiting"
        if session.key is None and session.live_requests >= self._max_per_connection:
            return f"too many requests: this connection already has {self._max_per_connection} held or waiting"
        if reason := size.reason_against_request(request, lock_count, excess):
            return reason
        size.charge_request(id_, request, lock_count, excess)
        # Each later request gets an id and at most `MAX_RESOURCES` locks; each queue entry may become a lock.
        spare = (self._max_locks - locks - self._table.queue_entries) // MAX_RESOURCES
        # This request is not in the table yet, so it is one of the requests for which there is room.
        self.unchecked_below_id = self._short_below_id = id_ + 1 + min(spare, size.spare_requests() - 1)
        return ""
