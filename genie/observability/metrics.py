"""What Prometheus is told: made from the plain counters each time it asks. Never a label by resource or transaction."""

from __future__ import annotations

import platform
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from math import inf
from pathlib import Path
from typing import Final, Protocol, TypeAlias, TypeVar

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

T = TypeVar("T")
Each: TypeAlias = Iterable[tuple[str, T]]
"""Something of each namespace, by its name, looked up when it is its turn."""

MS: Final = 1_000
NAMESPACE: Final = "namespace"
"""The label of what is of a namespace."""
_BEGAN_S: Final = time.time()
_STATM = Path("/proc/self/statm")
PAGE_BYTES: Final = resource.getpagesize()
LOST: Final = (Reason.TRANSACTION_TIMEOUT, Reason.DISCONNECTED)
"""Why holds end otherwise than by release."""


class NamespaceView(Protocol):
    """One namespace in a server, as far as its metrics are concerned."""

    @property
    def stats(self) -> Stats:
        """What is counted of it."""

    @property
    def role(self) -> str:
        """`starting` (nobody is known to lead), `leader`, `follower` or `stopping`."""

    @property
    def store_available(self) -> bool:
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


class Source(Protocol):
    """A server, as far as its metrics are concerned."""

    settings: Settings

    @property
    def namespaces(self) -> Mapping[str, NamespaceView]:
        """Its namespaces, in order: the first is that of who says none."""

    @property
    def stats(self) -> Stats:
        """Those of the first namespace, with what is counted of strangers and of the event loop."""

    @property
    def connections(self) -> Sized:
        """Those that are open."""


class Metrics(Collector):
    """Reads a server when it is asked. A constant number of samples for each namespace, whatever the server holds."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """All of it, as it is now."""
        for _, parts in groupby(self.parts(), lambda part: part.name):
            family, *others = parts
            for other in others:
                family.samples += other.samples
            yield family

    def parts(self) -> Iterator[Metric]:
        """The same for who has not the time for all: what is of each namespace by itself, metric by metric."""
        namespaces = self._source.namespaces
        yield from _requests({namespace: view.stats for namespace, view in namespaces.items()})
        yield from _tables(namespaces)
        yield from _store(namespaces)
        yield from _roles(namespaces)
        yield from self._server()
        yield from _process()

    def _server(self) -> Iterator[Metric]:
        source = self._source
        yield GaugeMetricFamily("genie_connections", "Connections that are open.", len(source.connections))
        yield GaugeMetricFamily(
            "genie_connections_limit", "Connections that may be open.", source.settings.limits.max_connections
        )
        yield HistogramMetricFamily(
            "genie_loop_lag_seconds",
            "How late the event loop came to what it had to do.",
            *_buckets(source.stats.lag, MS),
        )
        about = {"version": version("genie-lock"), "python": platform.python_version()}
        yield InfoMetricFamily("genie_build", "What runs here.", about)


def _requests(stats: Mapping[str, Stats]) -> Iterator[Metric]:
    def each(of: Callable[[Stats], T]) -> Each[T]:
        return ((namespace, of(counted)) for namespace, counted in stats.items())

    yield from _counters(
        "genie_requests",
        "Requests that were granted or ended without, by how they went.",
        "outcome",
        each(lambda counted: counted.outcomes),
    )
    yield from _histogram(
        "genie_wait_seconds", "How long those waited that were granted later.", each(lambda counted: counted.waits)
    )
    yield from _histogram("genie_hold_seconds", "How long holds lasted.", each(lambda counted: counted.holds))
    yield from _counters(
        "genie_holds_lost",
        "Holds that ended otherwise than by release, by reason.",
        "reason",
        each(lambda counted: {reason.value: counted.ended[reason] for reason in LOST}),
    )
    yield from _counter(
        "genie_deadlocks", "Requests that would have closed a cycle.", each(lambda counted: counted.deadlocked)
    )
    yield from _counters(
        "genie_errors",
        "Commands that were refused, by code.",
        "code",
        each(lambda counted: {code.value: counted.errors[code] for code in Code}),
    )
    yield from _histogram(
        "genie_commit_seconds", "How long commits to the store took.", each(lambda counted: counted.commits)
    )
    yield from _histogram("genie_commit_changes", "Changes in one commit.", each(lambda counted: counted.sizes), unit=1)


@dataclass(slots=True, frozen=True)
class _Table:
    """What stands in the tables of a namespace at one moment. (Between two metrics the locks go on changing.)"""

    waiting: int
    longest_s: float
    held: int
    locks: int
    reorderings: int


def _look(view: NamespaceView) -> _Table:
    manager, before = view.manager, view.stats.reorderings
    if manager is None:
        return _Table(0, 0.0, 0, 0, before)
    table = manager.table
    first = next(iter(table.waiting.values()), None)
    longest_s = 0.0 if first is None else max(0.0, view.now - first.since) / MS
    return _Table(len(table.waiting), longest_s, len(table.held), table.locks, before + manager.rearrangements)


def _tables(namespaces: Mapping[str, NamespaceView]) -> Iterator[Metric]:
    found = {namespace: _look(view) for namespace, view in namespaces.items()}

    def each(of: Callable[[_Table], float]) -> Each[float]:
        return ((namespace, of(table)) for namespace, table in found.items())

    yield from _gauge("genie_queue_length", "Requests that wait.", each(lambda table: table.waiting))
    yield from _gauge(
        "genie_longest_wait_seconds", "How long the one waits that came first.", each(lambda table: table.longest_s)
    )
    yield from _gauge("genie_held_requests", "Requests that are held.", each(lambda table: table.held))
    yield from _gauge(
        "genie_held_locks", "Resources that are held, each as often as it is.", each(lambda table: table.locks)
    )
    yield from _counter(
        "genie_reorderings",
        "Lines that were reordered to avoid a deadlock.",
        each(lambda table: table.reorderings),
    )


def _store(namespaces: Mapping[str, NamespaceView]) -> Iterator[Metric]:
    yield from _counter(
        "genie_store_errors",
        "How often the store failed or took too long.",
        ((namespace, view.store_errors) for namespace, view in namespaces.items()),
    )
    yield from _gauge(
        "genie_store_reached",
        "1 where the store answers, as far as it is needed now.",
        ((namespace, view.store_available) for namespace, view in namespaces.items()),
    )


def _roles(namespaces: Mapping[str, NamespaceView]) -> Iterator[Metric]:
    leads = ((namespace, view.role == "leader") for namespace, view in namespaces.items())
    yield from _gauge("genie_leader", "1 where this server leads the namespace.", leads)
    sessions = ((namespace, view.sessions) for namespace, view in namespaces.items())
    yield from _gauge("genie_sessions", "Sessions, with and without a connection.", sessions)


def _process() -> Iterator[Metric]:
    yield GaugeMetricFamily("process_start_time_seconds", "When this process began (unix time).", _BEGAN_S)
    yield CounterMetricFamily("process_cpu_seconds", "Processor time that it took.", time.process_time())
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[1])
        yield GaugeMetricFamily("process_resident_memory_bytes", "Memory that it has.", pages * PAGE_BYTES)


def _gauge(name: str, text: str, values: Each[float]) -> Iterator[Metric]:
    for namespace, value in values:
        family = GaugeMetricFamily(name, text, labels=[NAMESPACE])
        family.add_metric([namespace], value)
        yield family


def _counter(name: str, text: str, values: Each[float]) -> Iterator[Metric]:
    for namespace, value in values:
        family = CounterMetricFamily(name, text, labels=[NAMESPACE])
        family.add_metric([namespace], value)
        yield family


def _counters(name: str, text: str, label: str, values: Each[Mapping[str, int]]) -> Iterator[Metric]:
    for namespace, counts in values:
        family = CounterMetricFamily(name, text, labels=[NAMESPACE, label])
        for key, count in counts.items():
            family.add_metric([namespace, key], count)
        yield family


def _histogram(name: str, text: str, histograms: Each[Histogram], unit: float = MS) -> Iterator[Metric]:
    for namespace, histogram in histograms:
        family = HistogramMetricFamily(name, text, labels=[NAMESPACE])
        family.add_metric([namespace], *_buckets(histogram, unit))
        yield family


def _buckets(histogram: Histogram, unit: float) -> tuple[list[tuple[str, float]], float]:
    """Its buckets and its sum, divided by `unit`: those in ms are told in seconds."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip([*histogram.bounds, inf], histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == inf else str(bound / unit), below))
    return buckets, histogram.total / unit
