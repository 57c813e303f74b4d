"""Queues whose owners take turns: a dict with the items that wait of each owner, the next owner first.

The functions work on plain dicts, because the scheduler also counts, searches and moves what waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import TypeVar

OwnerT = TypeVar("OwnerT", bound=Hashable)
ItemT = TypeVar("ItemT")


def append(queues: dict[OwnerT, deque[ItemT]], owner: OwnerT, item: ItemT) -> None:
    """Append an item to the queue of its owner. An owner without a queue gets one, after those of the others."""
    queue = queues.get(owner)
    if queue is None:
        queue = queues[owner] = deque()
    queue.append(item)


def take_next(queues: dict[OwnerT, deque[ItemT]]) -> ItemT:
    """Remove and return the first item of the first owner, whose next item waits for the other owners. One must wait."""
    owner = next(iter(queues))
    queue = queues.pop(owner)
    item = queue.popleft()
    if queue:
        queues[owner] = queue  # after the other owners
    return item
