"""The invariants of a recovered state: compared with the slow checks of the simulator, which compare all pairs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genie.core import HELD, LockManager, Request
from genie.core.invariants import find_violations
from genie.core.model import WAITING, details_of
from genie.lock_modes import UnitCount, is_subtree
from simulator import invariants as slow
from unit.core.lock_theory import conflict, meeting, reduce
from unit.core.test_lock_kinds import to_entry

NAMES = ("a", "b", "c")


def request_of(
    id_: int,
    *,
    held: bool,
    exclusive: tuple[str, ...] = (),
    shared: tuple[str, ...] = (),
    units: dict[str, UnitCount] | None = None,
    transaction: str | None = None,
) -> Request:
    request = Request(shared, exclusive, transaction=transaction)
    request.details = details_of(shared, exclusive, units)
    request.id, request.owner = id_, transaction or id_
    request.since = request.since_unix_ms = 0.0
    request.simple = False
    request.deadline = 1
    if held:
        request.state, request.fence = HELD, id_
    else:
        request.state, request.queue_entry = WAITING, (0.0, id_, request)
    return request


@st.composite
def stored(draw: st.DrawFn) -> list[Request]:
    requests = []
    for id_ in range(1, draw(st.integers(1, 7)) + 1):
        modes = draw(st.dictionaries(st.sampled_from(NAMES), st.booleans(), min_size=1))
        requests.append(
            request_of(
                id_,
                held=draw(st.booleans()),
                exclusive=tuple(name for name, exclusive in modes.items() if exclusive),
                shared=tuple(name for name, exclusive in modes.items() if not exclusive),
                transaction=draw(st.sampled_from(["t", "u", "v", None])),
            )
        )
    return requests


def violates(check: object, manager: LockManager) -> bool:
    try:
        check(manager)  # type: ignore[operator]
    except slow.Violation:
        return True
    return False


@st.composite
def stored_of_all_kinds(draw: st.DrawFn) -> list[Request]:
    requests = []
    for id_ in range(1, draw(st.integers(1, 6)) + 1):
        names = draw(st.lists(st.sampled_from(["a/1", "a/2", "a/**", "**", "c"]), min_size=1, max_size=3, unique=True))
        kinds = [draw(st.sampled_from("SX" if is_subtree(name) else "SXUU")) for name in names]
        limits = [draw(st.integers(1, 3)) for _ in names]
        requests.append(
            request_of(
                id_,
                held=draw(st.booleans()),
                exclusive=tuple(name for name, kind in zip(names, kinds, strict=True) if kind == "X"),
                shared=tuple(name for name, kind in zip(names, kinds, strict=True) if kind == "S"),
                units={
                    name: (draw(st.integers(1, limit)), limit)
                    for name, kind, limit in zip(names, kinds, limits, strict=True)
                    if kind == "U"
                },
                transaction=draw(st.sampled_from(["t", "u", "v", None])),
            )
        )
    return requests


@given(stored_of_all_kinds())
def test_violations_of_all_kinds_of_locks_are_those_of_the_theory(requests: list[Request]) -> None:
    entries = [to_entry(request) for request in requests]
    held = [entry for entry in entries if entry.held]
    conflicting = any(
        one.owner != other.owner and meeting(lock.name, theirs.name) is not None and conflict(lock, theirs)
        for one, other in combinations(held, 2)
        for lock in one.locks
        for theirs in other.locks
    )
    exceeded = any(
        sum(lock.units for each in held[:position] for lock in each.locks if lock.name == own.name and lock.units)
        > own.of
        for position, entry in enumerate(held, 1)
        for own in entry.locks
        if own.mode == "units"
    )
    violations = list(find_violations(requests))
    assert any("both hold" in violation for violation in violations) == conflicting, entries
    assert any("units were in use" in violation for violation in violations) == exceeded
    if not conflicting and not exceeded:
        deadlocked = reduce(entries, in_queue_order=True)[1]
        assert any("in a cycle" in violation for violation in violations) == bool(deadlocked), entries
        manager = LockManager()
        for request in requests:
            manager.adopt(request)
        assert violates(slow._check_all_owners_finish, manager) == bool(deadlocked), entries
        assert bool(violations) == bool(deadlocked)


def cycle_over_subtree() -> list[Request]:
    return [
        request_of(1, held=True, exclusive=("a/1",), transaction="t"),
        request_of(2, held=True, exclusive=("b",), transaction="u"),
        request_of(3, held=False, exclusive=("b",), transaction="t"),
        request_of(4, held=False, exclusive=("a/**",), transaction="u"),
    ]


def cycle_over_limit_of_earlier_waiter() -> list[Request]:
    """The units of the last request fit beside those of the earlier one, but not into its limit."""
    return [
        request_of(1, held=True, exclusive=("x",), transaction="t"),
        request_of(2, held=False, exclusive=("x",), units={"pool": (1, 2)}, transaction="u"),
        request_of(3, held=False, units={"pool": (2, 3)}, transaction="t"),
    ]


@pytest.mark.parametrize("make", [cycle_over_subtree, cycle_over_limit_of_earlier_waiter])
def test_cycles_of_all_kinds_of_locks(make: Callable[[], list[Request]]) -> None:
    """Without any one of the requests there is no cycle."""
    for without in (None, *range(len(make()))):
        requests = [request for index, request in enumerate(make()) if index != without]
        assert bool(reduce(map(to_entry, requests), in_queue_order=True)[1]) == (without is None)
        manager = LockManager()
        for request in requests:
            manager.adopt(request)
        assert violates(slow._check_all_owners_finish, manager) == (without is None)
        assert any("in a cycle" in violation for violation in find_violations(requests)) == (without is None)


def test_units_may_exceed_the_limit_of_an_earlier_holder() -> None:
    earlier, later = (request_of(id_, held=True, units={"pool": (2, limit)}) for id_, limit in ((1, 3), (2, 4)))
    assert not list(find_violations([earlier, later]))
    earlier.fence, later.fence = 2, 1
    assert list(find_violations([earlier, later])) == ["request 1 holds '2/3:pool', and 4 units were in use with it"]


@pytest.mark.parametrize("units", [{"a/**": (1, 2)}, {"a": (3, 2)}, {"a": (0, 2)}])
def test_units_that_cannot_be_granted(units: dict[str, UnitCount]) -> None:
    (violation,) = find_violations([request_of(1, held=False, units=units)])
    assert violation.endswith("which cannot be granted")


def test_positions_in_the_queue_of_a_subtree_are_unique() -> None:
    requests = [request_of(id_, held=False, exclusive=(f"a/{id_}",)) for id_ in (1, 2)]
    requests[1].move("a/**", (0.0, 1, requests[1]))
    assert not list(find_violations(requests)), "no request names the subtree"
    requests.append(request_of(3, held=True, exclusive=("a/**",)))
    assert list(find_violations(requests)) == ["requests 1 and 2 have the same position in the queue of 'a/**'"]


@given(stored())
def test_conflicts_and_cycles_are_those_of_the_slow_checks(requests: list[Request]) -> None:
    manager = LockManager()
    for request in requests:
        manager.adopt(request)
    violations = list(find_violations(requests))
    conflict = violates(slow._check_no_conflicting_holders, manager)
    assert any("both hold" in violation for violation in violations) == conflict
    if not conflict:
        cycle = violates(slow._check_all_owners_finish, manager)
        assert any("in a cycle" in violation for violation in violations) == cycle
        assert bool(violations) == cycle


def test_a_waiting_request_needs_no_blocker() -> None:
    """Its blocker may have been a waiting request without a session, which is not stored."""
    waiting = request_of(1, held=False, exclusive=("a",), shared=(), transaction=None)
    assert not list(find_violations([waiting]))


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ((1, True, "a"), (2, True, "b"), "both have the fencing token 1"),
        ((1, False, "a"), (2, False, "a"), "have the same position in the queue of 'a'"),
    ],
)
def test_what_must_be_unique(first: tuple[int, bool, str], second: tuple[int, bool, str], message: str) -> None:
    requests = [
        request_of(id_, held=held, exclusive=(name,), shared=(), transaction=None)
        for id_, held, name in (first, second)
    ]
    assert not list(find_violations(requests))
    requests[1].fence = requests[0].fence
    if requests[1].queue_entry is not None:
        requests[1].move("a", (0.0, 1, requests[1]))
    (violation,) = find_violations(requests)
    assert violation.endswith(message)
