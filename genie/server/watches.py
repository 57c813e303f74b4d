"""Watches: which connections are sent an event for every lock that is granted or released on a name with a prefix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from genie.core.lock_table import LockTable
from genie.protocol import replies
from genie.server.sessions import Outbound

MAX_WATCHES = 100
"""Prefixes that one connection can watch."""

MAX_WATCHING_ROWS = 10_000
"""Locks listed in one `watching`."""

MAX_WATCHING_BYTES = 1 << 20
"""Bytes of them."""

MAX_BUFFERED_EVENTS = 10_000
"""Messages that may be buffered for one watcher. Beyond it the watcher is lagged: its watches end."""


class WatchRegistry:
    """Watchers by prefix. Finding those of a name costs one lookup for each length of a watched prefix.

    A watch ends with its connection. `max_unread_bytes` bounds what a watcher may leave unread, buffered events included.
    """

    def __init__(self, table: LockTable, max_unread_bytes: int) -> None:
        self._table = table
        self._max_unread_bytes = max_unread_bytes
        self.prefixes: dict[str, dict[Outbound, None]] = {}
        """Empty without watchers, and always the same object."""
        self._lengths: tuple[int, ...] = ()
        self._of: dict[Outbound, set[str]] = {}

    def add(self, connection: Outbound, prefix: str) -> bool:
        """Watch a prefix. Return False, and change nothing, where the connection watches `MAX_WATCHES` already."""
        own = self._of.setdefault(connection, set())
        if prefix not in own and len(own) >= MAX_WATCHES:
            return False
        own.add(prefix)
        self.prefixes.setdefault(prefix, {})[connection] = None
        self._update_lengths()
        return True

    def remove(self, connection: Outbound, prefix: str) -> None:
        """End a watch, if there is one."""
        own = self._of.get(connection)
        if own is not None and prefix in own:
            own.discard(prefix)
            self._remove(connection, prefix)
            if not own:
                del self._of[connection]

    def remove_all(self, connection: Outbound) -> None:
        """End all watches of a connection."""
        for prefix in self._of.pop(connection, ()):
            self._remove(connection, prefix)

    def of(self, connection: Outbound) -> set[str]:
        """Return the prefixes that a connection watches."""
        return self._of.get(connection, set())

    def matches(self, name: str) -> Iterable[Outbound]:
        """Return each connection that watches a name, once."""
        found: dict[Outbound, None] = {}
        for length in self._lengths:
            watchers = self.prefixes.get(name[:length]) if length <= len(name) else None
            if watchers:
                found |= watchers
        return found

    def is_lagging(self, connection: Outbound) -> bool:
        """Return whether a watcher reads too slowly to be sent another event."""
        too_many = len(connection.outbox) + len(connection.deferred) >= MAX_BUFFERED_EVENTS
        return too_many or connection.watch_bytes + connection.unread_bytes > self._max_unread_bytes

    def held(self, prefix: str) -> tuple[list[bytes], bool]:
        """Return the rows of a `watching` message, the locks that are held now, and whether there were too many."""
        rows: list[bytes] = []
        room = MAX_WATCHING_BYTES
        for row in self._held(prefix):
            room -= len(row)
            if room < 0 or len(rows) >= MAX_WATCHING_ROWS:
                return rows, True
            rows.append(row)
        return rows, False

    def dispose(self) -> None:
        """Drop all references to connections."""
        self.prefixes.clear()
        self._of.clear()

    def _held(self, prefix: str) -> Iterator[bytes]:
        table = self._table
        for name in islice((name for name in table.uncontended if name.startswith(prefix)), MAX_WATCHING_ROWS + 1):
            yield replies.watching_row(table.uncontended[name], name, exclusive=True)
        for name, resource in table.resources.items():
            if not name.startswith(prefix):
                continue
            same_mode = resource.exclusives in (0, len(resource.holders))  # otherwise one owner holds it in both modes
            for holder in islice(resource.holders.values(), MAX_WATCHING_ROWS + 1):
                exclusive = resource.exclusives > 0 if same_mode else holder.is_exclusive(name)
                yield replies.watching_row(holder, name, exclusive)

    def _remove(self, connection: Outbound, prefix: str) -> None:
        watchers = self.prefixes[prefix]
        del watchers[connection]
        if not watchers:
            del self.prefixes[prefix]
            self._update_lengths()

    def _update_lengths(self) -> None:
        self._lengths = tuple({len(prefix) for prefix in self.prefixes})
