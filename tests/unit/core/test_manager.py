"""What the reference algorithm does not cover: ids, timers, owners, blockers, recent outcomes."""

from __future__ import annotations

import pytest

from genie import core
from genie.core import manager as manager_module
from support.core.driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()


def test_a_large_request_is_not_starved_by_small_ones_after_it(driver: Driver) -> None:
    driver.request("A")
    driver.request("A", "B", "C")
    assert driver.request("B") == [("queued", 3)]
    assert driver.request("D") == [("queued", 4), ("locked", 4)]
    assert driver.release(1) == [("released", 1, "success"), ("locked", 2)]


def test_an_owner_never_waits_for_itself(driver: Driver) -> None:
    driver.request("A", transaction="T")
    for resource in ("A", "shared:A", "A"):
        assert driver.request(resource, transaction="T")[-1][0] == "locked"
    driver.request("A", transaction="U")
    for id_ in (1, 2, 3):
        assert driver.release(id_) == [("released", id_, "success")]
    assert driver.release(4) == [("released", 4, "success"), ("locked", 5)]


def test_a_released_upgrade_leaves_the_shared_lock(driver: Driver) -> None:
    driver.request("shared:A", transaction="T")
    driver.request("A", transaction="T")
    driver.request("shared:A")
    driver.request("A")
    assert driver.release(2) == [("released", 2, "success"), ("locked", 3)]


def test_requests_of_one_owner_do_not_block_each_other(driver: Driver) -> None:
    driver.request("S")
    driver.request("A", "S", transaction="T")
    assert driver.request("A", transaction="T")[-1] == ("locked", 3)


def test_ids_and_fences_only_grow(driver: Driver) -> None:
    first = driver.step(core.Request(exclusive=("A",)))[0].request  # type: ignore[union-attr]
    driver.release(first.id)
    second = driver.step(core.Request(exclusive=("A",)))[0].request  # type: ignore[union-attr]
    assert (second.id, second.fence) == (first.id + 1, first.fence + 1)


def test_a_deadline_is_never_early(driver: Driver) -> None:
    driver.now = 0.9
    driver.request("A", transaction_timeout_ms=10)
    assert driver.manager.deadlines.next == 11
    assert driver.at(10.95) == []
    assert driver.at(11) == [("released", 1, "transaction-timeout")]


def test_the_largest_queue_timeout_is_no_limit_also_after_a_restart(driver: Driver) -> None:
    driver.request("A", transaction_timeout_ms=2_147_483_647)
    driver.request("A", queue_timeout_ms=2_147_483_647)
    driver.reload()
    assert driver.at(2_147_483_646) == []
    assert driver.at(2_147_483_647) == [("released", 1, "transaction-timeout"), ("locked", 2)]


def test_expiry_is_bounded_by_step(driver: Driver) -> None:
    for number in range(10):
        driver.request(f"{number}", transaction_timeout_ms=5)
    driver.now = 5
    assert len(driver.step(core.Expire(limit=4))) == 4
    assert driver.manager.deadlines.next <= 5
    assert len(driver.step(core.Expire())) == 6


def test_a_request_granted_by_a_timeout_in_the_same_millisecond_does_not_time_out(driver: Driver) -> None:
    driver.request("A", transaction_timeout_ms=10)
    driver.request("A", queue_timeout_ms=10)
    assert driver.at(10) == [("released", 1, "transaction-timeout"), ("locked", 2)]


def test_extend_counts_from_now(driver: Driver) -> None:
    driver.request("A", transaction_timeout_ms=10)
    driver.now = 8
    driver.step(core.Extend(1, 5))
    assert driver.at(12) == []
    assert driver.at(13) == [("released", 1, "transaction-timeout")]
    driver.step(core.Extend(1, 5))
    assert driver.at(99) == []


def test_the_first_reason_is_repeated(driver: Driver) -> None:
    driver.request("A", transaction_timeout_ms=1)
    driver.at(1)
    assert driver.release(1) == [("repeated", 1, "transaction-timeout")]
    assert driver.release(2) == [("unknown", 2)]


def test_recent_outcomes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "RECENT_OUTCOMES", 10)
    memory = manager_module.RecentOutcomes()
    for id_ in range(100):
        memory.add(id_, core.Reason.SUCCESS)
        assert all(memory.get(recent) for recent in range(max(0, id_ - 9), id_ + 1))
        assert sum(memory.get(old) is not None for old in range(id_ + 1)) <= 20


def test_a_queue_timeout_names_ten_and_counts_all(driver: Driver) -> None:
    for number in range(12):
        driver.request("shared:A", transaction=f"T{number}")
    driver.request("A")
    driver.request("A")
    event = driver.step(core.Request(exclusive=("A",), queue_timeout_ms=0))[-1]
    assert isinstance(event, core.Released)
    assert len(event.blockers) == 10
    assert event.blockers_total == 14
    assert [(b.transaction, b.held) for b in event.blockers] == [(f"T{n}", True) for n in range(10)]


def test_a_queue_timeout_counts_to_a_thousand_at_least() -> None:
    manager = core.LockManager()
    for _ in range(2_000):
        manager.step(core.Request(shared=("A",)), 0)
    event = manager.step(core.Request(exclusive=("A",), queue_timeout_ms=0), 0)[-1]
    assert isinstance(event, core.Released)
    assert event.blockers_total == 1_000


def test_a_disconnect_ends_all_requests_together(driver: Driver) -> None:
    """None of its own requests is granted while they are cancelled."""
    driver.request("A")
    for _ in range(3):
        driver.request("A", "B")
    driver.request("B")
    mine = [driver.requests[id_] for id_ in (1, 2, 3, 4)]
    driver.requests[1].release_on_disconnect = True
    told = driver.step(core.Disconnect(mine))
    assert [type(event).__name__ for event in told] == ["Released"] * 4 + ["Locked"]


def test_recovery_cancels_waiting_requests_and_grants_the_grantable(driver: Driver) -> None:
    driver.request("A", release_on_disconnect=True)
    driver.request("A")
    driver.request("B")
    driver.reload()
    events = driver.step(core.Recover())
    assert [type(event).__name__ for event in events] == ["Released", "Released"]
    assert set(driver.manager.table.held) == {3}


def test_a_priority_inverted_queue_still_sorts_new_requests_by_priority(driver: Driver) -> None:
    """After a rearrangement put a low priority first, a new request goes after the last of its priority."""
    driver.request("A", transaction="T")
    driver.request("A", "B", priority=5)  # 2 waits for T
    driver.request("Z", transaction="U")
    driver.request("Z", "B", priority=9)  # 4 waits for U, before 2
    assert driver.request("B", "Z", transaction="T", priority=0) == [("queued", 5)]  # waits for U, before 2
    queue = driver.queue("B")
    assert queue.index(5) < queue.index(2)
    driver.request("B", priority=5)
    driver.request("B", priority=7)
    queue = driver.queue("B")
    assert queue.index(2) < queue.index(6)
    assert queue.index(7) < queue.index(6)
    assert queue.index(4) < queue.index(7)


def test_the_search_for_a_cycle_visits_only_reachable_owners() -> None:
    """In a chain of 2,000 transactions a new request of an owner without waiters takes few steps."""
    from genie.core import deadlock

    manager = core.LockManager()
    for number in range(2_000):
        manager.step(core.Request(exclusive=(f"{number}",), transaction=f"T{number}"), 0)
    for number in range(1_999):
        manager.step(core.Request(exclusive=(f"{number + 1}",), transaction=f"T{number}"), 0)
    visits = 0
    original = manager.table.waiting_of

    class Counting(type(manager.table)):  # type: ignore[misc]
        __slots__ = ()

        def waiting_of(self, owner: core.model.Owner) -> dict[int, core.Request]:  # type: ignore[name-defined]
            nonlocal visits
            visits += 1
            return original(owner)

    manager.table.__class__ = Counting
    manager.step(core.Request(exclusive=("own",), transaction="N"), 0)
    manager.step(core.Request(exclusive=("0",), transaction="N"), 0)
    assert visits < 20
    newest = max(manager.table.waiting.values(), key=lambda request: request.id)
    assert deadlock.may_be_in_cycle(manager.table, newest, overtakes=True) is False


def test_blocked_resources_are_found_in_few_steps() -> None:
    manager = core.LockManager()
    manager.step(core.Request(exclusive=("held", "free")), 0.0)
    manager.step(core.Request(exclusive=("held",)), 0.0)
    others = tuple(f"{number}" for number in range(900))
    mine = core.Request(exclusive=("free", "new", *others), shared=("held",), transaction="mine")
    manager.step(mine, 0.0)
    assert list(core.blocked_resources(manager.table, mine)) == ["free"]
    two = core.Request(exclusive=("new",), shared=("held",), transaction="mine")
    manager.step(two, 0.0)
    assert list(core.blocked_resources(manager.table, two)) == ["held"], (
        "requests of its own transaction do not block it"
    )
