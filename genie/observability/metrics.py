"""What Prometheus is told: made from the plain counters each time it asks. Never a label by resource or transaction."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Iterator, Mapping, Sized
from importlib.metadata import version
from math import inf
from pathlib import Path
from typing import Final, Protocol

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
from genie.errors import Code
from genie.observability.histogram import Histogram
from genie.observability.stats import Stats

MS: Final = 1_000
_BEGAN_S: Final = time.time()
_STATM = Path("/proc/self/statm")
PAGE_BYTES: Final = resource.getpagesize()
LOST: Final = (Reason.TRANSACTION_TIMEOUT, Reason.DISCONNECTED)
"""Why holds end otherwise than by release."""


class Source(Protocol):
    """A server, as far as its metrics are concerned."""

    settings: Settings
    stats: Stats

    @property
    def connections(self) -> Sized:
        """Those that are open."""

    @property
    def role(self) -> str:
        """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""

    @property
    def reaches_store(self) -> bool:
        """Whether the store answers, as far as this server needs it now."""

    @property
    def store_errors(self) -> int:
        """How often the store could not be reached, or took longer than it may."""

    @property
    def manager(self) -> LockManager | None:
        """All locks and lines, while this server leads."""

    @property
    def now(self) -> float:
        """The time of the lock manager (ms). Only while this server leads."""

    @property
    def sessions(self) -> int:
        """Sessions, with and without a connection."""


class Metrics(Collector):
    """Reads a server when it is asked. A constant number of samples, whatever the server holds."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """All of it, as it is now."""
        yield from self._requests(self._source.stats)
        yield from self._tables()
        yield from self._store(self._source.stats)
        yield from self._server(self._source.stats)
        yield from _process()

    def _requests(self, stats: Stats) -> Iterator[Metric]:
        yield _counter(
            "genie_requests", "Requests that were granted or ended without, by how they went.", stats.outcomes
        )
        yield _histogram("genie_wait_seconds", "How long those waited that were granted later.", stats.waits)
        yield _histogram("genie_hold_seconds", "How long holds lasted.", stats.holds)
        lost = {reason.value: stats.ended[reason] for reason in LOST}
        yield _counter("genie_holds_lost", "Holds that ended otherwise than by release, by reason.", lost, "reason")
        yield _counter("genie_deadlocks", "Requests that would have closed a cycle.", stats.deadlocked)
        errors = {code.value: stats.errors[code] for code in Code}
        yield _counter("genie_errors", "Commands that were refused, by code.", errors, "code")

    def _tables(self) -> Iterator[Metric]:
        manager, stats = self._source.manager, self._source.stats
        held = waiting = locks = reorderings = 0
        longest_s = 0.0
        if manager is not None:
            table, reorderings = manager.table, manager.reorderings
            held, waiting, locks = len(table.held), len(table.waiting), table.locks
            first = next(iter(table.waiting.values()), None)
            longest_s = 0.0 if first is None else max(0.0, self._source.now - first.since) / MS
        yield GaugeMetricFamily("genie_queue_length", "Requests that wait.", waiting)
        yield GaugeMetricFamily("genie_longest_wait_seconds", "How long the one waits that came first.", longest_s)
        yield GaugeMetricFamily("genie_held_requests", "Requests that are held.", held)
        yield GaugeMetricFamily("genie_held_locks", "Resources that are held, each as often as it is.", locks)
        yield _counter(
            "genie_reorderings", "Lines that were reordered to avoid a deadlock.", stats.reorderings + reorderings
        )

    def _store(self, stats: Stats) -> Iterator[Metric]:
        yield _histogram("genie_commit_seconds", "How long commits to the store took.", stats.commits)
        yield _histogram("genie_commit_changes", "Changes in one commit.", stats.sizes, unit=1)
        yield _counter("genie_store_errors", "How often the store failed or took too long.", self._source.store_errors)
        yield GaugeMetricFamily(
            "genie_store_reached", "1 where the store answers, as far as it is needed now.", self._source.reaches_store
        )

    def _server(self, stats: Stats) -> Iterator[Metric]:
        source = self._source
        yield GaugeMetricFamily("genie_leader", "1 where this server leads its namespace.", source.role == "leader")
        yield GaugeMetricFamily("genie_connections", "Connections that are open.", len(source.connections))
        yield GaugeMetricFamily(
            "genie_connections_limit", "Connections that may be open.", source.settings.max_connections
        )
        yield GaugeMetricFamily("genie_sessions", "Sessions, with and without a connection.", source.sessions)
        yield _histogram("genie_loop_lag_seconds", "How late the event loop came to what it had to do.", stats.lag)
        about = {"version": version("genie-lock"), "python": platform.python_version()}
        yield InfoMetricFamily("genie_build", "What runs here.", about)


def _process() -> Iterator[Metric]:
    yield GaugeMetricFamily("process_start_time_seconds", "When this process began (unix time).", _BEGAN_S)
    yield _counter("process_cpu_seconds", "Processor time that it took.", time.process_time())
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        yield GaugeMetricFamily("process_resident_memory_bytes", "Memory that it has.", pages * PAGE_BYTES)


def _counter(name: str, text: str, value: float | Mapping[str, int], label: str = "outcome") -> Metric:
    if not isinstance(value, Mapping):
        return CounterMetricFamily(name, text, value)
    family = CounterMetricFamily(name, text, labels=[label])
    for key, count in value.items():
        family.add_metric([key], count)
    return family


def _histogram(name: str, text: str, histogram: Histogram, unit: float = MS) -> Metric:
    """Its bounds divided by `unit`: those in ms are told in seconds."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*histogram.bounds, inf], histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == inf else str(bound / unit), below))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total / unit)
