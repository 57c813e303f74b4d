"""Samples a namespace ten times a second: measures the event-loop lag, and logs slow waits, deadlocks and lock order
inversions.

These events are logged at the samples, not when they occur, so that the number of log lines is bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any

import structlog

from genie.core import Blocker, Context, Request, Wait
from genie.core.context import shown_context
from genie.core.view import MAX_COUNTED_BLOCKERS, sample_blockers
from genie.text import printable

if TYPE_CHECKING:
    from genie.core.lock_order.analysis import LockOrder
    from genie.core.lock_order.edges import Edge
    from genie.observability.stats import Deadlock, Stats
    from genie.server.pipeline import Pipeline

log = structlog.get_logger()

SAMPLE_INTERVAL_S = 0.1
MAX_LOGGED_EVENTS = 10
"""Maximum number of slow waits, and of deadlocks, that are logged per sample. The others are only counted in the
log."""
MAX_READ_WAITERS = 5_000
"""Maximum number of waiting requests that one sample reads to find slow ones."""
MAX_LOGGED_STEPS = 20
"""Maximum number of logged steps of a cycle."""
MAX_LOGGED_RESOURCES = 10
"""Maximum number of logged resources of a request."""
MAX_LOGGED_CHARACTERS = 128
"""Maximum number of characters of a text in a log line. A longer text is cut, and ends with `…`."""
MAX_LOGGED_BYTES = 1 << 20
"""Maximum bytes of the log lines of a namespace in `BYTES_INTERVAL_S` about slow waits, and as many about deadlocks.
The last line may exceed the limit."""
BYTES_INTERVAL_S = 60.0


class _LineLimit:
    """Limits the log lines of one kind of event: their number per sample, and their bytes per minute."""

    def __init__(self) -> None:
        self._interval_ends_at = 0.0
        """Event-loop time at which `MAX_LOGGED_BYTES` are allowed again."""
        self._remaining_bytes = 0
        """Bytes that may still be logged in this interval. Negative if the last line has exceeded the limit."""
        self._omitted = 0
        """Number of events that were not logged, and that `take_omitted` has not returned yet."""

    def permitted(self, now: float, fields: Iterator[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
        """Yield the shortened fields of each event that may be logged, of the `count` events of a sample.

        The caller must read the iterator to its end. `fields` yields the fields of each event. It is advanced only as
        far as events are logged, because the fields take work. Once the bytes of the interval are used up, no event may
        be logged in it.
        """
        if not count and not self._omitted:
            return
        if now >= self._interval_ends_at:
            self._interval_ends_at, self._remaining_bytes = now + BYTES_INTERVAL_S, MAX_LOGGED_BYTES
        logged = 0
        while self._remaining_bytes > 0 and logged < MAX_LOGGED_EVENTS:
            event_fields = next(fields, None)
            if event_fields is None:
                break
            shortened = _shorten(event_fields)
            yield shortened
            self._remaining_bytes -= len(printable(repr(shortened)).encode())
            logged += 1
        self._omitted += count - logged

    def take_omitted(self) -> int:
        """Return how many events were omitted since the last call.

        Return 0 while the bytes of the interval are used up.
        """
        if self._remaining_bytes <= 0:
            return 0
        omitted, self._omitted = self._omitted, 0
        return omitted


class Monitor:
    """Samples one namespace. A request that has waited for `slow_wait_ms` is logged. 0 disables the log of slow waits."""

    def __init__(
        self,
        namespace: str,
        stats: Stats,
        lock_order: LockOrder | None,
        slow_wait_ms: float,
        find_leader: Callable[[], Pipeline | None],
    ) -> None:
        self._log = log.bind(namespace=namespace)
        self._slow_wait_limit, self._deadlock_limit = _LineLimit(), _LineLimit()
        """Limit how many slow waits, and how many deadlocks, are logged."""
        self._stats = stats
        self._lock_order = lock_order
        self.set_slow_wait(slow_wait_ms)
        self._loop = asyncio.get_running_loop()
        stats.sample(self._loop.time() * 1000)
        self._next_at = self._loop.time() + SAMPLE_INTERVAL_S
        """Event-loop time of the next sample."""
        self._timer = self._loop.call_at(self._next_at, self._sample)
        self._find_leader = find_leader
        """Returns the pipeline of the namespace while this server leads, else None."""

    def set_slow_wait(self, slow_wait_ms: float) -> None:
        """Set the wait (ms) after which a request is logged. 0 disables the log of slow waits."""
        self._slow_wait_ms = slow_wait_ms
        self._stats.tracks_recent_waiters = slow_wait_ms > 0
        if not slow_wait_ms:
            self._stats.recent_waiters.clear()

    def stop(self) -> None:
        """Cancel the timer."""
        self._timer.cancel()

    def _sample(self) -> None:
        """Record the event-loop lag, sample the statistics, write the log, and set the timer again."""
        now = self._loop.time()
        self._stats.lag.add((now - self._next_at) * 1000)
        self._stats.sample(now * 1000)
        pipeline = self._find_leader()
        if pipeline is not None:
            self._log_slow_waits(pipeline, now)
        self._log_deadlocks(now)
        self._log_inversions()
        self._next_at = max(now, self._next_at + SAMPLE_INTERVAL_S)
        self._timer = self._loop.call_at(self._next_at, self._sample)

    def _log_slow_waits(self, pipeline: Pipeline, loop_now: float) -> None:
        """Log each request that has waited for `slow_wait_ms`, once. `loop_now` is the event-loop time in seconds.

        Reads at most `MAX_READ_WAITERS` requests, and leaves the others to the next sample. The requests are in order of
        arrival, so the search ends at the first request that has waited for less time.
        """
        recent, now = self._stats.recent_waiters, pipeline.now
        first = islice(recent.values(), MAX_READ_WAITERS)
        slow = list(takewhile(lambda request: request.since <= now - self._slow_wait_ms, first))
        for request in slow:
            del recent[request.id]
        fields = (_slow_wait_fields(pipeline, request, now) for request in slow)
        for permitted in self._slow_wait_limit.permitted(loop_now, fields, len(slow)):
            self._log.warning("slow wait detected", **permitted)
        if omitted := self._slow_wait_limit.take_omitted():
            self._log.warning("slow wait log entries omitted", count=omitted, max_lines_per_sample=MAX_LOGGED_EVENTS)

    def _log_deadlocks(self, loop_now: float) -> None:
        """Log the deadlocks since the last sample."""
        deadlocks, count = self._stats.take_unreported_deadlocks()
        for permitted in self._deadlock_limit.permitted(loop_now, map(_deadlock_fields, deadlocks), count):
            self._log.warning("deadlock detected", **permitted)
        if omitted := self._deadlock_limit.take_omitted():
            self._log.warning("deadlock log entries omitted", count=omitted, max_lines_per_sample=MAX_LOGGED_EVENTS)

    def _log_inversions(self) -> None:
        """Log each new inversion of the lock order. `MAX_INVERSIONS` limits their number."""
        if self._lock_order is None:
            return
        for inversion in self._lock_order.inversions.take_unreported():
            fields = {
                "kind": inversion.kind.value,
                "classes": inversion.classes,
                "offender": inversion.offender,
                "edges": [_edge_fields(edge) for edge in inversion.edges],
            }
            self._log.warning("lock order inversion detected", **_shorten(fields))


def _shorten(value: Any) -> Any:
    """Return a value of the log with its texts cut to `MAX_LOGGED_CHARACTERS`, also inside lists and dicts."""
    if isinstance(value, str):
        return value if len(value) <= MAX_LOGGED_CHARACTERS else f"{value[: MAX_LOGGED_CHARACTERS - 1]}…"
    if isinstance(value, dict):
        return {name: _shorten(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten(each) for each in value]
    return value


def _edge_fields(edge: Edge) -> dict[str, Any]:
    """Return the log fields of one direction of an inversion: the first request that took the locks in this order."""
    example, context = edge.example, edge.example.context
    return {
        "held": f"{edge.held_mode}:{example.held}",
        "asked": f"{edge.asked_mode}:{example.asked}",
        "id": example.id,
        "transaction": example.transaction,
        **({} if context.principal is None else {"principal": context.principal}),
        **({} if context.note is None else {"note": context.note}),
        "at_unix_ms": round(example.at_unix_ms),
    }


def _slow_wait_fields(pipeline: Pipeline, request: Request, now: float) -> dict[str, Any]:
    """Return the log fields of a slow wait: the request, its first resources and its first blockers."""
    blockers, total, _ = sample_blockers(pipeline.manager.table, request, MAX_COUNTED_BLOCKERS, count=True)
    locks = islice(request.modes(), MAX_LOGGED_RESOURCES)
    return {
        "id": request.id,
        "transaction": request.transaction,
        **_context_fields(shown_context(request)),
        "waited_ms": round(now - request.since),
        "resources": [request.lock_text(name, mode) for name, mode in locks],
        "resources_total": request.name_count(),
        "blockers": [_blocker_fields(blocker) for blocker in blockers],
        "blockers_total": total,
    }


def _blocker_fields(blocker: Blocker) -> dict[str, Any]:
    """Return the log fields of one blocker of a slow wait."""
    return {
        "id": blocker.id,
        "transaction": blocker.transaction,
        "resource": blocker.lock,
        "state": "held" if blocker.held else "queued",
        "since_unix_ms": blocker.since_unix_ms,
        **_context_fields(blocker.context),
    }


def _deadlock_fields(deadlock: Deadlock) -> dict[str, Any]:
    """Return the log fields of a deadlock: the victim and the cycle, limited in length."""
    waits = deadlock.cycle.waits
    return {
        "id": deadlock.id,
        "transaction": deadlock.transaction,
        "cycle": deadlock.cycle.owners[:MAX_LOGGED_STEPS],
        "waits": [_step_fields(wait) for wait in waits[:MAX_LOGGED_STEPS]],
        "steps": len(waits),
    }


def _step_fields(wait: Wait) -> dict[str, Any]:
    """Return the log fields of one step of a deadlock's cycle."""
    return {
        "waiter": wait.waiter,
        "resource": wait.resource,
        "holder": wait.holder,
        **_context_fields(wait.context),
    }


def _context_fields(context: Context) -> dict[str, str]:
    """Return the log fields of the context of a request: its note and its trace."""
    fields = {"note": context.note, "traceparent": context.traceparent}
    return {name: value for name, value in fields.items() if value is not None}
