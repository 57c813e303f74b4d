from __future__ import annotations

from genie.observability.stats import MOST, WINDOW_MS, Hot


def names(hot: Hot, limit: int = 10) -> list[str]:
    return [name for name, _ in hot.top(limit)]


def test_the_most_waited_for_comes_first_then_the_most_collided_on() -> None:
    hot = Hot()
    hot.collided(["a", "b", "c"])
    hot.collided(["c"])
    hot.waited(["b"], 5)
    assert names(hot) == ["b", "c", "a"]
    assert names(hot, 1) == ["b"]
    (_, heat), *_ = hot.top(1)
    assert (heat.collisions, heat.waited_ms) == (1, 5)


def test_two_windows_are_added_up_and_the_third_forgets() -> None:
    hot = Hot()
    hot.turn(WINDOW_MS)
    hot.waited(["a"], 1)
    hot.turn(2 * WINDOW_MS)
    hot.waited(["a", "b"], 2)
    assert [(name, heat.waited_ms) for name, heat in hot.top(10)] == [("a", 3), ("b", 2)]
    hot.turn(2 * WINDOW_MS + 1)
    assert len(hot.top(10)) == 2
    hot.turn(3 * WINDOW_MS)
    assert [(name, heat.waited_ms) for name, heat in hot.top(10)] == [("a", 2), ("b", 2)]
    hot.turn(5 * WINDOW_MS)
    assert names(hot) == []


def test_it_is_bounded_and_keeps_what_matters() -> None:
    hot = Hot()
    hot.waited(["hot"], 1_000)
    for window in range(1, 4):
        for number in range(3 * MOST):
            hot.collided([f"{window}/{number}"])
        assert len(hot._now) <= MOST
        hot.waited(["hot"], 1_000)
        hot.turn(window * WINDOW_MS)
    assert sum(1 for _ in hot.found()) <= 2 * MOST
    assert names(hot, 1) == ["hot"]


def test_it_may_change_while_it_is_read() -> None:
    hot = Hot()
    hot.collided(f"{number}" for number in range(100))
    found = hot.found()
    next(found)
    hot.collided(f"more-{number}" for number in range(100))
    hot.turn(WINDOW_MS)
    assert len(list(found)) == 99
