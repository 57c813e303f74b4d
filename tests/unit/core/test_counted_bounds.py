"""The work of the lock manager does not grow with the queue of a counted resource. Instructions are counted, never time."""

from __future__ import annotations

from genie.core import Locked, Release, Request
from genie.core.model import details_of
from work.core_scenarios import InstructionCounter

POOL = 4


def request_for_a_unit(counter: InstructionCounter) -> Request:
    request = Request()
    request.details = details_of((), (), {"A": (1, POOL)})
    counter.manager.step(request, 0)
    return request


def instructions_of_a_hand_over(waiters: int) -> int:
    counter = InstructionCounter()
    requests = [request_for_a_unit(counter) for _ in range(POOL + waiters)]
    events = counter.count(Release(requests[0].id))
    assert [event.request for event in events if isinstance(event, Locked)] == [requests[POOL]]
    return counter.instructions


def instructions_of_a_new_waiter(waiters: int) -> int:
    counter = InstructionCounter()
    for _ in range(POOL + waiters):
        request_for_a_unit(counter)
    request = Request()
    request.details = details_of((), (), {"A": (1, POOL)})
    counter.count(request)
    return counter.instructions


def test_units_are_handed_over_at_the_same_cost_in_a_long_queue() -> None:
    assert instructions_of_a_hand_over(10_000) < 1.1 * instructions_of_a_hand_over(10)


def test_a_request_for_units_joins_a_long_queue_at_the_same_cost() -> None:
    assert instructions_of_a_new_waiter(10_000) < 1.1 * instructions_of_a_new_waiter(10)
