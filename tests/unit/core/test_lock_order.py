"""Lock order analysis: every inversion of what was seen is found, none is invented, and every deadlock was predicted."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from random import Random
from string import ascii_lowercase

import pytest

from genie.core import Deadlocked, LockManager, Release, Request
from genie.core import lock_order as module
from genie.core.lock_order import MAX_OFFENDERS, Inversion, LockOrder, parse_rules


def observed_manager(rules: str = "", max_per_s: float = inf) -> tuple[LockManager, LockOrder]:
    manager = LockManager()
    manager.lock_order = LockOrder(parse_rules(rules), max_per_s)
    return manager, manager.lock_order


def requested(*names: str, transaction: str | None = "t", **options: float) -> Request:
    """A request of `transaction`; a name that begins with `s:` is requested in shared mode."""
    shared = tuple(name[2:] for name in names if name.startswith("s:"))
    exclusive = tuple(name for name in names if not name.startswith("s:"))
    return Request(shared, exclusive, transaction=transaction, **options)  # type: ignore[arg-type]


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
    assert len(lock_order.classes) == 640
    assert max(len(edge.guards) for edge in lock_order.edges.values()) <= module.MAX_GUARDS
    assert len({edge.held for edge in lock_order.edges.values()}) <= module.MAX_HELD_CLASSES
    assert lock_order.dropped


def test_the_search_for_the_cycles_of_a_request_is_bounded() -> None:
    """A request makes 1,024 edges at once, each in a cycle."""
    manager, lock_order = observed_manager()
    names = [f"{first}{second}" for first in ascii_lowercase for second in ascii_lowercase]
    steps = [" ".join(names[index : index + 32]) for index in (0, 32)]
    run_transaction(manager, *steps)
    run_transaction(manager, *reversed(steps))
    assert module.MAX_SEARCH_STEPS < lock_order._search_steps <= module.MAX_SEARCH_STEPS + len(lock_order.classes)
    assert lock_order.inversion_count
    assert lock_order.dropped


def test_numbers_before_the_end_of_a_name_are_compared_as_numbers() -> None:
    manager, lock_order = observed_manager("jobs/*/*")
    for ascending in (("jobs/2/b", "jobs/10/a"), ("jobs/1/x", "jobs/2/a"), ("jobs/9/a", "jobs/10/a")):
        run_transaction(manager, *ascending)
    assert found(lock_order.inversions) == set()
    run_transaction(manager, "jobs/10/a", "jobs/2/b")
    assert found(lock_order.inversions) == {("members", frozenset({"jobs/*/*"}))}


def test_a_request_that_is_not_analysed_completely_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLASSES", 1)
    manager, lock_order = observed_manager()
    manager.step(requested("a"), 0)
    for count in (1, 2):
        manager.step(requested("b", "c", "d"), 0)
        assert lock_order.dropped == count


def run_batches(manager: LockManager, seconds: range, clients: str, size: int) -> None:
    """Each client executes `size` transactions in each of 100 batches a second, always in the same order and at once."""
    for now in range(seconds.start * 1_000, seconds.stop * 1_000, 10):
        for client in clients:
            for _ in range(size):
                first, second = (requested(f"{client}/{part}", transaction=client) for part in "xy")
                for request in (first, second):
                    assert manager.grant_if_uncontended(request, now)
                for request in (first, second):
                    assert manager.release_if_uncontended(request.id, None)


def test_beyond_a_rate_a_fair_selection_of_the_requests_that_do_not_wait_is_analysed() -> None:
    manager, lock_order = observed_manager(max_per_s=200)
    run_batches(manager, range(2), "a", 1)  # 100 requests a second that add an edge
    (edge,) = lock_order.edges.values()
    assert (edge.count, lock_order.limited_unix_ms) == (200, None)

    run_batches(manager, range(2, 12), "abcd", 5)  # 2,000 a second
    counts = {edge.held.name: edge.count - 200 * (edge.held.name == "a/x") for edge in lock_order.edges.values()}
    assert counts.keys() == {"a/x", "b/x", "c/x", "d/x"}
    assert 2_000 < sum(counts.values()) < 3_000  # with the credit of a second
    assert min(counts.values()) > 400  # no client is left out because of its place in the batch
    assert lock_order.limited_unix_ms is not None

    run_batches(manager, range(20, 22), "e", 1)  # the rate is low again
    assert max(lock_order.edges.values(), key=lambda edge: edge.example.id).count > 150


def test_a_clock_that_is_set_back_does_not_end_the_analysis() -> None:
    lock_order = LockOrder(max_per_s=1)
    for unix_ms in (1e12, 1e12, 1e12):
        lock_order.charge(unix_ms)
    left_out = [lock_order.charge(1e12 - 1e9 + index * 2_000) for index in range(5)]
    assert left_out[1:] == [0] * 4


def test_a_request_that_waits_is_always_analysed() -> None:
    manager, lock_order = observed_manager(max_per_s=0.001)
    manager._left_out = 1_000
    for name in ("c", "d"):
        blocker, first, second = requested(name, transaction=None), requested("x"), requested(name)
        for request in (blocker, first, second):
            manager.step(request, 0)
        for request in (blocker, first, second):
            manager.step(Release(request.id), 0)
    run_transaction(manager, "x", "e")
    assert sorted((edge.held.name, edge.asked.name) for edge in lock_order.edges.values()) == [("x", "c"), ("x", "d")]


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
    assert found(lock_order.inversions) == (set() if guard else inversion)
    assert found(lock_order.guarded) == (inversion if guard else set())


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
    order = LockOrder()
    for _ in range(2):  # the second time from the cache
        cls = order.class_of(name)
        assert cls is not None
        assert (cls.name, cls.is_name) == (class_name, class_name == name)


def test_rules_make_classes() -> None:
    order = LockOrder(parse_rules("accounts/*, config/*=ignored"))
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
    assert order.inversions == []
    run_transaction(manager, "orders/9", "accounts/3", name="ship")
    run_transaction(manager, "orders/8", "accounts/4", name="ship")
    (inversion,) = order.inversions
    assert (inversion.kind, inversion.classes) == ("cycle", ("orders/*", "accounts/*"))
    examples = [(edge.example.transaction, edge.example.held, edge.example.asked) for edge in inversion.edges]
    assert examples == [("ship", "orders/9", "accounts/3"), ("pay", "accounts/1", "orders/5")]
    assert [edge.count for edge in inversion.edges] == [2, 1]
    assert order.take_unreported() == [inversion]
    assert order.take_unreported() == []


def offenders(order: LockOrder) -> list[str]:
    return [inversion.offender for inversion in order.inversions]


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
    assert order.inversion_count == 2
    assert order.take_unreported() == order.inversions
    first, second = order.inversions
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
    assert [(inversion.kind, inversion.offender) for inversion in order.inversions] == [
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
    examples = [[edge.example.transaction for edge in inversion.edges] for inversion in order.inversions]
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
    assert offenders(order) == ["ship-*", "refund-*"], "those who pay do not hold the outer lock"


def test_the_offenders_of_a_class_are_bounded() -> None:
    manager, order = observed_manager()
    for number in range(2 * MAX_OFFENDERS):
        stem = "".join(chr(ord("a") + int(digit)) for digit in str(number))
        run_transaction(manager, "accounts/2", "accounts/1", name=f"by {stem}")
    assert len(order.inversions) == order.inversion_count == MAX_OFFENDERS
    run_transaction(manager, "b", "a", name="1")
    run_transaction(manager, "a", "b", name="2")
    assert order.inversion_count == MAX_OFFENDERS + 1


def test_descending_by_one_kind_of_comparison_has_a_name() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/9", "a/10")
    run_transaction(manager, "a/10", "a/9")
    run_transaction(manager, "a/2", "a/1")
    assert {edge.relation for edge in order.edges.values()} == {
        "descending by text",
        "descending by number",
        "descending",
    }


def test_a_cycle_of_three_classes() -> None:
    manager, order = observed_manager()
    for held, asked in ["ab", "bc", "ca"]:
        run_transaction(manager, held, asked)
    assert found(order.inversions) == {("cycle", frozenset("abc"))}


def test_one_request_and_requests_without_a_transaction_add_no_edge() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a b", name="t1")
    run_transaction(manager, "b a", name="t2")
    for names in ("ab", "ba"):
        for name in names:
            manager.step(requested(f"{names}/{name}", transaction=None), 0)
    assert order.edges == {}


def test_a_request_that_does_not_wait_adds_no_edge_but_its_locks_are_held() -> None:
    manager, order = observed_manager()
    for request in [requested("a"), requested("b", queue_timeout_ms=0), requested("c")]:
        manager.step(request, 0)
    assert {(edge.held.name, edge.asked.name) for edge in order.edges.values()} == {("a", "c"), ("b", "c")}


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
    assert found(order.inversions) == ({("members", frozenset({"a/*"}))} if is_inversion else set())


def test_the_names_that_a_request_adds_are_compared_with_all_held_names() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/1 a/5 b/1", "a/3 b/2")
    assert found(order.inversions) == {("members", frozenset({"a/*"})), ("cycle", frozenset({"a/*", "b/*"}))}


def test_a_name_without_a_number_is_not_a_member_of_the_class_with_numbers() -> None:
    manager, order = observed_manager()
    for held, asked in [("a/1", "b/1"), ("b/", "a/")] * 2:
        run_transaction(manager, held, asked)
    assert order.inversions == []
    run_transaction(manager, "a/", "b/")
    assert found(order.inversions) == {("cycle", frozenset({"a/", "b/"}))}


def test_a_released_lock_is_not_held_any_more() -> None:
    manager, order = observed_manager()
    first, second = requested("a"), requested("b")
    for request in (first, second, requested("c")):
        manager.step(request, 0)
    manager.step(Release(first.id), 0)
    manager.step(requested("d"), 0)
    edges = {(edge.held.name, edge.asked.name) for edge in order.edges.values()}
    assert edges == {("a", "b"), ("a", "c"), ("b", "c"), ("b", "d"), ("c", "d")}


def test_both_orders_of_the_names_of_one_request_are_compared() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "a/2", "a/3 a/10")  # descending as characters
    assert order.inversions == []
    run_transaction(manager, "a/10", "a/9")  # descending as numbers
    assert found(order.inversions) == {("members", frozenset({"a/*"}))}


def test_an_upgrade_can_deadlock_with_itself() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:a/1", "s:a/1")
    run_transaction(manager, "a/1", "s:a/1")
    assert order.inversions == []
    run_transaction(manager, "s:a/1", "a/1")
    assert found(order.inversions) == {("upgrade", frozenset({"a/*"}))}


def test_shared_locks_do_not_conflict() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:a", "s:b")
    run_transaction(manager, "s:b", "s:a")
    run_transaction(manager, "a", "s:b")
    run_transaction(manager, "s:b", "a")  # they conflict on `a`, but not on `b`
    assert order.inversions == []
    run_transaction(manager, "b", "a")
    assert found(order.inversions) == {("cycle", frozenset("ab"))}


def test_a_common_outer_lock_guards_an_inversion_until_it_is_omitted() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "guard", "a/1", "b/1")
    run_transaction(manager, "guard", "b/1", "a/1")
    assert order.inversions == []
    assert [(each.classes, each.guards) for each in order.guarded] == [(("b/*", "a/*"), ("guard",))]
    run_transaction(manager, "b/1", "a/1")
    assert found(order.inversions) == {("cycle", frozenset({"a/*", "b/*"}))}
    assert order.guarded == []


def test_a_shared_outer_lock_is_no_guard() -> None:
    manager, order = observed_manager()
    run_transaction(manager, "s:guard", "a", "b")
    run_transaction(manager, "s:guard", "b", "a")
    assert found(order.inversions) == {("cycle", frozenset("ab"))}


def test_members_of_a_class_are_no_guard() -> None:
    """`users/1` and `users/2` are of one class, but do not keep two transactions apart."""
    manager, order = observed_manager()
    run_transaction(manager, "users/1", "a", "b")
    run_transaction(manager, "users/2", "b", "a")
    assert found(order.inversions) == {("cycle", frozenset("ab"))}


def test_classes_can_be_declared_ordered_or_ignored() -> None:
    manager, order = observed_manager("a/*=ordered,b=ignored")
    run_transaction(manager, "a/7", "a/3")
    run_transaction(manager, "a/1", "b")
    run_transaction(manager, "b", "a/1")
    assert order.inversions == []


def test_parallel_requests_of_a_transaction_add_the_edge_of_what_is_granted_first() -> None:
    """A transaction may wait for two locks at once, and then hold the one while it waits for the other."""
    manager, order = observed_manager()
    holders = [requested(name, transaction=f"holder of {name}") for name in "ab"]
    waiters = [requested(name) for name in "ab"]
    for request in holders + waiters:
        manager.step(request, 0)
    assert order.edges == {}
    manager.step(Release(holders[1].id), 0)
    assert [(edge.held.name, edge.asked.name) for edge in order.edges.values()] == [("b", "a")]
    assert manager.grant_if_uncontended(requested("c"), 0)
    assert {(edge.held.name, edge.asked.name) for edge in order.edges.values()} == {("b", "a"), ("b", "c"), ("c", "a")}


def test_requests_that_are_granted_without_a_step_are_observed() -> None:
    manager, order = observed_manager()
    for name in "ab":
        assert manager.grant_if_uncontended(requested(name), 0)
    assert [(edge.held.name, edge.asked.name) for edge in order.edges.values()] == [("a", "b")]


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
    pairs = {each for each in found(order.inversions) if len(each[1]) == 2}
    assert pairs == {
        ("cycle", frozenset({"prices/*", "orders/*"})),
        ("cycle", frozenset({"accounts/*", "invoices/*"})),
    }
    cycles = {each for each in found(order.inversions) if len(each[1]) > 2}
    customers = {"customers/*", "accounts/*", "stock/*", "shipments/*"}
    assert cycles
    assert all(kind == "cycle" and customers <= classes for kind, classes in cycles)
    assert order.guarded == []


def test_services_that_agree_about_the_order_have_no_inversion() -> None:
    manager, order = observed_manager()
    random = Random(3)  # noqa: S311
    for _ in range(500):
        classes = sorted(random.sample("abcdefghij", 4))
        run_transaction(manager, *(f"{name}/{random.randrange(100)}" for name in classes))
    assert len(order.edges) > 40
    assert (order.inversions, order.guarded) == ([], [])


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
                assert any(set(inversion.classes) <= classes for inversion in order.inversions), event
        requests.append(request)
    assert deadlocks > 50


# -- bounds -----------------------------------------------------------------------------------------------


def test_classes_edges_and_inversions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in {"MAX_CLASSES": 6, "MAX_EDGES": 5, "MAX_INVERSIONS": 1, "MAX_CACHED_NAMES": 3}.items():
        monkeypatch.setattr(module, limit, value)
    manager, order = observed_manager()
    for some, other in pairwise("abcdefghi"):
        run_transaction(manager, some, other)
        run_transaction(manager, other, some)
    assert (len(order.classes), len(order.edges), len(order.inversions)) == (6, 5, 1)
    assert order.inversion_count == 2
    assert order.dropped > 0


def test_the_names_of_a_request_are_bounded() -> None:
    manager, order = observed_manager()
    names = [f"a/{number:03}" for number in range(module.MAX_NAMES + 1)]
    run_transaction(manager, " ".join(names), "b")
    assert order.dropped == 1
    run_transaction(manager, "b", " ".join(names))
    assert order.dropped == 2
    assert found(order.inversions) == {("cycle", frozenset({"a/*", "b"}))}
