"""Finds requests in the history: by resource, transaction, client and time.

    python -m genie.history.search DIRECTORY

reads a `Query` from the standard input and prints its `Result`, both as JSON. The admin port searches in this way, in a
process of its own. The query is not an argument: a name may be a secret, and every user can see the arguments of a process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from itertools import chain
from math import inf
from pathlib import Path
from typing import Final

from msgspec import Struct, json

from genie.core import Mode, Reason
from genie.core.special import possible_subtrees
from genie.history.records import Carried, Gap, Granted, Line, Locked, Queued, Released, is_event, lock_texts
from genie.history.redaction import recorded_names
from genie.history.segments import GAP_KEY, Segment, is_recorded, key_of, last_at, list_segments
from genie.lock_modes import UnitCount

NICENESS: Final = 10
"""Niceness of the process of a search. On a busy processor the server gets ten times as much processor time. With 19, a
search would time out."""

MAX_REQUESTS: Final = 10_000
"""Maximum number of requests that a search returns."""
MAX_LISTED_RESOURCES: Final = 10
"""Number of names of a request in the output of this module as a process: a request may have 1,024, of 512 characters each."""
ATTEMPTS: Final = 5
"""Maximum number of attempts. A search begins again if a file was archived or deleted while it was read."""


class Query(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What to find: requests that match all given filters. Times are Unix ms.

    `resource` matches the requests for this name, and those for a subtree that contains it.

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
    """One request from its arrival to its end. All times are Unix ms, or None if the event has not happened.

    `asked_at` is None if the request was granted before the history begins. `fence` is 0 if it was never granted.
    """

    # More than 16 fields: each is a key of an entry in the output of `genie history --json`.
    id: int
    asked_at: float | None = None
    granted_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    fence: int = 0
    exclusive: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    units: dict[str, UnitCount] | None = None
    """The units of counted resources, and their limits, by name."""
    mode: str | None = None
    """The mode in which the request asked for the resource of the query. None if the query has no resource."""
    transaction: str | None = None
    client: str | None = None
    note: str | None = None
    priority: float = 0
    waited_for: tuple[Waiter, ...] = ()
    cycle: tuple[str | int, ...] = ()
    """The owners of the deadlock that ended the request."""
    resources_total: int = 0
    """Number of names of the request if only some are listed. 0 if all are listed."""
    record_ends_at: float | None = None
    """End of the record of the leadership in which the request was live, if no later leader recorded the request. None if
    the end of the request is recorded, or if the request is live."""

    @property
    def begins_at(self) -> float:
        """The earliest known time of the request."""
        return self.asked_at if self.asked_at is not None else self.granted_at or 0.0

    @property
    def last_at(self) -> float | None:
        """The time at which the request or its record ended. None if the request is live."""
        return self.record_ends_at if self.ended_at is None else self.ended_at

    @property
    def names(self) -> tuple[str, ...]:
        """The listed names of the request."""
        return (*self.exclusive, *self.shared, *(self.units or ()))

    @property
    def locks(self) -> list[str]:
        """The listed locks of the request as clients write them."""
        return lock_texts(self.exclusive, self.shared, self.units)


class Result(Struct, omit_defaults=True):
    """The requests that match, by arrival."""

    requests: list[Entry]
    more: bool = False
    """True if earlier requests match as well."""
    gaps: int = 0
    """Number of gaps, in which events are missing."""
    begins_at: float | None = None
    """The time of the earliest event in the history. None if there is no history."""


def search(directory: Path, query: Query) -> Result:
    """Find requests in the files of a directory. Raises UnreadableHistory if a file is damaged."""
    for attempt in range(ATTEMPTS):
        try:
            return _Search(directory, query).run()
        except FileNotFoundError:  # archived or deleted during the search
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(0.05)
    raise AssertionError("unreachable")


class _Search:
    """One search, which reads the files from the latest to the earliest, so that it can stop at the limit."""

    def __init__(self, directory: Path, query: Query) -> None:
        self._directory, self._query = directory, query
        self._segments = list_segments(directory)
        self._since = query.since if query.since is not None else 0.0
        self._until = query.until if query.until is not None else inf
        self._limit = min(query.limit, MAX_REQUESTS)
        self._gaps = 0
        self._first_stems = {each.term: each.stem for each in reversed(self._segments)}.values()
        """The stem of the first file of each leadership. Live requests that are missing there are in no other file."""
        self._resources = None if query.resource is None else _recorded_resources(directory, query.resource)
        self._transactions = None if query.transaction is None else recorded_names(directory, query.transaction)
        clients = None if query.client is None else {query.client}
        self._keys = [
            [key_of(kind, name) for name in names]
            for kind, names in (("r", self._resources), ("t", self._transactions), ("c", clients))
            if names is not None
        ]
        self._found: dict[int, Entry] = {}
        """Requests that match the names of the query, by id."""
        self._terms: dict[int, str] = {}
        """By id of a found request, the latest leadership whose files contain the request."""
        self._unmatched: dict[int, list[Locked | Released]] = {}
        """Lines about requests that no file so far contains, by id. An earlier file may contain the request."""
        self._last_at_by_term: dict[str, float] = {}

    def run(self) -> Result:
        more = self._collect()
        self._find_ends()
        entries = sorted(
            (entry for entry in self._found.values() if self._is_in_window(entry)),
            key=lambda entry: (entry.begins_at, entry.id),
        )
        if len(entries) > self._limit:
            entries = entries[-self._limit :]
            more = True
        if self._resources is not None:
            for entry in entries:
                entry.mode = str(_mode(entry, self._resources))
        _name_waiters(entries, {id_: (entry.transaction, entry.client) for id_, entry in self._found.items()})
        return Result(entries, more, self._gaps, self._read_begin())

    def _collect(self) -> bool:
        """Find the requests of the window.

        Return whether earlier files may have further ones, because the limit is exceeded.
        """
        is_covered = False
        """True if the files that were read contain all requests of the window."""
        for segment in reversed(self._segments):
            if segment.is_archived and segment.header.events and segment.header.first_at > self._until:
                continue
            entries, first_at = self._read(segment)
            has_known = self._merge(entries, segment, known_only=is_covered)
            if is_covered and not has_known:
                break
            is_covered = is_covered or (segment.is_self_contained and first_at <= self._since)
            if is_covered:
                # The arrivals of carried requests are in earlier files. Only with keys does the index make it cheap to
                # search them.
                if not (self._keys and any(entry.asked_at is None for entry in self._found.values())):
                    break
            elif sum(first_at <= entry.begins_at <= self._until for entry in self._found.values()) > self._limit:
                return True  # no request of an earlier file arrived later than these
        return False

    def _read(self, segment: Segment) -> tuple[dict[int, Entry], float]:
        """Read a file. Return its matching requests by id, and the time of its first event (`inf` if it has none).

        Adds its gaps in the window to `_gaps`, and its lines about requests of earlier files to `_unmatched`.
        """
        entries = dict[int, Entry]()
        # The block of the first event of an archived file may not be read.
        first_at = segment.header.first_at if segment.is_archived and segment.header.events else inf
        others: dict[int, tuple[str | None, str | None]] = {}
        """Transaction and client of the requests that do not match, by id. A matching request may have waited for them."""
        is_self_contained = segment.is_self_contained
        self._gaps += int(self._lacks_first_requests(segment))
        for line in chain.from_iterable(self._lines_of(segment)):
            if is_event(line):
                first_at = min(first_at, line.at)
            if isinstance(line, Queued):
                if line.id in entries:
                    continue  # carried twice
                if self._matches(line):
                    entries[line.id] = _entry(line)
                else:
                    others[line.id] = line.transaction, line.principal
            elif isinstance(line, (Locked, Released)):
                if (entry := entries.get(line.id)) is not None:
                    _apply(line, entry)
                elif not is_self_contained and line.id not in others:
                    self._unmatched.setdefault(line.id, []).append(line)
            elif isinstance(line, Gap) and not line.live and line.at <= self._until and self._since <= line.until:
                self._gaps += 1
        _name_waiters(entries.values(), others)
        return entries, first_at

    def _lacks_first_requests(self, segment: Segment) -> bool:
        """Return whether the requests that were live at the beginning of a file are missing in all files."""
        return not segment.is_self_contained and segment.stem in self._first_stems

    def _matches(self, line: Queued) -> bool:
        """Return whether a request matches the resource, the transaction and the client of the query."""
        client = self._query.client
        return (
            (self._resources is None or not self._resources.isdisjoint(line.names))
            and (self._transactions is None or line.transaction in self._transactions)
            and (client is None or client == line.principal)
        )

    def _merge(self, entries: dict[int, Entry], segment: Segment, *, known_only: bool) -> bool:
        """Add the requests of an earlier file to `_found`. Return whether later files contain some of them as well.

        With `known_only`, requests that no later file contains are omitted.
        """
        has_known = False
        for id_, entry in entries.items():
            later = self._found.get(id_)
            if later is not None:
                has_known = True
                _continue(entry, later)
            elif known_only:
                continue
            else:
                self._terms[id_] = segment.term
                for line in self._unmatched.pop(id_, ()):
                    _apply(line, entry)
            self._found[id_] = entry
        return has_known

    def _is_in_window(self, entry: Entry) -> bool:
        return entry.begins_at <= self._until and (entry.last_at is None or entry.last_at >= self._since)

    def _last_at(self, term: str) -> float:
        """Return the time of the last event of a leadership."""
        if term not in self._last_at_by_term:
            segments = [segment for segment in self._segments if segment.term == term]
            self._last_at_by_term[term] = max(map(last_at, segments))
        return self._last_at_by_term[term]

    def _find_ends(self) -> None:
        """Find grants and ends after the window, and set `record_ends_at` of the requests whose end is not recorded."""
        live = {id_: entry for id_, entry in self._found.items() if entry.ended_at is None}
        if not live:
            return
        if self._until < inf:
            keys = [key_of("r", name) for name in {name for each in live.values() for name in each.names}]
            for segment in self._segments:
                self._read_ends(self._lines_after_window(segment, keys), live, segment.term)
        recording = {segment.term for segment in list_segments(self._directory) if is_recorded(segment)}
        for entry in live.values():
            if (term := self._terms[entry.id]) not in recording:
                entry.record_ends_at = max(entry.begins_at, entry.granted_at or 0.0, self._last_at(term))

    def _read_ends(self, lines: Iterator[list[Line]], live: dict[int, Entry], term: str) -> None:
        """Apply lines after the window to requests that were live in it, and remove each that ends."""
        if not live:
            return
        for line in chain.from_iterable(lines):
            if isinstance(line, (Locked, Released)):
                if (entry := live.get(line.id)) is not None:
                    _apply(line, entry)
                    if isinstance(line, Released):
                        del live[line.id]
            elif isinstance(line, Carried) and line.id in live:
                self._terms[line.id] = term

    def _lines_after_window(self, segment: Segment, keys: list[int]) -> Iterator[list[Line]]:
        """Yield the lines of a file that may be after the window and about the resources of `keys`."""
        if not segment.is_archived:
            yield from segment.read()
        elif segment.header.events == 0 or segment.header.last_at >= self._until:
            blocks = segment.header.blocks
            numbers = sorted(segment.blocks_with(keys))
            yield from segment.read_blocks(
                n for n in numbers if (last := blocks[n].last_at) is None or last >= self._until
            )

    def _read_begin(self) -> float | None:
        """Return the time at which the history begins (Unix ms), or None if it is empty.

        In an archived file this is the time of the first event, in a raw file the time of the first line.
        """
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
            with_names = set.intersection(*(segment.blocks_with(keys) for keys in self._keys))
            numbers = sorted(with_names | segment.blocks_with([GAP_KEY]))
        else:  # also blocks before the window: their requests may be held in it
            numbers = [n for n, block in enumerate(blocks) if block.first_at is None or block.first_at <= self._until]
        yield from segment.read_blocks(numbers)


def _recorded_resources(directory: Path, resource: str) -> set[str]:
    """Return all texts that may be recorded for a resource and for the subtrees that contain it."""
    return {text for name in (resource, *possible_subtrees(resource)) for text in recorded_names(directory, name)}


def _mode(entry: Entry, resources: set[str]) -> Mode:
    """Return the strongest mode in which a request asked for one of the `resources`."""
    if not resources.isdisjoint(entry.exclusive):
        return Mode.EXCLUSIVE
    return Mode.SHARED if resources.isdisjoint(entry.units or ()) else Mode.UNITS


def _name_waiters(entries: Iterable[Entry], names: Mapping[int, tuple[str | None, str | None]]) -> None:
    """Set the transaction and the client of each request in `waited_for` of the entries.

    `names` contains both by request id.
    """
    for entry in entries:
        entry.waited_for = tuple(
            Waiter(waiter.id, *names[waiter.id]) if waiter.id in names else waiter for waiter in entry.waited_for
        )


def _apply(line: Locked | Released, entry: Entry) -> None:
    """Apply a line about the request of an entry."""
    if isinstance(line, Locked):
        entry.granted_at, entry.fence = line.at, line.fence
    else:
        entry.ended_at, entry.reason, entry.cycle = line.at, line.reason, line.cycle


def _continue(entry: Entry, later: Entry) -> None:
    """Complete an entry with the entry of later files, into which the request was carried."""
    if entry.granted_at is None:
        entry.granted_at, entry.fence = later.granted_at, later.fence
    if entry.ended_at is None:
        entry.ended_at, entry.reason, entry.cycle = later.ended_at, later.reason, later.cycle
    if entry.asked_at is None:
        entry.asked_at = later.asked_at
    known = {waiter.id: waiter for waiter in later.waited_for if waiter.transaction or waiter.client}
    entry.waited_for = tuple(known.get(waiter.id, waiter) for waiter in entry.waited_for)


def _entry(line: Queued) -> Entry:
    """Return the entry of a request, from the line of its arrival or the line that carries it."""
    entry = Entry(
        line.id,
        exclusive=line.exclusive,
        shared=line.shared,
        units=line.units,
        transaction=line.transaction,
        client=line.principal,
        note=line.note,
        priority=line.priority,
        waited_for=tuple(map(Waiter, line.waits_for)),
    )
    if isinstance(line, Granted) and line.fence:  # also Carried
        entry.granted_at, entry.fence = line.at, line.fence
    # The arrival of a granted request that is carried into a file is in an earlier file.
    if entry.granted_at is None or not isinstance(line, Carried):
        entry.asked_at = line.at
    return entry


def shorten(entry: Entry, first: Container[str]) -> int:
    """Keep at most `MAX_LISTED_RESOURCES` names of an entry, preferably the names in `first`. Return how many names it had."""
    total = len(entry.names)
    if total > MAX_LISTED_RESOURCES:
        kept = sorted(entry.names, key=lambda name: name not in first)[:MAX_LISTED_RESOURCES]
        exclusive, shared = set(entry.exclusive), set(entry.shared)
        entry.exclusive = tuple(name for name in kept if name in exclusive)
        entry.shared = tuple(name for name in kept if name in shared)
        entry.units = {name: units for name, units in (entry.units or {}).items() if name in kept} or None
    return total


def main(arguments: list[str]) -> None:
    """Search, and print the result as JSON, with a few names of each request."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    directory, query = Path(arguments[0]), json.decode(sys.stdin.buffer.read(), type=Query)
    result = search(directory, query)
    first = set() if query.resource is None else _recorded_resources(directory, query.resource)
    for entry in result.requests:
        entry.resources_total = shorten(entry, first)
        entry.cycle = ()
    sys.stdout.buffer.write(json.encode(result))


if __name__ == "__main__":
    main(sys.argv[1:])
