"""Who watches which names, and is told of every lock that is taken or given back on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from genie.core import Request
from genie.core.lock_table import LockTable
from genie.errors import Code, RequestRejected
from genie.protocol import replies
from genie.server.connection import Connection

MAX_WATCHES = 100
"""Prefixes that one connection can watch."""

MAX_WATCHING_ROWS = 10_000
"""Locks told in one `watching`."""

MAX_WATCHING_BYTES = 1 << 20
"""Bytes of them."""

MAX_BUFFERED_EVENTS = 10_000
"""Messages that may wait to be written to one watcher."""

Say = Callable[[Connection | None, bytes], None]
Reject = Callable[[Connection, RequestRejected], None]
Show = Callable[[Connection, bytes], None]


class WatchRegistry:
    """By prefix, and by its length: to find who watches a name costs one look for each length that is watched.

    A watch ends with its connection. One that can't keep up is told so, and its watches are over.
    """

    def __init__(self, table: LockTable, say: Say, reject: Reject, show: Show, max_behind: int) -> None:
        self._table = table
        self._say = say
        self._reject = reject
        self._show = show
        self._max_behind = max_behind
        """Bytes that a watcher may leave unread, with those that wait to be written to it."""
        self.prefixes: dict[str, dict[Connection, None]] = {}
        """Empty while nobody watches, and always the same object."""
        self._lengths: tuple[int, ...] = ()
        self._of: dict[Connection, set[str]] = {}

    def watch(self, connection: Connection, prefix: str, ref: str | None) -> None:
        """Tell what is held now, and from now on what changes."""
        own = self._of.setdefault(connection, set())
        if prefix not in own and len(own) >= MAX_WATCHES:
            why = f"watch: a connection can watch {MAX_WATCHES} prefixes, and this one does"
            self._reject(connection, RequestRejected(Code.TOO_MANY, why, ref=ref))
            return
        own.add(prefix)
        self.prefixes.setdefault(prefix, {})[connection] = None
        self._measure()
        rows: list[bytes] = []
        room, truncated = MAX_WATCHING_BYTES, False
        for row in self._held(prefix):
            room -= len(row)
            if room < 0 or len(rows) >= MAX_WATCHING_ROWS:
                truncated = True
                break
            rows.append(row)
        self._say(connection, replies.watching(prefix, rows, truncated, ref))

    def unwatch(self, connection: Connection, prefix: str, ref: str | None) -> None:
        """No longer; nothing happens where it was not watched."""
        own = self._of.get(connection)
        if own is not None and prefix in own:
            own.discard(prefix)
            self._forget(connection, prefix)
            if not own:
                del self._of[connection]
        self._say(connection, replies.unwatched(prefix, ref))

    def of(self, connection: Connection) -> set[str]:
        """What a connection watches."""
        return self._of.get(connection, set())

    def leave(self, connection: Connection) -> None:
        """A connection is gone."""
        for prefix in self._of.pop(connection, ()):
            self._forget(connection, prefix)

    def forget(self) -> None:
        """Nobody is told anything any more."""
        self.prefixes.clear()
        self._of.clear()
        del self._say, self._reject, self._show

    def tell(self, request: Request, state: str) -> None:
        """All that a request names was taken (`locked`) or given back (`unlocked`)."""
        for name, exclusive in request.modes():
            line = b""
            for connection in self._audience(name):
                line = line or replies.event(request, name, exclusive, state)
                if self._lags(connection):
                    self.leave(connection)
                    self._say(connection, replies.LAGGED)
                else:
                    self._show(connection, line)

    def _lags(self, connection: Connection) -> bool:
        many = len(connection.outbox) + len(connection.deferred) >= MAX_BUFFERED_EVENTS
        return many or connection.watch_bytes + connection.unread > self._max_behind

    def _audience(self, name: str) -> Iterable[Connection]:
        """Each that watches a name, once."""
        found: dict[Connection, None] = {}
        for length in self._lengths:
            watchers = self.prefixes.get(name[:length]) if length <= len(name) else None
            if watchers:
                found |= watchers
        return found

    def _held(self, prefix: str) -> Iterator[bytes]:
        table = self._table
        for name in islice((name for name in table.uncontended if name.startswith(prefix)), MAX_WATCHING_ROWS + 1):
            yield replies.watching_row(table.uncontended[name], name, exclusive=True)
        for name, resource in table.resources.items():
            if not name.startswith(prefix):
                continue
            alike = resource.exclusives in (0, len(resource.holders))  # else they are one owner's, and may differ
            for holder in islice(resource.holders.values(), MAX_WATCHING_ROWS + 1):
                exclusive = resource.exclusives > 0 if alike else holder.is_exclusive(name)
                yield replies.watching_row(holder, name, exclusive)

    def _forget(self, connection: Connection, prefix: str) -> None:
        watchers = self.prefixes[prefix]
        del watchers[connection]
        if not watchers:
            del self.prefixes[prefix]
            self._measure()

    def _measure(self) -> None:
        self._lengths = tuple({len(prefix) for prefix in self.prefixes})
