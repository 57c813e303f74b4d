"""Finds requests in the history: by resource, transaction, client and time.

    python -m genie.history.search DIRECTORY

reads a `Query` from the standard input and prints its `Result`, both as JSON. The admin port searches in this way, in a
process of its own. The query is no argument of the command, because every user can see the arguments of a process, and
a name may be a secret.
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
"""Maximum number of names of a request that the process prints: a request may have 1,024 names of 512 characters each."""
ATTEMPTS: Final = 5
"""Maximum number of attempts. A search begins again if a file was archived or deleted while it was read."""
RETRY_PAUSE_S: Final = 0.05
"""Pause between two attempts."""


class Query(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """What to find: requests that match all given filters, and waited or held at any time from `since` to `until`.

    This period is the *window* of the query. Its limits are in Unix ms.
    """

    resource: str | None = None
    """Matches the requests for this name, and the requests for a subtree that contains it."""
    transaction: str | None = None
    client: str | None = None
    """Matches the requests of this principal."""
    since: float | None = None
    until: float | None = None
    limit: int = 100
    """If more requests match, the latest are returned."""


class Blocker(Struct, omit_defaults=True):
    """A request for which another request waited: a holder, or an earlier waiter."""

    id: int
    transaction: str | None = None
    client: str | None = None


class Entry(Struct, omit_defaults=True):
    """One request from its arrival to its end. All times are Unix ms, or None if the event has not happened."""

    # More than 16 fields: each is a key of an entry in the output of `genie history --json`.
    id: int
    asked_at: float | None = None
    """When the request arrived. None if it was granted before the history begins."""
    granted_at: float | None = None
    ended_at: float | None = None
    reason: Reason | None = None
    """Why the request ended."""
    fence: int = 0
    """The fencing token. 0 if the request was never granted."""
    exclusive: tuple[str, ...] = ()
    """The names in exclusive mode."""
    shared: tuple[str, ...] = ()
    """The names in shared mode."""
    units: dict[str, UnitCount] | None = None
    """The units of counted resources, and their limits, by name."""
    mode: str | None = None
    """The mode in which the request asked for the resource of the query. None if the query has no resource."""
    transaction: str | None = None
    client: str | None = None
    """The principal."""
    note: str | None = None
    priority: float = 0
    waited_for: tuple[Blocker, ...] = ()
    """The first requests for which the request waited."""
    cycle: tuple[str | int, ...] = ()
    """The owners of the deadlock that ended the request."""
    resources_total: int = 0
    """Number of names of the request if only some are listed. 0 if all are listed."""
    record_ends_at: float | None = None
    """When the record of the request ends without its end: at the end of its leadership, if no later leader has
    recorded it. None if the end of the request is recorded, or if the request is live."""

    @property
    def begins_at(self) -> float:
        """The earliest known time of the request."""
        return self.asked_at if self.asked_at is not None else self.granted_at or 0.0

    @property
    def last_at(self) -> float | None:
        """When the request ended, or else when its record ends. None if the request is live."""
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
    """True if further, earlier requests match."""
    gaps: int = 0
    """Number of gaps in the window, in which events are missing."""
    begins_at: float | None = None
    """The time of the earliest event in the history, in Unix ms. None if there is no history."""


def search(directory: Path, query: Query) -> Result:
    """Find requests in the files of a directory. Raises UnreadableHistory if a file is damaged."""
    for _ in range(ATTEMPTS - 1):
        try:
            return _Search(directory, query).run()
        except FileNotFoundError:  # a file was archived or deleted during the search
            time.sleep(RETRY_PAUSE_S)
    return _Search(directory, query).run()


class _Search:
    """One search, which reads the files from the latest to the earliest, so that it can stop at the limit."""

    def __init__(self, directory: Path, query: Query) -> None:
        self._directory, self._query = directory, query
        self._segments = list_segments(directory)
        self._since = query.since if query.since is not None else 0.0
        self._until = query.until if query.until is not None else inf
        self._limit = min(query.limit, MAX_REQUESTS)
        self._gaps = 0
        """Number of gaps in the window, so far."""
        # In reverse order, so that the first file of a leadership (`term`) replaces its later files.
        self._first_stems = {each.term: each.stem for each in reversed(self._segments)}.values()
        """The stem of the first file of each leadership. Live requests that are missing there are in no other file."""
        self._resources = None if query.resource is None else _recorded_resources(directory, query.resource)
        """All recorded names that match the resource of the query. None if the query has no resource."""
        self._transactions = None if query.transaction is None else recorded_names(directory, query.transaction)
        """All recorded names that match the transaction of the query. None if the query has no transaction."""
        clients = None if query.client is None else {query.client}
        filters = {"r": self._resources, "t": self._transactions, "c": clients}
        self._keys = [[key_of(kind, name) for name in names] for kind, names in filters.items() if names is not None]
        """For each filter by name, the index keys of its names. A block with a matching request has one key of each
        filter."""
        self._found: dict[int, Entry] = {}
        """Requests that match the names of the query, by id."""
        self._terms: dict[int, str] = {}
        """By id of a found request, the latest leadership whose files contain the request."""
        self._unmatched: dict[int, list[Locked | Released]] = {}
        """Lines about requests that no file so far contains, by id. An earlier file may contain the request."""
        self._last_at_by_term: dict[str, float] = {}
        """The results of `_last_at`."""

    def run(self) -> Result:
        """Search, and return the requests by arrival."""
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
        _name_blockers(entries, {id_: (entry.transaction, entry.client) for id_, entry in self._found.items()})
        return Result(entries, more, self._gaps, self._read_begin())

    def _collect(self) -> bool:
        """Find the requests of the window.

        Return True if earlier files were not read because the limit is exceeded.
        """
        is_covered = False
        """True if the files that were read contain all requests of the window."""
        for segment in reversed(self._segments):
            if segment.is_archived and segment.header.events and segment.header.first_at > self._until:
                continue  # the file is later than the window
            entries, first_at = self._read(segment)
            has_known = self._merge(entries, segment, known_only=is_covered)
            if is_covered and not has_known:
                break
            is_covered = is_covered or (segment.is_self_contained and first_at <= self._since)
            if is_covered:
                # The arrival of a request that was carried into a file is in an earlier file. Without keys there is no
                # index that makes it cheap to find.
                lacks_arrivals = any(entry.asked_at is None for entry in self._found.values())
                if not self._keys or not lacks_arrivals:
                    break
            else:
                # A request of an earlier file arrived before `first_at`.
                later_count = sum(first_at <= entry.begins_at <= self._until for entry in self._found.values())
                if later_count > self._limit:
                    return True
        return False

    def _read(self, segment: Segment) -> tuple[dict[int, Entry], float]:
        """Read a file. Return its matching requests by id, and the time of its first event (`inf` if it has none).

        Adds its gaps in the window to `_gaps`, and its lines about requests of earlier files to `_unmatched`.
        """
        entries = dict[int, Entry]()
        # Not all blocks of an archived file are read, but its header has the time of the first event.
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
                    entries[line.id] = _to_entry(line)
                else:
                    others[line.id] = line.transaction, line.principal
            elif isinstance(line, (Locked, Released)):
                if (entry := entries.get(line.id)) is not None:
                    _apply(line, entry)
                elif not is_self_contained and line.id not in others:
                    self._unmatched.setdefault(line.id, []).append(line)
            elif isinstance(line, Gap):
                self._gaps += int(self._lacks_events_of_window(line))
        _name_blockers(entries.values(), others)
        return entries, first_at

    def _lacks_events_of_window(self, gap: Gap) -> bool:
        """Return whether events of the window may be missing because of a gap."""
        return not gap.live and gap.at <= self._until and self._since <= gap.until

    def _lacks_first_requests(self, segment: Segment) -> bool:
        """Return whether no file has the requests that were live at the beginning of this file."""
        return not segment.is_self_contained and segment.stem in self._first_stems

    def _matches(self, line: Queued) -> bool:
        """Return whether a request matches the resource, the transaction and the client of the query."""
        if self._resources is not None and self._resources.isdisjoint(line.names):
            return False
        if self._transactions is not None and line.transaction not in self._transactions:
            return False
        return self._query.client in (None, line.principal)

    def _merge(self, entries: dict[int, Entry], segment: Segment, *, known_only: bool) -> bool:
        """Add the requests of a file to `_found`, which has those of later files. Return True if one was there already.

        With `known_only`, requests that no later file contains are omitted.
        """
        has_known = False
        for id_, entry in entries.items():
            later = self._found.get(id_)
            if later is not None:
                has_known = True
                _complete(entry, later)
            elif known_only:
                continue
            else:
                self._terms[id_] = segment.term
                for line in self._unmatched.pop(id_, ()):
                    _apply(line, entry)
            self._found[id_] = entry
        return has_known

    def _is_in_window(self, entry: Entry) -> bool:
        """Return whether a request waited or held at any time of the window."""
        return entry.begins_at <= self._until and (entry.last_at is None or entry.last_at >= self._since)

    def _last_at(self, term: str) -> float:
        """Return the time of the last event of a leadership, in Unix ms."""
        if term not in self._last_at_by_term:
            segments = [segment for segment in self._segments if segment.term == term]
            self._last_at_by_term[term] = max(map(last_at, segments))
        return self._last_at_by_term[term]

    def _find_ends(self) -> None:
        """Find grants and ends after the window, and set `record_ends_at` of the requests whose end is not recorded."""
        live = {id_: entry for id_, entry in self._found.items() if entry.ended_at is None}
        if not live:
            return
        if self._until < inf:  # otherwise no file is after the window
            names = {name for entry in live.values() for name in entry.names}
            keys = [key_of("r", name) for name in names]
            for segment in self._segments:
                self._read_ends(self._lines_after_window(segment, keys), live, segment.term)
        recorded_terms = {segment.term for segment in list_segments(self._directory) if is_recorded(segment)}
        for entry in live.values():
            term = self._terms[entry.id]
            if term not in recorded_terms:
                entry.record_ends_at = max(entry.begins_at, entry.granted_at or 0.0, self._last_at(term))

    def _read_ends(self, lines: Iterator[list[Line]], live: dict[int, Entry], term: str) -> None:
        """Apply lines after the window to the `live` requests, and remove each that ends.

        `term` is the leadership of the lines.
        """
        if not live:
            return
        for line in chain.from_iterable(lines):
            if not isinstance(line, (Locked, Released, Carried)) or line.id not in live:
                continue
            if isinstance(line, Carried):
                self._terms[line.id] = term
                continue
            _apply(line, live[line.id])
            if isinstance(line, Released):
                del live[line.id]

    def _lines_after_window(self, segment: Segment, keys: list[int]) -> Iterator[list[Line]]:
        """Yield the lines of a file that may be after the window and about the resources of `keys`."""
        if not segment.is_archived:
            yield from segment.read()
        elif segment.header.events == 0 or segment.header.last_at >= self._until:
            numbers = []
            for number in sorted(segment.blocks_with(keys)):
                block_end = segment.header.blocks[number].last_at
                if block_end is None or block_end >= self._until:
                    numbers.append(number)
            yield from segment.read_blocks(numbers)

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
        """Yield the lines of a file that may match the query, in order.

        Of an archived file, only some blocks are read.
        """
        if not segment.is_archived:
            yield from segment.read()
            return
        if self._keys:
            matching = set.intersection(*(segment.blocks_with(keys) for keys in self._keys))
            numbers = sorted(matching | segment.blocks_with([GAP_KEY]))
        else:  # also the blocks before the window, because their requests may be held in it
            numbers = [
                number
                for number, block in enumerate(segment.header.blocks)
                if block.first_at is None or block.first_at <= self._until
            ]
        yield from segment.read_blocks(numbers)


def _recorded_resources(directory: Path, resource: str) -> set[str]:
    """Return all texts that may be recorded for a resource and for the subtrees that contain it."""
    found = recorded_names(directory, resource)
    for subtree in possible_subtrees(resource):
        found |= recorded_names(directory, subtree)
    return found


def _mode(entry: Entry, resources: set[str]) -> Mode:
    """Return the strongest mode in which a request asked for one of the `resources`."""
    if not resources.isdisjoint(entry.exclusive):
        return Mode.EXCLUSIVE
    if not resources.isdisjoint(entry.units or ()):
        return Mode.UNITS
    return Mode.SHARED


def _name_blockers(entries: Iterable[Entry], names: Mapping[int, tuple[str | None, str | None]]) -> None:
    """Set the transaction and the client of the requests in `waited_for` of the entries.

    `names` has the transaction and the client by request id. Requests that it lacks stay unchanged.
    """
    for entry in entries:
        entry.waited_for = tuple(
            Blocker(blocker.id, *names[blocker.id]) if blocker.id in names else blocker for blocker in entry.waited_for
        )


def _apply(line: Locked | Released, entry: Entry) -> None:
    """Set the grant or the end of a request from a line about it."""
    if isinstance(line, Locked):
        entry.granted_at, entry.fence = line.at, line.fence
    else:
        entry.ended_at, entry.reason, entry.cycle = line.at, line.reason, line.cycle


def _complete(entry: Entry, later: Entry) -> None:
    """Complete an entry with the `later` entry, from later files, into which the request was carried."""
    if entry.granted_at is None:
        entry.granted_at, entry.fence = later.granted_at, later.fence
    if entry.ended_at is None:
        entry.ended_at, entry.reason, entry.cycle = later.ended_at, later.reason, later.cycle
    if entry.asked_at is None:
        entry.asked_at = later.asked_at
    named = {blocker.id: blocker for blocker in later.waited_for if blocker.transaction or blocker.client}
    entry.waited_for = tuple(named.get(blocker.id, blocker) for blocker in entry.waited_for)


def _to_entry(line: Queued) -> Entry:
    """Return the entry of a request, from the line of its arrival or the line that carries it into a file."""
    entry = Entry(
        line.id,
        exclusive=line.exclusive,
        shared=line.shared,
        units=line.units,
        transaction=line.transaction,
        client=line.principal,
        note=line.note,
        priority=line.priority,
        waited_for=tuple(map(Blocker, line.waits_for)),
    )
    entry.fence = line.fence if isinstance(line, Granted) else 0  # Carried is a Granted, too
    if entry.fence:
        entry.granted_at = line.at
    if not entry.fence or not isinstance(line, Carried):  # the arrival of a carried grant is in an earlier file
        entry.asked_at = line.at
    return entry


def shorten(entry: Entry, first: Container[str]) -> int:
    """Keep at most `MAX_LISTED_RESOURCES` names of an entry, preferably the names in `first`.

    Return how many names it had.
    """
    total = len(entry.names)
    if total <= MAX_LISTED_RESOURCES:
        return total
    kept = sorted(entry.names, key=lambda name: name not in first)[:MAX_LISTED_RESOURCES]  # False is before True
    exclusive, shared = set(entry.exclusive), set(entry.shared)
    entry.exclusive = tuple(name for name in kept if name in exclusive)
    entry.shared = tuple(name for name in kept if name in shared)
    entry.units = {name: units for name, units in (entry.units or {}).items() if name in kept} or None
    return total


def main(arguments: list[str]) -> None:
    """Search the directory that is the only argument, and print the result as JSON, with a few names of each request."""
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
