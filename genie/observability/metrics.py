"""Prometheus metrics, computed from the counters at each scrape.

No label names a resource or a transaction, so the number of time series is bounded.
"""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from genie.config import Settings
from genie.core import LockManager, Reason
from genie.core.lock_order.analysis import LockOrder
from genie.errors import Code
from genie.observability import roles
from genie.observability.histogram import Histogram
from genie.observability.stats import Stats
from genie.version import VERSION

MS: Final = 1_000
"""Milliseconds in a second."""
NAMESPACE: Final = "namespace"
"""Label of all metrics that exist once per namespace."""
_START_TIME_S: Final = time.time()
"""Start time of the process (Unix time)."""
_STATM = Path("/proc/self/statm")
"""A file of Linux with the memory of this process in pages. The second number is the resident memory."""
PAGE_BYTES: Final = resource.getpagesize()
LOST_REASONS: Final = (Reason.TRANSACTION_TIMEOUT, Reason.DISCONNECTED)
"""Reasons for which a held lock ends without a release."""


class HistoryView(Protocol):
    """The part of a history's recording that the metrics and the admin port read."""

    directory: Path
    """The directory with the files of the namespace."""

    @property
    def dropped(self) -> int:
        """Number of writes that were dropped because of the disk. Each write contains many events."""


class NamespaceView(roles.NamespaceView, Protocol):
    """The part of a namespace that the metrics read."""

    @property
    def stats(self) -> Stats:
        """The counters of the namespace."""

    @property
    def role(self) -> str:
        """The name of `state`: `starting`, `waiting`, `follower`, `unavailable`, `leader` or `stopping`."""

    @property
    def store_memory(self) -> StoreMemoryView | None:
        """The memory of the store. None on a follower, or if the store does not report it."""

    @property
    def store_errors(self) -> int:
        """Store failures and timeouts."""

    @property
    def manager(self) -> LockManager | None:
        """The lock manager of a leader. None on a follower."""

    @property
    def last_manager(self) -> LockManager | None:
        """The lock manager of a leader, or of a former leader until the next leader is known. None on other servers."""

    @property
    def locks_age_s(self) -> float | None:
        """How old the state of `last_manager` is, in seconds: 0 on the leader. None without such a state."""

    @property
    def lock_order(self) -> LockOrder | None:
        """The lock order that this server has observed. None if the analysis is off."""

    @property
    def history(self) -> HistoryView | None:
        """The recording of the history. None if the history is off."""

    @property
    def now(self) -> float:
        """The lock manager's time (ms). Only valid with a `last_manager`."""

    @property
    def sessions(self) -> int:
        """Number of sessions, with and without a connection."""

    @property
    def state_bytes(self) -> int:
        """The size of the state, which the setting `max_state` limits. 0 on a follower."""


class StoreMemoryView(Protocol):
    """The memory of a store."""

    @property
    def used(self) -> int:
        """The memory that the store uses, in bytes."""

    @property
    def limit(self) -> int:
        """The store rejects new requests while it uses more bytes than this. 0 if there is no limit."""


class ServerView(Protocol):
    """The part of a server that the metrics read."""

    settings: Settings

    @property
    def namespaces(self) -> Mapping[str, NamespaceView]:
        """The namespaces of the server by name. The first is the default namespace."""

    @property
    def stats(self) -> Stats:
        """Counters of the default namespace, which include failed authentications and the event-loop lag."""

    @property
    def certificate_expiry(self) -> float | None:
        """Unix time at which the server's certificate expires. None without TLS."""

    @property
    def connections(self) -> Sized:
        """Open connections."""

    @property
    def unread_output(self) -> UnreadOutputView:
        """The output that clients have not read."""


class UnreadOutputView(Protocol):
    """The part of the server's `UnreadOutput` that the metrics read."""

    @property
    def bytes(self) -> int:
        """Bytes that slow consumers have not read."""

    @property
    def closed(self) -> int:
        """Number of slow consumers whose connections were closed."""


class Metrics(Collector):
    """Collects the metrics of a server. The number of samples per namespace is constant."""

    def __init__(self, server: ServerView) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. The parts of a metric, one for each namespace, are merged."""
        for _name, parts in groupby(self.parts(), lambda part: part.name):
            metric, *further_parts = parts
            for part in further_parts:
                metric.samples += part.samples
            yield metric

    def parts(self) -> Iterator[Metric]:
        """Yield each metric in parts, one for each namespace.

        The parts are small, so that the caller can let the event loop run between two parts.
        """
        max_state = self._server.settings.limits.max_state
        sources = {
            name: _Source(view, view.stats, _sample_lock_table(view), max_state)
            for name, view in self._server.namespaces.items()
        }
        for make_metric in METRICS:
            for namespace, source in sources.items():
                metric = make_metric(namespace, source)
                if metric is not None:
                    yield metric
        yield from self._server_metrics()
        yield from _process_metrics()

    def _server_metrics(self) -> Iterator[Metric]:
        """Yield the metrics of the whole server: connections, event-loop lag, version."""
        server = self._server
        yield GaugeMetricFamily("genie_connections", "Open connections.", len(server.connections))
        yield GaugeMetricFamily(
            "genie_connections_limit", "Maximum number of open connections.", server.settings.limits.max_connections
        )
        yield GaugeMetricFamily(
            "genie_unread_bytes",
            "Bytes that slow consumers have not read, and of their commands.",
            server.unread_output.bytes,
        )
        yield CounterMetricFamily(
            "genie_slow_consumers", "Connections closed because their clients do not read.", server.unread_output.closed
        )
        yield HistogramMetricFamily(
            "genie_loop_lag_seconds", "Event-loop lag: how late timers ran.", *_cumulative_buckets(server.stats.lag, MS)
        )
        expiry = GaugeMetricFamily(
            "genie_certificate_expiry_timestamp_seconds", "Unix time at which the server's certificate expires."
        )
        if server.certificate_expiry is not None:
            expiry.add_metric([], server.certificate_expiry)
        yield expiry
        build = {"version": VERSION, "python": platform.python_version()}
        yield InfoMetricFamily("genie_build", "Version of the server and of Python.", build)


@dataclass(slots=True, frozen=True)
class _TableSample:
    """Sizes of a lock table at one time, so that the metrics of one scrape are consistent."""

    waiting: int
    longest_wait_s: float
    held: int
    locks: int
    rearrangements: int


def _sample_lock_table(namespace: NamespaceView) -> _TableSample:
    """Return the sizes of the last known lock table of a namespace, which are 0 on a follower.

    Rearrangements are counted since the start of the process, over all epochs as leader.
    """
    rearrangements = namespace.stats.rearrangements
    if namespace.manager is not None:  # the statistics lack only those of the current epoch
        rearrangements += namespace.manager.rearrangements
    manager = namespace.last_manager
    if manager is None:
        return _TableSample(waiting=0, longest_wait_s=0.0, held=0, locks=0, rearrangements=rearrangements)
    table = manager.table
    oldest = next(iter(table.waiting.values()), None)  # `waiting` is in order of arrival
    longest_wait_s = 0.0 if oldest is None else max(0.0, namespace.now - oldest.since) / MS
    return _TableSample(
        waiting=len(table.waiting),
        longest_wait_s=longest_wait_s,
        held=len(table.held),
        locks=table.locks,
        rearrangements=rearrangements,
    )


def _process_metrics() -> Iterator[Metric]:
    """Yield the start time, the CPU time and, on Linux, the resident memory of this process."""
    yield GaugeMetricFamily("process_start_time_seconds", "Start time of the process (unix time).", _START_TIME_S)
    yield CounterMetricFamily("process_cpu_seconds", "CPU time of the process.", time.process_time())
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])  # the second number is the resident pages
        yield GaugeMetricFamily("process_resident_memory_bytes", "Resident memory of the process.", pages * PAGE_BYTES)


# -- The metrics of each namespace --------


class _Source(NamedTuple):
    """The objects from which the metrics of a namespace are read."""

    view: NamespaceView
    stats: Stats
    table: _TableSample
    max_state: int


MakeMetric = Callable[[str, _Source], Metric | None]
"""A factory of a metric, called with the name of a namespace and its data. Returns None if the namespace lacks the
metric."""
Read = Callable[[_Source], float | None]
"""Reads the value of a metric. Returns None if the namespace lacks the metric."""


def _value(kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help_text: str, read: Read) -> MakeMetric:
    """Return a factory of a gauge or counter."""

    def make(namespace: str, source: _Source) -> Metric | None:
        value = read(source)
        if value is None:
            return None
        family = kind(name, help_text, labels=[NAMESPACE])
        family.add_metric([namespace], value)
        return family

    return make


_gauge = partial(_value, GaugeMetricFamily)
_counter = partial(_value, CounterMetricFamily)


def _labelled_counter(name: str, help_text: str, label: str, read: Callable[[Stats], Mapping[str, int]]) -> MakeMetric:
    """Return a factory of a counter with two labels, the namespace and `label`.

    `read` returns the count for each label value.
    """

    def make(namespace: str, source: _Source) -> Metric:
        family = CounterMetricFamily(name, help_text, labels=[NAMESPACE, label])
        for key, count in read(source.stats).items():
            family.add_metric([namespace, key], count)
        return family

    return make


def _histogram(name: str, help_text: str, read: Callable[[Stats], Histogram], unit: float = MS) -> MakeMetric:
    """Return a factory of a histogram whose values are divided by `unit`. By default, ms become seconds."""

    def make(namespace: str, source: _Source) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=[NAMESPACE])
        family.add_metric([namespace], *_cumulative_buckets(read(source.stats), unit))
        return family

    return make


METRICS: Final[tuple[MakeMetric, ...]] = (
    _labelled_counter(
        "genie_requests",
        "Requests by outcome: granted immediately, granted after a wait, or the reason without a grant.",
        "outcome",
        lambda stats: stats.outcomes,
    ),
    _histogram(
        "genie_wait_seconds", "Wait time of requests that were granted after a wait.", lambda stats: stats.waits
    ),
    _histogram("genie_hold_seconds", "Hold time of locks.", lambda stats: stats.holds),
    _labelled_counter(
        "genie_holds_lost",
        "Holds that ended other than by a release, by reason.",
        "reason",
        lambda stats: {reason.value: stats.lost_holds[reason] for reason in LOST_REASONS},
    ),
    _counter(
        "genie_deadlocks",
        "Requests that were ended because they would have created a deadlock.",
        lambda source: source.stats.deadlocked,
    ),
    _labelled_counter(
        "genie_errors",
        "Rejected commands, by error code.",
        "code",
        lambda stats: {code.value: stats.errors[code] for code in Code},
    ),
    _counter(
        "genie_session_takeovers",
        "Connections that were closed because a newer connection has resumed their session.",
        lambda source: source.stats.session_takeovers,
    ),
    _counter(
        "genie_lagged_watchers",
        "Connections whose watches ended with lagged, because too many events waited for them.",
        lambda source: source.stats.lagged_watchers,
    ),
    _histogram("genie_commit_seconds", "Commit latency of the store.", lambda stats: stats.commits),
    _histogram("genie_commit_changes", "Changes per commit.", lambda stats: stats.batch_sizes, unit=1),
    _gauge("genie_queue_length", "Waiting requests.", lambda source: source.table.waiting),
    _gauge(
        "genie_longest_wait_seconds",
        "Time that the oldest waiting request has waited.",
        lambda source: source.table.longest_wait_s,
    ),
    _gauge(
        "genie_locks_age_seconds",
        "Age of the gauges of locks, waiting requests and sessions: 0 on the leader.",
        lambda source: source.view.locks_age_s,
    ),
    _gauge("genie_held_requests", "Held requests.", lambda source: source.table.held),
    _gauge(
        "genie_held_locks",
        "Held locks: a shared resource counts once for each holder.",
        lambda source: source.table.locks,
    ),
    _counter(
        "genie_queue_rearrangements",
        "Wait queues that were rearranged to avoid a deadlock.",
        lambda source: source.table.rearrangements,
    ),
    _counter(
        "genie_lock_order_inversions",
        "Orders of locks that can deadlock, once for each kind of transaction that was seen to complete one.",
        lambda source: None if source.view.lock_order is None else source.view.lock_order.inversions.count,
    ),
    _counter(
        "genie_lock_order_dropped",
        "Requests whose lock order was not analysed completely, because of a limit.",
        lambda source: None if source.view.lock_order is None else source.view.lock_order.dropped,
    ),
    _counter(
        "genie_history_dropped_writes",
        "Writes to the history, each with many events, that were dropped: the disk or archiver is too slow or failed, or the history full.",
        lambda source: None if source.view.history is None else source.view.history.dropped,
    ),
    _counter("genie_store_errors", "Store failures and timeouts.", lambda source: source.view.store_errors),
    _gauge(
        "genie_store_available",
        "1 if the store answers, as far as the server currently depends on it.",
        lambda source: source.view.store_available,
    ),
    _gauge(
        "genie_store_full",
        "1 if the store is out of memory: the leader accepts releases, and rejects requests.",
        lambda source: source.view.store_full,
    ),
    _gauge(
        "genie_store_memory_bytes",
        "Memory that Redis uses, as the leader last read it.",
        lambda source: None if (memory := source.view.store_memory) is None else memory.used,
    ),
    _gauge(
        "genie_store_memory_limit_bytes",
        "The maxmemory of Redis; missing if Redis has no limit.",
        lambda source: None if (memory := source.view.store_memory) is None else memory.limit or None,
    ),
    _gauge("genie_leader", "1 if this server leads the namespace.", lambda source: source.view.role == "leader"),
    _gauge("genie_sessions", "Sessions, with and without a connection.", lambda source: source.view.sessions),
    _gauge(
        "genie_state_bytes",
        "Bytes of locks, waiting requests, sessions and watches.",
        lambda source: source.view.state_bytes,
    ),
    _gauge(
        "genie_state_limit_bytes",
        "At which size of the state new requests are rejected.",
        lambda source: source.max_state,
    ),
)
"""The metrics of each namespace, in the order in which a scrape has them."""


def _cumulative_buckets(histogram: Histogram, unit: float) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram as Prometheus expects them, and the sum of all values.

    A bucket is a pair: its upper bound as text, and the number of all values up to this bound. Bounds and sum are
    divided by `unit`.
    """
    buckets: list[tuple[str, float]] = []
    cumulative = 0
    for bound, count in zip([*histogram.bounds, inf], histogram.counts, strict=True):
        cumulative += count
        buckets.append(("+Inf" if bound == inf else str(bound / unit), cumulative))
    return buckets, histogram.total / unit
