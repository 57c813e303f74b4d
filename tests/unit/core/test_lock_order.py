"""Lock order analysis: every inversion of what was seen is found, none is invented, and every deadlock was predicted."""

from __future__ import annotations

import gc
import re
import tracemalloc
from itertools import pairwise
from random import Random
from string import ascii_lowercase

import pytest

from genie.core import Deadlocked, LockManager, Release, Request, State
from genie.core.lock_order import analysis, budget, edges, inversions, members, search
from genie.core.lock_order import classes as classes_module
from genie.core.lock_order.analysis import LockOrder
from genie.core.lock_order.classes import LockClasses, Rule, Treatment, parse_rules
from genie.core.lock_order.inversions import MAX_OFFENDERS, Inversion
from genie.core.lock_order.names import precedes_by_number
from genie.core.model import details_of
from genie.core.size import NAME_BYTES, REQUEST_BYTES
from work.opcodes import OpcodeCounter

MAX_GRANT_INSTRUCTIONS = 1_200_000
"""Instructions of a step that grants about 500 locks, with the analysis of their order."""


def observed_manager(rules: str = "") -> tuple[LockManager, LockOrder]:
    manager = LockManager()
    manager.lock_order = LockOrder(parse_rules(rules))
    return manager, manager.lock_order


def requested(*names: str, transaction: str | None = "t", **options: float) -> Request:
    """A request of `transaction`; a name that begins with `s:` is requested in shared mode."""
    shared = tuple(name[2:] for name in names if name.startswith("s:"))
    exclusive = tuple(name for name in names if not name.startswith("s:"))
    request = Request(shared, exclusive, transaction=transaction, **options)  # type: ignore[arg-type]
    request.details = details_of(shared, exclusive)
    return request


def run_transaction(manager: LockManager, *steps: str, name: str = "t") -> None:
    """Take locks one after the other, each step one request of names separated by spaces, and release them."""
    requests = [requested(*step.split(), transaction=name) for step in steps]
    for request in requests:
        manager.step(request, 0)
    for request in requests:
        manager.step(Release(request.id), 0)


def found(inversions: list[Inversion]) -> set[tuple[str, frozenset[str]]]:
    return {(inversion.kind.value, frozenset(inversion.classes)) for inversion in inversions}


# -- cost -------------------------------------------------------------------------------------------------


def test_the_edges_and_guards_of_a_large_transaction_are_bounded() -> None:
    """A transaction that holds a thousand classes makes few edges, with few guards."""
    manager, lock_order = observed_manager()
    names = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase]
    for index in range(0, 640, 32):
        manager.step(requested(*names[index : index + 32]), 0)
    assert len(lock_order.classes.by_name) == 640
    assert max(len(edge.guards) for edge in lock_order.graph.by_key.values()) <= members.MAX_GUARDS
    assert len({edge.held for edge in lock_order.graph.by_key.values()}) <= members.MAX_HELD_CLASSES
    assert lock_order.dropped


def test_the_search_for_the_cycles_of_a_request_is_bounded() -> None:
    """A request makes 1,024 edges at once, each in a cycle."""
    manager, lock_order = observed_manager()
    names = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase]
    steps = [" ".join(names[index : index + 32]) for index in (0, 32)]
    run_transaction(manager, *steps)
    run_transaction(manager, *reversed(steps))
    steps_of_last = lock_order._budget.search_steps
    assert search.MAX_SEARCH_STEPS < steps_of_last <= search.MAX_SEARCH_STEPS + len(lock_order.classes.by_name)
    assert lock_order.inversions.count
    assert lock_order.dropped


def test_the_held_requests_that_are_read_again_after_a_release_are_bounded() -> None:
    manager, lock_order = observed_manager()
    held = [requested(f"a/{number}") for number in range(members.MAX_HELD_REQUESTS + 1)] + [requested("b")]
    for request in held:
        manager.step(request, 0)
    assert lock_order.dropped == 0
    manager.step(Release(held[0].id), 0)
    lock_order.graph.by_key.clear()
    manager.step(requested("c"), 0)
    assert lock_order.dropped == 1
    assert [(edge.held.name, edge.asked.name) for edge in lock_order.graph.by_key.values()] == [("a/*", "c")]
    manager.step(requested("a/5"), 0)  # which the transaction holds
    assert lock_order.dropped == 2
    assert lock_order.inversions.count == 0


def test_the_names_that_are_read_again_after_a_release_are_bounded() -> None:
    """A transaction holds 256 requests for 32 names of 512 characters each: all of them took 1.7 s."""
    manager, lock_order = observed_manager()
    numbers = iter(range(members.MAX_HELD_REQUESTS * classes_module.MAX_NAMES))
    for _ in range(members.MAX_HELD_REQUESTS):
        names = ["x".join(f"{next(numbers):05}") + "x7" * 251 + "x" for _ in range(classes_module.MAX_NAMES)]
        manager.step(requested(*names), 0)
    last = requested("last")
    manager.step(last, 0)
    manager.step(Release(last.id), 0)
    lock_order.dropped = 0
    counter = OpcodeCounter()
    counter.start()
    manager.step(requested("next"), 0)
    counter.stop()
    assert counter.count < 150_000
    assert lock_order.dropped == 1


def test_the_numbers_of_a_name_that_are_compared_are_bounded() -> None:
    common = "1x" * 15
    assert precedes_by_number(f"{common}9x", f"{common}10x")
    assert not precedes_by_number(f"1x{common}9x", f"1x{common}10x")  # the 17th number


def test_the_search_for_the_exclusive_locks_among_names_that_are_requested_again_is_bounded() -> None:
    """A transaction that holds 65,536 names in exclusive mode asks for 32 others that it holds in shared mode."""
    manager, lock_order = observed_manager()
    for number in range(64):
        manager.step(requested(*[f"{number}/{index}" for index in range(1_024)]), 0)
    upgraded = [f"upgraded/{index}" for index in range(classes_module.MAX_NAMES)]
    manager.step(requested(*[f"s:{name}" for name in upgraded]), 0)
    manager.step(requested(*upgraded), 0)
    assert lock_order._budget.steps < 2 * budget.MAX_STEPS
    assert lock_order.dropped > 0


def test_the_waiting_requests_that_are_analysed_at_a_grant_are_bounded() -> None:
    manager, lock_order = observed_manager()
    for number in range(analysis.MAX_WAITING_REQUESTS + 1):
        manager.step(requested(f"a/{number}", transaction=None), 0)
        manager.step(requested(f"a/{number}"), 0)
    assert manager.grant_if_uncontended(requested("b"), 0)
    (edge,) = lock_order.graph.by_key.values()
    assert (edge.held.name, edge.asked.name, edge.count) == ("b", "a/*", analysis.MAX_WAITING_REQUESTS)
    assert lock_order.dropped == 1


def test_the_analysis_of_the_grants_of_one_release_is_bounded() -> None:
    """A release grants many requests of a transaction that has other waiting requests with many names."""
    manager, lock_order = observed_manager()
    names = [first + second for first in ascii_lowercase[:2] for second in ascii_lowercase[:16]]
    holder = requested("first", transaction=None)
    for request in (holder, requested(*names, transaction=None)):
        manager.step(request, 0)
    for _ in range(analysis.MAX_WAITING_REQUESTS):
        manager.step(requested(*names), 0)
    waiting = [requested("first") for _ in range(1_000)]
    for request in waiting:
        manager.step(request, 0)
    counter = OpcodeCounter()
    counter.start()
    manager.step(Release(holder.id), 1)
    counter.stop()
    granted = sum(request.state is State.HELD for request in waiting)
    assert granted >= 500
    assert counter.count < MAX_GRANT_INSTRUCTIONS
    assert lock_order.dropped > granted - 10

    dropped, edges = lock_order.dropped, len(lock_order.graph.by_key)
    manager.step(requested(*names, transaction="u"), 2)
    assert manager.grant_if_uncontended(requested("other", transaction="u"), 2)  # at another time
    assert (lock_order.dropped, len(lock_order.graph.by_key)) == (dropped, edges + len(names))


def test_every_request_is_analysed_whatever_the_rate() -> None:
    manager, lock_order = observed_manager()
    for number in range(10_000):
        run_transaction(manager, f"a/{number}", f"b/{number}")
    run_transaction(manager, "b/1", "a/1")
    run_transaction(manager, "b/1", "a/1")
    assert [edge.count for edge in lock_order.graph.by_key.values()] == [10_000, 2]
    assert found(lock_order.inversions.found) == {("cycle", frozenset({"a/*", "b/*"}))}


def test_the_known_edge_of_two_locks_is_counted_as_the_analysis_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of all kinds, with the early exit and without it."""
    names = [
        "a/1",
        "a/2",
        "a/10",
        "a/010",
        "b/3",
        "s:a/1",
        "s:b/4",
        "ledger",
        "x",
        "ignored",
        "a/1 b/1",
        "p/alice",
        "p/bob",
    ]
    results = []
    for early_exit in (True, False):
        if not early_exit:
            monkeypatch.setattr(LockOrder, "_count_known_edge", lambda *_: False)
        manager, lock_order = observed_manager("ignored=ignored,p/*")
        random = Random(5)  # noqa: S311
        for number in range(3_000):
            run_transaction(manager, *random.choices(names, k=random.choice([2, 2, 3])), name=f"t{number}")
        edges = {key: (edge.count, edge.guards) for key, edge in lock_order.graph.by_key.items()}
        inversions = [(each.kind, each.classes, each.offender) for each in lock_order.inversions.found]
        results.append((edges, inversions, lock_order.inversions.count, lock_order.dropped))
    assert results[0] == results[1]


def test_after_new_rules_held_locks_are_classified_again() -> None:
    manager, lock_order = observed_manager()
    for name in ("x", "a/1", "b/1"):
        manager.step(requested(name), 0)
    manager.lock_order = lock_order = LockOrder(parse_rules("*/*"))
    manager.step(requested("c"), 0)
    edges = {(edge.held.name, edge.asked.name) for edge in lock_order.graph.by_key.values()}
    assert edges == {("x", "c"), ("*/*", "c")}


def test_numbers_before_the_end_of_a_name_are_compared_as_numbers() -> None:
    manager, lock_order = observed_manager("jobs/*/*")
    for ascending in (("jobs/2/b", "jobs/10/a"), ("jobs/1/x", "jobs/2/a"), ("jobs/9/a", "jobs/10/a")):
        run_transaction(manager, *ascending)
    assert found(lock_order.inversions.found) == set()
    run_transaction(manager, "jobs/10/a", "jobs/2/b")
    assert found(lock_order.inversions.found) == {("members", frozenset({"jobs/*/*"}))}


def test_a_request_that_is_not_analysed_completely_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes_module, "MAX_CLASSES", 1)
    manager, lock_order = observed_manager()
    manager.step(requested("a"), 0)
    for count in (1, 2):
        manager.step(requested("b", "c", "d"), 0)
        assert lock_order.dropped == count


# -- several requests of a transaction at once --------------------------------------------------------------


@pytest.mark.parametrize("guard", ["ledger", ""])
def test_a_lock_that_is_granted_during_another_wait_has_the_guards_of_its_transaction(guard: str) -> None:
    manager, lock_order = observed_manager()
    for first, second, name in (("a", "b", "x"), ("b", "a", "y")):
        blockers = [requested(each, transaction=None) for each in (first, second)]
        requests = [requested(each, transaction=name) for each in (guard, first, second) if each]
        for request in (*blockers, *requests):
            manager.step(request, 0)
        for request in (*blockers, *requests):
            manager.step(Release(request.id), 0)
    inversion = {("cycle", frozenset({"a", "b"}))}
    assert found(lock_order.inversions.found) == (set() if guard else inversion)
    assert found(lock_order.inversions.guarded) == (inversion if guard else set())


# -- classes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "class_name"),
    [
        ("accounts/42", "accounts/*"),
        ("accounts/", "accounts/"),
        ("ledger", "ledger"),
        ("user-42", "user-*"),
        ("tenants/7/accounts/12", "tenants/*/accounts/*"),
        ("orders/2024-11", "orders/*-*"),
        ("3f2504e0-4f89-11d3-9a0c-0305e82c3301", "*"),
        ("u/3f2504e0-4f89-11d3-9a0c-030578223301/x", "u/*/x"),
        ("file/9f86d081884c7d65", "file/*"),
        ("x/01ARZ3NDEKTSV4RRFFQ69G5FAV", "x/*"),
        ("deadbeef", "deadbeef"),
    ],
)
def test_the_varying_parts_of_a_name_are_masked(name: str, class_name: str) -> None:
    order = LockClasses()
    for _ in range(2):  # the second time from the cache
        cls = order.class_of(name)
        assert cls is not None
        assert (cls.name, cls.is_name) == (class_name, class_name == name)


def test_rules_make_classes() -> None:
    order = LockClasses(parse_rules("accounts/*, config/*=ignored"))
    names = ["accounts/alice", "accounts/bob", "accounts/bob/7", "config/a7"]
    classes = [order.class_of(name) for name in names]
    assert [cls and (cls.name, cls.treatment) for cls in classes] == [
        ("accounts/*", "checked"),
        ("accounts/*", "checked"),
        ("accounts/bob/*", "checked"),
        ("config/*", "ignored"),
    ]


@pytest.mark.parametrize("text", ["a=b", "=ordered", "a/*,b=Ordered"])
def test_an_invalid_rule_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="must be PATTERN, PATTERN=ordered or PATTERN=ignored"):
        parse_rules(text)


# -- inversions -------------------------------------------------------------------------------------------


def test_two_classes_in_both_orders() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "accounts/1", "orders/5", name="pay")
    assert order.inversions.found == []
    run_transaction(manager, "orders/9", "accounts/3", name="ship")
    run_transaction(manager, "orders/8", "accounts/4", name="ship")
    (inversion,) = order.inversions.found
    assert (inversion.kind, inversion.classes) == ("cycle", ("orders/*", "accounts/*"))
    examples = [(edge.example.transaction, edge.example.held, edge.example.asked) for edge in inversion.edges]
    assert examples == [("ship", "orders/9", "accounts/3"), ("pay", "accounts/1", "orders/5")]
    assert [edge.count for edge in inversion.edges] == [2, 1]
    assert order.inversions.take_unreported() == [inversion]
    assert order.inversions.take_unreported() == []


def offenders(order: LockOrder) -> list[str]:
    return [inversion.offender for inversion in order.inversions.found]


def test_each_offender_of_two_classes_is_an_inversion_but_the_usual_order_is_none() -> None:
    manager, order = observed_manager()
    for number in range(3):
        run_transaction(manager, "accounts/1", "orders/5", name=f"pay-{number}")
    run_transaction(manager, "orders/9", "accounts/3", name="ship-7")
    for number in range(3):
        run_transaction(manager, "orders/9", "accounts/3", name=f"ship-{number}")
        run_transaction(manager, "orders/8", "accounts/4", name=f"refund-{number}")
        run_transaction(manager, "accounts/1", "orders/5", name=f"bill-{number}")  # in the usual order
    assert offenders(order) == ["ship-*", "refund-*"]
    assert order.inversions.count == 2
    assert order.inversions.take_unreported() == order.inversions.found
    first, second = order.inversions.found
    assert first.description == "orders/* and accounts/* are locked in both orders"
    assert second.description == "orders/* and accounts/* are locked in both orders, also by refund-*"
    assert [edge.example.transaction for edge in second.edges] == ["refund-0", "pay-0"]
    assert [edge.count for edge in second.edges] == [3, 6]


def test_each_offender_within_a_class_and_of_an_upgrade_is_an_inversion() -> None:
    manager, order = observed_manager()
    for name in ("a-1", "b-1", "a-2", "b-2"):
        run_transaction(manager, "accounts/2", "accounts/1", name=name)
        run_transaction(manager, "accounts/1", "accounts/2", name=f"good-{name}")
        run_transaction(manager, "s:x", "x", name=name)
    assert [(inversion.kind, inversion.offender) for inversion in order.inversions.found] == [
        ("members", "a-*"),
        ("upgrade", "a-*"),
        ("members", "b-*"),
        ("upgrade", "b-*"),
    ]


def test_an_offender_takes_the_place_of_the_edge_that_is_most_like_its_own() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/9", "a/10", name="move-1")
    run_transaction(manager, "a/10", "a/9", name="move-2")
    run_transaction(manager, "a/10", "a/9", name="shift-1")
    run_transaction(manager, "a/2", "a/1", name="turn-1")
    assert offenders(order) == ["move-*", "shift-*", "turn-*"]
    examples = [[edge.example.transaction for edge in inversion.edges] for inversion in order.inversions.found]
    assert examples == [["move-1", "move-2"], ["move-1", "shift-1"], ["turn-1", "move-2"]]


def test_an_offender_in_another_mode_is_an_inversion() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a", "b", name="pay-1")
    run_transaction(manager, "a", "b", name="pay-2")
    run_transaction(manager, "b", "a", name="ship-1")
    run_transaction(manager, "s:b", "a", name="ship-2")
    run_transaction(manager, "s:b", "a", name="refund-1")
    run_transaction(manager, "a", "s:b", name="bill-1")  # in the usual order
    assert offenders(order) == ["ship-*", "refund-*"]


def test_an_offender_that_holds_a_common_lock_is_none() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a", "b", name="pay-1")
    run_transaction(manager, "a", "b", name="pay-1")
    run_transaction(manager, "b", "a", name="ship-1")
    assert offenders(order) == ["ship-*"]
    run_transaction(manager, "outer", "b", "a", name="refund-1")
    assert offenders(order) == ["ship-*", "refund-*"], "payments do not hold the outer lock"


def test_the_offenders_of_a_class_are_bounded() -> None:
    manager, order = observed_manager()
    for number in range(2 * MAX_OFFENDERS):
        stem = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        run_transaction(manager, "accounts/2", "accounts/1", name=f"by {stem}")
    assert len(order.inversions.found) == order.inversions.count == MAX_OFFENDERS
    run_transaction(manager, "b", "a", name="1")
    run_transaction(manager, "a", "b", name="2")
    assert order.inversions.count == MAX_OFFENDERS + 1


def test_descending_by_one_kind_of_comparison_has_a_name() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/9", "a/10")
    run_transaction(manager, "a/10", "a/9")
    run_transaction(manager, "a/2", "a/1")
    assert {edge.relation for edge in order.graph.by_key.values()} == {
        "descending by text",
        "descending by number",
        "descending",
    }


def test_a_cycle_of_three_classes() -> None:
    manager, order = observed_manager()
    for held, asked in ["ab", "bc", "ca"]:
        run_transaction(manager, held, asked)
    assert found(order.inversions.found) == {("cycle", frozenset("abc"))}


def test_one_request_and_requests_without_a_transaction_add_no_edge() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a b", name="t1")
    run_transaction(manager, "b a", name="t2")
    for names in ("ab", "ba"):
        for name in names:
            manager.step(requested(f"{names}/{name}", transaction=None), 0)
    assert order.graph.by_key == {}


def test_a_request_that_does_not_wait_adds_no_edge_but_its_locks_are_held() -> None:
    manager, order = observed_manager()
    for request in [requested("a"), requested("b", queue_timeout_ms=0), requested("c")]:
        manager.step(request, 0)
    assert {(edge.held.name, edge.asked.name) for edge in order.graph.by_key.values()} == {("a", "c"), ("b", "c")}


@pytest.mark.parametrize(
    ("transactions", "is_inversion"),
    [
        (["1 2", "3 7", "9 10"], False),  # as numbers
        (["1 10", "10 9"], False),  # as characters
        (["7 3"], True),
        (["007 12", "12 100"], False),
        (["12 007"], True),
        (["9 10", "10 9"], True),  # neither as numbers nor as characters
        (["1 3 2"], True),
        (["s:7 s:3"], False),
        (["s:7 s:3", "3 7"], True),
    ],
)
def test_the_names_of_one_class_are_locked_in_ascending_order(transactions: list[str], is_inversion: bool) -> None:
    manager, order = observed_manager()
    for numbers in transactions:
        run_transaction(manager, *(f"s:a/{each[2:]}" if each[0] == "s" else f"a/{each}" for each in numbers.split()))
    assert found(order.inversions.found) == ({("members", frozenset({"a/*"}))} if is_inversion else set())


def test_the_names_that_a_request_adds_are_compared_with_all_held_names() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/1 a/5 b/1", "a/3 b/2")
    assert found(order.inversions.found) == {("members", frozenset({"a/*"})), ("cycle", frozenset({"a/*", "b/*"}))}


def test_a_name_without_a_number_is_not_a_member_of_the_class_with_numbers() -> None:
    manager, order = observed_manager()
    for held, asked in [("a/1", "b/1"), ("b/", "a/")] * 2:
        run_transaction(manager, held, asked)
    assert order.inversions.found == []
    run_transaction(manager, "a/", "b/")
    assert found(order.inversions.found) == {("cycle", frozenset({"a/", "b/"}))}


def test_a_released_lock_is_not_held_any_more() -> None:
    manager, order = observed_manager()
    first, second = requested("a"), requested("b")
    for request in (first, second, requested("c")):
        manager.step(request, 0)
    manager.step(Release(first.id), 0)
    manager.step(requested("d"), 0)
    edges = {(edge.held.name, edge.asked.name) for edge in order.graph.by_key.values()}
    assert edges == {("a", "b"), ("a", "c"), ("b", "c"), ("b", "d"), ("c", "d")}


def test_both_orders_of_the_names_of_one_request_are_compared() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/2", "a/3 a/10")  # descending as characters
    assert order.inversions.found == []
    run_transaction(manager, "a/10", "a/9")  # descending as numbers
    assert found(order.inversions.found) == {("members", frozenset({"a/*"}))}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (("a/2", "a/**"), "a lock below a/** is upgraded to a lock on all names below it"),
        (("s:a/2", "a/**"), "a lock below a/** is upgraded to a lock on all names below it"),
        (("a/2", "s:a/**"), "a lock below a/** is upgraded to a lock on all names below it"),
        (("s:a/b/**", "**"), "a lock below ** is upgraded to a lock on all names below it"),
        (("s:a/**", "a/**"), "a shared lock on a/** is upgraded to an exclusive lock"),
        (("s:a/2", "s:a/**"), None),
        (("b/2", "a/**"), None),
        (("a/b/**", "**"), None),  # only one transaction at a time holds this name
        (("a/**", "a/2", "a/**"), None),
    ],
)
def test_a_subtree_after_a_lock_below_it_is_an_upgrade(steps: tuple[str, ...], expected: str | None) -> None:
    manager, order = observed_manager()
    run_transaction(manager, *steps)
    assert [inversion.description for inversion in order.inversions.found] == ([] if expected is None else [expected])


@pytest.mark.parametrize(("held", "mode"), [("a/2", "exclusive"), ("s:a/2", "shared")])
def test_an_upgrade_to_a_subtree_names_the_mode_of_the_lock_below_it(held: str, mode: str) -> None:
    manager, order = observed_manager()
    run_transaction(manager, held, "a/**")
    (edge,) = order.inversions.found[0].edges
    assert (edge.example.held, edge.held_mode) == ("a/2", mode)
    assert (edge.example.asked, edge.asked_mode) == ("a/**", "exclusive")


def test_an_upgrade_after_another_order_of_the_same_classes_is_found() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/1/x", "a/2/**")
    assert not order.inversions.found
    run_transaction(manager, "a/1/x", "a/1/**")
    assert found(order.inversions.found) == {("upgrade", frozenset({"a/*/**"}))}


def test_locks_below_a_held_subtree_are_no_inversion() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/**", "a/2", "a/1")
    assert not order.inversions.found
    assert not order.graph.by_key


def test_more_units_of_a_held_resource_are_an_upgrade() -> None:
    manager, order = observed_manager()
    for _ in range(2):
        request = Request(transaction="t")
        request.details = details_of((), (), {"pool": (1, 3)})
        manager.step(request, 0)
    (inversion,) = order.inversions.found
    assert inversion.description == "units of pool are held while more of it is requested"


def test_an_upgrade_can_deadlock_with_itself() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:a/1", "s:a/1")
    run_transaction(manager, "a/1", "s:a/1")
    assert order.inversions.found == []
    run_transaction(manager, "s:a/1", "a/1")
    assert found(order.inversions.found) == {("upgrade", frozenset({"a/*"}))}


def test_shared_locks_do_not_conflict() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:a", "s:b")
    run_transaction(manager, "s:b", "s:a")
    run_transaction(manager, "a", "s:b")
    run_transaction(manager, "s:b", "a")  # they conflict on `a`, but not on `b`
    assert order.inversions.found == []
    run_transaction(manager, "b", "a")
    assert found(order.inversions.found) == {("cycle", frozenset("ab"))}


def test_a_common_outer_lock_guards_an_inversion_until_it_is_omitted() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "guard", "a/1", "b/1")
    run_transaction(manager, "guard", "b/1", "a/1")
    assert order.inversions.found == []
    assert [(each.classes, each.guards) for each in order.inversions.guarded] == [(("b/*", "a/*"), ("guard",))]
    run_transaction(manager, "b/1", "a/1")
    assert found(order.inversions.found) == {("cycle", frozenset({"a/*", "b/*"}))}
    assert order.inversions.guarded == []


def test_a_lock_that_is_taken_afterwards_is_no_guard() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/1", "b/1", "guard", "c")
    run_transaction(manager, "guard", "b/1", "a/1")
    assert found(order.inversions.found) == {
        ("cycle", frozenset({"a/*", "b/*"})),
        ("cycle", frozenset({"a/*", "guard"})),
        ("cycle", frozenset({"b/*", "guard"})),
    }


def test_a_shared_outer_lock_is_no_guard() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:guard", "a", "b")
    run_transaction(manager, "s:guard", "b", "a")
    assert found(order.inversions.found) == {("cycle", frozenset("ab"))}


def test_a_guard_is_shared_once_a_transaction_has_held_it_so() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "guard", "a", "b")
    run_transaction(manager, "s:guard", "a", "b")
    run_transaction(manager, "s:guard", "b", "a")
    assert found(order.inversions.found) == {("cycle", frozenset("ab"))}


def test_a_lock_that_was_released_without_a_step_is_not_held() -> None:
    manager, order = observed_manager()
    requests = [requested(name) for name in ("a", "b", "c")]
    for request in requests:
        assert manager.grant_if_uncontended(request, 0)
    assert manager.release_if_uncontended(requests[0].id, requests[0].origin) is requests[0]
    assert manager.grant_if_uncontended(requested("d"), 0)
    assert {edge.held.name for edge in order.graph.by_key.values() if edge.asked.name == "d"} == {"b", "c"}


def test_members_of_a_class_are_no_guard() -> None:
    """`users/1` and `users/2` are of one class, but do not keep two transactions apart."""
    manager, order = observed_manager()
    run_transaction(manager, "users/1", "a", "b")
    run_transaction(manager, "users/2", "b", "a")
    assert found(order.inversions.found) == {("cycle", frozenset("ab"))}


def test_classes_can_be_declared_ordered_or_ignored() -> None:
    manager, order = observed_manager("a/*=ordered,b=ignored")
    run_transaction(manager, "a/7", "a/3")
    run_transaction(manager, "a/1", "b")
    run_transaction(manager, "b", "a/1")
    assert order.inversions.found == []


def test_parallel_requests_of_a_transaction_add_the_edge_of_what_is_granted_first() -> None:
    """A transaction may wait for two locks at once, and then hold the one while it waits for the other."""
    manager, order = observed_manager()
    holders = [requested(name, transaction=f"holder of {name}") for name in "ab"]
    waiters = [requested(name) for name in "ab"]
    for request in holders + waiters:
        manager.step(request, 0)
    assert order.graph.by_key == {}
    manager.step(Release(holders[1].id), 0)
    assert [(edge.held.name, edge.asked.name) for edge in order.graph.by_key.values()] == [("b", "a")]
    assert manager.grant_if_uncontended(requested("c"), 0)
    assert {(edge.held.name, edge.asked.name) for edge in order.graph.by_key.values()} == {
        ("b", "a"),
        ("b", "c"),
        ("c", "a"),
    }


def test_requests_that_are_granted_without_a_step_are_observed() -> None:
    manager, order = observed_manager()
    for name in "ab":
        assert manager.grant_if_uncontended(requested(name), 0)
    assert [(edge.held.name, edge.asked.name) for edge in order.graph.by_key.values()] == [("a", "b")]


# -- many transactions ------------------------------------------------------------------------------------


def test_ten_services_with_known_orders() -> None:
    """Each service locks its classes in its own order. The inversions are exactly the pairs that services disagree about."""
    orders = [
        *("accounts orders", "orders stock", "accounts stock", "customers accounts", "stock shipments"),
        *("prices orders", "orders prices", "shipments customers", "invoices accounts", "accounts invoices"),
    ]
    manager, order = observed_manager()
    random = Random(7)  # noqa: S311
    for _ in range(20):
        for service, classes in enumerate(random.sample(orders, len(orders))):
            steps = [f"{name}/{random.randrange(1000)}" for name in classes.split()]
            run_transaction(manager, *steps, name=f"service {service}")
    pairs = {each for each in found(order.inversions.found) if len(each[1]) == 2}
    assert pairs == {("cycle", frozenset({"prices/*", "orders/*"})), ("cycle", frozenset({"accounts/*", "invoices/*"}))}
    cycles = {each for each in found(order.inversions.found) if len(each[1]) > 2}
    customers = {"customers/*", "accounts/*", "stock/*", "shipments/*"}
    assert cycles
    assert all(kind == "cycle" and customers <= classes for kind, classes in cycles)
    assert order.inversions.guarded == []


def test_services_that_agree_about_the_order_have_no_inversion() -> None:
    manager, order = observed_manager()
    random = Random(3)  # noqa: S311
    for _ in range(500):
        classes = sorted(random.sample("abcdefghij", 4))
        run_transaction(manager, *(f"{name}/{random.randrange(100)}" for name in classes))
    assert len(order.graph.by_key) > 40
    assert (order.inversions.found, order.inversions.guarded) == ([], [])


@pytest.mark.parametrize("seed", range(12))
def test_each_deadlock_was_predicted(seed: int) -> None:
    """Random transactions, some with parallel requests and shared locks, until many of them have deadlocked."""
    random = Random(seed)  # noqa: S311
    manager, order = observed_manager()
    held: dict[str, list[Request]] = {}
    deadlocks = 0
    for _ in range(3_000):
        name = f"t{random.randrange(6)}"
        requests = held.setdefault(name, [])
        if len(requests) > 4 or (requests and random.random() < 0.15):
            for request in requests:
                manager.step(Release(request.id), 0)
            requests.clear()
            continue
        prefix, kind = random.choice(["", "", "s:"]), random.choice("abc")
        request = requested(f"{prefix}{kind}/{random.randrange(3)}", transaction=name)
        for event in manager.step(request, 0):
            if isinstance(event, Deadlocked):
                deadlocks += 1
                classes = {f"{wait.resource[0]}/*" for wait in event.cycle.waits}
                assert any(set(inversion.classes) <= classes for inversion in order.inversions.found), event
        requests.append(request)
    assert deadlocks > 50


# -- bounds -----------------------------------------------------------------------------------------------


def test_classes_edges_and_inversions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes_module, "MAX_CLASSES", 6)
    monkeypatch.setattr(classes_module, "MAX_CACHED_NAMES", 3)
    monkeypatch.setattr(edges, "MAX_EDGES", 5)
    monkeypatch.setattr(inversions, "MAX_INVERSIONS", 1)
    manager, order = observed_manager()
    for some, other in pairwise("abcdefghi"):
        run_transaction(manager, some, other)
        run_transaction(manager, other, some)
    assert (len(order.classes.by_name), len(order.graph.by_key), len(order.inversions.found)) == (6, 5, 1)
    assert order.inversions.count == 2
    assert order.dropped > 0


def test_the_names_of_a_request_are_bounded() -> None:
    manager, order = observed_manager()
    names = [f"a/{number:03}" for number in range(classes_module.MAX_NAMES + 1)]
    run_transaction(manager, " ".join(names), "b")
    assert order.dropped == 1
    run_transaction(manager, "b", " ".join(names))
    assert order.dropped == 2
    assert found(order.inversions.found) == {("cycle", frozenset({"a/*", "b"}))}


def test_rules_with_many_stars_take_linear_time() -> None:
    """With a search for each place of each part, this test would not end: there are more than 10**20 combinations."""
    order = LockClasses(parse_rules("*a" * 12 + "*b"))
    for name, matches in ("a" * 512, False), ("ab" * 256, True), ("ab" * 200 + "a", False):
        found = order.class_of(name)
        assert found is not None
        assert found.is_name is not matches


def test_a_pattern_matches_the_names_that_its_parts_match_with_any_characters_but_slashes_between() -> None:
    chance = Random(7)  # noqa: S311
    for _ in range(3_000):
        pattern = "".join(chance.choices("ab/*", k=chance.randrange(1, 8)))
        regex = re.compile("[^/]*".join(re.escape(part) for part in pattern.split("*")))
        name = "".join(chance.choices("aab/", k=chance.randrange(1, 9)))
        found = LockClasses([Rule(pattern, Treatment.ORDERED)]).class_of(name)
        assert found is not None
        assert (found.treatment is Treatment.ORDERED) is (regex.fullmatch(name) is not None), (pattern, name)


@pytest.mark.parametrize("names_of_a_request", [1, 32])
def test_the_memory_of_held_classes_is_within_what_the_requests_count(names_of_a_request: int) -> None:
    """Each name is a class of its own, so that a transaction has as many held classes and guards as possible."""
    manager, _ = observed_manager()
    names = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase][:64]

    def run_transactions(prefix: str, count: int) -> None:
        for number in range(count):
            for index in range(0, len(names), names_of_a_request):
                shared = tuple(names[index : index + names_of_a_request])
                manager.step(Request(shared=shared, transaction=f"{prefix} {number}"), 0)

    run_transactions("classes and edges", 1)
    gc.collect()
    tracemalloc.start()
    try:
        run_transactions("t", 100)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    held = manager.table.transactions["t 99"].held_classes
    assert held is not None
    assert len(held.by_id) >= 32
    requests = 100 * 64 // names_of_a_request
    assert taken < requests * REQUEST_BYTES + 100 * 64 * NAME_BYTES, taken / requests
