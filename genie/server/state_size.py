"""The memory of the state that clients cause (requests, sessions and watches), in total and by principal.

The total is computed from the sizes of the tables, which cost nothing to read. Only the long texts of large requests,
and watches, are added to it one by one. The amount of a named principal is the sum of the charges for each of its
requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from genie.config import Limits
from genie.core import WAITING, Blocker, LockManager, Request
from genie.core.size import (
    FIRST_BLOCKERS_BYTES,
    NAME_BYTES,
    REQUEST_BYTES,
    RESOURCE_BYTES,
    SHORT_NAMES,
    TRANSACTION_BYTES,
    charged_names,
    excess_bytes,
    text_bytes,
)
from genie.core.tables import clear_in_parts
from genie.server.sessions import SESSION_BYTES, Outbound, SessionTable
from genie.server.shares import Shares, add, subtract

WATCH_BYTES: Final = 768
"""Bytes of a watch, without the text of its prefix."""

MAX_REQUEST_BYTES: Final = (
    REQUEST_BYTES
    + SHORT_NAMES * (NAME_BYTES + RESOURCE_BYTES)
    + TRANSACTION_BYTES
    + FIRST_BLOCKERS_BYTES
    + SESSION_BYTES
)
"""Maximum bytes by which a request that is not large increases the state."""


FirstBlockers = tuple[tuple[Blocker, ...], int]
"""The first blockers of a request when it began to wait, and their number."""


class Charge(NamedTuple):
    """The bytes of a large request or a watch: `excess` is added to the total, and `share` to the amount of its principal."""

    principal: str | None
    excess: int
    share: int


class StateSize:
    """Computes the size of the state in bytes, which is an upper bound of its memory."""

    def __init__(self, manager: LockManager, sessions: SessionTable, limits: Limits) -> None:
        self._table = manager.table
        self._sessions = sessions
        self.max_bytes = limits.max_state
        self.max_share = limits.max_state_per_principal or limits.max_state // 2
        """Maximum bytes of one named principal. Clients without a token are bounded only by `max_bytes`."""
        self.min_name_share = min(self.max_share, -(-limits.max_state // limits.max_locks))  # rounded up
        """Minimum bytes that a principal is charged for a name. It limits the principal's part of `max_locks` to its
        part of `max_state`."""
        self._short_shares = [self._share(count, excess=0) for count in range(SHORT_NAMES + 1)]
        """The share of a request with short texts, by the number of its names."""
        self.max_queue_entries = limits.max_queue
        """Maximum wait-queue entries of all principals together."""
        self.max_queue_share = max(1, int(limits.max_queue * limits.principal_share))
        """Maximum wait-queue entries of one named principal."""
        self.queue_entries: Shares = {}
        """The wait-queue entries of each principal, without the entries that later requests for subtrees have added."""
        self._counted_below_subtrees: dict[int, int] = {}
        """The number of wait-queue entries of each request that began to wait below a subtree, by id."""
        self.requests: dict[int, Charge] = {}
        """The charges of large requests, by id. The dispatcher and the notifier keep references to this dict and the next
        one."""
        self.short_requests: dict[int, int] = {}
        """The shares of the other requests of named principals, by id."""
        self.first_blockers: dict[int, FirstBlockers] = {}
        """The first blockers of waiting requests with `traceparent`, by id. The notifier adds and removes them."""
        self.watches: dict[tuple[Outbound, str], Charge] = {}
        """The charges of watches, by connection and prefix."""
        self.excess = 0
        """The sum of the `excess` of all charges: bytes that the fixed sizes in `bytes` do not include."""
        self.shares = sessions.shares
        """The charged bytes of each principal, including its sessions without a connection."""

    @property
    def bytes(self) -> int:
        """Bytes that the current requests, sessions and watches take at most."""
        table, sessions = self._table, self._sessions
        return (
            REQUEST_BYTES * (len(table.held) + len(table.waiting))
            + NAME_BYTES * (table.locks + table.queue_entries + table.detailed)
            + RESOURCE_BYTES * len(table.resources)
            + TRANSACTION_BYTES * len(table.transactions)
            + FIRST_BLOCKERS_BYTES * len(self.first_blockers)
            + SESSION_BYTES * sessions.disconnected
            + self.excess
        )

    def reason_against(self, principal: str | None, size: int, share: int) -> str:
        """Return why the state cannot grow by `size` bytes, of which a principal is charged for `share`, or "" if it can."""
        if self.bytes + size > self.max_bytes:
            return f"too much memory: all requests, sessions and watches may take at most {self.max_bytes} bytes"
        if principal is not None and self.shares.get(principal, 0) + share > self.max_share:
            return (
                "too much memory: the requests, sessions and watches of a principal may take at most "
                f"{self.max_share} bytes, and each name counts as at least {self.min_name_share}"
            )
        return ""

    def reason_against_request(self, request: Request, name_count: int, excess: int) -> str:
        """Return why a new request for `name_count` names is rejected, or "" if it is not."""
        size = REQUEST_BYTES + name_count * (NAME_BYTES + RESOURCE_BYTES) + TRANSACTION_BYTES + excess
        if request.context.traceparent is not None:
            size += FIRST_BLOCKERS_BYTES
        return self.reason_against(request.context.principal, size, self._share(name_count, excess))

    def spare_requests(self) -> int:
        """Return how many further requests certainly fit into the total if none of them is large."""
        return max(0, self.max_bytes - self.bytes) // MAX_REQUEST_BYTES

    def charge_request(self, id: int, request: Request, name_count: int, excess: int) -> None:
        """Charge the principal of a new request, which will get this id, for its memory.

        Without a principal, only a large request is charged: to the sum of all.
        """
        if excess > 0 or name_count > SHORT_NAMES:
            self.requests[id] = self._add(request.context.principal, excess, self._share(name_count, excess))
        elif request.context.principal is not None:
            share = self._share(name_count, excess=0)
            self.short_requests[id] = self._add(request.context.principal, excess=0, share=share).share

    def charge_short(self, id: int, principal: str | None, name_count: int) -> bool:
        """Charge a named principal for a new request with short texts. The fast path of `charge_request`.

        Return False, without a charge, if the client has no named principal, the request has many names, or the share
        of the principal is used up.
        """
        if principal is None or name_count > SHORT_NAMES:
            return False
        share = self._short_shares[name_count]
        shares = self.shares
        used = shares.get(principal, 0) + share
        if used > self.max_share:
            return False
        shares[principal] = used
        self.short_requests[id] = share
        return True

    def charge_again(self, request: Request, excess: int) -> None:
        """Charge a live request whose texts or names have changed, or that was loaded. `excess` are its `excess_bytes`."""
        self.credit_request(request.id, request.context.principal)
        self.charge_request(request.id, request, charged_names(request), excess)

    def credit_request(self, id: int, principal: str | None) -> None:
        """Remove the charge of a request that has ended, if it has one."""
        share = self.short_requests.pop(id, 0)
        if share and principal is not None:
            subtract(self.shares, principal, share)
        elif id in self.requests:
            charge = self.requests.pop(id)
            self.excess -= charge.excess
            subtract(self.shares, charge.principal, charge.share)

    def load(self, requests: Iterable[Request]) -> None:
        """Charge loaded requests. They are kept even if they exceed a bound."""
        for request in requests:
            self.charge_again(request, excess_bytes(request))
            if request.state is WAITING:
                self.begin_wait(request)

    def begin_wait(self, request: Request) -> None:
        """Count the wait-queue entries of a request that begins to wait, in the queues of its names and of subtrees above them."""
        count = request.name_count()
        if request.details is not None and request.details.queue_modes is not None:
            count = self._counted_below_subtrees[request.id] = len(request.details.queue_modes)
        add(self.queue_entries, request.context.principal, count)

    def end_wait(self, request: Request) -> None:
        """Subtract the wait-queue entries of a request that is granted or has ended."""
        count = self._counted_below_subtrees.pop(request.id, 0) or request.name_count()
        subtract(self.queue_entries, request.context.principal, count)

    def queue_limit(self, principal: str) -> int:
        """Return up to how many entries all wait queues may have together after a request of this principal is queued.

        The lock manager knows only the total. So the limit is the current total plus the entries that the principal may
        still add.
        """
        free_share = self.max_queue_share - self.queue_entries.get(principal, 0)
        return min(self.max_queue_entries, self._table.queue_entries + free_share)

    def is_large(self, id: int) -> bool:
        """Return whether a live request has many names, or texts that are not short."""
        return id in self.requests

    def charge_watch(self, connection: Outbound, prefix: str) -> str:
        """Charge the client of a connection for the memory of a new watch, and return "".

        If the watch exceeds a limit, return why. A watch that exists is not charged again.
        """
        if (connection, prefix) in self.watches:
            return ""
        size = WATCH_BYTES + text_bytes(prefix)
        principal = None if connection.principal is None else connection.principal.name
        reason = self.reason_against(principal, size, size)
        if not reason:
            self.watches[connection, prefix] = self._add(principal, size, size)
        return reason

    def credit_watch(self, connection: Outbound, prefix: str) -> None:
        """Remove the charge of a watch that has ended."""
        charge = self.watches.pop((connection, prefix))
        self.excess -= charge.excess
        subtract(self.shares, charge.principal, charge.share)

    def dispose_in_parts(self) -> Iterator[None]:
        """Drop all charges, and so all references to connections, in parts: yield between the parts."""
        yield from clear_in_parts(self.watches)
        yield from clear_in_parts(self.first_blockers)
        yield from clear_in_parts(self.requests)
        yield from clear_in_parts(self.short_requests)
        yield from clear_in_parts(self._counted_below_subtrees)

    def _add(self, principal: str | None, excess: int, share: int) -> Charge:
        """Add a charge to the sums and return it."""
        self.excess += excess
        add(self.shares, principal, share)
        return Charge(principal, excess, share)

    def _share(self, name_count: int, excess: int) -> int:
        """Return the bytes that a principal is charged for a request with `name_count` names and `excess` bytes of long texts."""
        return max(REQUEST_BYTES + name_count * NAME_BYTES + excess, name_count * self.min_name_share)
