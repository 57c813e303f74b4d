"""Sends the events of locks to their watchers, a bounded number of steps at a time.

One request has up to 1,024 resources, each of them up to 512 watched prefixes, and each prefix thousands of watchers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from genie.core import Request
from genie.core.deadlines import Deadlines
from genie.core.size import NAME_BYTES, REQUEST_BYTES, excess_bytes
from genie.core.special import possible_subtrees
from genie.lock_modes import MAX_SUBTREE_LEVELS
from genie.observability.limited_log import log_limited
from genie.protocol import replies
from genie.server.outcome import BatchOutcome
from genie.server.sessions import Outbound
from genie.server.watches import WatchRegistry

if TYPE_CHECKING:
    from genie.observability.stats import Stats

MAX_JOINED_BYTES: Final = 64 << 10
"""Bytes of events that are sent to a watcher together. The last event may exceed it."""

MAX_STEPS: Final = 5_000
"""Number of steps, a few ms, after which the other events wait for the next iteration of the event loop. A step looks for the
watchers of a prefix of a name, adds `STEP_BYTES` of events to the output of a watcher, or ends a watch. The last slice may
exceed it."""

STEP_BYTES: Final = 1 << 10
"""Bytes of events for one watcher that are one more step: they are copied when they are sent."""

SLICE: Final = 500
"""Number of steps after which the sending of an event can be interrupted."""

MAX_WAITING_BYTES: Final = 16 << 20
"""Limit for the bytes of all requests whose events have waited since no event waited. Beyond it, the watchers are lagging.
So no event waits for ever, and the memory of the waiting events is bounded."""

EVENT_FACTOR: Final = 2
"""How much more memory a request whose events wait takes than its texts: the events are encoded."""


class WatchEvents:
    """Sends watch events in the order of the changes.

    While `waiting` is not empty, the caller must call `send_waiting` in each iteration of the event loop, and must not change
    the prefixes that a connection watches, except if all its watches end. `deadlines.soonest` becomes 0 when there is work.
    """

    def __init__(
        self, watches: WatchRegistry, outcome: BatchOutcome, deadlines: Deadlines, stats: Stats, namespace: str
    ) -> None:
        self._watches = watches
        self.watched = watches.prefixes
        """The watched prefixes: false if there are no watches, so that `publish` need not be called."""
        self._outcome = outcome
        self._deadlines = deadlines
        self._stats = stats
        self._namespace = namespace
        self.waiting: deque[Iterator[int]] = deque()
        """The events that are not sent yet: iterators. Each step of an iterator sends a slice, and yields the number of
        steps of the slice."""
        self._waiting_bytes = 0
        self._steps = MAX_STEPS
        """Number of steps that may still be executed before `send_waiting` is called again."""

    def publish(self, request: Request, state: str) -> None:
        """Send a watch event to the watchers of each resource of a request. `state` is `locked` or `unlocked`.

        The events of resources with the same watchers are sent together.
        """
        has_subtrees = request.details is not None and request.details.subtrees
        events = (self._publish_subtrees if has_subtrees else self._publish)(request, state)
        if self.waiting:
            names = request.name_count()
            self._waiting_bytes += REQUEST_BYTES + EVENT_FACTOR * (names * NAME_BYTES + excess_bytes(request))
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
                events = self._end_all(watchers)
                self.waiting.clear()
                self._waiting_bytes = 0
            self.waiting.append(events)
        elif not self._run(events):
            self.waiting.append(events)

    def send_waiting(self) -> None:
        """Send the events that wait, up to `MAX_STEPS`."""
        self._steps = MAX_STEPS
        while self.waiting and self._run(self.waiting[0]):
            self.waiting.popleft()
        if not self.waiting:
            self._waiting_bytes = 0

    def clear(self) -> None:
        """Drop all references to connections."""
        self.waiting.clear()

    def _run(self, events: Iterator[int]) -> bool:
        """Send slices until none is left, or `MAX_STEPS` are reached. Return whether none is left."""
        for steps in events:
            self._steps -= steps
            if self._steps <= 0:
                self._deadlines.soonest = 0.0  # 0 is a lower bound: the caller then checks what is due
                return False
        return True

    def _publish(self, request: Request, state: str) -> Iterator[int]:
        """Send the events of a request in slices, and yield the number of steps of each slice."""
        watches = self._watches
        lookups = len(watches.prefix_count_by_length)  # of each name: one for each length of a watched prefix
        groups: dict[tuple[str, ...], list[bytes]] = {}
        steps = 0
        for name, mode in request.modes():
            prefixes = watches.matching_prefixes(name)
            if prefixes:
                groups.setdefault(prefixes, []).append(replies.event(request, name, mode, state))
            steps += 1 + lookups
            if steps >= SLICE:
                yield steps
                steps = 0
        for prefixes, messages in groups.items():
            for joined in messages if len(messages) == 1 else _joined(messages):
                for prefix in prefixes:
                    yield from self._send(prefix, joined, steps)
                    steps = 0
        if steps:
            yield steps

    def _publish_subtrees(self, request: Request, state: str) -> Iterator[int]:
        """Send the events of a request with subtrees in slices, and yield the number of steps of each slice.

        The event of a subtree is also sent for watched prefixes below it. A connection may watch several of these, but is sent
        each event once.
        """
        watches = self._watches
        lookups, watched = len(watches.prefix_count_by_length), [*watches.prefixes]
        subtrees = {*(() if request.details is None else request.details.subtrees)}
        within: dict[str, list[str]] = {}
        for start in range(0, len(watched), SLICE):
            steps = 0
            for prefix in watched[start : start + SLICE]:
                above = [subtree for subtree in possible_subtrees(prefix) if subtree in subtrees]
                steps += 1 + min(prefix.count("/"), MAX_SUBTREE_LEVELS)
                for subtree in above:
                    within.setdefault(subtree, []).append(prefix)
            yield steps
        for name, mode in request.modes():
            steps = 1 + lookups
            matching, below = watches.matching_prefixes(name), within.get(name, ())
            event = replies.event(request, name, mode, state) if matching or below else b""
            sent: set[Outbound] = set()
            for prefix in chain(matching, below):  # a prefix may be in both, but each connection is sent the event once
                yield from self._send(prefix, event, steps, sent)
                steps = 0
            yield steps

    def _send(self, prefix: str, events: bytes, steps: int, sent: set[Outbound] | None = None) -> Iterator[int]:
        """Send encoded events to the watchers of a prefix in slices, and yield the number of steps of each slice.

        `steps` is the number of steps that the caller has executed and not yielded: they are part of the first slice. `sent`
        contains the connections that must not receive the events again; each watcher that receives them is added.
        """
        watchers = self._watches.prefixes.get(prefix, {})
        is_lagging, send_event = self._watches.is_lagging, self._outcome.send_event
        steps_of_event = 1 + len(events) // STEP_BYTES
        for connection in [*watchers]:
            # Since the first slice, the watches of the connection may have ended.
            is_watching = connection in watchers and not connection.closed
            if is_watching and (sent is None or connection not in sent):
                if is_lagging(connection):
                    steps += self._end(connection)
                else:
                    send_event(connection, events)
                    if sent is not None:
                        sent.add(connection)
                    steps += steps_of_event
            steps += 1
            if steps >= SLICE:
                yield steps
                steps = 0
        yield steps

    def _end(self, connection: Outbound) -> int:
        """Send `lagged` to a watcher instead of the next events, and end its watches. Return how many watches have ended.

        `lagged` is sent in a slice like an event, because MiBs of events may precede it.
        """
        count = len(self._watches.prefixes_of(connection))
        self._watches.remove_all(connection)
        if count and not connection.closed:
            self._stats.lagged_watchers += 1
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


def _joined(messages: list[bytes]) -> Iterator[bytes]:
    """Join messages in order. Yield the joined messages, of about `MAX_JOINED_BYTES` each."""
    part: list[bytes] = []
    size = 0
    for message in messages:
        part.append(message)
        size += len(message)
        if size >= MAX_JOINED_BYTES:
            yield b"".join(part)
            part, size = [], 0
    if part:
        yield b"".join(part)
