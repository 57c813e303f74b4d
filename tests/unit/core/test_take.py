"""`Take` acquires available resources in order, up to its target, or none.

The model compares every pair.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from genie import core
from simulator.invariants import conflict, graph
from support.core.driver import Driver
from support.runs.searches import examples

NAMES = "ABCDE"


def take(driver: Driver, resources: list[str], weights: list[Any], target: Any, **options: Any) -> core.Event:
    choices = [(name.removeprefix("shared:"), not name.startswith("shared:")) for name in resources]
    events = driver.step(
        core.Take(core.Request(context=core.Context(choice_digest=""), **options), choices, weights, target)
    )
    if isinstance(events[-1], core.Insufficient):
        assert [type(event) for event in events] == [core.Queued, core.Insufficient]
    else:
        assert [type(event) for event in events] == [core.Taken]
    return events[-1]


def test_in_the_order_given_up_to_the_target() -> None:
    driver = Driver()
    driver.request("B")
    taken = take(driver, ["A", "B", "shared:C", "D", "E"], [1, 9, 2, 3, 4], 6)
    assert isinstance(taken, core.Taken)
    assert (taken.request.exclusive, taken.request.shared) == (("A", "D"), ("C",))
    assert taken.request.fence > 0


def test_nothing_is_acquired_if_the_target_is_not_reached() -> None:
    driver = Driver()
    driver.request("B")
    refused = take(driver, ["A", "B", "C"], [1, 9, 2], 4)
    assert isinstance(refused, core.Insufficient)
    assert (refused.reason, refused.free, refused.locked) == ("insufficient", 3, 9)
    assert driver.manager.table.lookup("A") is None
    assert driver.step(core.Release(refused.request.id)) == [core.AlreadyEnded(refused.request.id, refused.reason)]


def test_a_resource_that_others_wait_for_is_not_available() -> None:
    driver = Driver()
    driver.request("A")
    driver.request("A", "B")
    refused = take(driver, ["B"], [1], 1)
    assert isinstance(refused, core.Insufficient)
    assert (refused.free, refused.locked) == (0, 1)


def test_shared_choices_are_compatible() -> None:
    driver = Driver()
    driver.request("A")
    driver.request("A", "shared:B")
    assert isinstance(take(driver, ["shared:B"], [1], 1), core.Taken)
    assert isinstance(take(driver, ["B"], [1], 1), core.Insufficient)


def test_a_resource_of_its_own_transaction_is_available() -> None:
    driver = Driver()
    driver.request("A", transaction="T")
    driver.request("A")
    assert isinstance(take(driver, ["A"], [1], 1, transaction="T"), core.Taken)
    assert isinstance(take(driver, ["A"], [1], 1, transaction="U"), core.Insufficient)


def test_an_upgrade_is_available_only_without_other_sharers_and_waiters() -> None:
    driver = Driver()
    driver.request("shared:A", transaction="T")
    assert isinstance(take(driver, ["A"], [1], 1, transaction="T"), core.Taken)
    other = Driver()
    other.request("shared:A", transaction="T")
    other.request("shared:A")
    assert isinstance(take(other, ["A"], [1], 1, transaction="T"), core.Insufficient)
    assert isinstance(take(other, ["shared:A"], [1], 1, transaction="T"), core.Taken)


def test_sums_of_large_integers_are_exact() -> None:
    large = 2**62 + 1
    driver = Driver()
    driver.request("B")
    refused = take(driver, ["A", "B", "C"], [large, large, large], 2**63 - 1 + 4)
    assert isinstance(refused, core.Insufficient)
    assert (refused.free, refused.locked) == (2 * large, large)
    assert isinstance(take(driver, ["A", "C"], [large, large], 2 * large), core.Taken)


def test_it_ends_like_any_other() -> None:
    driver = Driver()
    taken = take(driver, ["A", "B"], [1, 1], 2, transaction_timeout_ms=5)
    assert isinstance(taken, core.Taken)
    waiting = driver.request("A")
    driver.reload()
    assert driver.requests[taken.request.id].context.choice_digest == ""
    assert driver.at(5) == [("released", taken.request.id, "transaction-timeout"), ("locked", waiting[0][1])]


class Takes(RuleBasedStateMachine):
    """Among other requests: a `Take` gets what is available, and extends no other wait."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver()

    @rule(
        modes=st.dictionaries(st.sampled_from(NAMES), st.sampled_from(["", "shared:"]), min_size=1, max_size=3),
        transaction=st.sampled_from([None, "T", "U", "V"]),
        priority=st.sampled_from([0, 0, 3]),
    )
    def request(self, modes: dict[str, str], transaction: str | None, priority: int) -> None:
        names = [mode + name for name, mode in modes.items()]
        self.driver.request(*names, transaction=transaction, priority=priority, queue_timeout_ms=1000)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.driver.manager.table
        alive = sorted([*table.held, *table.waiting])
        if alive:
            self.driver.release(data.draw(st.sampled_from(alive)))

    @rule(
        modes=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([True, False]), min_size=1),
        weights=st.lists(st.integers(1, 4), min_size=5, max_size=5),
        wanted=st.integers(1, 9),
        transaction=st.sampled_from([None, "T", "U", "V"]),
    )
    def take(self, modes: dict[str, bool], weights: list[int], wanted: int, transaction: str | None) -> None:
        table = self.driver.manager.table
        before = graph(self.driver.manager)
        free, expected, reached = [], [], 0
        for (name, exclusive), weight in zip(modes.items(), weights, strict=False):
            asked = core.Request(exclusive=(name,)) if exclusive else core.Request(shared=(name,))
            asked.owner = transaction or -1
            holders = [request for request in table.held.values() if name in request.names()]
            waiting = [request for request in table.waiting.values() if name in request.names()]
            has = any(held.owner == asked.owner and (name in held.exclusive or not exclusive) for held in holders)
            free.append(has or not any(conflict(asked, other, name) for other in [*holders, *waiting]))
            if free[-1] and reached < wanted:
                expected.append(name)
                reached += weight
        choices = list(modes.items())
        weights = weights[: len(choices)]
        (*_, event) = self.driver.step(
            core.Take(
                core.Request(transaction=transaction, context=core.Context(choice_digest="")), choices, weights, wanted
            )
        )
        if reached >= wanted:
            assert isinstance(event, core.Taken)
            assert sorted(event.request.names()) == sorted(expected)
        else:
            assert isinstance(event, core.Insufficient)
            assert (event.free, event.free + event.locked) == (reached, sum(weights))
        after = graph(self.driver.manager)
        assert after == before


TestTakes = Takes.TestCase
TestTakes.settings = examples(40, stateful_step_count=30)


@pytest.mark.parametrize("chosen", [None, "", "0123"])
def test_the_choice_digest_is_stored(chosen: str | None) -> None:
    from genie.storage.redis.records import RecordDecoder, encode

    driver = Driver()
    driver.step(core.Take(core.Request(context=core.Context(choice_digest=chosen)), [("A", True)], [1], 1))
    (request,) = driver.manager.table.held.values()
    again = RecordDecoder().decode(request.id, encode(request))
    assert isinstance(again, core.Request)
    assert again.context.choice_digest == chosen
