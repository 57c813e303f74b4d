"""The limits of a new request: held locks, requests of a session or a connection, memory, and a store that is full."""

from __future__ import annotations

from genie.config import Limits
from genie.core import LockManager, Request
from genie.protocol.resources import MAX_RESOURCES
from genie.server.sessions import Session
from genie.server.state_size import StateSize


class RequestLimits:
    """Checks new requests against the limits, and charges them.

    A check computes how many further requests certainly fit into the limits. These requests need no check.
    """

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
        """A request with a smaller id needs no check of `max_locks`, `max_state` and `store_full`, if it is not large
        and has no named principal. The dispatcher sets the field to 0 before a request that must be charged."""
        self._short_below_id = 0
        """Like `unchecked_below_id`, for requests of named principals. They need no check either, but they are
        charged."""
        self.store_full = False
        """True if the store is out of memory, so that new requests are rejected."""

    def check_next(self) -> None:
        """Check the next request, because a limit may be nearer than computed."""
        self.unchecked_below_id = self._short_below_id = 0

    def set_store_full(self, full: bool) -> None:
        """Begin or end to reject all new requests: they are rejected while the store is out of memory."""
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
        # Each later request gets the next id and at most `MAX_RESOURCES` locks. Each queue entry may become a lock.
        fitting_by_locks = (self._max_locks - locks - self._table.queue_entries) // MAX_RESOURCES
        fitting_by_bytes = size.spare_requests() - 1  # this request is not in the table yet, so it is one of them
        self.unchecked_below_id = self._short_below_id = id_ + 1 + min(fitting_by_locks, fitting_by_bytes)
        return ""
