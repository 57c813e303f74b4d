"""Sends the events of locks to their watchers, a bounded number of steps at a time.

A request has up to 1,024 resources. Each resource has up to 512 watched prefixes, and each prefix thousands of
watchers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from genie.core import Request
from genie.core.deadlines import Deadlines
from genie.core.size import NAME_BYTES, REQUEST_BYTES, excess_bytes
from genie.core.special import possible_subtrees
from genie.lock_modes import MAX_SUBTREE_LEVELS, WHOLE_NAMESPACE
from genie.observability.limited_log import log_limited
from genie.protocol import replies
from genie.server.outcome import BatchOutcome
from genie.server.sessions import Outbound
from genie.server.watches import WatchRegistry

if TYPE_CHECKING:
    from genie.observability.stats import Stats

MAX_JOINED_BYTES: Final = 64 << 10
"""Limit for the bytes of events that are joined and sent to a watcher together. The last event may exceed it."""

MAX_STEPS: Final = 5_000
"""Number of steps in one iteration of the event loop, a few ms. The other events wait for the next iteration. A step
looks for the watchers of a prefix of a name, adds up to `STEP_BYTES` of events to the output of a watcher, or ends a
watch. The last slice may exceed the limit."""

STEP_BYTES: Final = 1 << 10
"""Bytes of events for one watcher that count as one more step, because they are copied when they are sent."""

SLICE: Final = 500
"""Approximate number of steps in a slice. The sending of an event can be interrupted after each slice."""

MAX_WAITING_BYTES: Final = 16 << 20
"""Limit for the bytes of the requests whose events have been queued since the queue was last empty. Beyond it, all
watchers are lagging. So no event waits for ever, and the memory of the waiting events is bounded."""

MAX_COMPARED_NAMES: Final = 2_000
"""Number of names in waiting events that are compared with the prefixes of a connection at a time, a few ms. The names of the last
request may exceed it."""

EVENT_FACTOR: Final = 2
"""Memory of the names and long texts of a request whose events wait, as a multiple of their size. The events contain
them again."""


class WatchEvents:
    """Sends watch events in the order of the changes.

    While `waiting` is not empty, the caller must call `send_waiting` in each iteration of the event loop. Meanwhile it
    must not change the prefixes of a connection for which events wait (`are_waiting_for`), but it may end all watches of
    a connection. When events begin to wait, `deadlines.soonest` is set to 0, so that the caller sets its timer.
    """

    def __init__(
        self, watches: WatchRegistry, outcome: BatchOutcome, deadlines: Deadlines, stats: Stats, namespace: str
    ) -> None:
        self._watches = watches
        self.watched = watches.prefixes
        """The watched prefixes. While it is empty, `publish` need not be called."""
        self._outcome = outcome
        self._deadlines = deadlines
        self._stats = stats
        self._namespace = namespace
        self.waiting: deque[tuple[Iterator[int], Request | None]] = deque()
        """The events that are not sent yet, one iterator for each request. `next` of an iterator sends a slice, and
        returns the number of its steps. Without a request, the iterator ends watches. The numbers of the items are
        consecutive."""
        self._waiting_bytes = 0
        """Bytes of the requests whose events were added to `waiting` since it was last empty."""
        self._remaining_steps = MAX_STEPS
        """Number of steps that may still be executed before `send_waiting` is called again."""
        self._next_number = 0
        """The number of the next call of `publish`."""

    def publish(self, request: Request, state: str) -> None:
        """Send a watch event to the watchers of each resource of a request. `state` is `locked` or `unlocked`.

        The events of resources with the same watchers are sent together.
        """
        number = self._next_number
        self._next_number = number + 1
        if request.details is not None and request.details.subtrees:
            events = self._publish_subtrees(request, state, number)
        else:
            events = self._publish(request, state, number)
        if self.waiting:
            name_bytes = request.name_count() * NAME_BYTES
            self._waiting_bytes += REQUEST_BYTES + EVENT_FACTOR * (name_bytes + excess_bytes(request))
            if self._waiting_bytes > MAX_WAITING_BYTES:
                watchers = self._watches.connections()
                log_limited(
                    "warning",
                    "watchers lagged, all their watches ended",
                    namespace=self._namespace,
                    watcher_count=len(watchers),
                    waiting_bytes=self._waiting_bytes,
                    limit_bytes=MAX_WAITING_BYTES,
                )
                self.waiting.clear()
                self._waiting_bytes = 0
                self.waiting.append((self._end_all(watchers), None))
            else:
                self.waiting.append((events, request))
        elif not self._run(events):
            self.waiting.append((events, request))

    def send_waiting(self) -> None:
        """Send waiting events, at most about `MAX_STEPS` steps."""
        self._remaining_steps = MAX_STEPS
        while self.waiting and self._run(self.waiting[0][0]):
            self.waiting.popleft()
        if not self.waiting:
            self._waiting_bytes = 0
            self._watches.first_numbers.clear()

    def are_waiting_for(self, connection: Outbound) -> bool:
        """Return whether waiting events may match the prefixes of a connection.

        True if the names of many events have not been compared yet. The next call continues with them.
        """
        prefixes = (*self._watches.prefixes_of(connection),)
        if not prefixes:
            return False
        first_numbers, first_waiting = self._watches.first_numbers, self._next_number - len(self.waiting)
        number = max(first_numbers.get(connection, 0), first_waiting)
        remaining_names = MAX_COMPARED_NAMES
        for _, request in islice(self.waiting, number - first_waiting, None):
            if remaining_names <= 0 or request is None or _may_match(request, prefixes):
                return True
            remaining_names -= request.name_count()
            number += 1
            first_numbers[connection] = number
        return False

    def begin(self, connection: Outbound) -> None:
        """Omit the waiting events for a new watch, because its `watching` contains the changes.

        They must not match the other prefixes of the connection.
        """
        if self.waiting:
            self._watches.first_numbers[connection] = self._next_number

    def clear(self) -> None:
        """Drop all references to connections."""
        self.waiting.clear()

    def _run(self, events: Iterator[int]) -> bool:
        """Send slices of events until none is left and return True, or until no steps remain and return False."""
        for steps in events:
            self._remaining_steps -= steps
            if self._remaining_steps <= 0:
                self._deadlines.soonest = 0.0  # a lower bound: so the caller sets its timer, and calls `send_waiting`
                return False
        return True

    def _publish(self, request: Request, state: str, number: int) -> Iterator[int]:
        """Send the events of a request in slices, and yield the number of steps of each slice."""
        watches = self._watches
        lookups_per_name = len(watches.prefix_count_by_length)
        events_by_prefixes: dict[tuple[str, ...], list[bytes]] = {}
        steps = 0
        for name, mode in request.modes():
            prefixes = watches.matching_prefixes(name)
            if prefixes:
                events_by_prefixes.setdefault(prefixes, []).append(replies.event(request, name, mode, state))
            steps += 1 + lookups_per_name
            if steps >= SLICE:
                yield steps
                steps = 0
        for prefixes, events in events_by_prefixes.items():
            for joined in _joined(events):
                for prefix in prefixes:
                    yield from self._send(prefix, joined, number, steps)
                    steps = 0
        if steps:
            yield steps

    def _publish_subtrees(self, request: Request, state: str, number: int) -> Iterator[int]:
        """Send the events of a request with subtrees in slices, and yield the number of steps of each slice.

        The event of a subtree is also sent for watched prefixes below it. A connection may watch several of these
        prefixes, but is sent each event once.
        """
        watches = self._watches
        lookups_per_name, watched = len(watches.prefix_count_by_length), [*watches.prefixes]
        subtrees = set(() if request.details is None else request.details.subtrees)
        prefixes_below: dict[str, list[str]] = {}  # the watched prefixes below each subtree
        for start in range(0, len(watched), SLICE):
            steps = 0
            for prefix in watched[start : start + SLICE]:
                for subtree in possible_subtrees(prefix):
                    if subtree in subtrees:
                        prefixes_below.setdefault(subtree, []).append(prefix)
                steps += 1 + min(prefix.count("/"), MAX_SUBTREE_LEVELS)
            yield steps
        for name, mode in request.modes():
            steps = 1 + lookups_per_name
            matching, below = watches.matching_prefixes(name), prefixes_below.get(name, ())
            event = replies.event(request, name, mode, state) if matching or below else b""
            already_sent: set[Outbound] = set()
            for prefix in chain(matching, below):  # a prefix may be in both
                yield from self._send(prefix, event, number, steps, already_sent)
                steps = 0
            yield steps

    def _send(
        self, prefix: str, events: bytes, number: int, steps: int, already_sent: set[Outbound] | None = None
    ) -> Iterator[int]:
        """Send encoded events to the watchers of a prefix in slices, and yield the number of steps of each slice.

        `number` is that of the events. Connections that have a greater first number are omitted. The first slice includes
        `steps`, which the caller has executed and not yielded. Connections in `already_sent` are omitted; each watcher that
        receives the events is added to it.
        """
        watchers = self._watches.prefixes.get(prefix, {})
        is_lagging, send_event = self._watches.is_lagging, self._outcome.send_event
        steps_per_watcher, first_numbers = 1 + len(events) // STEP_BYTES, self._watches.first_numbers
        for connection in [*watchers]:
            # Since the first slice, the watches of the connection may have ended.
            is_watching = connection in watchers and not connection.closed
            if first_numbers and first_numbers.get(connection, 0) > number:
                is_watching = False
            if is_watching and (already_sent is None or connection not in already_sent):
                if is_lagging(connection):
                    steps += self._end(connection)
                else:
                    send_event(connection, events)
                    if already_sent is not None:
                        already_sent.add(connection)
                    steps += steps_per_watcher
            steps += 1
            if steps >= SLICE:
                yield steps
                steps = 0
        yield steps

    def _end(self, connection: Outbound) -> int:
        """Send `lagged` to a watcher instead of the next events, and end its watches.

        Return how many watches have ended.
        """
        count = len(self._watches.prefixes_of(connection))
        self._watches.remove_all(connection)
        if count and not connection.closed:
            self._stats.lagged_watchers += 1
            # It may be deferred like an event, because MiBs of events may precede it.
            self._outcome.send_event(connection, replies.LAGGED)
        return count

    def _end_all(self, connections: Iterable[Outbound]) -> Iterator[int]:
        """End the watches of all watchers in slices, and yield the number of steps of each slice."""
        steps = 0
        for connection in connections:
            steps += 1 + self._end(connection)
            if steps >= SLICE:
                yield steps
                steps = 0
        yield steps


def _may_match(request: Request, prefixes: tuple[str, ...]) -> bool:
    """Return whether events of a request may match one of the prefixes."""
    if any(name.startswith(prefixes) for name in request.names()):
        return True
    subtrees = () if request.details is None else request.details.subtrees
    parents = (*(subtree.removesuffix(WHOLE_NAMESPACE) for subtree in subtrees),)
    return bool(parents) and any(prefix.startswith(parents) for prefix in prefixes)


def _joined(events: list[bytes]) -> Iterator[bytes]:
    """Join encoded events in order. Yield parts of about `MAX_JOINED_BYTES` each."""
    part: list[bytes] = []
    part_bytes = 0
    for event in events:
        part.append(event)
        part_bytes += len(event)
        if part_bytes >= MAX_JOINED_BYTES:
            yield b"".join(part)
            part, part_bytes = [], 0
    if part:
        yield b"".join(part)
