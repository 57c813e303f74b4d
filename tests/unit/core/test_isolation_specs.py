"""PostgreSQL's isolation tests of locking, restated by name (src/test/isolation/specs in its sources)."""

from __future__ import annotations

import pytest

from support.core.driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_deadlock_simple(driver: Driver) -> None:
    """Two transactions share a table and both ask for an upgrade: the second request is the victim."""
    driver.request("shared:a1", transaction="s1")
    driver.request("shared:a1", transaction="s2")
    assert driver.request("a1", transaction="s1") == [("queued", 3)]
    assert driver.request("a1", transaction="s2") == [("queued", 4), ("released", 4, "deadlock")]
    assert driver.release(2) == [("released", 2, "success"), ("locked", 3)]


@pytest.mark.parametrize("attempt", [False, True])
def test_deadlock_hard(driver: Driver, attempt: bool) -> None:
    """A cycle of eight transactions: the last request is the victim and gets the whole cycle."""
    for i in range(1, 9):
        driver.request(f"a{i}", transaction=f"s{i}")
    for i in range(1, 8):
        assert driver.request(f"a{i + 1}", transaction=f"s{i}") == [("queued", 8 + i)]
    timeout = 0 if attempt else 10_000
    assert driver.request("a1", transaction="s8", queue_timeout_ms=timeout) == [
        ("queued", 16),
        ("released", 16, "deadlock"),
    ]
    assert driver.release(8) == [("released", 8, "success"), ("locked", 15)]


def test_deadlock_soft(driver: Driver) -> None:
    """Two hard and two soft edges: no victim, one sharer overtakes another."""
    driver.request("shared:a1", transaction="d1")
    driver.request("shared:a2", transaction="d2")
    driver.request("a1", transaction="e1")
    driver.request("a2", transaction="e2")
    assert driver.request("shared:a2", transaction="d1") == [("queued", 5)]  # no cycle: d2 may still end
    assert driver.request("shared:a1", transaction="d2") == [("queued", 6), ("locked", 5)]
    assert driver.queue("a1") == [3, 6]  # the order of arrival: one of the two rearrangements is enough
    driver.release(5)
    assert driver.release(1) == [("released", 1, "success"), ("locked", 3)]
    assert driver.release(3) == [("released", 3, "success"), ("locked", 6)]
    driver.release(6)
    assert driver.release(2) == [("released", 2, "success"), ("locked", 4)]


def test_deadlock_soft_2(driver: Driver) -> None:
    """s1 must overtake both s3 and s4."""
    driver.request("a1", transaction="s1")
    driver.request("shared:a2", transaction="s2")
    driver.request("a1", transaction="s2")
    driver.request("a2", transaction="s3")
    driver.request("a2", transaction="s4")
    assert driver.request("shared:a2", transaction="s1") == [("queued", 6), ("locked", 6)]
    driver.release(1)
    driver.release(3)
    driver.release(2)
    assert driver.release(6) == [("released", 6, "success"), ("locked", 4)]
    assert driver.release(4) == [("released", 4, "success"), ("locked", 5)]


def test_multixact_no_deadlock(driver: Driver) -> None:
    """A holder gets its lock again whatever other requests wait for it."""
    driver.request("shared:row", transaction="s1")
    driver.request("row", transaction="s2")
    driver.request("shared:row", transaction="s3")
    assert driver.request("shared:row", transaction="s1") == [("queued", 4), ("locked", 4)]
    assert driver.queue("row") == [2, 3]


def test_tuplelock_upgrade_no_deadlock(driver: Driver) -> None:
    """An upgrade overtakes the requests that wait for the upgraded lock."""
    driver.request("shared:row", transaction="s1")
    driver.request("row", transaction="s2")
    driver.request("row", transaction="s3")
    assert driver.request("row", transaction="s1") == [("queued", 4), ("locked", 4)]
    driver.release(1)
    assert driver.release(4) == [("released", 4, "success"), ("locked", 2)]
    assert driver.release(2) == [("released", 2, "success"), ("locked", 3)]


def test_tuplelock_upgrade_waits_for_the_other_sharer_only(driver: Driver) -> None:
    driver.request("shared:row", transaction="s1")
    driver.request("shared:row", transaction="s3")
    driver.request("row", transaction="s2")
    assert driver.request("row", transaction="s3") == [("queued", 4)]
    assert driver.queue("row") == [4, 3]
    assert driver.release(1) == [("released", 1, "success"), ("locked", 4)]
