"""Watches: a connection that watches a prefix is sent an event for every lock that is granted or released on a matching name.

A name matches a prefix if it begins with it. A subtree also matches each prefix below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from genie.core.lock_table import LockTable
from genie.core.tables import CHECKED_SIZES, clear_in_parts, compact
from genie.core.wait_queue import LockedResource
from genie.lock_modes import X
from genie.protocol import replies
from genie.server.sessions import Outbound
from genie.server.state_size import StateSize

MAX_WATCHES = 100
"""Maximum number of prefixes that one connection can watch."""

MAX_WATCHING_ROWS = 10_000
"""Maximum number of locks listed in one `watching` message."""

MAX_WATCHING_BYTES = 1 << 20
"""Maximum bytes of the locks listed in one `watching` message."""

MAX_WATCH_SEARCHED_NAMES = 200_000
"""Maximum number of locked names that are compared with the prefix for one `watching` message, which takes about 10 ms."""

MAX_BUFFERED_EVENTS = 10_000
"""Maximum number of messages buffered for one watcher. Beyond it, the watcher is sent `lagged`, and its watches end.
Events that are sent together count as one message. Their bytes are limited, too."""


class WatchRegistry:
    """The watches of all connections, by prefix. A watch ends with its connection.

    Finding the watchers of a name takes one lookup for each distinct prefix length. A watcher with more than
    `max_unread_bytes` of unread or buffered events is lagging.
    """

    def __init__(self, table: LockTable, size: StateSize, max_unread_bytes: int) -> None:
        self._table = table
        self._size = size
        self._max_unread_bytes = max_unread_bytes
        self.prefixes: dict[str, dict[Outbound, None]] = {}
        """Watchers by prefix. Each inner dict is an ordered set. If a connection watches two prefixes, and one begins
        with the other, the connection is only in the set of the shorter prefix. So it is found at most once for a name.
        The dispatcher keeps a reference to this dict."""
        self.prefix_count_by_length: dict[int, int] = {}
        """The number of prefixes in `prefixes` by their length."""
        self._prefixes_of: dict[Outbound, set[str]] = {}
        """All watched prefixes by connection."""
        self.first_numbers: dict[Outbound, int] = {}
        """The number of the first events that may be sent to each connection that changed its watches while events waited. The
        earlier ones precede its watches, or do not match them. Empty if no events wait."""

    def add(self, connection: Outbound, prefix: str) -> str:
        """Add a watch and return "", or return why it was not added: there are too many, or no memory for it."""
        watched = self.prefixes_of(connection)
        if prefix in watched:
            return ""
        if len(watched) >= MAX_WATCHES:
            return f"too many prefixes: this connection already watches {MAX_WATCHES}"
        if reason := self._size.charge_watch(connection, prefix):
            return reason
        is_covered = any(map(prefix.startswith, watched))  # by a shorter prefix
        if not is_covered:
            for longer in watched:
                if longer.startswith(prefix):
                    self._remove(connection, longer)
            self._add(connection, prefix)
        self._prefixes_of.setdefault(connection, set()).add(prefix)
        return ""

    def remove(self, connection: Outbound, prefix: str) -> None:
        """End a watch, if there is one."""
        watched = self._prefixes_of.get(connection)
        if watched is None or prefix not in watched:
            return
        watched.discard(prefix)
        self._size.credit_watch(connection, prefix)
        if self._remove(connection, prefix):  # it has covered the longer prefixes, which need entries of their own now
            last_added: str | None = None
            # In sorted order, a prefix precedes all longer prefixes that it covers.
            for longer in sorted(other for other in watched if other.startswith(prefix)):
                if last_added is None or not longer.startswith(last_added):
                    self._add(connection, longer)
                    last_added = longer
        if not watched:
            del self._prefixes_of[connection]

    def remove_all(self, connection: Outbound) -> None:
        """End all watches of a connection."""
        self.first_numbers.pop(connection, None)
        for prefix in self._prefixes_of.pop(connection, ()):
            self._size.credit_watch(connection, prefix)
            self._remove(connection, prefix)

    def connections(self) -> list[Outbound]:
        """Return all connections that watch."""
        return [*self._prefixes_of]

    def prefixes_of(self, connection: Outbound) -> set[str]:
        """Return the prefixes that a connection watches."""
        return self._prefixes_of.get(connection, set())

    def matching_prefixes(self, name: str) -> tuple[str, ...]:
        """Return all watched prefixes with which `name` begins."""
        watched, name_length = self.prefixes, len(name)
        return tuple(
            [
                name[:length]
                for length in self.prefix_count_by_length
                if length <= name_length and name[:length] in watched
            ]
        )

    def is_lagging(self, connection: Outbound) -> bool:
        """Return whether a watcher has too many unread or buffered events to be sent another one."""
        buffered_messages = len(connection.outbox) + len(connection.deferred)
        return (
            buffered_messages >= MAX_BUFFERED_EVENTS
            or connection.watch_bytes + connection.unread_bytes > self._max_unread_bytes
        )

    def encode_held_locks(self, prefix: str) -> tuple[list[bytes], bool]:
        """Return the held locks on names with a prefix, as encoded rows of `watching`, and whether rows may be missing.

        Rows are missing beyond `MAX_WATCHING_ROWS` or `MAX_WATCHING_BYTES`. They may be missing if more than
        `MAX_WATCH_SEARCHED_NAMES` names are locked.
        """
        rows: list[bytes] = []
        remaining_bytes = MAX_WATCHING_BYTES
        for row in self._held_rows(prefix):
            remaining_bytes -= len(row)
            if remaining_bytes < 0 or len(rows) >= MAX_WATCHING_ROWS:
                return rows, True
            rows.append(row)
        locked_names = len(self._table.uncontended) + len(self._table.resources)
        return rows, locked_names > MAX_WATCH_SEARCHED_NAMES

    def dispose_in_parts(self) -> Iterator[None]:
        """Drop all references to connections, in parts: yield between the parts."""
        yield from clear_in_parts(self.prefixes)
        yield from clear_in_parts(self._prefixes_of)
        self.first_numbers.clear()

    def _held_rows(self, prefix: str) -> Iterator[bytes]:
        """Yield an encoded row for each held lock on a name with this prefix, or on a subtree that contains such names.

        There is no index of names by prefix, so at most `MAX_WATCH_SEARCHED_NAMES` locked names are compared.
        """
        table = self._table
        if table.subtrees:
            for name, resource in table.subtrees_above(prefix):
                if not name.startswith(prefix):  # the loops below find the others
                    yield from _rows_of(name, resource)
        for name in islice(table.uncontended, MAX_WATCH_SEARCHED_NAMES):
            if name.startswith(prefix):
                yield replies.watching_row(table.uncontended[name], name, X)
        remaining = max(0, MAX_WATCH_SEARCHED_NAMES - len(table.uncontended))
        for name, resource in islice(table.resources.items(), remaining):
            if name.startswith(prefix):
                yield from _rows_of(name, resource)

    def _add(self, connection: Outbound, prefix: str) -> None:
        """Add a connection to the watchers of a prefix."""
        watchers = self.prefixes.get(prefix)
        if watchers is None:
            watchers = self.prefixes[prefix] = {}
            self._count_prefix(len(prefix), change=1)
        watchers[connection] = None

    def _remove(self, connection: Outbound, prefix: str) -> bool:
        """Remove a connection from the watchers of a prefix, and the prefix after its last watcher.

        Return False if the connection was not among the watchers.
        """
        watchers = self.prefixes.get(prefix, {})
        if connection not in watchers:
            return False
        del watchers[connection]
        if not watchers:
            del self.prefixes[prefix]
            self._count_prefix(len(prefix), change=-1)
        elif len(watchers) in CHECKED_SIZES:
            compact(watchers)
        return True

    def _count_prefix(self, length: int, change: int) -> None:
        """Add `change` to the number of prefixes of a length."""
        count = self.prefix_count_by_length.get(length, 0) + change
        if count:
            self.prefix_count_by_length[length] = count
        else:
            del self.prefix_count_by_length[length]


def _rows_of(name: str, resource: LockedResource) -> Iterator[bytes]:
    """Yield an encoded row for each holder of a resource, at most one row more than a message may contain."""
    for holder in islice(resource.holders.values(), MAX_WATCHING_ROWS + 1):
        yield replies.watching_row(holder, name, resource.holder_mode(name, holder))
