"""Commands to the lock manager whose bytecode instructions are counted. Each scenario returns them at a size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from genie.core import Command, Continue, Event, Expire, Extend, Locked, LockManager, Release, Request
from genie.core.lock_order.analysis import LockOrder
from genie.storage.store import StoredOrigin
from work.opcodes import OpcodeCounter

Result = TypeVar("Result")

SMALL = 100
"""The size at which the instructions of the baseline are counted."""


class InstructionCounter:
    """A lock manager, and the instructions that `count` executed."""

    def __init__(self) -> None:
        self.manager = LockManager()
        self.instructions = 0

    def count(self, command: Command, now: float = 0) -> list[Event]:
        return self.run(self.manager.step, command, now)

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function and count its instructions."""
        counter = OpcodeCounter()
        counter.start()
        try:
            return function(*arguments)
        finally:
            counter.stop()
            self.instructions += counter.count

    def request(self, *exclusive: str, **options: Any) -> Request:
        """Step without counting."""
        request = Request(exclusive=exclusive, **options)
        self.manager.step(request, 0)
        return request

    def chain(self, number: int, length: int) -> None:
        """Transaction k holds resource k and waits for k-1, the first for what the root holds."""
        self.request(f"{number}/root", transaction=f"root-{number}")
        for link in range(length):
            previous = str(link - 1) if link else "root"
            self.request(f"{number}/{link}", transaction=f"{number}-{link}")
            self.request(f"{number}/{previous}", transaction=f"{number}-{link}")


def counter_with_held_locks(n: int) -> InstructionCounter:
    counter = InstructionCounter()
    for number in range(n):
        counter.request(f"held/{number}", transaction_timeout_ms=10_000 + number)
    return counter


def queue_of(n: int) -> tuple[InstructionCounter, list[Request]]:
    """One request holds A, and n wait for it."""
    counter = InstructionCounter()
    return counter, [counter.request("A") for _ in range(n + 1)]


# -- Scenarios: each returns its instructions at a size -----------------------------


def a_lock_and_release(n: int) -> float:
    counter = counter_with_held_locks(n)
    request = Request(exclusive=("free",))
    counter.count(request)
    counter.count(Release(request.id))
    return counter.instructions


def a_lock_and_release_on_the_fast_path(n: int) -> float:
    counter = counter_with_held_locks(n)
    request = Request(exclusive=("free",), origin=StoredOrigin("session", 0))
    assert counter.run(counter.manager.grant_if_uncontended, request, 0)
    assert counter.run(counter.manager.release_if_uncontended, request.id, request.origin) is request
    return counter.instructions


def a_lock_and_release_of_three(n: int) -> float:
    counter = counter_with_held_locks(n)
    request = Request(exclusive=("one", "two", "three"))
    counter.count(request)
    counter.count(Release(request.id))
    return counter.instructions


def a_lock_and_release_of_a_shared_lock_among_sharers(n: int) -> float:
    counter = InstructionCounter()
    for _ in range(n):
        counter.manager.step(Request(shared=("A",)), 0)
    request = Request(shared=("A",))
    counter.count(request)
    counter.count(Release(request.id))
    return counter.instructions


def a_lock_and_release_of_a_transaction_that_holds_n(n: int) -> float:
    counter = InstructionCounter()
    for number in range(n):
        counter.request(f"held/{number}", transaction="T")
    request = Request(exclusive=("free",), transaction="T")
    counter.count(request)
    counter.count(Release(request.id))
    return counter.instructions


def locks_of_a_transaction(count: int) -> float:
    """A transaction takes locks of different classes one after the other. The analysis of the lock order knows their edges."""
    counter = InstructionCounter()
    counter.manager.lock_order = LockOrder()
    for number in range(2):
        requests = [Request(exclusive=(f"{'abcd'[index]}/{number}",), transaction="T") for index in range(count)]
        counter.instructions = 0
        for request in requests:
            counter.count(request)
        for request in requests:
            counter.count(Release(request.id))
    return counter.instructions


def two_locks_of_a_transaction_whose_order_is_analysed(_: int) -> float:
    return locks_of_a_transaction(2)


def four_locks_of_a_transaction_whose_order_is_analysed(_: int) -> float:
    return locks_of_a_transaction(4)


def an_extension(n: int) -> float:
    counter = counter_with_held_locks(n)
    counter.count(Extend(counter.request("free").id, 5_000))
    return counter.instructions


def a_queued_request(n: int) -> float:
    counter, _ = queue_of(n)
    counter.count(Request(exclusive=("A",)))
    return counter.instructions


def a_queued_request_that_overtakes(n: int) -> float:
    counter, _ = queue_of(n)
    counter.count(Request(exclusive=("A",), priority=1))
    return counter.instructions


def a_queued_request_for_three(n: int) -> float:
    counter, _ = queue_of(n)
    counter.count(Request(exclusive=("A", "B", "C")))
    return counter.instructions


def a_request_without_waiting_that_fails(n: int) -> float:
    """The request counts its blockers, up to 1,000. Shared waiters block only exclusive requests."""
    counter = InstructionCounter()
    counter.request("A")
    for _ in range(n):
        counter.manager.step(Request(shared=("A",)), 0)
    counter.count(Request(shared=("A",), queue_timeout_ms=0))
    return counter.instructions


def a_cancelled_request_in_the_middle(n: int) -> float:
    counter, requests = queue_of(n)
    counter.count(Release(requests[n // 2].id))
    return counter.instructions


def a_handoff(n: int) -> float:
    counter, requests = queue_of(n)
    events = counter.count(Release(requests[0].id))
    assert [event.request for event in events if isinstance(event, Locked)] == [requests[1]]
    return counter.instructions


def a_grant_to_n_sharers_at_once_each(n: int) -> float:
    counter = InstructionCounter()
    holder = counter.request("A")
    for _ in range(n):
        counter.manager.step(Request(shared=("A",)), 0)
    events = counter.count(Release(holder.id))
    while counter.manager.pending_grants:
        events += counter.count(Continue())
    assert len(events) == n + 1
    return counter.instructions / n


def a_transaction_timeout(n: int) -> float:
    counter = counter_with_held_locks(n)
    assert len(counter.count(Expire(), now=10_000)) == 1
    return counter.instructions


def n_transaction_timeouts_at_once_each(n: int) -> float:
    counter = counter_with_held_locks(n)
    assert len(counter.count(Expire(n), now=10_000 + n)) == n
    return counter.instructions / n


def a_search_for_an_owner_without_waiters(n: int) -> float:
    """A transaction that holds a lock requests the end of a chain of n."""
    counter = InstructionCounter()
    counter.chain(0, n)
    counter.request("own", transaction="new")
    counter.count(Request(exclusive=(f"0/{n - 1}",), transaction="new"))
    return counter.instructions


def a_search_that_ends_after_one_step_forward(n: int) -> float:
    """The root of a chain as long as n asks for a lock of an owner that waits for none."""
    counter = InstructionCounter()
    counter.chain(0, n)
    counter.request("other", transaction="other")
    counter.count(Request(exclusive=("other",), transaction="root-0"))
    return counter.instructions


def a_search_over_twenty_of_n_in_chains(n: int) -> float:
    """The root of one chain of ten asks for the end of another; other chains are not visited."""
    counter = InstructionCounter()
    for number in range(n // 10):
        counter.chain(number, 10)
    counter.count(Request(exclusive=("1/9",), transaction="root-0"))
    return counter.instructions


def a_deadlock_of_two_among_n_in_chains(n: int) -> float:
    counter = InstructionCounter()
    for number in range(n // 10):
        counter.chain(number, 10)
    counter.request("one", transaction="first")
    counter.request("two", transaction="second")
    counter.request("two", transaction="first")
    counter.count(Request(exclusive=("one",), transaction="second"))
    return counter.instructions


SCENARIOS: list[Callable[[int], float]] = [
    a_lock_and_release,
    a_lock_and_release_on_the_fast_path,
    a_lock_and_release_of_three,
    a_lock_and_release_of_a_shared_lock_among_sharers,
    a_lock_and_release_of_a_transaction_that_holds_n,
    two_locks_of_a_transaction_whose_order_is_analysed,
    four_locks_of_a_transaction_whose_order_is_analysed,
    an_extension,
    a_queued_request,
    a_queued_request_that_overtakes,
    a_queued_request_for_three,
    a_request_without_waiting_that_fails,
    a_cancelled_request_in_the_middle,
    a_handoff,
    a_grant_to_n_sharers_at_once_each,
    a_transaction_timeout,
    n_transaction_timeouts_at_once_each,
    a_search_for_an_owner_without_waiters,
    a_search_that_ends_after_one_step_forward,
    a_search_over_twenty_of_n_in_chains,
    a_deadlock_of_two_among_n_in_chains,
]


if __name__ == "__main__":
    print(json.dumps({scenario.__name__: scenario(SMALL) for scenario in SCENARIOS}))
