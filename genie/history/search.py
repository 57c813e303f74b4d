"""Finds requests in the history: by resource, transaction, client and time.

    python -m genie.history.search DIRECTORY QUERY

prints the `Result` for a `Query`, both as JSON. The admin port searches in this way, in a process of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from msgspec import Struct, json

from genie.core import Reason
from genie.history.records import Carried, Gap, Granted, Line, Locked, Queued, Released
from genie.history.segments import Segment, key_of, list_segments

MAX_REQUESTS: Final = 10_000
"""Number of requests that a search returns at most."""
ATTEMPTS: Final = 5
"""How often a search begins again because a file was archived or deleted while it was read."""


class Query(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What to find: requests that match all given filters. Times are Unix ms.

    A request is in the window if it waited or held at any time from `since` to `until`. If more than `limit` requests match,
    the latest are returned.
    """

    resource: str | None = None
    transaction: str | None = None
    client: str | None = None
    since: float | None = None
    until: float | None = None
    limit: int = 100


class Waiter(Struct, omit_defaults=True):
    """A request for which another request waited: a holder, or an earlier waiter."""

    id: int
    transaction: str | None = None
    client: str | None = None


class Entry(Struct, omit_defaults=True):
    """One request from its arrival to its end. All times are Unix ms; None: not yet, or never.

    `granted_at` without `asked_at`: the request was granted before the history begins. `fence` 0: it was never granted.
    """

    id: int
    asked_at: float | None = None
    granted_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    fence: int = 0
    exclusive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    transaction: str | None = None
    client: str | None = None
    note: str | None = None
    priority: float = 0
    waited_for: tuple[Waiter, ...] = ()
    cycle: tuple[str | int, ...] = ()
    """The owners of the deadlock that ended the request."""

    @property
    def begins_at(self) -> float:
        """The earliest known time of the request."""
        return self.asked_at if self.asked_at is not None else self.granted_at or 0.0


class Result(Struct, omit_defaults=True):
    """The requests that match, by arrival. `more`: earlier ones match, too. `gaps`: how often events are missing."""

    requests: list[Entry]
    more: bool = False
    gaps: int = 0
    begins_at: float | None = None
    """The time of the earliest event in the history; None if there is no history."""


def search(directory: Path, query: Query) -> Result:
    """Find requests in the files of a directory. Raises UnreadableHistory if a file is damaged."""
    for attempt in range(ATTEMPTS):
        try:
            return _Search(directory, query).run()
        except FileNotFoundError:  # archived or deleted meanwhile
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(0.05)
    raise AssertionError("unreachable")


class _Search:
    """One search. It reads the files from the latest to the earliest, so that it can stop at the limit."""

    def __init__(self, directory: Path, query: Query) -> None:
        self._query = query
        self._segments = list_segments(directory)
        self._since = query.since if query.since is not None else 0.0
        self._until = query.until if query.until is not None else float("inf")
        self._limit = min(query.limit, MAX_REQUESTS)
        self._gaps = 0
        self._keys = [
            key_of(kind, name)
            for kind, name in (("r", query.resource), ("t", query.transaction), ("c", query.client))
            if name is not None
        ]

    def run(self) -> Result:
        found: dict[int, Entry] = {}
        read: list[list[Line]] = []
        more = False
        for segment in reversed(self._segments):
            if segment.is_archived and segment.header.first_at > self._until:
                continue
            lines = list(chain.from_iterable(self._lines_of(segment)))
            read.append(lines)
            found = self._matches(chain.from_iterable(reversed(read)))
            # The file in which the window begins has all requests of the window. Only the index makes it cheap to look in
            # earlier files for the arrival of those that are carried into it.
            begins_before = segment.is_archived and segment.header.first_at <= self._since
            if begins_before and not (self._keys and any(entry.asked_at is None for entry in found.values())):
                break
            if len(found) > self._limit:
                more = True
                break
        entries = sorted(found.values(), key=lambda entry: (entry.begins_at, entry.id))
        if len(entries) > self._limit:
            entries, more = entries[-self._limit :], True
        self._name_waiters(entries)
        return Result(entries, more, self._gaps, self._begins_at())

    def _begins_at(self) -> float | None:
        for segment in self._segments:
            if segment.is_archived:
                if segment.header.events:
                    return segment.header.first_at
                continue
            for lines in segment.read():
                return lines[0].at
        return None

    def _lines_of(self, segment: Segment) -> Iterator[list[Line]]:
        """Yield the lines of a file that may matter, in order."""
        if not segment.is_archived:
            yield from segment.read()
            return
        blocks = segment.header.blocks
        numbers: Iterable[int] = range(len(blocks))
        if self._keys:
            numbers = sorted(set.intersection(*(segment.blocks_with([key]) for key in self._keys)))
        else:  # also blocks before the window: their requests may be held in it
            numbers = [n for n, block in enumerate(blocks) if block.first_at is None or block.first_at <= self._until]
        yield from segment.read_blocks(numbers)

    def _matches(self, lines: Iterable[Line]) -> dict[int, Entry]:
        """Return the requests in `lines` that match, by id. Ends of other requests are skipped."""
        query, found, requests = self._query, {}, {}
        gaps = 0
        for line in lines:
            if isinstance(line, Queued):
                if line.id in found:
                    continue  # carried into a later file
                if (
                    (query.resource is None or query.resource in line.exclusive or query.resource in line.shared)
                    and (query.transaction is None or query.transaction == line.transaction)
                    and (query.client is None or query.client == line.principal)
                ):
                    found[line.id] = _entry(line)
                    requests[line.id] = line
            elif isinstance(line, Locked):
                if (entry := found.get(line.id)) is not None:
                    entry.granted_at, entry.fence = line.at, line.fence
            elif isinstance(line, Released):
                if (entry := found.get(line.id)) is not None:
                    entry.ended_at, entry.reason, entry.cycle = line.at, line.reason, line.cycle
            elif isinstance(line, Gap):
                gaps += 1
        self._gaps = gaps
        since, until = self._since, self._until
        return {
            id_: entry
            for id_, entry in found.items()
            if entry.begins_at <= until and (entry.ended_at is None or entry.ended_at >= since)
        }

    def _name_waiters(self, entries: list[Entry]) -> None:
        """Add transaction and client of the requests that others waited for, as far as they are among the results."""
        by_id = {entry.id: entry for entry in entries}
        for entry in entries:
            entry.waited_for = tuple(
                Waiter(waiter.id, by_id[waiter.id].transaction, by_id[waiter.id].client)
                if waiter.id in by_id
                else waiter
                for waiter in entry.waited_for
            )


def _entry(line: Queued) -> Entry:
    """Return the entry of a request, from the line of its arrival or the line that carries it."""
    entry = Entry(
        line.id,
        exclusive=line.exclusive,
        shared=line.shared,
        transaction=line.transaction,
        client=line.principal,
        note=line.note,
        priority=line.priority,
        waited_for=tuple(map(Waiter, line.waits_for)),
    )
    if isinstance(line, Granted):  # also Carried
        if line.fence:
            entry.granted_at, entry.fence = line.at, line.fence
            if not isinstance(line, Carried):
                entry.asked_at = line.at
        else:
            entry.asked_at = line.at
    else:
        entry.asked_at = line.at
    return entry


def main(arguments: list[str]) -> None:
    """Search, and print the result as JSON."""
    result = search(Path(arguments[0]), json.decode(arguments[1], type=Query))
    sys.stdout.buffer.write(json.encode(result))


if __name__ == "__main__":
    main(sys.argv[1:])
