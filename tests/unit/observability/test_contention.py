from __future__ import annotations

from genie.observability.stats import MAX_RESOURCES, WINDOW_MS, ContentionStats, most_contended


def names(contention: ContentionStats, limit: int = 10) -> list[str]:
    return [name for name, _ in most_contended(contention.entries(), limit)]


def test_resources_are_ranked_by_wait_time_then_by_conflicts() -> None:
    contention = ContentionStats()
    contention.record_conflict(["a", "b", "c"])
    contention.record_conflict(["c"])
    contention.record_wait(["b"], 5)
    assert names(contention) == ["b", "c", "a"]
    assert names(contention, 1) == ["b"]
    (_, entry), *_ = most_contended(contention.entries(), 1)
    assert (entry.conflicts, entry.waited_ms) == (1, 5)


def test_two_windows_are_added_and_older_ones_dropped() -> None:
    contention = ContentionStats()
    contention.start_window_if_due(WINDOW_MS)
    contention.record_wait(["a"], 1)
    contention.start_window_if_due(2 * WINDOW_MS)
    contention.record_wait(["a", "b"], 2)
    assert [(name, entry.waited_ms) for name, entry in most_contended(contention.entries(), 10)] == [("a", 3), ("b", 2)]
    contention.start_window_if_due(2 * WINDOW_MS + 1)
    assert len(most_contended(contention.entries(), 10)) == 2
    contention.start_window_if_due(3 * WINDOW_MS)
    assert [(name, entry.waited_ms) for name, entry in most_contended(contention.entries(), 10)] == [("a", 2), ("b", 2)]
    contention.start_window_if_due(5 * WINDOW_MS)
    assert names(contention) == []


def test_memory_is_bounded_and_the_most_contended_resources_are_kept() -> None:
    contention = ContentionStats()
    contention.record_wait(["hot"], 1_000)
    for window in range(1, 4):
        for number in range(3 * MAX_RESOURCES):
            contention.record_conflict([f"{window}/{number}"])
        assert len(contention._current) <= MAX_RESOURCES
        contention.record_wait(["hot"], 1_000)
        contention.start_window_if_due(window * WINDOW_MS)
    assert sum(1 for _ in contention.entries()) <= 2 * MAX_RESOURCES
    assert names(contention, 1) == ["hot"]


def test_entries_are_not_affected_by_changes_during_the_iteration() -> None:
    contention = ContentionStats()
    contention.record_conflict(f"{number}" for number in range(100))
    found = contention.entries()
    next(found)
    contention.record_conflict(f"more-{number}" for number in range(100))
    contention.start_window_if_due(WINDOW_MS)
    assert len(list(found)) == 99
