"""Owners whose items wait take turns."""

from __future__ import annotations

from collections import deque

from genie import round_robin


def test_owners_take_turns_and_the_items_of_each_keep_their_order() -> None:
    queues: dict[str, deque[int]] = {}
    for owner, item in [("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5)]:
        round_robin.append(queues, owner, item)
    taken = [round_robin.take_next(queues)]
    round_robin.append(queues, "c", 6)
    taken += [round_robin.take_next(queues) for _ in range(5)]
    assert taken == [1, 4, 2, 6, 5, 3]
    assert queues == {}
