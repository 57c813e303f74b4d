"""What is counted for each way in which a request can go."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from genie.core import Disconnect, Event, Expire, Locked, LockManager, Queued, Release, Released, Request
from genie.core.commands import Command, Take
from genie.observability.stats import MAX_DEADLOCKS, Stats, most_contended
from genie.protocol.commands import read, without_namespace


class CountedLockManager:
    """A lock manager whose events are recorded in the statistics, as in the server."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.stats = Stats()

    def step(self, command: Command, now: float = 0.0) -> list[Event]:
        events = self.manager.step(command, now)
        for event in events:
            if isinstance(event, Queued):
                self.stats.record_queued(event.request, self.manager.table)
            elif isinstance(event, Locked):
                self.stats.record_granted(event)
            elif isinstance(event, Released):
                self.stats.record_ended(event, now)
        return events

    def request(self, *exclusive: str, now: float = 0.0, **settings: object) -> Request:
        request = Request(exclusive=exclusive, **settings)  # type: ignore[arg-type]
        self.step(request, now)
        return request


@pytest.fixture
def counted() -> CountedLockManager:
    return CountedLockManager()


def test_a_grant_after_a_wait_is_counted(counted: CountedLockManager) -> None:
    holder, _ = counted.request("a"), counted.request("a")
    counted.step(Release(holder.id), 30)
    stats = counted.stats
    assert (stats.queued, stats.waited, stats.waits.count, stats.waits.total) == (1, 1, 1, 30)
    assert (stats.holds.count, stats.holds.total) == (1, 30)
    assert not stats.not_granted
    assert not stats.lost_holds
    (name, entry), *_ = most_contended(stats.contention.entries(), 5)
    assert (name, entry.conflicts, entry.waited_ms) == ("a", 1, 30)


def test_only_blocked_resources_are_contended(counted: CountedLockManager) -> None:
    holder = counted.request("b")
    counted.request("a", "b", "c")
    counted.step(Release(holder.id), 7)
    assert [(name, entry.waited_ms) for name, entry in most_contended(counted.stats.contention.entries(), 5)] == [
        ("b", 7)
    ]
    assert not counted.stats._blocked_resources


@pytest.mark.parametrize(
    ("held", "asked", "contended"),
    [
        (["2/3:pool"], ["2/3:pool"], "pool"),
        (["2/3:pool"], ["exclusive:a", "2/3:pool"], "pool"),
        (["2/3:pool"], ["shared:a", "2/3:pool"], "pool"),
        (["exclusive:x/**"], ["exclusive:x/1"], "x/1"),
        (["exclusive:x/**"], ["exclusive:x/1", "1/3:pool"], "x/**"),
        (["shared:x/1"], ["exclusive:x/**"], "x/**"),
    ],
)
def test_waits_for_units_and_subtrees_are_counted_by_resource(
    counted: CountedLockManager, held: list[str], asked: list[str], contended: str
) -> None:
    holder, waiter = (without_namespace(read(requests_line(each))) for each in (held, asked))
    assert isinstance(holder, Request)
    assert isinstance(waiter, Request)
    counted.step(holder)
    counted.step(waiter)
    counted.step(Release(holder.id), 7)
    entries = most_contended(counted.stats.contention.entries(), 5)
    assert [(name, entry.conflicts, entry.waited_ms) for name, entry in entries] == [(contended, 1, 7)]
    assert not counted.stats._blocked_resources


def requests_line(resources: list[str]) -> bytes:
    return json.dumps({"command": "request", "payload": {"resources": resources}}).encode()


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda waiter: Release(waiter.id), "cancelled"),
        (lambda waiter: Disconnect([waiter]), "disconnected"),
        (lambda _: Expire(), "queue-timeout"),
    ],
)
def test_a_wait_without_a_grant_is_counted_by_its_reason(
    counted: CountedLockManager, end: Callable[[Request], Command], outcome: str
) -> None:
    counted.stats.tracks_recent_waiters = True
    counted.request("a", transaction_timeout_ms=1_000)
    waiter = counted.request("a", queue_timeout_ms=20)
    assert list(counted.stats.recent_waiters) == [waiter.id]
    counted.step(end(waiter), 20)
    stats = counted.stats
    assert not stats.recent_waiters
    assert stats.outcomes == dict.fromkeys(stats.outcomes, 0) | {outcome: 1}
    assert stats.waits.count == 0
    assert stats.holds.count == 0
    (_, entry), *_ = most_contended(stats.contention.entries(), 5)
    assert (entry.conflicts, entry.waited_ms) == (1, 20)


def test_a_request_without_a_wait_counts_as_a_conflict(counted: CountedLockManager) -> None:
    counted.request("a", transaction_timeout_ms=1_000)
    counted.request("a", "b", queue_timeout_ms=0)
    assert counted.stats.outcomes["queue-timeout"] == 1
    assert [
        (name, entry.conflicts, entry.waited_ms)
        for name, entry in most_contended(counted.stats.contention.entries(), 5)
    ] == [("a", 1, 0)]
    assert not counted.stats.recent_waiters


def test_a_take_without_available_resources_is_counted_as_insufficient(counted: CountedLockManager) -> None:
    counted.request("a")
    counted.step(Take(Request(), [("a", True)], [1], 1))
    assert counted.stats.outcomes["insufficient"] == 1


def test_a_lock_that_times_out_is_counted_as_lost(counted: CountedLockManager) -> None:
    counted.request("a", transaction_timeout_ms=40)
    counted.step(Expire(), 40)
    assert {reason.value: count for reason, count in counted.stats.lost_holds.items()} == {"transaction-timeout": 1}
    assert (counted.stats.holds.count, counted.stats.holds.total) == (1, 40)
    assert not counted.stats.not_granted


def test_a_lock_that_ends_with_its_connection_is_counted_as_lost(counted: CountedLockManager) -> None:
    counted.step(Disconnect([counted.request("a", release_on_disconnect=True)]), 5)
    assert {reason.value: count for reason, count in counted.stats.lost_holds.items()} == {"disconnected": 1}


def create_deadlock(counted: CountedLockManager, length: int, number: int = 0) -> None:
    for index in range(length):
        counted.request(f"{number}/{index}", transaction=f"{number}-{index}")
    for index in range(length):
        counted.request(f"{number}/{(index + 1) % length}", transaction=f"{number}-{index}")


def test_a_deadlock_is_recorded_and_reported_once(counted: CountedLockManager) -> None:
    create_deadlock(counted, 3)
    stats = counted.stats
    assert (stats.deadlocked, stats.outcomes["deadlock"]) == (1, 1)
    (recorded,) = stats.deadlocks
    assert recorded.transaction == "0-2"
    assert recorded.cycle.owners == ("0-2", "0-0", "0-1")
    assert stats.take_unreported_deadlocks() == ([recorded], 1)
    assert stats.take_unreported_deadlocks() == ([], 0)


def test_all_deadlocks_are_counted_and_the_recent_ones_recorded(
    counted: CountedLockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(MAX_DEADLOCKS + 5):
        create_deadlock(counted, 2, number)
    assert counted.stats.deadlocked == MAX_DEADLOCKS + 5
    assert len(counted.stats.deadlocks) == MAX_DEADLOCKS
    assert counted.stats.deadlocks[0].transaction == "5-1"
    monkeypatch.setattr("genie.observability.stats.MAX_DEADLOCK_STEPS", 50)
    create_deadlock(counted, 30, 1_000)
    create_deadlock(counted, 30, 1_001)
    assert [len(recorded.cycle.waits) for recorded in counted.stats.deadlocks] == [30]
    recorded, count = counted.stats.take_unreported_deadlocks()
    assert (len(recorded), count) == (1, MAX_DEADLOCKS + 7)


def test_a_rate_sample_is_taken_each_second(counted: CountedLockManager) -> None:
    stats = counted.stats
    stats.sample(1_000)
    holder = counted.request("a")
    counted.request("a")
    counted.step(Release(holder.id), 30)
    stats.granted += 1
    stats.errors["bad-json"] += 4
    stats.sample(1_900)
    assert stats.rate_window.rates().grants == 0, "less than a second has passed"
    stats.sample(3_000)
    rates = stats.rate_window.rates()
    assert (rates.grants, rates.releases, rates.waits, rates.errors) == (1, 0.5, 0.5, 2)
    assert stats.rate_window.wait_quantile(1.0) == 50
