"""The cost of the lock manager in executed bytecode instructions does not grow with its tables.

`tests/unit/server/test_work.py` compares the instructions with a baseline. What runs in C is one instruction: a bisection,
an insertion into a list, the growth of a dict. So this finds needless loops and doubled work; `benchmarks/scale.py`
measures the rest with a clock.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from genie.core import LockManager, Request
from support.runs.searches import SOAK
from work.core_scenarios import SCENARIOS, SMALL

SIZES = (2_000, 20_000) if SOAK else (SMALL, 1_000)
"""A small and a large size. Linear cost is ten times as much at the large one. Both sizes of the long run have more than
`deadlines.FEW_TICKS` deadlines, so that a new deadline searches for empty ticks, and queues of several chunks."""

GROWTH = 1.1
"""Permitted growth from the small to the large size. It is 1 except for where a chunk of a queue ends."""


class Name(str):
    """A name that counts comparisons with others."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Name.comparisons += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_the_names_of_a_large_holder_are_not_searched_for_each_resource() -> None:
    manager = LockManager()
    names = tuple(Name(number) for number in range(1_000))
    manager.step(Request(exclusive=names), 0)
    Name.comparisons = 0
    manager.step(Request(shared=names, queue_timeout_ms=0), 0)
    assert Name.comparisons < 20 * len(names)


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_instructions_do_not_grow_with_the_table_or_the_queue(scenario: Callable[[int], float]) -> None:
    small, large = SIZES
    assert scenario(large) <= GROWTH * scenario(small)
